"""Which engine runs a captured step: :class:`StepTrials`."""

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from lightning_ort._text import duration
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.report import ReasonType, StepReport
from lightning_ort.strategies.capture.account import StepAccount
from lightning_ort.strategies.capture.autotuner import Checks, Engine, StepAutotuner

if TYPE_CHECKING:
    from lightning_ort.strategies.capture.module import CapturedModule


class StepTrials:
    """Tries a captured step on several engines, keeps the fastest, and tries that one against eager again later.

    Args:
        module: The module whose step it is.
        name: The name of the step.
        account: Counts what trials take and find.
        leave: Called with the times if the step as it is wins; the step is not captured any more.

    """

    def __init__(self, module: "CapturedModule", name: str, account: StepAccount, leave: Callable[[str], None]) -> None:
        self.engine: Engine = "ort"  # where no trial runs
        self.timer: StepAutotuner | None = None  # of the trial that runs
        self._module, self._name, self._account, self._leave = module, name, account, leave
        self._mode = ""
        self._failed: set[Engine] = set()
        self._checks = Checks()
        self._report: StepReport | None = None  # of the last trial
        self._numbers: Counter[str] = Counter()  # of trials, by what was tried

    def restart(self, mode: str) -> None:
        """Begin anew, because the step is captured in another way."""
        self._mode, self.engine, self._checks = mode, "ort", Checks()
        self.timer = None if mode == "off" else self._module.new_autotuner(self._name, self._failed)

    def begin_run(self) -> None:
        """Begin a run of the Trainer: the last one may have ended within a step, and may have been timed."""
        if self.timer is not None:
            self.timer.discard_sample()
        if not self._module.times_steps:
            self.timer = None

    def forget_failures(self) -> None:
        """Try engines again that have failed, for another step."""
        self._failed.clear()

    def give_up(self, engine: Engine) -> bool:
        """Go on without an engine that has failed; return whether it was in use, so that a new trial has to begin."""
        self._failed.add(engine)
        if self._checks.after:
            return True
        if self.timer is not None:
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
        self._account.settle(times, timer.overhead(self.engine if checked else "torch"))
        steps = self._module.backend.report.steps
        if checked and self._report in steps:
            steps.remove(self._report)
        self._report = StepReport(self._name, times)
        steps.append(self._report)
        self._checks.schedule()
        fastest = min(times, key=times.__getitem__)
        own = duration(times["torch"])
        if fastest == "torch":
            captured = min((ms for engine, ms in times.items() if engine != "torch"), default=math.nan)
            text = f"{duration(times.get('ort', captured))} captured, {own} as it is"
            if checked:
                text = f"timed again after {checked} steps: {text}"
                self._account.announce(text)
            self._leave(text)
            return
        self.engine = cast("Engine", fastest)
        if fastest in inductor.ENGINES and not checked:
            rival = duration(times["ort"]) if "ort" in times else own
            text = f"{rival}, {duration(times[fastest])} compiled by {fastest}, which keeps it"
            self._module.record_choice(self._name, ReasonType.SLOWER, text, announced=True)

    def _agreed(self, times: dict[str, float]) -> dict[str, float]:
        agree = self._module.backend.agree
        if agree is None:
            return times
        # processes may have lost different engines, and then hold different trials
        tried = f"{self._mode}/{self.engine}/{self._checks.after}" if self._checks.after else self._mode
        self._numbers[tried] += 1
        shared = agree(f"{self._name}/{tried}/{self._numbers[tried]}", times)
        return shared if len(shared) > 1 else times
