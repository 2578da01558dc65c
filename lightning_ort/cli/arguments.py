"""What the commands add to argparse: one style for options, and lists, mappings and switches as people write them."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_OPTION = re.compile(r"(--[A-Za-z][\w-]*)(?:\.([\w.-]+))?(?:=(.*))?", re.DOTALL)
MODULE = "class or function that returns the LightningModule, as package.module:name or path/to/file.py:name"
DATA = "a LightningDataModule, or a function that returns a DataLoader; by default, the module has its own data"
CONFIG = (
    "a LightningCLI configuration of module, data and Trainer; module and data need to be named only if it has no"
    " class_path for them"
)
TRUST = (
    "also load files that name functions and classes to call, for example because hyperparameters are objects; such a"
    " file may do anything on this machine, so only use this for a checkpoint that you trust"
)


def in_one_style(arguments: Sequence[str]) -> list[str]:
    """Return arguments as parsers know them: ``--warm-up`` for ``--warm_up``, ``--args a=8`` for ``--args.a 8``."""
    found: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if (match := _OPTION.fullmatch(argument)) is None:
            found.append(argument)
            continue
        option, key, value = match[1].replace("_", "-"), match[2], match[3]
        if key is not None:
            found += [option, f"{key}={next(remaining, '') if value is None else value}"]
        else:
            found.append(option if value is None else f"{option}={value}")
    return found


def _elements(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        if not (text.startswith("[") and text.endswith("]")):
            return [kind(text)]
        return [kind(element.strip(" \"'")) for element in text[1:-1].split(",") if element.strip()]

    parse.__name__ = kind.__name__  # argparse names it in its errors
    return parse


class _Extend(argparse.Action):
    """Joins the lists that are an option's values."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store them as one list."""
        setattr(namespace, self.dest, [element for value in values for element in value])


def mapping(text: str) -> dict[str, Any]:
    """Return a mapping that is written as YAML, as ``{"width": 8}``, or as ``width=8`` or ``net.width=8``."""
    from jsonargparse import get_loader  # reads values as LightningCLI does

    load = get_loader("yaml")
    key, equals, value = text.partition("=")
    if equals and not text.startswith("{"):
        for part in reversed(key.split(".")):
            found = {part: load(value) if isinstance(value, str) else value}
            value = found  # type: ignore[assignment]
        return found
    try:
        loaded = load(text)
    except Exception as error:  # of the loader, whichever it is
        raise argparse.ArgumentTypeError(f"{text!r} is no mapping: {error}") from None
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise argparse.ArgumentTypeError(f"{text!r} is no mapping: write it as '{{\"width\": 8}}' or as width=8")
    return loaded


class Merge(argparse.Action):
    """Joins the mappings of an option that is passed several times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Store them as one mapping."""
        setattr(namespace, self.dest, _merged(getattr(namespace, self.dest) or {}, values))


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(first[name], value) if isinstance(value, dict) and isinstance(first.get(name), dict) else value
        for name, value in second.items()
    }
    return {**first, **both}


def switch(text: str) -> bool:
    """Return what an option such as ``--dropout false`` says."""
    if (word := text.lower()) not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: write true or false")
    return word == "true"


def add_list(parser: argparse._ActionsContainer, option: str, kind: Callable[[str], Any], help: str) -> None:
    """Add an option that takes elements, or several in brackets."""
    parser.add_argument(option, nargs="+", type=_elements(kind), action=_Extend, help=help)


def add_mapping(parser: argparse._ActionsContainer, option: str, help: str) -> None:
    """Add an option that takes a mapping."""
    parser.add_argument(option, type=mapping, action=Merge, metavar="NAME=VALUE", help=help)


def add_switch(parser: argparse._ActionsContainer, option: str, help: str, *, default: bool = False) -> None:
    """Add an option that is on with ``--option`` and ``--option true``, and off with ``--option false``."""
    parser.add_argument(option, type=switch, nargs="?", const=True, default=default, metavar="true|false", help=help)


def add_project(parser: argparse.ArgumentParser) -> None:
    """Add what names a module and its data, which commands that train have in common."""
    add = parser.add_argument
    add("module", nargs="?", help=MODULE)
    add_mapping(parser, "--args", "keyword arguments for the module")
    add("--data", help=DATA)
    add_mapping(parser, "--data-args", "keyword arguments for the data")
    add("--config", type=Path, help=CONFIG)
    add("--accelerator", default="auto", help="the Trainer's accelerator, if there is no configuration (default: auto)")
    add("--seed", type=int, default=0, help="seed for the weights and the order of the data (default: 0)")
