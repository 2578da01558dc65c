"""Checks of arguments; each error says what was passed, what is allowed and what to do."""

import difflib
import functools
import inspect
import math
import os
import reprlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

_Kind = TypeVar("_Kind")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200


def passed(name: str, value: Any, owner: str = "") -> str:
    """Return how an argument was passed in one line, such as ``ORTConfig(engine='fast')``."""
    text = " ".join(f"{name}={_short.repr(value)}".split())
    return f"{owner}({text})" if owner else text


def closest(name: object, allowed: Collection[str], what: str) -> str:
    """Return a question with the allowed name that is closest, or a list of all names if none is close.

    The first one with all words of the name is closest: ``adamw_torch_fused`` for ``adamw_fused``.
    """
    words = set(str(name).split("_"))
    close = [each for each in allowed if words.issubset(each.split("_"))]
    close = close or difflib.get_close_matches(str(name), allowed, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the {what} are {', '.join(allowed)}."


def check_choice(name: str, value: Any, choices: Iterable[Any], owner: str = "") -> None:
    """Raise ValueError unless a value is one of the choices."""
    choices = tuple(choices)
    # `1 == True`, so the types are compared as well
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{passed(name, value, owner)}: choose one of {', '.join(map(repr, choices))}.")


def check_integer(name: str, value: Any, lowest: int, highest: int | None = None, owner: str = "") -> int:
    """Return an integer, or raise TypeError or ValueError; ``5e8``, which YAML reads as a float, is an integer."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{passed(name, value, owner)}: pass an integer{_range(lowest, highest)}.")
    if value < lowest or (highest is not None and value > highest):
        most = f" and at most {highest}" if highest is not None else ""
        raise ValueError(f"{passed(name, value, owner)}: must be at least {lowest}{most}.")
    return value


def _range(lowest: int, highest: int | None) -> str:
    return f" of {lowest} or more" if highest is None else f" from {lowest} to {highest}"


def check_number(name: str, value: Any, owner: str = "") -> None:
    """Raise TypeError or ValueError unless a value is a finite number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{passed(name, value, owner)}: pass a number of 0 or more.")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{passed(name, value, owner)}: must be finite, and not negative.")


def check_share(name: str, value: Any, owner: str = "", may_be_0: bool = False) -> None:
    """Raise TypeError or ValueError unless a value is a number above 0, or from 0, and at most 1."""
    allowed = "from 0 to 1" if may_be_0 else "above 0 and at most 1"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{passed(name, value, owner)}: pass a number {allowed}.")
    if not (0 < value <= 1 or (may_be_0 and value == 0)):
        raise ValueError(f"{passed(name, value, owner)}: must be {allowed}.")


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], allowed: str, owner: str = "") -> None:
    """Raise TypeError unless a value has one of the types; ``allowed`` describes them."""
    if not isinstance(value, kinds):
        raise TypeError(f"{passed(name, value, owner)}: pass {allowed}.")


def check_path(name: str, value: Any, owner: str = "", allowed: str = "a path") -> str:
    """Return a path as a string, or raise TypeError or ValueError."""
    try:
        path = os.fspath(value)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise TypeError(f"{passed(name, value, owner)}: pass {allowed}.")
    if not path or "\0" in path:
        raise ValueError(f"{passed(name, value, owner)}: this names no file; pass {allowed}.")
    return path


def check_writable(name: str, path: str, is_folder: bool, owner: str = "") -> None:
    """Raise ValueError if nothing can be written to a path, before there is something to write.

    Only the first process of a run checks: it alone writes some files, to a disk that the others may not have.
    """
    if any(os.environ.get(variable, "0") != "0" for variable in ("RANK", "SLURM_PROCID")):
        return
    if (obstacle := _not_writable_reason(Path(path).absolute(), is_folder)) is not None:
        kind = "a folder" if is_folder else "a file"
        raise ValueError(f"{passed(name, path, owner)}: {obstacle}. Pass {kind} that can be written.")


def _not_writable_reason(path: Path, is_folder: bool) -> str | None:
    try:
        above = next(folder for folder in (path, *path.parents) if folder.exists())
        if above == path and not is_folder:
            if path.is_dir():
                return "this is a folder"
            if not os.access(path, os.W_OK):
                return "the file cannot be written"
            above = path.parent
        if not above.is_dir():
            return f"{above} is no folder"
        # os.access allows root everything, even in /proc, so try it
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        return f"it cannot be written ({error.strerror})"
    return None


def check_keywords(
    owner: str,
    given: Mapping[str, Any] | Iterable[str],
    allowed: Collection[str],
    what: str = "argument",
    hint: Callable[[str, Any, Collection[str]], str] | None = None,
) -> None:
    """Raise TypeError for a keyword argument that does not exist; the message names the closest one, or has a hint."""
    for name in given:
        if name not in allowed:
            value = given[name] if isinstance(given, Mapping) else None
            text = closest(name, allowed, f"{what}s") if hint is None else hint(name, value, allowed)
            raise TypeError(f"{owner} has no {what} {name!r}: {text}")


def names_its_arguments(
    kind: type[_Kind], what: str = "argument", hint: Callable[[str, Any, Collection[str]], str] | None = None
) -> type[_Kind]:
    """Have errors about arguments name a class as the user wrote it, and what it takes."""
    init = kind.__init__
    parameters = {name: one for name, one in inspect.signature(init).parameters.items() if name != "self"}
    names, needed = [*parameters], [name for name, one in parameters.items() if one.default is one.empty]
    by_name = all(one.kind is one.KEYWORD_ONLY for one in parameters.values())

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        owner = type(self).__name__
        if args and by_name:
            raise TypeError(f"{owner} takes {what}s by name; got {args[0]!r}. They are {', '.join(names)}.")
        check_keywords(owner, kwargs, names, what, hint)
        if missing := [name for name in needed[len(args) :] if name not in kwargs]:
            raise TypeError(f"{owner} needs the {what} {missing[0]!r}. The {what}s are {', '.join(names)}.")
        init(self, *args, **kwargs)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


def check_device(name: str, value: Any) -> None:
    """Raise ValueError unless a value names a device of torch."""
    import torch

    try:
        if isinstance(value, bool):
            raise TypeError
        torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(f"{passed(name, value)}: pass a device, such as 'cpu', 'cuda' or 'cuda:1'.") from None


def check_mapping(name: str, value: Any, allowed: str, owner: str = "") -> dict[str, Any]:
    """Return a mapping with string keys as a dict, ``None`` as an empty one, or raise TypeError."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{passed(name, value, owner)}: pass {allowed}.")
    return dict(value)
