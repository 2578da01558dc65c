"""The search, on a machine whose times are written down."""

import dataclasses

import pytest
from scripted import Machine, facts

from lightning_ort.compiler import engines
from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.measuring import Measurer
from lightning_ort.tuning.search import Search
from lightning_ort.tuning.space import Limits, dimensions
from lightning_ort.tuning.trainer_process import Sample, TimeIsUp, VariantFailed
from lightning_ort.tuning.trials import Outcome, Trial, speed


def search(machine: Machine, plain: bool = True, found: dict | None = None, **limits: object) -> Outcome:
    given = Limits(**{"seconds": 300.0, **limits})
    return Search(facts(**found or {}), given, plain, machine, machine.now + given.seconds).run()


def tried(outcome: Outcome, **settings: object) -> Trial:
    (trial,) = (one for one in outcome.trials if one.candidate == Candidate(**settings))
    return trial


def test_the_fastest_of_each_stage_goes_on() -> None:
    gains = {
        ("engine", "ort"): 1.5,
        ("channels_last", True): 1.3,
        ("threads", 1): 0.8,
        ("precision", "bf16-mixed"): 0.5,
    }
    machine = Machine(gains)
    outcome = search(machine)
    assert outcome.best.candidate == Candidate(engine="ort", channels_last=True)
    found = speed(outcome.best, outcome.own)
    assert found is not None
    assert found.median == pytest.approx(1.95, rel=0.05)
    assert found.low > 1
    assert [one.candidate for one in outcome.trials if one.verdict == "won"] == [
        Candidate(engine="ort"),
        Candidate(engine="ort", channels_last=True),
    ]
    assert machine.running == {}
    assert machine.now < 300


def test_what_is_slower_changes_nothing() -> None:
    gains = {("engine", "ort"): 0.9, ("engine", "stock"): 0.8, ("engine", "auto"): 0.7}
    gains |= {("channels_last", True): 0.9, ("threads", 1): 0.9, ("num_workers", 1): 0.9, ("batch_size", 16): 0.9}
    gains |= {("precision", "medium"): 0.9}
    outcome = search(Machine(gains))
    assert outcome.best is outcome.own
    assert {one.verdict for one in outcome.trials} == {"measured"}


@pytest.mark.parametrize("seconds", [20.0, 40.0, 60.0, 100.0])
def test_never_longer_than_the_time(seconds: float) -> None:
    machine = Machine({("engine", "ort"): 1.5}, startup=2.0)
    outcome = search(machine, seconds=seconds)
    assert machine.now <= seconds
    assert any(one.why == "no time left" for one in outcome.trials)


def test_a_candidate_that_never_starts_is_a_row() -> None:
    class Slow(Machine):
        def sample(self, candidate: Candidate, steps: int, timeout: float) -> object:
            if candidate.engine == "auto":
                self.now += timeout
                raise TimeIsUp("compiles and compiles")
            return super().sample(candidate, steps, timeout)

    machine = Slow({("engine", "ort"): 1.5})
    outcome = search(machine)
    assert outcome.best.candidate.engine == "ort"
    trial = next(one for one in outcome.trials if one.candidate.engine == "auto")
    assert (trial.verdict, trial.why) == ("failed", "did not start in the time that a candidate may take")
    assert machine.now <= 300


def test_failures_are_rows() -> None:
    fails = {("engine", "ort"): "ValueError: no"}
    outcome = search(Machine({("engine", "stock"): 1.2}, fails))
    assert outcome.best.candidate.engine == "stock"
    assert tried(outcome, engine="ort").why == "ValueError: no"


def test_what_is_many_times_as_slow_is_given_up_at_once() -> None:
    machine = Machine({("precision", "bf16-mixed"): 0.1, ("engine", "ort"): 1.5})
    outcome = search(machine)
    slow = tried(outcome, engine="stock", precision="bf16-mixed", optim="auto")
    assert slow.verdict == "failed"
    assert "its second step took" in slow.why
    assert len(slow.losses) == 2
    assert outcome.best.candidate.engine == "ort"


def test_bfloat16_is_not_tried_where_it_is_emulated() -> None:
    outcome = search(Machine(), found={"bfloat16": 0.2})
    assert {one.candidate.precision for one in outcome.trials} == {None}


def test_interrupted_search_keeps_the_best_so_far() -> None:
    class Interrupted(Machine):
        def sample(self, candidate: Candidate, steps: int, timeout: float) -> object:
            if candidate.channels_last:
                raise KeyboardInterrupt
            return super().sample(candidate, steps, timeout)

    machine = Interrupted({("engine", "ort"): 1.5, ("channels_last", True): 2.0})
    outcome = search(machine)
    assert outcome.best.candidate == Candidate(engine="ort")
    assert any("interrupted" in note for note in outcome.notes)
    assert machine.running == {}


def test_interrupted_before_anything_is_measured() -> None:
    class Interrupted(Machine):
        def sample(self, candidate: Candidate, steps: int, timeout: float) -> object:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(Interrupted())


@pytest.mark.parametrize("factor", [1.2, float("nan")])
def test_a_loss_that_departs_is_refused(factor: float) -> None:
    machine = Machine(
        {("precision", "bf16-mixed"): 3.0, ("engine", "ort"): 1.5},
        loss=lambda candidate: factor if candidate.precision == "bf16-mixed" else 1.001,
    )
    outcome = search(machine)
    assert outcome.best.candidate == Candidate(engine="ort")
    refused = [one for one in outcome.trials if one.verdict == "refused"]
    assert {one.candidate.precision for one in refused} == {"bf16-mixed"}
    assert "departs from float32's" in refused[0].why
    assert outcome.best.loss_difference is not None
    assert outcome.best.loss_difference < 0.01


def test_losses_are_compared_with_float32_where_the_user_has_another_precision() -> None:
    machine = Machine({("engine", "ort"): 1.5}, loss=lambda candidate: 1.0 if candidate.precision == "32-true" else 1.5)
    outcome = search(machine, plain=False, found={"precision": "bf16-mixed"})
    assert Candidate(engine="stock", precision="32-true") in [one.candidate for one in outcome.trials]
    assert tried(outcome, engine="ort").verdict == "refused"


def test_a_batch_whose_first_dimension_is_another_is_not_counted() -> None:
    # sequences of 50 before the examples: half a batch takes half the time, and is no faster
    machine = Machine({("batch_size", 16): 0.9}, examples=lambda size: 50)
    outcome = search(machine, found={"counts_examples": False})
    found = speed(tried(outcome, batch_size=16, accumulate=2), outcome.own)
    assert found is not None
    assert found.median == pytest.approx(0.9, rel=0.1)
    assert outcome.best is outcome.own


@pytest.mark.parametrize(("workers", "expected"), [(0, {None, 1}), (2, {None, 4})])
def test_a_stream_is_not_seen_several_times(workers: int, expected: set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    stream = {"stream": True, "num_workers": workers, "made_of_tensors": False}
    outcome = search(Machine(), found=stream)
    assert {one.candidate.num_workers for one in outcome.trials} == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_loaded_ahead_where_processes_load(workers: int) -> None:
    machine = Machine({("prefetch_factor", 8): 1.5})
    outcome = search(machine, found={"num_workers": workers})
    assert (outcome.best.candidate.prefetch_factor == 8) is (workers > 0)


@pytest.mark.parametrize("obstacle", ["", "no nvcc on the PATH"])
def test_other_compilers_are_tried_where_one_can_compile(obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new = engines.Engine(label="a new engine", obstacle=lambda on_gpu: obstacle)
    monkeypatch.setitem(engines.ENGINES, "new", new)
    monkeypatch.setattr(engines, "ON_CPU", (engines.ORT, "new"))
    engine = dimensions(facts(), Limits(), True)["engine and precision"]
    found = [reason for changes, reason in engine if changes["engine"] == "auto"]
    assert found == ([] if obstacle else ["a new engine beside ONNX Runtime"])


def test_numerics_are_kept() -> None:
    machine = Machine({("precision", "bf16-mixed"): 3.0, ("precision", "medium"): 3.0, ("engine", "ort"): 1.5})
    outcome = search(machine, keep_numerics=True)
    assert outcome.best.candidate.engine == "ort"
    assert {one.candidate.precision for one in outcome.trials} == {None}
    assert {one.candidate.optim for one in outcome.trials} <= {None, "auto"}


def test_a_module_that_cannot_train() -> None:
    class Broken(Machine):
        def sample(self, candidate: Candidate, steps: int, timeout: float) -> object:
            raise VariantFailed("RuntimeError: shapes")

    with pytest.raises(VariantFailed, match="RuntimeError: shapes"):
        search(Broken())


@pytest.mark.parametrize("startup", [8.0, 100.0])
def test_time_that_is_too_short(startup: float) -> None:
    with pytest.raises(TimeIsUp):
        search(Machine(startup=startup), seconds=10.0)


def test_losses_are_compared_after_the_batches_have_changed() -> None:
    machine = Machine(
        {("batch_size", 16): 1.5, ("channels_last", True): 2.0},
        loss=lambda candidate: 1.5 if candidate.channels_last else 1.0,
    )
    outcome = search(machine, plain=False)
    refused = next(one for one in outcome.trials if one.verdict == "refused")
    assert refused.candidate == Candidate(batch_size=16, accumulate=2, channels_last=True)
    assert outcome.best.loss_difference == pytest.approx(0, abs=0.01)


def test_a_loss_that_could_not_be_compared_is_noted() -> None:
    machine = Machine({("engine", "ort"): 1.5}, {("precision", "32-true"): "no float32"})
    outcome = search(machine, plain=False)
    assert outcome.best.candidate.engine == "ort"
    assert any("was not compared with float32's: nothing was trained in float32" in one for one in outcome.notes)


def test_what_does_not_win_is_not_trained_on_for_its_losses() -> None:
    machine = Machine({("engine", "ort"): 0.5, ("engine", "stock"): 0.5, ("engine", "auto"): 0.5}, step=1.0)
    outcome = search(machine, found={"accumulate": 4}, seconds=600.0)
    slow = tried(outcome, engine="ort")
    assert slow.verdict == "measured"
    assert len(slow.losses) == 8 + 3 * 4  # two warm-ups and three rounds


@pytest.mark.parametrize("seconds", [350.0, 500.0])
def test_slow_steps_do_not_run_out_of_time_in_a_round(seconds: float) -> None:
    class Asked(Machine):
        late = 0

        def sample(self, candidate: Candidate, steps: int, timeout: float) -> Sample:
            try:
                return super().sample(candidate, steps, timeout)
            except TimeIsUp:
                self.late += self.running.get(candidate, 0) >= 10  # warmed up
                raise

    machine = Asked({("engine", "ort"): 1.5, ("channels_last", True): 1.2}, step=4.0, startup=5.0)
    outcome = search(machine, seconds=seconds)
    assert machine.late == 0
    assert outcome.best.candidate.engine == "ort"


def test_a_candidate_that_was_stopped_warms_up_before_it_is_timed() -> None:
    class Cold(Machine):
        """The first batches take a second each."""

        def sample(self, candidate: Candidate, steps: int, timeout: float) -> Sample:
            cold = max(0, 4 - self.running.get(candidate, 0))
            found = super().sample(candidate, steps, timeout)
            self.now += cold
            return dataclasses.replace(found, step_seconds=found.step_seconds + cold / steps)

    machine = Cold()
    measurer = Measurer(facts(), machine, 300.0, lambda doing: None)
    trial = measurer.trial(Candidate(), "")
    measurer.warm_up(trial, 300.0)
    measurer.sample_all([trial])
    measurer.stop(trial.candidate)
    measurer.sample_all([trial])
    assert trial.rounds[2] == pytest.approx(trial.rounds[1], rel=0.1)


def test_who_has_not_been_asked_is_not_stopped() -> None:
    class Hangs(Machine):
        def sample(self, candidate: Candidate, steps: int, timeout: float) -> Sample:
            if candidate.engine == "ort" and self.running.get(candidate, 0) >= 10:
                self.now += timeout
                raise TimeIsUp("hangs")
            return super().sample(candidate, steps, timeout)

    machine = Hangs()
    measurer = Measurer(facts(), machine, 300.0, lambda doing: None)
    trials = [measurer.trial(Candidate(engine=engine), "") for engine in (None, "ort", "auto")]
    for trial in trials:
        measurer.warm_up(trial, 300.0)
    measurer.keep_for_the_end()
    measurer.sample_all(trials)
    assert machine.now == 300 - 0.12 * 300
    assert set(machine.running) == {Candidate(), Candidate(engine="auto")}


def fail_in_the_end(machine: Machine, monkeypatch: pytest.MonkeyPatch, *settings: tuple[str, object]) -> None:
    confirm = Search._confirm

    def failing(self: Search) -> None:
        machine.fails = dict.fromkeys(settings, "RuntimeError: late")
        confirm(self)

    monkeypatch.setattr(Search, "_confirm", failing)


def test_the_winner_before_is_what_is_left_if_the_last_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({("engine", "ort"): 1.5, ("engine", "auto"): 2.0})
    fail_in_the_end(machine, monkeypatch, ("engine", "auto"))
    outcome = search(machine, seconds=600.0)
    assert outcome.best.candidate == Candidate(engine="ort")
    assert max(outcome.best.rounds) > max(tried(outcome, engine="auto").rounds)
    assert any("auto won, but not in the last rounds: RuntimeError: late" in one for one in outcome.notes)


def test_who_lost_against_a_refused_winner_is_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner's loss departs late; the other one was slower, and much faster than the user's settings."""
    gains = {("engine", "stock"): 2.0, ("engine", "ort"): 1.5, ("precision", "bf16-mixed"): 0.5}
    machine = Machine(gains)
    refuse = Search._learns

    def late(self: Search, trial: Trial) -> bool:
        if trial.verdict == "won" and trial.candidate.engine == "stock":
            trial.verdict, trial.why = "refused", "its loss departs late"
            return False
        return refuse(self, trial)

    monkeypatch.setattr(Search, "_learns", late)
    outcome = search(machine)
    assert outcome.best.candidate.engine == "ort"
    assert outcome.best.verdict == "won"
    assert outcome.best.loss_difference == 0
    assert any("its loss departs late" in note for note in outcome.notes)


def test_each_candidate_runs_once() -> None:
    machine = Machine({("engine", "ort"): 1.5, ("channels_last", True): 1.3})
    search(machine)
    assert len(machine.started) == len(set(machine.started))


@pytest.mark.parametrize("fixed", [{"batches_change": False}, {"batches_change": False, "loader_changes": False}])
def test_what_cannot_be_changed_is_not_tried(fixed: dict[str, bool]) -> None:
    outcome = search(Machine({("engine", "ort"): 1.5}), found=fixed)
    assert outcome.best.candidate == Candidate(engine="ort")
    assert {one.candidate.batch_size for one in outcome.trials} == {None}
    assert ({one.candidate.num_workers for one in outcome.trials} == {None}) == ("loader_changes" in fixed)
