"""A recorded step on another engine: ONNX Runtime and inductor get a graph of what was recorded."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy
from lightning_ort.compiler import engines
from lightning_ort.strategies.race.turn import Turn

STEPS = 300


class Module(pl.LightningModule):
    """Dropout, buffers that a batch norm writes, an embedding of its own loss, several logged values."""

    def __init__(self, reads: bool = False, width: int = 16) -> None:
        super().__init__()
        self.reads = reads
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2))
        self.head = nn.Linear(width, 3)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        found = self.head(self.net(x))
        loss = nn.functional.cross_entropy(found, y)
        self.log("accuracy", (found.argmax(1) == y).float().mean())
        self.log("loss", loss)
        if self.reads and loss > 1e9:
            self.log("never", 1.0)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Open(Module):
    """Reads the environment."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * float(os.getenv("FACTOR_OF_LOSS", "1"))


class Losses(pl.Callback):
    """Keeps the losses of the first steps."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]))


@pytest.fixture
def engine_wins(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """No clock decides: one engine is the fastest, and nothing costs anything."""
    tell = Turn.tell

    def prefer(name: str) -> None:
        def scripted(self: Turn, *args: Any) -> None:
            order = {name: 0.1, "recorded": 0.2}
            self.seconds, self.waited = 0.0 if self.compiled else order.get(self.way.engine, 0.4), 0.0
            tell(self, *args)

        monkeypatch.setattr(Turn, "tell", scripted)
        monkeypatch.setattr(engines, "ON_CPU", ["recorded", name])
        for one in ("recorded", name):
            free = dataclasses.replace(engines.ENGINES[one], cost=lambda facts: 0.0, saves=lambda facts: 1.0)
            monkeypatch.setitem(engines.ENGINES, one, free)

    return prefer


def fit(make_trainer: Any, strategy: Any, module: pl.LightningModule, steps: int = STEPS, **kwargs: Any) -> Any:
    """Fit; return the Trainer, the losses and where the generator is."""
    pl.seed_everything(0, verbose=False)
    x = torch.randn(640, 8)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=32)
    seen = Losses()
    trainer = make_trainer(strategy=strategy, max_steps=steps, max_epochs=-1, callbacks=[seen], **kwargs)
    trainer.fit(module, loader)
    return trainer, seen.found, torch.random.get_rng_state()


def both(make_trainer: Any, kind: Callable[[], pl.LightningModule], steps: int = STEPS, **kwargs: Any) -> Any:
    """Fit a module under stock Lightning and ours from the same weights; return both, and the strategy."""
    pl.seed_everything(1, verbose=False)
    stock, ours, strategy = kind(), kind(), ORTStrategy()
    ours.load_state_dict(stock.state_dict())
    results = fit(make_trainer, "auto", stock, steps, **kwargs), fit(make_trainer, strategy, ours, steps, **kwargs)
    return *results, strategy


def close(ours: Any, stock: Any) -> None:
    """Losses, metrics, weights, buffers and random states are those of stock Lightning."""
    assert ours[1] == pytest.approx(stock[1], rel=1e-3, abs=1e-4)
    assert torch.equal(ours[2], stock[2])
    modules = ours[0].lightning_module.state_dict(), stock[0].lightning_module.state_dict()
    for name, value in modules[1].items():
        torch.testing.assert_close(modules[0][name], value, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_onnx_runtime(make_trainer: Any, engine_wins: Any, regions_win: None, precision: Any) -> None:
    engine_wins("ort")
    stock, ours, strategy = both(make_trainer, Module, precision=precision)
    step = next(one for one in strategy.report.steps if one.name == "training_step")
    assert step.engine == "ort"
    graphs = [graph for graph in strategy.report.graphs if graph.num_ort_nodes]
    assert graphs
    assert max(region.runs for graph in graphs for region in graph.regions if region.executor == "ort") > 100
    assert not strategy.report.fallbacks
    if precision == "32-true":
        close(ours, stock)
    else:
        assert sum(ours[1][-50:]) == pytest.approx(sum(stock[1][-50:]), rel=0.05)


def test_without_dynamo(make_trainer: Any, engine_wins: Any, regions_win: None, monkeypatch: Any) -> None:
    from lightning_ort.compat import dynamo

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("dynamo captures nothing by default on a CPU")

    monkeypatch.setattr(dynamo, "compile_isolated", never)
    engine_wins("ort")
    *_, strategy = both(make_trainer, Module)
    assert any(graph.num_ort_nodes for graph in strategy.report.graphs)


def test_what_is_open_stays_unchanged(make_trainer: Any, engine_wins: Any, regions_win: None) -> None:
    engine_wins("ort")
    stock, ours, strategy = both(make_trainer, Open, 200)
    assert not strategy.report.graphs
    notes = [str(note.reason) for note in strategy.report.notes if note.where == "training_step"]
    assert sum("getenv" in note for note in notes) == 1
    close(ours, stock)


def test_values_that_python_reads_are_for_replays_alone(make_trainer: Any, engine_wins: Any, regions_win: None) -> None:
    engine_wins("ort")
    stock, ours, strategy = both(make_trainer, lambda: Module(reads=True))
    assert strategy.report.run.recorded["training_step"]
    assert not any(graph.num_ort_nodes for graph in strategy.report.graphs)
    assert any("reads values" in str(note.reason) for note in strategy.report.notes)
    close(ours, stock)


class HandsOn(Module):
    """Keeps its losses as numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


def test_numbers_that_are_only_handed_on(make_trainer: Any, engine_wins: Any, regions_win: None) -> None:
    engine_wins("ort")
    stock, ours, strategy = both(make_trainer, HandsOn)
    assert any(graph.num_ort_nodes for graph in strategy.report.graphs)
    assert ours[0].lightning_module.losses == ours[1]
    close(ours, stock)


class OtherEngine:
    """A backend for graphs of recordings."""

    def __init__(self, compile: Callable[..., Any]) -> None:
        self.compile = compile


def as_inductor(monkeypatch: Any, compile: Callable[..., Any]) -> None:
    """Let inductor be something else."""
    other = dataclasses.replace(
        engines.ENGINES["inductor"], backend=lambda *told: OtherEngine(compile), obstacle=lambda on_gpu: ""
    )
    monkeypatch.setitem(engines.ENGINES, "inductor", other)


def test_any_engine(make_trainer: Any, engine_wins: Any, monkeypatch: Any) -> None:
    as_inductor(monkeypatch, lambda gm, inputs: gm)
    engine_wins("inductor")
    stock, ours, strategy = both(make_trainer, Module)
    step = next(one for one in strategy.report.steps if one.name == "training_step")
    assert step.engine == "inductor"
    close(ours, stock)


def test_a_failing_compiler_costs_nothing(make_trainer: Any, engine_wins: Any, monkeypatch: Any) -> None:
    def fails(gm: Any, inputs: Any) -> Any:
        raise ZeroDivisionError("no such kernel")

    as_inductor(monkeypatch, fails)
    engine_wins("inductor")
    stock, ours, strategy = both(make_trainer, Module)
    assert sum("no such kernel" in str(note.reason) for note in strategy.report.notes) == 1
    assert strategy.report.run.recorded["training_step"]
    close(ours, stock)


@pytest.mark.parametrize("wrong", ["a result", "a gradient", "a buffer", "random numbers", "an error"])
def test_a_wrong_engine_is_found(make_trainer: Any, engine_wins: Any, monkeypatch: Any, wrong: str) -> None:
    def compile(gm: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            results = [*gm(*args)]
            if wrong == "an error":
                raise MemoryError("later")
            if wrong == "random numbers":
                torch.rand(1)
            else:
                index = {"a result": 0, "a gradient": -4, "a buffer": -1}[wrong]
                results[index] = results[index] + (1 if wrong == "a buffer" else 0.01)
            return results

        return run

    as_inductor(monkeypatch, compile)
    engine_wins("inductor")
    stock, ours, strategy = both(make_trainer, Module)
    if wrong == "an error":
        assert any(note.where == "training_step" for note in strategy.report.notes)
    else:
        assert [one.where for one in strategy.report.fallbacks] == ["training_step"]
    assert strategy.report.run.recorded["training_step"]
    close(ours, stock)


def test_sizes_that_are_rare_are_replayed(make_trainer: Any, engine_wins: Any, regions_win: None) -> None:
    engine_wins("ort")

    def fit_with_rest(strategy: Any, module: Any) -> Any:
        pl.seed_everything(0, verbose=False)
        x = torch.randn(650, 8)
        trainer = make_trainer(strategy=strategy, max_steps=STEPS, max_epochs=-1)
        trainer.fit(module, DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=32))
        return module.state_dict()

    pl.seed_everything(1, verbose=False)
    stock, ours, strategy = Module(), Module(), ORTStrategy()
    ours.load_state_dict(stock.state_dict())
    expected, found = fit_with_rest("auto", stock), fit_with_rest(strategy, ours)
    assert sum(graph.name.startswith("training_step") for graph in strategy.report.graphs) == 1
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3, msg=name)


def test_who_asks_to_compile_what_is_open_is_warned(make_trainer: Any, caplog: Any) -> None:
    strategy = ORTStrategy(config={"start": "now", "cache_dir": None})
    module = Open()
    fit(make_trainer, strategy, module, 20)
    assert strategy.report.graphs
    warnings = [
        one.getMessage() for one in caplog.records if one.levelname == "WARNING" and "getenv" in one.getMessage()
    ]
    assert len(warnings) == 1
    closed = ORTStrategy(config={"start": "now", "cache_dir": None})
    caplog.clear()
    fit(make_trainer, closed, Module(), 20)
    assert closed.report.graphs
    assert not [one for one in caplog.records if one.levelname == "WARNING" and "training_step" in one.getMessage()]


def test_what_several_processes_leave_open_stays_unchanged(
    make_trainer: Any, paces: Any, monkeypatch: Any, no_recordings: None
) -> None:
    paces(torch=0.4, ort=0.1, inductor=0.4)
    stock, ours, strategy = both(make_trainer, Open)
    assert not strategy.report.graphs
    assert sum("getenv" in str(note.reason) for note in strategy.report.notes) == 1
    close(ours, stock)
    *_, strategy = both(make_trainer, Module)
    assert strategy.report.graphs
