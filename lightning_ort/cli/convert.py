"""``lightning-ort convert``: a checkpoint of DeepSpeed's as a plain one."""

import sys
from pathlib import Path

from rich.console import Console

from lightning_ort.optim.flat_shards import read_directory
from lightning_ort.strategies.atomic_checkpoints import save_atomically


def convert(directory: Path, output: Path) -> None:
    """Write a checkpoint directory of DeepSpeed's ZeRO stage 1 or 2 as one plain Lightning checkpoint.

    The file has float32 weights, the optimizer's states for each parameter, and all else that the run had saved. Any
    strategy can go on with it, in any number of processes.

    Args:
        directory: What ``Trainer.save_checkpoint`` or ``ModelCheckpoint`` wrote under a DeepSpeed strategy.
        output: The file to write.

    """
    if output.exists():
        sys.exit(f"{output} exists already. Name a file that does not.")
    try:
        checkpoint = read_directory(directory)
    except ModuleNotFoundError as error:
        sys.exit(f"{error}. Install it with `pip install deepspeed`")
    except ValueError as error:
        sys.exit(str(error))
    save_atomically(checkpoint, output)
    weights, states = len(checkpoint["state_dict"]), len(checkpoint["optimizer_states"][0]["state"])
    Console().print(f"{output}: {weights} tensors of the module, optimizer states of {states} parameters")
