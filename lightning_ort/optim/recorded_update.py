"""Clipping and the update of a fused optimizer as one recording: :class:`RecordedUpdate`. None ran on a real GPU yet.

It reads and writes at the addresses of parameters, gradients and states, and is replayed where these, and all settings
but the learning rate, are those that were recorded. Learning rates are tensors of its own, within a recording only: the
optimizer, its schedulers and its checkpoints are what they are without it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from lightning_ort.compat.torch_optimizers import note_step, only_step_hooks
from lightning_ort.compiler.machine.out_of_memory import free_memory_of
from lightning_ort.compiler.running.graph_check import GraphDiffers, least_exact
from lightning_ort.compiler.running.recorded_step import RECORDINGS, Recording, compare
from lightning_ort.optim.fused_update import CHECK, may_update


@dataclass(frozen=True, kw_only=True)
class _Replay:
    run: Callable[[], None]
    granted: Any
    rates: Sequence[Tensor]  # of each group, in memory that a replay reads
    values: list[float]  # of these


class RecordedUpdate:
    """Updates by one optimizer, from a recording once there is one."""

    def __init__(self, optimizer: optim.Optimizer, recording: Recording) -> None:
        self.optimizer, self._recording = optimizer, recording
        self._left = RECORDINGS
        self._replay: _Replay | None = None
        self._last: Any = None  # what was granted in the last step

    def step(self, clip: Callable[[], None], asked: Any) -> None:
        """Clip the gradients and update the parameters; ``asked``, how to clip, is equal if that does the same."""
        if not self._run(clip, asked):
            clip()
            self.optimizer.step()

    def _run(self, clip: Callable[[], None], asked: Any) -> bool:
        optimizer, replay = self.optimizer, self._replay
        hooks = only_step_hooks(optimizer)
        if hooks is None or (replay is None and not self._left):
            return False
        for hook in hooks:
            getattr(hook, CHECK)()
        last, self._last = self._last, self._granted(asked)
        if self._last is None:
            return False
        if replay is None or replay.granted != self._last:
            if not self._left:
                self._replay = None
                self._recording.say("its update is not recorded: settings, parameters or states changed too often")
            return self._left > 0 and self._last == last and self._record(clip)
        for index, group in enumerate(optimizer.param_groups):
            if group["lr"] != replay.values[index]:
                replay.values[index] = group["lr"]
                replay.rates[index].fill_(group["lr"])
        replay.run()
        note_step(optimizer)
        return True

    def _granted(self, asked: Any) -> Any:
        """What a recording takes for granted: addresses and settings; ``None`` if it cannot be recorded."""
        settings: list[Any] = [asked]
        addresses, optimizer = list[int](), self.optimizer
        for group in optimizer.param_groups:
            values = [group.get(name) for name in optimizer.defaults if name != "lr"]
            if not group.get("fused") or any(isinstance(value, Tensor) for value in (group["lr"], *values)):
                return None
            settings += [values, len(group["params"])]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    addresses.append(0)
                    continue
                state = optimizer.state.get(parameter, {})
                found = [one.data_ptr() for one in state.values() if isinstance(one, Tensor)]
                if len(found) < max(len(state), group.get("momentum") != 0):  # the first step makes them
                    return None
                addresses += [parameter.data_ptr(), gradient.data_ptr(), *found]
        return settings, addresses

    def _tensors(self) -> dict[str, Tensor]:
        found = {}
        parameters = (one for group in self.optimizer.param_groups for one in group["params"])
        for number, parameter in enumerate(parameters):
            state = {"the value": parameter.detach(), "the gradient": parameter.grad}
            state |= self.optimizer.state.get(parameter, {})
            found.update({f"{name} of parameter {number}": one for name, one in state.items() if torch.is_tensor(one)})
        return found

    def _record(self, clip: Callable[[], None]) -> bool:
        self._left, self._replay = self._left - 1, None
        tensors = self._tensors()
        own = [*tensors.values()]
        try:
            before, after = [[one.clone() for one in own] for _ in range(2)]
        except torch.OutOfMemoryError as error:
            self._left = 0
            self._recording.say("its update is not recorded: there is not enough memory to compare it")
            free_memory_of(error)
            return False
        clip()
        self.optimizer.step()
        self._set(after, own)
        try:
            self._replay = self._recorded(clip)
            self._set(own, before)
            self._replay.run()
            compare(
                {name: one - old for (name, one), old in zip(tensors.items(), before, strict=True)},
                {name: new - old for name, new, old in zip(tensors, after, before, strict=True)},
                least_exact(own, ()),
                small=0.0,
            )
            self._recording.say("clipping and update are one recording")
        except Exception as error:
            self._set(own, after)
            self._left, self._replay = 0, None
            self._recording.say(f"its update is not recorded: {type(error).__name__}: {error}")
            if isinstance(error, GraphDiffers):
                self._recording.differs(str(error))
            free_memory_of(error)
        return True

    def _set(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for one, value in zip(tensors, values, strict=True):
                one.copy_(value)

    def _recorded(self, clip: Callable[[], None]) -> _Replay:
        groups = self.optimizer.param_groups
        values = [group["lr"] for group in groups]
        device = groups[0]["params"][0].device
        rates = [torch.tensor(value, dtype=torch.float32, device=device) for value in values]

        def run() -> None:
            clip()
            self.optimizer.step()

        with _reading(groups, rates):
            replay = self._recording.recorder.record(run)
        return _Replay(run=replay, granted=self._last, rates=rates, values=values)


def is_fused(optimizer: optim.Optimizer) -> bool:
    """Return whether the updates of an optimizer may be recorded."""
    return may_update(optimizer) and all(group.get("fused") for group in optimizer.param_groups)


@contextmanager
def _reading(groups: Sequence[dict[str, Any]], rates: Sequence[Tensor]) -> Iterator[None]:
    """Within the block, an optimizer reads its learning rates from tensors, and may be recorded."""
    before: list[dict[str, Any]] = [
        {name: group[name] for name in ("lr", "capturable") if name in group} for group in groups
    ]
    try:
        for group, rate, old in zip(groups, rates, before, strict=True):
            group["lr"] = rate
            if "capturable" in old:
                group["capturable"] = True
        yield
    finally:
        for group, old in zip(groups, before, strict=True):
            group.update(old)
