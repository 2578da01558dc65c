"""``ort_ddp`` with two real processes on this machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from fault_runs import Run
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from processes import START, Recorded, fit
from small_modules import loader
from torch.utils.checkpoint import checkpoint

from lightning_ort import ORTDDPStrategy, ORTNativeZeRO1Strategy, ORTZeRO1Strategy
from lightning_ort.strategies.capture.capture import obstacle
from lightning_ort.strategies.parallel import agree
from lightning_ort.strategies.race.duel import Duel


def executors(facts: dict[str, Any]) -> list[list[str]]:
    return [[region["executor"] for region in graph["regions"]] for graph in facts["report"]["graphs"]]


@pytest.mark.parametrize("unused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_equals_stock_ddp(unused: bool, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    arguments = {"start_method": START, "find_unused_parameters": unused}
    stock = fit(Recorded(tmp_path, "stock", unused), DDPStrategy(**arguments), make_trainer)
    strategy = ORTDDPStrategy(config={"placement": "always"}, **arguments)
    ours = fit(Recorded(tmp_path, "ours", unused), strategy, make_trainer)
    for facts, expected in zip(ours, stock, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        assert facts["report"]["ort_runs"] > 0 or obstacle()
        assert facts["report"]["audits"] > 0 or obstacle()
        assert facts["report"]["fallbacks"] == []
        assert facts["fused"] is True
    assert ours[0]["weight"] == ours[1]["weight"]
    assert ours[0]["losses"] != ours[1]["losses"]  # each rank has samples of its own


def test_native_zero_equals_ddp_and_saves_a_whole_checkpoint(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    stock = fit(Recorded(tmp_path, "stock"), DDPStrategy(start_method=START), make_trainer)
    strategy = ORTNativeZeRO1Strategy(config={"placement": "always"}, start_method=START)
    ours = fit(Recorded(tmp_path, "ours"), strategy, make_trainer)
    for facts, expected in zip(ours, stock, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        assert facts["report"]["ort_runs"] > 0 or obstacle()
        assert facts["fused"] is True
        assert "2 processes" in facts["report"]["optimizers"][0]["reason"]
    assert ours[0]["weight"] == ours[1]["weight"]
    # each rank has some of the states, together they have all
    shards = [facts["states"] for facts in ours]
    assert all(shards)
    assert sorted(shards[0] + shards[1]) == stock[0]["states"]
    assert sum(facts["state_bytes"] for facts in ours) == stock[0]["state_bytes"]
    saved = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    (optimizer,) = saved["optimizer_states"]
    assert sorted(optimizer["state"]) == stock[0]["states"]
    assert optimizer["param_groups"][0]["fused"] is None
    # a stock Trainer on one process goes on with it, and two processes with that
    module = Recorded(tmp_path, "single")
    trainer = make_trainer(max_epochs=3, limit_val_batches=0)
    trainer.fit(module, ckpt_path=tmp_path / "ours.ckpt")
    assert module.losses[-1] < stock[0]["losses"][0]
    strategy = ORTNativeZeRO1Strategy(config={"engine": "torch"}, start_method=START)
    checkpoint = tmp_path / "single.ckpt"
    resumed = fit(Recorded(tmp_path, "resumed"), strategy, make_trainer, max_epochs=4, ckpt_path=checkpoint)
    assert all(facts["fused"] is True for facts in resumed)
    assert resumed[0]["losses"][-1] < module.losses[0]


@pytest.mark.new_torch
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_end_with_the_fit(start_method: Any, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    strategy = ORTDDPStrategy(config={"placement": "always"}, start_method=start_method)
    ours = fit(Recorded(tmp_path, "ours"), strategy, make_trainer)
    assert all(facts["report"]["ort_runs"] > 0 for facts in ours)
    assert ours[0]["weight"] == ours[1]["weight"]
    # that of rank 0
    assert strategy.report.ort_runs == ours[0]["report"]["ort_runs"]
    assert "on ONNX Runtime" in str(strategy.report)


@pytest.mark.new_torch
@pytest.mark.usefixtures("captured_at_once")
def test_measured_placement_is_the_same_on_all_ranks(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    ours = fit(Recorded(tmp_path, "ours"), ORTDDPStrategy(start_method=START), make_trainer)
    assert executors(ours[0])
    assert executors(ours[0]) == executors(ours[1])
    assert ours[0]["weight"] == ours[1]["weight"]


def test_first_timing_wins() -> None:
    store = torch.distributed.HashStore()
    first, second = {"ort_ms": 1.0, "threads": 1}, {"ort_ms": None, "threads": 2}
    assert agree(store, "region", first) == first
    assert agree(store, "region", second) == first
    assert agree(store, "other", second) == second


def test_a_process_goes_on_where_the_store_is_gone() -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = torch.distributed.TCPStore("127.0.0.1", server.port)
    assert agree(client, "step", {"ort": 3.0}) == {"ort": 3.0}
    del server
    assert agree(client, "step", {"ort": 5.0}) == {"ort": 5.0}


def test_a_process_goes_by_nothing_that_it_has_not_got() -> None:
    store = torch.distributed.HashStore()
    agree(store, "step", {"ort": 3.0, "torch": 2.0, "inductor": 1.0})
    assert agree(store, "step", {"ort": 5.0, "torch": 6.0}) == {"ort": 3.0, "torch": 2.0}
    assert agree(store, "step", {"other": 5.0}) == {"other": 5.0}


class Long(Recorded):
    """Enough batches for a trial of the step."""

    def train_dataloader(self) -> Any:
        return loader(8 * 120)  # 60 in each of two processes


@pytest.mark.new_torch
def test_two_trainers_in_one_process_group(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """The second one times its own step, on its own engines."""
    times = iter((1.0, 9.0))

    def train(folder: Path) -> None:
        for name in ("first", "second"):
            ms = next(times)
            medians = property(lambda self, ms=ms: dict(zip(self.steps, (ms / 1000, 3 * ms / 1000), strict=True)))
            Duel.medians = medians  # type: ignore[method-assign]
            strategy = ORTDDPStrategy(config={"placement": "measured", "start": "now"})
            trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1, limit_val_batches=0)
            trainer.fit(Long(folder, name))

    run = Run(tmp_path, lambda: train(tmp_path), torchrun=True)
    assert run.ended() == [0, 0], run.output
    for name, ms in (("first", 1.0), ("second", 9.0)):
        for rank in range(2):
            steps = json.loads((tmp_path / f"{name}.{rank}.json").read_text())["report"]["steps"]
            assert [step["ms"] for step in steps] == [{"ort": ms, "torch": 3 * ms}], run.output


@pytest.mark.parametrize(
    ("argument", "kind", "message"),
    [
        ({"start_method": "thread"}, ValueError, "start_method='thread'.*'popen', 'spawn', 'fork', 'forkserver'"),
        ({"start_method": None}, ValueError, "start_method=None"),
        ({"find_unused_parameters": "no"}, TypeError, "find_unused_parameters='no'.*True or False"),
        ({"static_graph": 1}, TypeError, "static_graph=1.*True or False"),
        ({"find_unused": True}, TypeError, "did you mean 'find_unused_parameters'"),
    ],
)
@pytest.mark.parametrize("strategy", [ORTDDPStrategy, ORTNativeZeRO1Strategy])
def test_arguments_of_lightnings_strategy(
    strategy: type, argument: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        strategy(**argument)


def test_names() -> None:
    names = StrategyRegistry.available_strategies()
    for suffix in ("", "_find_unused_parameters_true", "_spawn", "_notebook"):
        assert {f"ort_ddp{suffix}", f"ort_zero1_native{suffix}"} <= set(names)
    strategy = StrategyRegistry.get("ort_ddp_spawn_find_unused_parameters_true")
    assert type(strategy) is ORTDDPStrategy
    assert strategy._start_method == "spawn"
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert type(StrategyRegistry.get("ddp")) is DDPStrategy


class Monitored(Recorded):
    """Logs across the processes, by torchmetrics too."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.accuracy(self(x), y)
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("val_mean", self.loss(batch), sync_dist=True)

    def on_train_end(self) -> None:
        super().on_train_end()
        metrics = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        (checkpoint,) = self.trainer.checkpoint_callbacks
        facts = {"metrics": metrics, "best": Path(checkpoint.best_model_path).name, "epoch": self.current_epoch}
        (self.folder / f"{self.name}.callbacks.{self.global_rank}.json").write_text(json.dumps(facts))

    def train_dataloader(self) -> Any:
        return loader(samples=42)  # 2 x 3 batches of 8, 8 and 5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ORTDDPStrategy, ORTZeRO1Strategy])
def test_callbacks_and_metrics_across_processes(
    strategy: Any, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    if strategy is ORTZeRO1Strategy:
        pytest.importorskip("deepspeed")
    facts = {}
    for name, made in {
        "stock": DDPStrategy(start_method=START),
        "ours": strategy(config={"placement": "always"}, start_method=START),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        callbacks = [
            ModelCheckpoint(folder / "checkpoints", monitor="val_mean", save_top_k=2),
            # no epoch improves by that much, so training ends after the second
            EarlyStopping(monitor="val_mean", patience=1, min_delta=100.0),
        ]
        ranks = fit(
            Monitored(folder, name),
            made,
            make_trainer,
            max_epochs=6,
            limit_val_batches=2,
            callbacks=callbacks,
            enable_checkpointing=True,
        )
        facts[name] = [json.loads((folder / f"{name}.callbacks.{rank}.json").read_text()) for rank in range(2)]
        assert len(list((folder / "checkpoints").iterdir())) == 2
    assert ranks[0]["report"]["ort_runs"] > 0 or obstacle()
    for ours, stock in zip(facts["ours"], facts["stock"], strict=True):
        assert ours["metrics"] == pytest.approx(stock["metrics"], rel=1e-4)
        assert ours["best"] == stock["best"]
        assert ours["epoch"] == stock["epoch"] < 5
    assert facts["ours"][0]["metrics"]["accuracy"] == facts["ours"][1]["metrics"]["accuracy"]


@pytest.mark.slow
def test_static_graph(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    stock = fit(Recorded(tmp_path, "stock"), DDPStrategy(start_method=START, static_graph=True), make_trainer)
    strategy = ORTDDPStrategy(config={"placement": "always"}, start_method=START, static_graph=True)
    ours = fit(Recorded(tmp_path, "ours"), strategy, make_trainer)
    for facts, expected in zip(ours, stock, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        assert facts["report"]["ort_runs"] > 0 or obstacle()


class Checkpointed(Recorded):
    """Uses a block twice, and computes it again in the backward pass."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.net[:2], x, use_reentrant=self.reentrant)[:, :8]
        return self.net[3](self.net[2](self.net[1](self.net[0](x))))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_activations_stay_in_torch(
    reentrant: bool, make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo's split at DDP's buckets gives fake gradients to the parameters that they use."""
    monkeypatch.setattr(Checkpointed, "reentrant", reentrant)
    stock, strategy = DDPStrategy(start_method=START, static_graph=reentrant), {"placement": "always"}
    expected = fit(Checkpointed(tmp_path, "stock"), stock, make_trainer)
    ours = fit(
        Checkpointed(tmp_path, "ours"),
        ORTDDPStrategy(config=strategy, start_method=START, static_graph=reentrant),
        make_trainer,
    )
    for facts, stocks in zip(ours, expected, strict=True):
        assert facts["losses"] == pytest.approx(stocks["losses"], rel=1e-5)
        assert "checkpoint" in json.dumps(facts["report"]["notes"])
