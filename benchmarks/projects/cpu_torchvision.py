"""Torchvision from PyPI beside a CPU build of torch.

That build is for CUDA: its operators cannot be loaded, and its import fails because two of them are missing, whoever
imports it (Lightning does, through torchmetrics). No row needs the operators.
"""

import importlib.util

import torch

OPERATORS = ("nms", "qnms")  # torchvision 0.28


def make_importable() -> None:
    """Declare the operators that torchvision's import looks up, if there is a torchvision that cannot be imported."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in OPERATORS:
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
