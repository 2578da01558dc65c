"""Nothing that torch's compiler says to its developers reaches a user; what the user's own code says does."""

import functools
import gc
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning_utilities.core.imports import RequirementCache
from ort_settings import config_of
from small_modules import Small, batches
from torch import Tensor

from lightning_ort import ORTStrategy
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.report import CompileReport
from lightning_ort.strategies.capture.dynamo_monitor import DynamoMonitor


@functools.lru_cache
def cached(x: int) -> int:
    return x + 1


class Profiles(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.profiler.record_function("mine"):
            return self.loss(batch) * cached(batch_idx * 0)


FAILS = pytest.mark.skipif(RequirementCache("torch>=2.15"), reason="this torch captures it")


class KeyThatIsNoConstant(Small):
    """Dynamo fails when it makes its guards, and logs a traceback of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = {float("nan"): 2.0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for factor in self.factors.values():
            loss = loss * factor
        return loss


class Items(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss.item())
        return loss * 2 if loss.item() > 0.3 else loss


class Warns(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        warnings.warn(f"batch {batch_idx}", stacklevel=1)
        return self.loss(batch)


class Logs(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logging.getLogger("mine").warning("batch %d", batch_idx)
        return self.loss(batch)


class ScriptedChild(Small):
    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) + self.scripted(batch[0]).mean()


def fit(module: Small, make_trainer: Callable[..., Any], **config: Any) -> CompileReport:
    strategy = ORTStrategy(config=config_of(**{"placement": "always", **config}))
    make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0).fit(module)
    return strategy.report


@pytest.mark.parametrize(
    ("kind", "line", "note"),
    [
        (Profiles, None, None),
        pytest.param(KeyThatIsNoConstant, "training_step runs in torch: capture failed: ", None, marks=FAILS),
        (Items, None, "the value of a tensor decides what runs next (use torch.where)"),
        (Warns, None, "test_quiet_failure.py:"),
        (ScriptedChild, "it calls a TorchScript module, which no graph can hold", None),
    ],
)
@pytest.mark.usefixtures("torchs_loggers_reach_caplog")
def test_only_our_line_is_seen(
    kind: type[Small],
    line: str | None,
    note: str | None,
    make_trainer: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, module = kind(), kind()
    make_trainer(max_epochs=1, limit_val_batches=0).fit(plain)
    caplog.clear()
    gc.collect()  # or what earlier tests have left open is warned about in a line of torch, whichever runs then
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        report = fit(module, make_trainer)
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)
    assert report.ort_runs > 0
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record for record in loud if record.name.startswith("torch")]
    shown = [str(warning.message) for warning in seen if "torch" in warning.filename.split("site-packages")[-1][:7]]
    assert shown == []
    ours = [record.getMessage() for record in loud]
    if line is not None:
        assert len(ours) == 1
        assert line in ours[0]
        assert "\n" not in ours[0]
        assert "its child modules are captured instead (no result changes)" in ours[0]
    if note is not None:
        notes = [entry.reason.text for entry in report.notes if entry.reason.type is ReasonType.GRAPH_BREAK]
        assert any(note in text and "test_quiet_failure.py:" in text for text in notes)


def test_the_users_own_warnings_and_messages_stay(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        report = fit(Warns(), make_trainer)
        fit(Logs(), make_trainer)
    assert report.ort_runs > 0
    assert [str(w.message) for w in seen if w.filename == __file__] == [f"batch {index}" for index in range(4)]
    assert [r.getMessage() for r in caplog.records if r.name == "mine"] == [f"batch {index}" for index in range(4)]


def test_torch_speaks_again_after_the_run(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    assert fit(Profiles(), make_trainer).ort_runs > 0
    log = logging.getLogger("torch._dynamo.variables.tensor")
    assert log.filters == []
    log.warning("heard")
    assert log.filter(logging.LogRecord(log.name, logging.WARNING, "", 0, "", (), None))


def test_who_asks_torch_for_more_gets_it(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "torch._dynamo"):
        assert fit(Small(), make_trainer).ort_runs > 0
    assert [r for r in caplog.records if r.name.startswith("torch._dynamo") and r.levelno < logging.WARNING]


@FAILS
def test_what_torch_said_is_in_our_log_at_debug(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "lightning_ort.strategies.capture.dynamo_monitor"):
        report = fit(KeyThatIsNoConstant(), make_trainer)
    assert report.ort_runs > 0
    assert [r for r in caplog.records if r.levelno == logging.DEBUG and "torch._guards: " in r.getMessage()]


class Kinds(Small):
    """Each case is compiled when it comes up, with cases that are known between them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch.dim() > 2:
            batch = batch.flatten(0, -2)
        return self.net(batch).square().mean()

    def train_dataloader(self) -> Any:
        known = (4, 8)
        new = [(*[2] * extra, 8) for extra in range(2, 8)]
        return batches(*[shape for other in new for shape in (known, other)])


@pytest.mark.parametrize("capture", ["auto", "step"])
def test_recompiles_count_in_all(
    capture: str, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_ort.strategies.race.failures.MAX_RECOMPILING_STEPS_IN_ALL", 3)
    plain, module = Kinds(), Kinds()
    make_trainer(max_epochs=1, limit_val_batches=0).fit(plain)
    report = fit(module, make_trainer, capture=capture)
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)
    assert report.ort_runs > 0
    notes = [note.reason for note in report.notes if note.reason.type is ReasonType.RECOMPILING]
    if capture == "auto":
        assert [note.text for note in notes] == ["4 steps compiled again; its child modules are captured instead"]
        assert report.recompiles < 6
    else:
        assert notes == []
        assert report.recompiles >= 5


def test_warnings_are_heard_again_if_dynamo_is_reset_while_it_compiles() -> None:
    """It then calls nobody back at the end."""
    before = list(warnings.filters)
    monitor = DynamoMonitor()
    monitor.begin()
    try:
        monitor.on_compile_start()
        assert warnings.filters != before
    finally:
        monitor.end()
        monitor.remove()
    assert warnings.filters == before
