"""``lightning-ort convert``: converts a DeepSpeed checkpoint to a plain one."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_ort._arguments import check_writable
from lightning_ort._text import say
from lightning_ort.cli.arguments import TRUST
from lightning_ort.optim.shard_files import NotTrusted
from lightning_ort.strategies.checkpoints import save_atomically
from lightning_ort.strategies.deepspeed.states import read_directory


def add_arguments(parser: ArgumentParser) -> None:
    """Add what :func:`convert` takes."""
    add = parser.add_argument
    add(
        "directory",
        type=Path,
        help="a checkpoint that Trainer.save_checkpoint or ModelCheckpoint wrote under a DeepSpeed strategy",
    )
    add("output", type=Path, help="the output file")
    add("--trust", action="store_true", help=TRUST)


def convert(given: Namespace) -> None:
    """Convert a checkpoint directory of DeepSpeed's ZeRO stage 1 or 2 to one plain Lightning checkpoint.

    The file has float32 weights, the optimizer's states for each parameter, and everything else that the run saved. Any
    strategy can resume it, with any number of processes.
    """
    directory, output = given.directory, given.output
    if output.exists():
        sys.exit(f"{output} already exists. Choose another output file.")
    try:
        check_writable("output", str(output), is_folder=False)  # before what may take long
        checkpoint = read_directory(directory, given.trust)
        save_atomically(checkpoint, output)
    except ModuleNotFoundError as error:
        sys.exit(f"{directory} contains objects of a package that is not installed: {error}.")
    except NotTrusted as error:
        sys.exit(f"{error} If you trust it, pass --trust.")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    weights, states = len(checkpoint["state_dict"]), len(checkpoint["optimizer_states"][0]["state"])
    say(f"{output}: {weights} tensors of the module, optimizer states of {states} parameters")
