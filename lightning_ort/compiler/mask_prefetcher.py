"""Dropout masks with the same values as torch's, drawn faster, and for the next step while this one computes.

On processors other than Intel's, torch's ``bernoulli`` takes two 32-bit numbers from its generator (mt19937) for each
element, one element at a time: a sixth of a GPT's step (torch 2.13). Where it has been compiled, a function in C
(:mod:`~lightning_ort.compiler.mask_kernel`) draws them instead. Until then this module compares the numbers of many at
once. The generator itself runs on one core in any case, so :class:`MaskPrefetcher` draws the masks of the next step in
another thread.
"""

import functools
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lightning_ort.compiler.mask_kernel import BITS, MIN_ELEMENTS, mask_kernel

# elements drawn at a time: their 64-bit numbers fit into the second-level cache, and torch uses only one thread
_CHUNK = 32768
# fewer elements are drawn within half a millisecond
_MIN_PREFETCHED_ELEMENTS = 2**17
_generator_lock = threading.RLock()


def draw_by_kernel(out: torch.Tensor, p: float, generator: torch.Generator | None) -> bool:
    """Fill a tensor as torch's ``bernoulli_`` does, by the function in C; return whether it did."""
    if generator is not None and generator is not torch.default_generator:
        return mask_kernel().draw(out, p, generator)
    with _generator_lock:  # no other thread's masks between reading the generator's state and setting it
        return mask_kernel().draw(out, p, generator)


def bernoulli(x: torch.Tensor, p: float) -> torch.Tensor:
    """``aten::bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor``, with torch's own generator.

    The result, and the state in which it leaves the generator, are the same as torch's.
    """
    if x.device.type != "cpu" or not x.is_contiguous() or not matches_torch():
        return torch.bernoulli(x, p)
    return _draw_mask(torch.empty_like(x), p, None)


class MaskPrefetcher:
    """Draws the masks of a region, ahead of time if possible.

    If nothing else was drawn between two steps, the masks of the following step are drawn in another thread, from a
    copy of torch's generator. If the generator's state is still the same when they are needed, they are what torch
    would draw now: they are returned, and the generator is moved on to its state after them. Otherwise they are
    discarded and the masks are drawn at once. ``kinds`` are the sizes, dtype and probability of 1 of each mask, in the
    order in which torch would draw them.
    """

    def __init__(self, kinds: Sequence[tuple[Sequence[int], torch.dtype, float]]) -> None:
        self._kinds = kinds
        elements = sum(math.prod(sizes) for sizes, _, _ in kinds)
        self._may_prefetch = elements >= _MIN_PREFETCHED_ELEMENTS and torch.get_num_threads() > 1
        self._last_state: torch.Tensor | None = None  # of the generator, after the previous call
        self._was_undisturbed = False
        self._score = 0  # hits minus misses, if each step that could be prefetched had been
        self._prefetched: tuple[int, Future[tuple[list[torch.Tensor], torch.Tensor]]] | None = None

    def __call__(self) -> list[torch.Tensor]:
        """Return masks on the CPU: the same as from a sequence of ``aten.bernoulli.p``."""
        if not self._may_prefetch:
            return self._draw(torch.default_generator)
        with _generator_lock:  # no other thread's masks between reading the generator's state and setting it
            return self._take_or_draw(torch.default_generator)

    def _take_or_draw(self, generator: torch.Generator) -> list[torch.Tensor]:
        state = generator.get_state()
        undisturbed = self._last_state is not None and torch.equal(state, self._last_state)
        prefetched, self._prefetched = self._prefetched, None
        # after a fork the thread that was drawing exists in the parent only
        if undisturbed and prefetched is not None and prefetched[0] == os.getpid():
            masks, self._last_state = prefetched[1].result()
            generator.set_state(self._last_state)
        else:
            masks = self._draw(generator)
            self._last_state = generator.get_state()
        if self._was_undisturbed:
            self._score += 1 if undisturbed else -1
        self._was_undisturbed = undisturbed
        if undisturbed and self._score >= 0:
            self._prefetched = os.getpid(), _thread().submit(self._draw_from, self._last_state)
        return masks

    def _draw_from(self, state: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        generator = torch.Generator()
        generator.set_state(state)
        return self._draw(generator), generator.get_state()

    def _draw(self, generator: torch.Generator) -> list[torch.Tensor]:
        empty = [(torch.empty(sizes, dtype=dtype, device="cpu"), p) for sizes, dtype, p in self._kinds]
        return [_draw_mask(mask, p, generator) for mask, p in empty]


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "lightning_ort_masks")


def _reset_after_fork() -> None:
    """Replace what belongs to the parent's threads, which do not exist in a forked process and release no lock."""
    global _generator_lock
    _generator_lock = threading.RLock()
    _thread.cache_clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_after_fork)


def _draw_mask(out: torch.Tensor, p: float, generator: torch.Generator | None) -> torch.Tensor:
    if out.numel() < MIN_ELEMENTS:
        return out.bernoulli_(p, generator=generator)
    return out if draw_by_kernel(out, p, generator) else _fill(out, p, generator)


def _fill(out: torch.Tensor, p: float, generator: torch.Generator | None) -> torch.Tensor:
    flat, numbers = out.view(-1), torch.empty(min(out.numel(), _CHUNK), dtype=torch.int64)
    threshold = math.ceil(p * 2**BITS)  # exact: a double has 53 bits, which are only shifted
    for chunk in flat.split(_CHUNK):
        drawn = numbers[: chunk.numel()].random_(generator=generator).bitwise_and_(2**BITS - 1)
        torch.lt(drawn, threshold, out=chunk)
    return out


@functools.cache
def matches_torch() -> bool:
    """Return whether torch draws in the same way here; with MKL on Intel processors it uses another generator."""
    one, other = (torch.Generator().manual_seed(0) for _ in range(2))
    expected = torch.empty(MIN_ELEMENTS, dtype=torch.bool).bernoulli_(0.3, generator=one)
    drawn = _fill(torch.empty_like(expected), 0.3, other)
    return torch.equal(drawn, expected) and torch.equal(one.get_state(), other.get_state())
