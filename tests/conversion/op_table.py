"""The ops that ONNX Runtime runs: what to call, with what, and what each dtype may lack."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from tests.conversion.samples import bools, distinct, ints, normal, uniform, values

aten = torch.ops.aten
F32, F64 = torch.float32, torch.float64
INF, NAN = math.inf, math.nan
WEIRD = [-INF, -1e30, -20.0, -3.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 3.0, 20.0, 1e30, INF, NAN]


@dataclass(frozen=True)
class Op:
    """One row.

    Args:
        name: Unique.
        fn: What to call.
        inputs: Samples and plain values.
        gradient_kernels: Whether the backward pass uses kernels of onnxruntime-training, so that it has two versions.
        in_torch: For a dtype, the ATen ops that have no kernel in some onnxruntime and stay in torch.
        tolerance: Relative and absolute tolerance for a dtype, where the default is too tight.
        dtypes: What to test; other inputs than floating ones have their own dtype.
    """

    name: str
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    gradient_kernels: bool = False
    in_torch: dict[torch.dtype, frozenset[str]] = field(default_factory=dict)
    tolerance: dict[torch.dtype, tuple[float, float]] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (F32, F64)


TABLE: list[Op] = []


def op(name: str, fn: Callable[..., Any], *inputs: Any, no_f64: str = "", **options: Any) -> None:
    """Add a row; ``no_f64`` lists the ATen ops without a float64 kernel."""
    if no_f64:
        options["in_torch"] = {F64: frozenset(f"aten.{name}" for name in no_f64.split()), **options.get("in_torch", {})}
    assert name not in {row.name for row in TABLE}, name
    TABLE.append(Op(name, fn, inputs, **options))


def data(name: str, fn: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """Add a row whose inputs have dtypes of their own."""
    op(name, fn, *inputs, dtypes=(F32,), **options)


# arithmetic

TENSOR_DIVISIONS = "remainder.Tensor fmod.Tensor div.Tensor_mode pow.Tensor_Tensor"
X, Y, ROW = normal(4, 6), normal(4, 6), normal(6)
POSITIVE = uniform(4, 6, low=0.1, high=3)
op("add", torch.add, X, Y)
op("add_broadcast", lambda x, y: x + y, X, ROW)
op("add_alpha", lambda x, y: torch.add(x, y, alpha=2.5), X, Y)
op("add_scalar_tensor", lambda x, y: x + y, X, normal())
op("add_zero_dim", lambda x, y: x + y, normal(), normal())
op("add_strided", lambda x, y: x + y, normal(6, 4).viewed(lambda x: x.t()), Y)
op("add_number", lambda x: x + 3, X)
op("sub", torch.sub, X, ROW)
op("rsub", lambda x: 2 - x, X)
op("mul", torch.mul, X, normal(4, 1))
op("mul_int_by_float", lambda x, y: x * y, ints(4, 6, high=5), X)
op("mul_mask", lambda x, m: x * m, X, bools(4, 6))
op("div", torch.div, X, POSITIVE)
op("div_floor", lambda x, y: torch.div(x, y, rounding_mode="floor"), X.fixed(), POSITIVE.fixed())
op("div_trunc", lambda x, y: torch.div(x, y, rounding_mode="trunc"), X.fixed(), POSITIVE.fixed())
op("square", lambda x: x**2, X)
op("cube", lambda x: x**3, X)
op("pow_fraction", lambda x: x**1.7, POSITIVE)
op("pow_half", lambda x: x**0.5 + x**-0.5, POSITIVE)
op("pow_tensor", torch.pow, POSITIVE, Y)
op("pow_base", lambda x: 2**x, X)
op("maximum", torch.maximum, X, ROW)
op("minimum_nan", torch.minimum, values(WEIRD).fixed(), values(0.5).fixed())
op("clamp", lambda x: x.clamp(-0.5, 0.5), X)
op("clamp_crossed", lambda x: x.clamp(1, -1), X)
op("clamp_tensor", torch.clamp, X, values(-0.5).fixed(), values(0.5).fixed())
op("clamp_nan", lambda x: x.clamp(-2, 2), values(WEIRD))
op("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), X, Y, ROW)
op("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), X, Y, POSITIVE)
op("lerp", lambda x, y: torch.lerp(x, y, 0.3), X, Y)
op("bool_arithmetic", lambda x, m: x + m, X, bools(4, 6))
data("int_arithmetic", lambda x, y: (x + y) * 3 - x, ints(4, 6, high=9), ints(6, high=9))
data("int_promotion", lambda x, y: x + y, ints(4, high=9, dtype=torch.int32), ints(4, high=9))
op("fmod", lambda x, y: (torch.fmod(x, y), torch.fmod(x, 1.5)), X.fixed(), POSITIVE.fixed())
op("remainder", lambda x, y: (x % y, x % -1.5), X.fixed(), Y.fixed())
data("int_remainder", lambda x: (x % 4, x % -4, torch.fmod(x, 4)), ints(9, low=-9, high=9))
data(
    "int_divided_by_tensor",  # which may hold a 0, where torch raises and onnxruntime ends the process
    lambda x, y: (x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="floor"), x**y),
    ints(9, low=-9, high=9),
    ints(9, low=1, high=5),
    in_torch={F32: frozenset(f"aten.{name}" for name in TENSOR_DIVISIONS.split())},
)
data("int_floor", lambda x: (x // 4, x // -4, torch.div(x, 4, rounding_mode="trunc")), ints(9, low=-9, high=9))
data("int_powers", lambda x: (x**2, x**3), ints(9, low=-9, high=9))
data("int_true_division", lambda x, y: x / y, ints(4, high=9), ints(4, low=1, high=9))
data("bool_add_mul", lambda x, y: (x + y, x * y), bools(4), bools(4))

# unary functions

for _fn in (torch.abs, torch.exp, torch.neg, torch.sigmoid, torch.tanh, torch.relu, torch.expm1):
    op(_fn.__name__, _fn, X)
for _fn in (torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.log2, torch.log10, torch.log1p):
    op(_fn.__name__, _fn, POSITIVE)
for _fn, _powers in ((torch.log2, [2.0**n for n in range(-40, 41)]), (torch.log10, [10.0**n for n in range(11)])):
    op(f"{_fn.__name__}_of_powers", lambda x, fn=_fn: (fn(x), fn(x).floor()), values(_powers).fixed())
for _fn in (torch.ceil, torch.floor, torch.round, torch.sign, torch.trunc):
    op(_fn.__name__, _fn, X)
op("round_half", torch.round, values([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]).fixed())
op("sin", torch.sin, X, no_f64="cos.default")
op("cos", torch.cos, X, no_f64="cos.default")
op("tan", torch.tan, X, no_f64="tan.default")
op("erf", torch.erf, X, no_f64="erf.default")
for _fn in (torch.asin, torch.acos, torch.atan, torch.sinh, torch.cosh, torch.asinh, torch.atanh):
    op(_fn.__name__, _fn, uniform(4, low=-0.9, high=0.9), no_f64=f"{_fn.__name__}.default cosh.default sinh.default")
op("acosh", torch.acosh, uniform(4, low=1.1, high=9), no_f64="acosh.default")
AXES = [-INF, -2.0, -0.0, 0.0, 2.0, INF, NAN]
op("atan2", torch.atan2, X, Y, no_f64="atan2.default")
op("atan2_axes", torch.atan2, values([[y] for y in AXES]).fixed(), values(AXES).fixed(), no_f64="atan2.default")
op("sign_weird", torch.sign, values(WEIRD).fixed())
op("log1p_small", torch.log1p, values([0.0, 1e-30, -1e-9, 1e-5, -0.5, 1e20, INF]).fixed(), tolerance={F32: (1e-6, 0)})
op(
    "expm1_small",
    torch.expm1,
    values([0.0, 1e-30, -1e-9, 1e-5, -5.0, 50.0, INF, -INF]).fixed(),
    tolerance={F32: (1e-6, 0)},
)
for _fn in (torch.exp, torch.tanh, torch.sigmoid, torch.relu, torch.abs, torch.erf, F.leaky_relu, F.elu, F.softplus):
    op(f"{_fn.__name__}_weird", _fn, values(WEIRD).fixed(), no_f64="erf.default")
op("exp_zero_dim", torch.exp, normal())
op("nonfinite_tests", lambda x: (x.isnan(), x.isinf()), values(WEIRD))

# comparison, logic, choice

op("compare", lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y), distinct(4, 6), distinct(6))
op("compare_number", lambda x: (x == 1, x > 0.1), values([0.1, 1.0, NAN]))
data("compare_ints", lambda x, y: (x == y, x < y, x >= 2), ints(9, high=4), ints(9, high=4))
for _dtype in (torch.bool, torch.int8, torch.uint8, torch.int16):
    data(
        f"compare_{str(_dtype).removeprefix('torch.')}",
        lambda x, y, d=_dtype: [compare(x.to(d), y.to(d)) for compare in (torch.eq, torch.ne, torch.lt, torch.ge)],
        ints(9, high=2),
        ints(9, high=2),
    )
data(
    "small_integers",
    lambda x: [x.to(dtype).to(torch.float32) for dtype in (torch.int8, torch.uint8, torch.int16)],
    values([0.4, -1.7, 127.9, 128.0, -129.0, 300.0, -40000.0, 70000.0]).fixed(),
)
data("eye", lambda x: x + torch.eye(3), normal(3, 3))
data("logic", lambda x, y: (x & y, x | y, x ^ y, ~x, torch.logical_not(y)), bools(9), bools(9))
data("bitwise_of_ints", lambda x, y: (x & y, x | y, x ^ y, ~x, x & 5), ints(9, low=-9, high=9), ints(9, high=9))
data("logic_of_ints", lambda x, y: (torch.logical_and(x, y), torch.logical_or(x, y)), ints(9, high=2), ints(9, high=2))
op("where", torch.where, bools(4, 6), X, ROW)
op("where_number", lambda m, x: torch.where(m, x, -INF), bools(4, 6), X)
data("where_bools", torch.where, bools(9), bools(9), bools(9))
op("masked_fill", lambda x, m: x.masked_fill(m, -INF), X, bools(4, 6))
op("masked_fill_tensor", lambda x, m, v: x.masked_fill(m, v), X, bools(4, 6), normal())
op("to_other_dtypes", lambda x: (x.long(), x.double(), x.bool(), x.to(torch.int32)), normal(4, scale=9).fixed())
op("clone", lambda x: x.clone() * 2, X)

# activations

for _fn in (F.silu, F.leaky_relu, F.elu, F.softplus, F.hardswish, F.relu6, F.hardtanh, F.selu, F.celu):
    op(_fn.__name__, _fn, normal(4, 6, scale=3))
for _fn in (F.mish, F.logsigmoid, F.softsign, F.tanhshrink, F.hardshrink, F.softshrink, F.glu):
    op(_fn.__name__, _fn, normal(4, 6, scale=3))
op("hardsigmoid", F.hardsigmoid, normal(4, 6, scale=3), tolerance={F64: (1e-7, 0)})  # eager multiplies by a float32 1/6
op("gelu", F.gelu, normal(4, 6, scale=3), no_f64="gelu.default gelu_backward.default")
op("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), normal(4, 6, scale=3))
op("gelu_nan", F.gelu, values([NAN, -30.0, 30.0]), no_f64="gelu.default gelu_backward.default")
op("elu_alpha", lambda x: F.elu(x, alpha=1.7), normal(4, 6, scale=3))
op("elu_result", lambda x: aten.elu_backward(torch.ones_like(x), 1.7, 1, 1, True, x), normal(4, 6).fixed())
op("softplus_beta", lambda x: F.softplus(x, beta=2, threshold=3), normal(4, 6, scale=3))
op("prelu", F.prelu, normal(4, 3, 2), normal(3))
op("threshold", lambda x: F.threshold(x, 0.3, -1), X)

# softmax

GRADS = {"gradient_kernels": True}
op("softmax", lambda x: torch.softmax(x, -1), X, **GRADS)
op("softmax_middle", lambda x: torch.softmax(x, 1), normal(2, 3, 4), **GRADS)
op("softmax_large", lambda x: torch.softmax(x, -1), normal(4, 6, scale=80), **GRADS)
op("softmax_masked", lambda x: torch.softmax(x, -1), values([[0.0, -INF, 1.0], [-INF, -INF, 5.0]]), **GRADS)
op("softmax_all_masked", lambda x: torch.softmax(x, -1), values([[-INF, -INF], [0.0, 1.0]]).fixed())
op("safe_softmax", lambda x: aten._safe_softmax(x, -1), values([[-INF, -INF], [0.0, 1.0]]).fixed())
op("softmax_zero_dim", lambda x: torch.softmax(x, 0), normal())
op("log_softmax", lambda x: torch.log_softmax(x, -1), X)
op("log_softmax_first", lambda x: torch.log_softmax(x, 0), normal(3, 2, 2))
op("log_softmax_masked", lambda x: torch.log_softmax(x, -1), values([[0.0, -INF, 1.0], [2.0, -INF, 5.0]]).fixed())

# matrix products

op("mm", torch.mm, normal(4, 6), normal(6, 3))
op("mm_transposed", lambda x, y: x.t() @ y.t(), normal(6, 4), normal(3, 6))
op("mm_of_what_stays", lambda x, y: (x.transpose(1, -1) @ y, y.permute(0, 1).t() @ x), normal(3, 3), normal(3, 3))
op("mm_strided", torch.mm, normal(6, 4).viewed(lambda x: x.t()), normal(6, 3))
op("addmm", lambda b, x, y: torch.addmm(b, x, y, alpha=0.5, beta=2), normal(3), normal(4, 6), normal(6, 3))
op("addmm_fractions", lambda b, x, y: torch.addmm(b, x, y, alpha=0.3, beta=0.7), normal(3), normal(4, 6), normal(6, 3))
op("addmm_no_beta", lambda b, x, y: torch.addmm(b, x, y, beta=0), values([NAN] * 3).fixed(), X, normal(6, 3))
op("bmm", torch.bmm, normal(2, 4, 6), normal(2, 6, 3))
op("bmm_transposed", lambda x, y: x @ y.transpose(1, 2), normal(2, 4, 6), normal(2, 3, 6))
op("baddbmm", lambda b, x, y: torch.baddbmm(b, x, y, alpha=0.5), normal(2, 4, 3), normal(2, 4, 6), normal(2, 6, 3))
op("matmul_broadcast", torch.matmul, normal(2, 3, 4, 6), normal(6, 3))
op("linear", F.linear, normal(2, 3, 6), normal(4, 6), normal(4))
op("linear_flat", F.linear, X, normal(4, 6), normal(4))
op("linear_vector", F.linear, normal(6), normal(4, 6), normal(4))
op(
    "empty_products",
    lambda x, y: (x @ y, torch.addmm(x.new_ones(3), x, y), x.t() @ x),
    *(normal(4, 0), normal(0, 3)),
    in_torch=dict.fromkeys((F32, F64), frozenset({"aten.mm.default", "aten.addmm.default", "aten.any.default"})),
)
op("dot_mv", lambda x, y, w: (torch.dot(x, y), torch.mv(w, x)), normal(6), normal(6), X)
op("einsum", lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), normal(2, 3, 4, 5), normal(2, 3, 6, 5))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    causal = torch.full(scores.shape[-2:], -INF, dtype=q.dtype).triu(1)
    return torch.softmax(scores + causal, -1) @ v


op("attention", attention, normal(2, 3, 5, 4), normal(2, 3, 5, 4), normal(2, 3, 5, 4), **GRADS)

# views and layout

CUBE = normal(2, 3, 4)
op("view", lambda x: x.view(6, 4) * 2, CUBE)
op("flatten", lambda x: x.flatten(1) * 2, CUBE)
op("view_of_strided", lambda x: x.reshape(3, 8) * 2, CUBE.viewed(lambda x: x.transpose(0, 1)))
op("permute", lambda x: x.permute(2, 0, -2) * 2, CUBE)
op("transpose", lambda x: x.transpose(-1, 0) * 2, CUBE)
op("squeeze_unsqueeze", lambda x: x.unsqueeze(-1).squeeze().unsqueeze(0).squeeze(0) * 2, CUBE)
op("expand", lambda x: x.expand(5, -1, 4) * 2, normal(3, 1))
op("repeat", lambda x: x.repeat(2, 1, 3) * 2, normal(3, 1))
op("slices", lambda x: x[:, 1:3, ::2] * 2, CUBE)
op("slice_negative", lambda x: x[-1:, :-1, -3:-1] * 2, CUBE)
op("select", lambda x: x[:, -1] * x[:, 0], CUBE)
op("cat", lambda x, y: torch.cat([x, y], -1), X, normal(4, 1))
op("cat_promotes", lambda x, y: torch.cat([x, y]), X, ints(2, 6, high=5))
op("cat_empty", lambda x, y: torch.cat([x, y]), X, values([]).fixed())
op("stack", lambda x, y: torch.stack([x, y], -1), X, Y)
op("split", lambda x: [part * 2 for part in x.split(4, -1)], X)
op("chunk_sizes", lambda x: [part * 2 for part in x.split([1, 3], 0)], X)
op("unbind", lambda x: [part * 2 for part in x.unbind(1)], CUBE)
op("as_strided", lambda x: x.as_strided((3, 2), (6, 1), 2) * 2, X.fixed())
op("as_strided_gradient", lambda x: x.as_strided((2, 3), (1, 7), 1) * 2, X)
op("as_strided_whole", lambda x: x.as_strided((3, 2, 1, 4), (8, 4, 9, 1)) * 2, X)
op("as_strided_scatter", lambda x, y: x.as_strided_scatter(y, (3, 2), (6, 1), 2), X, normal(3, 2))
op("diagonal", lambda x: (x.diagonal() * 2, x.diagonal(-1) * 3, x.diagonal(2) * 4), X)
op("diagonal_dims", lambda x: x.diagonal(1, -1, 0) * 2, CUBE)
op("diagonal_scatter", lambda x, y: torch.diagonal_scatter(x, y, 1, 0, 2), CUBE, normal(3, 2))
op("flip_scalar", lambda x: x.flip(0) * 2, normal())
op("repeat_scalar", lambda x: (x.repeat(()) * 2, x.repeat(3)), normal())
op("flip", lambda x: x.flip(0, -1) * 2, CUBE)
op("roll", lambda x: x.roll(1, 0) * 2, X)
op("pad", lambda x: F.pad(x, (1, 2, 0, 1), value=3.0), CUBE)
op("pad_negative", lambda x: F.pad(x, (-1, 2)), CUBE)
op("pad_where_nothing_is_left", lambda x: F.pad(x, (1, -2), value=3.0), normal(2, 2))
op("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2) * 2, normal(1, 4, 2, 2))
op("sizes_to_tensors", lambda x: x + torch.arange(6) + torch.full((4, 6), 2.0) + torch.zeros(6) + torch.ones(1), X)
op("like", lambda x: x * torch.ones_like(x) + torch.full_like(x, 0.5) + x.new_zeros(6) + torch.tensor(2.0), X)
op("arange_float", lambda x: x + torch.arange(0.5, 3.5, 0.5, dtype=x.dtype), X)
data("arange_step", lambda x: x + torch.arange(1, 13, 2), ints(6, high=5))
op("copy_into", lambda x, y: y.copy_(x) * 2, ROW, X.fixed())
op("upsample_nearest", lambda x: F.interpolate(x, scale_factor=2), normal(1, 2, 3, 3))
op("upsample_nearest, factors", lambda x: F.interpolate(x, scale_factor=(2.3, 2.6)), normal(1, 2, 3, 3))
op("upsample_bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), normal(1, 2, 3, 3))

# reductions

for _fn in (torch.sum, torch.mean, torch.amax, torch.amin):
    op(_fn.__name__, _fn, distinct(2, 3, 4))
    op(f"{_fn.__name__}_dims", lambda x, fn=_fn: fn(x, dim=(0, -1)), distinct(2, 3, 4))
    op(f"{_fn.__name__}_keepdim", lambda x, fn=_fn: fn(x, dim=-2, keepdim=True), distinct(2, 3, 4))
    op(f"{_fn.__name__}_zero_dim", lambda x, fn=_fn: fn(x, dim=-1), normal())
op("sum_nan", lambda x: x.sum(0), values(WEIRD).fixed())
op("amax_nan", lambda x: (x.amax(0), x.amin(0), x.amax(1), x.amin(1)), values([WEIRD, WEIRD[::-1]]).fixed())
op("max_all", lambda x: (x.max(), x.min()), distinct(4, 6))
op("max_dim", lambda x: x.max(-1), distinct(4, 6))
op("min_dim", lambda x: x.min(0, keepdim=True), distinct(4, 6))
op("argmax", lambda x: (x.argmax(), x.argmax(-1), x.argmin(0, keepdim=True)), distinct(4, 6).fixed())
op("argmax_ties", lambda x: (x.argmax(-1), x.max(-1).indices), values([[1.0, 3, 3], [2, 2, 2]]).fixed())
NAN_ROWS = values([[1.0, NAN, INF, NAN], [3.0, -INF, 2.0, 2.0], [INF, 1.0, INF, NAN], [INF, INF, 0.0, -INF]])
op("argmax_nan", lambda x: (x.argmax(), x.argmin(), x.argmax(-1), x.argmin(0, keepdim=True)), NAN_ROWS.fixed())
op("max_nan", lambda x: (*x.max(-1), *x.min(0, keepdim=True)), NAN_ROWS.fixed())
op("sort_nan", lambda x: (*x.sort(dim=-1, stable=True), *x.sort(dim=0, descending=True, stable=True)), NAN_ROWS.fixed())
op("topk_nan", lambda x: (x.topk(3).values, x.topk(3, 0, largest=False).values), NAN_ROWS.fixed())
data("norm_in_float64", lambda x: torch.linalg.vector_norm(x, INF, dtype=F64), NAN_ROWS.fixed())
op("norms_nan", lambda x: (x.norm(p=INF, dim=0), x.norm(p=-INF, dim=1), x.norm(dim=1)), NAN_ROWS.fixed())
op("argmax_zero_dim", lambda x: x.argmax(0), normal().fixed())
op("var", lambda x: (x.var(), x.var(-1), x.var((0, 1), correction=0, keepdim=True)), CUBE)
op("std", lambda x: x.std(-1), CUBE)
op("var_mean", lambda x: torch.var_mean(x, (0, 2)), CUBE)
op("var_shifted", lambda x: x.var(-1), normal(4, 64, shift=1000), tolerance={F32: (1e-3, 2e-6)})
op("prod", lambda x: x.prod(), POSITIVE.fixed(), no_f64="prod.default")
op("prod_dim", lambda x: x.prod(-1), POSITIVE.fixed(), no_f64="prod.dim_int")
op("logsumexp", lambda x: x.logsumexp(-1), normal(4, 6, scale=40))
op("logsumexp_masked", lambda x: x.logsumexp(-1), values([[0.0, -INF], [-INF, -INF], [INF, 0]]).fixed())
op("norms", lambda x: (x.norm(), x.norm(dim=-1), x.norm(p=1, dim=0), x.norm(p=3, dim=0)), X)
op("norm_infinite", lambda x: (x.norm(p=INF, dim=0), x.norm(p=-INF, dim=1), x.norm(p=0)), distinct(4, 6).fixed())
op("normalize", lambda x: F.normalize(x), X)
op("cosine_similarity", F.cosine_similarity, X, Y)
op("cumsum", lambda x: x.cumsum(-1), CUBE)
op("cumsum_zero_dim", lambda x: x.cumsum(0), normal())
op("topk", lambda x: x.topk(3), distinct(4, 6))
op("topk_smallest", lambda x: x.topk(2, 0, largest=False), distinct(4, 6))
op("sort", lambda x: x.sort(-1, descending=True), distinct(4, 6))
op("sort_stable", lambda x: torch.sort(x, stable=True), values([[1.0, 0, 1, 0, 1]]).fixed())
data("sum_of_bools", lambda x: (x.sum(), x.sum(-1)), bools(4, 6))
data("sum_of_int32", lambda x: x.sum(0), ints(4, 6, high=9, dtype=torch.int32))
data("mean_of_bools", lambda x: x.float().mean(-1), bools(4, 6))
data("any_all", lambda x: (x.any(), x.all(), x.any(-1), x.all(0, keepdim=True)), bools(4, 6))
data("any_all_of_no_dims", lambda x: (x.any(()), x.all((), keepdim=True), x[0, 0].any(())), bools(4, 6))
data("any_of_ints", lambda x: (x.any(-1), x.all(-1)), ints(4, 3, high=2))
data("int_extrema", lambda x: (x.amax(-1), x.amin(), x.max()), ints(4, 6, high=99))
data("bool_extrema", lambda x: (*x.max(-1), *x.min(0), x.amax(-1), x.max()), bools(4, 6))
data("int_cumsum", lambda x: x.cumsum(-1), bools(4, 6))

# reading and writing by index

IDS = ints(3, high=4)
PLACES = values([[0, 2], [1, 3], [4, 5], [0, 1]], torch.int64)
op("index", lambda x, i: x[i] * 2, X, IDS)
op("index_pairs", lambda x, i, j: (x[i, j], x[i[:, None], j]), X, IDS, ints(3, high=6))
op("index_apart", lambda x, i: (x[i, :, i], x[:, i, i]), normal(4, 4, 4), IDS)
op("index_apart_later", lambda x, i: x[:, i, :, i], normal(2, 4, 3, 4), IDS)
op("index_select", lambda x, i: x.index_select(1, i), X, IDS)
op("gather", lambda x, i: x.gather(1, i), X, ints(4, 3, high=6))
op("scatter", lambda x, i, y: (x.scatter(1, i, y), x.scatter(1, i, 2.0)), X, PLACES, normal(4, 2))
op("scatter_add", lambda x, i, y: x.scatter_add(1, i, y), X, ints(4, 3, high=6), normal(4, 3))
op("scatter_add_part", lambda x, i, y: x.scatter_add(1, i, y), X.fixed(), ints(4, 3, high=6), normal(4, 4).fixed())
for _how in ("sum", "mean", "prod", "amax", "amin"):
    op(
        f"scatter_reduce_{_how}",
        lambda x, i, y, how=_how: (x.scatter_reduce(1, i, y, how), x.scatter_reduce(1, i, y, how, include_self=False)),
        *(distinct(4, 6).fixed(), ints(4, 3, high=6), distinct(4, 3).fixed()),
    )
op("scatter_reduce_nan", lambda x, i: x.scatter_reduce(1, i, x, "amax"), NAN_ROWS.fixed(), ints(4, 4, high=3))
op("scatter_reduce_gradient", lambda x, i, y: x.scatter_reduce(1, i, y, "sum"), X, ints(4, 3, high=6), normal(4, 3))
op("index_put", lambda x, y: x.index_put((torch.tensor([0, 2, 3]),), y), X, normal(3, 6))
op("index_put_mask", lambda x, m, y: x.index_put((m,), y), X, bools(4, 6), normal().fixed())
op("index_put_accumulate", lambda x, i, y: x.index_put((i,), y, accumulate=True), X, IDS, normal(3, 6))
op("index_add", lambda x, i, y: x.index_add(1, i, y, alpha=2), normal(6, 4), IDS, normal(6, 3))
op("masked_scatter", lambda x, m, y: x.masked_scatter(m, y), X.fixed(), bools(4, 6), normal(30).fixed())
op("masked_scatter_row", lambda x, m, y: x.masked_scatter(m, y), X.fixed(), bools(6), normal(30).fixed())
op("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 1, 4), X, normal(4, 3))
op(
    "slice_scatter_step",
    lambda x, y: (x.slice_scatter(y, 1, 1, 6, 2), x.slice_scatter(y, 1, -6, -1, 2)),
    X,
    normal(4, 3),
)
op("select_scatter", lambda x, y: x.select_scatter(y, 1, -2), X, normal(4))
op("triangles", lambda x: (x.tril(), x.triu(1), x.tril(-1)), X)

op("windows", lambda x: (x.unfold(1, 2, 1) * 2, x.unfold(-1, 3, 2) * 2, x.unfold(0, 2, 2) * 2), CUBE)
op("columns", lambda x: F.unfold(x, (2, 3), padding=1) * 2, normal(1, 2, 4, 5))
op("index_fill", lambda x, i: x.index_fill(1, i, 2.0) * 2, X, ints(3, high=6))
op("index_copy", lambda x, y: (x * 2).index_copy(1, torch.tensor([4, 0]), y), X, normal(4, 2))
op("exp2", torch.exp2, X)

# layers

op("embedding", lambda w, i: F.embedding(i, w), normal(7, 4), ints(2, 5, high=7))
op("embedding_of_one", lambda w, i: F.embedding(i, w), normal(7, 4), values(3, torch.int64).fixed())
op("embedding_padding", lambda w, i: F.embedding(i, w, padding_idx=2), normal(7, 4), ints(2, 5, high=7))
op("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), CUBE, normal(4), normal(4), **GRADS)
op(
    "layer_norm_shifted",
    lambda x, w, b: F.layer_norm(x, (64,), w, b),
    *(normal(4, 64, shift=1000).fixed(), normal(64).fixed(), normal(64).fixed()),
    tolerance={F32: (1e-3, 1e-3)},
)
op("layer_norm_2d", lambda x, w, b: F.layer_norm(x, (3, 4), w, b), CUBE, normal(3, 4), normal(3, 4), **GRADS)
op("layer_norm_of_one", lambda x, w, b: F.layer_norm(x, (1,), w, b), normal(5, 1), normal(1), normal(1), **GRADS)
op("layer_norm_plain", lambda x: F.layer_norm(x, (4,)), CUBE, **GRADS)
op("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), CUBE, normal(4))
op("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), normal(4, 3, 2), normal(4, 1, 1))
op("weight_norm_last", lambda v, g: torch._weight_norm(v, g, 2), normal(4, 3, 2), normal(1, 1, 2))
op("group_norm", lambda x, w, b: F.group_norm(x, 3, w, b), normal(2, 6, 5), normal(6), normal(6))
op("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), normal(2, 3, 5), normal(3), normal(3))
RUNNING = normal(3).fixed(), uniform(3, low=0.5, high=2).fixed()
op(
    "batch_norm",
    lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, True),
    normal(4, 3, 5),
    *RUNNING,
    normal(3),
    normal(3),
)
# frozen statistics: their saved ones are empty tensors
op("batch_norm_frozen", lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b), normal(4, 3), *RUNNING, normal(3), normal(3))
CONV = {"in_torch": {F32: frozenset({"aten.convolution_backward.default"})}, "dtypes": (F32,)}
op("conv1d", F.conv1d, normal(2, 3, 6), normal(4, 3, 3), normal(4), **CONV)
op(
    "conv2d",
    lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2),
    normal(2, 4, 7, 7),
    normal(6, 4, 2, 3),
    **CONV,
)
op(
    "conv2d_groups",
    lambda x, w: F.conv2d(x, w, groups=2, padding="same"),
    normal(2, 4, 5, 5),
    normal(6, 2, 3, 3),
    **CONV,
)
op(
    "conv_transpose2d",
    lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
    normal(1, 4, 3, 3),
    normal(4, 2, 3, 3),
    **CONV,
)
GRID = {"in_torch": dict.fromkeys((F32, F64), frozenset({"aten.grid_sampler_2d.default"}))}
for _mode in ("bilinear", "nearest", "bicubic"):
    op(
        f"grid_sample_{_mode}",
        lambda x, g, m=_mode: F.grid_sample(x, g, m, "border", align_corners=True),
        *(normal(2, 3, 5, 5).fixed(), uniform(2, 4, 4, 2, low=-1.6, high=1.6).fixed()),
        **GRID,
    )

# pooling

IMAGE = normal(2, 3, 6, 6)
op("max_pool2d", lambda x: F.max_pool2d(x, 2), distinct(2, 3, 6, 6))
op("max_pool2d_overlapping", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), distinct(2, 3, 6, 6))
op(
    "max_pool2d_weird",
    lambda x: F.max_pool2d(x, 2),
    values([[[[NAN, 1.0, -INF, -INF], [2.0, 3.0, -INF, -INF]]]]).fixed(),
)
op("avg_pool2d", lambda x: F.avg_pool2d(x, 2), IMAGE, no_f64="avg_pool2d.default")
op(
    "avg_pool2d_padded",
    lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    IMAGE.fixed(),
    no_f64="avg_pool2d.default",
)
op(
    "adaptive_avg_pool2d",
    lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, 2))),
    IMAGE,
    no_f64="_adaptive_avg_pool2d.default",
)

# losses

LOGITS, LABELS = normal(5, 4), ints(5, high=4)
op("cross_entropy", F.cross_entropy, LOGITS, LABELS)
op("cross_entropy_smoothed", lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), LOGITS, LABELS)
op(
    "cross_entropy_weighted",
    lambda x, y, w: F.cross_entropy(x, y, w, ignore_index=1),
    LOGITS,
    LABELS,
    uniform(4).fixed(),
)
op("cross_entropy_images", lambda x, y: F.cross_entropy(x, y, reduction="sum"), normal(2, 3, 4), ints(2, 4, high=3))
op("nll_none", lambda x, y: F.nll_loss(x, y, reduction="none"), LOGITS, LABELS)
for _loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
    op(_loss.__name__, _loss, X, Y)
op("soft_margin_loss", F.soft_margin_loss, X, uniform(4, 6, low=-1).fixed())
op("take_one", torch.take, normal(3, 4), values(5, torch.int64).fixed())
op("take", torch.take, normal(3, 4), values([[5, -1], [0, 5]], torch.int64).fixed())
op("put", torch.put, normal(3, 4), values([[5, -1]], torch.int64).fixed(), normal(1, 2))
op("bce", F.binary_cross_entropy, uniform(4, low=0.1, high=0.9), uniform(4).fixed())
op(
    "bce_weighted_sum",
    lambda x, y, w: F.binary_cross_entropy(x, y, w, reduction="sum"),
    values([0.0, 1.0, 1e-6, 0.7]),
    uniform(4).fixed(),
    uniform(4).fixed(),
)
op("bce_with_logits", F.binary_cross_entropy_with_logits, X, uniform(4, 6).fixed())
op("kl_div", lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), X, Y, **GRADS)
