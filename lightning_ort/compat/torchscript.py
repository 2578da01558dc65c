"""Torch's interpreter in C++ for calls of ATen operations, without a compiler; torch 2.13 to 2.15.

A graph of TorchScript is built call by call. Its passes are left out: the executor is the one that runs a graph as it
is, which torch chooses when a function first runs, by a setting of the process that is put back at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode", "Graph", "OpOverload", "StorageWeakRef"]


def storage_id_of(tensor: Tensor) -> int:
    """A number of the memory that a tensor has a part of; another tensor's while a :class:`StorageWeakRef` is kept."""
    return tensor.untyped_storage()._cdata


def schema_of(op: OpOverload) -> Any:
    """The schema of an operation."""
    return op._schema


def call_with(op: OpOverload, arguments: Sequence[Any]) -> Any:
    """Call an operation with all arguments of its schema."""
    named = {one.name: given for one, given in zip(op._schema.arguments, arguments, strict=True) if one.kwarg_only}
    return op(*arguments[: len(arguments) - len(named)], **named)


class DispatchMode(TorchDispatchMode):
    """A mode whose ``__torch_dispatch__`` gets each call of an operation, within its ``with`` blocks."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it loads it, which takes seconds


# arguments that an operation writes to and its schema does not mark: running mean and variance
_WRITES = {f"aten::{name}": (3, 4) for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")}
_WRITES["aten::batch_norm_update_stats"] = (1, 2)


def functional_batch_norm(op: OpOverload, arguments: Sequence[Any]) -> tuple[OpOverload, Sequence[Any]]:
    """Return what computes the same as ``native_batch_norm`` and says what it writes to; other calls as they are."""
    aten = torch.ops.aten
    if op is not aten.native_batch_norm.default:
        return op, arguments
    x, weight, bias, mean, variance, training, *numbers = arguments
    if mean is None:
        return aten._native_batch_norm_legit.no_stats, [x, weight, bias, training, *numbers]
    if not training:
        return aten._native_batch_norm_legit_no_training.default, [x, weight, bias, mean, variance, *numbers]
    return aten._native_batch_norm_legit.default, arguments


def hides_writes(op: OpOverload) -> bool:
    """Whether an operation writes to arguments that its schema does not mark."""
    return op._schema.name in _WRITES


def written_by(op: OpOverload) -> Sequence[int]:
    """The positions of the arguments that an operation writes to."""
    schema = op._schema
    marked = (i for i, one in enumerate(schema.arguments) if one.alias_info is not None and one.alias_info.is_write)
    return [*marked, *_WRITES.get(schema.name, ())]


READS_NUMBER: Any = torch.ops.aten._local_scalar_dense.default  # what ``item()`` calls
# looks at what a function of linear algebra tells, and raises its error; there is no result (torch 2.13)
CHECK_OF_ERRORS: Any = torch.ops.aten._linalg_check_errors.default


class Unsupported(Exception):
    """What the interpreter cannot call."""


class Graph:
    """A function of tensors, to which calls are added one by one; what they return is a value of the graph."""

    def __init__(self) -> None:
        self._graph: Any = torch._C.Graph()
        self._constants: dict[Any, Any] = {}
        self._undefined: Any = None

    def add_input(self) -> Any:
        """Add a tensor that the function gets."""
        return self._graph.addInput()

    def call(self, op: OpOverload, arguments: Sequence[Any], lists: Sequence[int | None]) -> list[Any]:
        """Add a call, with all arguments of its schema.

        Args:
            op: The operation.
            arguments: Values of this graph, lists of them, and what else Python passes.
            lists: For each result, the number of tensors if it is a list.

        Returns:
            Its results; for one that is a list, the list of these.

        """
        schema = op._schema
        inputs = [self._input(given, one.type) for given, one in zip(arguments, schema.arguments, strict=True)]
        node = self._append(schema.name, inputs, len(schema.returns))
        results = [*node.outputs()]
        for result, one in zip(results, schema.returns, strict=True):
            result.setType(one.type)
        _check(node, schema)
        return [
            result if number is None else self._items(result, number)
            for result, number in zip(results, lists, strict=True)
        ]

    def _items(self, result: Any, number: int) -> list[Any]:
        items = [*self._append("prim::ListUnpack", [result], number).outputs()]
        for item in items:
            item.setType(torch._C.TensorType.get())
        return items

    def sizes(self, value: Any) -> Any:
        """Add the sizes of a tensor."""
        size: Any = self._append("aten::size", [value], 1).output()
        size.setType(torch._C.ListType.ofInts())
        return size

    def build(self, results: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        """Return the function, which returns these values as a tuple."""
        node = self._append("prim::TupleConstruct", list(results), 1)
        node.output().setType(torch._C.TupleType([value.type() for value in results]))
        self._graph.registerOutput(node.output())
        self._graph.lint()
        function: Callable[..., Sequence[Any]] = torch._C._create_function_from_graph("step", self._graph)
        return function

    def _append(self, kind: str, inputs: list[Any], outputs: int) -> Any:
        return self._graph.appendNode(self._graph.create(kind, inputs, outputs))

    def _input(self, given: Any, kind: Any) -> Any:
        if isinstance(given, torch._C.Value):
            return given
        name = kind.kind()
        if name == "OptionalType":
            return self._constant(None, "") if given is None else self._input(given, kind.getElementType())
        if name == "ListType":
            element = kind.getElementType()
            if not isinstance(given, (list, tuple)):  # one number for all dimensions
                raise Unsupported(f"{given!r} for {kind}")
            if given and {*map(type, given)} <= {int}:
                return self._constant([*given], name)
            node = self._append("prim::ListConstruct", [self._input(one, element) for one in given], 1)
            node.output().setType(torch._C.ListType(_of_list(element)))
            return node.output()
        if given is None and name == "TensorType":
            if self._undefined is None:
                self._undefined = self._append("prim::AutogradZero", [], 1).output()
            return self._undefined
        return self._constant(float(given) if name == "FloatType" else _plain(given), name)

    def _constant(self, given: Any, kind: str) -> Any:
        try:
            key = type(given), kind, repr(given)
            if key not in self._constants:
                self._constants[key] = self._graph.insertConstant(given)
            return self._constants[key]
        except TypeError:
            raise Unsupported(f"{given!r} is no constant") from None


def _of_list(element: Any) -> Any:
    return torch._C.IntType.get() if element.kind() == "SymIntType" else element


def _plain(given: Any) -> Any:
    if isinstance(given, torch.memory_format):
        return _MEMORY_FORMATS[given]
    return given


_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


def _check(node: Any, schema: Any) -> None:
    """Raise :class:`Unsupported` if the interpreter would call another operation than the one that was recorded."""
    try:
        found = node.schema()
    except RuntimeError as error:
        raise Unsupported(str(error).partition("\n")[0]) from None
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    if found.partition("(")[0] != name and "Scalar" not in found.partition("(")[0]:
        raise Unsupported(f"{name} would be {found}")


@contextmanager
def plain_executor() -> Iterator[None]:
    """Within the block, a function that runs for the first time gets the executor that leaves its graph as it is."""
    optimizes = torch._C._get_graph_executor_optimize()
    is_new = torch._C._jit_set_profiling_executor(True)
    profiles = torch._C._jit_set_profiling_mode(False)
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(optimizes)
        torch._C._jit_set_profiling_mode(profiles)
        torch._C._jit_set_profiling_executor(is_new)


# the context in which calls have no gradients and their results are ordinary tensors: cheaper than `torch.no_grad`,
# and what autograd refuses, such as the undefined workspace of an LSTM, is passed on
below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd
