"""Checks of what users pass, each with an error that says what was passed, what is allowed and what to do."""

import difflib
import math
import os
import reprlib
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200


def passed(name: str, value: Any, owner: str = "") -> str:
    """Return how an argument was passed, such as ``ORTConfig(engine='fast')``, in one line."""
    text = " ".join(f"{name}={_short.repr(value)}".split())
    return f"{owner}({text})" if owner else text


def closest(name: object, allowed: Collection[str], what: str) -> str:
    """Return which of the allowed names was meant, if it is near one of them, and all of them otherwise."""
    close = difflib.get_close_matches(str(name), allowed, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the {what} are {', '.join(allowed)}."


def check_choice(name: str, value: Any, choices: Iterable[Any], owner: str = "") -> None:
    """Refuse what is none of the choices.

    Raises:
        ValueError: If it is none.

    """
    choices = tuple(choices)
    # `1 == True`: types keep integers out of the booleans
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{passed(name, value, owner)}: choose one of {', '.join(map(repr, choices))}.")


def check_integer(name: str, value: Any, lowest: int, highest: int | None = None, owner: str = "") -> int:
    """Refuse what is no integer, or out of range; a float without a fraction, as ``5e8`` in YAML, is one.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it is out of range.

    """
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
    """Refuse what is no finite number of 0 or more.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is negative, infinite or NaN.

    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{passed(name, value, owner)}: pass a number of 0 or more.")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{passed(name, value, owner)}: must be finite, and not negative.")


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], allowed: str, owner: str = "") -> None:
    """Refuse what is of another type.

    Args:
        name: Of the argument.
        value: What was passed.
        kinds: What it may be.
        allowed: The same in words.
        owner: Whose argument it is.

    Raises:
        TypeError: If it is something else.

    """
    if not isinstance(value, kinds):
        raise TypeError(f"{passed(name, value, owner)}: pass {allowed}.")


def check_path(name: str, value: Any, owner: str = "", allowed: str = "a path") -> str:
    """Return a path as a string.

    Raises:
        TypeError: If it is something else.
        ValueError: If it is empty, or no system has such a path.

    """
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
    """Refuse a path where nothing can be written, before there is something to write.

    The first process of a run asks: some things it alone writes, to a disk that the others may not have.

    Args:
        name: Of the argument.
        path: The path; its folders need not be there.
        is_folder: Whether it is to be a folder.
        owner: Whose argument it is.

    Raises:
        ValueError: If it cannot be written.

    """
    if any(os.environ.get(variable, "0") != "0" for variable in ("RANK", "SLURM_PROCID")):
        return
    if (obstacle := _why_not_writable(Path(path).absolute(), is_folder)) is not None:
        kind = "a folder" if is_folder else "a file"
        raise ValueError(f"{passed(name, path, owner)}: {obstacle}. Pass {kind} that can be written.")


def _why_not_writable(path: Path, is_folder: bool) -> str | None:
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
        # to the superuser nothing seems forbidden, not even in /proc: it has to be tried
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        return f"it cannot be written ({error.strerror})"
    return None


def check_keywords(owner: str, given: Iterable[str], allowed: Collection[str], what: str = "argument") -> None:
    """Refuse a keyword argument that there is not.

    Raises:
        TypeError: With the closest one.

    """
    for name in given:
        if name not in allowed:
            raise TypeError(f"{owner} has no {what} {name!r}: {closest(name, allowed, f'{what}s')}")


def check_device(name: str, value: Any) -> None:
    """Refuse what is no device of torch.

    Raises:
        ValueError: If it is none.

    """
    import torch

    try:
        if isinstance(value, bool):
            raise TypeError
        torch.device(value)
    except (RuntimeError, TypeError):
        raise ValueError(f"{passed(name, value)}: pass a device, such as 'cpu', 'cuda' or 'cuda:1'.") from None


def check_mapping(name: str, value: Any, allowed: str, owner: str = "") -> dict[str, Any]:
    """Return a mapping by names as a dict; ``None`` is an empty one.

    Raises:
        TypeError: If it is something else.

    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{passed(name, value, owner)}: pass {allowed}.")
    return dict(value)
