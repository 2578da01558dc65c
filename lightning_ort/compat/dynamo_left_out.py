"""What a function does that dynamo computes otherwise than Python, or too late, and that is left to Python instead.

Each entry of :data:`LEFT_OUT` replaces a function of dynamo while it compiles. There it looks at what is traced, and
either ends the graph, so that Python does it (:func:`_leave`), or raises :class:`Unsound` where what follows would be
wrong, too (:func:`_refuse`). Each was read in torch 2.13; where a version lacks what it replaces, nothing is captured.
``tests/compat/test_dynamo_repairs.py`` tells when PyTorch has mended one.
"""

import builtins
import contextlib
import dis
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch._dynamo import variables
from torch._dynamo.exc import UnspecializeRestartAnalysis, unimplemented
from torch._dynamo.output_graph import OutputGraph, SubgraphTracer
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import (
    ConstantVariable,
    LazyVariableTracker,
    NumpyVariable,
    OptimizerVariable,
    PythonModuleVariable,
    SkipFunctionVariable,
    UserMethodVariable,
    higher_order_ops,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.functions import BaseUserFunctionVariable
from torch._dynamo.variables.lists import SizeVariable
from torch.nn.parallel import DistributedDataParallel

from lightning_ort.compat.dynamo_messages import is_installed
from lightning_ort.compat.torch_graphs import hint_of


class Replacement(NamedTuple):
    """What stands in for a function of dynamo while it compiles, and why."""

    owner: Any
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    issue: int | None  # of pytorch/pytorch, or a pull request that tells of the same; None where none is known


RUNS_OUTSIDE = "runs outside of graphs"  # in the reasons of what a shim of ours leaves to Python
_LATE = "_lightning_ort_late"  # of a graph: who has recorded something in it that reads the batch later


class Unsound(AssertionError):
    """Captured, a step would compute something else, and no graph break helps.

    It is an ``AssertionError`` since dynamo passes such on as they are (torch 2.13).
    """


# objects that record what ``reads_later``, functions that tell what that `reads` and `read_now`, and ``at_once``
late_readers: "weakref.WeakSet[Any]" = weakref.WeakSet()


def late_reader(function: Any) -> Any:
    """Mark a method of a late reader that is called, while it is traced, for what is read at the step's end.

    If a graph ends before that with a call of the program's, or changes what the object ``reads``, its ``at_once`` is
    set, and dynamo traces the frame again.
    """
    function.reads_batch = True
    return function


def _leave(what: str) -> NoReturn:
    unimplemented(gb_type=what, context="", explanation=f"no graph can hold {what}", hints=[])


def _refuse(what: str) -> NoReturn:
    raise Unsound(what)


# Functions


def _run(run: Callable[..., Any]) -> Callable[..., Any]:
    """Leave what asks for its local variables: after a graph break only those that it names are left."""

    def run_function(self: Any) -> None:
        asks = (one.argval for one in self.instructions if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        if name := next((name for name in asks if name in ("eval", "exec", "locals", "globals")), None):
            _leave(f"`{name}`, which may read any variable")
        run(self)

    return run_function


def _call_cached(call: Callable[..., Any]) -> Callable[..., Any]:
    """Leave functions with a cache, which dynamo runs again, unless the cache has a constant for constants."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = self.wrapper_obj
        if not hasattr(function, "cache_info") or function.__module__.partition(".")[0] == "torch":
            return call(self, tx, args, kwargs)
        values = [*self.self_args(), *args, *kwargs.values()]
        if all(value.is_python_constant() for value in values):
            constants = [value.as_python_constant() for value in values]
            split = len(constants) - len(kwargs)
            found = function(*constants[:split], **dict(zip(kwargs, constants[split:], strict=True)))
            if type(found) in (bool, int, float, str, type(None)):
                return ConstantVariable.create(found)
        _leave(f"`{function.__name__}`, a function with a cache")

    return call_function


def _check(call: Callable[..., Any]) -> Callable[..., Any]:
    """Leave checks of values, whose errors would have another text."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(self.value, "__name__", "").startswith(("_check", "_assert")) and args:
            first = args[0].realize()
            number = getattr(first, "sym_num", None)
            if first.is_tensor() or (number is not None and hint_of(number) is None):
                _leave(f"`torch.{self.value.__name__}` of a value")
        return call(self, tx, args, kwargs)

    return call_function


def _checkpoint(call: Callable[..., Any]) -> Callable[..., Any]:
    """Leave reentrant checkpoints of tensors that need no gradient: within, eager's parameters get none either.

    Under DDP leave the whole step: dynamo splits its graph at DDP's buckets, and runs the parts on fake tensors when it
    compiles them, of which real parameters then get gradients (torch 2.13).
    """

    def _call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled() and DistributedDataParallel._get_active_ddp_module() is not None:
            _refuse("a checkpoint, whose graph cannot be split at DDP's buckets")
        reentrant = "use_reentrant" not in kwargs or kwargs["use_reentrant"].as_python_constant() is not False
        if reentrant and torch.is_grad_enabled():
            tensors = [arg.as_proxy().node.meta["example_value"] for arg in args[1:] if arg.realize().is_tensor()]
            if not any(tensor.requires_grad for tensor in tensors):
                _leave("a reentrant checkpoint of tensors that need no gradient")
        return call(self, tx, args, kwargs)

    return _call_function


def _create_proxy(create: Callable[..., Any]) -> Callable[..., Any]:
    """Leave operations on tensors in a ``try`` to Python, as their errors depend on values, and come from the graph."""

    def create_proxy(self: Any, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        if kind.startswith("call_") and getattr(target, "__module__", None) != operator.__name__:
            _leave_in_try(self.output_graph.current_tx)
        return create(self, kind, target, *args, **kwargs)

    return create_proxy


def _leave_in_try(tx: Any) -> None:
    while tx is not None:
        if any(_catches_errors_of_values(tx, target) for target in _handlers(tx)):
            _leave("an operation within `try`, whose error depends on values")
        tx = tx.parent if hasattr(tx, "parent") else None


def _handlers(tx: Any) -> Iterator[Any]:
    """The first instructions of what handles errors of the current one."""
    inst = tx.current_instruction
    seen = set[int]()
    while (entry := getattr(inst, "exn_tab_entry", None)) is not None and id(entry.target) not in seen:
        seen.add(id(entry.target))
        yield (inst := entry.target)
    yield from (block.target for block in tx.block_stack if block.target is not None)


def _enter(enter: Callable[..., Any]) -> Callable[..., Any]:
    """Leave ``with`` blocks whose context manager may catch errors, for the same reason."""

    def enter_block(self: Any, *args: Any) -> Any:
        if _suppresses(self.cm_obj):
            _leave(f"`with` and a `{type(self.cm_obj).__name__}`, which may catch errors")
        return enter(self, *args)

    return enter_block


def _suppresses(manager: Any) -> bool:
    """Whether a context manager may catch what an operation raises."""
    if isinstance(manager, contextlib.suppress):
        return _is_of_values(getattr(manager, "_exceptions", Exception))
    if isinstance(manager, contextlib._GeneratorContextManager):
        # the function is forgotten when the block is entered; dynamo's stand-in for one that it makes has neither
        made = getattr(manager, "func", None) or getattr(manager, "gen", None)
        return made is not None and any(inst.opname in _MATCHES for inst in dis.get_instructions(made))
    code = getattr(getattr(type(manager), "__exit__", None), "__code__", None)
    if code is None or is_installed(code.co_filename):
        return False
    before = None  # the last instruction
    for inst in dis.get_instructions(code):
        value = before if inst.opname == "RETURN_VALUE" else inst if inst.opname == "RETURN_CONST" else None
        if value is not None and (not value.opname.endswith("_CONST") or value.argval):
            return True
        before = inst
    return False


_MATCHES = ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH")
# what operations on tensors raise because of values
_OF_VALUES = (RuntimeError, ValueError, IndexError, AssertionError, ArithmeticError, MemoryError)


def _catches_errors_of_values(tx: Any, target: Any) -> bool:
    """Whether a handler is an ``except`` clause, or several, for what an operation may raise."""
    start = tx.indexof.get(target)
    if start is None:
        return False
    found: list[Any] = []  # what stands between the start and the match of a type
    for inst in tx.instructions[start : start + 64]:
        if inst.opname in _MATCHES:
            if any(map(_is_of_values, found)):
                return True
            found = []
        elif inst.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST"):
            missing = object()
            value = tx.f_globals.get(inst.argval, getattr(builtins, inst.argval, missing))
            found.append(Exception if value is missing else value)
        elif inst.opname == "LOAD_ATTR" and found:
            found[-1] = getattr(found[-1], inst.argval, Exception)
        elif inst.opname == "POP_TOP" and not found and inst is not target:
            return tx.instructions[start + 1] is inst  # `except:` begins so, right after the error is pushed
        elif inst.opname in ("WITH_EXCEPT_START", "RERAISE"):
            return False
    return False


def _is_of_values(kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(map(_is_of_values, kind))
    if not isinstance(kind, type) or issubclass(kind, NotImplementedError):
        return False
    return issubclass(kind, _OF_VALUES) or kind in (BaseException, Exception, LookupError)


def _bind(bind: Callable[..., Any]) -> Callable[..., Any]:
    """Note whose method records something for later."""

    def bind_args(self: Any, parent: Any, args: Any, kwargs: Any) -> Any:
        if getattr(self.fn, "reads_batch", False):
            vars(parent.output)[_LATE] = args[0].realize().value
        return bind(self, parent, args, kwargs)

    return bind_args


def _compile_subgraph(compile_subgraph: Callable[..., Any]) -> Callable[..., Any]:
    """Have nothing recorded for later where a graph ends early: what runs then may change the batch, but for shims."""

    def compile_graph(self: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
        if reason.graph_break and RUNS_OUTSIDE not in reason.reason and any(map(_is_of_program, tx.stack)):
            _record_nothing(self)
        return compile_subgraph(self, tx, reason, *args, **kwargs)

    return compile_graph


def _is_of_program(variable: Any) -> bool:
    """Return whether a variable is a function that is neither torch's nor Python's own."""
    if not isinstance(variable, (BaseUserFunctionVariable, SkipFunctionVariable)):
        return False
    function = getattr(variable, "fn", None) or getattr(variable, "value", None)
    root = (getattr(function, "__module__", None) or "").partition(".")[0]
    return root not in sys.stdlib_module_names | {"torch", "numpy"}


def _record_nothing(graph: Any) -> None:
    """Trace a graph again without what it has recorded for later; what was recorded before it is read now."""
    if (recorder := vars(graph).get(_LATE)) is not None:
        recorder.at_once = True
        raise UnspecializeRestartAnalysis(restart_reason="what is recorded reads the batch")
    for one in late_readers:
        if one.reads_later:
            one.at_once = True
            one.read_now()


# Objects and classes


def _store(store: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what changes a class, whose old value is in the graph, or frees an object with ``__del__`` too late."""

    def store_attr(self: Any, item: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(item, variables.UserDefinedClassVariable):
            _refuse(f"it writes to the attribute `{name}` of the class {item.value.__name__}")
        if isinstance(item, PythonModuleVariable):  # its functions read that as a global variable
            _leave(f"a write to `{name}` of a module")
        if isinstance(item, OptimizerVariable):  # is lost
            _leave(f"a write to `{name}` of an optimizer")
        _record_no_reads(self, item)
        # its type alone: the object must not live on in a traceback
        before = type(getattr(getattr(item, "value", None), "__dict__", {}).get(name))
        if hasattr(before, "__del__"):
            _refuse(f"it replaces `{name}`, whose class {before.__name__} has `__del__`")
        store(self, item, name, value, *args, **kwargs)

    return store_attr


def _mutate(mutate: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse or leave changes of what is read otherwise, too."""

    def mutation(self: Any, item: Any) -> None:
        _record_no_reads(self, item)
        if isinstance(item, variables.ConstDictVariable) and item.source is not None:
            value = _value_of(self.output_graph_weakref(), item.source)
            if isinstance(value, dict) and value is vars(sys.modules.get(str(value.get("__name__")), object)):
                _leave("a write to a dictionary of global variables")
        mutate(self, item)

    return mutation


def _value_of(graph: Any, source: Any) -> Any:
    """Return what a graph found at a source, ``None`` for what it makes itself (torch 2.13)."""
    frame = graph.root_tx
    with contextlib.suppress(KeyError, NotImplementedError):
        return source.get_value({"G": frame.f_globals, "L": frame.f_locals}, {}, {})
    return None


def _record_no_reads(effects: Any, item: Any) -> None:
    """Have nothing recorded for later where what that reads is changed, such as the batch, whose size is logged."""
    graph, source = effects.output_graph_weakref(), getattr(item, "source", None)
    if source is None or not (_LATE in vars(graph) or any(one.reads_later for one in late_readers)):
        return
    value = _value_of(graph, source)
    if value is not None and any(one.reads(value) for one in late_readers):
        _record_nothing(graph)


def _construct(construct: Callable[..., Any]) -> Callable[..., Any]:
    """Leave what a metaclass does instead of making an object to Python, and tensors that are made of a size."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        metaclass = type(self.value)
        if metaclass.__call__ is not type.__call__ and metaclass.__module__.partition(".")[0] not in ("enum", "torch"):
            _leave(f"`{metaclass.__name__}.__call__`")
        if hasattr(self.value, "__del__"):
            _refuse(f"it makes a {self.value.__name__}, which has `__del__`")
        of_size = any(isinstance(arg.realize(), SizeVariable) for arg in args)
        if of_size and issubclass(self.value, torch.Tensor):  # dynamo takes the size for the values
            _leave(f"`{self.value.__name__}` of a size")
        return construct(self, tx, args, kwargs)

    return call_function


def _wrap(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Leave classes whose operators, attributes or ``isinstance`` a metaclass of the user's decides: without guards."""

    def __call__(self: Any, value: Any) -> Any:
        if isinstance(value, type):
            meta: Any = type(value)
            own = {name for kind in meta.__mro__ if is_of_user(kind) for name in vars(kind)}
            if not own <= _OF_MAKING:
                _leave(f"the class `{value.__name__}`, whose metaclass `{meta.__name__}` has functions of its own")
        return wrap(self, value)

    return __call__


# in a metaclass, what is called when a class is made, or makes an object (:func:`_construct`)
_OF_MAKING = {"__new__", "__init__", "__call__", "__prepare__", "__module__", "__qualname__", "__doc__", "__dict__"}
_FLAGS: Any = vars(type)["__flags__"].__get__  # a metaclass may have others
_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def is_of_user(kind: type) -> bool:
    """Return whether a class is from a file of the user's."""
    module = sys.modules.get(name) if isinstance(name := vars(kind).get("__module__"), str) else None
    return bool(_FLAGS(kind) & _IN_PYTHON) and not is_installed(getattr(module, "__file__", None) or "")


def _compare(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Leave comparisons of bound methods: dynamo takes two for different ones that Python takes for equal."""

    def richcompare_impl(self: Any, tx: Any, other: Any, op: str) -> Any:
        if isinstance(self, UserMethodVariable) or isinstance(self.value, types.MethodType):
            _leave("a comparison of bound methods")
        return compare(self, tx, other, op)

    return richcompare_impl


def _hash(hash_by_identity: Callable[..., Any]) -> Callable[..., Any]:
    """Leave what is compared by value and has none yet, such as an f-string of a number in a graph, to Python."""

    def hash_impl(self: Any, tx: Any) -> Any:
        with contextlib.suppress(NotImplementedError):
            if issubclass(self.python_type(), (str, bytes, int, float, tuple, frozenset)):
                _leave(f"a {self.python_type().__name__} that is made of a tensor's values as a key")
        return hash_by_identity(self, tx)

    return hash_impl


def _methods(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Leave methods of a class; with no names, all: what they do depends on an order or a state without guards."""

    def make(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if not names or name in names:
                _leave(f"`{self.python_type().__name__}.{name}`")
            return call(self, tx, name, args, kwargs)

        return call_method

    return make


def _draw(_: Callable[..., bool]) -> Callable[..., Any]:
    """Leave Python's random numbers: dynamo makes the float64 of one a float32."""
    return lambda self: False


def _reconstruct_generator(_: Callable[..., Any]) -> Callable[..., Any]:
    def reconstruct(self: Any, codegen: Any) -> None:
        _refuse("a generator lives on where its graph ends")

    return reconstruct


# NumPy

_OF_OBJECTS = {operator.is_, operator.is_not, isinstance, type, getattr, hasattr, setattr, callable, id}


def _call_builtin(call: Callable[..., Any]) -> Callable[..., Any]:
    """Leave what is done to arrays: dynamo guards neither what they hold nor their shape."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn not in _OF_OBJECTS and any(map(is_array, args)):
            _leave(f"`{self.fn.__name__}` of a NumPy array")
        return call(self, tx, args, kwargs)

    return call_function


def is_array(variable: Any) -> bool:
    """Return whether a variable of dynamo is a NumPy array, or a number of NumPy's (torch 2.13)."""
    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():
            return issubclass(variable.peek_type(), (np.ndarray, np.generic))  # without guards on it
        variable = variable.realize()
    return isinstance(variable, NumpyVariable) and isinstance(variable.value, np.ndarray)


_RICHCOMPARE = "richcompare_impl"  # torch 2.13
if not hasattr(UserMethodVariable, _RICHCOMPARE):
    _RICHCOMPARE = "tp_richcompare_impl"  # torch 2.14

LEFT_OUT = [
    Replacement(InstructionTranslatorBase, "run", _run, 178041),
    Replacement(variables.functions.WrapperUserFunctionVariable, "call_function", _call_cached, 152994),
    Replacement(variables.TorchInGraphFunctionVariable, "call_function", _check, None),
    Replacement(higher_order_ops.CheckpointHigherOrderVariable, "_call_function", _checkpoint, None),
    Replacement(SubgraphTracer, "create_proxy", _create_proxy, 148475),
    Replacement(variables.UserFunctionVariable, "bind_args", _bind, None),  # of ours: what a step logs is read after it
    Replacement(OutputGraph, "compile_subgraph", _compile_subgraph, None),  # the same
    Replacement(variables.GenericContextWrappingVariable, "enter", _enter, 148475),
    Replacement(SideEffects, "store_attr", _store, 150864),  # #128533: `__del__`
    Replacement(SideEffects, "mutation", _mutate, None),  # the same
    Replacement(
        variables.UserDefinedClassVariable, "call_function", _construct, 184820
    ),  # #196467: a tensor of a size; #128533: `__del__`
    Replacement(VariableBuilder, "__call__", _wrap, None),
    Replacement(variables.UserDefinedObjectVariable, _RICHCOMPARE, _compare, None),
    Replacement(UserMethodVariable, _RICHCOMPARE, _compare, None),
    Replacement(variables.base.VariableTracker, "hash_impl", _hash, None),
    Replacement(variables.ConstDictVariable, "call_method", _methods("popitem"), 184803),
    Replacement(variables.SetVariable, "call_method", _methods("pop"), 153150),
    Replacement(variables.RandomVariable, "call_method", _methods(), 145445),
    Replacement(variables.UserDefinedObjectVariable, "is_supported_random", _draw, None),
    Replacement(variables.LocalGeneratorObjectVariable, "reconstruct", _reconstruct_generator, 198190),
    Replacement(variables.BuiltinVariable, "call_function", _call_builtin, None),
]
