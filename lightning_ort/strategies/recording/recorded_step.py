"""One step of a LightningModule, recorded once for each signature of its arguments: :class:`RecordedStep`.

A call of the step either

- runs as always, while its ATen calls are written down, with those of its backward pass: it is *recorded*;
- is *replayed*: the calls are made again in C++, and what the step logs and hands on is done with their results;
- is *checked*: it is replayed, what that has written is put back, and the step runs as always; results are compared.

Where its world is open, or has changed, or the arguments are new, it runs as always.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ort.compat.autograd import have_met, share_of
from lightning_ort.compat.torchscript import Unsupported
from lightning_ort.compiler.engines import RECORDED
from lightning_ort.compiler.request import Stopped
from lightning_ort.recording.calls import Recorder, Refused, Value
from lightning_ort.recording.gradients import WaitingGradients
from lightning_ort.recording.program import Program
from lightning_ort.recording.replay import Foreign, Replay, flatten, rebuilt
from lightning_ort.strategies.recording.comparison import (
    Found,
    are_same,
    beyond_roundings,
    difference,
    of_replay,
    of_step,
)
from lightning_ort.strategies.recording.effects import Effects, before_hooks, hand_on, values_of
from lightning_ort.strategies.recording.recording import Recording, shared
from lightning_ort.strategies.recording.window import Window
from lightning_ort.world import HandedOn, World, loading_compiler, storage_of

MAX_RECORDINGS = 4  # of one step: signatures that come up
MAX_MISSED, FEW = 64, 8
MAX_CHANGES = 3  # of its world, after each of which it is recorded again
MAX_OPEN = 2  # first runs may do what no later one does: import, warn, fill a cache
MAX_FAILURES = 3  # of replays in a row, by values that Python has read
CHECKS, GROWTH = 2, 1.5  # the first replays are checked, then ever fewer


@dataclass
class _Running:
    """A training step that is recorded or checked, until its backward pass is over."""

    effects: Effects
    output: Any
    world: World | None = None  # if it is recorded
    recorder: Recorder | None = None
    signature: Any = None
    storages: Sequence[int] = ()
    recording: Recording | None = None  # if it is checked
    results: Sequence[Tensor] = ()
    after: list[Tensor] = field(default_factory=list)  # what the replay has left in what it writes
    tensors: list[Tensor] = field(default_factory=list)  # of the arguments
    share: float | None = None
    saved: Any = None  # what a replay would write to, as it was
    casts: Sequence[torch.dtype] = ()  # to which autocast casts in it
    is_first: bool = False  # whether its gradients are not added to others


class RecordedStep:
    """The recordings of one step.

    Args:
        module: The LightningModule.
        trains: Whether a backward pass follows.
        fail: Called with the reason where the step is not to be recorded any more, and whether it was wrong.
        leave: Gets the gradients of a replay, which wait for its backward pass.
        may_leave: Returns whether they may: nobody else takes part in that.
        begins: Returns whether no gradients are accumulated now.
        share: Returns by what the loss is multiplied before the backward pass.
        epoch: Returns the number of the epoch.
        compile: Takes the name of an engine, a program and its inputs; returns what runs it, or raises ``Refused`` or
            ``Stopped``.

    Attributes:
        has_compiled: Whether the last call has compiled something for an engine.
        last: The recording that the last call has replayed, its signature, and the engine, unless that was wrong.
    """

    def __init__(
        self,
        module: nn.Module,
        trains: bool,
        fail: Callable[[str, bool], None],
        leave: Callable[[WaitingGradients], None],
        may_leave: Callable[[], bool],
        begins: Callable[[], bool],
        share: Callable[[], float],
        epoch: Callable[[], int],
        compile: Callable[[str, Program, Sequence[Tensor]], Callable[..., Sequence[Any]]],
    ) -> None:
        self._module, self._trains, self._fail, self._epoch = module, trains, fail, epoch
        self._leave, self._may_leave, self._begins, self._share = leave, may_leave, begins, share
        self._recordings: dict[Any, Recording | None] = {}
        self._compile = compile
        # by engine, with the one signature that it is compiled for: others are few, such as the last batch of an epoch
        self._compiled: dict[str, tuple[Any, Recording | None]] = {}
        self.has_compiled = False
        self._unread: frozenset[int] = frozenset()  # arguments that none of them reads
        self._missed: set[Any] = set()  # signatures for which there was no recording
        self._misses = 0  # calls of these
        self._changes = self._open = 0
        self.running: _Running | None = None
        self.did = ""  # what the last call was: "recorded", "replayed", "checked" or, as always, ""
        self.last: tuple[Recording, Any, str] | None = None
        self.replayed = self.checked = self.in_windows = 0

    def __str__(self) -> str:
        counts = f"{self.replayed} calls replayed, {self.in_windows} of them in windows"
        return f"{counts}, {self.checked} checked by the step itself"

    @property
    def has_recordings(self) -> bool:
        """Whether the step was recorded."""
        return any(self._recordings.values())

    def end_run(self) -> None:
        """Free all recordings: what a step logs to, for example, belongs to a run."""
        self.release()
        self.replayed = self.checked = self.in_windows = self._changes = self._open = 0

    def release(self) -> None:
        """Free all recordings."""
        self.keep_engines(())
        self._recordings.clear()
        self._missed.clear()
        self._misses = 0
        self.running = self.last = None

    def keep_engines(self, names: Collection[str]) -> None:
        """Free what was compiled for all engines but these."""
        self._compiled = {name: one for name, one in self._compiled.items() if name in names}

    def __call__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], engine: str = RECORDED
    ) -> Any:
        """Run a step, on an engine if it was recorded."""
        self.running, self.did, self.last, self.has_compiled = None, "", None, False
        if self._trains and not self._may_leave():
            self._fail("a hook or method of others takes part in its backward pass", False)
            return call(*args, **kwargs)
        tensors: list[Tensor] = []
        try:
            signature = flatten((args, kwargs), tensors, holds=True)
        except Foreign as foreign:
            self._fail(f"its batch has {foreign}", False)
            return call(*args, **kwargs)
        if self._trains and any(tensor.requires_grad for tensor in tensors):
            self._fail("its batch gets gradients", False)
            return call(*args, **kwargs)
        storages = [*map(storage_of, tensors)]
        signature = (*self._without_unread(signature), *shared(tensors, storages))
        if signature not in self._recordings:
            may_record = not kwargs and (self._begins() or not self._trains)
            if may_record and self._is_worth_recording(signature):
                return self._record(call, args, tensors, signature)
            return call(*args, **kwargs)
        recording = self._recordings[signature]
        if recording is not None and self._has_another_share(recording):
            self.release()
            return call(*args, **kwargs)
        if recording is None or not recording.takes(tensors, storages) or not self._holds(recording, engine):
            return call(*args, **kwargs)
        if engine != RECORDED and (recording := self._on(engine, recording, signature, tensors)) is None:
            return call(*args, **kwargs)
        self.last = recording, signature, engine
        if recording.runs >= recording.due or self._epoch() >= recording.epoch:
            return self._check(recording, call, args, tensors)
        return self._replay(recording, call, args, tensors)

    def window(self, engine: str, loader: int) -> Window | None:
        """Return what replays the steps after one that was replayed on an engine, if nothing has changed.

        ``loader`` is the number of the loader that their batches are from.
        """
        if self.last is None or self.running is not None or (self._trains and not self._may_leave()):
            return None
        recording, (_, (_, batch, *others), _, *places), last = self.last
        reads_others = any(others[:1]) or any(one not in (None, (int, loader)) for one in others[1:])
        steps = (recording.due - recording.runs) * (last == engine)
        if steps < 1 or reads_others or self._epoch() >= recording.epoch or self._has_another_share(recording):
            return None
        if not recording.world.holds():
            return None
        return Window(recording, batch, tuple(places), steps)

    def end_window(self, window: Window) -> None:
        """Count the steps of a window."""
        window.recording.runs += window.done
        self.replayed += window.done
        self.in_windows += window.done

    def _has_another_share(self, recording: Recording) -> bool:
        """Return whether another share of the loss is differentiated now: to multiply gradients rounds otherwise."""
        return recording.loss is not None and recording.expected[0] != self._share()

    def _is_worth_recording(self, signature: Any) -> bool:
        """Return whether arguments of a signature are likely to come again: they have before, or are the first."""
        if not self._recordings or (signature in self._missed and len(self._recordings) < MAX_RECORDINGS):
            return True
        self._misses += 1
        if len(self._missed) < MAX_MISSED:
            self._missed.add(signature)
        if self._misses >= FEW and self._misses > 2 * self.replayed:
            self._fail("sizes or values in its arguments differ from step to step", False)
        return False

    def _without_unread(self, signature: Any) -> Any:
        """Leave out of a signature the arguments that nothing reads, such as the number of a batch."""
        if not (unread := self._unread):
            return signature
        kind, (of_args, *args), kwargs = signature
        return (kind, (of_args, *[None if index in unread else one for index, one in enumerate(args)]), kwargs)

    def _on(self, engine: str, recording: Recording, signature: Any, tensors: list[Tensor]) -> Recording | None:
        """Return a recording on an engine, for which it is compiled if nothing is; ``None`` if it cannot be."""
        if engine not in self._compiled:
            self._compiled[engine], self.has_compiled = (signature, None), True
            try:
                with loading_compiler():
                    replay = recording.replay.on(functools.partial(self._compile, engine), tensors)
            except Refused as refused:
                self._fail(str(refused), False)
            except Stopped:  # the race knows
                pass
            else:
                self._compiled[engine] = signature, recording.on(replay)
        known, found = self._compiled[engine]
        return found if known == signature else recording

    def _holds(self, recording: Recording, engine: str) -> bool:
        if recording.world.holds():
            return True
        self._changes += 1
        what = recording.world.changed()
        self._recordings.clear()
        if engine in self._compiled:
            self._compiled.clear()
            self._fail(f"what it reads has changed: {what}", False)
            return False
        if self._changes > MAX_CHANGES:
            self._fail(f"what it reads keeps changing: {what}", False)
        return False

    # Replays

    def _replay(self, recording: Recording, call: Callable[..., Any], args: Any, tensors: list[Tensor]) -> Any:
        results = recording.replay(tensors)
        if results is None:
            self._failed(recording)
            return call(*args)
        recording.runs, recording.failures, self.did = recording.runs + 1, 0, "replayed"
        self.replayed += 1
        return self._hand_on(recording, results)

    def _failed(self, recording: Recording) -> None:
        self.last = None
        recording.failures += 1
        if recording.failures >= MAX_FAILURES:
            self._fail("values that it reads from tensors (`item()`, `bool()`) differ from step to step", False)

    def _hand_on(self, recording: Recording, results: Sequence[Tensor]) -> Any:
        """Do with the results of a replay what the step does with its own."""
        recording.repeat(results)
        output = recording.output_of(results)
        if recording.loss is None:
            return output
        # a tensor of its own: that of the result may be kept as `loss.detach()`
        loss, parameters = results[recording.loss].detach(), recording.parameters
        gradients = [*results[len(results) - len(parameters) :]]
        self._leave(WaitingGradients(loss, recording.expected, parameters, gradients, lambda _: None))
        return {**output, "loss": loss} if type(output) is dict else loss

    # Recording

    def _record(self, call: Callable[..., Any], args: tuple[Any, ...], tensors: list[Tensor], signature: Any) -> Any:
        self._recordings[signature] = None
        world = World(call, args)
        try:
            recorder = Recorder(tensors)
        except Refused as refused:
            self._fail(str(refused), False)
            return call(*args)
        effects = Effects(self._module, recorder)
        with effects.watched(), world.watched(), recorder:
            output = call(*args)
        self.did = "recorded"
        storages = [*map(storage_of, tensors)]
        running = _Running(effects, output, world, recorder, signature, storages)
        if self._trains and _loss_of(output) is not None:
            self.running = running
        else:
            self._finish(running)
        return output

    def backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of a step that is recorded or checked."""
        running, self.running = self.running, None
        assert running is not None
        loss = _loss_of(running.output)
        assert loss is not None
        root = args[0] if args else loss
        running.share = share_of(root, loss)
        world, recorder = running.world, running.recorder
        if world is None or recorder is None:
            assert running.recording is not None
            running.is_first = all(one.grad is None for one in running.recording.parameters)
        else:
            if running.share is None:
                recorder.refusal = "its loss is scaled before the backward pass"
            elif any(one.grad is not None for one in self._module.parameters()):
                recorder.refusal = "gradients are accumulated"
            else:
                recorder.is_also(root, recorder.value(loss))
        trainer: Any = self._module.trainer  # what is read here is not read by the step
        precision = trainer.precision_plugin
        with ExitStack() as watched:
            if world is not None and recorder is not None:
                watched.enter_context(world.watched())
                watched.enter_context(recorder)

            def finish() -> None:
                watched.close()
                self._finish(running)

            # what runs after it runs after replays, too
            with before_hooks(precision, finish) as is_finished:
                result = run(*args, **kwargs)
            if not is_finished:
                finish()
        return result

    def _finish(self, running: _Running) -> None:
        if running.recording is not None:
            self._compare(running.recording, running)
            return
        world, recorder = running.world, running.recorder
        assert world is not None
        assert recorder is not None
        handed_on = world.close(running.effects.sites)
        try:
            if world.openings:
                self._open += 1
                if self._open < MAX_OPEN:
                    del self._recordings[running.signature]
                    return
                raise Refused(str(world.openings[0]))
            if recorder.refusal:
                raise Refused(recorder.refusal)
            if world.shares(running.storages):
                raise Refused("its batch is a part of what it reads otherwise")
            others, recording = self.has_recordings, self._recording_of(running, world, recorder, handed_on)
            self._unread = world.unread & self._unread if others else world.unread
            self._recordings[running.signature] = recording
        except (Refused, Foreign, Unsupported) as reason:
            self._fail(str(reason), False)
            return
        kind, args, kwargs, *shared = running.signature
        signature = (*self._without_unread((kind, args, kwargs)), *shared)
        self._recordings[signature] = self._recordings.pop(running.signature)

    def _recording_of(
        self, running: _Running, world: World, recorder: Recorder, handed_on: HandedOn | None
    ) -> Recording:
        form, kept_places = _take_kept(recorder, world)
        _replace_found(recorder, world.tensors)
        results: list[Value] = []
        places: dict[Value, int] = {}

        def place(value: Value) -> int:
            if value not in places:
                places[value] = len(results)
                results.append(value)
            return places[value]

        loss = _loss_of(running.output) if self._trains else None
        tensors: list[Tensor] = []
        flatten(running.output, tensors)
        output = rebuilt(running.output, lambda tensor: recorder.value(tensor))
        for tensor in tensors:
            place(_handed_on(recorder, tensor))
        writes = _writes_of(world, recorder, loss, place)
        handed = hand_on(running.effects, writes, recorder, handed_on)
        for value in values_of([[one[1:] for one in running.effects.calls], [one[1] for one in writes]]):
            if not handed.get(value):
                place(value)
        leaves = {id(one): one for one in (*self._module.parameters(), *world.tensors) if one.is_leaf}
        trained = leaves.values() if loss is not None else ()
        parameters = [one for one in trained if one.requires_grad and one.grad is not None]
        gradients = [recorder.value(one.grad) for one in parameters if one.grad is not None]
        program = Program.of(recorder, [*results, *gradients])
        return Recording(
            world=world,
            replay=Replay(program, recorder),
            output=output,
            loss=None if loss is None else places[recorder.value(loss)],
            expected=(running.share or 1.0, torch.tensor(running.share or 1.0)),
            parameters=parameters,
            effects=running.effects.calls,
            writes=writes,
            places=places,
            handed_on=handed,
            kept=form,
            kept_places=kept_places,
        )

    # Checks

    def _check(self, recording: Recording, call: Callable[..., Any], args: Any, tensors: list[Tensor]) -> Any:
        replay = recording.replay
        saved = replay.save(tensors)
        results = replay(tensors)
        if results is None:
            self._failed(recording)
            return call(*args)
        after = replay.state(tensors)
        replay.restore(tensors, saved)
        if recording.runs == 0 and recording.base is None:
            again = replay(tensors)
            replay.restore(tensors, saved)
            recording.repeats = again is not None and all(itertools.starmap(are_same, zip(results, again, strict=True)))
        recording.check_epoch(self._epoch(), FEW)
        recording.runs, self.did = recording.runs + 1, "checked"
        self.checked += 1
        recording.due = recording.runs if recording.runs < CHECKS else int(GROWTH * recording.runs) + 1
        effects = Effects(self._module, None)
        with effects.watched():
            output = call(*args)
        running = _Running(effects, output, recording=recording, results=results, after=after, tensors=tensors)
        running.saved = saved
        running.casts = [torch.get_autocast_dtype("cpu")] * torch.is_autocast_enabled("cpu")
        if recording.loss is not None and _loss_of(output) is not None:
            self.running = running
        else:
            self._finish(running)
        return output

    def _compare(self, recording: Recording, running: _Running) -> None:
        """Compare a step that has run with its replay before."""
        has_gradients = running.is_first and running.share == recording.expected[0]
        left = recording.replay.state(running.tensors)
        replayed = of_replay(recording, running.results, running.after, has_gradients)
        own = of_step(recording, running.output, running.effects.tensors, left, has_gradients)
        if recording.base is None:
            differs = difference(replayed, own, recording.repeats)
        else:

            def rounded(change: Callable[[list[Any]], list[Any]]) -> Found:
                assert recording.base is not None
                return of_replay(
                    recording, *recording.base.again(running.tensors, running.saved, change), has_gradients
                )

            differs = beyond_roundings(replayed, own, rounded, running.casts)
        if differs:
            self.last = None
            self._fail(f"{differs} of a replay differs from the step's own", True)


def _take_kept(recorder: Recorder, world: World) -> tuple[Any, list[int]]:
    """Take what the step has kept before and reads for arguments; return its form, and which tensors these are."""
    kept: list[Tensor] = []
    form = flatten(world.slot_values, kept)
    others = {*map(storage_of, world.tensors)}
    places = [None if storage_of(tensor) in others else recorder.place_of(tensor) for tensor in kept]
    read = [value for value, tensor in recorder.found.items() if recorder.place_of(tensor) in places]
    found = [places.index(recorder.place_of(recorder.found.pop(value))) for value in read]
    recorder.arguments += read
    return form, found


def _replace_found(recorder: Recorder, known: Sequence[Tensor]) -> None:
    """Take for each tensor that no call has made the one of the world in the same place."""
    by_place = {recorder.place_of(tensor): tensor for tensor in known}
    storages = {place[0] for place in by_place}
    for value, tensor in recorder.found.items():
        place = recorder.place_of(tensor)
        if place in by_place:
            recorder.found[value] = by_place[place]
        elif place[0] not in storages:
            raise Refused("it uses a tensor that no call of PyTorch's has made in it, and that it does not read")


def _writes_of(world: World, recorder: Recorder, loss: Tensor | None, place: Callable[[Value], Any]) -> list[Any]:
    """Return what a step writes, the values of each, which get a place, and those that it keeps with their graphs."""
    writes = []
    for write in world.effects:
        kept: list[Tensor] = []
        flatten(write.value, kept)
        graphs = [one for one in kept if one.requires_grad]
        if graphs and (loss is None or not all(have_met(one, loss) for one in graphs)):
            raise Refused("it keeps a tensor with its graph")
        writes.append((write, rebuilt(write.value, recorder.value), {*map(recorder.value, graphs)}))
        for tensor in kept:
            place(_handed_on(recorder, tensor))
    return writes


def _handed_on(recorder: Recorder, tensor: Tensor) -> Value:
    """Return the value of a result; what was there before is handed on itself, or in another part of its memory."""
    value = recorder.value(tensor)
    if recorder.found.get(value, tensor) is not tensor:
        raise Refused("it hands on an alias of a tensor that was there before")
    return value


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if type(output) is dict else output
    return loss if isinstance(loss, Tensor) and loss.requires_grad else None
