"""Bytes that a training step needs: predicted from one traced step, and measured in another.

Parameters, gradients and optimizer states follow from shapes (:mod:`lightning_ort.optim.memory`). Activations are what
autograd saves for the backward pass, each storage once; on a CPU, the work space of the kernels that take them in the
backward pass is read from a profile. Gradients appear while activations go, so the peak is the largest sum on the way.
"""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_ort.optim.memory import predict

_FORWARD_DONE = "lightning_ort: forward done"
_TAKEN = "lightning_ort: backward takes "  # and the position of what was saved
# what torch's own optimizers keep, in the names of lightning_ort.optim.memory
_KNOWN = {"Adam": "adamw_torch_fused", "AdamW": "adamw_torch_fused"}


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
class Saved:
    """A storage that the forward pass saved: an activation's, or, with a gradient to come, a parameter's."""

    activation: int = 0
    flowing: int = 0  # of the activation's own gradient, while the backward pass is there
    gradient: int = 0
    work: int = 0  # work space of the kernels that take it in the backward pass


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the memory of a step for other batch sizes and optimizers.

    Args:
        step: The prediction for the batch size at which the step was traced.
        saved: What its forward pass saved, in order.
        batch_size: That batch size.
        states: Bytes of optimizer states by implementation, as far as they are known.

    """

    step: StepMemory
    saved: Sequence[Saved]
    batch_size: int
    states: dict[str, int]

    def peak(self, batch_size: int | None = None, optim: str | None = None, kept: float = 1.0) -> int:
        """Return the peak; ``kept`` is the share of the activations that are not recomputed."""
        scale = kept * (batch_size or self.batch_size) / self.batch_size
        states = self.states.get(optim or "", self.step.states)
        return peak_of(self.step.parameters, self.step.gradients, states, self.step.other, self.saved, scale)


def peak_of(
    parameters: int, gradients: int, states: int, other: int, saved: Sequence[Saved], scale: float = 1.0
) -> int:
    """Return the largest sum of what is there at once, with activations scaled."""
    activations = sum(one.activation for one in saved)
    highest = int(activations * scale) + gradients  # those of the step before are there until the backward pass
    left, made = float(activations), gradients - sum(one.gradient for one in saved)
    for one in reversed(saved):
        # its own gradient, and that of what came before it
        highest = max(highest, int((left + 2 * one.flowing + one.work) * scale) + made + one.gradient)
        left -= one.activation
        made += one.gradient
    return parameters + states + other + highest


class SavedTensors:
    """Records what autograd saves while it is entered, and on a CPU the work space with which it is taken back.

    Args:
        module: Its parameters and buffers are no activations.
        batch: Neither are the tensors of the batch.
        profiled: Whether the kernels' work space is read, which needs :meth:`stop`.

    """

    def __init__(self, module: nn.Module, batch: Any, profiled: bool = False) -> None:
        self._parameters = {p.untyped_storage().data_ptr(): p for p in module.parameters()}
        others = [*module.buffers(), *tensors_in(batch)]
        self._known = {tensor.untyped_storage().data_ptr() for tensor in others}
        self.found: list[Saved] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._profile = _profile_of_memory() if profiled else None

    def __enter__(self) -> "SavedTensors":
        if self._profile is not None:
            self._profile.__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._hooks.__exit__(*args)

    def stop(self) -> None:
        """End the profile, after the backward pass, and note each work space."""
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        for position, work in _work_spaces(_events_of(self._profile)).items():
            self.found[position] = replace(self.found[position], work=work)
        self._profile = None

    def _unpack(self, packed: tuple[Tensor, int | None]) -> Tensor:
        tensor, position = packed
        if position is not None and self._profile is not None:
            with record_function(f"{_TAKEN}{position}"):
                pass
        return tensor

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        if tensor.layout is not torch.strided:
            return tensor, None
        before = len(self.found)
        self._record(tensor)
        return tensor, before if len(self.found) > before else None

    def _record(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in self._known:
            self._known.add(address)
            parameter = self._parameters.get(address)
            if parameter is None:
                # a dropout's mask or a kernel's workspace has no gradient
                flowing = tensor.nbytes if tensor.is_floating_point() else 0
                self.found.append(Saved(storage.nbytes(), flowing))
            elif parameter.requires_grad:
                self.found.append(Saved(gradient=parameter.nbytes))


def _profile_of_memory() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def _events_of(finished: profile) -> list[dict[str, Any]]:
    """Return the events of a profile in the order of time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        finished.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])


def _level(event: dict[str, Any]) -> int | None:
    return event["args"]["Total Allocated"] if event.get("name") == "[memory]" else None


def _work_spaces(events: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Return, by position, the most that a kernel of the backward pass had allocated beyond its inputs and results."""
    found: dict[int, int] = {}
    position: int | None = None
    end, level, before, highest = 0.0, 0, 0, 0  # of the operator, and of what is allocated
    for event in [*events, {"ts": math.inf}]:
        name = event.get("name", "")
        if end and event["ts"] > end:  # the outermost operator is done
            if position is not None:
                found[position] = max(found.get(position, 0), highest - max(before, level))
            end = 0.0
        if (allocated := _level(event)) is not None:
            level, highest = allocated, max(highest, allocated)
        elif name.startswith(_TAKEN):
            position = int(name.removeprefix(_TAKEN))
        elif not end and name.startswith("aten::"):
            end, before, highest = event["ts"] + event.get("dur", 0), level, level
    return {at: work for at, work in found.items() if work > 0}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a nested batch."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (list, tuple)) else []


def model_of(module: nn.Module, optimizers: Sequence[Any], batch: Any, batch_size: int, saved: Any) -> MemoryModel:
    """Return the model for a step whose saved tensors were recorded, once its optimizers have their states."""
    gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    parameters = sum(p.nbytes for p in module.parameters())
    other = sum(buffer.nbytes for buffer in module.buffers()) + sum(tensor.nbytes for tensor in tensors_in(batch))
    names = {_KNOWN.get(type(optimizer).__name__) for optimizer in optimizers}
    known = {name: predict(module, name).states for name in _STATES_OF_ADAM} if gradients else {}
    own = names.pop() if len(names) == 1 else None
    states = known[own] if own is not None and gradients else states_of(optimizers)
    activations = sum(one.activation for one in saved)
    peak = peak_of(parameters, gradients, states, other, saved)
    step = StepMemory(parameters, gradients, states, activations, other, peak)
    return MemoryModel(step, tuple(saved), batch_size, known if own is not None else {})


# those that `tune` may try, which need not be all
_STATES_OF_ADAM = ("adamw_torch_fused", "adamw_torch_foreach", "adamw_bnb_8bit", "adamw_anyprecision")


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

    def start(self) -> None:
        """Start before the step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        elif self._device.type == "cpu":
            self._profile = _profile_of_memory()
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
            later = torch.cuda.max_memory_allocated(self._device) - self._start
            return self._forward, self._forward_peak, later
        if self._profile is None:
            return None
        self._profile.__exit__(None, None, None)
        events = _events_of(self._profile)
        done = min((event["ts"] for event in events if event.get("name") == _FORWARD_DONE), default=None)
        levels = [(event["ts"], level) for event in events if (level := _level(event)) is not None]
        if done is None or not levels:
            return None
        forward = [level for ts, level in levels if ts <= done] or [0]
        return forward[-1], max(forward), max((level for ts, level in levels if ts > done), default=forward[-1])
