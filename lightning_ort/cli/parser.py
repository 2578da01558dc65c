"""Options and help of the commands in one style: hyphens in options, and help without types of Python."""

import re
from collections.abc import Collection, Sequence
from typing import Any

from jsonargparse import ArgumentParser

_TYPE = re.compile(r"\s+\((required,\s+)?type:[^()]*?(?:,\s+default:\s+([^()]*?))?\)", re.DOTALL)
_OPTION = re.compile(r"--[a-z][\w.-]*")


def in_one_style(arguments: Sequence[str], lists: Collection[str] = ()) -> list[str]:
    """Return the arguments as jsonargparse knows them.

    ``--warm-up`` and ``--warm_up`` are the same, and so are ``--ranks 1 4``, ``--ranks=[1,4]`` and ``--ranks [1, 4]``
    for an option of ``lists``.

    """
    found: list[str] = []
    option = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if _OPTION.fullmatch(name):
            option = f"--{name[2:].replace('-', '_')}"
            if equals and option in lists:
                found += [option, *_elements(value)]
            else:
                found.append(f"{option}{equals}{value}")
        else:
            found += _elements(argument) if option in lists else [argument]
    return found


def _elements(value: str) -> list[str]:
    """Return the elements of a list in brackets; other text is one element."""
    if not (value.startswith("[") and value.endswith("]")):
        return [value]
    return [element.strip(" \"'") for element in value[1:-1].split(",") if element.strip()]


class Parser(ArgumentParser):
    """A parser whose help is for people who do not read Python."""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help without types, and with hyphens in the names of options."""
        text = _TYPE.sub(_default, super().format_help(*args, **kwargs))
        text = re.sub(r", --\w+\+ \w+", "", text)  # jsonargparse's way to add to a list
        text = re.sub(r"\s+\(default: False\)", "", text)
        text = re.sub(
            r"\nsubcommands:\n.*\(required\)\n", "\ncommands (COMMAND --help says more):\n", text, flags=re.DOTALL
        )
        title = iter(["\n\narguments:\n"])  # one for all groups: argparse's kinds, and the command's own
        text = re.sub(r"\n\n\S[^\n]+[^.\s]:\n(?=  \S+ )", lambda _: next(title, "\n"), text)
        return _OPTION.sub(lambda match: match[0].replace("_", "-"), text)


def _default(match: re.Match[str]) -> str:
    required, default = match[1], match[2]
    if required:
        return " (required)"
    return "" if default in (None, "null", "False") else f" (default: {' '.join(default.split())})"
