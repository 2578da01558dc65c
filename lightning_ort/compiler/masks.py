"""Dropout masks, drawn as torch draws them, in less time.

Off Intel's processors torch's ``bernoulli`` takes two 32-bit numbers of the generator (mt19937) for each element, one
element after the other: a sixth of a GPT's step (torch 2.13). Nearly half of that is not the generator's work but what
is done with each number, and this does it to many at once.
"""

import functools
import math

import torch

# elements drawn at a time: their 64-bit numbers fit a processor's second cache, and torch wakes no second thread
_AT_ONCE = 32768
# for fewer elements torch's own call is as fast
_WORTH_IT = 4096
# at::uniform_real_distribution<double> takes so many bits of a 64-bit number
_BITS = 53


def bernoulli(x: torch.Tensor, p: float) -> torch.Tensor:
    """``aten::bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor``, from torch's own generator.

    Args:
        x: Gives shape, dtype, device and memory layout.
        p: Probability of 1.

    Returns:
        A tensor of zeros and ones: the same as torch's from the same state of the generator, which is left in the same
        state.

    """
    if x.numel() < _WORTH_IT or x.device.type != "cpu" or not x.is_contiguous() or not _draws_alike():
        return torch.bernoulli(x, p)
    return _fill(torch.empty_like(x), p, None)


def _fill(out: torch.Tensor, p: float, generator: torch.Generator | None) -> torch.Tensor:
    flat, words = out.view(-1), torch.empty(min(out.numel(), _AT_ONCE), dtype=torch.int64)
    below = math.ceil(p * 2**_BITS)  # exact: a double's 53 bits, moved
    for part in flat.split(_AT_ONCE):
        drawn = words[: part.numel()].random_(generator=generator).bitwise_and_(2**_BITS - 1)
        torch.lt(drawn, below, out=part)
    return out


@functools.cache
def _draws_alike() -> bool:
    """Whether this torch draws so here: with MKL, on an Intel processor, another generator draws, in parallel."""
    one, other = (torch.Generator().manual_seed(0) for _ in range(2))
    expected = torch.empty(_WORTH_IT, dtype=torch.bool).bernoulli_(0.3, generator=one)
    drawn = _fill(torch.empty_like(expected), 0.3, other)
    return torch.equal(drawn, expected) and torch.equal(one.get_state(), other.get_state())
