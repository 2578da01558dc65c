"""Symbolic sizes of a region, as functions of what it is called with."""

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from lightning_ort.compiler.nodes import values_of
from lightning_ort.compiler.regions import Region, RegionRejected
from lightning_ort.compiler.report import ReasonType


def output_sizes(region: Region) -> tuple[tuple[int, ...], ...] | Callable[..., tuple[tuple[int, ...], ...]]:
    """The outputs' sizes: as they are if static, else a function from the region's inputs to them.

    Raises:
        RegionRejected: If no input shows a symbol that is needed.

    """
    shapes = [tuple(node.meta["val"].shape) for node in region.outputs]
    values = [node.meta["val"] for node in region.inputs]
    fixed = all(isinstance(value, torch.Tensor) and _is_fixed(value.shape) for value in values)
    if fixed and all(map(_is_fixed, shapes)):
        return tuple(shapes)
    symbols = _Symbols(region)
    return symbols.function(
        "".join("(" + "".join(f"{symbols.code(size)}, " for size in shape) + "), " for shape in shapes)
    )


def emptied(region: Region) -> Callable[..., bool] | None:
    """A function from a region's inputs to whether a tensor in it is empty; ``None`` if that cannot be.

    A size such as ``s - 2`` is seen only when the region runs. Some of onnxruntime's kernels divide by it, which ends
    the process where it is 0 (``SoftmaxGrad_13`` in 1.19), others refuse it; torch handles it, at no cost.
    """
    tensors = [v for node in region.module.graph.nodes for v in values_of(node) if isinstance(v, torch.Tensor)]
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    doubtful = {str(size.node.expr): size for size in sizes if _may_be_zero(size)}
    symbols = _Symbols(region)
    known = [size for _, size in sorted(doubtful.items()) if symbols.show(size)]
    if not known:
        return None
    found = symbols.function("".join(f"({symbols.code(size)}) == 0, " for size in known))
    return lambda *args: any(found(*args))


class _Symbols:
    """The symbols that a region's inputs show.

    Args:
        region: The region.

    """

    def __init__(self, region: Region) -> None:
        self._where: dict[sympy.Symbol, str] = {}  # how each is read off the inputs `a` of a call
        for index, node in enumerate(region.inputs):
            val = node.meta["val"]
            found = val.shape if isinstance(val, torch.Tensor) else [val]
            for dim, size in enumerate(found):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    code = f"a[{index}].shape[{dim}]" if isinstance(val, torch.Tensor) else f"a[{index}]"
                    self._where.setdefault(size.node.expr, code)
        self._names = {symbol: sympy.Symbol(f"n{index}", integer=True) for index, symbol in enumerate(self._where)}

    def show(self, size: torch.SymInt) -> bool:
        """Whether a size can be computed from the inputs."""
        return bool(size.node.expr.free_symbols <= self._where.keys())

    def code(self, size: int | torch.SymInt) -> str:
        """A size as Python code.

        Raises:
            RegionRejected: If no input shows a symbol of it.

        """
        if isinstance(size, int):
            return str(size)
        expression = size.node.expr
        if not self.show(size):
            missing = expression.free_symbols - self._where.keys()
            raise RegionRejected(ReasonType.DYNAMIC_SHAPE, f"size {expression}: no input shows {missing}")
        return PythonPrinter().doprint(expression.xreplace(self._names))

    def function(self, items: str) -> Callable[..., Any]:
        """A function from the inputs to a tuple, made of the code of its items."""
        names = ", ".join(map(str, self._names.values()))
        # the expressions come from torch's own printer, over names made above
        compute = eval(f"lambda {names}: ({items})", {"math": math})
        return eval(f"lambda *a: compute({', '.join(self._where.values())})", {"compute": compute})


def _is_fixed(sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _may_be_zero(size: torch.SymInt) -> bool:
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return not bounds.lower > 0
