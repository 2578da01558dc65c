"""Which differences from eager are rounding."""

from dataclasses import dataclass
from typing import Any

import torch

from tests.conversion.opinfo_cases import INF


@dataclass(frozen=True)
class Leeway:
    """What is known of a result besides its values.

    Args:
        ordinary: Whether the largest result's rounding may be in all, since the inputs are of about the same size or
            since large and small ones are added up.
        gradient: Whether it is one: cotangents, whose size is about 1, were multiplied by what may cancel.
        overflow: Whether numbers near the largest are added up or multiplied, which overflows in one order and in
            another not.
        small: The size of what may cancel: for each element that of the one that it is computed of, up to 1, or that
            of the largest that is added up.
    """

    ordinary: bool
    gradient: bool
    overflow: bool
    small: torch.Tensor | float = 0.0


def judge(got: torch.Tensor, eager: torch.Tensor, references: list[Any], leeway: Leeway) -> str | None:
    """Say how a result differs from eager's by more than rounding explains.

    What rounding explains is a few units in the last place, a few times what eager itself is away from float64, what
    moving the inputs by one unit in the last place changes, and a few units of the scale; where eager overflows and
    float64 does not, nothing is asked.

    Args:
        got: The result.
        eager: Eager's.
        references: Eager's in float64, and with inputs moved up and down; may be empty.
        leeway: What is known of it.
    """
    if not (eager.is_floating_point() or eager.is_complex()):
        wrong = got != eager
        if references:
            wrong &= got != references[0]
        return f"{int(wrong.sum())} of {wrong.numel()} differ: {_examples(got, eager, wrong)}" if wrong.any() else None
    info = torch.finfo(eager.dtype)
    o, e = real(got), real(eager)
    r = real(references[0]) if references else e
    rounded = torch.where(r.abs() > info.max, r * INF, r)  # overflow as it would in the result's own dtype
    same = (o == e) | (o.isnan() & e.isnan()) | (o == rounded) | (o.isnan() & rounded.isnan())
    overflowed = ~e.isfinite() & r.isfinite()
    if leeway.overflow:
        overflowed |= ~o.isfinite()
    finite = o.isfinite() & e.isfinite() & r.isfinite()
    o0, e0, r0 = (torch.where(finite, x, 0.0) for x in (o, e, r))
    own, moved = (e0 - r0).abs(), torch.zeros_like(o0)
    for other in references[1:]:
        distance = torch.where(finite & real(other).isfinite(), real(other) - r0, 0.0).abs()
        moved = torch.maximum(moved, distance)
    is_double = info.eps < 1e-10
    units = 64 if is_double else 2  # eager in float64 is its own reference: its error does not show
    scale = 4.0 if leeway.gradient else 1.0 if is_double else 0.0
    if leeway.ordinary and own.numel():
        own = own + own.max() / 2
        scale = max(scale, float(r0.abs().max()))
    # a jump, as of floor, is no rounding
    moved = torch.minimum(moved, 1e-4 * r0.abs() + 1e-5 * scale)
    allowed = (
        max(16, units) * info.eps * r0.abs()
        + 8 * own
        + 8 * moved
        + units * info.eps * (scale + leeway.small)
        + info.tiny
    )
    wrong = ~same & ~overflowed & ~(finite & ((o0 - r0).abs() <= allowed))
    if not wrong.any():
        return None
    text = _examples(o, e, wrong, r if references else None)
    return f"{int(wrong.sum())} of {wrong.numel()} differ: {text}"


def real(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(x).double() if x.is_complex() else x.double()


def _examples(got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor, reference: torch.Tensor | None = None) -> str:
    columns = [got, want] if reference is None else [got, want, reference]
    rows = zip(*(column[wrong][:3].tolist() for column in columns), strict=True)
    return "; ".join(" | ".join(f"{value:.8g}" for value in row) for row in rows)


def same_values(x: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two lists of places name equal values of a tensor along some dimension."""
    x = x.detach()
    for dim in range(x.dim()):
        others = [(a, b) for d, (a, b) in enumerate(zip(x.shape, want.shape, strict=True)) if d != dim]
        fits = all(a == b for a, b in others) and max(int(got.max()), int(want.max())) < x.shape[dim]
        if fits and torch.equal(bits(x.gather(dim, got)), bits(x.gather(dim, want))):
            return True
    return x.dim() == 0


def bits(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    return torch.nan_to_num(x.double(), nan=0.12345) if x.is_floating_point() else x


def structure(got: Any, want: torch.Tensor, strides: bool = True) -> str | None:
    if not isinstance(got, torch.Tensor):
        return f"{type(got).__name__} instead of a tensor"
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
    if got.requires_grad != want.requires_grad:
        return f"requires_grad {got.requires_grad} instead of {want.requires_grad}"
    if strides and want.layout is torch.strided and want.numel():
        pairs = [(a, b) for a, b, size in zip(got.stride(), want.stride(), want.shape, strict=True) if size > 1]
        if any(a != b for a, b in pairs):
            return f"strides {got.stride()} instead of {want.stride()}"
    return None


def close_at_once(got: torch.Tensor, want: torch.Tensor) -> bool:
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    rtol = 4 * torch.finfo(want.dtype).eps
    return torch.allclose(real(got), real(want), rtol=rtol, atol=0, equal_nan=True)
