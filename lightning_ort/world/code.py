"""What a function may read: the names in its bytecode, whichever branch it takes."""

import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}
# what reads attributes whose names are not in the code: of objects that are listed, and of any, a tensor among them
_OF_LISTED = {"vars", "dir", "__dict__", "locals"}
_OF_ANY = {"attrgetter", "methodcaller", "__getattribute__", "getmembers"}
_ANY_NAME = _OF_LISTED | _OF_ANY


@dataclass
class Reads:
    """What the code of one function may read and write.

    Attributes:
        chains: Global names, each with the attributes that are read of it: ``("np", "random", "rand")``.
        imports: What it imports: name, level, and what is taken of it.
        names: Attributes that it reads of anything else, and strings which may be names.
        attributes: Those of them that it reads as attributes.
        used: Names and global variables that it reads for more than to append to what they hold.
        stores: Attributes that it writes.
        written: Chains of which it writes an attribute.
        receivers: Arguments of which it reads attributes whose names are not in the code.
        sources: Global variables of which it does so.
        any_name: Whether it may do so with other objects.
        of_any: Whether these may be tensors.
        sets_items: Whether it sets items of anything.
    """

    chains: set[tuple[str, ...]] = field(default_factory=set)
    imports: set[tuple[str, int, tuple[str, ...]]] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    written: set[tuple[str, ...]] = field(default_factory=set)
    receivers: set[str] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)
    any_name: bool = False
    of_any: bool = False
    sets_items: bool = False


def strings_of(code: types.CodeType) -> Iterator[str]:
    """Constants of a function that may be names of attributes."""
    waiting: list[Any] = list(code.co_consts)
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and value.isidentifier():
            yield value
        elif isinstance(value, (tuple, frozenset)):
            waiting += value


def imported_module(namespace: dict[str, Any], name: str, level: int) -> str:
    """Return the full name of what an import in a function with these globals names."""
    if level:
        package = (namespace.get("__package__") or "").split(".")
        name = ".".join(filter(None, [*package[: len(package) - level + 1], name]))
    return name


@functools.lru_cache(4096)
def reads_of(code: types.CodeType) -> Reads:
    """Read the bytecode of a function (CPython 3.10 to 3.14)."""
    found, ops = Reads(), list(dis.get_instructions(code))
    strings = set(strings_of(code))
    found.names |= strings
    found.used |= strings
    modules = _imported(ops, found)
    past = 0  # what belongs to a chain
    for at, op in enumerate(ops):
        name, argument = op.opname, op.argval
        if name in ("LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "MAKE_CELL"):
            found.used.add(argument) if not _appends(ops, at) else found.names.add(argument)
        elif name in ("STORE_ATTR", "DELETE_ATTR"):
            found.stores.add(argument)
        if name in _GLOBALS or (name.startswith("LOAD_FAST") and argument in modules):
            past = _read_chain(ops, at, modules.get(argument, (argument,)), found)
            last = ops[past - 1].argval
            if last in _BY_NAME or last in ("vars", "dir"):
                first, second = _arguments(ops, at)
                if last not in _BY_NAME or second is None or second.opname != "LOAD_CONST":
                    _add_receiver(code, ops, first, found, last in _BY_NAME)
            else:
                found.any_name |= last in _ANY_NAME
                found.of_any |= last in _OF_ANY
        elif name in _ATTRIBUTES and at >= past:
            argument = argument[-1] if isinstance(argument, tuple) else argument
            found.names.add(argument)
            found.attributes.add(argument)
            if not _appends(ops, at):
                found.used.add(argument)
            if argument in _ANY_NAME:
                _add_receiver(code, ops, ops[at - 1], found, argument in _OF_ANY)
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            found.sets_items = True
        elif name == "MATCH_CLASS":
            found.any_name = True
    return found


def _read_chain(ops: list[dis.Instruction], at: int, base: tuple[str, ...], found: Reads) -> int:
    """Add a global variable or module, with the attributes that are read of it at once; return where it ends."""
    chain, end = [*base], at + 1
    while end < len(ops) and ops[end].opname in _ATTRIBUTES:
        chain.append(ops[end].argval)
        end += 1
    found.chains.add(tuple(chain))
    if end < len(ops) and ops[end].opname in ("STORE_ATTR", "DELETE_ATTR"):
        found.written.add(tuple(chain))
    if not _appends(ops, at):
        found.used.update(chain[:-2] if chain[-1] == "append" else chain)
    return end


def _imported(ops: list[dis.Instruction], found: Reads) -> dict[str, tuple[str, ...]]:
    """Local variables that hold modules, each as a chain that starts with an ``import``."""
    modules: dict[str, tuple[str, ...]] = {}
    for at, op in enumerate(ops):
        if op.opname != "IMPORT_NAME":
            continue
        level, names = ops[at - 2].argval, ops[at - 1].argval
        found.imports.add((op.argval, level if isinstance(level, int) else 0, tuple(names or ())))
        follow = at + 1
        if names is None and ops[follow].opname.startswith("STORE_") and isinstance(ops[follow].argval, str):
            modules[ops[follow].argval] = (f"import {op.argval.partition('.')[0]}",)
    return modules


def _appends(ops: list[dis.Instruction], at: int) -> bool:
    """Whether what is loaded here is only appended to: ``x.append``, ``x["key"].append``."""
    at += 1
    while (
        at + 1 < len(ops)
        and (ops[at].opname in ("LOAD_CONST", "LOAD_SMALL_INT") or ops[at].opname in ("LOAD_FAST", "LOAD_FAST_BORROW"))
        and ops[at + 1].opname in ("BINARY_SUBSCR", "BINARY_OP")
    ):
        if ops[at + 1].opname == "BINARY_OP" and "[" not in str(ops[at + 1].argrepr):
            return False
        at += 2
    return at < len(ops) and ops[at].opname in _ATTRIBUTES and ops[at].argval == "append"


def _add_receiver(
    code: types.CodeType, ops: list[dis.Instruction], of: dis.Instruction | None, found: Reads, of_any: bool
) -> None:
    """Note of which object attributes are read whose names are not in the code: an argument, or anything."""
    if of is not None and of.opname == "LOAD_GLOBAL":
        found.sources.add(of.argval)
        return
    is_variable = of is not None and of.opname in ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF")
    name = of.argval if of is not None and is_variable else None
    stored = {op.argval for op in ops if op.opname.startswith(("STORE_FAST", "STORE_DEREF", "DELETE_"))}
    given = {*code.co_varnames[: code.co_argcount], *code.co_freevars}
    if name in given - stored and not any(map(_is_pair, stored)):
        found.receivers.add(name)
    else:
        found.any_name = True
        found.of_any |= of_any


def _is_pair(names: Any) -> bool:
    return isinstance(names, tuple)


def _arguments(ops: list[dis.Instruction], at: int) -> tuple[dis.Instruction | None, dis.Instruction | None]:
    """The instructions that load the first two arguments of a call, where each is no more than that."""
    depth, base = 0, 0
    found: list[dis.Instruction | None] = [None, None]
    for op in ops[at:]:
        before = depth
        try:
            depth += dis.stack_effect(op.opcode, op.arg if op.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        except ValueError:
            break
        if op is ops[at] or op.opname == "PUSH_NULL" or (op.opname in _ATTRIBUTES and not base):
            continue
        base = base or before
        for place in (0, 1):
            if before == base + place < depth:
                found[place] = op if depth == before + 1 else None
            elif depth == base + place + 1 and before >= depth and not op.opname.startswith(("PRECALL", "KW_NAMES")):
                found[place] = None  # something is made of it
        if op.opname.startswith("CALL") and depth <= base:
            return (found[0], found[1])
    return (None, None)
