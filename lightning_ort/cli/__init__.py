"""The command ``lightning-ort``.

- :mod:`~lightning_ort.cli.bench`: how fast a module trains in several ways
- :mod:`~lightning_ort.cli.convert`: a checkpoint of DeepSpeed's as a plain one
- :mod:`~lightning_ort.cli.memory`: bytes of parameters, gradients and optimizer states
"""

import sys
from collections.abc import Callable


def main() -> None:
    """Run the command line."""
    try:
        from jsonargparse import ArgumentParser
    except ImportError:
        sys.exit("The command line needs jsonargparse: pip install 'lightning-ort[cli]'")
    from lightning_ort.cli.bench import bench
    from lightning_ort.cli.convert import convert
    from lightning_ort.cli.memory import memory

    commands: dict[str, Callable[..., None]] = {"bench": bench, "convert": convert, "memory": memory}
    parser = ArgumentParser(prog="lightning-ort", description="ONNX Runtime for PyTorch Lightning")
    subcommands = parser.add_subcommands()
    for name, command in commands.items():
        summary = (command.__doc__ or "").partition("\n")[0]
        own = ArgumentParser(description=summary)
        if name == "bench":  # the one command with a positional argument that may be left out
            own.add_argument("module", type=str | None, nargs="?", help="path of what makes the LightningModule")
        own.add_function_arguments(command, as_positional=True, skip={"module"} if name == "bench" else set())
        subcommands.add_subcommand(name, own, help=summary)
    arguments = parser.instantiate_classes(parser.parse_args())
    commands[arguments.subcommand](**arguments[arguments.subcommand])
