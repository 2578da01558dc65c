"""Trials: started, warmed up and sampled within the time, by :class:`Measurer`."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat

from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.probe import Facts
from lightning_ort.tuning.project import ProcessRunner
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


class Measurer:
    """Has candidates train until a deadline of the runner's clock, and notes what they take."""

    def __init__(self, facts: Facts, runner: ProcessRunner, deadline: float, tell: Callable[[str], None]) -> None:
        self._facts, self._runner, self._deadline, self._tell = facts, runner, deadline, tell
        self._kept = 0.0  # seconds
        self.seconds = self.time_left()
        self._unit = min(_UNIT, self.seconds / 150)  # seconds of a sample
        self._round = 0
        self.trials: list[Trial] = []
        self.notes: list[str] = []
        self.running: set[Candidate] = set()

    def time_left(self) -> float:
        """Return the seconds that may be used now: those of the last rounds only after :meth:`release`."""
        return self._deadline - self._kept - self._runner.clock()

    def keep_for_the_end(self) -> None:
        """Leave time for the last rounds alone."""
        self._kept = max(_SHARE_AT_THE_END * self.seconds, _SLOWER * 2 * self._sample_seconds(self.trials[0]))

    def release(self) -> None:
        """Use the time for the last rounds, too."""
        self._kept = 0.0

    def trial(self, candidate: Candidate, reason: str) -> Trial:
        """Add a trial that has not been started."""
        size, accumulate = self._facts.batch_size, self._facts.accumulate
        trial = Trial(candidate, reason, candidate.batch_size or size, candidate.accumulate or accumulate)
        self.trials.append(trial)
        return trial

    def start(self, trial: Trial) -> bool:
        """Warm a candidate up if there is time for it and some rounds; return whether it trains."""
        left = self.time_left()
        rounds = (MIN_ROUNDS - 1 + _SLOWER) * (self._sample_seconds(self.trials[0]) + self._sample_seconds(trial))
        if left < self._expected_start(trial) + rounds:
            trial.verdict, trial.why = "skipped", "no time left"
            return False
        with self._noting(trial, late="did not start in the time that a candidate may take"):
            self.warm_up(trial, min(left - rounds, _SHARE_OF_A_TRIAL * self.seconds))
        return trial.verdict == "measured"

    @contextmanager
    def _noting(self, trial: Trial, late: str) -> Iterator[None]:
        """Note that a trial has failed, and end it; one that is late has failed if it has no rounds."""
        try:
            yield
        except (VariantFailed, TimeIsUp) as error:
            self.stop(trial.candidate)
            if isinstance(error, VariantFailed) or not trial.rounds:
                trial.verdict, trial.why = "failed", late if isinstance(error, TimeIsUp) else str(error)

    def warm_up(self, trial: Trial, seconds: float) -> None:
        """Train until compiling and trying is done; note how long that took."""
        clock, begin = self._runner.clock, self._runner.clock()
        self._tell(f"starting {trial.candidate}")
        done = trained = 0
        whole = trial.accumulate * math.ceil(_WARM_UP / trial.accumulate)
        for chunk in chain([trial.accumulate] * 2, repeat(whole)):
            sample = self._sample(trial, chunk, begin + seconds - clock())
            done += chunk
            trained += chunk + sample.untimed
            if done == 2 * trial.accumulate:  # the first one allocates
                self._check_that_it_may_win(trial)
            if done >= 2 * whole and (sample.settled or done >= _MOST_WARM_UP):
                break
        if not sample.settled:
            self.notes.append(f"{trial.candidate} was still compiling when it was timed")
        trial.startup = max(0.0, clock() - begin - trained * sample.step_seconds)

    def _check_that_it_may_win(self, trial: Trial) -> None:
        if trial.rounds or trial.candidate.is_ours:  # ours compile first
            return
        own = self.trials[0]
        slower = trial.step_seconds / trial.batch_size / (own.step_seconds / own.batch_size)
        if slower > _HOPELESS:
            raise VariantFailed(f"not tried any further: its second step took {slower:.1f} times as long as yours")

    def sample_all(self, trials: Sequence[Trial]) -> None:
        """Do a round: each of these trains for a sample, one after the other."""
        self._round += 1
        for trial in in_turns(trials, self._round):
            if self.time_left() <= 0:
                return  # the others have not been asked: they go on where they are, if there is another round
            if trial.verdict == "failed":
                continue
            with self._noting(trial, late="no time left"):
                if trial.candidate not in self.running:  # not in a timed sample
                    self.warm_up(trial, self.time_left())
                self._tell(str(trial.candidate))
                steps = self._steps_of(trial)
                sample = self._sample(trial, steps, self.time_left())
                counted = sample.examples if self._facts.counts_examples else 0
                trial.count(self._round, sample, counted / steps or trial.batch_size)

    def train_on(self, trial: Trial, steps: int) -> None:
        """Have a candidate that is running do so many batches for their losses, if there is time."""
        needed = _SLOWER * (steps + trial.untimed) * trial.step_seconds
        if steps > 0 and trial.losses and trial.candidate in self.running and needed <= self.time_left():
            with self._noting(trial, late=""):
                self._sample(trial, steps, self.time_left())

    def _sample(self, trial: Trial, steps: int, timeout: float) -> Sample:
        if timeout <= 0:
            raise TimeIsUp("no time left")
        if trial.candidate not in self.running:  # it starts from the first step, if it has been stopped too
            trial.losses = []
            self.running.add(trial.candidate)
        sample = self._runner.sample(trial.candidate, steps, timeout)
        trial.note(sample)
        return sample

    def stop(self, candidate: Candidate) -> None:
        """End a candidate's training."""
        self.running.discard(candidate)
        self._runner.stop(candidate)

    def time_for_round(self, trials: Sequence[Trial]) -> bool:
        """Return whether a round of these trials ends in time."""
        starts = sum(
            self._expected_start(trial) + 3 * max(_WARM_UP, trial.accumulate) * trial.step_seconds
            for trial in trials
            if trial.candidate not in self.running and trial.verdict != "failed"
        )
        return self.time_left() > starts + _SLOWER * sum(map(self._sample_seconds, trials))

    def _expected_start(self, trial: Trial) -> float:
        ours = trial.candidate.is_ours
        alike = [one.startup for one in self.trials if one.candidate.is_ours is ours and one.startup is not None]
        return max(alike, default=self.trials[0].startup or 0.0)

    def _steps_of(self, trial: Trial) -> int:
        """Return the batches of a sample: two, if they take long."""
        each = trial.step_seconds or self.trials[0].step_seconds
        return trial.accumulate * math.ceil(max(2.0, self._unit / each) / trial.accumulate)

    def _sample_seconds(self, trial: Trial) -> float:
        each = trial.step_seconds or self.trials[0].step_seconds
        return each * (self._steps_of(trial) + trial.untimed)
