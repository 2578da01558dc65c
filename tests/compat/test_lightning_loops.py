"""Private names of Lightning's loops, as they are in the installed version."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_ort._imports import NAMESPACES, LightningNamespace
from lightning_ort.compat import lightning, lightning_loops, lightning_sources


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_installed_release_is_known(namespace: LightningNamespace) -> None:
    assert lightning_sources.unknown_functions(namespace) == ()


def test_changed_function_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LightningModule, "log", lambda self, name, value: None)
    assert lightning_sources.unknown_functions(NAMESPACES[0]) == ("core.module.LightningModule.log",)


def test_digest_ends_with_the_function_and_leaves_out_comments() -> None:
    source = ["    @property\n", "    def one(\n", "        self\n", "    ):\n", "        return 1  \n", "\n"]
    commented = [*source[:-2], "        # why\n", *source[-2:], "    def two(self):\n", "        return 2\n"]
    assert lightning_sources.digest(source, 1, "a") == lightning_sources.digest(commented, 1, "a")
    source[-2] = "        return 3\n"
    assert lightning_sources.digest(source, 1, "a") != lightning_sources.digest(commented, 1, "a")


def test_parts_have_stock_classes() -> None:
    trainer = Trainer(logger=False, accelerator="cpu")
    parts = lightning_loops.parts_of(trainer)
    assert list(map(type, parts)) == lightning_loops.stock_parts(NAMESPACES[0])
    assert parts[-1] is lightning.logger_connector(trainer)
    assert lightning.precision_of(trainer.strategy) is trainer.precision_plugin
    assert vars(trainer).get(lightning_loops.BY_TIME) is None
    assert lightning_loops.stock_fetcher(NAMESPACES[0]).__name__ == "_PrefetchDataFetcher"
    assert not lightning_loops.says_each_call(NAMESPACES[0])()


def test_values_of_a_step_are_those_that_lightning_shows() -> None:
    results = _ResultCollection(training=True)
    results.log("training_step", "loss", torch.tensor(1.0), on_step=True, on_epoch=True, prog_bar=True)
    results.log("training_step", "late", torch.tensor(2.0), on_step=False, on_epoch=True)
    kept = lightning_loops.step_values(results)
    assert kept is not None
    then = lightning_loops.shown(kept)
    assert then == results.metrics(on_step=True)
    known = lightning_loops.known_metric(results, "training_step", "loss", torch.tensor(1.0), True)
    assert known is not None
    assert known.is_in(results)
    known.update(torch.tensor(5.0), None)
    assert lightning_loops.shown(kept) == then, "what was kept stays"
    assert results.metrics(on_step=True)["pbar"] == {"loss_step": 5.0}
    assert results.metrics(on_step=False)["log"]["loss_epoch"] == 3.0


def test_a_value_that_lightning_refuses_is_not_kept() -> None:
    results = _ResultCollection(training=True)
    results.log("training_step", "loss", torch.tensor(1.0), on_step=True, on_epoch=False)
    results["training_step.loss"]._forward_cache = {"a": 1}
    assert lightning_loops.step_values(results) is None


def test_batches_are_moved_with_all_hooks() -> None:
    module = SimpleNamespace(_on_before_batch_transfer=lambda batch, dataloader_idx: batch + dataloader_idx)
    call = SimpleNamespace(_call_strategy_hook=lambda trainer, name, batch, dataloader_idx: (name, batch))
    trainer = SimpleNamespace(lightning_module=module)
    assert lightning_loops.transfer_batch(trainer, call, 1, 2) == ("batch_to_device", 3)
