"""A closed world: what one step reads is listed, and the list is compared."""

import functools
import gc
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from lightning_ort.compat.torch import HOOKS_OF_ALL_MODULES
from lightning_ort.world.flat import PLAIN, Flat, hooks_of_gradient, storage_of
from lightning_ort.world.handed_on import HandedOn, Site
from lightning_ort.world.held import Held, parts_of
from lightning_ort.world.listing import Listing
from lightning_ort.world.memory import Effect, Memory, structure_of
from lightning_ort.world.modes import modes, random_states
from lightning_ort.world.objects import TENSORS, Surroundings
from lightning_ort.world.places import Places, root_of
from lightning_ort.world.unread import unread_arguments
from lightning_ort.world.watch import Opening, Watch

_LEAVES = (*PLAIN, torch.dtype, torch.device, torch.Size)


class World:
    """What one step reads: closed or open, and whether that has changed.

    Args:
        step: The function or method that is about to run.
        arguments: What it is called with.

    Attributes:
        openings: Why the world is open; empty: it is closed.
        effects: What the step wrote to things that were there before.
        slots: Items that the step may read and that it sets to other tensors.
        slot_values: What these held before the step.
        tensors: Tensors that its code may read, arguments left out.
        unread: Positions of arguments that no code reads.
        me: What the step is a method of, if it is one.
    """

    def __init__(self, step: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.openings: list[Opening] = []
        self.effects: list[Effect] = []
        self.slots: list[tuple[Any, Any]] = []
        self.slot_values: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.unread: frozenset[int] = frozenset()
        self._step, self._arguments = step, arguments
        self.me = getattr(step, "__self__", None)
        kinds = type(self.me).__mro__ if self.me is not None else ()
        packages = {root_of(kind.__module__) for kind in kinds} or {root_of(getattr(step, "__module__", ""))}
        self._places = Places(packages - {"builtins", "abc", "typing"})
        self._surroundings = Surroundings(self._places)
        self._memory = Memory(self._surroundings)
        self._watch = Watch(self._places, _code_of(step), self._memory.remember_globals)
        self._times = 0
        self._stale = ""
        self._held: list[Any] = []  # objects in the batch, each with what it is compared by
        self._flat = Flat()
        self._storages: set[int] = set()
        self._flags: list[tuple[torch.Tensor, bool, int]] = []
        try:
            self._find_unknown(self._held)
            self._memory.remember(step, "the step")
            self._memory.remember(arguments, "the batch")
            self._memory.remember(HOOKS_OF_ALL_MODULES, "hooks of all modules")
            self._flags = [(tensor, tensor.requires_grad, tensor.data_ptr()) for tensor in self._memory.tensors()]
        except Exception as error:  # odd objects of the user's
            self.openings.append(Opening(f"it cannot be read: {type(error).__name__}: {error}", ""))
            self._memory.forget()
        if self._memory.finalizer:  # what is remembered is kept alive: nothing is then, and nothing watched
            self.openings.append(Opening(f"{self._memory.finalizer} has __del__", ""))
            self._memory.forget()
            self._flags = []
        self._modes, self._random = modes(), random_states()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, what runs is noted: around the step, and again around its backward pass."""
        if sys.getprofile() is not None or sys.gettrace() is not None:
            self.openings.append(Opening("a profiler, debugger or coverage tool watches the process", ""))
        if self.openings:
            yield
            return
        self._watch.is_backward = self._times > 0
        self._times += 1
        collects = gc.isenabled()
        gc.disable()  # what is called when objects are collected is not called by the step
        sys.setprofile(self._watch)
        try:
            yield
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()
            if not self._watch.is_backward and modes() != self._modes:  # the backward pass has others around it
                self.openings.append(Opening("it changes a mode of PyTorch", ""))

    def close(self, logged: Sequence[Site] = ()) -> HandedOn | None:
        """Read the code that ran, which has logged at these places, and list what it may read.

        Returns:
            What it only hands on, which need not be what it was; None where that is not known.
        """
        found = None
        try:
            found = self._close(logged)
        except Exception as error:  # odd objects of the user's: what cannot be read is open
            self.openings.append(Opening(f"it cannot be read: {type(error).__name__}: {error}", ""))
        self.openings = list(dict.fromkeys(self.openings))
        del self._memory, self._watch, self._arguments, self._held
        return found

    def _close(self, logged: Sequence[Site]) -> HandedOn | None:
        watch, memory = self._watch, self._memory
        if self.openings and not watch.ran:
            return None
        self.openings += watch.openings
        if (code := _code_of(self._step)) is None or id(code) not in (watch.ran.keys() | watch.others.keys()):
            self.openings.append(Opening("the step did not run, or is not written in Python", ""))
            return None
        self._surroundings.ran = watch.ran.keys()
        self._check_state()
        self._sort_written(memory)
        listing = Listing(self._surroundings, memory, watch)
        kinds = [(type(one), type(one).__name__) for one in _objects(self._arguments)]
        handed_on = HandedOn(self.me, logged, watch.appended, watch.items, functools.partial(listing.is_kept, self.me))
        listing.fill([(self._step, "the step"), *kinds], self.slots, handed_on, self._held[::2])
        for effect in self.effects:
            self._check_effect(effect, listing)
        self.openings += listing.openings
        self.tensors = list(listing.tensors.values())
        skipped = int(hasattr(self._step, "__self__"))
        unread = unread_arguments(code, [ran.code for ran in watch.ran.values()])
        self.unread = frozenset(index - skipped for index in unread if index >= skipped)
        self._flat = listing.flat
        for tensor in self.tensors:
            self._flat.add_tensor(tensor)
            self._check_hooks(tensor)
        self._storages = {*map(storage_of, self.tensors)} - {0}
        for name, (read, value) in watch.settings.items():
            self._flat.add_value(f"torch's setting {name}", read, value)
        self._flat.add_value("a mode of PyTorch", modes, self._modes)
        for owner, key in self.slots:
            self._flat.add_value(f"the kind of {key}", functools.partial(_structure_of_item, owner, key))
        if self.slots:
            self._flat.add_value("which kept tensors are one", self._shared_slots)
        self._flat.seal()
        return handed_on

    def _check_state(self) -> None:
        """What the step must leave as it was."""
        held: list[Any] = []
        self.openings += self._find_unknown(held)
        if held[1::2] != self._held[1::2]:
            self.openings.append(Opening("it changes its batch", ""))
        if random_states() != self._random:
            self.openings.append(Opening("it draws random numbers of Python or NumPy", ""))
        for tensor, requires_grad, address in self._flags:
            if (tensor.requires_grad, tensor.data_ptr()) != (requires_grad, address):
                self.openings.append(Opening("it changes requires_grad or the memory of a tensor", ""))

    def _find_unknown(self, held: list[Any]) -> list[Opening]:
        return [one for each in self._arguments for one in _unknown_leaves(each, self._surroundings, held)]

    def _check_hooks(self, tensor: torch.Tensor) -> None:
        """A hook of a gradient that is there takes part in the backward pass; one that comes later is seen."""
        for hooks in hooks_of_gradient(tensor):
            if hooks:
                self.openings.append(Opening("a tensor that it reads has a hook of its gradient", ""))
            elif hooks is not None:  # one was there before
                self._flat.add_container(hooks, "hooks of a tensor")

    def _sort_written(self, memory: Memory) -> None:
        of_batch = {id(part) for one in _objects(self._arguments) for part in (one, getattr(one, "__dict__", None))}
        for written in memory.written():
            if isinstance(written, Opening):
                self.openings.append(written)
            elif id(written.owner) in of_batch:
                self.openings.append(Opening("it changes its batch", str(written.key)))
            else:
                self.effects.append(written)
                before = memory.item_before(written.owner, written.key)
                if written.kind == "item" and isinstance(written.owner, dict) and structure_of(before) is not None:
                    self.slots.append((written.owner, written.key))
                    self.slot_values.append(before)

    def _check_effect(self, effect: Effect, listing: Listing) -> None:
        """A write changes what the step reads, unless it is a slot, or nothing reads it."""
        if id(effect.owner) in listing.appended:
            return
        if (effect.owner, effect.key) not in [(owner, key) for owner, key in self.slots if owner is effect.owner]:
            self._stale = f"it has written {effect.key or 'to a list'} itself"

    def _shared_slots(self) -> list[int]:
        """Which of the tensors in slots and of those beside them are in the same memory."""
        kept = [storage_of(one) for owner, key in self.slots for one in _leaves(owner.get(key))]
        return [kept.index(one) if one not in self._storages else -1 for one in kept]

    def holds(self) -> bool:
        """Whether nothing of what the step reads has changed."""
        return not self._stale and not self.openings and self._flat.holds()

    def shares(self, storages: Iterable[int]) -> bool:
        """Whether tensors in these storages have memory in common with what the step reads beside them."""
        if not self._storages.isdisjoint(storages):
            return True
        kept = {storage_of(one) for owner, key in self.slots for one in _leaves(owner.get(key))}
        return not kept.isdisjoint(storages)

    def changed(self) -> str:
        """What has changed, for people; empty if nothing has."""
        return self._stale or self._flat.changed()


def _code_of(step: Callable[..., Any]) -> types.CodeType | None:
    function = getattr(step, "__func__", step)
    return getattr(function, "__code__", None)


def _structure_of_item(owner: dict[Any, Any], key: Any) -> Any:
    return structure_of(owner.get(key))


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a slot."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)


def _objects(value: Any) -> Iterator[Any]:
    """All containers and dataclasses in a batch."""
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name, None) for field in fields(value)]
    else:
        return
    yield value
    for one in inner:
        yield from _objects(one)


def _unknown_leaves(value: Any, surroundings: Surroundings, held: list[Any]) -> Iterator[Opening]:
    """Values in a batch that cannot be compared by the recording; objects that are held by it are added to a list."""
    kind = type(value)
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_fields") and kind.__bases__ == (tuple,)):
        for one in value:
            yield from _unknown_leaves(one, surroundings, held)
    elif kind in (dict, OrderedDict, defaultdict):
        for key, one in value.items():
            if type(key) not in _LEAVES:
                yield Opening(f"the batch has keys of the class {type(key).__name__}", "")
            yield from _unknown_leaves(one, surroundings, held)
    elif is_dataclass(value) and not isinstance(value, type):
        if unknown := surroundings.unknown(value):
            yield Opening(f"the batch holds an object whose class {unknown}", "")
        if set(getattr(value, "__dict__", ())) - {field.name for field in fields(value)}:
            yield Opening(f"the batch holds a {kind.__name__} with attributes that are no fields", "")
        for field in fields(value):
            yield from _unknown_leaves(getattr(value, field.name, None), surroundings, held)
    elif isinstance(value, torch.Tensor):
        if kind not in TENSORS:
            yield Opening(f"the batch holds a tensor of the class {kind.__name__}", "")
    elif kind not in _LEAVES and parts_of(value, surroundings.places) is not None:
        held += [value, Held.of(value)]
    elif kind not in _LEAVES:
        yield Opening(f"the batch holds an object of the class {kind.__module__}.{kind.__name__}", "")
