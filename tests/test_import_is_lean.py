"""Importing the package loads nothing that is slow, or that patches torch, before it is needed."""

import subprocess
import sys

import pytest

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
