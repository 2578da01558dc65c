"""Bytes that a training step needs, measured in one step: :class:`MeasuredStep`, and for others :class:`MemoryModel`.

What a step takes beyond parameters, gradients, states and the batch, which are activations and work space, grows with
the batch.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_ort.optim.memory import predict

_FORWARD_DONE = "lightning_ort: forward done"
# what torch's own optimizers keep, in the names of lightning_ort.optim.memory
_KNOWN = {"Adam": "adamw_torch_fused", "AdamW": "adamw_torch_fused"}
# those that `tune` may try, which need not be all
_STATES_OF_ADAM = ("adamw_torch_fused", "adamw_torch_foreach", "adamw_bnb_8bit", "adamw_anyprecision")


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step. ``other`` is buffers and the batch."""

    parameters: int
    gradients: int
    states: int
    activations: int
    other: int
    peak: int


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the memory of a step for other batch sizes and optimizers."""

    step: StepMemory  # what was measured
    batch_size: int  # with which batch size
    states: dict[str, int]  # bytes of optimizer states by implementation, as far as they are known

    def peak(self, batch_size: int | None = None, optim: str | None = None, kept: float = 1.0) -> int:
        """Return the peak; ``kept`` is the share of the activations that are not recomputed."""
        step = self.step
        fixed = step.parameters + step.gradients + step.other
        working = max(0, step.peak - fixed - step.states)
        scale = kept * (batch_size or self.batch_size) / self.batch_size
        return fixed + self.states.get(optim or "", step.states) + int(scale * working)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizers: Sequence[Any],
        batch: Any,
        batch_size: int,
        before: int,
        levels: tuple[int, int, int],
    ) -> "MemoryModel":
        """Return the model for a step that was measured, once its optimizers have their states.

        ``before`` are the bytes of the gradients that were there in the forward pass; ``levels`` what
        :meth:`MeasuredStep.stop` returned.
        """
        forward, forward_peak, later = levels
        gradients = sum(map(_bytes_of, (p.grad for p in module.parameters() if p.grad is not None)))
        parameters = sum(p.nbytes for p in module.parameters())
        other = sum(each.nbytes for each in (*module.buffers(), *tensors_in(batch)))
        states = states_of(optimizers)
        peak = parameters + states + other + max(before + forward_peak, later)
        names = {_KNOWN.get(type(optimizer).__name__) for optimizer in optimizers}
        is_known = gradients > 0 and None not in names
        known = {name: predict(module, name).states for name in _STATES_OF_ADAM} if is_known else {}
        return cls(StepMemory(parameters, gradients, states, forward, other, peak), batch_size, known)


def _bytes_of(gradient: Tensor) -> int:
    """Return the bytes of a gradient, also of a sparse one."""
    if gradient.layout is not torch.sparse_coo:
        return gradient.nbytes
    gradient = gradient.coalesce()
    return gradient.indices().nbytes + gradient.values().nbytes


def _events_of(finished: profile) -> list[dict[str, Any]]:
    """Return the events of a profile in the order of time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        finished.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested batch."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (list, tuple)) else []


def states_of(optimizers: Sequence[Any]) -> int:
    """Return the bytes of the states that optimizers have."""
    tensors = [
        tensor
        for one in optimizers
        for state in one.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor)
    ]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


class MeasuredStep:
    """Measures the allocator's peak over a step: started before it, told when its forward pass is done, and stopped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: profile | None = None
        self._forward: int | None = None  # on a GPU

    def start(self) -> None:
        """Start before the step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        elif self._device.type == "cpu":
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()

    def forward_done(self) -> None:
        """Tell that the forward pass is done."""
        if self._device.type == "cuda":
            self._forward = torch.cuda.memory_allocated(self._device) - self._start
            self._forward_peak = torch.cuda.max_memory_allocated(self._device) - self._start
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._profile is not None:
            with record_function(_FORWARD_DONE):
                pass

    def stop(self) -> tuple[int, int, int] | None:
        """Return the bytes that were added at the end of the forward pass, at its peak, and at the peak after it."""
        if self._device.type == "cuda":
            if self._forward is None:  # as of manual optimization without a backward pass
                return None
            later = torch.cuda.max_memory_allocated(self._device) - self._start
            return self._forward, self._forward_peak, later
        if self._profile is None:
            return None
        self._profile.__exit__(None, None, None)
        events = _events_of(self._profile)
        done = min((event["ts"] for event in events if event.get("name") == _FORWARD_DONE), default=None)
        levels = [(one["ts"], one["args"]["Total Allocated"]) for one in events if one.get("name") == "[memory]"]
        if done is None or not levels:
            return None
        forward = [level for ts, level in levels if ts <= done] or [0]
        return forward[-1], max(forward), max((level for ts, level in levels if ts > done), default=forward[-1])
