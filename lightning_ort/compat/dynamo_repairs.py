"""Where a function that dynamo has compiled would compute otherwise than Python does, mended while dynamo compiles.

Each mend was read in torch 2.13; a version without the name that it replaces is left as it is.

- Dynamo guards neither that two objects are different ones nor, of a method that it finds in a class, which function it
  is. So a graph went on with the old branch when what a step compares was replaced, or a method of a class.
- It forgets the ``maxlen`` of a deque, and which items a dictionary or set had before if none is new.
- It takes two bound methods for different ones that Python takes for equal, and loses what ``random.Random`` has drawn
  before a graph break. Both are left to Python.
- What NumPy does with numbers is done by NumPy. Arrays are left to Python: dynamo guards neither what they hold nor
  their shape, and computes ``array += 1`` itself before it leaves that to Python too.
- It takes a text that is made of tensors' values for none of a dictionary's keys, and a list in a module's tuple for a
  constant, it passes by a metaclass that decides what calling a class does, and after a graph break ``eval`` and
  ``locals`` miss local variables.
"""

import collections
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
from torch._C._dynamo.guards import DictGuardManager
from torch._dynamo import variables
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard, is_from_skip_guard_source, make_dupe_guard
from torch._dynamo.source import AttrSource, TypeDictSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.builder import VariableBuilder

_OF_OBJECTS = {operator.is_, operator.is_not, isinstance, type, getattr, hasattr, setattr, callable, id}
_OF_MODULES = ("._modules", "._parameters", "._buffers")
_ABSENT = getattr(GuardBuilder, "DICT_NOT_CONTAINS", None) or functools.partial(
    GuardBuilder.DICT_CONTAINS,
    invert=True,  # torch 2.11
)


@contextmanager
def repaired() -> Iterator[None]:
    """Within the block, what dynamo compiles computes what Python does (torch 2.13)."""
    with ExitStack() as stack:
        for owner, name, make in _REPAIRS:
            if (old := getattr(owner, name, None)) is not None:
                stack.enter_context(patch.object(owner, name, functools.wraps(old)(make(old))))
        yield


# Objects


def _build(build: Callable[..., Any]) -> Callable[..., Any]:
    """Guard that objects which are different ones, or the same, stay so; ``build`` wraps one for a trace."""

    def __call__(self: Any, value: Any) -> Any:
        known = self.tx.output.side_effects
        is_new = value not in known
        result = build(self, value)
        if value in known and not isinstance(value, (torch.Tensor, types.ModuleType)):
            first = known[value].source
            if is_new:
                _guard(first, _distinct)
                if isinstance(value, collections.OrderedDict) and len(value) > 1:
                    _guard(first, functools.partial(_in_order, keys=[*value]))
            elif first not in (None, self.source) and make_dupe_guard(first, self.source) is None:
                # dynamo leaves it out between an attribute and a global variable
                _guard(first, functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=self.source))
        if type(value) is collections.deque and value.maxlen is not None and hasattr(result, "maxlen"):
            _guard(AttrSource(self.source, "maxlen"), GuardBuilder.CONSTANT_MATCH)
            result.maxlen = _MaxLen(value.maxlen)
        return result

    return __call__


def _guard(source: Any, create: Callable[..., None]) -> None:
    if source is not None and not source.is_ephemeral():
        with suppress(NotImplementedError):  # of what has none, such as a constant
            install_guard(source.make_guard(create))


def _distinct(builder: Any, guard: Any) -> None:
    """Guard that an object is none of the others of its class, which dynamo checks of tensors."""
    if is_from_skip_guard_source(guard.originating_source):
        return
    groups = vars(builder).setdefault("_lightning_ort_objects", {})
    group = groups.setdefault(type(builder.get(guard)), [])
    group.append(guard)
    for one in group if len(group) == 2 else group[2:][-1:]:
        manager = builder.get_guard_manager(one)
        if not isinstance(manager, DictGuardManager):
            builder.no_tensor_aliasing_names.append(one.name)
            builder.no_tensor_aliasing_guard_managers.append(manager)
        elif not one.name.endswith(_OF_MODULES):
            _distinct_dictionary(builder, builder.arg_ref(one))


def _distinct_dictionary(builder: Any, name: str) -> None:
    """The same for a dictionary whose order is guarded, which takes no other guards."""
    names = vars(builder).setdefault("_lightning_ort_dictionaries", [])
    builder.object_aliasing_guard_codes += [(code := f"{name} is not {other}", code) for other in names]
    names.append(name)


def _in_order(builder: Any, guard: Any, keys: list[Any]) -> None:
    """Guard the order of an OrderedDict, which ``move_to_end`` changes and dynamo does not see."""
    if all(type(key) in (str, int) for key in keys):
        code = f"[*{builder.arg_ref(guard)}] == {keys}"
        builder.object_aliasing_guard_codes.append((code, code))


# Functions


def _bind(bind: Callable[..., Any]) -> Callable[..., Any]:
    """Guard a function that becomes part of a trace."""

    def bind_args(self: Any, parent: Any, args: Any, kwargs: Any) -> Any:
        _guard_function(self, parent)
        return bind(self, parent, args, kwargs)

    return bind_args


def _guard_function(function: Any, tx: Any) -> None:
    is_method = isinstance(function, variables.UserMethodVariable)
    source = function.source_fn if is_method else function.source
    if is_method and source is None and isinstance(function.obj, variables.UserDefinedObjectVariable):
        owner, name = function.obj, function.fn.__name__
        if owner.source is not None and owner.cls_source is not None and name in dir(type(owner.value)):
            walk: Any = owner.get_source_by_walking_mro
            source = walk(tx, name) if "tx" in inspect.signature(walk).parameters else walk(name)  # torch 2.11
    _guard(source, functools.partial(_is_function, code=getattr(function.fn, "__code__", None)))


def _is_function(builder: Any, guard: Any, code: types.CodeType | None) -> None:
    try:
        function = builder.get(guard)
    except (AttributeError, KeyError, IndexError, TypeError):  # a bound method that is a function by now
        return
    if code is not None and getattr(function, "__code__", None) is code:  # and not a wrapper's
        builder.CLOSURE_MATCH(guard)


def _find(find: Callable[..., Any]) -> Callable[..., Any]:
    """Guard that a class does not override what an object inherits, which dynamo checks of the bases alone."""

    def get_source_by_walking_mro(self: Any, *args: Any) -> Any:
        if (name := args[-1]) not in vars(type(self.value)):
            _guard(TypeDictSource(self.cls_source), functools.partial(_ABSENT, key=name))
        return find(self, *args)

    return get_source_by_walking_mro


def _run(run: Callable[..., Any]) -> Callable[..., Any]:
    """Leave what asks for its local variables to Python: after a graph break only those that it names are left."""

    def run_function(self: Any) -> None:
        asks = (one.argval for one in self.instructions if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        if name := next((name for name in asks if name in ("eval", "exec", "locals")), None):
            _leave(f"`{name}`, which may read any local variable")
        run(self)

    return run_function


def _compare(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Leave comparisons of bound methods to Python."""

    def richcompare_impl(self: Any, tx: Any, other: Any, op: str) -> Any:
        if isinstance(self, variables.UserMethodVariable) or isinstance(self.value, types.MethodType):
            _leave("a comparison of bound methods")
        return compare(self, tx, other, op)

    return richcompare_impl


def _construct(construct: Callable[..., Any]) -> Callable[..., Any]:
    """Leave what a metaclass does instead of making an object to Python."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        metaclass = type(self.value)
        if metaclass.__call__ is not type.__call__ and metaclass.__module__.partition(".")[0] not in ("enum", "torch"):
            _leave(f"`{metaclass.__name__}.__call__`")
        return construct(self, tx, args, kwargs)

    return call_function


# Containers


class _MaxLen(variables.ConstantVariable):
    """The ``maxlen`` of a deque that dynamo may write to: all its items replace those that it had."""

    def is_constant_none(self) -> bool:
        """Return that nothing forbids that."""
        return True


def _copy_deque(_: Callable[..., Any]) -> Callable[..., Any]:
    def modified(self: Any, items: list[Any], **kwargs: Any) -> Any:
        return type(self)(items, maxlen=self.maxlen, **kwargs)

    return modified


def _write_all(_: Callable[..., Any]) -> Callable[..., Any]:
    """Replace all items of a dictionary or set that was written to, not only those that are new."""

    def has_new_items(self: Any) -> bool:
        self.should_reconstruct_all = True
        return True

    return has_new_items


def _is_literal(is_literal: Callable[..., bool]) -> Callable[..., Any]:
    def without_lists(value: Any, *cache: Any) -> bool:
        return type(value) is not list and is_literal(value, *cache)

    return without_lists


def _hash(hash_by_identity: Callable[..., Any]) -> Callable[..., Any]:
    """Leave what is compared by value and has none yet, such as an f-string of a number in a graph, to Python."""

    def hash_impl(self: Any, tx: Any) -> Any:
        with suppress(NotImplementedError):
            if issubclass(self.python_type(), (str, bytes, int, float, tuple, frozenset)):
                _leave(f"a {self.python_type().__name__} that is made of a tensor's values as a key")
        return hash_by_identity(self, tx)

    return hash_impl


# Random numbers and NumPy


def _is_constant(value_of: Callable[..., Any]) -> Callable[..., Any]:
    """Tell arrays, which change, from constants."""

    def as_python_constant(self: Any) -> Any:
        return variables.base.VariableTracker.as_python_constant(self) if _is_array(self) else value_of(self)

    return as_python_constant


def _call_builtin(call: Callable[..., Any]) -> Callable[..., Any]:
    """Leave what is done to arrays to Python."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn not in _OF_OBJECTS and any(map(_is_array, args)):
            _leave(f"`{self.fn.__name__}` of a NumPy array")
        return call(self, tx, args, kwargs)

    return call_function


def _is_array(variable: Any) -> bool:
    if isinstance(variable, variables.LazyVariableTracker):
        if not variable.is_realized():
            return issubclass(variable.peek_type(), np.ndarray)  # without guards on it
        variable = variable.realize()
    return isinstance(variable, variables.NumpyVariable) and isinstance(variable.value, np.ndarray)


def _draw(_: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        _leave(f"`random.Random.{name}`")

    return call_method


def _leave(what: str) -> NoReturn:
    unimplemented(gb_type=what, context="", explanation=f"no graph can hold {what}", hints=[])


def _call_numpy(call: Callable[..., Any]) -> Callable[..., Any]:
    """Have NumPy compute what it makes of numbers, such as ``np.sqrt(64)``."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        numbers = [arg.value for arg in args if isinstance(arg.realize(), variables.ConstantVariable)]
        if isinstance(self.value, np.ufunc) and numbers and len(numbers) == len(args) and not kwargs:
            with suppress(Exception):  # what raises does so in eager
                found = self.value(*numbers)
                if isinstance(found, (np.float64, np.int64, np.bool_)):
                    return variables.ConstantVariable.create(found.item())
        return call(self, tx, args, kwargs)

    return call_function


_REPAIRS = [
    (VariableBuilder, "__call__", _build),
    (variables.UserFunctionVariable, "bind_args", _bind),
    (InstructionTranslatorBase, "run", _run),
    (variables.UserDefinedObjectVariable, "get_source_by_walking_mro", _find),
    (variables.UserMethodVariable, "richcompare_impl", _compare),
    (variables.UserDefinedObjectVariable, "richcompare_impl", _compare),
    (variables.UserDefinedClassVariable, "call_function", _construct),
    (variables.ConstantVariable, "is_literal", _is_literal),
    (variables.base.VariableTracker, "hash_impl", _hash),
    (getattr(variables.lists, "DequeVariable", None), "modified", _copy_deque),
    (variables.ConstDictVariable, "has_new_items", _write_all),
    (variables.SetVariable, "has_new_items", _write_all),
    (getattr(variables, "RandomVariable", None), "call_method", _draw),
    (variables.NumpyVariable, "call_function", _call_numpy),
    (variables.NumpyVariable, "as_python_constant", _is_constant),
    (variables.BuiltinVariable, "call_function", _call_builtin),
]
