"""What a captured step has cost and saved: :class:`StepAccount`."""

import dataclasses
import math
import time
from typing import TYPE_CHECKING

from lightning_ort.strategies.capture.announcements import Announcement
from lightning_ort.strategies.capture.budget import GRACE, STOP, projected_cost, seconds_text

if TYPE_CHECKING:
    from lightning_ort.strategies.capture.autotuner import Engine
    from lightning_ort.strategies.capture.dynamo_monitor import Outcome
    from lightning_ort.strategies.capture.gate import History, Stage, StartGate
    from lightning_ort.strategies.capture.module import CapturedModule


class StepAccount:
    """Counts one captured step's seconds, and says when there are too many."""

    def __init__(self, module: "CapturedModule", name: str) -> None:
        self.exceeded = ""  # by how much the budget is; then the step is not to be captured any more
        self._module = module
        self._name = name
        self._history: History | None = None  # of a step that has waited
        self._usual = 0.0  # seconds of the unchanged step, where it was timed
        self._done = 0  # steps in this run
        self._spent = 0.0  # in this run
        self._saving = 0.0  # in each step
        self._saved = 0.0  # since the last trial
        self.milliseconds: dict[str, float] = {}  # of the step on each engine, as the last trial found
        self.stage: Stage = "all"  # what was tried last
        self._found: dict[str, float] = {}  # by the trial of that stage
        self._gave_up = False  # that stage
        self.refused = ""  # why the step is for eager alone
        self.failures: dict[Engine, str] = {}  # why engines cannot run the step any more, until it drops them
        self._engine: Engine = "ort"  # of the current call
        self._call_start = 0.0
        self._first = False  # whether nothing was compiled in this process before that call
        self._operations = 0  # in graphs of that call
        self._projected = 0.0  # seconds in all, for which the rest of that call is not compiled
        self._announcement = Announcement(name)

    def begin_run(self) -> None:
        """Begin a run of the Trainer."""
        self._done, self._spent = 0, 0.0
        self.exceeded = ""  # that of the last run

    def end_run(self) -> None:
        """Write what a step that has waited took to start, for later runs."""
        module = self._module
        self._announcement.end(module.module.trainer, "the run ended before it could be timed")
        self._store()

    def start(self, gate: "StartGate", stage: "Stage") -> None:
        """Begin to try what has waited."""
        self._store()
        self.stage, self._history = stage, gate.histories[stage]
        self._usual, self._done = gate.step_seconds, gate.done - 1  # the current one is counted next
        self._spent, self._found, self._gave_up, self.exceeded, self.refused = 0.0, {}, False, "", ""
        self._projected = 0.0
        self._announcement = Announcement(self._name)

    def give_up(self, engine: "Engine", is_last: bool) -> None:
        """Go on without an engine; if it is what is tried now, later runs do not take that for a start."""
        if engine == self.stage:
            self._gave_up, self.exceeded = True, ""
        if is_last:
            self._announcement.end(self._module.module.trainer, f"{engine} is given up; the step stays in PyTorch")

    def _store(self) -> None:
        module = self._module
        if self._history is not None and self._spent > 0 and module.module.trainer.is_global_zero:
            finished = not (self.exceeded or self._gave_up)
            seconds = max(self._spent, self._projected / STOP)
            self._history.store(module, seconds, self._found, finished, self.refused)
        self._history = None  # what later runs spend is not what a start takes

    def count_step(self, in_trial: bool) -> None:
        """Count a step, and what it saves if it is not part of a trial."""
        self._done += 1
        if self._saving and not in_trial:
            run, trainer = self._module.backend.report.run, self._module.module.trainer
            run.saved_seconds += self._saving
            self._saved += self._saving
            if run.paid_after is None and run.saved_seconds >= run.startup_seconds:
                run.paid_after = trainer.fit_loop.total_batch_idx + 1 if trainer.state.fn == "fit" else self._done

    def begin_call(self, engine: "Engine") -> None:
        """Start the clock for a call that may compile for an engine."""
        self._module.begin_run()  # of a step that an earlier run has captured
        self._engine = engine
        if not self._announcement.started:
            self._announcement.start(self._module.module.trainer, engine if self.stage == "all" else self.stage)
        self._first = not self._module.backend.compiled_in_process()
        self._operations, self._call_start = 0, time.perf_counter()

    def end_compiling_call(self, outcome: "Outcome", is_timed: bool) -> None:
        """Count what a call took in which something was compiled, and whether a trial of the step is to come."""
        seconds = time.perf_counter() - self._call_start
        self._announcement.add(seconds)
        if not is_timed:
            self._announcement.end(self._module.module.trainer, "the settings exclude timing it against PyTorch")
        budget, allowed = self._module.budget, self._allowed
        left = allowed - budget.charged
        self._spend(seconds - self._usual)
        if self._engine == "inductor" == self.stage and not (self._found or outcome.recompiles):
            # it has compiled all that the step needs, and its trial takes far less than that did
            budget.exempt += max(0.0, seconds - self._usual - max(0.0, left) / 2)
        # one that has ended well is not thrown away for a little
        limit = allowed if outcome.graph_breaks or outcome.recompiles else GRACE * allowed
        spent, agree = budget.charged, self._module.backend.agree
        exceeded = spent > limit or self._projected > 0
        if agree is not None and self._module.amortized:
            exceeded = agree(f"stop/{self._name}/{self._done}", {"stops": float(exceeded)})["stops"] > 0
        if exceeded:
            expected = f", {seconds_text(self._projected)} expected" if self._projected > spent else ""
            self.exceeded = (
                f"{seconds_text(spent)} of {seconds_text(allowed)} allowed{expected}; raise"
                " ORTConfig(compile_budget=...) or pass start='now'"
            )
            self._module.backend.report.run.waiting = f"{self._name} used up its compile budget"

    def stops_compiling(self, operations: int) -> bool:
        """Return whether to compile nothing more in the call that runs, because it takes too much.

        Args:
            operations: How many the graph calls that is next.

        """
        module, seconds = self._module, time.perf_counter() - self._call_start
        charged, allowed = module.budget.charged, self._allowed
        total = charged + projected_cost(seconds, self._operations, module.operations_of(self._name), self._first)
        self._operations += operations
        if total > GRACE * allowed or charged + seconds > STOP * allowed:
            self._projected = total
        return self._projected > 0

    def settle(self, times: dict[str, float], overhead: float, saving: float, is_clear: bool) -> None:
        """Count a trial.

        Args:
            times: Of the step on each engine, in ms.
            overhead: The seconds that it took.
            saving: The seconds that a step saves from then on.
            is_clear: Whether the samples differ by less than the engines.

        """
        self._spend(overhead)
        run = self._module.backend.report.run
        run.trial_seconds += overhead
        self._announcement.verdict(self._module.module.trainer, times, is_clear)
        self.milliseconds = times
        if self.stage in ("all", *times):  # and not a later check of another engine
            self._found = times
        before, self._saving = self._saving, saving
        if self._saving < before:  # nobody knows since when
            run.saved_seconds -= self._saved * (1 - self._saving / before)
            run.paid_after = run.paid_after if run.saved_seconds >= run.startup_seconds else None
        self._saved = 0.0

    def announce(self, text: str) -> None:
        """Say something on the console, if that shows the run."""
        self._announcement.say(self._module.module.trainer, text)

    def close(self) -> None:
        """Nothing is saved any more: the step has changed, and what follows is announced anew."""
        self._saving = self._saved = 0.0
        self._announcement = Announcement(self._name)

    @property
    def _allowed(self) -> float:
        module = self._module
        if not module.amortized:
            return math.inf
        view = module.outlook(self._name, self._done)
        if view.batches_done == 0 and view.steps is not None:  # an earlier run has captured the step
            left = view.steps * self._usual
            view = dataclasses.replace(view, seconds=left if view.seconds is None else min(left, view.seconds))
        return module.budget.allowed(view)

    def _spend(self, seconds: float) -> None:
        seconds = max(0.0, seconds)
        module = self._module
        self._spent += seconds
        module.budget.spend(seconds)
        key = (self._name, self.stage)
        module.startup_seconds[key] = module.startup_seconds.get(key, 0.0) + seconds
        run = module.backend.report.run
        run.startup_seconds += seconds
        if run.saved_seconds < run.startup_seconds:
            run.paid_after = None
