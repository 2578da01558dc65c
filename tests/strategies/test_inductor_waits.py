"""On a CPU inductor waits longer than ONNX Runtime, and is tried against what has won by then."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from small_modules import Small, loader

from lightning_ort import ORTConfig, ORTStrategy
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.report import ReasonType
from lightning_ort.strategies.capture import budget, engines, gate
from lightning_ort.strategies.capture.autotuner import StepAutotuner
from lightning_ort.strategies.capture.budget import CompileBudget, Outlook, inductor_cost
from lightning_ort.strategies.capture.gate import StartGate

STEPS = 120  # more than two trials take


class Long(Small):
    def train_dataloader(self) -> Any:
        return loader(8 * STEPS)


def fit(make_trainer: Callable[..., Any], module: Any = None, strategy: Any = None, **config: Any) -> Any:
    """Return the module and the report of a fit."""
    module = module or Long()
    strategy = strategy or ORTStrategy(config={"start": "amortized", **config})
    make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0).fit(module)
    return module, getattr(strategy, "report", None)


@pytest.fixture
def losses(make_trainer: Callable[..., Any]) -> list[float]:
    """Of stock Lightning."""
    return fit(make_trainer, strategy="auto")[0].losses  # type: ignore[no-any-return]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What stands for inductor compiles nothing; the list has the graphs that it was given."""
    graphs: list[int] = []

    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        graphs.append(len(graphs))
        return gm.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    monkeypatch.setattr(engines, "cpp_compiler", lambda: "/usr/bin/g++")
    return graphs


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, compiled: list[int], regions_win: None) -> Callable[..., None]:
    """Compiling is free, and each engine takes as many ms as the script says."""
    for name in (
        "_COST",
        "_COST_PER_OPERATION",
        "_FIRST_COMPILATION",
        "_INDUCTOR_COST",
        "_INDUCTOR_COST_PER_OPERATION",
    ):
        monkeypatch.setattr(budget, name, 0.0)
    monkeypatch.setattr(budget, "_INDUCTOR_TO_ORT", 0.0)
    monkeypatch.setattr(CompileBudget, "allowed", lambda self, outlook: 1e9)

    def set_times(**ms: float) -> None:
        times = property(lambda self: {engine: ms[engine] for engine in self._samples})
        monkeypatch.setattr(StepAutotuner, "milliseconds", times)
        monkeypatch.setattr(StepAutotuner, "saved_by", lambda self, engine: (ms["torch"] - ms[engine]) / SECOND)

    return set_times


SECOND = 1e3  # ms


def test_inductor_is_tried_where_onnxruntime_has_lost(
    make_trainer: Callable[..., Any], script: Any, losses: list[float], compiled: list[int]
) -> None:
    script(torch=2 * SECOND, ort=3 * SECOND, inductor=1 * SECOND)
    module, report = fit(make_trainer)
    assert report.ort_runs > 0
    assert compiled
    (step,) = report.steps
    assert step.ms.keys() == {"torch", "inductor"}  # what has lost is not tried again
    assert step.engine == "inductor"
    assert [(note.reason.type, note.reason.text) for note in report.notes] == [
        (ReasonType.SLOWER, "3 s captured, 2 s unchanged; the step stays in PyTorch"),
        (ReasonType.INDUCTOR_WON, "2 s unchanged, 1 s compiled by inductor"),
    ]
    assert report.run.saved_seconds > 0
    assert module.losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(("inductor_seconds", "winner", "ort_runs"), [(1, "inductor", 0), (3, "ort", STEPS // 3)])
def test_it_is_tried_against_onnxruntime_that_gained_little(
    inductor_seconds: int,
    winner: str,
    ort_runs: int,
    make_trainer: Callable[..., Any],
    script: Any,
    losses: list[float],
    compiled: list[int],
) -> None:
    script(torch=2 * SECOND, ort=1.95 * SECOND, inductor=inductor_seconds * SECOND)
    module, report = fit(make_trainer)
    (step,) = report.steps
    assert step.ms.keys() == {"ort", "torch", "inductor"}
    assert step.engine == winner
    assert report.ort_runs > ort_runs
    assert compiled
    assert module.losses == pytest.approx(losses, rel=1e-4)


def test_a_step_that_neither_makes_faster_is_left(
    make_trainer: Callable[..., Any], script: Any, losses: list[float], compiled: list[int]
) -> None:
    script(torch=1 * SECOND, ort=3 * SECOND, inductor=2 * SECOND)
    module, report = fit(make_trainer)
    texts = [note.reason.text for note in report.notes]
    assert texts == [
        "3 s captured, 1 s unchanged; the step stays in PyTorch",
        "2 s compiled by inductor, 1 s unchanged; the step stays in PyTorch",
    ]
    assert compiled
    assert report.run.verdict.startswith("not worth it")
    assert module.losses == pytest.approx(losses, rel=1e-4)


def test_nothing_is_tried_that_cannot_gain_more(
    make_trainer: Callable[..., Any], script: Any, compiled: list[int]
) -> None:
    script(torch=2 * SECOND, ort=1 * SECOND)
    report = fit(make_trainer)[1]
    assert report.ort_runs > STEPS // 2
    assert compiled == []
    (note,) = report.notes
    assert note.reason.type is ReasonType.NOT_TRIED
    assert note.reason.text == "inductor: 0 s expected to be saved, about 0 s to compile"


def test_later_runs_try_what_won_at_once(
    make_trainer: Callable[..., Any], script: Any, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(torch=2 * SECOND, ort=3 * SECOND, inductor=1 * SECOND)
    assert fit(make_trainer)[1].ort_runs > 0
    compiled.clear()
    monkeypatch.setattr(budget, "_INDUCTOR_COST", 1e9)  # for a module that is not known
    report = fit(make_trainer)[1]
    assert report.graphs == []
    assert compiled
    assert [step.engine for step in report.steps] == ["inductor"]
    (note,) = [note for note in report.notes if note.reason.type is ReasonType.NOT_TRIED]
    assert note.reason.text == "ONNX Runtime: in an earlier run the unchanged step was the fastest (3 s ort, 2 s torch)"
    compiled.clear()
    assert fit(make_trainer, cache_dir=None)[1].ort_runs > 0
    assert compiled == []


@pytest.mark.parametrize("ort", [1.95, 3.0])
def test_an_inductor_that_fails_changes_nothing(
    ort: float, make_trainer: Callable[..., Any], script: Any, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    script(torch=2 * SECOND, ort=ort * SECOND)
    module, report = fit(make_trainer)
    (note,) = [note for note in report.notes if note.reason.type is ReasonType.INDUCTOR_FAILED]
    assert "no C++ compiler" in note.reason.text
    assert report.steps[-1].engine == ("ort" if ort < 2 else "torch")
    assert report.run.verdict.startswith("not worth it") == (ort > 2)
    assert report.ort_runs > 0
    assert module.losses == pytest.approx(losses, rel=1e-4)


class Growing(Long):
    """Larger batches from time to time, which dynamo compiles again."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([part[: 2 + batch_idx // self.every] for part in batch], batch_idx)


@pytest.mark.parametrize("every", [20, 25, 30])
def test_recompiling_beyond_the_budget_drops_inductor_alone(
    every: int, make_trainer: Callable[..., Any], script: Any, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(torch=2 * SECOND, ort=1.95 * SECOND, inductor=1 * SECOND)
    stock = fit(make_trainer, Growing(every), "auto")[0]
    spend = CompileBudget.spend
    monkeypatch.setattr(CompileBudget, "allowed", lambda self, outlook: 10.0)
    # what inductor compiles counts as more than is allowed
    monkeypatch.setattr(CompileBudget, "spend", lambda self, seconds: spend(self, 20.0 if compiled else 0.0))
    module, report = fit(make_trainer, Growing(every))
    assert compiled
    assert report.ort_runs > 0
    assert report.steps
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


def test_other_sizes_run_as_they_are_once_inductor_has_won(
    make_trainer: Callable[..., Any], script: Any, compiled: list[int]
) -> None:
    class LastBatches(Long):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx > STEPS - 10:
                batch = [part[: 1 + STEPS - batch_idx] for part in batch]
                assert not torch.compiler.is_compiling()
            return super().training_step(batch, batch_idx)

    script(torch=2 * SECOND, ort=3 * SECOND, inductor=1 * SECOND)
    stock = fit(make_trainer, LastBatches(), "auto")[0]
    module, report = fit(make_trainer, LastBatches())
    assert report.steps[-1].engine == "inductor"
    assert len(compiled) == 1
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


@pytest.mark.parametrize(("steps", "captured"), [(2, True), (STEPS, False)])
def test_a_deterministic_run_ends_the_waiting(
    steps: int, captured: bool, make_trainer: Callable[..., Any], script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is tried, and after ONNX Runtime has lost, while inductor waits."""
    script(torch=2 * SECOND, ort=3 * SECOND)
    monkeypatch.setattr(budget, "_INDUCTOR_COST", 1e9)
    strategy, module = ORTStrategy(config={"start": "amortized"}), Long()
    settings = {"limit_val_batches": 0, "max_epochs": 1}
    make_trainer(strategy=strategy, limit_train_batches=steps, **settings).fit(module)
    assert bool(strategy.report.graphs) != captured
    before = strategy.report.ort_runs
    monkeypatch.setattr(budget, "_INDUCTOR_COST", 0.0)  # it would pay now
    make_trainer(strategy=strategy, deterministic=True, limit_train_batches=8, **settings).fit(module)
    assert (strategy.report.ort_runs > before) == captured


def test_an_inductor_that_failed_is_no_cheap_start(
    make_trainer: Callable[..., Any], script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        tried.append(1)
        raise RuntimeError("no C++ compiler")

    tried: list[int] = []
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    script(torch=2 * SECOND, ort=3 * SECOND)
    report = fit(make_trainer)[1]
    assert tried
    assert [step.ms.keys() for step in report.steps] == [{"ort", "torch"}]  # the trial that was
    tried.clear()
    monkeypatch.setattr(budget, "_INDUCTOR_COST", 1e9)
    assert fit(make_trainer)[1].graphs == []
    assert tried == []


def test_which_runs_have_the_second_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(gate, "DEFAULT_START", "amortized")
    monkeypatch.setattr(engines, "cpp_compiler", lambda: "/usr/bin/g++")
    assert engines.stages_for(ORTConfig(), cpu) == ("ort", "inductor")
    assert engines.stages_for(ORTConfig(engine="ort"), cpu) == ("ort",)
    assert engines.stages_for(ORTConfig(), cuda) == ("all",)
    assert engines.setting_for(ORTConfig(start="now"), cpu) == "ort"
    assert engines.setting_for(ORTConfig(placement="always"), cpu) == "ort"
    monkeypatch.setattr(engines, "cpp_compiler", lambda: None)
    assert engines.stages_for(ORTConfig(), cpu) == ("ort",)
    # who asks for it is told why it fails
    assert engines.stages_for(ORTConfig(engine="auto"), cpu) == ("ort", "inductor")


def test_the_compiler_is_the_one_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"my-g++": "/opt/my-g++", "g++": "/usr/bin/g++", "clang++": "/usr/bin/clang++"}
    monkeypatch.setattr(inductor.shutil, "which", found.get)
    monkeypatch.setenv("CXX", "my-g++")
    assert inductor.cpp_compiler() == "/opt/my-g++"
    monkeypatch.setenv("CXX", "absent")  # torch looks for no other
    assert inductor.cpp_compiler() is None
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(inductor.sys, "platform", "linux")
    assert inductor.cpp_compiler() == "/usr/bin/g++"
    monkeypatch.setattr(inductor.sys, "platform", "darwin")
    assert inductor.cpp_compiler() == "/usr/bin/clang++"
    found.clear()
    assert inductor.cpp_compiler() is None


def test_what_inductor_is_expected_to_cost() -> None:
    assert inductor_cost(500, 3.0) == pytest.approx(20.0)
    assert inductor_cost(500, 30.0) == pytest.approx(60.0)  # a hundred graphs
    assert inductor_cost(500, 30.0, cold=20.0) == pytest.approx(4.0)
    assert inductor_cost(500, 30.0, cold=20.0, warm=2.5) == 2.5


class Rank:
    """A process of a run, with a clock of its own."""

    def __init__(self, seconds: float, store: dict[str, Any]) -> None:
        self.now, self.seconds = 0.0, seconds
        self.budget = CompileBudget(0.05, lambda: self.now)
        self.startup_seconds: dict[Any, float] = {}
        self.operations_of = lambda name: 100.0
        run = SimpleNamespace(startup_seconds=0.0, waiting="")
        agree = lambda key, found: store.setdefault(key, found)  # noqa: E731
        cache = SimpleNamespace(name=lambda *parts: "start", load_startup=lambda name: None)
        report = SimpleNamespace(run=run)
        self.backend = SimpleNamespace(agree=agree, cache=cache, report=report, compiled_in_process=lambda: True)
        self.settings: tuple[str, ...] = ()
        trainer = SimpleNamespace(sanity_checking=False, training=True, accumulate_grad_batches=2)
        trainer.fit_loop = SimpleNamespace(batch_idx=0)
        self.module = torch.nn.Linear(2, 2)
        self.module.trainer = trainer  # type: ignore[assignment]
        self.gate = StartGate(self, "training_step", ("ort", "inductor"), lambda: None)  # type: ignore[arg-type]

    def begin_run(self) -> None:
        self.budget.begin()

    def outlook(self, name: str, done: int) -> Outlook:
        return Outlook(10_000 - done, done, 10_000 - done)

    def step(self, busy: bool = False) -> str | None:
        self.now += self.seconds
        ms = {"torch": 1000 * self.seconds, "ort": 1100 * self.seconds}
        opened = self.gate.opens(None, ms, busy)
        self.module.trainer.fit_loop.batch_idx += 1  # type: ignore[union-attr]
        return opened


def test_ranks_open_alike_and_between_windows() -> None:
    store: dict[str, Any] = {}
    ranks = [Rank(0.1, store), Rank(0.001, store)]  # alone, the second would try nothing yet
    opened = [[rank.step() for rank in ranks] for _ in range(12)]
    assert all(first == second for first, second in opened)
    at = {first: index for index, (first, _) in enumerate(opened) if first}
    assert list(at) == ["ort", "inductor"]
    assert all(index % 2 == 0 for index in at.values())
    alone = Rank(0.001, {})
    assert not any(alone.step() for _ in range(12))


def test_ranks_decide_alike_though_their_trials_take_longer() -> None:
    store: dict[str, Any] = {}
    ranks = [Rank(0.1, store), Rank(0.001, store)]
    for rank, trial in zip(ranks, (2, 20), strict=True):
        while rank.step() != "ort":
            pass
        for _ in range(trial):
            assert rank.step(busy=True) is None
        assert "inductor" in [rank.step() for _ in range(2)]
