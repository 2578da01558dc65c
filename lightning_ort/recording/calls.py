"""The ATen calls of a step, written down while it runs: :class:`Recorder`."""

import functools
import inspect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ort.compat.torchscript import (
    CHECK_OF_ERRORS,
    READS_NUMBER,
    DispatchMode,
    OpOverload,
    StorageWeakRef,
    schema_of,
    storage_id_of,
)
from lightning_ort.world.handed_on import Site

aten = torch.ops.aten
# the same tensor to whoever computes with it
_ALIASES = frozenset((aten.detach.default, aten.alias.default, aten.lift_fresh.default))
# whose results hold what their arguments say, and not what tensors hold
_FILLS = {f"aten::{name}{like}" for name in ("ones", "zeros", "full") for like in ("", "_like")}
_FILLS |= {f"aten::new_{name}" for name in ("ones", "zeros", "full")} | {"aten::arange", "aten::scalar_tensor"}
MAX_CONSTANT = 4096  # elements of a tensor that is kept and not made anew
_KINDS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Value(int):
    """The number of a tensor in a recording."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: tensors are :class:`Value`, in arguments and results.

    A result is a value, ``None`` (an undefined tensor), a list of these, or what Python got to read, such as the number
    of ``item()``.
    """

    op: OpOverload
    arguments: tuple[Any, ...]  # all of the schema
    results: tuple[Any, ...]
    # whether sizes of the results depend on values, and are to be compared with those that were recorded
    sizes: tuple[tuple[int, ...], ...] = ()


class Refused(Exception):
    """Why a step cannot be recorded."""


class Recorder(DispatchMode):
    """Writes down each call in its ``with`` blocks, as long as there is no :attr:`refusal`.

    Tensors are told apart by where they are in memory: what autograd saves, for example, comes back as another object.
    None is kept alive but the constants.

    Args:
        arguments: The tensors of the step's arguments, the first values.

    Attributes:
        found: What no call has made and is no argument: it has to be there before the step.
        pauses: Nothing is written down while it is not 0.
    """

    def __init__(self, arguments: Iterable[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.refusal = ""
        self.pauses = 0
        self.found: dict[Value, Tensor] = {}
        self.constants: dict[Value, Tensor] = {}  # made of Python's numbers in the step
        self.fills: dict[Value, Tensor] = {}  # copies of what calls have filled with numbers
        self.storage_of: list[int] = []  # for each value
        self.reads: dict[int, Site] = {}  # which calls have read a number, and where
        self._number = itertools.count()
        self._masks: set[Value] = set()
        self._at: dict[Any, Value] = {}
        self._storages: dict[int, tuple[StorageWeakRef, Value]] = {}  # with the first value in it
        self.arguments = [self._new(tensor) for tensor in arguments]

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.refusal or self.pauses:
            return func(*args, **kwargs)
        if (one := _of_one(func)) is not None:
            for at in range(len(args[0])):
                parts = [part[at] if isinstance(part, (list, tuple)) else part for part in args]
                self.__torch_dispatch__(one, types, parts, kwargs)
            return None
        try:
            call = self._begin(func, args, kwargs)
        except Exception as error:  # of odd tensors, too
            self.refusal = str(error) or type(error).__name__
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.refusal = "a call of it raises an error, which it may catch"
            raise
        try:
            self._end(func, call, result)
        except Exception as error:
            self.refusal = str(error) or type(error).__name__
        return result

    def value(self, tensor: Tensor) -> Value:
        """Return the value that a tensor is now; raise :class:`Refused` if it cannot be one."""
        key = _key(tensor)
        found = self._at.get(key)
        if found is not None:
            return found
        if (known := self._storages.get(key[0])) is None:
            value = self._new(tensor)
            self.found[value] = tensor
            return value
        base = known[1]  # a view that was made without a call, as `.data` of another
        arguments = (base, tensor.shape, tensor.stride(), tensor.storage_offset())
        view = self._new(tensor)
        self.calls.append(Call(aten.as_strided.default, arguments, (view,)))
        return view

    @staticmethod
    def place_of(tensor: Tensor) -> tuple[Any, ...]:
        """Return where in memory a tensor is, its storage first, and how it is read."""
        return _key(tensor)

    def copy_of(self, tensor: Tensor) -> Value:
        """Return the value of a copy that is made here, of what may be written to later."""
        value = self.value(tensor)
        copy = Value(next(self._number))
        self.storage_of.append(-1 - copy)  # of nobody else
        self.calls.append(Call(aten.clone.default, (value, None), (copy,)))
        return copy

    def new_number(self, read: int | None = None) -> Value:
        """Return a value for what is another number in each run, such as what a call has read."""
        number = Value(next(self._number))
        self.storage_of.append(-1 - number)
        if read is not None:  # what it was read from, which may be written to later
            self.calls[read] = Call(aten.clone.default, (*self.calls[read].arguments, None), (number,))
        return number

    def is_also(self, tensor: Tensor, value: Value) -> None:
        """Take a tensor, of which nothing but shape and dtype is used, for another one."""
        self._at[_key(tensor)] = value
        self._storages[storage_id_of(tensor)] = StorageWeakRef(tensor.untyped_storage()), value

    def _begin(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not isinstance(op, OpOverload):
            raise Refused(f"it calls {op}")
        if op.namespace != "aten":
            raise Refused(f"it calls {op.name()}, of another package")
        if op is aten.lift_fresh.default:
            self._new_constant(args[0])
        arguments = schema_of(op).arguments
        given = [*args, *(kwargs.get(one.name, one.default_value) for one in arguments[len(args) :])]
        return tuple(map(self._argument, given))

    def _argument(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return self.value(given)
        if isinstance(given, (list, tuple)):
            return [*map(self._argument, given)]
        if isinstance(given, torch.Generator) and given is not torch.default_generator:
            raise Refused("it draws random numbers from a generator of its own")
        return given

    def _new_constant(self, tensor: Tensor) -> None:
        """Keep what Python's numbers were made to."""
        if storage_id_of(tensor) not in self._storages:
            value = self._new(tensor)
            self.constants[value] = tensor.detach().clone()

    def _end(self, op: OpOverload, arguments: tuple[Any, ...], result: Any) -> None:
        if op in _ALIASES:
            self._at[_key(result)] = arguments[0]
            return
        if is_view(op) and isinstance(result, Tensor) and _key(result) in self._at:
            return  # a tensor that is there: it was transposed twice
        if torch.Tag.inplace_view in op.tags:  # from now on its first argument is another view
            self._at = {key: value for key, value in self._at.items() if value != arguments[0]}
        if not schema_of(op).returns:  # one that writes to what lists hold is left out, too
            self._add_check(op, arguments)
            return
        results = result if isinstance(result, tuple) else (result,) if schema_of(op).returns else ()
        values = tuple(map(self._result, results))
        sizes = tuple(tuple(one.shape) for one in results) if self._sizes_depend_on_values(op, arguments) else ()
        if op is READS_NUMBER:
            self.reads[len(self.calls)] = Site.of(inspect.currentframe(), 2)
        self.calls.append(Call(op, arguments, values, sizes))
        if schema_of(op).name in _FILLS and result.numel() <= MAX_CONSTANT:
            self.fills[values[0]] = result.detach().clone()

    def _add_check(self, op: OpOverload, arguments: tuple[Any, ...]) -> None:
        """Read what an operation without results has looked at: the interpreter leaves it out."""
        if op is not CHECK_OF_ERRORS:
            raise Refused(f"it calls {op.name()}, which has no results")
        anything = Value(next(self._number))
        self.storage_of.append(-1 - anything)
        self.calls.append(Call(aten.any.default, arguments[:1], (anything,)))
        self.calls.append(Call(aten.is_nonzero.default, (anything,), (False,)))

    def _sizes_depend_on_values(self, op: OpOverload, arguments: tuple[Any, ...]) -> bool:
        if torch.Tag.dynamic_output_shape not in op.tags:
            return False
        return op is not aten.index.Tensor or any(one in self._masks for one in arguments[1])

    def _result(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            return self._new(result)
        if isinstance(result, (list, tuple)):
            return [*map(self._result, result)]
        return result

    def _new(self, tensor: Tensor) -> Value:
        value = Value(next(self._number))
        key = _key(tensor)
        storage = key[0]
        if storage not in self._storages:
            self._storages[storage] = StorageWeakRef(tensor.untyped_storage()), value
        self._at[key] = value
        self.storage_of.append(storage)
        if tensor.dtype is torch.bool:
            self._masks.add(value)
        return value


def is_view(op: OpOverload) -> bool:
    """Whether the result of an operation is a part of its argument, which it only reads."""
    infos = [one.alias_info for one in (*schema_of(op).returns, *schema_of(op).arguments) if one.alias_info is not None]
    return bool(infos) and not any(info.is_write for info in infos) and schema_of(op).returns[0].alias_info is not None


# for an overload of lists, that of one
_OVERLOADS = {"Scalar": "Scalar", "ScalarList": "Scalar", "List": "Tensor", "Tensor": "Tensor", "default": "default"}


@functools.cache
def _of_one(op: Any) -> OpOverload | None:
    """Return what writes to one tensor where an operation writes to each of a list's, which is nothing more on CPUs."""
    name = op.__name__.partition(".")[0]
    if not name.startswith("_foreach_") or not isinstance(op, OpOverload) or schema_of(op).returns:
        return None
    packet = getattr(aten, name.removeprefix("_foreach_"), None)
    found: OpOverload | None = getattr(packet, _OVERLOADS.get(schema_of(op).overload_name or "default", ""), None)
    return found


def _key(tensor: Tensor) -> tuple[Any, ...]:
    if type(tensor) not in _KINDS:
        raise Refused(f"it computes with tensors of class {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Refused(f"it computes with tensors of layout {tensor.layout}")
    try:
        storage = storage_id_of(tensor)
    except NotImplementedError:
        raise Refused("it computes with tensors of torch.func") from None
    view = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return storage, *view, tensor.is_conj(), tensor.is_neg()
