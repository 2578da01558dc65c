"""Values that a step only hands on, to a log or a list, and computes nothing with: :class:`HandedOn`.

Such a value may be another one in each step: numbers that ``item()`` has read, and what Lightning counts, such as
``self.global_step``. That nothing else is done with it is read in the source; what has run tells the rest.
"""

import ast
import dis
import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

_COUNTED = ("global_step", "current_epoch")  # what windows of steps keep up to date, too
_LOGS = ("log", "log_dict")
_BY_ANY_NAME = {"locals", "vars", "eval", "exec", "dir"}
_KEEPS_FRAME = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Site(NamedTuple):
    """Where something was called."""

    code: types.CodeType
    line: int
    me: int  # the identity of the function's first argument

    @classmethod
    def of(cls, frame: Any, back: int = 0) -> "Site":
        """Return where a frame is, or one that has called it."""
        for _ in range(back):
            frame = frame.f_back
        code = frame.f_code
        return cls(code, frame.f_lineno, id(frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None))


class Sink(NamedTuple):
    """A call that hands values on, a statement of its own.

    Attributes:
        to: The attribute of the first argument that gets them: a list, or a method that logs.
        parts: Where in its arguments they are, and what: a line and which ``item()`` of it, or names of attributes.
    """

    to: str
    parts: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]


class _Items(NamedTuple):
    """Calls of ``item()`` in one statement, whose numbers are only handed on: its line, how many, and to what."""

    line: int
    times: int
    to: set[str]


class HandedOn:
    """What one run of a step has handed on.

    Args:
        me: What the step is a method of.
        logged: Where it has logged, once for each time.
        appended: To which list, by identity, it has appended, and where.
        items: Where it has called ``item()``.
        is_kept: Whether an attribute was the same all the time, a list that nothing reads or a method.

    Attributes:
        live: Names of attributes of attributes of Lightning's that are only handed on.
    """

    def __init__(
        self,
        me: Any,
        logged: Sequence[Site],
        appended: Sequence[tuple[int, Site]],
        items: Iterable[Site],
        is_kept: Callable[[str], bool],
    ) -> None:
        self._me, self.appended, self._is_kept = me, appended, is_kept
        self.live: set[tuple[str, ...]] = set()
        self._times = Counter([*logged, *(site for _, site in appended)])
        self._items = Counter((site.code, found.line) for site in items if (found := self.at(site)[1]) is not None)

    def at(self, site: Site) -> tuple[Sink | None, _Items | None]:
        """Return what hands on there, and which numbers are read."""
        sinks, items = _source_of(site.code) if site.me == id(self._me) and self._me is not None else ({}, {})
        return sinks.get(site.line), items.get(site.line)

    def numbers(self, reads: dict[int, Site]) -> dict[tuple[types.CodeType, int], list[int]]:
        """Return which reads of numbers are only handed on, by their lines: those in statements that have run once."""
        found: dict[tuple[types.CodeType, int], list[int]] = {}
        for read, site in reads.items():
            if (items := self.at(site)[1]) is not None and all(map(self._is_kept, items.to)):
                key = site.code, items.line
                found.setdefault(key, []).extend([read] * (self._items[key] == items.times))
        return {key: own for key, own in found.items() if len(own) == self._items[key]}

    def is_handed_on(self, owner: Any, name: str, sites: Iterable[Site]) -> bool:
        """Return whether all that has read an attribute of Lightning's has handed it on."""
        found: set[tuple[str, ...]] = set()
        for site, times in Counter(sites).items():
            sink = self.at(site)[0]
            if name not in _COUNTED or sink is None or not self._is_kept(sink.to):
                return False
            chains = [one for _, one in sink.parts if one[-1] == name]
            if times != len(chains) * self._times[site]:
                return False
            if any(attribute(self._me, chain[:-1]) is not owner for chain in chains):
                return False
            found |= {*chains}
        self.live |= found
        return True


@functools.lru_cache(1024)
def _source_of(code: types.CodeType) -> tuple[dict[int, Sink], dict[int, _Items]]:
    """Return what the source of a function says, by lines."""
    function = parsed(code)
    if function is None or not code.co_argcount or code.co_flags & _KEEPS_FRAME:
        return {}, {}
    names = [one for one in ast.walk(function) if isinstance(one, ast.Name)]
    me = code.co_varnames[0]
    if any(one.id in _BY_ANY_NAME or (one.id == me and not isinstance(one.ctx, ast.Load)) for one in names):
        return {}, {}
    reader = _Reader(function, me)
    parts: dict[ast.stmt, list[Any]] = {}  # of each call that hands on
    items: dict[ast.stmt, list[Any]] = {}  # of statements that call item(), the places of each number
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and (chain := reader.chain(node)) and (place := reader.place(node)):
            parts.setdefault(place[0], []).append((place[1], chain))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item":
            variable = reader.assigned(node, code)
            loads = [one for one in names if one.id == variable and isinstance(one.ctx, ast.Load)]
            places = [reader.place(one) for one in (loads if variable else [node])]
            items.setdefault(reader.statement(node), []).append((node.end_lineno, node.end_col_offset, places))
    given = {
        statement: [places for _, _, places in sorted(numbers, key=lambda number: number[:2])]
        for statement, numbers in items.items()
        if reader.is_alone(statement) and all(places and all(places) for _, _, places in numbers)
    }
    for statement, numbers in given.items():
        for at, places in enumerate(numbers):
            for sink, path in places:
                parts.setdefault(sink, []).append((path, (statement.lineno, at)))
    sinks = {one: Sink(reader.chain(one.value.func)[0], tuple(found)) for one, found in parts.items()}  # type: ignore[attr-defined]
    read = {
        one: _Items(one.lineno, len(numbers), {sinks[sink].to for places in numbers for sink, _ in places})
        for one, numbers in given.items()
    }
    return {n: sinks[one] for one in sinks for n in _lines(one)}, {n: read[one] for one in read for n in _lines(one)}


def parsed(code: types.CodeType) -> Any:
    """Return the source of a function, if it is that of its code."""
    try:
        lines, first = inspect.getsourcelines(code)
        around = [f"def _({', '.join({*code.co_freevars} - {'__class__'})}):\n", " class _:\n"]
        head = around if lines[0][0] == " " else []
        tree, compiled = ast.parse(text := "".join(head + lines)), compile(text, "", "exec", dont_inherit=True)
        for _ in range(len(head) + 1):
            inner = [one for one in compiled.co_consts if isinstance(one, types.CodeType)]
            compiled = next(one for one in inner if one.co_name in ("_", code.co_name))
    except (OSError, SyntaxError, TypeError, ValueError, IndexError, StopIteration):
        return None
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == code.co_name]
    is_same = functions and _text(compiled) == _text(code)
    return ast.increment_lineno(functions[0], first - 1 - len(head)) if is_same else None


def _text(code: types.CodeType) -> list[Any]:
    """What a function does, but for how it calls the functions of imported modules: that depends on its file."""
    found: list[Any] = [code.co_name, code.co_varnames, code.co_freevars, code.co_cellvars]
    for op in dis.get_instructions(code):
        if op.opname not in ("PUSH_NULL", "EXTENDED_ARG"):
            is_number = op.opcode in (*dis.hasjrel, *dis.hasjabs) or isinstance(op.argval, types.CodeType)
            found.append((op.opname.replace("LOAD_METHOD", "LOAD_ATTR"), "" if is_number else repr(op.argval)))
    return found


def _lines(node: Any) -> range:
    return range(node.lineno, node.end_lineno + 1)


class _Reader:
    """Reads where in the source of a function a value goes."""

    def __init__(self, function: ast.AST, me: str) -> None:
        nodes = ast.walk(function)
        self._parents: dict[Any, Any] = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self._me = me

    def _ancestors(self, node: Any) -> Iterator[ast.AST]:
        while (node := self._parents.get(node)) is not None:
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that an expression is a part of."""
        return next(one for one in self._ancestors(node) if isinstance(one, ast.stmt))

    def is_alone(self, statement: ast.stmt) -> bool:
        """Whether nothing else is on its lines."""
        lines, own, around = _lines(statement), {*ast.walk(statement)}, {*self._ancestors(statement)}
        return not any(
            one not in own and (one.lineno in lines or (one.end_lineno in lines and one not in around))
            for one in self._parents
            if isinstance(one, (ast.stmt, ast.expr, ast.excepthandler, ast.pattern))
        )

    def chain(self, node: ast.expr) -> tuple[str, ...]:
        """The names of attributes of attributes of the first argument."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        return tuple(names) if isinstance(node, ast.Name) and node.id == self._me else ()

    def assigned(self, node: ast.expr, code: types.CodeType) -> str:
        """The variable that gets a value, if that is all it ever gets."""
        parent: Any = self._parents[node]
        if not isinstance(parent, ast.Assign) or [type(one) for one in parent.targets] != [ast.Name]:
            return ""
        name: str = getattr(parent.targets[0], "id", "")
        ops = [op.argval for op in dis.get_instructions(code) if op.opname.startswith(("STORE_", "DELETE_"))]
        stored = [one for one in ops if name == one or (isinstance(one, tuple) and name in one)]
        is_argument = any(isinstance(one, ast.arg) and one.arg == name for one in self._parents)
        is_local = name in code.co_varnames and name not in code.co_cellvars
        return name if is_local and not is_argument and len(stored) == 1 else ""

    def place(self, node: ast.expr) -> tuple[ast.stmt, tuple[Any, ...]] | None:
        """The call that hands on a value, and where in its arguments that is; none if it may go elsewhere."""
        path: list[Any] = []
        child: Any = node
        for parent in self._ancestors(node):
            if isinstance(parent, (ast.Tuple, ast.List)) and not any(isinstance(e, ast.Starred) for e in parent.elts):
                path.insert(0, parent.elts.index(child))
            elif isinstance(parent, ast.Dict) and child in parent.values:
                keys = [one.value if isinstance(one, ast.Constant) else None for one in parent.keys]
                if not all(type(key) is str for key in keys) or len({*keys}) < len(keys):
                    return None
                path.insert(0, keys[parent.values.index(child)])
            elif isinstance(parent, ast.keyword):
                path.insert(0, parent.arg)
            elif isinstance(parent, ast.Call) and child is not parent.func and self._is_sink(parent):
                path = [parent.args.index(child), *path] if child in parent.args else path
                return self._parents[parent], tuple(path)
            else:
                return None
            child = parent
        return None

    def _is_sink(self, call: ast.Call) -> bool:
        """Whether all that a call does is to hand on its arguments, and nothing else is on its lines."""
        chain, statement = self.chain(call.func), self._parents[call]
        if chain[1:] != ("append",) and (len(chain) != 1 or chain[0] not in _LOGS):
            return False
        inner = [one.attr for one in ast.walk(statement) if isinstance(one, ast.Attribute)]
        is_starred = any(isinstance(one, ast.Starred) for one in call.args) or None in [k.arg for k in call.keywords]
        is_only = len([one for one in inner if one in ("append", *_LOGS)]) == 1
        return isinstance(statement, ast.Expr) and is_only and not is_starred and self.is_alone(statement)


def attribute(of: Any, names: Iterable[str]) -> Any:
    """Return an attribute of an attribute."""
    return functools.reduce(getattr, names, of)


def put(tree: Any, path: Sequence[Any], value: Any) -> Any:
    """Return tuples, lists, and dictionaries with another value in one place."""
    if not path:
        return value
    if type(tree) is dict:
        return {**tree, path[0]: put(tree[path[0]], path[1:], value)}
    parts = [*tree]
    parts[path[0]] = put(parts[path[0]], path[1:], value)
    return type(tree)(parts)
