"""Private names of torch's graphs: operations, fake tensors, symbolic sizes and the calling of compiled code.

Each function names the torch version that it was read in.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch
from packaging.version import Version
from torch import fx

OLDEST = "2.13"  # torch whose graphs we know how to read
if Version(torch.__version__) < Version(OLDEST):
    raise ImportError(f"torch {torch.__version__} is older than {OLDEST}, the oldest with graphs as we read them")

from torch._decomp import get_decompositions
from torch._decomp.decompositions import upsample_compute_output_size as interpolated_size  # torch 2.13
from torch._ops import OpOverload  # the class of torch.ops.aten.add.Tensor and the like, torch 2.13
from torch._prims_common import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    elementwise_dtypes,
    is_contiguous_or_false,  # `x.is_contiguous()` that is False where symbolic sizes leave it open, torch 2.13
    suggest_memory_format,  # the memory format of an eager result that follows its input, torch 2.13
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as without_fake_tensors  # while tracing, torch 2.13
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_tracing  # of other tensors' ops, torch 2.13
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.flop_counter import flop_registry

from lightning_ort.compat.torch import storage_id

__all__ = ["OpOverload", "TorchDispatchMode", "interpolated_size", "is_contiguous_or_false", "suggest_memory_format"]
__all__ += ["without_fake_tensors", "without_tracing"]

# Ops


def schema_of(op: OpOverload) -> str | None:
    """The schema of an op; ``None`` in other versions than torch 2.13, where its arguments may be called otherwise."""
    return str(op._schema) if torch.__version__.startswith("2.13.") else None


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node that calls an op, by their names in its schema, with defaults (torch 2.13)."""
    known = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
    names = [argument.name for argument in known]
    return defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def decomposition_of(op: OpOverload) -> Callable[..., Any]:
    """Return torch's own decomposition of an op, which need not be to core ATen ops (torch 2.13)."""
    return get_decompositions([op])[op]


@contextmanager
def python_kernels(kernels: Mapping[tuple[OpOverload, str], Callable[..., Any] | None]) -> Iterator[None]:
    """Within the block, set the Python kernels of ops for dispatch keys; ``None`` removes one (torch 2.13)."""
    wanted = {(op, getattr(torch._C.DispatchKey, key)): kernel for (op, key), kernel in kernels.items()}
    before = {(op, key): op.py_kernels.get(key) for op, key in wanted}
    try:
        _set_python_kernels(wanted)
        yield
    finally:
        _set_python_kernels(before)


def _set_python_kernels(kernels: Mapping[tuple[OpOverload, Any], Callable[..., Any] | None]) -> None:
    for (op, key), kernel in kernels.items():
        op.py_kernels.pop(key, None)
        if kernel is not None:
            op.py_kernels[key] = kernel
        op._dispatch_cache.clear()


def without_validation() -> AbstractContextManager[Any]:
    """Within the block distributions do not look at their arguments, whose values a graph has not (torch 2.13)."""
    return patch.object(torch.distributions.Distribution, "_validate_args", False)


def promoted_dtype(*operands: Any) -> torch.dtype:
    """The dtype of the result of an elementwise op on tensors and numbers, which half types keep (torch 2.13)."""
    # the first of the two is the dtype in which torch computes: float32 for half types
    return elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]


def flop_formula(op: Any) -> Callable[..., Any] | None:
    """The function from an op's arguments and ``out_val`` to its floating-point operations, if any (torch 2.13)."""
    return flop_registry.get(getattr(op, "overloadpacket", None))


# Tensors


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


# inductor's allocator, four times as fast as torch.empty_strided: (sizes, strides, dtype) -> tensor; torch 2.13
empty_strided_cpu: Callable[..., torch.Tensor] = getattr(
    getattr(torch._C._dynamo, "guards", None), "_empty_strided_cpu", _empty_strided
)

# how many tensors, and others, refer to a storage, from its address; torch 2.13
storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def storage_of(node: Any) -> int | None:
    """The :func:`storage_id` of what a node of dynamo's graph returned; ``None`` for what is no node (torch 2.13)."""
    return storage_id(node.meta.get("example_value")) if isinstance(node, fx.Node) else None


def fake_mode_of(value: Any) -> FakeTensorMode | None:
    """The mode in which a fake tensor was made, to compute with it; ``None`` for other values (torch 2.13)."""
    return getattr(value, "fake_mode", None)


def without_torch_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes tensors of any class as plain ones (torch 2.13)."""

    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args)

    return run


def is_double_backward_error(error: BaseException) -> bool:
    """Whether AOTAutograd says that its graphs have no gradient of a gradient (torch 2.13)."""
    return "does not currently support double backward" in str(error)


# Symbolic sizes


def hint_of(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The value of a symbolic number when it was traced; ``None`` if it depends on data (torch 2.13)."""
    return number.node.hint


def expression_of(number: int | torch.SymInt) -> sympy.Expr:
    """A size as a sympy expression (torch 2.13)."""
    return sympy.Integer(number) if isinstance(number, int) else number.node.expr


def is_positive(number: torch.SymInt) -> bool:
    """Whether a symbolic number is known to be above 0 (torch 2.13)."""
    return bool(number.node.shape_env.bound_sympy(number.node.expr).lower > 0)


def guards_of(number: torch.SymInt) -> Sequence[Any]:
    """The conditions on symbolic sizes so far; each has ``sloc.framework_loc``, where it was asked (torch 2.13)."""
    return number.node.shape_env.guards


class _SizePrinter(PythonPrinter):
    def _print_ToFloat(self, expr: sympy.Expr) -> str:
        return f"float({self._print(expr.args[0])})"  # torch's needs torch, and does the same

    def _print_Where(self, expr: sympy.Expr) -> str:
        condition, first, second = map(self._print, expr.args)
        return f"({first} if {condition} else {second})"


def size_printer() -> PythonPrinter:
    """A sympy printer that writes the expressions of sizes as Python code, which may use ``math`` (torch 2.13)."""
    return _SizePrinter()


def functional_graph(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    decompositions: Mapping[OpOverload, Callable[..., Any]],
) -> fx.GraphModule:
    """Trace the ATen calls of a function of tensors, of fixed sizes, without gradients or writes (torch 2.13)."""
    without_writes = torch.func.functionalize(function, remove="mutations")
    traced: fx.GraphModule = make_fx(without_writes, dict(decompositions), tracing_mode="fake")(*inputs)
    return traced


# Calls with one list of arguments, which the callee may empty to free them early


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A function of one list of arguments, marked as such for AOTAutograd (torch 2.13)."""
    return mark_boxed(lambda args: function(*args))


def mark_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that a function takes one list of arguments (torch 2.13)."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def generate_boxed_code(graph: fx.Graph) -> None:
    """Have the code of a graph take one list of arguments, and clear it (torch 2.13)."""
    graph.set_codegen(_BoxedCodeGen())
