"""Where a function that dynamo has compiled would compute otherwise than Python does, mended while dynamo compiles.

Each mend was read in torch 2.13; where a version lacks what it replaces, nothing is captured. What cannot be mended is
left to Python (:mod:`.dynamo_left_out`). Each entry of :data:`REPAIRS` names the issue of PyTorch that it is for, and
``tests/compat/test_dynamo_repairs.py`` tells when PyTorch has mended it.

- Dynamo guards neither that two objects are different ones nor, of a method that it finds in a class, which function it
  is. So a graph went on with the old branch when what a step compares was replaced, or a method of a class. Nor does it
  guard which module an ``import`` finds, that a global variable hides no builtin, what ``ABCMeta.register`` says,
  the sign of zero, and what Python's own modules keep, such as the environment.
- Guards of a tensor read the strides of one that has none.
- It forgets the ``maxlen`` of a deque, and which items a dictionary or set had before if none is new.
- What NumPy does with numbers is done by NumPy.
- It takes a list in a module's tuple for a constant.
"""

import abc
import collections
import functools
import itertools
import math
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._C._dynamo.guards import DictGuardManager
from torch._dynamo import variables
from torch._dynamo.guards import GuardBuilder, install_guard, is_from_skip_guard_source, make_dupe_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource, GlobalSource, SkipGuardSource, TypeDictSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslatorBase, _import_module
from torch._dynamo.variables import UserMethodVariable, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder

from lightning_ort.compat.dynamo_left_out import LEFT_OUT, Replacement, is_array, is_of_user
from lightning_ort.compat.dynamo_messages import is_installed
from lightning_ort.compat.torch import HOOKS_OF_ALL_MODULES

_OF_MODULES = ("._modules", "._parameters", "._buffers")
_MRO: Any = vars(type)["__mro__"].__get__  # a metaclass may have another
_CALL: Any = weakref.ref.__call__
_GET: Any = types.MappingProxyType.get
_FUNCTIONS = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)
_ABSENT = GuardBuilder.DICT_NOT_CONTAINS
_MENDED = {"modified"}  # what dynamo has no more, since it does without it what it should (torch 2.15)


@contextmanager
def repaired() -> Iterator[None]:
    """Within the block, what dynamo compiles computes what Python does (torch 2.13)."""
    with ExitStack() as stack:
        for owner, name, make, _ in [*REPAIRS, *LEFT_OUT]:
            if hasattr(owner, name) or name not in _MENDED:  # an AttributeError: nothing is compiled without a mend
                old = getattr(owner, name)
                stack.enter_context(patch.object(owner, name, functools.wraps(old)(make(old))))
        # it looks methods up once, perhaps for a function of somebody else's, before they were replaced
        stack.enter_context(patch.object(variables.BuiltinVariable, "call_function_handler_cache", {}, create=True))
        yield


# Objects


def _build(build: Callable[..., Any]) -> Callable[..., Any]:
    """Guard that objects which are different ones, or the same, stay so; ``build`` wraps one for a trace."""

    def __call__(self: Any, value: Any) -> Any:
        known = self.tx.output.side_effects
        is_new = value not in known
        result = build(self, value)
        _guard_bases(self.tx, value if isinstance(value, type) else type(value))
        if isinstance(value, torch.nn.Module):
            _facts(self.tx)
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


def _guard_bases(tx: Any, kind: type) -> None:
    """Guard the bases of a class of the user's: ``isinstance``, and calls of the class, rely on them."""
    if is_of_user(kind):
        _facts(tx).add(kind)


def _facts(tx: Any) -> "_Facts":
    own = vars(tx.output)
    if "_lightning_ort_facts" not in own:
        own["_lightning_ort_facts"] = facts = _Facts()
        _add_check(tx, facts.are_as_before)
    return own["_lightning_ort_facts"]


class _Facts:
    """What the classes that a graph relies on derive from, and the hooks of all modules; no class is kept alive."""

    def __init__(self) -> None:
        self._kinds: list[weakref.ref[type]] = []
        self._before: list[int] = [*itertools.chain(*HOOKS_OF_ALL_MODULES)]
        self._known: set[int] = set()
        self._made: set[int] = set()
        # of what may be called of the objects that a graph makes
        self._owners: list[weakref.ref[type]] = []
        self._names: list[str] = []
        self._functions: list[int] = []

    def add(self, kind: type) -> None:
        if id(kind) not in self._known:
            self._known.add(id(kind))
            self._kinds.append(weakref.ref(kind))
            self._before += map(id, _MRO(kind))

    def add_functions(self, kind: type) -> None:
        """Add what may be called of objects that a graph makes: they have no source by which dynamo would guard it."""
        self.add(kind)
        if id(kind) in self._made:
            return
        self._made.add(id(kind))
        owners = [each for each in _MRO(kind) if is_of_user(each)]
        names = {name for each in owners for name, value in vars(each).items() if isinstance(value, _FUNCTIONS)}
        for owner, name in itertools.product(owners, names):
            self._owners.append(weakref.ref(owner))
            self._names.append(name)
            self._functions.append(id(vars(owner).get(name)))

    def are_as_before(self) -> bool:
        """Whether they are; asked in each step, so it calls nothing in Python."""
        kinds = [*map(_CALL, self._kinds)]
        if not all(map(operator.is_not, kinds, itertools.repeat(None))):
            return False
        bases = map(id, itertools.chain.from_iterable(map(_MRO, kinds)))
        if [*itertools.chain(*HOOKS_OF_ALL_MODULES), *bases] != self._before:
            return False
        functions = map(_GET, map(vars, map(_CALL, self._owners)), self._names)
        return [*map(id, functions)] == self._functions


def _make(make: Callable[..., Any]) -> Callable[..., Any]:
    """Guard the functions of a class of which a graph makes an object."""

    def track_new_user_defined_object(self: Any, base: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        if is_of_user(kind.value):
            _facts(self.output_graph_weakref().root_tx).add_functions(kind.value)
        return make(self, base, kind, *args, **kwargs)

    return track_new_user_defined_object


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
    is_method = isinstance(function, UserMethodVariable)
    source = function.source_fn if is_method else function.source
    if is_method and source is None and isinstance(function.obj, variables.UserDefinedObjectVariable):
        owner, name = function.obj, function.fn.__name__
        if owner.source is not None and owner.cls_source is not None and name in dir(type(owner.value)):
            source = owner.get_source_by_walking_mro(tx, name)
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


def _miss(find: Callable[..., Any]) -> Callable[..., Any]:
    """Guard that an object does not have what it was asked for and did not have."""

    def generic_getattr(self: Any, tx: Any, name: str) -> Any:
        value, kind = self.value, type(self.value)
        places: list[Any] = [getattr(value, "__dict__", {}), *map(vars, kind.__mro__)]
        if isinstance(value, torch.nn.Module):
            places += [value._parameters, value._buffers, value._modules]
        if not any(name in one for one in (*places, ("__dict__",))) and not _is_written(tx, self, name):
            plain = getattr(kind, "__getattr__", None) in (None, torch.nn.Module.__getattr__)
            create = GuardBuilder.HASATTR if plain else GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT
            _guard(self.source, functools.partial(create, attr=name))
        return find(self, tx, name)

    return generic_getattr


def _is_written(tx: Any, item: Any, name: str) -> bool:
    return name in tx.output.side_effects.store_attr_mutations.get(item, ())


def _miss_key(find: Callable[..., Any]) -> Callable[..., Any]:
    """Guard that a dictionary does not have a key that it did not have."""

    def getitem_const_raise_exception_if_absent(self: Any, tx: Any, arg: Any) -> Any:
        if arg not in self:
            self.install_dict_contains_guard(tx, [arg])
        return find(self, tx, arg)

    return getitem_const_raise_exception_if_absent


# Names and types


def _add_check(tx: Any, condition: Callable[[], bool]) -> None:
    """Guard that a condition holds."""
    source = GlobalSource(tx.output.name_of_builtins_dict_key_in_fglobals)  # any that is always there
    _guard(source, functools.partial(_holds, condition=condition))


def _holds(builder: Any, guard: Any, condition: Callable[[], bool]) -> None:
    name = "___lightning_ort_holds"
    builder.add_python_lambda_leaf_guard_to_root([f"{name}()"], [f"{name}()"], {name: condition})


def _load_builtin(load: Callable[..., Any]) -> Callable[..., Any]:
    """Guard that the user's global variables hide no builtin."""

    def load_builtin_from_argval(self: Any, argval: Any) -> Any:
        if not is_installed(self.f_code.co_filename):
            checked = vars(self.output).setdefault("_lightning_ort_builtins", {})
            if (key := id(self.f_globals)) not in checked:
                checked[key] = names = set[str]()
                _add_check(self, functools.partial(names.isdisjoint, self.f_globals))
            checked[key].add(argval)
        return load(self, argval)

    return load_builtin_from_argval


def _import(find: Callable[..., Any]) -> Callable[..., Any]:
    """Guard which module an import finds."""

    def import_source(self: Any, module_name: str) -> Any:
        module, known = sys.modules.get(module_name), self.output.global_scope
        alias = f"__import_{module_name.replace('.', '_dot_')}"
        if known.get(alias, module) is not module:  # it has been replaced since
            del known[alias]
            _import_module.cache_clear()
        if module is not None and not is_installed(getattr(module, "__file__", None) or ""):
            _add_check(self, lambda: sys.modules.get(module_name) is module)
        return find(self, module_name)

    return import_source


def _find_global(find: Callable[..., Any]) -> Callable[..., Any]:
    """Guard what Python's own modules keep, such as the environment that ``os.getenv`` reads, as the user's."""

    def get_globals_source_and_value(self: Any, name: str) -> Any:
        value, variable, source = find(self, name)
        if isinstance(source, SkipGuardSource) and isinstance(self.f_globals.get(name), MutableMapping):
            source = source.base
        return value, variable, source

    return get_globals_source_and_value


def _is_of_class(call: Callable[..., Any]) -> Callable[..., Any]:
    """Guard whether a class of the user's is a subclass of an abstract one, which may change."""

    def call_isinstance(self: Any, tx: Any, one: Any, kinds: Any) -> Any:
        result = call(self, tx, one, kinds)
        with suppress(NotImplementedError):
            kind, wanted = one.python_type(), kinds.as_python_constant()
            if call.__name__ == "call_issubclass":
                kind = one.as_python_constant()
            abstract = [item for item in _flat(wanted) if isinstance(item, abc.ABCMeta)]
            if not abstract or not isinstance(kind, type) or isinstance(one, variables.ConstantVariable):
                return result
            if any(map(is_of_user, (kind, *abstract))):
                before = issubclass(kind, wanted)
                _add_check(tx, lambda: issubclass(kind, wanted) == before)
        return result

    return call_isinstance


def _flat(kinds: Any) -> Iterator[Any]:
    if isinstance(kinds, tuple):
        for kind in kinds:
            yield from _flat(kind)
    else:
        yield kinds


def _equals(match: Callable[..., Any]) -> Callable[..., Any]:
    """Guard the sign of zero too."""

    def EQUALS_MATCH(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        match(self, guard, *args, **kwargs)
        value = self.get(guard)
        if type(value) is float and value == 0:
            sign = math.copysign(1, value)
            has_sign = lambda new: math.copysign(1, new) == sign  # noqa: E731
            self.get_guard_manager(guard).add_lambda_guard(has_sign, [f"the sign of {guard.name}"], None)

    return EQUALS_MATCH


def _has_strides(tensor: torch.Tensor) -> bool:
    return not tensor.is_nested


def _match_tensor(match: Callable[..., Any]) -> Callable[..., Any]:
    """Guard that a tensor is not nested before its strides are looked at: it may have none, which ends the process."""

    def TENSOR_MATCH(self: Any, guard: Any, value: Any = None) -> None:
        if type(self.get(guard)) is torch.Tensor and "._buffers" not in guard.name:
            self.TYPE_MATCH(guard)
            self.get_guard_manager(guard).add_lambda_guard(_has_strides, [f"{guard.name} is not nested"], None)
        match(self, guard, value)

    return TENSOR_MATCH


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


# Random numbers and NumPy


def _is_constant(value_of: Callable[..., Any]) -> Callable[..., Any]:
    """Tell arrays, which change, from constants."""

    def as_python_constant(self: Any) -> Any:
        return VariableTracker.as_python_constant(self) if is_array(self) else value_of(self)

    return as_python_constant


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


def _keep_scalar(_: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a number of NumPy's as it is: dynamo makes an array of it."""

    def wrap_numpy_ndarray(self: Any, value: Any) -> Any:
        self.install_guards(GuardBuilder.TYPE_MATCH)
        return variables.NumpyVariable(value, source=self.source)

    return wrap_numpy_ndarray


# Optimizers


def _keep_groups(_: Callable[..., Any]) -> Callable[..., Any]:
    """Leave the groups of an optimizer as they are: where one is written to, dynamo adds ``capturable=True`` to all."""
    return lambda self, tx: None


REPAIRS = [
    Replacement(InstructionTranslatorBase, "load_builtin_from_argval", _load_builtin, 118156),
    Replacement(InstructionTranslatorBase, "import_source", _import, 197046),
    Replacement(InliningInstructionTranslator, "get_globals_source_and_value", _find_global, None),
    Replacement(variables.BuiltinVariable, "call_isinstance", _is_of_class, 149991),
    Replacement(variables.BuiltinVariable, "call_issubclass", _is_of_class, 149991),
    Replacement(GuardBuilder, "EQUALS_MATCH", _equals, 192604),
    Replacement(GuardBuilder, "TENSOR_MATCH", _match_tensor, None),
    Replacement(VariableBuilder, "__call__", _build, 111562),  # #198189: order, #141714: `maxlen`
    Replacement(variables.UserFunctionVariable, "bind_args", _bind, 197860),
    Replacement(SideEffects, "track_new_user_defined_object", _make, 197860),
    Replacement(variables.UserDefinedObjectVariable, "get_source_by_walking_mro", _find, 175006),
    Replacement(variables.UserDefinedObjectVariable, "generic_getattr", _miss, None),
    Replacement(variables.ConstDictVariable, "getitem_const_raise_exception_if_absent", _miss_key, None),
    Replacement(variables.ConstantVariable, "is_literal", _is_literal, 189042),
    Replacement(variables.lists.DequeVariable, "modified", _copy_deque, 141714),
    Replacement(variables.ConstDictVariable, "has_new_items", _write_all, 198189),
    Replacement(variables.SetVariable, "has_new_items", _write_all, 198189),
    Replacement(variables.NumpyVariable, "call_function", _call_numpy, 141258),
    Replacement(variables.NumpyVariable, "as_python_constant", _is_constant, None),
    Replacement(VariableBuilder, "wrap_numpy_ndarray", _keep_scalar, None),
    Replacement(variables.OptimizerVariable, "_set_capturable", _keep_groups, None),
]
