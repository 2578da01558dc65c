"""Special functions, statistics and small linear algebra as functions of other operations.

Their gradients are torch's formulas, whose parts are here too; sums above autograd are differentiated as they are.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx

from lightning_ort.compat.torch import decomposition_of
from lightning_ort.compiler.executors.ort.conversion.elementary import where
from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of
from lightning_ort.compiler.executors.ort.conversion.registry import form, in_parts
from lightning_ort.onnx_export.training.graph import PortableGraph

aten = torch.ops.aten

# special functions


def _series(x: Tensor, factors: Sequence[float]) -> Tensor:
    """A polynomial, whose highest factor comes last."""
    found = torch.full_like(x, factors[-1])
    for factor in reversed(factors[:-1]):
        found = found * x + factor
    return found


# Wichura's PPND7 (Algorithm AS 241): numerators and denominators in the middle, beside it, and far out
_MIDDLE = (3.3871327179, 50.434271938, 159.29113202, 59.109374720), (1.0, 17.895169469, 78.757757664, 67.187563600)
_BESIDE = (1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103), (1.0, 0.73700164250, 0.12021132975)
_FAR = (6.6579051150, 3.0812263860, 0.42868294337, 0.017337203997), (1.0, 0.24197894225, 0.012258202635)


def _quantile(q: Tensor, tail: Tensor) -> Tensor:
    """The normal distribution's quantile ``q`` from its median, and how much of it is in the shorter tail."""
    middle, far = (0.180625 - q * q).clamp(min=0), (-tail.log()).clamp(min=0).sqrt()
    parts = ((_MIDDLE, middle), (_BESIDE, far - 1.6), (_FAR, far - 5))
    inner, beside, outer = (_series(x, above) / _series(x, below) for (above, below), x in parts)
    inner = torch.where(q.abs() <= 0.425, q * inner, q.sign() * torch.where(far <= 5, beside, outer))
    inner = torch.where(tail == 0, q.sign() * math.inf, inner)
    return torch.where(tail >= 0, inner, math.nan)


@in_parts(aten.special_ndtri.default)
def _normal_quantile(x: Tensor) -> Tensor:
    p = x.double()
    return _quantile(p - 0.5, torch.minimum(p, 1 - p)).to(_float_of(x))


@in_parts(aten.erfinv.default)
def _inverse_erf(x: Tensor) -> Tensor:
    q = x.double() / 2
    return (_quantile(q, 0.5 - q.abs()) / math.sqrt(2)).to(_float_of(x))


def _float_of(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


_ERFC = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)


def _erfc_log(x: Tensor) -> Tensor:
    """The logarithm of erfc times exp(x^2), right to 1.2e-7 for numbers that are not negative (Numerical Recipes)."""
    t = 1 / (1 + x / 2)
    return t.log() + _series(t, _ERFC)


@in_parts(aten.erfc.default)
def _erfc(x: Tensor) -> Tensor:
    y = x.double().abs()
    found = (_erfc_log(y) - y * y).exp()
    return torch.where(x < 0, 2 - found, found).to(_float_of(x))


@in_parts(aten.special_erfcx.default)
def _erfcx(x: Tensor) -> Tensor:
    y = x.double().abs()
    found = _erfc_log(y).exp()
    return torch.where(x < 0, 2 * (y * y).exp() - found, found).to(_float_of(x))


# Abramowitz and Stegun 9.8.1 to 9.8.4: up to 3.75, and beyond without its exponential and root
_I0 = (
    (1.0, 3.5156229, 3.0899424, 1.2067492, 0.2659732, 0.0360768, 0.0045813),
    (0.39894228, 0.01328592, 0.00225319, -0.00157565, 0.00916281, -0.02057706, 0.02635537, -0.01647633, 0.00392377),
)
_I1 = (
    (0.5, 0.87890594, 0.51498869, 0.15084934, 0.02658733, 0.00301532, 0.00032411),
    (0.39894228, -0.03988024, -0.00362018, 0.00163801, -0.01031555, 0.02282967, -0.02895312, 0.01787654, -0.00420059),
)


def _bessel(near: Sequence[float], far: Sequence[float], is_odd: bool, is_scaled: bool) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        y = x.double().abs()
        inner = _series((y / 3.75) ** 2, near) * (-y).exp()
        z = y.clamp(min=3.75)
        found = torch.where(y < 3.75, inner * y if is_odd else inner, _series(3.75 / z, far) / z.sqrt())
        found = found if is_scaled else found * y.exp()
        return (found * x.sign() if is_odd else found).to(_float_of(x))

    return function


for _op, _factors, _is_odd, _is_scaled in (
    (aten.i0.default, _I0, False, False),
    (aten.special_i0e.default, _I0, False, True),
    (aten.special_i1.default, _I1, True, False),
    (aten.special_i1e.default, _I1, True, True),
):
    in_parts(_op)(_bessel(*_factors, _is_odd, _is_scaled))


@in_parts(aten.hypot.default)
def _hypotenuse(x: Tensor, y: Tensor) -> Tensor:
    return (x.double().square() + y.double().square()).sqrt().to(torch.result_type(x, y))


@in_parts(aten.signbit.default)
def _is_below_zero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1 / x, x) < 0 if x.is_floating_point() else x < 0


@in_parts(aten.copysign.Tensor)
def _with_sign_of(x: Tensor, y: Tensor) -> Tensor:
    x = x.to(_float_of(x))
    return torch.where(torch.signbit(y), -x.abs(), x.abs())


# integers, counts and places


_LEFT = (aten.__lshift__.Tensor, aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor)
_RIGHT = (aten.__rshift__.Tensor, aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor)


@form(*_LEFT, *_RIGHT)
def shift(ctx: PortableGraph, node: fx.Node, x: fx.Node, places: Any) -> Value:
    """__lshift__.Tensor(Tensor self, Tensor other) -> Tensor"""
    value, places, dtype = ctx.value(x, torch.int64), ctx.value(places, torch.int64), dtype_of(node)
    bits = torch.iinfo(dtype).bits
    is_in, is_negative = (places >= 0) & (places < bits), value < 0
    mirrored = value if node.target in _LEFT else where(is_negative, value.op("BitwiseNot"), value)
    unsigned = (
        ctx.op("Cast", part, dtype=torch.uint64, to=int(ir.DataType.UINT64))
        for part in (mirrored, where(is_in, places, bits - 1))
    )
    found = ctx.op("BitShift", *unsigned, direction="LEFT" if node.target in _LEFT else "RIGHT").cast(torch.int64)
    if node.target in _LEFT:
        return where(is_in, found, 0).cast(dtype)
    return where(is_negative, found.op("BitwiseNot"), found).cast(dtype)


def _counts(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if not minlength:
        raise NotImplementedError("bincount without minlength: the size of its result depends on the data")
    counted = torch.ones_like(x, dtype=torch.int64) if weights is None else weights.detach().to(_float_of(weights))
    return counted.new_zeros(minlength).index_add(0, x.long(), counted)


@in_parts(aten.histc.default)
def _histogram(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    x = x.reshape(-1)
    low, high = (x.new_full((), float(min)), x.new_full((), float(max))) if min != max else (x.amin(), x.amax())
    low, high = torch.where(low == high, low - 1, low), torch.where(low == high, high + 1, high)
    is_in = (x >= low) & (x <= high)
    places = ((x - low) / (high - low) * bins).clamp(0, bins - 1)
    return x.new_zeros(bins).index_add(0, torch.where(is_in, places, 0).long(), is_in.to(x.dtype))


@in_parts(aten.repeat_interleave.Tensor)
def _repeated_places(repeats: Tensor, output_size: int | None = None) -> Tensor:
    if output_size is None:
        return NotImplemented
    places = torch.searchsorted(repeats.cumsum(0), torch.arange(output_size, device=repeats.device), right=True)
    # for another size than given, they are none that a tensor has
    return torch.where(repeats.sum() == output_size, places, repeats.numel()).to(repeats.dtype)


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    shape = [1] * source.dim()
    shape[dim] = -1
    places = index.long().reshape(shape).expand_as(source)
    return x.scatter_reduce(dim, places, source, reduce, include_self=include_self)


# statistics


def _covariance(
    x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    x = x.reshape(1, -1) if x.dim() < 2 else x
    x = x.to(_float_of(x))
    weights = None
    for given in (fweights, aweights):
        if given is not None:
            weights = given.to(x.dtype) if weights is None else weights * given.to(x.dtype)
    if weights is None:
        centered = x - x.mean(1, keepdim=True)
        weighted, norm = centered, x.new_full((), x.shape[1]) - correction
    else:
        total = weights.sum()
        centered = x - (x * weights).sum(1, keepdim=True) / total
        share = total if aweights is None else (weights * aweights.to(x.dtype)).sum()
        weighted, norm = centered * weights, total - correction * (1 if aweights is None else share / total)
    return ((centered @ weighted.T) / norm.clamp(min=0)).squeeze()


def _correlation(x: Tensor) -> Tensor:
    found = _covariance(x)
    if found.dim() == 0:
        return found / found
    spread = found.diagonal().sqrt()
    return (found / spread.unsqueeze(1) / spread.unsqueeze(0)).clip(-1, 1)


def _sum_of_products(x: Tensor, y: Tensor, z: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    found = alpha * torch.bmm(y, z).sum(0)
    return found + beta * x if beta else found


# linear algebra of small matrices, one row or column after another


@in_parts(aten.linalg_inv_ex.default)
def _inverse(x: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    """Gauss's and Jordan's elimination with the largest pivots."""
    size = x.shape[-1]
    rows = torch.arange(size, device=x.device).unsqueeze(-1)
    unit = (rows == rows.squeeze(-1)).to(x.dtype).expand(x.shape)
    pair, failed = torch.cat([x, unit], -1), torch.zeros_like(x[..., 0, 0], dtype=torch.int32)
    for step in range(size):
        largest = torch.where(rows >= step, pair[..., step : step + 1].abs(), -1).argmax(-2, keepdim=True)
        order = torch.where(rows == step, largest, torch.where(rows == largest, step, rows))
        pair = pair.gather(-2, order.expand(pair.shape))
        pivot = pair[..., step : step + 1, step : step + 1]
        failed = torch.where((pivot[..., 0, 0] == 0) & (failed == 0), step + 1, failed)
        row = pair[..., step : step + 1, :] / pivot
        pair = torch.where(rows == step, row, pair - pair[..., step : step + 1] * row)
    return pair[..., size:], failed


def _solved(
    x: Tensor, y: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inverse, failed = torch.linalg.inv_ex(x)
    is_vector = y.dim() == 1 or (y.dim() == x.dim() - 1 and y.shape == x.shape[:-1])
    other = y.unsqueeze(-1) if is_vector else y
    found = inverse @ other if left else other @ inverse
    return (found.squeeze(-1) if is_vector else found), x, failed, failed


@in_parts(aten.linalg_cholesky_ex.default)
def _cholesky(x: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    x = x.mT if upper else x
    size, columns = x.shape[-1], []
    rows, failed = torch.arange(size, device=x.device), torch.zeros_like(x[..., 0, 0], dtype=torch.int32)
    for step in range(size):
        pivot = x[..., step, step]
        failed = torch.where(~(pivot > 0) & (failed == 0), step + 1, failed)
        column = torch.where(rows >= step, x[..., step] / pivot.sqrt().unsqueeze(-1), 0)
        x = x - column.unsqueeze(-1) * column.unsqueeze(-2)
        columns.append(column)
    return torch.stack(columns, -2 if upper else -1), failed


@in_parts(aten.linalg_solve_triangular.default)
def _substituted(x: Tensor, y: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    if not left:
        return _substituted(x.mT, y.mT, upper=not upper, unitriangular=unitriangular).mT
    found: dict[int, Tensor] = {}
    for step in reversed(range(x.shape[-1])) if upper else range(x.shape[-1]):
        row = y[..., step : step + 1, :]
        for known, value in found.items():
            row = row - x[..., step : step + 1, known : known + 1] * value
        found[step] = row if unitriangular else row / x[..., step : step + 1, step : step + 1]
    return torch.cat([found[step] for step in sorted(found)], -2)


def _triangular_solve(
    y: Tensor, x: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    of = x.mT if transpose else x
    return torch.linalg.solve_triangular(of, y, upper=upper is not transpose, unitriangular=unitriangular), x


def _solved_by_cholesky(y: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    lower = factor.mT if upper else factor
    half = torch.linalg.solve_triangular(lower, y, upper=False)
    return torch.linalg.solve_triangular(lower.mT, half, upper=True)


def _inverse_by_cholesky(factor: Tensor, upper: bool = False) -> Tensor:
    return _solved_by_cholesky(torch.eye(factor.shape[-1], dtype=factor.dtype).expand(factor.shape), factor, upper)


for _op in (aten.max_unpool2d.default, aten.max_unpool3d.default):
    in_parts(_op)(decomposition_of(_op))
for _op in (aten.dist.default, aten.ldexp.Tensor, aten.tril_indices.default, aten.triu_indices.default):
    in_parts(_op, above_autograd=True)(decomposition_of(_op))
in_parts(aten.bincount.default, above_autograd=True)(_counts)
in_parts(aten.index_reduce.default, above_autograd=True)(_index_reduce)
in_parts(aten.cov.default, above_autograd=True)(_covariance)
in_parts(aten.corrcoef.default, above_autograd=True)(_correlation)
in_parts(aten.addbmm.default, above_autograd=True)(_sum_of_products)
in_parts(aten._linalg_solve_ex.default, above_autograd=True)(_solved)
in_parts(aten.triangular_solve.default, above_autograd=True)(_triangular_solve)
in_parts(aten.cholesky_solve.default, above_autograd=True)(_solved_by_cholesky)
in_parts(aten.cholesky_inverse.default, above_autograd=True)(_inverse_by_cholesky)
