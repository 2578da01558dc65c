"""What a step did for arguments of one signature: :class:`Recording`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_ort.compat.autograd import with_spent_graph
from lightning_ort.recording.calls import Value
from lightning_ort.recording.replay import Replay, flatten, rebuilt
from lightning_ort.strategies.recording.effects import Effect, repeat
from lightning_ort.world import World, attribute


@dataclass
class Recording:
    """What a step did for arguments of one signature."""

    world: World
    replay: Replay
    output: Any  # with values of the recording in the place of tensors
    loss: int | None  # which result it is, for a training step
    expected: tuple[float, Tensor]  # the gradient that the loss got
    parameters: list[Tensor]  # those that got gradients, which are the last results
    effects: list[Effect]
    writes: list[tuple[Any, Any, set[Value]]]  # effects of the world, the values that each writes, those with a graph
    places: dict[Value, int]  # of values among the results
    handed_on: dict[Value, tuple[str, ...]]  # values that are numbers: attributes of the module, or of a tensor
    kept: Any  # the form of what the world's slots hold, such as hidden states, if the step reads some of it
    kept_places: list[int]  # of the tensors of these that it reads
    runs: int = 0  # replays and checks
    failures: int = 0  # replays that came to nothing, in a row
    due: int = 0  # the run that is checked next
    epoch: int = -1  # the next that begins with a check
    checked: tuple[int, int, int] = (-1, 0, 0)  # the last that did, the runs then, and how many did
    repeats: bool = True  # whether two runs have the same bits
    base: Replay | None = None  # PyTorch's own, if an engine runs it, whose results are the same but for roundings

    def on(self, replay: Replay) -> "Recording":
        """Return the same with an engine's replay."""
        return replace(self, replay=replay, runs=0, failures=0, due=0, epoch=-1, checked=(-1, 0, 0), base=self.replay)

    def check_epoch(self, epoch: int, few: int) -> None:
        """Note a check: the next epoch begins with one, too, but where they have few steps, ever fewer of them do."""
        if epoch >= self.epoch:
            last, runs, checks = self.checked
            is_short = self.runs - runs < few * (epoch - last)
            self.epoch, self.checked = epoch + 1 + checks * is_short, (epoch, self.runs, checks + 1)

    def takes(self, tensors: list[Tensor], storages: list[int]) -> bool:
        """Add to the tensors of arguments those that the step has kept and reads; return whether it may be replayed.

        Not where they have another form, or arguments are a part of what it reads otherwise.
        """
        if self.world.shares(storages):
            return False
        if not self.kept_places:
            return True
        found: list[Tensor] = []
        if flatten([owner.get(key) for owner, key in self.world.slots], found) != self.kept:
            return False
        tensors += [found[place] for place in self.kept_places]
        return True

    def output_of(self, results: Sequence[Tensor]) -> Any:
        """Return what the step returns, made of the results of a replay."""
        places = self.places
        return rebuilt(self.output, lambda value: results[places[value]])

    def repeat(self, results: Sequence[Tensor]) -> None:
        """Write and call what the step writes and calls, with the results of a replay."""
        places, me = self.places, self.world.me

        def result(value: Value) -> Any:
            if (names := self.handed_on.get(value)) is None:
                return results[places[value]]
            return attribute(me, names) if names else results[places[value]].item()

        for write, values, graphs in self.writes:

            def kept(value: Value, graphs: set[Value] = graphs) -> Any:
                return with_spent_graph(results[places[value]]) if value in graphs else result(value)

            found = rebuilt(values, kept)
            if write.kind == "append":
                write.owner.append(found)
            else:
                write.owner[write.key] = found
        repeat(self.effects, result)

    def logged(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that it logs."""
        values = [value for effect in self.effects for value in effect.values()]
        return [results[self.places[value]] for value in values if value not in self.handed_on]


def shared(tensors: Sequence[Tensor], storages: list[int]) -> tuple[Any, ...]:
    """Return which of the arguments are in the same memory or are the same, if any are."""
    if len({*storages}) == len(storages):
        return ()
    ids = [*map(id, tensors)]
    places = zip(storages, ids, tensors, strict=True)
    return tuple((storages.index(of), ids.index(key), tensor.storage_offset()) for of, key, tensor in places)
