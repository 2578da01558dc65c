"""The command ``lightning-ort``.

- :mod:`~lightning_ort.cli.bench`: compares how fast a module trains in several variants
- :mod:`~lightning_ort.cli.cache`: shows or deletes what is kept between runs
- :mod:`~lightning_ort.cli.convert`: converts a DeepSpeed checkpoint to a plain one
- :mod:`~lightning_ort.cli.doctor`: checks whether this machine can train on ONNX Runtime
- :mod:`~lightning_ort.cli.export`: exports the module of a checkpoint as an ONNX model
- :mod:`~lightning_ort.cli.memory`: bytes of parameters, gradients and optimizer states
- :mod:`~lightning_ort.cli.report`: shows the report of a run as an HTML page
- :mod:`~lightning_ort.cli.parser`: options and help in one style
- :mod:`~lightning_ort.cli.run`: runs any script whose Trainer then knows the strategy names
- :mod:`~lightning_ort.cli.tune`: finds the fastest way to train a module
"""

import ast
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COMMANDS = ("bench", "cache", "convert", "doctor", "export", "memory", "report", "tune")
_STARTED = "started"  # parameter of a command that has to know when the program was started
_MODULE = "class or function that returns the LightningModule, as package.module:name or path/to/file.py:name"
_TRUST: tuple[tuple[str, ...], dict[str, Any]] = (
    ("--trust",),
    {"action": "store_true", "help": "call the functions and classes that the checkpoint names; they may do anything"},
)
# arguments for which jsonargparse makes of a signature something else than people type: one that may be left out, a
# switch, a short form, a list without brackets
_BY_HAND: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {
    "bench": [
        (("module",), {"type": str | None, "nargs": "?", "help": _MODULE}),
        (
            ("--variants",),
            {
                "type": str,
                "nargs": "+",
                "help": "the variants to compare; by default stock, stock+auto, compile+auto, ort+keep and ort",
            },
        ),
    ],
    "convert": [_TRUST],
    "doctor": [(("--json",), {"action": "store_true", "help": "print JSON"})],
    "export": [
        (("checkpoint",), {"type": Path | None, "nargs": "?", "help": "a Lightning checkpoint"}),
        (("--module",), {"type": str | None, "help": "class of the LightningModule, as file.py:name"}),
        (("--output", "-o"), {"type": Path, "required": True, "help": "output file; with --training, a folder"}),
        (
            ("--gradients_only",),
            {"action": "store_true", "help": "with --training, return gradients and leave the optimizer out"},
        ),
        (("--input_shape",), {"type": int, "nargs": "+", "help": "shape of the single float32 input, batch first"}),
        _TRUST,
    ],
    "memory": [
        (
            ("--optim",),
            {"type": str, "nargs": "+", "help": "implementations of the optimizer; by default all of them"},
        ),
        (("--ranks",), {"type": int, "nargs": "+", "help": "numbers of processes to show ZeRO stage 1 for"}),
        (
            ("--measure",),
            {
                "type": bool,
                "nargs": "?",
                "const": True,
                "default": False,
                "help": "also run a step on the CPU, and measure",
            },
        ),
    ],
    "report": [
        (("file",), {"type": Path, "help": "the JSON report that a run with ORTConfig(report=PATH) wrote"}),
        (("other",), {"type": Path | None, "nargs": "?", "help": "a second report, to compare the runs"}),
        (("-o", "--output"), {"type": Path | None, "help": "output file; by default REPORT.html"}),
    ],
    "tune": [
        (("module",), {"type": str | None, "nargs": "?", "help": _MODULE}),
        (("--output", "-o"), {"type": Path, "default": Path("tuned.yaml"), "help": "the configuration to write"}),
        (
            ("--effective_batch",),
            {"type": int | None, "help": "examples between two steps of the optimizer; by default unchanged"},
        ),
        (("--keep_numerics",), {"action": "store_true", "help": "keep float32 and the optimizer's algorithm"}),
        (("--dry_run",), {"action": "store_true", "help": "only show what would be tried"}),
    ],
}


def main() -> None:
    """Run the command line."""
    from lightning_ort.cli import run

    started = time.monotonic()
    if sys.argv[1:2] == ["run"]:  # before any parser: what follows is the script's
        run.run(sys.argv[2:])
        return
    try:
        try:
            _run_command(run.SUMMARY, started)
        finally:
            sys.stdout.flush()  # here, where it can be caught
    except BrokenPipeError:  # who reads has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run_command(summary_of_run: str, started: float) -> None:
    from lightning_ort._imports import __version__

    if sys.argv[1:] == ["--version"]:  # before jsonargparse, which takes longer than all else
        print(f"lightning-ort {__version__}")
        sys.exit(0)
    from lightning_ort.cli.parser import Parser, in_one_style

    # only the module of the command that is called: most of them need torch
    wanted = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), "")
    description = "ONNX Runtime for PyTorch Lightning"
    parser = Parser(prog="lightning-ort", description=description, version=__version__)
    subcommands = parser.add_subcommands()
    for name in _COMMANDS:
        documentation = _documentation(name)
        own = Parser(description=documentation.partition("\nArgs:")[0].strip())
        if name == wanted:
            by_hand = {own.add_argument(*flags, **options).dest for flags, options in _BY_HAND.get(name, [])}
            own.add_function_arguments(_command(name), as_positional=True, skip=by_hand | {_STARTED})
        subcommands.add_subcommand(name, own, help=documentation.partition("\n")[0])
    subcommands.add_subcommand("run", Parser(), help=summary_of_run)
    lists = {flags[0] for added in _BY_HAND.values() for flags, options in added if options.get("nargs") == "+"}
    arguments = parser.parse_args(in_one_style(sys.argv[1:], lists))
    command, passed = _command(arguments.subcommand), dict(arguments[arguments.subcommand])
    if _STARTED in inspect.signature(command).parameters:
        passed[_STARTED] = started
    command(**passed)


def _command(name: str) -> Callable[..., None]:
    return getattr(importlib.import_module(f"lightning_ort.cli.{name}"), name)


def _documentation(name: str) -> str:
    """Return the docstring of a command, whose module is not imported for it."""
    tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return ast.get_docstring(next(found)) or ""
