"""Regions of symbolic sizes in which a tensor may turn out to be empty.

A size such as ``s - 2`` is seen only when the region runs. Some of onnxruntime's kernels divide by it, which ends the
process where it is 0 (``SoftmaxGrad_13`` in 1.19), others refuse it; torch handles it, at no cost.
"""

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from lightning_ort.compiler.partitioning import Region
from lightning_ort.compiler.support import values_of


def emptied(region: Region) -> Callable[..., bool] | None:
    """A function from a region's inputs to whether a tensor in it is empty; ``None`` if that cannot be."""
    values = [value for node in region.module.graph.nodes for value in values_of(node)]
    sizes: list[Any] = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    doubtful = {size.node.expr for size in sizes if isinstance(size, torch.SymInt) and _may_be_zero(size)}
    if not doubtful:
        return None
    where: dict[sympy.Symbol, str] = {}
    for index, node in enumerate(region.inputs):
        val = node.meta["val"]
        found = val.shape if isinstance(val, torch.Tensor) else [val]
        for dim, size in enumerate(found):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                code = f"a[{index}].shape[{dim}]" if isinstance(val, torch.Tensor) else f"a[{index}]"
                where.setdefault(size.node.expr, code)
    printer = PythonPrinter()
    names = {symbol: f"n{index}" for index, symbol in enumerate(where)}
    known = [expression for expression in doubtful if expression.free_symbols <= where.keys()]
    tests = [
        printer.doprint(expression.xreplace({symbol: sympy.Symbol(name) for symbol, name in names.items()}))
        for expression in sorted(known, key=str)
    ]
    if not tests:
        return None
    # the expressions come from torch's own printer, over names made above
    arguments = ", ".join(where[symbol] for symbol in names)
    source = f"lambda {', '.join(names.values())}: {' or '.join(f'({test}) == 0' for test in tests)}"
    check = eval(source, {"math": __import__("math")})
    return eval(f"lambda *a: check({arguments})", {"check": check})


def _may_be_zero(size: Any) -> bool:
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return not bounds.lower > 0
