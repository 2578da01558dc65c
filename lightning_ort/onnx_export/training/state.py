"""What a step keeps in Python, which no model has: it is run again and again, and undone."""

import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ort.onnx_export.failure import ExportFailed, explain
from lightning_ort.onnx_export.training.values import Restored
from lightning_ort.strategies.audit.code_parts import globals_of, is_users
from lightning_ort.strategies.audit.snapshot import (
    MAX_VALUES,
    Numbers,
    Value,
    attributes_of,
    differences,
    gradients,
    is_one,
    left_behind,
    slots_of,
    snapshot,
    stored_in,
    variables_of,
)

_MANY = 10_007  # steps after which what grows is looked at again
_GROWING = (list, deque, dict, set)
_FIXED = (Tensor, int, float, complex, str, bytes, tuple, type(None))  # what cannot be given other parts, or is not to
_NUMBERS = (0, 1, 1_000_003)  # of batches
_ROUNDING = 1e-7  # of tensors and numbers that a step leaves in Python
_TOLERANCE = 1e-4  # of what it returns


def check_repeats(
    run: Callable[[int], Mapping[str, Tensor]],
    module: nn.Module,
    what: str,
    between: Mapping[str, Callable[[], None]] = {},
) -> None:
    """Raise :class:`ExportFailed` if a step, begun anew with the same tensors, does not do the same.

    ``run`` gets the number of the batch, which must make no difference to what it returns. Beside that and the
    gradients, what is left in Python has to be the same, but for containers that grow (:func:`many_steps`). What a
    Trainer runs ``between`` steps, by its name, may change what it likes in Python, but not what the step then returns.
    """
    called: dict[str, dict[str, Any]] = {}  # the global variables of the modules whose functions run, by module
    with python_kept(module), torch.random.fork_rng([]):
        first: dict[str, Value] = {}
        for number in _NUMBERS:
            before = _after(run, module, what, number, called)
            later: dict[str, dict[str, Any]] = {}  # compared from the next batch on
            again = _after(run, module, what, number, called, later)
            called |= later
            if changed := _changed(before[1], again[1], before[2], again[2]):
                names = dict.fromkeys(name.partition("'s ")[0] for name in sorted(changed))
                raise ExportFailed(
                    f"{what} changes {', '.join([*names][:3])}, which a model cannot hold: keep it in a tensor that is"
                    " registered as a buffer, or in the batch."
                )
            if found := differences(before[0], again[0], _TOLERANCE).names:
                raise ExportFailed(
                    f"{what}: {min(found)} is another one when the step runs again with the same tensors and batch. It"
                    " must not depend on state that is in no buffer."
                )
            first = first or before[0]
            common = (first.keys() & before[0].keys()) - {"result"}  # it may log something in some batches
            if found := differences(first, before[0], _TOLERANCE).names & common:
                raise ExportFailed(
                    f"{what}: {min(found)} changes with the number of the batch, which a model does not know."
                )
        for name, function in between.items():
            _run_between(name, function, module)
            if found := differences(before[0], _after(run, module, what, number, called)[0], _TOLERANCE).names:
                raise ExportFailed(
                    f"{what}: {min(found)} is another one after {name}, with the same tensors and batch. It must not"
                    " depend on what is changed there."
                )


def _run_between(name: str, function: Callable[[], None], module: nn.Module) -> None:
    try:
        with many_steps(module), Restored(module, gradients=True):
            function()
    except ExportFailed:
        raise
    except Exception as error:  # the user's code
        raise ExportFailed(f"{name} cannot be run: {explain(error)}") from error


def _after(
    run: Callable[[int], Mapping[str, Tensor]],
    module: nn.Module,
    what: str,
    number: int,
    called: dict[str, dict[str, Any]],
    new: dict[str, dict[str, Any]] | None = None,
) -> tuple[dict[str, Value], dict[str, Value], dict[str, int]]:
    """Run a step: what it returns, what is in Python after it, and the lengths of containers there.

    The global variables of ``called`` are a part of it. Modules whose functions run are added to it, or to ``new``.
    """
    with Restored(module, gradients=True):
        torch.manual_seed(0)
        for parameter in module.parameters():
            parameter.grad = None
        try:
            with _noting_modules(called if new is None else new):
                results = snapshot({"result": dict(run(number))}) | gradients(module)
        except ExportFailed:
            raise
        except Exception as error:  # the user's code
            raise ExportFailed(f"{what} cannot be run: {explain(error)}") from error
        roots = _reached(module) | variables_of(called)
        return results, snapshot(roots), {path: len(one) for path, one in stored_in(roots) if is_one(one, *_GROWING)}


def _changed(
    before: Mapping[str, Value], now: Mapping[str, Value], lengths: Mapping[str, int], now_lengths: Mapping[str, int]
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
def _noting_modules(called: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Add the global variables of modules whose functions run in the block, by the module."""
    before, collects = sys.getprofile(), gc.isenabled()

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__")
        if event == "call" and type(name) is str:
            called.setdefault(name, frame.f_globals)

    gc.disable()  # what a collection calls is not the step's, and it comes at any time
    sys.setprofile(note)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:  # cProfile's, as of Trainer(profiler="advanced")
            before.enable()
        if collects:
            gc.enable()


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
    if is_one(value, types.FunctionType):
        names = globals_of(value).keys() & value.__globals__.keys() if is_users(value) else ()
        return _undo_parts(value.__globals__.get, value.__globals__.__setitem__, names)
    if is_one(value, type):
        names = [name.rpartition(".")[2] for name in attributes_of([value])] if is_users(value) else []
        return _undo_parts(partial(getattr, value), partial(setattr, value), names)
    if is_one(value, types.CellType):
        names = [] if not gc.get_referents(value) else ["cell_contents"]
        return _undo_parts(partial(getattr, value), partial(setattr, value), names)
    attributes = getattr(value, "__dict__", None) if type(value).__module__ != "builtins" else None
    if type(attributes) is dict:
        return _undo_items(attributes, dict)
    names = [name for name, item in slots_of(value) if item is not None]
    return _undo_parts(partial(object.__getattribute__, value), partial(object.__setattr__, value), names)


def _undo_parts(get: Callable[[str], Any], put: Callable[[str, Any], None], names: Iterable[str]) -> Callable[[], None]:
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
