"""What a measurement depends on: :func:`machine`."""

import platform
import time

import torch

from lightning_ort.compiler.executors.ort.kernels import DISTRIBUTIONS, installed


def machine() -> dict[str, str]:
    """Return what a measurement depends on: date, processor, threads, versions."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    names = ("torch", "lightning", "pytorch-lightning", *DISTRIBUTIONS, "lightning-ort")
    return found | {name: number for name in names if (number := installed(name))}
