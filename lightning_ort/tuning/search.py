"""The search: :class:`Search` asks Optuna what to try next, and has it train in turns with the user's own settings.

Each dimension of the space is varied alone around the best so far, since ten to twenty trials are all that minutes
allow; Optuna's sampler combines them in the time that is left. Successive halving ends a trial that is not among the
faster half after a few rounds. A trial wins if it is clearly faster than the best, and its loss is that of float32.
"""

from collections.abc import Callable

import optuna
from optuna.trial import TrialState

from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.measuring import MIN_ROUNDS, Measurer
from lightning_ort.tuning.probe import Facts
from lightning_ort.tuning.project import ProcessRunner
from lightning_ort.tuning.space import Limits, at, dimensions
from lightning_ort.tuning.trainer_process import TimeIsUp, VariantFailed
from lightning_ort.tuning.trials import LEAST, Departure, Outcome, Speed, Trial, departure, speed

_MAX_ROUNDS = 6
_LEAST_GAIN = 1.03  # less is not worth a line in a configuration, nor told from noise
_FINAL_ROUNDS = 8
_COMBINED = 6  # trials of Optuna's sampler at most
_SHARE_FOR_OWN = 0.5  # of the time: if the user's own settings need more until measured, nothing else can be tried


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
        self._facts, self._limits, self._plain, self._listen = facts, limits, plain, listen
        self._measurer = Measurer(facts, runner, deadline, self._tell)
        self._own = self._best = self._measurer.trial(Candidate(), "what you have")
        self._chosen: dict[str, int] = {}  # what the best is made of

    def run(self) -> Outcome:
        """Search; ``KeyboardInterrupt`` ends it with the best so far.

        Errors are those of the user's own settings: ``VariantFailed``, or ``TimeIsUp`` if nothing can be compared.
        """
        measurer, own = self._measurer, self._own
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._search()
        except KeyboardInterrupt:
            measurer.notes.append("interrupted: the best of what was finished")
            if not own.rounds:
                raise
        finally:
            optuna.logging.set_verbosity(verbosity)
        for candidate in list(measurer.running):
            measurer.stop(candidate)
        if self._best not in (own, self._reference()) and self._best.loss_difference is None:
            why = "nothing was trained in float32" if self._reference() is None else "there are too few losses"
            measurer.notes.append(f"the loss of {self._best.candidate} was not compared with float32's: {why}")
        return Outcome(own, self._best, measurer.trials, measurer.notes)

    def _search(self) -> None:
        own = self._own
        self._warm_up_own()
        found = dimensions(self._facts, self._limits, self._plain)
        study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(n_startup_trials=1, seed=0),
            pruner=optuna.pruners.SuccessiveHalvingPruner(MIN_ROUNDS, reduction_factor=2),
        )
        space: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(range(len(options) + 1))
            for name, options in found.items()
        }

        def step() -> Trial:
            asked = study.ask(space)
            state, before = TrialState.COMPLETE, self._best
            trial = self._tried(*at(found, asked.params), asked)
            if self._best is not before:
                self._chosen = dict(asked.params)
            value = speed(trial, own)
            if value is None or trial.verdict in ("failed", "refused", "skipped"):
                state = TrialState.FAIL
            study.tell(asked, value.median if value and state is TrialState.COMPLETE else None, state)
            return trial

        for name, options in found.items():
            around = dict.fromkeys(space, 0) | self._chosen
            for number in range(1, len(options) + 1):
                study.enqueue_trial(around | {name: number})
                step()
        for _ in range(_COMBINED):
            if step().verdict == "skipped":
                break
        self._measurer.release()
        self._confirm()

    def _warm_up_own(self) -> None:
        own, measurer = self._own, self._measurer
        measurer.warm_up(own, _SHARE_FOR_OWN * measurer.seconds)
        measurer.sample_all([own])
        if own.verdict == "failed":
            raise VariantFailed(own.why)
        if measurer.time_left() < (1 - _SHARE_FOR_OWN) * measurer.seconds:
            raise TimeIsUp
        measurer.keep_for_the_end()

    def _tried(self, candidate: Candidate, reason: str, asked: optuna.Trial) -> Trial:
        """Have a candidate train in turns with the user's own settings; it is the best if it wins."""
        measurer, own, before = self._measurer, self._own, self._best
        if known := [trial for trial in measurer.trials if trial.candidate == candidate]:
            return known[0]
        trial = measurer.trial(candidate, reason)
        if not measurer.start(trial):
            return trial
        for number in range(1, _MAX_ROUNDS + 1):
            if not measurer.time_for_round([own, trial]):
                break
            measurer.sample_all([own, trial])
            if trial.verdict != "measured" or (found := speed(trial, own)) is None:
                break
            asked.report(found.median, number)
            is_clear = found.low > self._to_beat.high or found.high < self._to_beat.median
            if number >= MIN_ROUNDS and (is_clear or asked.should_prune()):
                break
        self._decide(trial)
        for one in (trial, before):
            if one not in (self._best, own):
                measurer.stop(one.candidate)
        return trial

    @property
    def _to_beat(self) -> Speed:
        """How many times as fast as the user's own settings the best is."""
        found = None if self._best is self._own else speed(self._best, self._own)
        return found or Speed(1.0, 1.0, 1.0)

    def _decide(self, trial: Trial) -> None:
        found, before = speed(trial, self._own), self._best
        if trial.verdict == "measured" and found is None:
            trial.verdict, trial.why = "skipped", "no time left"
        if trial.verdict != "measured" or found is None:
            return
        times = found.median / self._to_beat.median
        is_faster = found.low > self._to_beat.high and times >= _LEAST_GAIN
        if not is_faster:
            self._compare(trial)
            trial.why = f"{times:.2f}x of {before.candidate} ({found.low:.2f} to {found.high:.2f}x of yours)"
        elif self._learns(trial):
            self._best = trial
            trial.verdict, trial.why = "won", f"{times:.2f}x of the best before, {before.candidate}"

    # what has to hold

    def _reference(self) -> Trial | None:
        """Return with whose losses others are compared: Lightning's own strategy in float32, in batches of any size."""
        if self._plain:
            return self._own
        wanted = {"engine": "stock", "precision": "32-true", "optim": None}
        alike = (one for one in self._measurer.trials if one.candidate == one.candidate.but(**wanted) and one.losses)
        return next(alike, None)

    def _compare(self, trial: Trial) -> Departure | None:
        reference = self._reference()
        if reference is None or trial is reference:
            return None
        found = departure(trial.curve, reference.curve)
        trial.loss_difference = found.difference if found else None
        return found

    def _learns(self, trial: Trial) -> bool:
        for one in (trial, self._reference() or trial):
            self._measurer.train_on(one, (LEAST - len(one.curve)) * one.accumulate)
        if trial.verdict == "failed":
            return False
        found = self._compare(trial)
        if found is not None and found.exceeds(self._limits.tolerance):
            trial.verdict, trial.why = "refused", f"its loss departs from float32's by {found.difference:.1%}"
            return False
        return True

    def _confirm(self) -> None:
        """Compare the best, and if it is not clearly faster the next, with the user's own settings once more."""
        while self._best is not self._own and not self._is_confirmed(self._best):
            self._measurer.notes.append(f"{self._best.candidate} won, but not in the last rounds: {self._best.why}")
            self._measurer.stop(self._best.candidate)
            self._best = self._next_best()

    def _next_best(self) -> Trial:
        """Return the fastest of what is left, or the user's own settings; what lost by little beats no winner."""
        left: dict[float, Trial] = {0.0: self._own}
        for trial in self._measurer.trials:
            found = speed(trial, self._own) if trial.verdict in ("measured", "won") else None
            if found is not None and found.low > 1 and found.median >= _LEAST_GAIN:
                left[found.median * (_LEAST_GAIN if trial.verdict == "won" else 1.0)] = trial
        best = left[max(left)]
        if best.verdict == "measured" and best is not self._own:
            best.verdict, best.why = "won", f"the fastest of what is left; {best.why}"
        return best

    def _is_confirmed(self, best: Trial) -> bool:
        for _ in range(_FINAL_ROUNDS):
            if best.verdict == "failed" or not self._measurer.time_for_round([self._own, best]):
                break
            self._measurer.sample_all([self._own, best])
        if best.verdict == "failed" or not self._learns(best):
            return False
        found = speed(best, self._own)
        if found is not None and found.low > 1:
            return True
        times = f"{found.low:.2f} to {found.high:.2f}x of yours in the end: " if found else ""
        best.verdict, best.why = "refused", f"{times}not clearly faster"
        return False

    def _tell(self, doing: str) -> None:
        best, found = self._best, speed(self._best, self._own)
        self._listen(doing, "" if best is self._own or found is None else f"{best.candidate} {found.median:.2f}x")
