"""Which ways of running a step are tried, in which order, and what is expected of them: :class:`Ways`.

What is particular to an engine is in :mod:`~lightning_ort.compiler.engines`; here it meets the step. What
earlier runs on this machine found of a step of the same module, on batches of the same sizes, is kept in the cache.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lightning_ort._text import duration
from lightning_ort.compat.torch import sizes_of_tensor
from lightning_ort.compiler import engines
from lightning_ort.compiler.cache.cache import Startup
from lightning_ort.compiler.cache.fingerprint import digest, program
from lightning_ort.compiler.engines import ENGINES, ORT, RECORDED, TORCH, StepFacts
from lightning_ort.strategies.race.race import STOP
from lightning_ort.strategies.race.run_facts import TRAINING, RunFacts
from lightning_ort.strategies.race.terms import RECORDING, UNCHANGED, Event, Expected, Verdict, Way
from lightning_ort.world.snapshot import snapshot, tensors_in

PER_LAYER = 10  # operations, where no step with gradients was seen
_TO_LOOK = 0.01  # seconds: the first time in a process it takes half of that


def challengers(module: RunFacts, step: str, first: Way) -> list[Way]:
    """Return the ways of a step in the order in which they are tried; ``first`` is that of ONNX Runtime."""
    if module.saves_memory(step):
        return [first if module.setting == "ort" else Way(engines.SAVES_MEMORY, first.part)]
    recordings = [RECORDING] if first.part == "step" and module.may_replay_calls else []
    if module.setting == RECORDED or module.stays_unchanged(step):  # but for replays, which have the bits of eager
        return recordings
    if module.setting == "ort" or not module.is_measured:
        return [first]
    # a recording is of fixed sizes
    records = module.may_record(step) and module.config.dynamic is not True
    order = engines.order(module.device.type == "cuda", step == TRAINING, records)
    order = [name for name in order if name != ORT or module.backend.available]
    if module.compiles_recordings:
        return [Way(engine, "recording") for engine in order] if recordings else []
    ways = {RECORDED: RECORDING, first.engine: first}
    return [ways.get(engine, Way(engine, first.part)) for engine in order if engine != RECORDED or recordings]


class Ways:
    """What is known of the ways of one step, and expected of those that have not run."""

    def __init__(self, module: RunFacts, name: str, batch: Any) -> None:
        self._module, self._name = module, name
        self._program = ""
        self._loaded = [*sys.modules.values()]  # now, since compiling loads more
        self._about = f"{name}\n{_describe(module.module)}\n{_sizes(batch)}"
        self._fixed = engines.ort_fixed_cost(not module.backend.compiled_in_process())

    @functools.cached_property
    def _files(self) -> dict[str, str]:
        module, names = self._module, [engine for engine in ENGINES if engine not in (TORCH, RECORDED)]
        name = module.backend.cache.name
        return {engine: name(f"{engine}\n{self._about}", module.settings(engine), "start") for engine in names}

    @functools.cached_property
    def _known(self) -> dict[str, Startup | None]:
        return {engine: self._load(file) for engine, file in self._files.items()}

    def _earlier(self) -> dict[str, Startup | None]:
        """Return what earlier runs have found, if that can matter."""
        race = self._module.races.get(self._name)
        if not self._module.is_amortized:  # whoever wants to start now wants to try again what was in vain
            return {}
        return {} if race is not None and race.at_stake < _TO_LOOK else self._known

    def program(self) -> str:
        """Return a hash of the program that defines the step, of its files as they were when it was first needed."""
        self._program = self._program or digest(
            program(self._loaded), repr(snapshot({"hparams": self._module.module.hparams}))
        )
        return self._program

    def expect(self, way: Way) -> Expected:
        """Return what is expected of a way."""
        engine, facts = ENGINES[way.engine], self._facts(way)
        cost = engine.cost(facts)
        if self._module.setting != way.engine and (why := engine.obstacle(facts.on_gpu)):
            return Expected(cost, 0.0, why)
        earlier = self._earlier()
        refused = next((known.refused for known in earlier.values() if known is not None and known.refused), "")
        if refused:  # for each engine
            why = f"in an earlier run: {refused}; ORTConfig(start='now') tries it again"
            return Expected(cost, 0.0, why)
        saves = engine.saves(facts) if self._module.is_amortized or facts.on_gpu else 1.0
        stake = engines.STAKE if facts.on_gpu else 1.0
        known = earlier.get(way.engine)
        if known is None:
            is_sure = engine.stake > 0 and self._module.config.compile_budget is None
            return Expected(cost, saves, "", engine.stake or stake, is_sure)
        why, measured = "", False
        if {TORCH, way.engine} <= known.ms.keys():
            saves = max(0.0, 1 - known.ms[way.engine] / known.ms[TORCH])
            times = ", ".join(f"{duration(ms)} {engines.label_of(name)}" for name, ms in known.ms.items())
            why = "" if saves else f"in an earlier run the unchanged step was the fastest ({times})"
            measured = known.program == self.program() and self._module.config.compile_budget is None
            stake = engines.STAKE_IF_KNOWN if measured or facts.on_gpu else 1.0
        if not known.finished:  # it takes more than that
            return Expected(max(STOP * known.cold, cost), saves, why, stake, earlier=True)
        cost = engine.warm() * known.cold if known.warm is None else known.warm
        return Expected(cost, saves, why, stake, measured, earlier=True)

    def _facts(self, way: Way) -> StepFacts:
        module, name = self._module, self._name
        race = module.races.get(name)
        return StepFacts(
            on_gpu=module.device.type == "cuda",
            trains=name == TRAINING,
            operations=self._operations(name),
            usual=0.0 if race is None else race.usual,
            is_first=not module.backend.compiled_in_process(),
            on_ort=self._spent(name, ORT),
            training=self._spent(TRAINING, way.engine),
            recorded=way.replays,
            gained=race.gained if race is not None and way.replays else 0.0,
        )

    def projected_cost(self, seconds: float, done: float) -> float:
        """Return how many seconds compiling the step will take in all, by those of graphs with so many operations."""
        if done <= 0 or seconds <= self._fixed:
            return seconds
        return self._fixed + (seconds - self._fixed) * max(1.0, self._operations(self._name) / done)

    def _operations(self, name: str) -> float:
        """How many operations a step calls, as far as unchanged steps or else the number of layers tell."""
        if seen := self._module.operations.get(name):
            return seen
        layers = sum(next(child.children(), None) is None for child in self._module.module.modules())
        training = self._module.operations.get(TRAINING) or PER_LAYER * layers
        return training if name == TRAINING else engines.EVALUATION * training

    def _spent(self, name: str, engine: str) -> float:
        """The seconds that compiling a step for an engine has taken in this run."""
        race = self._module.races.get(name)
        return 0.0 if race is None else sum(_compiling(race.of_run, engine))

    def store(self, events: list[Event]) -> None:
        """Keep what a run has found, by its events, for later ones."""
        if not self._module.is_amortized and not self._module.is_measured:
            return  # of which no clock may decide anything
        refused = next((str(event.why.reason) for event in events if event.what == "refused"), "")
        if not any(event.what == "starts" for event in events):
            return
        for engine, file in self._files.items():
            own = [event for event in events if event.way.engine == engine]
            seconds = sum(_compiling(own, engine), 0.0)
            dear = [event.why.cost / STOP for event in own if event.what == "costs too much"]
            seconds = max(seconds, *dear) if dear and seconds else seconds
            if seconds == 0 or not any(event.what == "starts" for event in own):
                continue  # what later runs compile again is not what a start takes
            ms = _milliseconds(own)
            finished = not any(event.what in ("fails", "costs too much") for event in own)
            known = self._known[engine]
            if refused:
                found = Startup(seconds, None, ms, False, refused, self.program())
            elif known is not None and known.finished:
                found = dataclasses.replace(known, warm=seconds if finished else known.warm)
                found = dataclasses.replace(found, ms=ms, program=self.program()) if ms else found
            else:
                found = Startup(seconds, None, ms, finished, program=self.program())
            self._module.backend.cache.write(file, found)

    def _load(self, file: str) -> Startup | None:
        known: Startup | None = self._module.backend.cache.read(file, Startup)
        return None if known is not None and known.refused and known.program != self.program() else known


def _compiling(events: Iterable[Event], engine: str) -> Iterator[float]:
    for event in events:
        if event.what == "compiles" and event.way.engine == engine:
            yield from event.seconds.values()


def _milliseconds(events: list[Event]) -> dict[str, float]:
    verdicts = (event for event in events if isinstance(event.why, Verdict) and UNCHANGED in event.seconds)
    duels = [event.seconds for event in verdicts if not event.why.is_busy]
    return {way.engine: 1000 * seconds for way, seconds in duels[-1].items()} if duels else {}


def _describe(module: nn.Module) -> str:
    classes = [f"{name} {type(child).__module__}.{type(child).__qualname__}" for name, child in module.named_modules()]
    tensors = [f"{name} {p.dtype} {sizes_of_tensor(p)} {p.requires_grad}" for name, p in module.named_parameters()]
    return "\n".join(classes + tensors)


def _sizes(batch: Any) -> str:
    return ", ".join(f"{place} {one.dtype}{sizes_of_tensor(one)}{one.device.type}" for place, one in tensors_in(batch))
