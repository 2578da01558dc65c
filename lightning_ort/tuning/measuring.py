"""Trials: started, warmed up and sampled within the time, by :class:`Measurer`."""

import math
from collections.abc import Callable, Sequence

from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.probe import Facts
from lightning_ort.tuning.project import ProcessRunner
from lightning_ort.tuning.space import Limits, Option
from lightning_ort.tuning.trainer_process import Sample, TimeIsUp, VariantFailed
from lightning_ort.tuning.trials import Trial, in_turns

MIN_ROUNDS = 3
_UNIT = 1.5  # seconds of a sample, where there is time for it
_WARM_UP = 4  # batches, before it is known whether a strategy has settled
_MOST_WARM_UP = 64
_HOPELESS = 5.0  # times as slow as with the user's own settings
_SHARE_OF_A_TRIAL = 0.35  # of the time, for the start of a single candidate
_SHARE_AT_THE_END = 0.12  # of the time, for the last rounds
_SLOWER = 2.0  # than it has been: what a sample may take on a busy machine, before its time is up


def trial_of(option: Option, stage: str, facts: Facts, limits: Limits) -> Trial:
    """Return a trial of a candidate that has not been started."""
    candidate = option.candidate
    size, accumulate = candidate.batch_size or facts.batch_size, candidate.accumulate or facts.accumulate
    return Trial(candidate, stage, option.reason, size, accumulate, candidate.processes(limits.devices))


class Measurer:
    """Has candidates train until a deadline of the runner's clock, and notes what they take."""

    def __init__(
        self, facts: Facts, limits: Limits, runner: ProcessRunner, deadline: float, tell: Callable[[str], None]
    ) -> None:
        self._facts, self._limits, self._runner = facts, limits, runner
        self._deadline, self._tell = deadline, tell
        self._seconds = deadline - runner.clock()
        self._unit = min(_UNIT, self._seconds / 150)  # seconds of a sample
        self._round = 0
        self.bar: Trial | None = None  # what is many times as slow as this is given up at once
        self.trials: list[Trial] = []
        self.notes: list[str] = []
        self.running: set[Candidate] = set()

    def trial(self, option: Option, stage: str) -> Trial:
        """Add a trial that has not been started."""
        trial = trial_of(option, stage, self._facts, self._limits)
        self.trials.append(trial)
        return trial

    def _expected_start(self, trial: Trial) -> float:
        ours = trial.candidate.is_ours
        alike = [one.startup for one in self.trials if one.candidate.is_ours is ours and one.startup is not None]
        return max(alike, default=self.trials[0].startup or 0.0)

    def warm_up(self, trial: Trial, until: float) -> None:
        """Train until compiling and trying is done; note how long that took."""
        clock, begin = self._runner.clock, self._runner.clock()
        self._tell(f"{trial.stage}: starting {trial.candidate}")
        chunk, done, trained, sample = trial.accumulate, 0, 0, None
        whole = trial.accumulate * math.ceil(_WARM_UP / trial.accumulate)
        while sample is None or (not sample.settled and done < _MOST_WARM_UP) or done < 2 * whole:
            sample = self.sample(trial, chunk, until - clock())
            done += chunk
            trained += chunk + sample.untimed
            if done == 2 * chunk == 2 * trial.accumulate:  # the first one allocates
                self._check_that_it_may_win(trial)
                chunk = whole
        if not sample.settled:
            self.notes.append(f"{trial.candidate} was still compiling when it was timed")
        trial.startup = max(0.0, clock() - begin - trained * sample.step_seconds)

    def _check_that_it_may_win(self, trial: Trial) -> None:
        if (own := self.bar) is None or trial.rounds or trial.candidate.is_ours:  # ours compile first
            return
        slower = trial.step_seconds / trial.batch_size / (own.step_seconds / own.batch_size) / trial.processes
        if slower > _HOPELESS:
            raise VariantFailed(f"not tried any further: its second step took {slower:.1f} times as long as yours")

    def sample_all(self, trials: Sequence[Trial], reserve: float = 0.0) -> None:
        """Do a round: each of these trains for a sample, one after the other; ``reserve`` seconds are left alone."""
        self._round += 1
        unique = list({id(trial): trial for trial in trials}.values())
        for trial in in_turns(unique, self._round):
            if trial.verdict == "failed":
                continue
            if self.time_left() <= reserve:
                return  # the others have not been asked: they go on where they are, if there is another round
            try:
                if trial.candidate not in self.running:  # not in a timed sample
                    self.warm_up(trial, self._deadline - reserve)
                self._tell(f"{trial.stage}: {trial.candidate}")
                steps = self._steps_of(trial)
                sample = self.sample(trial, steps, self.time_left() - reserve)
            except VariantFailed as error:
                self.fail(trial, str(error))
            except TimeIsUp:
                self.stop(trial.candidate)
                if not trial.rounds:
                    self.fail(trial, "no time left")
            else:
                counted = sample.examples if self._facts.counts_examples else 0
                trial.count(self._round, sample, (counted / steps or trial.batch_size) * trial.processes)

    def sample(self, trial: Trial, steps: int, timeout: float) -> Sample:
        """Train for so many batches; the errors are those of a process."""
        if timeout <= 0:
            raise TimeIsUp("no time left")
        if trial.candidate not in self.running:  # it starts from the first step, if it has been stopped too
            trial.losses = []
            self.running.add(trial.candidate)
        sample = self._runner.sample(trial.candidate, steps, timeout)
        trial.note(sample)
        return sample

    def train_on(self, trial: Trial, steps: int, reserve: float) -> None:
        """Have a candidate that is running do so many batches for their losses, if there is time."""
        left = self.time_left() - reserve
        needed = _SLOWER * (steps + trial.untimed) * trial.step_seconds
        if steps <= 0 or not trial.losses or trial.candidate not in self.running or needed > left:
            return
        try:
            self.sample(trial, steps, left)
        except VariantFailed as error:
            self.fail(trial, str(error))
        except TimeIsUp:
            self.stop(trial.candidate)

    def fail(self, trial: Trial, why: str) -> None:
        """Note that a trial has failed, and end it."""
        trial.verdict, trial.why = "failed", why
        self.stop(trial.candidate)

    def stop(self, candidate: Candidate) -> None:
        """End a candidate's training."""
        self.running.discard(candidate)
        self._runner.stop(candidate)

    def start(self, trial: Trial) -> bool:
        """Warm a candidate up; return whether it trains."""
        left = self.time_left() - self.reserve()
        running = [one for one in self.trials if one.candidate in self.running]
        rounds = (MIN_ROUNDS - 1 + _SLOWER) * sum(map(self._sample_seconds, [*running, trial]))
        if left < self._expected_start(trial) + rounds:
            trial.verdict, trial.why = "skipped", "no time left"
            return False
        try:
            self.warm_up(trial, self._runner.clock() + min(left - rounds, _SHARE_OF_A_TRIAL * self._seconds))
        except VariantFailed as error:
            self.fail(trial, str(error))
        except TimeIsUp:
            self.fail(trial, "did not start in the time that a candidate may take")
        return trial.verdict == "measured"

    def time_left(self) -> float:
        """Return the seconds until the deadline."""
        return self._deadline - self._runner.clock()

    def _steps_of(self, trial: Trial) -> int:
        """Return the batches of a sample: two, if they take long."""
        each = trial.step_seconds or self.trials[0].step_seconds
        return trial.accumulate * math.ceil(max(2.0, self._unit / each) / trial.accumulate)

    def _sample_seconds(self, trial: Trial) -> float:
        each = trial.step_seconds or self.trials[0].step_seconds
        return each * (self._steps_of(trial) + trial.untimed)

    def time_for_round(self, trials: Sequence[Trial], reserve: float) -> bool:
        """Return whether a round of these trials ends in time."""
        unique = {id(trial): trial for trial in trials if trial.verdict != "failed"}.values()
        starts = sum(
            self._expected_start(trial) + 3 * max(_WARM_UP, trial.accumulate) * trial.step_seconds
            for trial in unique
            if trial.candidate not in self.running
        )
        return self.time_left() - reserve > starts + _SLOWER * sum(map(self._sample_seconds, unique))

    def reserve(self) -> float:
        """Return the seconds that the last rounds may take."""
        return max(_SHARE_AT_THE_END * self._seconds, _SLOWER * 2 * self._sample_seconds(self.trials[0]))
