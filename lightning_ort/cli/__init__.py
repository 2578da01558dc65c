"""The command ``lightning-ort``.

A command is a file with a function of its name, which gets the parsed arguments and when the program was ``started``,
and ``add_arguments``, which adds them to a parser; :mod:`~lightning_ort.cli.arguments` has what argparse lacks for
them. Nothing else names it.
"""

import argparse
import ast
import importlib
import os
import re
import sys
import time
from pathlib import Path
from typing import NoReturn

from lightning_ort._arguments import closest
from lightning_ort._imports import __version__
from lightning_ort._text import plain
from lightning_ort.cli import run


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the usage of a command is longer than a screen."""

    def error(self, message: str) -> NoReturn:
        """End the program with the message and how to see the options."""
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists the options)\n")


def main() -> None:
    """Run the command line."""
    started = time.monotonic()
    if sys.argv[1:2] == ["run"]:  # before any parser: what follows is the script's
        run.run(sys.argv[2:])
        return
    try:
        try:
            _run_command(started)
        finally:
            sys.stdout.flush()  # here, where it can be caught
    except SystemExit as error:
        sys.exit(plain(error.code, "utf-8") if isinstance(error.code, str) else error.code)
    except BrokenPipeError:  # who reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run_command(started: float) -> None:
    commands = _commands()
    arguments = sys.argv[1:]
    # only the module of the command that is called: most of them need torch
    wanted = next((argument for argument in arguments if not argument.startswith("-")), "")
    if wanted and wanted not in commands:
        sys.exit(f"lightning-ort has no command {wanted!r}: {closest(wanted, [*commands, 'run'], 'commands')}")
    parser = _Parser(prog="lightning-ort", description="ONNX Runtime for PyTorch Lightning")
    parser.add_argument("--version", action="version", version=f"lightning-ort {__version__}")
    parsers = parser.add_subparsers(
        title="commands", description="COMMAND --help says more", metavar="COMMAND", required=True
    )
    for name, documentation in commands.items():
        summary = documentation.partition("\n")[0]
        own = parsers.add_parser(name, help=summary, description=documentation, allow_abbrev=False)
        if name == wanted:
            try:
                module = importlib.import_module(f"lightning_ort.cli.{name}")
            except ImportError as error:  # of a torch that is too old, or has renamed what it needs
                sys.exit(f"lightning-ort {name}: {error}")
            module.add_arguments(own)
            called = own
    parsers.add_parser("run", help=run.SUMMARY)
    given, unknown = parser.parse_known_args(arguments or ["--help"], argparse.Namespace(started=started))
    if unknown:
        option, options = unknown[0].partition("=")[0], sorted(set(re.findall(r"--[\w-]+", called.format_help())))
        sys.exit(f"lightning-ort {wanted}: there is no {option!r}: {closest(option, options, 'options')}")
    getattr(module, wanted)(given)


def _commands() -> dict[str, str]:
    """Return each command and its docstring; no module is imported for that."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "add_arguments" in functions and path.stem in functions:
            found[path.stem] = ast.get_docstring(functions[path.stem]) or ""
    return found
