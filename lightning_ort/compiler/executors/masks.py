"""Dropout masks with the same values as torch's, drawn faster: :func:`bernoulli`, and :func:`draw_by_kernel`.

On processors other than Intel's, torch's ``bernoulli`` takes two 32-bit numbers from its generator (mt19937) for each
element, one element at a time: a sixth of a GPT's step (torch 2.13). Where it has been compiled, a function in C
(:mod:`.mask_kernel`) draws them instead. Until then this module compares the numbers of many at
once.
"""

import functools
import math
import os
import threading

import torch

from lightning_ort.compiler.executors.mask_kernel import BITS, MIN_ELEMENTS, mask_kernel

# elements drawn at a time: their 64-bit numbers fit into the second-level cache, and torch uses only one thread
_CHUNK = 32768
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


def _reset_after_fork() -> None:
    """Replace what belongs to the parent's threads, which do not exist in a forked process and release no lock."""
    global _generator_lock
    _generator_lock = threading.RLock()


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
