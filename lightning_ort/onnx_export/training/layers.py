"""Layers of torch whose ``forward`` reads values of tensors: written so that a trace can hold them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ort.compat.step_trace import layers_with_dropout
from lightning_ort.onnx_export.training.forms.sequences import recur
from lightning_ort.strategies.capture.shims import Shims

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Within the block such layers of a module do the same in another way."""
    shims = Shims()
    shims.add(*layers_with_dropout())
    for child in module.modules():
        if isinstance(child, _BATCH_NORMS) and child.momentum is None and child.track_running_stats:
            shims.add(child, "forward", functools.partial(_cumulative_average, child))
        if isinstance(child, nn.RNNBase):
            shims.add(child, "forward", functools.partial(_recurrent, child, child.forward))
    shims.install()
    try:
        yield
    finally:
        shims.remove()


def _cumulative_average(norm: Any, x: Tensor) -> Tensor:
    """A batch norm whose statistics are the mean of all batches."""
    if not norm.training:
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps)
    norm.num_batches_tracked.add_(1)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    with torch.no_grad():
        for kept, value in ((norm.running_mean, x.mean(dims)), (norm.running_var, x.var(dims))):
            kept.copy_(kept + (value - kept) / norm.num_batches_tracked)
    return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)


def _recurrent(layer: nn.RNNBase, forward: Any, x: Any, hidden: Any = None) -> Any:
    return recur(layer, x, hidden) if isinstance(x, nn.utils.rnn.PackedSequence) else forward(x, hidden)
