"""Which engine runs a captured step: :class:`StepTrials`."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from lightning_ort._text import duration
from lightning_ort.compiler import malloc
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.report import ReasonType, StepReport
from lightning_ort.strategies.capture.account import StepAccount
from lightning_ort.strategies.capture.autotuner import Checks, Engine, StepAutotuner

if TYPE_CHECKING:
    from lightning_ort.strategies.capture.gate import Stage
    from lightning_ort.strategies.capture.module import CapturedModule


class StepTrials:
    """Tries a captured step on several engines, keeps the fastest, and tries that one against eager again later.

    Args:
        module: The module whose step it is.
        name: The name of the step.
        account: Counts what trials take and find.
        leave: Called with the times if the unchanged step wins; the step is not captured any more.

    """

    def __init__(self, module: "CapturedModule", name: str, account: StepAccount, leave: Callable[[str], None]) -> None:
        self.engine: Engine = "ort"  # where no trial runs
        self.timer: StepAutotuner | None = None  # of the trial that runs
        self._module, self._name, self._account, self._leave = module, name, account, leave
        self._mode = ""
        self._out: set[Engine] = set()  # failed, or lost against others while there is more to try
        self._waiting: set[Engine] = set()  # to be tried
        self._in_turn = False  # whether engines are tried one after the other
        self._checks = Checks()
        self._report: StepReport | None = None  # of the last trial
        self._continues = False  # whether the trial that runs goes on from the last one
        self._numbers: Counter[str] = Counter()  # of trials, by what was tried

    def restart(self, mode: str) -> None:
        """Begin anew, because the step is captured in another way."""
        self._mode, self.engine, self._checks = mode, "ort", Checks()
        self.timer = None if mode == "off" else self._new_timer()

    def wait(self, stages: "Sequence[Stage]") -> None:
        """Leave these out of trials until they are admitted."""
        self._waiting = {stage for stage in stages if stage != "all"}
        self._in_turn, self._continues, self._report = bool(self._waiting), False, None

    def admit(self, stage: "Stage") -> None:
        """Try this against what has won so far, if the step is captured; else :meth:`restart` does that."""
        self._waiting = {engine for engine in self._waiting if engine != stage}
        self._continues = self._report is not None
        if self._mode != "off":
            self._checks, self.timer = Checks(), self._new_timer()

    def has_others(self, stage: "Stage") -> bool:
        """Return whether a trial of this runs in which something else is captured, too."""
        engines = set[str]() if self.timer is None else set(self.timer.engines)
        return stage in engines and bool(engines - {stage, "torch"})

    def has_won(self, engine: Engine) -> bool:
        """Return whether an engine is inductor's, and in use since it won."""
        return self._in_turn and engine in inductor.ENGINES and engine == self.engine

    @property
    def is_over_without(self) -> bool:
        """Whether only the unchanged step is left to time."""
        return self._in_turn and self.timer is not None and set(self.timer.engines) == {"torch"}

    def _new_timer(self) -> StepAutotuner | None:
        return self._module.new_autotuner(self._name, self._out | self._waiting)

    def leave(self) -> None:
        """Note in the report that the unchanged step runs from now on, whatever the last trial has found."""
        steps, found = self._module.backend.report.steps, self._report
        if found is not None and found in steps:
            self._report = dataclasses.replace(found, kept="torch")
            steps[steps.index(found)] = self._report

    def begin_run(self) -> None:
        """Begin a run of the Trainer: the last one may have ended within a step, and may have been timed."""
        if self.timer is not None:
            self.timer.discard_sample()
        if not self._module.times_steps:
            self.timer = None

    def forget_failures(self) -> None:
        """Try engines again that have failed, for another step."""
        self._out.clear()

    def give_up(self, engine: Engine) -> bool:
        """Go on without an engine that has failed; return whether it was in use, so that a new trial has to begin."""
        self._out.add(engine)
        if self._checks.after:
            return True
        if self.timer is not None and engine in self.timer.engines:
            self.timer.drop(engine)
        return False

    def next_engine(self) -> Engine:
        """Return the engine of the next step, and decide before if a trial is over."""
        if self.timer is None and self._checks.due() and self._module.times_steps:
            self.timer = self._module.new_check(self.engine)
        if (timer := self.timer) is None:
            return self.engine
        engine = timer.next_engine()
        if not timer.done:
            return engine
        self._decide(timer)
        return self.engine

    def _decide(self, timer: StepAutotuner) -> None:
        """Keep the fastest engine; all processes of a run go by the times of the one that is done first."""
        checked, self.timer = self._checks.after, None
        times = self._agreed(timer.milliseconds)
        in_use = (checked or self._continues) and self.engine in timer.engines
        fastest = cast("Engine", min(times, key=times.__getitem__))
        overhead = timer.overhead(self.engine if in_use else "torch")
        self._account.settle(times, overhead, timer.saved_by(fastest), timer.is_clear)
        steps = self._module.backend.report.steps
        if (checked or self._continues) and self._report in steps:
            steps.remove(self._report)
        self._report = StepReport(self._name, times)
        steps.append(self._report)
        self._checks.schedule()
        malloc.trim()  # the ways that were tried have left holes in the heap, 20 to 40 MB for a small GPT or ViT
        others = [cast("Engine", engine) for engine in times if engine not in (fastest, "torch")]
        if self._in_turn:
            self._out.update(others)  # what is tried next is tried against the winner
        if fastest == "torch":
            rivals = ["ort"] if "ort" in others else sorted(others, key=times.__getitem__)[:1]
            text = ", ".join(_took(engine, times[engine]) for engine in (*rivals, "torch"))
            if checked:
                text = f"timed again after {checked} steps: {text}"
                self._account.announce(text)
            self._leave(text)
            return
        self.engine = fastest
        if fastest in inductor.ENGINES and not checked:
            rival = "ort" if "ort" in times else "torch"
            text = f"{_took(rival, times[rival])}, {_took(fastest, times[fastest])}"
            self._module.record_choice(self._name, ReasonType.INDUCTOR_WON, text, announced=True)

    def _agreed(self, times: dict[str, float]) -> dict[str, float]:
        agree = self._module.backend.agree
        if agree is None:
            return times
        # processes may have lost different engines, and then hold different trials
        tried = f"{self._mode}/{self.engine}/{self._checks.after}" if self._checks.after else self._mode
        self._numbers[tried] += 1
        shared = agree(f"{self._name}/{tried}/{self._numbers[tried]}", times)
        return shared if len(shared) > 1 else times


def _took(engine: str, ms: float) -> str:
    way = {"ort": "captured", "torch": "unchanged"}.get(engine, f"compiled by {engine}")
    return f"{duration(ms)} {way}"
