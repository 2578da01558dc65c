"""Which values the code that ran may read: a walk from the step along the names in that code."""

import builtins
import functools
import sys
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_ort.compat.torch import HOOKS_OF_ALL_MODULES
from lightning_ort.world.code import Reads, imported_module, reads_of, strings_of
from lightning_ort.world.flat import PLAIN, Flat
from lightning_ort.world.handed_on import HandedOn
from lightning_ort.world.held import parts_of
from lightning_ort.world.memory import OF_LIGHTNING, Memory
from lightning_ort.world.objects import (
    ALWAYS,
    MACHINERY,
    MAX_ITEMS,
    WRAPPERS,
    Part,
    Surroundings,
    is_array,
    own_attribute,
)
from lightning_ort.world.places import Place
from lightning_ort.world.watch import Opening, Other, Ran, Watch

# what reads or writes a tensor without a dispatched call
_UNSEEN_ATTRIBUTES = {"grad", "_grad", "grad_fn", "_version", "_base", "is_leaf", "output_nr", "retains_grad"}
# of a class: not read by a step, or implied by its identity
_OF_CLASSES = {
    "__module__",
    "__doc__",
    "__dict__",
    "__weakref__",
    "__annotations__",
    "__qualname__",
    "__annotate_func__",
}
_OF_CLASSES |= {"__annotations_cache__", "__firstlineno__", "__static_attributes__", "__type_params__"}


class Names:
    """Names that occur in the code that ran.

    Attributes:
        strict: Those in the code of the user and of installed packages.
        all: These, and those in the code of known packages.
        used: Those in the user's code for more than to append to what they hold.
        of_user: Those in the user's code.
        any: Whether attributes may be read whose names do not occur.
    """

    def __init__(self, watch: Watch) -> None:
        self.strict: set[str] = set()
        self.used: set[str] = set()
        self.of_user: set[str] = set()
        self.any = False
        known: set[str] = set()
        for other in watch.others.values():
            if other.place is Place.OURS:
                continue
            target = self.strict if other.place is Place.PACKAGE else known
            target.update(other.code.co_names, strings_of(other.code))
        self.used |= self.strict
        self._known = known

    def add(self, reads: Reads) -> None:
        """Add those of a function of the user's."""
        self.strict |= reads.names | reads.stores
        self.of_user |= reads.names | reads.stores
        self.used |= reads.used
        self.any |= reads.any_name

    def seal(self) -> None:
        """All have been added."""
        self._known.discard("_current_fx_name")
        self.all = self.strict | self._known


class Listing:
    """Fills the flat list.

    Args:
        surroundings: What values are made of.
        memory: What was there before the step.
        watch: What ran.

    Attributes:
        flat: The list.
        openings: What cannot be listed.
        tensors: Tensors that may be read, by identity.
        appended: Lists that the code only appends to, by identity.
    """

    def __init__(self, surroundings: Surroundings, memory: Memory, watch: Watch) -> None:
        self.flat = Flat()
        self.openings: dict[Opening, None] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.appended: dict[int, Any] = {}
        self.listed: set[int] = set()
        self._surroundings, self._memory, self._watch = surroundings, memory, watch
        self._names = Names(watch)
        self._seen: dict[int, tuple[Any, bool]] = {}  # whether as something that the user's code may read
        self._waiting: deque[tuple[Any, str, bool]] = deque()
        self._globals: dict[int, tuple[dict[str, Any], set[str], set[str]]] = {}
        self._lists: dict[int, tuple[list[Any], str]] = {}
        self._holders: dict[int, set[Any]] = defaultdict(set)  # of a container: names, or other containers' identities
        self._functions: set[int] = set()
        self._codes = watch.ran.keys() | watch.others.keys()
        self._absent: dict[tuple[tuple[str, ...], bool], frozenset[str]] = {}
        self._slots: set[tuple[int, Any]] = set()
        self._kinds: dict[type, set[str]] = {torch.Tensor: set()}  # of packages, with their methods that count

    def fill(
        self,
        roots: Iterable[tuple[Any, str]],
        slots: Iterable[tuple[Any, Any]],
        handed_on: HandedOn,
        held: Iterable[Any],
    ) -> None:
        """List what can be read from these objects, but not the values of the slots, nor what is only handed on."""
        self._slots = {(id(owner), key) for owner, key in slots}
        for ran in self._watch.ran.values():
            self._read_function(ran)
        self._names.seal()
        self._add_held(held)
        for value, what in roots:
            self._wait(value, what, strict=True)
        for hooks in HOOKS_OF_ALL_MODULES:
            self._wait(hooks, "hooks of all modules", strict=False)
        for ran in self._watch.ran.values():
            for me in ran.me.values():
                self._root(ran, me())
        live = self._watch.live
        plain = [key for key, owner in live.items() if isinstance(getattr(owner, key[1]), PLAIN)]
        for key in [key for key in live if key not in plain]:
            self._read_property(live[key], key[1])
        if self._watch.warns:
            self._take_global(vars(warnings), "filters")
            self._wait(warnings.filters, "filters of warnings", strict=True)
        for other in self._watch.others.values():
            if other.place in (Place.KNOWN, Place.PACKAGE):
                self._read_other(other)
        while self._waiting:
            self._visit(*self._waiting.popleft())
        self._finish_lists()
        for key in plain:
            if not handed_on.is_handed_on(live[key], key[1], self._watch.sites[key]):
                self._read_property(live[key], key[1])
        self._finish_kinds()
        self._finish_globals()
        self._find_functions()

    def _add_held(self, values: Iterable[Any]) -> None:
        """List attributes that the user's code may read of objects that are compared by their pickles otherwise."""
        for value in (part for one in values for part in (parts_of(one) or ((), ()))[1]):
            if self._names.any or id(value) in self._watch.read_by_user:
                self._open("it reads attributes by names that are not in its code", type(value).__name__)
            if isinstance(own := own_attribute(value, "__dict__"), dict):
                there = self._names.of_user & own.keys()
                self.flat.add_object(value)
                self.flat.add_items(own, sorted(there), type(value).__name__)
                self.flat.add_absent(own, frozenset(self._names.of_user - there), type(value).__name__)
                for name in there:
                    self._wait(own[name], f".{name}", strict=True)

    # Code

    def _open(self, what: str, where: str) -> None:
        self.openings[Opening(what, where)] = None

    def _read_function(self, ran: Ran) -> None:
        reads = reads_of(ran.code)
        self._names.add(reads)
        for name in sorted(_UNSEEN_ATTRIBUTES & reads.attributes):
            self._open(f"it reads .{name}", ran.where)
        if "data" in reads.stores:
            self._open("it writes .data", ran.where)
        if reads.of_any:
            self._open("it reads attributes by names that are not in its code", ran.where)
        for name in reads.sources:
            self._read_source(ran, name)
        for chain in reads.chains:
            self._read_chain(ran, chain, chain in reads.written)
        for name, level, taken in reads.imports:
            self._read_import(ran, name, level, taken)

    def _take_global(self, namespace: dict[str, Any], name: str) -> bool:
        """List a global variable, or that there is none."""
        _, there, absent = self._globals.setdefault(id(namespace), (namespace, set(), set()))
        (there if name in namespace else absent).add(name)
        return name in namespace

    def _read_chain(self, ran: Ran, chain: tuple[str, ...], written: bool) -> None:
        name, *rest = chain
        if name.startswith("import "):
            namespace: dict[str, Any] = sys.modules
            name = name.removeprefix("import ")
        else:
            namespace = ran.namespace
        if not self._take_global(namespace, name):
            if namespace is sys.modules or not hasattr(builtins, name):
                return
            namespace = vars(builtins)
            self._take_global(namespace, name)
        value = namespace[name]
        while isinstance(value, types.ModuleType) and rest:
            if value.__name__ == "numpy.random":
                self._open("it uses numpy.random", ran.where)
            if not self._take_global(vars(value), rest[0]):
                break
            value = vars(value)[rest.pop(0)]
        self._names.strict.update(rest)
        self._names.used.update(rest[:-2] if rest[-1:] == ["append"] else rest)
        if isinstance(value, types.ModuleType) and not rest:
            place = self._surroundings.places.of_module(value.__name__)
            if place in (Place.STANDARD, Place.PACKAGE):
                self._open(f"it uses the module {value.__name__} as a value", ran.where)
        if written and not rest and self._surroundings.places.of_class(type(value)) is Place.KNOWN:
            self._open(f"it writes {'.'.join(chain)}", ran.where)
        self._holders[id(value)].add(chain[len(chain) - len(rest) - 1].removeprefix("import "))
        self._wait(value, ".".join(chain[: len(chain) - len(rest)]), strict=True)

    def _read_source(self, ran: Ran, name: str) -> None:
        """List all of a module of which any attribute may be read; other global variables are too many."""
        value = ran.namespace.get(name)
        if not isinstance(value, types.ModuleType) or self._surroundings.places.of_module(value.__name__) in (
            Place.STANDARD,
            Place.PACKAGE,
        ):
            self._open("it reads attributes by names that are not in its code", ran.where)
            return
        for attribute in list(vars(value)):
            self._take_global(vars(value), attribute)
            if isinstance(vars(value)[attribute], (types.FunctionType, type, *PLAIN)):
                self._wait(vars(value)[attribute], f"{name}.{attribute}", strict=True)

    def _read_import(self, ran: Ran, name: str, level: int, taken: tuple[str, ...]) -> None:
        name = imported_module(ran.namespace, name, level)
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            self._take_global(sys.modules, ".".join(parts[:end]))
        module = sys.modules.get(name)
        for each in taken:
            if module is not None and self._take_global(vars(module), each):
                self._wait(vars(module)[each], f"{name}.{each}", strict=True)

    def _read_module(self, module: types.ModuleType) -> None:
        """List what may be read of a module that was not found by its name."""
        for name in self._names.strict & vars(module).keys():
            self._take_global(vars(module), name)
            self._wait(vars(module)[name], f"{module.__name__}.{name}", strict=True)
        absent = frozenset(self._names.strict - vars(module).keys())
        self.flat.add_absent(vars(module), absent, module.__name__)

    def _read_property(self, owner: Any, name: str) -> None:
        """A property of Lightning's is read again at each comparison."""
        value = getattr(owner, name)
        what = f"{type(owner).__name__}.{name}"
        if isinstance(value, (*PLAIN, torch.device, torch.dtype)):
            self.flat.add_value(what, functools.partial(getattr, owner, name))
        elif getattr(owner, name) is not value:
            self._open(f"it reads {what}", "")
        else:
            self.flat.add_value(what, lambda: id(getattr(owner, name)))
            self._wait(value, what, strict=True)

    def _root(self, ran: Ran, me: Any) -> None:
        """What a function was called with first, if it was there before the step but is hidden."""
        made = ran.code.co_name in ("__init__", "__new__", "__post_init__")
        if me is None or made or isinstance(me, torch.autograd.function.FunctionCtx):
            return
        if me in self._memory or isinstance(me, type):
            self._wait(me, type(me).__name__, strict=True)

    def _read_other(self, other: Other) -> None:
        """List by which names a function of a package finds others, and by which it was found."""
        waiting, seen = [other.namespace], set()
        while waiting:
            namespace = waiting.pop()
            seen.add(id(namespace))
            for name in other.code.co_names:
                if name in namespace:
                    self._take_global(namespace, name)
                    if isinstance(value := namespace[name], types.ModuleType) and id(vars(value)) not in seen:
                        waiting.append(vars(value))
        for kind in other.kinds:
            self._kinds.setdefault(kind, set()).update({other.code.co_name} & vars(kind).keys())

    # Objects

    def _wait(self, value: Any, what: str, strict: bool) -> None:
        self._waiting.append((value, what, strict))

    def _visit(self, value: Any, what: str, strict: bool) -> None:
        if strict and (unknown := self._surroundings.unknown(value)):
            self._open(f"it may read {unknown}", what)
            return
        if (seen := self._seen.get(id(value))) is not None and seen[1] >= strict:
            return
        self._seen[id(value)] = (value, strict)
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
        if isinstance(value, types.ModuleType) and value.__name__ not in ("__main__", "builtins"):
            self._read_module(value)
        if isinstance(value, (torch.Tensor, types.FunctionType)) and not value.__dict__:
            self.flat.add_size(value.__dict__)
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            self._wait(value.__self__, what, strict)
        if isinstance(value, types.FunctionType):
            self._functions.add(id(value.__code__))
        if isinstance(value, type) and self._surroundings.places.of_class(value) in (Place.USER, Place.PACKAGE):
            self.flat.add_class(value)
            if named := [name for name in ("__name__", "__qualname__") if name in self._names.strict]:
                self.flat.add_attributes(value, named, what)
            for base in value.__bases__:
                self._wait(base, base.__name__, strict=False)
        parts = self._surroundings.parts(value, what)
        if any(isinstance(part.owner, dict) and part.of is value for part in parts):
            self.flat.add_object(value)
            self._wait(type(value), type(value).__name__, strict=False)
        for part in parts:
            self._list(part, strict)

    def _list(self, part: Part, strict: bool) -> None:
        of, first = part.of, part.key not in self.listed or part.names != ()
        if part.names:
            self._list_names(part, strict)
        elif of is None:
            self._list_container(part, strict, first)
        elif first:
            self.listed.add(part.key)
            self._list_attributes(part)

    def _list_names(self, part: Part, strict: bool) -> None:
        """What C keeps of an object: its slots, a function's code, defaults and cells."""
        owner, is_object = part.owner, part.of is part.owner
        every = not is_object or self._names.any or id(owner) in self._watch.read_anyhow
        names = [name for name in part.names if every or name in self._names.all]
        if isinstance(owner, types.FunctionType):
            names = names if id(owner.__code__) in self._codes else []
            names += [name for name in ("__name__", "__qualname__", "__doc__") if name in self._names.strict]
        if not names:
            return
        try:
            self.flat.add_attributes(owner, names, part.what)
        except (AttributeError, ValueError):
            self._open("it may read an attribute that is not set", f"{part.what}.{names[0]}")
        for name in names:
            value = getattr(owner, name, None)
            self._holders[id(value)].add(name if is_object else part.of or "")
            self._wait(value, f"{part.what}.{name}" if is_object else part.what, strict)

    def _list_container(self, part: Part, strict: bool, first: bool) -> None:
        owner = part.owner
        if strict:
            self._check_covered(part)
        if is_array(owner):
            self.flat.add_value(part.what, owner.tobytes)
            return
        if len(owner) > MAX_ITEMS:
            return
        if type(owner) is list:
            self._lists[id(owner)] = (owner, part.what)
        elif first and not isinstance(owner, (tuple, frozenset)):
            self._add_container(owner, part.what)
        self.listed.add(id(owner))
        for key, value in self._memory.pairs_before(part):
            if isinstance(value, PLAIN) or (id(owner), key) in self._slots:
                continue
            self._holders[id(value)].add(id(owner))
            self._wait(value, f"{part.what}[{key!r}]" if isinstance(key, (int, str)) else part.what, strict)

    def _add_container(self, owner: Any, what: str) -> None:
        slots = [key for of, key in self._slots if of == id(owner)]
        if not slots:
            self.flat.add_container(owner, what)
        else:
            self.flat.add_keys(owner, what)
            self.flat.add_items(owner, [key for key in owner if key not in slots], what)

    def _list_attributes(self, part: Part) -> None:
        """Attributes whose names occur in the code."""
        owner, of, names = part.owner, part.of, self._names
        self._check_covered(part)
        known = names.strict if self._surroundings.is_known_to_user(part) else names.all
        if isinstance(of, type):
            keys = self._list_class(of, owner)
        elif id(of) in self._watch.read_anyhow or (names.any and known is names.all):
            keys = [key for key in owner if key not in OF_LIGHTNING]
            self.flat.add_keys(owner, part.what)
        else:
            keys = [key for key in owner if key in known]
            self.flat.add_absent(owner, self._absent_names(tuple(keys), known), part.what)
            if isinstance(of, nn.Module):
                keys = [key for key in owner if key in ALWAYS or key in (names.strict if key in MACHINERY else known)]
        self.flat.add_items(owner, [key for key in keys if (id(owner), key) not in self._slots], part.what)
        before = dict(self._memory.pairs_before(part))
        for key in keys:
            if (id(owner), key) in self._slots or key not in before:
                continue
            self._holders[id(before[key])].add(key)
            strict = key in names.strict or (names.any and not str(key).startswith("_"))
            name = f"{part.what}.{key}" if isinstance(of, (type, types.ModuleType)) else f".{key}"
            self._wait(before[key], name, strict)

    def _list_class(self, kind: type, owner: Mapping[str, Any]) -> list[str]:
        """Names of a class that count: of a trusted package's those that hold no code."""
        names = self._names
        if self._surroundings.places.of_class(kind) is Place.PACKAGE:
            code = (*WRAPPERS, types.FunctionType)
            return [key for key in owner if key in names.strict and not isinstance(owner[key], code)]
        self.flat.add_keys(owner, kind.__name__)
        keys = [key for key in owner if key in names.all or names.any or key[:2] == "__"]
        return [key for key in keys if key not in _OF_CLASSES or key in names.strict - {"__dict__", "__weakref__"}]

    def _absent_names(self, keys: tuple[str, ...], names: set[str]) -> frozenset[str]:
        key = keys, names is self._names.strict
        if key not in self._absent:
            self._absent[key] = frozenset(names.difference(keys))
        return self._absent[key]

    def _check_covered(self, part: Part) -> None:
        """What was not seen before the step, and is not new, may have been written."""
        owner = part.owner
        if isinstance(owner, (tuple, frozenset)) or self._memory.before(part) is not None:
            return
        if self._stores & set(owner) if part.of is not None else self._sets_items or id(owner) in self._watch.changed:
            self._open("it may write what could not be seen before", part.what)

    @functools.cached_property
    def _stores(self) -> set[str]:
        return {name for ran in self._watch.ran.values() for name in reads_of(ran.code).stores}

    @functools.cached_property
    def _sets_items(self) -> bool:
        return any(reads_of(ran.code).sets_items for ran in self._watch.ran.values())

    # What is left

    def _finish_lists(self) -> None:
        """Lists that the code only appends to are not read."""
        for key, (owner, what) in self._lists.items():
            if self._names.any or self._is_used(key, set()):
                self._add_container(owner, what)
            else:
                self.appended[key] = owner

    def _is_used(self, container: int, asked: set[int]) -> bool:
        """Whether the code may do more with a container than append to it or its items."""
        asked.add(container)
        holders = self._holders.get(container)
        if not holders:
            return True
        return any(
            holder not in asked and self._is_used(holder, asked)
            if isinstance(holder, int)
            else not holder or holder in self._names.used
            for holder in holders
        )

    def is_kept(self, me: Any, name: str) -> bool:
        """Whether an object has had the same attribute all the time, a list that nothing reads or a method."""
        stored = {"__setattr__"} & self._names.strict or self._names.any or id(me) in self._watch.read_anyhow
        for ran in self._watch.ran.values():
            stored = stored or name in reads_of(ran.code).stores or name in strings_of(ran.code)
        is_list = id(vars(me).get(name)) in self.appended
        return not stored and is_list is not hasattr(type(me), name)

    def _finish_kinds(self) -> None:
        """Methods of packages' classes that ran, and that no other class has got one that hides them."""
        self._kinds[torch.Tensor] |= {
            name for name in vars(torch.Tensor) if name in self._names.all or name[:2] == "__"
        }
        for kind, names in self._kinds.items():
            self.flat.add_size(vars(kind))
            self.flat.add_items(vars(kind), sorted(names - _OF_CLASSES), kind.__name__)

    def _finish_globals(self) -> None:
        for namespace, there, absent in self._globals.values():
            what = str(namespace.get("__name__", "modules")) if namespace is not sys.modules else "modules"
            self.flat.add_items(namespace, sorted(there), what)
            self.flat.add_absent(namespace, frozenset(absent), what)

    def _find_functions(self) -> None:
        """Each function that ran is among those that were found, or was made by one."""
        found = set(self._functions)
        waiting = [ran.code for ran in self._watch.ran.values()] + [other.code for other in self._watch.others.values()]
        for code in waiting:
            found.update(id(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))
        for ran in self._watch.ran.values():
            if id(ran.code) not in found and ran.code.co_name != "<module>":
                self._open(f"it runs a function that was not found: {ran.code.co_name}", ran.where)
