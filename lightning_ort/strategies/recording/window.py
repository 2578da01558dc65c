"""Steps in a row that are replayed from one recording, with their updates, while nobody looks: :class:`Window`.

A replay has no Python in it. So where nothing of the user's runs between two of them either, nothing can have changed:
what :class:`~.recorded_step.RecordedStep` asks before each step is asked once.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_ort.recording.gradients import accumulate_in_any_case
from lightning_ort.recording.replay import Foreign, flatten
from lightning_ort.strategies.recording.recording import Recording, shared
from lightning_ort.world import storage_of

if TYPE_CHECKING:
    from lightning_ort.optim.fused_update import UpdateWith
    from lightning_ort.strategies.race.turn import Turn


class Window:
    """Replays steps, and updates parameters with their gradients, if they have any.

    Args:
        recording: What is replayed.
        batch: The signature of its batches.
        places: Which tensors of a batch are in the same memory, as :func:`~.recording.shared` returns it.
        steps: How many may follow.

    Attributes:
        done: How many have run.
        recording: As it is given.
        parameters: Those that get gradients.
        is_pure: Whether nothing but torch's own code makes the batches; else the world is looked at after each.
        accumulated: The number of batches whose gradients are added up for an update.
        begun: The batches before the window, from one on that begins with new gradients.
    """

    is_pure, accumulated, begun = False, 1, 0

    def __init__(self, recording: Recording, batch: Any, places: tuple[Any, ...], steps: int) -> None:
        self.steps, self.done = steps, 0
        self.recording, self._batch, self._shared = recording, batch, places
        self._results: Sequence[Tensor] | None = None
        self._has_updated = False
        self.parameters = recording.parameters
        self._first = len(recording.replay) - len(self.parameters)  # of the results that are gradients
        self.has_effects = bool(recording.effects or recording.writes)
        self._update: UpdateWith | None
        self.reads_counters = any(recording.handed_on.values())
        self._turn: Turn

    @property
    def output(self) -> Any:
        """What the last step returns."""
        assert self._results is not None
        return self.recording.output_of(self._results)

    def begin(self, update: "UpdateWith | None", turn: "Turn") -> None:
        """Take what updates the parameters, if anything does, and the turn of the steps."""
        self._update, self._turn = update, turn

    def takes(self, batch: Any) -> list[Tensor] | None:
        """Return the tensors of a batch if it may be replayed."""
        tensors: list[Tensor] = []
        try:
            if flatten(batch, tensors, holds=True) != self._batch:
                return None
        except Foreign:
            return None
        storages, recording = [*map(storage_of, tensors)], self.recording
        if shared(tensors, storages) != self._shared or not recording.takes(tensors, storages):
            return None
        return tensors if self.is_pure or recording.world.holds() else None

    def step(self, tensors: list[Tensor], clip: Callable[[], None] | None = None) -> bool:
        """Run one step; return whether it could be replayed: nothing was done if not."""
        turn, accumulated = self._turn, self.accumulated
        begins = accumulated == 1 or (self.begun + self.done) % accumulated == 0
        if begins and (self._results is None or clip is not None or accumulated > 1):
            for parameter in self.parameters:
                parameter.grad = None
        self._results = None  # memory for the next ones
        if turn.is_timed:
            with turn.around():
                ran = self._replay(tensors)
            if ran:
                with turn.around_update():
                    self._go_on(clip)
        elif turn.is_plain:
            ran = self._replay(tensors) and self._go_on(clip)
        else:
            with turn.around():
                ran = self._replay(tensors) and self._go_on(clip)
        self.done += ran
        return ran

    def _replay(self, tensors: list[Tensor]) -> bool:
        recording = self.recording
        if (results := recording.replay(tensors)) is None:
            return False
        self._results = results
        if self.has_effects:
            recording.repeat(results)
        return True

    def _go_on(self, clip: Callable[[], None] | None) -> bool:
        if self._update is None or self._results is None:
            return True
        gradients = self._results[self._first :]
        if self.accumulated > 1:
            accumulate_in_any_case(self.parameters, gradients)
            if (self.begun + self.done + 1) % self.accumulated:
                return True
            gradients = [one.grad for one in self.parameters if one.grad is not None]
        elif clip is not None:
            self._leave()
        if clip is not None:
            clip()
        self._update(gradients)
        self._has_updated = True
        return True

    def leave(self) -> None:
        """Leave behind what steps leave: gradients, and states of the optimizer."""
        if self._results is not None and self.accumulated == 1:
            self._leave()
        if self._has_updated and self._update is not None:
            self._update.end()

    def _leave(self) -> None:
        assert self._results is not None
        for parameter, gradient in zip(self.parameters, self._results[self._first :], strict=True):
            parameter.grad = gradient
