"""Functions and numbers for the sweep over special values: what may go wrong at the edges of floating point.

Every function of a table takes part in one graph, each on a tensor of its own, so that a sweep compiles once.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from lightning_ort.compiler.report import CompileReport
from tests.conversion.harness import compile_function

INF, NAN = math.inf, math.nan

Function = Callable[..., torch.Tensor]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """NaN, infinities, both zeros, denormals, the largest and smallest numbers, and others that functions turn at."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    edges = [NAN, INF, -INF, 0.0, -0.0, smallest, -smallest, info.tiny / 3, -info.tiny / 3, info.tiny, -info.tiny]
    edges += [info.max, -info.max, info.max / 2, -info.max / 2]
    sizes = [1e-20, 1e-8, 0.1, 1 / 3, 0.5, 0.999, 1, 1.5, 2.5, 3, 6, 20, 50, 87, 103, 710, 745, 1e5, 1e10, 1e30]
    return torch.tensor([*edges, *sizes, *(-size for size in sizes)], dtype=dtype)


def windows(values: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """The numbers, ``size`` at a time, and each of them by itself in a whole vector."""
    repeated = values.repeat(-(-size // len(values)) + 1)
    yield from repeated[: -(-len(values) // size) * size].view(-1, size)
    if size > 1:
        yield from (value.expand(size).contiguous() for value in values)


_OF_NAMES = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh exp exp2 floor log neg reciprocal round sin sinh sqrt tan tanh"
    " relu sign rsqrt erf expm1 trunc log2 log10 log1p sigmoid square frac isnan isinf isfinite nan_to_num"
)
_ACTIVATIONS = (
    "silu leaky_relu elu softplus hardtanh hardsigmoid hardswish relu6 selu celu mish logsigmoid softsign hardshrink"
    " softshrink gelu tanhshrink"
)
UNARY: dict[str, Function] = {
    **{name: getattr(torch, name) for name in _OF_NAMES.split()},
    **{name: getattr(F, name) for name in _ACTIVATIONS.split()},
    "elu_alpha": lambda x: F.elu(x, 1.7),
    "softplus_beta": lambda x: F.softplus(x, 2, 3),
    "threshold": lambda x: F.threshold(x, 0.3, -1),
    "hardtanh_wide": lambda x: F.hardtanh(x, -0.3, 2.5),
    "hardshrink_0": lambda x: F.hardshrink(x, 0.0),
    "leaky_relu_0": lambda x: F.leaky_relu(x, 0.0),
    **{f"power_{p}": lambda x, p=p: x**p for p in (0.5, -0.5, -1, 2, 3, 2.5, 1 / 3, 4, -2)},
    **{f"base_{b}": lambda x, b=b: b**x for b in (2.0, 0.5, 1.0)},
    **{f"floor_divide_{y}": lambda x, y=y: x.detach() // y for y in (0.1, -3.0, INF, 0.0)},
    "remainder": lambda x: x % -3.0,
    "divide_truncated": lambda x: torch.div(x, 0.1, rounding_mode="trunc"),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_crossed": lambda x: x.clamp(2, 1),
    "clamp_infinite": lambda x: x.clamp(-INF, INF),
    "choice": lambda x: torch.where(x > 0, x, x * 2),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.ones_like(x), reduction="none"),
    "huber": lambda x: F.huber_loss(x, torch.ones_like(x), reduction="none", delta=0.7),
    "soft_margin": lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none"),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.3), reduction="none"),
    "xlogy": lambda x: torch.xlogy(x, x),
}
# torch's vector loops give them another gradient at a NaN than its loops over what is left
TWO_GRADIENTS = {"relu6", "hardtanh", "hardtanh_wide", "hardshrink", "hardshrink_0", "softshrink", "hardswish"}
TWO_GRADIENTS |= {"elu", "elu_alpha", "selu", "celu"}
BINARY: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "atan2", "maximum", "minimum")},
    **{name: getattr(torch, name) for name in ("pow", "xlogy", "logaddexp")},
    **{name: getattr(torch, name) for name in ["lt", "le", "gt", "ge", "eq", "ne"]},
    "floor_divide": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "truncate_divide": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "xlog1py": torch.special.xlog1py,
    "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "l1": lambda x, y: F.l1_loss(x, y, reduction="none"),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "clamp_min": lambda x, y: x.clamp(min=y),
    "clamp_max": lambda x, y: x.clamp(max=y),
}


def _labels(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0]) % x.shape[1]


def _first_labels(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(x.shape[1]) == 0, _labels(x).unsqueeze(1), -1)


ROWS: dict[str, Function] = {
    "softmax": lambda x: x.softmax(1),
    "softmax_first": lambda x: x.t().softmax(0),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "logsumexp_all": lambda x: torch.stack([row.logsumexp(0) for row in x[:12]]),
    "cross_entropy": lambda x: F.cross_entropy(x, _labels(x), reduction="none"),
    "multi_margin": lambda x: F.multi_margin_loss(x, _labels(x), p=2, reduction="none"),
    "multilabel_margin": lambda x: F.multilabel_margin_loss(x, _first_labels(x), reduction="none"),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "max_values": lambda x: x.max(1).values,
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(1),
    "std": lambda x: x.std(1, correction=0),
    **{f"norm_{p}": lambda x, p=p: x.norm(p, dim=1) for p in (1, 2, 3, INF, -INF, 0)},
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[1],)),
    "sort": lambda x: torch.sort(x, dim=1, stable=True).values,
    "max_pool": lambda x: F.max_pool2d(x[:, None, None], (1, min(2, x.shape[1]))),
    "max_pool_all": lambda x: F.max_pool2d(x[:, None, None], (1, x.shape[1])),
}


def rows(dtype: torch.dtype, width: int) -> torch.Tensor:
    """Rows of ordinary numbers with one special one, rows of it alone, and rows with two special ones."""
    generator = torch.Generator().manual_seed(width)
    # in float64 the largest number and infinity rank alike in sort
    pairs = (NAN, INF, -INF, 0.0, *((torch.finfo(dtype).max,) if dtype is torch.float32 else ()))
    made = []
    for value in numbers(dtype):
        for place in (width // 2, width - 1):
            row = torch.randn(width, generator=generator, dtype=dtype)
            row[place] = value
            made.append(row)
        made.append(value.expand(width).clone())
        for other in pairs:
            row = torch.randn(width, generator=generator, dtype=dtype)
            row[0], row[-1] = value, other
            made.append(row)
    return torch.stack(made)


class Sweep:
    """Functions compiled as one graph, to be compared with eager on many inputs.

    Args:
        functions: Name -> function.
        inputs: One example of what each function takes; all take the same.
        loose: Names of functions that may differ by the rounding of numbers near 1: those that take one from another.
        **config: Fields of the config.
    """

    def __init__(
        self,
        functions: Mapping[str, Function],
        inputs: Sequence[torch.Tensor],
        loose: Sequence[str] = (),
        **config: Any,
    ) -> None:
        self.names, self.count, self._loose = list(functions), len(inputs), loose
        made = list(functions.values())
        self._eager = lambda *args: tuple(
            function(*args[index * self.count : (index + 1) * self.count]) for index, function in enumerate(made)
        )
        examples = [x.clone().requires_grad_() for _ in made for x in inputs]
        config = {"cache_dir": None, "fallback": "raise", **config}
        self._compiled, self.report = compile_function(self._eager, examples, len(made), **config)

    def differences(self, inputs: Sequence[torch.Tensor]) -> list[str]:
        """Where a result or a gradient is neither eager's nor, for float32, what eager computes in float64."""
        dtype = inputs[0].dtype
        args = [x for _ in self.names for x in inputs]
        actual, expected = _run(self._compiled, args), _run(self._eager, args)
        exact = _run(self._eager, [x.double() for x in args]) if dtype is torch.float32 else expected
        found = []
        for kind in (0, 1):
            for index, (got, same, wide) in enumerate(zip(actual[kind], expected[kind], exact[kind], strict=True)):
                if got is None or same is None:
                    assert got is same
                    continue
                name = self.names[index // self.count if kind else index]
                wrong = ~(_close(got, same, name in self._loose) | _close(got, wide.to(got.dtype), name in self._loose))
                if kind and name in TWO_GRADIENTS:
                    wrong &= ~args[index].isnan()
                for place in wrong.nonzero().tolist()[:3]:
                    at = [f"{x[place[0]].tolist()}" if len(x) > place[0] else "" for x in inputs]
                    what = f"gradient {index % self.count} of {name}" if kind else name
                    found.append(f"{what} at {at}: {got[tuple(place)]:.9g} instead of {same[tuple(place)]:.9g}")
        return found


def _run(function: Callable[..., Any], args: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    leaves = [x.detach().clone().requires_grad_() for x in args]
    outputs = function(*leaves)
    differentiable = [output for output in outputs if output.requires_grad]
    ones = [torch.ones_like(output) for output in differentiable]
    return [output.detach() for output in outputs], list(
        torch.autograd.grad(differentiable, leaves, ones, allow_unused=True)
    )


def _close(got: torch.Tensor, expected: torch.Tensor, loose: bool) -> torch.Tensor:
    if not got.is_floating_point():
        return got == expected
    relative, absolute = (2e-5, 1e-6) if got.dtype is torch.float32 else (1e-9, 1e-12)
    allowed = relative * expected.abs() + (absolute if loose else 4 * torch.finfo(got.dtype).tiny)
    same = (got == expected) | (got.isnan() & expected.isnan())
    return same | ((got - expected).abs() <= allowed) & expected.isfinite()


def in_torch(report: CompileReport) -> set[str]:
    """The ops that torch ran."""
    regions = (region for graph in report.graphs for region in graph.regions if region.executor != "ort")
    return {op.split(".")[1] for region in regions for op in region.node_reasons}
