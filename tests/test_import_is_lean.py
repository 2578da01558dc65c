"""Importing the package loads nothing that is slow, or that patches torch, before it is needed."""

import subprocess
import sys

import pytest

from lightning_ort.compiler.executors.ort import kernels

HEAVY = ("onnxruntime", "onnx", "deepspeed", "bitsandbytes", "transformers", "lightning.pytorch", "pytorch_lightning")

CODE = f"""
import sys
import lightning_ort
print(",".join(name for name in {HEAVY!r} if name in sys.modules))
import torch
assert not torch.cuda.is_initialized()
from lightning_ort import ORTStrategy
strategy = ORTStrategy()
print(",".join(name for name in {HEAVY[:4]!r} if name in sys.modules))  # torchmetrics loads transformers
assert not torch.cuda.is_initialized()
"""


@pytest.mark.slow
def test_import_is_lean() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["", ""]


ONNXRUNTIME = """
import sys
import torch.utils.checkpoint
from lightning_ort.compiler.executors.ort import kernels
assert kernels.unavailable() is None
print(",".join(name for name in ("deepspeed", "onnxruntime.training") if name in sys.modules))
print(torch.utils.checkpoint.checkpoint.__module__)
from onnxruntime.training import artifacts
print(artifacts.__name__)
"""


@pytest.mark.skipif(
    not kernels.Kernels("auto", ("CPUExecutionProvider",)).has_training("GeluGrad"), reason="for the training build"
)
def test_onnxruntime_comes_without_ortmodule() -> None:
    done = subprocess.run([sys.executable, "-c", ONNXRUNTIME], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()  # DeepSpeed, which the last import brings, has something to say before it
    assert [*lines[:2], lines[-1]] == ["", "torch.utils.checkpoint", "onnxruntime.training.artifacts"]
