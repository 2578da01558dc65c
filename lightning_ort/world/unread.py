"""Arguments that no code reads, but to pass them on: :func:`unread_arguments`."""

import ast
import functools
import inspect
import types
from collections.abc import Iterable

from lightning_ort.world.handed_on import parsed


def unread_arguments(code: types.CodeType, ran: Iterable[types.CodeType]) -> frozenset[int]:
    """Return the positions of a function's parameters that it only passes on, if at all, to others that do not read it.

    Args:
        code: That of the function.
        ran: That of all functions that it may have called.

    """
    by_name: dict[str, list[types.CodeType]] = {}
    for one in ran:
        by_name.setdefault(one.co_name, []).append(one)
    seen: set[tuple[types.CodeType, str]] = set()

    def reads(one: types.CodeType, name: str) -> bool:
        if (one, name) in seen:
            return False
        seen.add((one, name))
        passed = _passed_on(one)
        if passed is None or name not in passed:
            return True
        return any(_is_read_by(function, place) for function, place in passed[name])

    def _is_read_by(function: str, place: int | str) -> bool:
        if not (codes := by_name.get(function)):
            return True
        for one in codes:
            names = one.co_varnames[: one.co_argcount]
            # called as a method, it gets them one place later; where that is not sure, both places count
            first = int(names[:1] == ("self",))
            taken = (place,) if isinstance(place, str) else names[place + first : place + 2]
            if one.co_flags & _VARIABLE or not taken or any(each not in names or reads(one, each) for each in taken):
                return True
        return False

    names = code.co_varnames[: code.co_argcount]
    return frozenset(index for index, name in enumerate(names) if not reads(code, name))


_VARIABLE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


@functools.lru_cache(1024)
def _passed_on(code: types.CodeType) -> dict[str, list[tuple[str, int | str]]] | None:
    """Return for each parameter that is only passed on as it is, to which functions and where; ``None`` if unknown."""
    if (tree := parsed(code)) is None:
        return None
    found: dict[str, list[tuple[str, int | str]]] = {name: [] for name in code.co_varnames[: code.co_argcount]}
    passed: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if any(isinstance(one, ast.Starred) for one in node.args):
            continue
        places: list[tuple[int | str, ast.expr]] = [*enumerate(node.args)]
        places += [(one.arg, one.value) for one in node.keywords if one.arg is not None]
        for place, given in places:
            if isinstance(given, ast.Name) and given.id in found:
                passed.add(id(given))
                found[given.id].append((node.func.attr, place))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and id(node) not in passed:
            if node.id in ("locals", "vars", "eval", "exec"):
                return None
            found.pop(node.id, None)
    return found
