"""Dropout masks, drawn as torch draws them, in less time, and ahead.

Off Intel's processors torch's ``bernoulli`` takes two 32-bit numbers of the generator (mt19937) for each element, one
element after the other: a sixth of a GPT's step (torch 2.13). Nearly half of that is not the generator's work but what
is done with each number, and this does it to many at once.

It remains the work of one core. So the masks of the next step are drawn while this one computes (:class:`Masks`).
"""

import functools
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

# elements drawn at a time: their 64-bit numbers fit a processor's second cache, and torch wakes no second thread
_AT_ONCE = 32768
# for fewer elements torch's own call is as fast
_WORTH_IT = 4096
# at::uniform_real_distribution<double> takes so many bits of a 64-bit number
_BITS = 53
# fewer are drawn in half a millisecond
_WORTH_A_THREAD = 2**17
_one_at_a_time = threading.Lock()


def bernoulli(x: torch.Tensor, p: float) -> torch.Tensor:
    """``aten::bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor``, from torch's own generator.

    Args:
        x: Gives shape, dtype, device and memory layout.
        p: Probability of 1.

    Returns:
        A tensor of zeros and ones: the same as torch's from the same state of the generator, which is left in the same
        state.

    """
    if x.device.type != "cpu" or not x.is_contiguous() or not draws_alike():
        return torch.bernoulli(x, p)
    return _bernoulli_(torch.empty_like(x), p, None)


def _bernoulli_(out: torch.Tensor, p: float, generator: torch.Generator | None) -> torch.Tensor:
    return _fill(out, p, generator) if out.numel() >= _WORTH_IT else out.bernoulli_(p, generator=generator)


class Masks:
    """The masks of a region, drawn together.

    Where two steps follow each other with nothing else drawn between them, those of the next one are drawn in another
    thread, from a copy of torch's generator. If it comes back as it was left, they are what it would draw now, and it
    is moved on to where that would leave it; if not, they are drawn now.

    Args:
        kinds: Of each mask its sizes, its dtype and the probability of 1, in order.

    """

    def __init__(self, kinds: Sequence[tuple[Sequence[int], torch.dtype, float]]) -> None:
        self._kinds = kinds
        elements = sum(math.prod(sizes) for sizes, _, _ in kinds)
        self._worth_a_thread = elements >= _WORTH_A_THREAD and torch.get_num_threads() > 1
        self._left: torch.Tensor | None = None
        self._was_alone = False
        self._hits = 0  # less the misses, had all been drawn ahead that could have been
        self._ahead: tuple[int, Future[tuple[list[torch.Tensor], torch.Tensor]]] | None = None

    def __call__(self) -> list[torch.Tensor]:
        """Return masks on the CPU: the same as from ``aten.bernoulli.p`` in turn, which leaves the same generator."""
        generator = torch.default_generator
        if not self._worth_a_thread:
            return self._draw(generator)
        with _one_at_a_time:  # no other thread's masks between reading the generator's state and moving it on
            return self._draw_or_take(generator)

    def _draw_or_take(self, generator: torch.Generator) -> list[torch.Tensor]:
        state = generator.get_state()
        alone = self._left is not None and torch.equal(state, self._left)
        ahead, self._ahead = self._ahead, None
        if alone and ahead is not None and ahead[0] == os.getpid():  # a forked process has no other threads
            masks, self._left = ahead[1].result()
            generator.set_state(self._left)
        else:
            masks = self._draw(generator)
            self._left = generator.get_state()
        if self._was_alone:
            self._hits += 1 if alone else -1
        self._was_alone = alone
        if alone and self._hits >= 0:
            self._ahead = os.getpid(), _thread().submit(self._draw_from, self._left)
        return masks

    def _draw_from(self, state: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        generator = torch.Generator()
        generator.set_state(state)
        return self._draw(generator), generator.get_state()

    def _draw(self, generator: torch.Generator) -> list[torch.Tensor]:
        empty = [(torch.empty(sizes, dtype=dtype, device="cpu"), p) for sizes, dtype, p in self._kinds]
        return [_bernoulli_(mask, p, generator) for mask, p in empty]


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "lightning_ort_masks")


def _start_anew() -> None:
    """In a forked process: its parent's other threads are not there, nor will they give the lock back."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()
    _thread.cache_clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_start_anew)


def _fill(out: torch.Tensor, p: float, generator: torch.Generator | None) -> torch.Tensor:
    flat, words = out.view(-1), torch.empty(min(out.numel(), _AT_ONCE), dtype=torch.int64)
    below = math.ceil(p * 2**_BITS)  # exact: a double's 53 bits, moved
    for part in flat.split(_AT_ONCE):
        drawn = words[: part.numel()].random_(generator=generator).bitwise_and_(2**_BITS - 1)
        torch.lt(drawn, below, out=part)
    return out


@functools.cache
def draws_alike() -> bool:
    """Whether this torch draws so here: with MKL, on an Intel processor, another generator draws, in parallel."""
    one, other = (torch.Generator().manual_seed(0) for _ in range(2))
    expected = torch.empty(_WORTH_IT, dtype=torch.bool).bernoulli_(0.3, generator=one)
    drawn = _fill(torch.empty_like(expected), 0.3, other)
    return torch.equal(drawn, expected) and torch.equal(one.get_state(), other.get_state())
