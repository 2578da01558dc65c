"""Whole fits on a GPU by the race and the estimates as they are, and by the rule before: no GPU, no clock.

``python -m tests.strategies.gpu_simulation`` prints the table. What steps and compilations take is measured, on one
H200 in bfloat16 (``benchmarks/results/2026-11-26-gpu.txt``); the step of 10 ms is made up. That a recording takes as
long to compile as inductor without one is supposed; ``again`` is what a second compilation of the same step took.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_ort.compiler import engines
from lightning_ort.compiler.engines import StepFacts
from lightning_ort.strategies.race.race import Race
from lightning_ort.strategies.race.terms import UNCHANGED, Expected, Now, Took, Way

LENGTHS = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
UNKNOWN = 50_000  # steps of a fit whose length nobody knows


@dataclass(frozen=True)
class Model:
    """What its training step takes.

    Args:
        stock: Seconds of a step as it is, which ours leaves unchanged at first.
        inductor: Seconds of a step that inductor compiled.
        recorded: The same as a recording.
        start: Seconds of the first compilation.
        operations: With a gradient.
        ort: Seconds of a step on ONNX Runtime.
    """

    stock: float
    inductor: float
    recorded: float
    start: float
    operations: int = 450
    ort: float = 0.05
    again: float = field(default=13.2, kw_only=True)

    def by_hand(self, steps: int) -> float:
        """Return the seconds of a fit under ``torch.compile``."""
        return self.start + steps * self.inductor

    def seconds(self, engine: str) -> float:
        """Return the seconds of a step."""
        times = {"torch": self.stock, "inductor": self.inductor, "inductor-graphs": self.recorded, "ort": self.ort}
        return times[engine]


MODELS = {
    "GPT-2": Model(0.0432, 0.0214, 0.0212, 19.6),
    "Llama": Model(0.0435, 0.0240, 0.0237, 21.1),
    "BERT": Model(0.0234, 0.0193, 0.0190, 26.9),
    "a step of 10 ms": Model(0.0100, 0.0075, 0.0072, 20.0, 200),
    "ViT": Model(0.0322, 0.0334, 0.0334, 26.8),
}


def _facts(model: Model) -> StepFacts:
    return StepFacts(
        on_gpu=True,
        trains=True,
        operations=model.operations,
        usual=model.stock,
        is_first=True,
        on_ort=0.0,
        training=0.0,
    )


def race_of(model: Model) -> Race:
    """Return the race as a training step has it on a GPU, with empty caches."""

    def expect(way: Way) -> Expected:
        engine = engines.ENGINES[way.engine]
        return Expected(engine.cost(_facts(model)), engine.saves(_facts(model)), stake=engines.STAKE)

    return Race(map(Way, engines.order(on_gpu=True, trains=True, may_record=True)), 1.0, expect)


def race_before(model: Model) -> Race:
    """Return the race of before: that of a CPU, with two compilations by inductor and one for ONNX Runtime."""

    def expect(way: Way) -> Expected:
        saves = engines.SAVED if way.engine == "ort" else 1.0
        return Expected(engines.ENGINES[way.engine].cost(_facts(model)), saves)

    return Race(map(Way, ("inductor", "inductor-graphs", "ort")), 0.05, expect)


def fit(model: Model, race: Race, steps: int, left: float | None = None) -> float:
    """Return the seconds of a fit, and keep the race.

    Args:
        model: What steps take.
        race: Of its step, in its first run.
        steps: How many.
        left: What is told of the steps left, if not the truth; NaN for nothing.
    """
    seconds, compiled = 0.0, set[str]()
    costs: Mapping[str, float] = {"inductor": model.start, "inductor-graphs": model.start, "ort": 22.8}
    while race.steps < steps:
        if not race.wants_time and (quiet := min(race.quiet_steps, steps - race.steps)):
            seconds += quiet * model.seconds(race.champion.engine)
            race.pass_by(quiet)
            continue
        now = steps - race.steps if left is None else left
        way = race.next(Now(None if math.isnan(now) else now))
        took = model.seconds(way.engine)
        compiles = way != UNCHANGED and way.engine not in compiled
        if compiles:
            took += model.again if "inductor" in way.engine and "inductor" in str(compiled) else costs[way.engine]
            compiled.add(way.engine)
        seconds += took
        race.done(Took(took, compiled=compiles))
    return seconds


def rows() -> list[tuple[str, str, float, float, float, float]]:
    """Return for each model and length the seconds of stock, by hand, before, and now."""
    found = []
    for name, model in MODELS.items():
        for steps in LENGTHS:
            ours = (fit(model, race(model), steps) for race in (race_before, race_of))
            found.append((name, f"{steps:,}", steps * model.stock, model.by_hand(steps), *ours))
        before = fit(model, race_before(model), UNKNOWN, math.nan)
        now = fit(model, race_of(model), UNKNOWN, math.inf)
        found.append((name, f"unknown ({UNKNOWN:,})", UNKNOWN * model.stock, model.by_hand(UNKNOWN), before, now))
    return found


if __name__ == "__main__":
    print(
        f"{'model':17}{'steps':>18}{'stock':>9}{'by hand':>9}{'before':>9}{'now':>9}{'now/stock':>11}{'now/hand':>10}"
    )
    for name, steps, stock, hand, before, now in rows():
        figures = f"{stock:9.0f}{hand:9.0f}{before:9.0f}{now:9.0f}{now / stock:11.2f}{now / hand:10.2f}"
        print(f"{name:17}{steps:>18}{figures}")
