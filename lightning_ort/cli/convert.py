"""``lightning-ort convert``: a checkpoint of DeepSpeed's as a plain one."""

import sys
from pathlib import Path

from lightning_ort._arguments import check_writable
from lightning_ort._text import say
from lightning_ort.optim.shard_files import NotTrusted
from lightning_ort.strategies.checkpoints import save_atomically
from lightning_ort.strategies.deepspeed.states import read_directory


def convert(directory: Path, output: Path, trust: bool = False) -> None:
    """Write a checkpoint directory of DeepSpeed's ZeRO stage 1 or 2 as one plain Lightning checkpoint.

    The file has float32 weights, the optimizer's states for each parameter, and all else that the run had saved. Any
    strategy can go on with it, in any number of processes.

    Args:
        directory: What ``Trainer.save_checkpoint`` or ``ModelCheckpoint`` wrote under a DeepSpeed strategy.
        output: The file to write.
        trust: Read files that name functions and classes to call, too, as those of hyperparameters that are objects
            do. Such a file may do anything on this machine: only for a checkpoint that you know.

    """
    if output.exists():
        sys.exit(f"{output} exists already. Name a file that does not.")
    try:
        check_writable("output", str(output), is_folder=False)  # before what may take long
        checkpoint = read_directory(directory, trust)
        save_atomically(checkpoint, output)
    except ModuleNotFoundError as error:
        sys.exit(f"{directory} has objects in it whose package is missing: {error}.")
    except NotTrusted as error:
        sys.exit(f"{error} If you know where it comes from, pass --trust.")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    weights, states = len(checkpoint["state_dict"]), len(checkpoint["optimizer_states"][0]["state"])
    say(f"{output}: {weights} tensors of the module, optimizer states of {states} parameters")
