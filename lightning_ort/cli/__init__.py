"""The command ``lightning-ort``.

- :mod:`~lightning_ort.cli.bench`: how fast a module trains in several ways
- :mod:`~lightning_ort.cli.cache`: what is kept between runs
- :mod:`~lightning_ort.cli.convert`: a checkpoint of DeepSpeed's as a plain one
- :mod:`~lightning_ort.cli.doctor`: can this machine train on ONNX Runtime
- :mod:`~lightning_ort.cli.memory`: bytes of parameters, gradients and optimizer states
- :mod:`~lightning_ort.cli.report`: the report of a run as a page for the browser
- :mod:`~lightning_ort.cli.run`: any script, with the strategy names known to its Trainer
"""

import sys
from collections.abc import Callable
from pathlib import Path


def main() -> None:
    """Run the command line."""
    from lightning_ort.cli import run

    if sys.argv[1:2] == ["run"]:  # before any parser: what follows is the script's
        run.run(sys.argv[2:])
        return
    try:
        from jsonargparse import ArgumentParser
    except ImportError:
        sys.exit("The command line needs jsonargparse: pip install 'lightning-ort[cli]'")
    from lightning_ort.cli.bench import bench
    from lightning_ort.cli.cache import cache
    from lightning_ort.cli.convert import convert
    from lightning_ort.cli.doctor import doctor
    from lightning_ort.cli.memory import memory
    from lightning_ort.cli.report import report

    commands: dict[str, Callable[..., None]] = {
        "bench": bench,
        "cache": cache,
        "convert": convert,
        "doctor": doctor,
        "memory": memory,
        "report": report,
    }
    parser = ArgumentParser(prog="lightning-ort", description="ONNX Runtime for PyTorch Lightning")
    subcommands = parser.add_subcommands()
    by_hand: dict[str, set[str | int]] = {"bench": {"module"}, "doctor": {"json"}, "report": {"output"}}
    for name, command in commands.items():
        summary = (command.__doc__ or "").partition("\n")[0]
        own = ArgumentParser(description=summary)
        if name == "bench":  # the one command with a positional argument that may be left out
            own.add_argument("module", type=str | None, nargs="?", help="path of what makes the LightningModule")
        if name == "doctor":  # a switch: jsonargparse's own would be --json=true
            own.add_argument("--json", action="store_true", help="print JSON")
        if name == "report":  # for its short form
            own.add_argument("-o", "--output", type=Path | None, help="the page; beside the report if left out")
        own.add_function_arguments(command, as_positional=True, skip=by_hand.get(name, set()))
        subcommands.add_subcommand(name, own, help=summary)
    subcommands.add_subcommand("run", ArgumentParser(), help=run.SUMMARY)
    arguments = parser.parse_args()
    commands[arguments.subcommand](**arguments[arguments.subcommand])
