"""The search: :class:`Search` has candidates train in turns, stage by stage, until the time is up.

Trials of a stage run alternately, with the user's own settings and with the best so far, so that what else the machine
does hits all of them. After a few rounds those that are clearly slower leave, and of many the slower half. A challenger
wins if it is clearly faster than the best, fits into the memory, and its loss is that of float32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.measuring import MIN_ROUNDS, Measurer
from lightning_ort.tuning.probe import Facts
from lightning_ort.tuning.project import ProcessRunner
from lightning_ort.tuning.space import Limits, Option, Stage, TuneError, base, memory_stage, reference, stages
from lightning_ort.tuning.trainer_process import TimeIsUp, VariantFailed, uninterrupted
from lightning_ort.tuning.trials import LEAST, Departure, Trial, departure, fastest, sketch, speed

_MAX_ROUNDS = 6
_LEAST_GAIN = 1.03  # less is not worth a line in a configuration, nor told from noise
_FINAL_ROUNDS = 8
_SHARE_FOR_OWN = 0.5  # of the time: if the user's own settings need more until measured, nothing else can be tried
_SLOW_START = "training with your own settings takes so long to start that nothing can be compared with it"
_ROOM = 0.7  # of the free memory


@dataclass
class Outcome:
    """What a search found."""

    own: Trial
    best: Trial
    trials: list[Trial]
    notes: list[str] = field(default_factory=list)


class Search:
    """One search, until a deadline of the runner's clock.

    ``plain``: whether the user's own settings are stock Lightning in float32. ``listen`` is called with what is done
    and the best so far.
    """

    def __init__(
        self,
        facts: Facts,
        limits: Limits,
        plain: bool,
        runner: ProcessRunner,
        deadline: float,
        listen: Callable[[str, str], None] = lambda doing, best: None,
    ) -> None:
        self._facts, self._limits, self._plain, self._runner = facts, limits, plain, runner
        self._deadline, self._listen = deadline, listen
        self._seconds = deadline - runner.clock()  # what is left of those that the user allows
        self._measurer = Measurer(facts, limits, runner, deadline, self._tell)

    def run(self) -> Outcome:
        """Search; ``KeyboardInterrupt`` ends it with the best so far. ``TuneError`` if nothing can be compared."""
        own = self._trial(Option(Candidate(), "what you have"), "yours")
        self._own = self._best = own
        try:
            self._search(own)
        except KeyboardInterrupt:
            self._measurer.notes.append("interrupted: the best of what was finished")
            if not own.rounds:
                raise
        with uninterrupted():
            for candidate in list(self._measurer.running):
                self._measurer.stop(candidate)
        if wrong := self._violation(self._best):
            raise TuneError(f"Nothing that was finished is as asked for: the best {wrong}. {self._reasons()}")
        compared = self._reference(self._best)
        if self._best not in (own, compared) and self._best.loss_difference is None:
            why = "nothing was trained in float32 with this batch" if compared is None else "there are too few losses"
            self._measurer.notes.append(f"the loss of {self._best.candidate} was not compared with float32's: {why}")
        return Outcome(own, self._best, self._measurer.trials, self._measurer.notes)

    def _search(self, own: Trial) -> None:
        self._warm_up_own(own)
        if self._limits.memory is not None and own.peak is None:
            self._measurer.notes.append("--memory was not checked: this system does not tell what a process takes")
        self._measurer.bar = None if self._violation(own) else own
        start = base(self._facts, self._limits)
        if start != own.candidate:
            self._stage(Stage("batch size", lambda best: [Option(start, "the effective batch that was asked for")]))
            if self._best is own:
                raise TuneError(f"Nothing trains with the effective batch that was asked for: {self._reasons()}")
        if not self._fits(self._best):
            self._stage(memory_stage(self._facts, self._limits))
            self._check_that_something_fits()
        for stage in stages(self._facts, self._limits, self._plain):
            self._stage(stage)
        self._confirm()

    # one stage

    def _stage(self, stage: Stage) -> None:
        tried = {trial.candidate for trial in self._measurer.trials}
        options = [one for one in stage.options(self._best.candidate) if one.candidate not in tried]
        unique = list({one.candidate: one for one in options}.values())
        at_once = self._at_once()
        for first in range(0, len(unique), at_once):
            self._race(stage, unique[first : first + at_once])

    def _at_once(self) -> int:
        """Return how many challengers may run beside the best and the user's own settings."""
        free, needed = self._runner.free_memory(), self._own.peak
        if free is None or not needed:
            return 4
        return max(1, min(5, int(_ROOM * free / needed) - 1))

    def _race(self, stage: Stage, options: Sequence[Option]) -> None:
        challengers = [trial for one in options if (trial := self._warmed_up(one, stage.name)) is not None]
        if not challengers:
            return
        racing = list(challengers)
        for number in range(1, _MAX_ROUNDS + 1):
            if not self._measurer.time_for_round([self._own, self._best, *racing], self._measurer.reserve()):
                break
            self._measurer.sample_all([self._own, self._best, *racing], self._measurer.reserve())
            racing = [trial for trial in racing if trial.verdict == "measured"]
            if number >= MIN_ROUNDS:
                racing = self._still_racing(racing, halve=number == MIN_ROUNDS)
                if self._is_decided(racing):
                    break
            if not racing:
                break
        self._decide(challengers)

    def _still_racing(self, racing: list[Trial], halve: bool) -> list[Trial]:
        """Leave out those that are clearly slower than the best or the fastest of them, and the slower half of many."""
        ranked = fastest(racing, self._best)
        kept = []
        for trial in ranked:
            against = [found for other in (self._best, ranked[0]) if (found := speed(trial, other))]
            if trial is ranked[0] or all(found.high >= 1 for found in against):
                kept.append(trial)
        return kept[: math.ceil(len(ranked) / 2)] if halve and len(ranked) > 2 else kept

    def _is_decided(self, racing: list[Trial]) -> bool:
        if not racing:
            return True
        found = speed(racing[0], self._best)
        return len(racing) == 1 and found is not None and found.is_clear

    def _decide(self, challengers: Sequence[Trial]) -> None:
        before = self._best
        for trial in challengers:
            if trial.verdict == "measured" and not trial.rounds:
                trial.verdict, trial.why = "skipped", "no time left"
        for trial in fastest([one for one in challengers if one.rounds and one.verdict == "measured"], before):
            if (found := speed(trial, before)) is None:
                trial.why = "no time left"
                continue
            faster = found.low > 1 and found.median >= _LEAST_GAIN
            if not self._fits(trial):
                self._refuse(trial, self._violation(trial))
            elif self._best is not before or not (faster or self._violation(before)):
                self._compare(trial)
                trial.why = f"{found.median:.2f}x of {before.candidate} ({found.low:.2f} to {found.high:.2f})"
            elif self._learns(trial, self._measurer.reserve()):
                self._best = trial
                trial.verdict, trial.why = "won", f"{found.median:.2f}x of the best before, {before.candidate}"
        for trial in (*challengers, before):
            if trial not in (self._best, self._own):
                self._measurer.stop(trial.candidate)

    def _violation(self, trial: Trial) -> str:
        """Say what is not as asked for; the user's own settings may only be where the search starts."""
        wanted = self._limits.effective_batch
        if not self._fits(trial):
            return f"needs {_gigabytes(trial.peak)}, the limit is {_gigabytes(self._limits.memory)}"
        if wanted is not None and trial.effective_batch != wanted:
            return f"has {trial.effective_batch} examples between two steps of the optimizer, not {wanted}"
        return ""

    # one candidate

    def _trial(self, option: Option, stage: str) -> Trial:
        trial = self._measurer.trial(option, stage)
        trial.predicted_peak = self._predicted(trial)
        return trial

    def _predicted(self, trial: Trial) -> int | None:
        """Return the peak that is to be expected of a candidate, from the user's own and the model of the memory."""
        memory, own = self._facts.memory, getattr(self, "_own", None)
        if memory is None or own is None or own.peak is None:
            return None
        kept = 0.5 if trial.candidate.checkpoint_blocks or trial.candidate.activation_memory_budget is not None else 1.0
        change = memory.peak(trial.batch_size, trial.candidate.optim, kept) - memory.step.peak
        return max(0, own.peak + change)

    def _warm_up_own(self, own: Trial) -> None:
        try:
            self._measurer.warm_up(own, self._deadline)
            self._measurer.sample_all([own])
            if not own.rounds:
                raise VariantFailed(own.why) if own.why else TimeIsUp
        except VariantFailed as error:
            raise TuneError(
                f"The module does not train as it is, so there is nothing to compare with: {error}. First make a few"
                " steps work with Trainer.fit (or main.py fit), then tune."
            ) from None
        except TimeIsUp:
            raise self._too_short(self._seconds) from None
        if (spent := self._seconds - self._measurer.time_left()) > _SHARE_FOR_OWN * self._seconds:
            raise self._too_short(spent)

    def _too_short(self, spent: float) -> TuneError:
        seconds = self._limits.seconds
        return TuneError(too_short(seconds, _SLOW_START, seconds - self._seconds + 4 * spent))

    def _warmed_up(self, option: Option, stage: str) -> Trial | None:
        trial = self._trial(option, stage)
        # what recomputing saves is a guess, and so is what a strategy needs: only what is far from fitting is not tried
        if (trial.predicted_peak or 0) > 1.5 * (self._limits.memory or math.inf):
            trial.verdict, trial.why = "skipped", f"would need about {_gigabytes(trial.predicted_peak)}"
            return None
        return trial if self._measurer.start(trial) else None

    def _refuse(self, trial: Trial, why: str) -> None:
        trial.verdict, trial.why = "refused", why

    # what has to hold

    def _fits(self, trial: Trial) -> bool:
        return self._limits.memory is None or trial.peak is None or trial.peak <= self._limits.memory

    def _reference(self, trial: Trial) -> Trial | None:
        """Return with whose losses a trial's are compared."""
        if self._plain and self._own.effective_batch == trial.effective_batch:
            return self._own
        # in batches of any size: a curve is of the optimizer's steps, which see the same examples
        wanted = reference(trial.candidate).but(batch_size=None, accumulate=None)
        for one in self._measurer.trials:
            alike = one.candidate.engine in (None, "stock") and one.candidate.precision in (None, "32-true")
            same = one.effective_batch == trial.effective_batch and one.candidate.optim is None
            plain = one.candidate.but(batch_size=None, accumulate=None) == wanted or (self._plain and alike)
            if one.losses and same and plain:
                return one
        return None

    def _compare(self, trial: Trial) -> Departure | None:
        reference = self._reference(trial)
        if reference is None or trial is reference:
            return None
        found = departure(trial.curve, reference.curve)
        trial.loss_difference = found.difference if found else None
        return found

    def _learns(self, trial: Trial, reserve: float) -> bool:
        reference = self._reference(trial)
        if reference is None or trial is reference:
            return True
        for one in (trial, reference):
            self._measurer.train_on(one, (LEAST - len(one.curve)) * one.accumulate, reserve)
        if trial.verdict == "failed":
            return False
        found = self._compare(trial)
        if found is not None and found.exceeds(self._limits.tolerance):
            curves = f"{sketch(trial.curve)} against {sketch(reference.curve)}"
            self._refuse(trial, f"its loss departs from float32's by {found.difference:.1%}: {curves}")
            return False
        return True

    def _check_that_something_fits(self) -> None:
        if self._fits(self._best):
            return
        known = [trial for trial in self._measurer.trials if trial.peak is not None and trial.verdict != "failed"]
        least = min(known, key=lambda trial: trial.peak or 0)
        raise TuneError(
            f"--memory: nothing that was tried fits into {_gigabytes(self._limits.memory)}. The least is"
            f" {_gigabytes(least.peak)}, {least.candidate}. Allow that much, make the model or its input smaller, or"
            f" freeze a part of it. {self._reasons()}"
        )

    def _confirm(self) -> None:
        """Compare the best, and if it is not clearly faster the next, with the user's own settings once more."""
        while self._best is not self._own and not self._is_confirmed(self._best):
            self._measurer.notes.append(f"{self._best.candidate} won, but not in the last rounds: {self._best.why}")
            self._measurer.stop(self._best.candidate)
            self._best = self._next_best()

    def _next_best(self) -> Trial:
        """Return the fastest that is not refused: a winner of an earlier stage, or one that lost against a winner."""
        must_change = bool(self._violation(self._own))
        best, highest = self._own, 0.0
        for trial in self._measurer.trials:
            found = speed(trial, self._own)
            if trial.verdict not in ("measured", "won") or found is None or self._violation(trial):
                continue
            # what lost by less than counts has nothing over the winner
            counted = found.median * (_LEAST_GAIN if trial.verdict == "won" else 1.0)
            if counted > highest and (must_change or (found.low > 1 and found.median >= _LEAST_GAIN)):
                best, highest = trial, counted
        if best.verdict == "measured" and best is not self._own:
            best.verdict, best.why = "won", f"the fastest of what is left; {best.why}"
        return best

    def _is_confirmed(self, best: Trial) -> bool:
        for _ in range(_FINAL_ROUNDS):
            if best.verdict == "failed" or not self._measurer.time_for_round([self._own, best], 0.0):
                break
            self._measurer.sample_all([self._own, best])
        if best.verdict == "failed" or not self._learns(best, 0.0):
            return False
        if wrong := self._violation(best):
            self._refuse(best, wrong)
            return False
        found = speed(best, self._own)
        if self._violation(self._own) or (found is not None and found.low > 1):
            return True
        times = f"{found.low:.2f} to {found.high:.2f}x of yours in the end: " if found else ""
        self._refuse(best, f"{times}not clearly faster")
        return False

    def _reasons(self) -> str:
        found = [f"{trial.candidate}: {trial.why}" for trial in self._measurer.trials if trial.why]
        return f"Tried: {'; '.join(found)}." if found else ""

    def _tell(self, doing: str) -> None:
        best = getattr(self, "_best", None)
        found = speed(best, self._own) if best is not None else None
        times = f" {found.median:.2f}x" if found else ""
        self._listen(doing, "" if best is None or best is self._own else f"{best.candidate}{times}")


def too_short(seconds: float, why: str, needed: float) -> str:
    """Say that the time is too short, why, and how many seconds are likely to be enough."""
    return f"--time {seconds:.3g}s is too short: {why}. Pass about {math.ceil(needed / 60)}m."


def _gigabytes(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e9:.3g} GB"
