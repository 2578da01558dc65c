"""Steps are timed in each way, on the run's own batches, and go on with the fastest; what fails changes nothing."""

import functools
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from ort_settings import config_of
from small_modules import Small, loader

from lightning_ort import ORTStrategy
from lightning_ort.compiler import engines
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.executors.ort import kernels, session
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.strategies.race import duel, race

STEPS = 120  # more than two duels take
SLOW = 0.05  # seconds, many times what a step of the module takes


class Long(Small):
    def train_dataloader(self) -> Any:
        return loader(8 * STEPS)


def fit(make_trainer: Callable[..., Any], module: Any = None, strategy: Any = None, **config: Any) -> Any:
    """Return the module and the report of a fit."""
    module = module or Long()
    strategy = strategy or ORTStrategy(config=config_of(**{"start": "amortized", "audit": "off", **config}))
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
    monkeypatch.setattr(inductor, "cpp_compiler", lambda: "/usr/bin/g++")
    return graphs


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch, compiled: list[int]) -> list[int]:
    """It fails; the list has its calls."""
    calls: list[int] = []

    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    return calls


def kinds(report: Any) -> list[ReasonType]:
    return [note.reason.type for note in report.notes]


@pytest.mark.usefixtures("regions_win")
def test_a_slower_captured_step_is_left_as_it_is(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, losses: list[float]
) -> None:
    run = BoundSession.__call__

    def slowly(self: Any, *args: Any) -> Any:
        sessions.add(self)
        time.sleep(SLOW)
        return run(self, *args)

    sessions: weakref.WeakSet[BoundSession] = weakref.WeakSet()
    monkeypatch.setattr(BoundSession, "__call__", slowly)
    module, report = fit(make_trainer, start="now")
    assert report.ort_runs > 0
    (step,) = report.steps
    assert step.name == "training_step"
    assert step.ms["ort"] > 1000 * SLOW
    assert step.engine == "torch"
    (note,) = [note for note in report.notes if note.where == "training_step"]
    assert note.reason.type is ReasonType.SLOWER
    assert "stays uncompiled" in note.reason.text
    assert str(step) in report.to_text(width=200)
    assert report.to_dict()["steps"][0]["engine"] == "torch"
    assert max(region.runs for graph in report.graphs for region in graph.regions) < STEPS // 2  # none after the duel
    assert module.losses == pytest.approx(losses, rel=1e-4)
    gc.collect()
    assert not sessions  # nor does their memory stay


class SlowInPython(Long):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not torch.compiler.is_compiling():
            time.sleep(SLOW)
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("regions_win")
def test_a_faster_captured_step_stays(make_trainer: Callable[..., Any]) -> None:
    report = fit(make_trainer, SlowInPython(), start="now")[1]
    (step,) = report.steps
    assert step.engine == "ort"
    assert step.ms["torch"] > 1000 * SLOW
    assert {note.reason.type for note in report.notes} == {ReasonType.OPEN}  # it calls `time.sleep`
    # all but the steps that ran as they are, and the first, whose regions are timed
    (region,) = [region for graph in report.graphs for region in graph.regions if region.executor == "ort"]
    assert region.runs >= STEPS - 2 * duel.MOST


def test_a_captured_step_that_becomes_slower_is_taken_back(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Any, losses: list[float]
) -> None:
    monkeypatch.setattr(race, "RECHECK", 20)

    class Slows(Long):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 20:
                paces(torch=2.0, ort=3.0)

    paces(torch=2.0, ort=1.0)
    module, report = fit(make_trainer, Slows(), start="now")
    (step,) = report.steps  # the later times alone
    assert step.engine == "torch"
    assert step.ms == {"ort": 3000.0, "torch": 2000.0}
    (note,) = [note for note in report.notes if note.where == "training_step"]
    assert note.reason.type is ReasonType.SLOWER
    assert "timed again after 20 steps" in note.reason.text
    assert 15 < report.ort_runs < STEPS // 2
    assert report.run.saved_seconds == 0  # nobody knows since when
    assert module.losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(("config", "deterministic"), [({"placement": "always"}, False), ({"start": "now"}, True)])
def test_nothing_is_tried_where_timing_does_not_decide(
    config: Any, deterministic: bool, make_trainer: Callable[..., Any]
) -> None:
    strategy = ORTStrategy(config=config)
    make_trainer(strategy=strategy, deterministic=deterministic, max_epochs=1, limit_val_batches=0).fit(Small())
    assert strategy.report.ort_runs > 0
    assert strategy.report.steps == []


def test_inductor_is_tried_where_onnxruntime_has_lost(
    make_trainer: Callable[..., Any], paces: Any, losses: list[float], compiled: list[int]
) -> None:
    paces(torch=2.0, ort=3.0, inductor=1.0)
    module, report = fit(make_trainer)
    assert report.ort_runs > 0
    assert compiled
    (step,) = report.steps
    assert step.engine == "inductor"
    assert step.ms == {"ort": 3000.0, "torch": 2000.0, "inductor": 1000.0}
    assert [(note.reason.type, note.reason.text) for note in report.notes] == [
        (ReasonType.SLOWER, "3 s with ONNX Runtime, 2 s uncompiled; the step stays uncompiled"),
        (ReasonType.INDUCTOR_WON, "2 s uncompiled, 1 s with inductor"),
    ]
    assert report.run.saved_seconds > 0
    assert module.losses == pytest.approx(losses, rel=1e-4)


def test_no_onnxruntime_is_needed_for_inductor(
    make_trainer: Callable[..., Any],
    paces: Any,
    losses: list[float],
    compiled: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = Reason(ReasonType.RUNTIME_UNAVAILABLE, "onnxruntime is not installed")
    monkeypatch.setattr(kernels, "unavailable", lambda loads=True: reason)
    paces(torch=2.0, inductor=1.0)
    module, report = fit(make_trainer)
    assert compiled
    (step,) = report.steps
    assert step.ms == {"torch": 2000.0, "inductor": 1000.0}
    (fallback,) = report.fallbacks
    assert fallback.reason == reason
    assert report.graphs == []
    assert module.losses == pytest.approx(losses, rel=1e-4)


def test_what_takes_too_long_is_stopped_from_within(
    make_trainer: Callable[..., Any], paces: Any, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def may_compile(self: Any, seconds: float, expected: float = 0.0) -> bool:
        asked.append(len(asked) < 5)
        return asked[-1]

    monkeypatch.setattr(race.Race, "may_compile", may_compile)
    paces(torch=2.0, ort=1.0)
    module, report = fit(make_trainer, engine="ort", audit="off")
    assert asked == [True] * 5 + [False]  # nothing more is begun
    assert report.graphs == []
    assert not report.fallbacks
    assert report.ort_runs == 0
    assert module.losses == pytest.approx(losses, rel=1e-6)


def with_engines(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(engines, "ON_CPU", ("ort", *names))


def test_an_entry_of_the_table_is_all_that_an_engine_needs(
    make_trainer: Callable[..., Any], paces: Any, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def backend(masks: Any, *told: Any) -> Any:
        def compile(gm: Any, inputs: Any) -> Any:
            return lambda *args: (ran.append(masks), gm.forward(*args))[1]

        return inductor.GuardedBackend(compile, *told)

    new = engines.Engine(label="a new engine", backend=backend)
    monkeypatch.setitem(engines.ENGINES, "new", new)
    with_engines(monkeypatch, "new")
    paces(torch=2.0, ort=3.0, new=1.0)
    module, report = fit(make_trainer)
    assert report.ort_runs > 0
    assert len(ran) > STEPS // 2
    (step,) = report.steps
    assert (step.engine, step.ms["new"]) == ("new", 1000.0)
    assert engines.label_of(step.engine) == "a new engine"
    assert report.notes[-1].reason.text == "2 s uncompiled, 1 s with a new engine"
    assert module.losses == pytest.approx(losses, rel=1e-4)


def test_each_engine_says_whether_it_can_compile_here(
    make_trainer: Callable[..., Any], paces: Any, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(masks: Any, *told: Any) -> Any:
        return inductor.GuardedBackend(lambda gm, inputs: gm.forward, *told)

    monkeypatch.setitem(engines.ENGINES, "new", engines.Engine(label="a new engine", backend=backend))
    nowhere = lambda on_gpu: "no nvcc on the PATH"  # noqa: E731
    absent = engines.Engine(label="an absent one", backend=lambda *args: 1 / 0, obstacle=nowhere)
    monkeypatch.setitem(engines.ENGINES, "absent", absent)
    with_engines(monkeypatch, "new", "absent")
    paces(torch=2.0, ort=3.0, new=1.0, absent=0.5)
    module, report = fit(make_trainer)
    assert report.steps[0].engine == "new"
    assert report.notes[-1].reason == Reason(ReasonType.NOT_TRIED, "an absent one: no nvcc on the PATH")
    assert module.losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("capture", ["step", "modules"])
def test_an_engine_that_cannot_be_had_ends_no_fit(
    capture: str, make_trainer: Callable[..., Any], paces: Any, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(masks: Any, *told: Any) -> Any:
        raise ImportError("libnew.so.1: cannot open shared object file")

    monkeypatch.setitem(engines.ENGINES, "new", engines.Engine(label="a new engine", backend=backend))
    with_engines(monkeypatch, "new")
    paces(torch=2.0, ort=1.0, new=0.5)
    module, report = fit(make_trainer, start="now", engine="auto", capture=capture)
    assert report.steps[0].engine == "ort"
    assert report.ort_runs > STEPS // 2
    assert [note.reason.text for note in report.notes if note.reason.type is ReasonType.INDUCTOR_FAILED] == [
        "libnew.so.1: cannot open shared object file; a new engine is not tried"
    ]
    assert module.losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(("seconds", "winner", "ort_runs"), [(1.0, "inductor", 0), (3.0, "ort", STEPS // 3)])
def test_it_is_tried_against_onnxruntime_that_gained_little(
    seconds: float,
    winner: str,
    ort_runs: int,
    make_trainer: Callable[..., Any],
    paces: Any,
    losses: list[float],
    compiled: list[int],
) -> None:
    paces(torch=2.0, ort=1.95, inductor=seconds)
    module, report = fit(make_trainer)
    (step,) = report.steps
    assert step.ms.keys() == {"ort", "torch", "inductor"}
    assert step.engine == winner
    assert report.ort_runs > ort_runs
    assert len(compiled) == 1  # and not again when the other one is left
    assert module.losses == pytest.approx(losses, rel=1e-4)


def test_a_step_that_neither_makes_faster_is_left(
    make_trainer: Callable[..., Any], paces: Any, losses: list[float], compiled: list[int]
) -> None:
    paces(torch=1.0, ort=3.0, inductor=2.0)
    module, report = fit(make_trainer)
    assert [note.reason.text for note in report.notes] == [
        "3 s with ONNX Runtime, 1 s uncompiled; the step stays uncompiled",
        "2 s with inductor, 1 s uncompiled; the step stays uncompiled",
    ]
    assert compiled
    assert report.run.verdict.startswith("not worth it")
    assert module.losses == pytest.approx(losses, rel=1e-4)


def test_nothing_is_tried_that_cannot_gain_more(
    make_trainer: Callable[..., Any], paces: Any, compiled: list[int]
) -> None:
    paces(torch=2.0, ort=1.0)
    report = fit(make_trainer)[1]
    assert report.ort_runs > STEPS // 2
    assert compiled == []
    assert kinds(report) == [ReasonType.NOT_TRIED]


def test_later_runs_try_what_won_at_once(
    make_trainer: Callable[..., Any], paces: Any, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    paces(torch=2.0, ort=3.0, inductor=1.0, compiling=2.1)
    assert fit(make_trainer)[1].ort_runs > 0
    compiled.clear()
    monkeypatch.setattr(engines, "INDUCTOR_COST", 1e9)  # for a module that is not known
    report = fit(make_trainer)[1]
    assert report.graphs == []
    assert compiled
    assert [step.engine for step in report.steps] == ["inductor"]
    compiled.clear()
    assert fit(make_trainer, cache_dir=None)[1].ort_runs > 0
    assert compiled == []


@pytest.mark.parametrize("ort", [1.95, 3.0])
def test_an_inductor_that_fails_changes_nothing(
    ort: float, make_trainer: Callable[..., Any], paces: Any, losses: list[float], no_inductor: list[int]
) -> None:
    paces(torch=2.0, ort=ort, inductor=1.0)
    module, report = fit(make_trainer)
    (note,) = [note for note in report.notes if note.reason.type is ReasonType.INDUCTOR_FAILED]
    assert "no C++ compiler" in note.reason.text
    assert report.steps[-1].engine == ("ort" if ort < 2 else "torch")
    assert report.run.verdict.startswith("not worth it") == (ort > 2)
    assert report.ort_runs > 0
    assert not report.fallbacks
    assert module.losses == pytest.approx(losses, rel=1e-4)


def test_an_inductor_that_failed_is_no_cheap_start(
    make_trainer: Callable[..., Any], paces: Any, no_inductor: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    paces(torch=2.0, ort=3.0, inductor=1.0, compiling=2.1)
    report = fit(make_trainer)[1]
    assert no_inductor
    assert [step.ms.keys() for step in report.steps] == [{"ort", "torch"}]  # the duel that was
    no_inductor.clear()
    monkeypatch.setattr(engines, "INDUCTOR_COST", 1e9)
    assert fit(make_trainer)[1].graphs == []
    assert no_inductor == []


class Growing(Long):
    """Larger batches from time to time, which dynamo compiles again."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([part[: 2 + batch_idx // 25] for part in batch], batch_idx)


def test_recompiling_beyond_the_budget_drops_inductor_alone(
    make_trainer: Callable[..., Any], paces: Any, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dear(Growing):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if compiled:  # what inductor compiles takes more than is allowed
                paces(torch=2.0, ort=1.95, inductor=1.0, compiling=30.0)

    paces(torch=2.0, ort=1.95, inductor=1.0)
    stock = fit(make_trainer, Growing(), "auto")[0]
    module, report = fit(make_trainer, Dear())
    assert compiled
    assert report.ort_runs > 0
    assert report.steps
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


def test_other_sizes_run_as_they_are_once_inductor_has_won(
    make_trainer: Callable[..., Any], paces: Any, compiled: list[int]
) -> None:
    class LastBatches(Long):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx > STEPS - 10:
                batch = [part[: 1 + STEPS - batch_idx] for part in batch]
                assert not torch.compiler.is_compiling()
            return super().training_step(batch, batch_idx)

    paces(torch=2.0, ort=3.0, inductor=1.0)
    stock = fit(make_trainer, LastBatches(), "auto")[0]
    module, report = fit(make_trainer, LastBatches())
    assert report.steps[-1].engine == "inductor"
    assert len(compiled) == 1
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


@pytest.mark.parametrize(("steps", "waits"), [(2, True), (STEPS, False)])
def test_a_deterministic_run_compiles_nothing_more(
    steps: int,
    waits: bool,
    make_trainer: Callable[..., Any],
    paces: Any,
    compiled: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is tried, and after ONNX Runtime has lost, while inductor waits."""
    paces(torch=2.0, ort=3.0)
    monkeypatch.setattr(engines, "INDUCTOR_COST", 1e9)
    strategy, module = ORTStrategy(config={"start": "amortized"}), Long()
    settings = {"limit_val_batches": 0, "max_epochs": 1}
    make_trainer(strategy=strategy, limit_train_batches=steps, **settings).fit(module)
    assert bool(strategy.report.graphs) != waits
    before = strategy.report.ort_runs
    make_trainer(strategy=strategy, deterministic=True, limit_train_batches=8, **settings).fit(module)
    assert strategy.report.ort_runs == before
    assert compiled == []


class Sleeper(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SlowModule(Long):
    """The same with one more child."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(Sleeper())


@pytest.mark.parametrize(("capture", "masks"), [("step", "exact"), ("modules", "fast")])
def test_inductor_gets_what_was_configured(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Any, capture: str, masks: str
) -> None:
    calls = 0

    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        def forward(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return gm.forward(*args)

        assert kwargs["config_patches"]["fallback_random"] is (masks == "exact")
        return forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    paces(torch=2.0, ort=3.0, inductor=1.0)
    stock, module = SlowModule(), SlowModule()
    fit(make_trainer, stock, "auto")
    strategy = ORTStrategy(
        config={
            **{"engine": "auto", "dropout_masks": masks, "start": "now", "audit": "off"},
            "debug": {"capture": capture},
        }
    )
    report = fit(make_trainer, module, strategy)[1]
    (step,) = report.steps
    assert step.ms.keys() == {"ort", "torch", "inductor"}
    assert step.engine == "inductor"
    assert "continues with inductor" in report.to_text(width=200)
    assert report.ort_runs > 0
    assert calls > STEPS // 2
    assert kinds(report)[-1] is ReasonType.INDUCTOR_WON
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


def test_engine_auto_tries_nothing_in_deterministic_mode(make_trainer: Callable[..., Any]) -> None:
    strategy = ORTStrategy(config={"engine": "auto", "start": "now", "audit": "off"})
    make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0, deterministic=True).fit(Long())
    assert strategy.report.ort_runs > 0
    assert strategy.report.steps == []
    assert kinds(strategy.report) == [ReasonType.STATIC_RULE]


def test_engine_auto_needs_a_strategy_and_timing() -> None:
    with pytest.raises(ValueError, match="engine='auto' times whole training steps"):
        ORTBackend({"engine": "auto"})
    with pytest.raises(ValueError, match="engine='auto' needs placement='measured'"):
        ORTStrategy(config={"engine": "auto", "placement": "always"})


@pytest.mark.slow
def test_engine_auto_with_the_real_inductor(make_trainer: Callable[..., Any], losses: list[float]) -> None:
    module, report = fit(make_trainer, engine="auto", start="now")
    (step,) = report.steps
    assert step.ms.keys() == {"recorded", "ort", "torch", "inductor"}
    assert module.losses == pytest.approx(losses, rel=1e-4)


def test_the_compiler_is_the_one_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"my-g++": "/opt/my-g++", "g++": "/usr/bin/g++", "clang++": "/usr/bin/clang++"}
    monkeypatch.setattr(inductor, "_which", lambda name, path: found.get(name))
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


@pytest.mark.parametrize(
    ("engine", "seconds"), [("ort", {"torch": 1.0, "ort": 2.0}), ("auto", {"torch": 2.0, "ort": 1.0, "inductor": 1.5})]
)
def test_sessions_of_what_lost_are_gone(
    engine: str,
    seconds: dict[str, float],
    make_trainer: Callable[..., Any],
    paces: Callable[..., None],
    compiled: list[int],
    losses: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU each has memory of its own, and a process may collect its garbage rarely."""
    built: list[weakref.ref[Any]] = []
    build = session.build

    def noting(*args: Any) -> Any:
        built.append(weakref.ref(made := build(*args)))
        return made

    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        made = functools.partial(gm.forward)
        if engine == "auto":
            built.append(weakref.ref(made))
        compiled.append(1)
        return made

    if engine == "ort":
        monkeypatch.setattr(session, "build", noting)
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    paces(**seconds)
    gc.disable()
    try:
        module, report = fit(make_trainer, engine=engine, start="now")
        assert [made() for made in built if made() is not None] == []
    finally:
        gc.enable()
    assert report.ort_runs > 0
    assert built
    assert report.steps[0].engine == min(seconds, key=seconds.__getitem__)
    assert bool(compiled) == (engine == "auto")
    assert module.losses == pytest.approx(losses, rel=1e-4)
