"""A program that runs again and again: :class:`Replay`, and the signature of what it runs on."""

import copy
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ort.compat.torchscript import below_autograd, plain_executor
from lightning_ort.recording.calls import Recorder, Value
from lightning_ort.recording.program import Program
from lightning_ort.world.held import Held

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Foreign(Exception):
    """An object among arguments or results that cannot be taken apart."""


def flatten(tree: Any, tensors: list[Tensor], holds: bool = False) -> Any:
    """Return what arguments or results are but for their tensors, comparable, and append these.

    With ``holds``, objects of installed packages may be among them, which have to be the same ones later.

    Raises:
        Foreign: If there is an object of an unknown class.

    """
    kind = type(tree)
    if isinstance(tree, Tensor):
        if tree.__dict__:
            raise Foreign("a tensor with attributes of its own")
        tensors.append(tree)
        lazy = tree.is_conj(), tree.is_neg(), tree.is_inference()
        return (kind, tree.shape, tree.stride(), tree.dtype, tree.device, tree.requires_grad, lazy)
    if kind is list or kind is tuple:
        return (kind, *[flatten(one, tensors, holds) for one in tree])
    if kind in _PLAIN:
        is_float = kind is float or kind is complex
        return (kind, repr(tree) if is_float else tree)  # a NaN equals itself, and no 0.0 a -0.0
    if isinstance(tree, Mapping) and kind.__module__ in ("builtins", "collections"):
        return (kind, tuple(tree), *[flatten(one, tensors, holds) for one in tree.values()])
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):
        return (kind, *[flatten(one, tensors, holds) for one in tree])
    if (parts := _fields(tree)) is not None:
        return (kind, *[flatten(one, tensors, holds) for one in parts.values()])
    if holds and (held := Held.of(tree)) is not None:
        return held
    raise Foreign(f"an object of {kind.__module__}.{kind.__qualname__}")


def _fields(tree: Any) -> dict[str, Any] | None:
    """Return the fields of an object of a dataclass that holds nothing else, in slots or in its ``__dict__``."""
    kind = type(tree)
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return None
    held, names = dict(getattr(tree, "__dict__", ())), [field.name for field in dataclasses.fields(kind)]
    for slot in _slots(kind):
        try:
            held[slot.__name__] = slot.__get__(tree)
        except AttributeError:  # it is not set
            return None
    return {name: held[name] for name in names} if held.keys() == {*names} else None


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    return [one for base in kind.__mro__ for one in vars(base).values() if type(one) is types.MemberDescriptorType]


def rebuilt(tree: Any, tensor: Callable[[Any], Any]) -> Any:
    """Return arguments or results, which :func:`flatten` can take apart, with others for their tensors and values."""
    kind = type(tree)
    if isinstance(tree, (Tensor, Value)):
        return tensor(tree)
    if kind in _PLAIN:
        return tree
    if isinstance(tree, Mapping):
        copied: Any = copy.copy(tree)
        for key, one in tree.items():
            copied[key] = rebuilt(one, tensor)
        return copied
    if isinstance(tree, (list, tuple)):
        parts = [rebuilt(one, tensor) for one in tree]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    made = object.__new__(kind)
    for name, one in (_fields(tree) or {}).items():
        object.__setattr__(made, name, rebuilt(one, tensor))
    return made


class Replay:
    """Runs a program on other tensors in the place of the arguments that it was recorded with.

    Args:
        program: What to run.
        recorder: Whose arguments and constants it has, and what was there before.

    Attributes:
        function: What runs it, of its inputs: PyTorch's interpreter.
    """

    def __init__(self, program: Program, recorder: Recorder) -> None:
        self._program, self.function = program, program.build()
        self._draws, self._reads, self._results = program.draws, program.reads, len(program.results)
        self._end = self._results + len(program.reads)
        index_of = {value: index for index, value in enumerate(recorder.arguments)}
        fixed = {**recorder.found, **program.constants}
        self._inputs: list[Any] = [fixed.get(value) for value in program.inputs]
        self._changing = [(place, index_of[value]) for place, value in enumerate(program.inputs) if value in index_of]
        self._written = [fixed[value] for value in program.written if value in fixed]
        self._written_arguments = [index_of[value] for value in program.written if value in index_of]
        by_kind = sorted(program.written, key=index_of.__contains__)  # these after those
        self._written_places = [*map(program.inputs.index, by_kind)]
        self._saved = [one.detach().clone() for one in self._written]
        self._is_new = True

    def __len__(self) -> int:
        return self._results

    def on(
        self, compile: Callable[[Program, Sequence[Tensor]], Callable[..., Sequence[Any]]], tensors: Any
    ) -> "Replay":
        """Return one that runs what ``compile`` makes of the program and of its inputs, with these arguments."""
        other = copy.copy(self)
        other.function = compile(self._program, [one.detach() for one in self._inputs_with(tensors)])
        return other

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Return the results; ``None`` where it has failed or Python would have read something else.

        Nothing was done then: what was written and the random state are as before.
        """
        saved = self.save(tensors)
        results = None
        try:
            results = self._run(tensors)
        except Exception:
            results = None
        if results is None or (self._reads and [*map(_plain, results[self._results : self._end])] != self._reads):
            self.restore(tensors, saved)
            return None
        return results[: self._results]

    def _run(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        inputs = self._inputs
        for place, index in self._changing:
            inputs[place] = tensors[index]
        try:
            with below_autograd():
                if self._is_new:
                    with plain_executor():
                        results = self.function(*inputs)
                    self._is_new = False
                    return results
                return self.function(*inputs)
        finally:
            self._clear()

    def _inputs_with(self, tensors: Sequence[Tensor]) -> list[Any]:
        inputs = [*self._inputs]
        for place, index in self._changing:
            inputs[place] = tensors[index]
        return inputs

    def _clear(self) -> None:
        for place, _ in self._changing:
            self._inputs[place] = None

    def save(self, tensors: Sequence[Tensor]) -> Any:
        """Keep what a run changes: what it writes to, and the random state."""
        if self._written:
            with below_autograd():
                torch._foreach_copy_(self._saved, self._written)
        arguments = [tensors[index].clone() for index in self._written_arguments]
        return self._saved, arguments, torch.default_generator.get_state() if self._draws else None

    def again(
        self, tensors: Sequence[Tensor], saved: Any, change: Callable[[list[Any]], list[Any]]
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Run once more from what :meth:`save` of one of the same program has kept, on what ``change`` makes of inputs.

        Nothing is written to or drawn; returns the results, and what would be left in what it writes to.
        """
        inputs, state = self._inputs_with(tensors), torch.default_generator.get_state()
        kept, arguments, before = saved
        for place, one in zip(self._written_places, (*kept, *arguments), strict=True):
            inputs[place] = one
        inputs = change([one.detach().clone() for one in inputs])
        try:
            if before is not None:
                torch.default_generator.set_state(before)
            with below_autograd():
                results = self.function(*inputs)
            left = [inputs[place] for place in self._written_places]
            return results[: self._results], [*left, torch.default_generator.get_state()]
        finally:
            torch.default_generator.set_state(state)

    def state(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of what it writes to, as it is now, and the random state."""
        written = [*self._written, *(tensors[index] for index in self._written_arguments)]
        return [*(one.detach().clone() for one in written), torch.default_generator.get_state()]

    def restore(self, tensors: Sequence[Tensor], saved: Any) -> None:
        """Put back what the last :meth:`save` has kept."""
        kept, arguments, state = saved
        with below_autograd():
            if self._written:
                torch._foreach_copy_(self._written, kept)
            for index, before in zip(self._written_arguments, arguments, strict=True):
                tensors[index].copy_(before)
        if state is not None:
            torch.default_generator.set_state(state)


def _plain(read: Any) -> Any:
    return list(read) if isinstance(read, (list, tuple)) else read
