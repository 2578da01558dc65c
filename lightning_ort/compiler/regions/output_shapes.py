"""Symbolic sizes of a region, as functions of the inputs that it is called with."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from lightning_ort.compat.torch import expression_of, is_positive, size_printer
from lightning_ort.compiler.graphs.nodes import sizes_of, values_of
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.regions.region import Region, RegionRejected

Shapes = tuple[tuple[int, ...], ...]


def output_shapes_fn(region: Region) -> Shapes | Callable[..., Shapes]:
    """The shapes of the outputs, a function of the inputs if they are not static; may raise ``RegionRejected``."""
    shapes = tuple(tuple(node.meta["val"].shape) for node in region.outputs)
    inputs = [sizes_of(node.meta["val"]) for node in region.inputs if isinstance(node.meta["val"], torch.Tensor)]
    if len(inputs) == len(region.inputs) and all(isinstance(n, int) for sizes in (*inputs, *shapes) for n in sizes):
        return shapes
    return _function(shapes, _symbols(region))


def is_emptied_fn(region: Region) -> Callable[..., bool] | None:
    """A function from a region's inputs to whether a tensor in it is empty; ``None`` if that cannot happen.

    A size such as ``s - 2`` is only known when the region runs. Some of onnxruntime's kernels divide by it, which ends
    the process if it is 0 (``SoftmaxGrad_13`` in 1.19), and others refuse it. Torch handles it, at no cost.
    """
    tensors = [v for node in region.module.graph.nodes for v in values_of(node) if isinstance(v, torch.Tensor)]
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    symbols = _symbols(region)
    doubtful = {
        str(expression_of(size)): size
        for size in sizes
        if not is_positive(size) and expression_of(size).free_symbols <= symbols.keys()
    }
    if not doubtful:
        return None
    found = _function((tuple(size for _, size in sorted(doubtful.items())),), symbols)
    return lambda *args: 0 in found(*args)[0]


def _symbols(region: Region) -> dict[sympy.Symbol, sympy.Symbol]:
    """Where the inputs ``a`` of a call show the value of each symbol, such as ``a[0].shape[1]``."""
    where: dict[sympy.Symbol, sympy.Symbol] = {}
    for index, node in enumerate(region.inputs):
        is_tensor = isinstance(node.meta["val"], torch.Tensor)
        for dim, size in enumerate(sizes_of(node.meta["val"])):
            if isinstance(size, torch.SymInt) and expression_of(size).is_Symbol:
                code = f"a[{index}].shape[{dim}]" if is_tensor else f"a[{index}]"
                where.setdefault(expression_of(size), sympy.Symbol(code))
    return where


def _function(shapes: Sequence[Sequence[Any]], where: dict[sympy.Symbol, sympy.Symbol]) -> Callable[..., Any]:
    """A function from a region's inputs to the values of sizes.

    It is compiled, since it runs at every call of the region. (``sympy.lambdify`` takes 10 ms to do that.)

    Raises:
        RegionRejected: If the inputs do not show a symbol.
    """
    sizes = sympy.Tuple(*(sympy.Tuple(*map(expression_of, shape)) for shape in shapes))
    if missing := sizes.free_symbols - where.keys():
        raise RegionRejected(ReasonType.DYNAMIC_SHAPE, f"no input shows {missing}, which its sizes depend on")
    symbols = sorted(sizes.free_symbols, key=str)
    names = {symbol: sympy.Symbol(f"n{index}", integer=True) for index, symbol in enumerate(symbols)}
    arguments = sympy.Tuple(*(where[symbol] for symbol in symbols))
    code = size_printer().doprint  # prints tuples as Python does, over names made here
    compute = eval(f"lambda {', '.join(map(str, names.values()))}: {code(sizes.xreplace(names))}", {"math": math})
    return eval(f"lambda *a: compute{code(arguments)}", {"compute": compute})
