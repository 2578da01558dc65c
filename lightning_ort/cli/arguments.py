"""What the commands add to argparse: mappings and switches as people write them."""

import argparse
from pathlib import Path
from typing import Any

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
