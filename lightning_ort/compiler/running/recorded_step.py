"""Forward and backward pass of a compiled step as one recording: :class:`RecordedStep`. None has run on a real GPU yet.

A recording computes at fixed addresses. Those of parameters and buffers stay; a batch is copied to memory of its own
before each replay, and results are copied after it. Gradients stay in the recording's memory, where the next replay
overwrites them, so steps are replayed only while nobody looks at gradients. What is recorded is what runs otherwise:
the compiled graph and autograd's engine. Dynamo's guards, and all that is Python, run in each step as before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_ort.compat.autograd import have_gradient_hooks
from lightning_ort.compiler.machine.out_of_memory import free_memory_of
from lightning_ort.compiler.machine.recorder import Recorder
from lightning_ort.compiler.running.eager_runs import RunState, leaf_like, needs_gradient, versions_of
from lightning_ort.compiler.running.fallbacks import GuardedGraph
from lightning_ort.compiler.running.graph_check import SMALL, TOLERANCE, GraphDiffers, distances_of, least_exact
from lightning_ort.compiler.running.step_graph import WaitingGradients

REHEARSALS = 3  # steps in a row that could have been replays, before one is recorded
RECORDINGS = 3  # of one graph or one update: what changes more often is not worth one


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Who records a step, when that may be replayed, and who is told what has become of it."""

    recorder: Recorder
    add: Callable[["RecordedStep"], None]  # gets what is recorded
    may_replay: Callable[[], bool]  # a step that begins; drops the gradients of the last one
    leave: Callable[["Replay", WaitingGradients], None]  # gets what a replay leaves to the backward pass
    say: Callable[[str], None]
    differs: Callable[[str], None]


class NotRecorded(Exception):
    """Why something cannot be recorded."""


def compare(own: dict[str, Any], usual: dict[str, Any], dtype: torch.dtype, small: float = SMALL) -> None:
    """Raise :class:`GraphDiffers` if a replay differs from what it has recorded."""
    distances = distances_of(own, usual, small)
    worst = max(distances, key=distances.__getitem__, default="")
    if worst and distances[worst] > TOLERANCE[dtype]:
        raise GraphDiffers(f"{worst} differs by {distances[worst]:.0%} of its size from what was recorded")


@dataclass(frozen=True, kw_only=True)
class _Passes:
    results: Sequence[Any]
    loss: int  # which of these is the loss
    gradients: Sequence[Tensor | None]  # of each input

    def named(self) -> dict[str, Any]:
        found = {f"result {index}": one for index, one in enumerate(self.results)}
        return found | {f"the gradient of input {index}": one for index, one in enumerate(self.gradients)}


@dataclass(kw_only=True)
class Replay:
    """A recording, and what it takes for granted."""

    run: Callable[[], None]
    args: Sequence[Any]  # those that stay where they are, and for others the memory that a replay reads
    moving: Sequence[int]  # which ones are others
    values: Sequence[int]  # which ones are no tensors
    passes: _Passes  # in memory of the recording
    addresses: Sequence[int]  # of those that stay
    expected: Tensor  # the gradient of the loss
    update: Any = None  # the recorded update by its gradients, which goes when it goes

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether inputs that move have the form, and those that are no tensors the value, that was recorded."""
        return all(_form(args[index]) == _form(self.args[index]) for index in (*self.moving, *self.values))


class RecordedStep:
    """Runs a graph that dynamo captured with its backward pass, from a recording once there is one, else by a guard."""

    # as those of GuardedGraph
    __slots__ = (
        *("_guard", "_recording", "_devices", "_left", "_replay", "_last", "_moving", "_rehearsals", "_waits"),
        "__weakref__",
    )

    def __init__(self, guard: GuardedGraph, graph: fx.Graph, recording: Recording) -> None:
        self._guard, self._recording = guard, recording
        values = (node.meta.get("example_value") for node in graph.nodes)
        self._devices = {value.device for value in values if isinstance(value, Tensor)}
        self._moving = set[int]()
        self.begin_run()
        recording.add(self)

    def begin_run(self) -> None:
        """Free the recording, and begin anew."""
        self._left, self._rehearsals = RECORDINGS, 0
        self._replay: Replay | None = None
        self._last: Sequence[Any] = ()  # inputs of the last step that could have been a replay
        self._waits = False  # for a backward pass

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the graph; if it was a replay, its gradients wait for the backward pass."""
        guard = self._guard
        if not self._left or not guard.trusted or not torch.is_grad_enabled():
            return guard(*args)
        if why := self._reason_against():
            self._stop(why)
            return guard(*args)
        wanted = [arg for arg in args if needs_gradient(arg)]
        if not self._recording.may_replay() or any(one.grad is not None for one in wanted):
            return guard(*args)
        if have_gradient_hooks(wanted):
            return guard(*args)
        replay = self._replay
        if replay is None:
            return self._prepare(args)
        if not replay.fits(args):  # as a last batch
            return guard(*args)
        if _addresses(args, replay.moving) != replay.addresses:
            self._forget("parameters, buffers or other inputs were replaced too often")
            return guard(*args)
        if replay.moving:
            torch._foreach_copy_([replay.args[i] for i in replay.moving], [args[i] for i in replay.moving])
        replay.run()
        return self._results(replay, args)

    def _reason_against(self) -> str:
        if self._waits:
            return "no gradient of its loss was asked for"
        if self._recording.recorder.failed:
            return "a capture has failed"
        return "it runs in eager" if self._guard.run is self._guard.eager else ""

    def leave(self) -> None:
        """Free the recording, and go on in eager."""
        self._left, self._replay, self._last = 0, None, ()
        self._guard.leave()

    def _stop(self, why: str) -> None:
        self._left, self._replay, self._last = 0, None, ()
        self._recording.say(f"not recorded: {why}")

    def _forget(self, why: str) -> None:
        """Free the recording, and maybe make another one later."""
        self._replay, self._last, self._rehearsals = None, (), 0
        self._left -= 1
        if not self._left:
            self._stop(why)

    def _results(self, replay: Replay, args: Sequence[Any]) -> list[Any]:
        """Return the results of a replay; their gradients are left to the backward pass."""
        passes = replay.passes
        results = [one.clone() if isinstance(one, Tensor) else one for one in passes.results]
        loss, found = results[passes.loss], enumerate(passes.gradients)
        parameters = [args[index] for index, gradient in found if gradient is not None]
        gradients = [gradient for gradient in passes.gradients if gradient is not None]
        self._waits = True
        expected = 1.0, replay.expected
        self._recording.leave(replay, WaitingGradients(loss, expected, parameters, gradients, self._took))
        return results

    def _took(self, tangent: Tensor | None) -> None:
        self._waits = False

    def _prepare(self, args: Sequence[Any]) -> Sequence[Any]:
        """Run a step as usual or, after enough of these, record it."""
        last, self._last = self._last, args
        if [*map(_form, args)] != [*map(_form, last)]:
            self._rehearsals = 0
            return self._guard(*args)
        self._moving |= {i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg is not last[i]}
        self._rehearsals += 1
        if self._rehearsals < REHEARSALS:
            return self._guard(*args)
        state = RunState(args)
        kept = {
            index: arg.detach().clone()
            for index, arg in enumerate(args)
            if isinstance(arg, Tensor) and not arg.requires_grad and index not in self._moving
        }

        def go_back() -> None:
            with torch.no_grad():
                for index, value in kept.items():
                    args[index].copy_(value)
            state.restore_random_numbers()

        try:
            replay = self._record(args, state.casts, sorted(kept), go_back)
        except Exception as error:
            go_back()
            self._stop(str(error) if isinstance(error, NotRecorded) else f"{type(error).__name__}: {error}")
            if isinstance(error, GraphDiffers):
                self._recording.differs(str(error))
            free_memory_of(error)
            return self._guard(*args)
        self._replay, self._last = replay, ()
        self._recording.say("its forward and backward pass are one recording")
        return self._results(replay, args)

    def _record(
        self, args: Sequence[Any], casts: Sequence[torch.dtype], kept: Sequence[int], go_back: Callable[[], None]
    ) -> Replay:
        """Return a recording, which was replayed once and compared with what it has recorded."""
        moving, recorder = sorted(self._moving), self._recording.recorder
        own = [_copy(arg) if index in self._moving else _own(arg) for index, arg in enumerate(args)]
        self._check_inputs(own, casts)
        versions, found = versions_of(own), list[_Passes]()

        def run() -> None:
            found.append(self._both_passes(own))

        recorder.rehearse(run)
        if any(versions[index] != versions_of(own)[index] for index in moving):
            raise NotRecorded("the step writes to its batch")
        written = {f"what is written to input {index}": own[index].detach().clone() for index in kept}
        go_back()
        replay = recorder.record(run)
        usual, passes = found
        replay()
        own_values = {f"what is written to input {index}": own[index] for index in kept}
        dtype = least_exact([*args, *passes.results], casts)
        compare(passes.named() | own_values, usual.named() | written, dtype)
        values = [index for index, arg in enumerate(own) if not isinstance(arg, Tensor)]
        expected = torch.ones_like(passes.results[passes.loss])
        return Replay(
            run=replay,
            args=own,
            moving=moving,
            values=values,
            passes=passes,
            addresses=_addresses(own, moving),
            expected=expected,
        )

    def _check_inputs(self, args: Sequence[Any], casts: Sequence[torch.dtype]) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if len(self._devices | {one.device for one in tensors}) > 1:
            raise NotRecorded("it computes on several devices")
        if torch.float16 in {*casts, *(one.dtype for one in tensors)}:
            raise NotRecorded("gradients in float16 need a scale, which varies")
        if not all(one.is_leaf for one in tensors) or any(needs_gradient(args[i]) for i in self._moving):
            raise NotRecorded("gradients are wanted of something else than parameters")

    def _both_passes(self, args: Sequence[Any]) -> _Passes:
        results = self._guard.run(*args)
        tensors = [one for one in results if isinstance(one, Tensor)]
        differentiable = [index for index, one in enumerate(results) if isinstance(one, Tensor) and one.requires_grad]
        if len(differentiable) != 1 or results[differentiable[0]].numel() != 1:
            raise NotRecorded("its loss is not the only result with a gradient")
        inputs = {_storage(arg) for arg in args if isinstance(arg, Tensor)}
        if len({*map(_storage, tensors)} - inputs) < len(tensors):
            raise NotRecorded("its results share memory")
        wanted = [index for index, arg in enumerate(args) if needs_gradient(arg)]
        found = torch.autograd.grad(results[differentiable[0]], [args[i] for i in wanted], allow_unused=True)
        by_index = dict(zip(wanted, found, strict=True))
        return _Passes(
            results=[one.detach() if isinstance(one, Tensor) else one for one in results],
            loss=differentiable[0],
            gradients=[by_index.get(index) for index in range(len(args))],
        )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy(arg: Tensor) -> Tensor:
    """Return memory of its own for an input, laid out as that is."""
    copy = arg.detach().clone()
    if copy.stride() != arg.stride():
        raise NotRecorded("an input is not dense in memory")
    return copy


def _own(arg: Any) -> Any:
    """Return a parameter as a leaf that no other graph knows, whose node would bring its stream into the recording."""
    return leaf_like(arg, arg.detach()) if needs_gradient(arg) else arg


def _addresses(args: Sequence[Any], moving: Sequence[int]) -> list[int]:
    skipped = {*moving}
    return [arg.data_ptr() for index, arg in enumerate(args) if isinstance(arg, Tensor) and index not in skipped]


def _form(arg: Any) -> Any:
    """What has to stay as it is of an input that moves: of a tensor its form, of anything else all."""
    if not isinstance(arg, Tensor):
        return arg
    return arg.shape, arg.stride(), arg.dtype, arg.device, arg.requires_grad, arg.is_neg() or arg.is_conj()
