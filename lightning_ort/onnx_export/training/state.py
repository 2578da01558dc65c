"""A module while its step runs: its tensors, and what it keeps in Python, which no model has, and is undone."""

import ast
import gc
import inspect
import linecache
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_ort.compat.step_trace import is_fake, stand_for, tables_of
from lightning_ort.compat.torch_graphs import without_tracing
from lightning_ort.onnx_export.failure import ExportFailed, explain
from lightning_ort.world.code_parts import globals_of, is_users
from lightning_ort.world.snapshot import (
    MAX_VALUES,
    Numbers,
    Value,
    attributes_of,
    differences,
    is_one,
    left_behind,
    slots_of,
    snapshot,
    stored_in,
)

_READS = (
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__deepcopy__, Tensor.__reduce_ex__),
    *(Tensor.data_ptr, Tensor.untyped_storage),
)
# through which torch asks for a number
_PASSED = (
    *(__name__, "lightning_ort.compat.step_trace", "torch._compile", "torch._dynamo.eval_frame", "torch._tensor"),
    *("torch.fx.experimental.proxy_tensor", "torch.overrides", "torch.utils._python_dispatch"),
)
_GET_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_MANY = 10_007  # steps after which what grows is looked at again
_GROWING = (list, deque, dict, set)
_FIXED = (Tensor, int, float, complex, str, bytes, tuple, type(None))  # what cannot be given other parts, or is not to
_NUMBERS = (0, 1, 1_000_003)  # of batches
_ROUNDING = 1e-7  # of tensors and numbers that a step leaves in Python


class Restored(AbstractContextManager["Restored"]):
    """After the block a module has the parameters, buffers and gradients of before.

    ``values`` and ``gradients``: whether something may be written to them; otherwise they are replaced at most.
    """

    def __init__(self, module: nn.Module, values: bool = True, gradients: bool = False) -> None:
        self.module = module
        self.tables: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [
            (child, dict(tables_of(child)[0]), dict(tables_of(child)[1])) for child in module.modules()
        ]
        tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())} if values else {}
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        grads = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._gradients = [(p, grad.clone() if gradients and grad is not None else grad) for p, grad in grads]

    def replaced(self) -> Iterator[tuple[nn.Module, dict[str, Any], str, Any, Any]]:
        """What is another object than before: the submodule, its table, the name there, then and now."""
        for child, *tables in self.tables:
            for table, before in zip(tables_of(child), tables, strict=True):
                for key in {*table, *before}:
                    if table.get(key) is not before.get(key):
                        yield child, table, key, before.get(key), table.get(key)

    @override
    def __exit__(self, *_: object) -> None:
        for child, *tables in self.tables:
            for table, before in zip(tables_of(child), tables, strict=True):
                table.clear()
                table.update(before)
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


class Values(TorchFunctionMode):
    """Within the block, a module's parameters have no gradients at first, and what happens to its tensors is noted."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # the same tensor may have several names, of which the first counts
        self._tensors = {name: tensor for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self.names: Mapping[int, str] = {id(tensor): name for name, tensor in self._tensors.items()}
        self._read: set[str] = set()
        self._replaced: dict[str, Tensor] = {}  # whose ``data`` was assigned
        self.checks: dict[str, Tensor] = {}  # what has to be true, or the step raises, by what it is called

    @override
    def __enter__(self) -> "Values":
        self._before = Restored(self.module, values=False)
        for parameter in self.module.parameters():
            parameter.grad = None
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._before.__exit__()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args else None
        if isinstance(tensor, Tensor) and not is_fake(tensor):
            if func in _READS:
                self._note_read(tensor)
                with without_tracing():
                    return func(*args, **(kwargs or {}))
            if func == _GET_DATA:
                return tensor.detach().data  # autograd does not see what is written to it
            if func == _SET_DATA:
                return self._replace(tensor, args[1])
        elif func == _SET_DATA:
            raise ExportFailed("assigning to `data` of a tensor that is no parameter cannot be traced: use copy_")
        return func(*args, **(kwargs or {}))

    def number_of(self, tensor: Tensor) -> Any:
        """The number in a tensor of one that has values, or what a condition is if the step is not to fail there."""
        if not is_fake(tensor):
            self._note_read(tensor)
            with without_tracing():
                return tensor.item()
        if (check := check_at(inspect.currentframe())) is None:
            return None
        wanted, line = check
        holds = tensor.detach() != 0
        self._check(holds if wanted else ~holds, line)
        return wanted

    def _check(self, holds: Tensor, line: str) -> None:
        self.checks[f"check/{len(self.checks)}: {line}"] = holds

    def _note_read(self, tensor: Tensor) -> None:
        if id(tensor) in self.names:
            self._read.add(self.names[id(tensor)])

    def _replace(self, tensor: Tensor, value: Tensor) -> None:
        name = self.names.get(id(tensor), "a tensor")
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise ExportFailed(
                f"{name} is given data of {value.dtype}{list(value.shape)}; it is {tensor.dtype}{list(tensor.shape)}."
            )
        stand_for(tensor, value.detach())
        self._replaced[name] = tensor

    def assigned(self) -> dict[str, Tensor]:
        """The new values of buffers that were assigned, and of tensors that got other data."""
        found = {name: tensor.detach() for name, tensor in self._replaced.items()}
        paths = {id(child): path for path, child in self.module.named_modules()}
        for child, table, key, old, now in self._before.replaced():
            name = f"{paths[id(child)]}.{key}".lstrip(".")
            found[self.names.get(id(old), name)] = _checked(name, old, now, table is tables_of(child)[1])
        return found

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of parameters that have one."""
        return {
            name: tensor.grad.detach()
            for name, tensor in self._tensors.items()
            if tensor.is_leaf and tensor.grad is not None
        }

    def check(self, written: set[str]) -> None:
        """Raise ``ExportFailed`` if something changes from step to step of which a value was read."""
        trained = {name for name, tensor in self._tensors.items() if tensor.requires_grad}
        if found := sorted(self._read & (written | trained)):
            raise ExportFailed(
                f"The step reads the values of {', '.join(found)}, which change from step to step: they would be"
                " constants of the model."
            )


def check_at(frame: FrameType | None) -> tuple[bool, str] | None:
    """What a condition has to be for a frame to go on, and its line, if it raises an error otherwise."""
    while frame is not None and frame.f_globals.get("__name__") in _PASSED:
        frame = frame.f_back
    if frame is None:
        return None
    file, number = frame.f_code.co_filename, frame.f_lineno
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # of a notebook's cell, for example
        return None
    for node in ast.walk(tree):
        if not isinstance(node, (ast.If, ast.Assert)) or not node.lineno <= number <= (node.test.end_lineno or 0):
            continue
        negated, test = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not), node.test
        raises = isinstance(node, ast.Assert) or (isinstance(node.body[0], ast.Raise) and not node.orelse)
        if raises and not isinstance(test.operand if negated else test, ast.BoolOp):  # type: ignore[attr-defined]
            return isinstance(node, ast.Assert) is not negated, f"{Path(file).name}:{number}"
    return None


def _checked(name: str, old: Any, now: Any, is_buffer: bool) -> Tensor:
    if not is_buffer:
        raise ExportFailed(f"The step assigns the parameter {name}, which its optimizer would not know: write to it.")
    if not isinstance(old, Tensor) or not isinstance(now, Tensor):
        raise ExportFailed(f"The step registers or removes the buffer {name}: register it in `__init__`.")
    if old.shape != now.shape or old.dtype != now.dtype:
        raise ExportFailed(
            f"The step assigns {now.dtype}{list(now.shape)} to the buffer {name}, which is {old.dtype}"
            f"{list(old.shape)}: a model's buffers keep their dtype and shape."
        )
    return now.detach()


def check_repeats(run: Callable[[int], Any], module: nn.Module, what: str) -> None:
    """Raise :class:`ExportFailed` if a step, begun anew with the same tensors, leaves something else in Python.

    ``run`` gets the number of the batch. Containers may grow (:func:`many_steps`). Whether it returns the same is found
    out where that is compared with what a model returns.
    """
    with python_kept(module), torch.random.fork_rng([]):
        for number in _NUMBERS:
            before, again = _after(run, module, what, number), _after(run, module, what, number)
            if changed := _changed(*before, *again):
                names = dict.fromkeys(name.partition("'s ")[0] for name in sorted(changed))
                raise ExportFailed(
                    f"{what} changes {', '.join([*names][:3])}, which a model cannot hold: keep it in a tensor that is"
                    " registered as a buffer, or in the batch."
                )


def _after(
    run: Callable[[int], Any], module: nn.Module, what: str, number: int
) -> tuple[dict[str, Value], dict[str, int]]:
    """Run a step: what is in Python after it, and the lengths of containers there."""
    with Restored(module, gradients=True):
        torch.manual_seed(0)
        for parameter in module.parameters():
            parameter.grad = None
        try:
            run(number)
        except ExportFailed:
            raise
        except Exception as error:  # the user's code
            raise ExportFailed(f"{what} cannot be run: {explain(error)}") from error
        roots = _reached(module)
        return snapshot(roots), {path: len(one) for path, one in stored_in(roots) if is_one(one, *_GROWING)}


def _changed(
    before: Mapping[str, Value], lengths: Mapping[str, int], now: Mapping[str, Value], now_lengths: Mapping[str, int]
) -> list[str]:
    """The names of what is different, but for what containers have got in addition."""
    grown = [path for path, length in now_lengths.items() if lengths.get(path, length) < length]
    found = differences(before, now, _ROUNDING)
    counts = [name for name, value in now.items() if isinstance(value, Numbers) and value.kind == "int"]
    names = found.names | {name for name in counts if before.get(name, now[name]) != now[name]}
    if len(now) >= MAX_VALUES:  # what comes last is not there any more
        names &= before.keys() & now.keys()
    return [
        name
        for name in names
        if name not in grown and (name in before or not any(name.startswith(path) for path in grown))
    ]


def _reached(module: nn.Module) -> dict[str, Any]:
    """What a step may change, its code and that of what it holds included."""
    roots = left_behind(module, None)
    for _ in range(2):  # the second time what the code of the first holds
        kinds = {type(value) for _, value in stored_in(roots)}
        roots |= {kind.__qualname__: kind for kind in kinds if is_users(kind) and kind.__qualname__ not in roots}
    return roots


@contextmanager
def python_kept(module: nn.Module) -> Iterator[None]:
    """Undo what a step does to attributes, global variables and what closures and containers hold."""
    undo = [_undo(value) for _, value in stored_in(_reached(module)) if not is_one(value, *_FIXED)]
    try:
        yield
    finally:
        for function in undo:
            function()


def _undo(value: Any) -> Callable[[], None]:
    """Return what gives an object its present parts again."""
    if is_one(value, *_GROWING):
        return _undo_items(value, _kind_of(value))
    get: Callable[[str], Any] = partial(getattr, value)
    put: Callable[[str, Any], None] = partial(setattr, value)
    names: Iterable[str] = ()
    if is_one(value, types.FunctionType):
        get, put = value.__globals__.get, value.__globals__.__setitem__
        names = globals_of(value).keys() & value.__globals__.keys() if is_users(value) else ()
    elif is_one(value, type):
        names = [name.rpartition(".")[2] for name in attributes_of([value])] if is_users(value) else ()
    elif is_one(value, types.CellType):
        names = ["cell_contents"] if gc.get_referents(value) else ()
    else:
        attributes = getattr(value, "__dict__", None) if type(value).__module__ != "builtins" else None
        if type(attributes) is dict:
            return _undo_items(attributes, dict)
        get, put = partial(object.__getattribute__, value), partial(object.__setattr__, value)
        names = [name for name, item in slots_of(value) if item is not None]
    before = {name: get(name) for name in names}

    def undo() -> None:
        for name, one in before.items():
            if get(name) is not one:
                put(name, one)

    return undo


def _undo_items(value: Any, kind: Any) -> Callable[[], None]:
    def items() -> Any:
        return dict(dict.items(value)) if is_one(value, dict) else [*kind.__iter__(value)]

    before = items()

    def undo() -> None:
        if _identities(items()) != _identities(before):
            kind.clear(value)
            (kind.extend if is_one(value, list, deque) else kind.update)(value, before)

    return undo


def _kind_of(container: Any) -> Any:
    """The class of Python's own whose methods change a container."""
    return next(base for base in type(container).__mro__ if base.__module__ in ("builtins", "collections"))


def _identities(container: Any) -> list[int]:
    return [*map(id, (*container, *(container.values() if type(container) is dict else ())))]


@contextmanager
def many_steps(module: nn.Module) -> Iterator[None]:
    """After the block containers that have grown in it are as long as after many steps."""
    before = {id(one): (one, len(one)) for _, one in stored_in(_reached(module)) if is_one(one, *_GROWING)}
    yield
    for one, length in before.values():
        if len(one) <= length:
            continue
        kind = _kind_of(one)
        added = [*kind.__iter__(one)][length:]
        if is_one(one, list, deque):
            kind.extend(one, added * _MANY)
            continue
        for number in range(_MANY):
            for key in added:
                new = key + number + 1 if type(key) is int else f"{key}{number}" if type(key) is str else (key, number)
                kind.add(one, new) if is_one(one, set) else kind.__setitem__(one, new, kind.__getitem__(one, key))
