"""Settings from environment variables: used where an argument was not given, refused as early as an argument."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_modules import Small

from lightning_ort import ORTConfig, ORTOptimizer, ORTStrategy
from lightning_ort.cli.doctor import Machine, examine
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.strategies.capture.capture import obstacle
from lightning_ort.strategies.environment import CONFIG, OPTIM


@pytest.mark.parametrize("text", ['{"placement": "always", "engine": "torch"}', "placement: always\nengine: torch"])
@pytest.mark.parametrize("ending", [None, ".json", ".yaml", ".YML"])
def test_config(text: str, ending: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if ending is not None:
        path = tmp_path / f"settings{ending}"
        path.write_text(text)
        text = str(path)
    monkeypatch.setenv(CONFIG, text)
    assert ORTStrategy().ort_config == ORTConfig(placement="always", engine="torch")


def test_empty_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG, " ")
    monkeypatch.setenv(OPTIM, "")
    assert ORTStrategy().ort_config == ORTConfig()
    assert not [finding for finding in examine(Machine.this()) if finding.what == "settings"]


def test_what_is_passed_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG, json.dumps({"debug": {"capture": "modules", "min_region_nodes": 5}}))
    assert ORTStrategy(config=ORTConfig(debug={"capture": "step"})).ort_config == ORTConfig(
        debug={"capture": "step", "min_region_nodes": 5}
    )
    # a default counts as passed in a mapping, and not in an ORTConfig
    monkeypatch.setenv(CONFIG, json.dumps({"placement": "always", "activation_memory_budget": 0.5}))
    assert ORTStrategy(config={"placement": "measured"}).ort_config == ORTConfig(activation_memory_budget=0.5)
    assert ORTStrategy(config=ORTConfig(placement="measured")).ort_config == ORTConfig(
        placement="always", activation_memory_budget=0.5
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"placment": "always"}', f"{CONFIG}: ORTConfig has no field 'placment': did you mean 'placement'"),
        ("engine: all", f"{CONFIG}: ORTConfig.engine='all'.: choose one of 'auto'"),
        ("always", f"{CONFIG}: 'always' has no fields. Set {CONFIG} to JSON or YAML"),
        ("{", f"{CONFIG}: this is no YAML"),
        ("/no/such/file.yaml", f"{CONFIG}, the file '/no/such/file.yaml', cannot be read"),
        ('{"debug": {"min_region_nodes": "x"}}', f"{CONFIG}: .*min_region_nodes='x'.: pass an integer"),
        ("capture: modules", f"{CONFIG}: ORTConfig has no field 'capture': .*debug={{'capture': 'modules'}}"),
    ],
)
def test_wrong_config(value: str, message: str, monkeypatch: pytest.MonkeyPatch, make_trainer: Any) -> None:
    monkeypatch.setenv(CONFIG, value)
    with pytest.raises(ValueError, match=message):
        make_trainer(strategy="ort")
    (finding,) = [finding for finding in examine(Machine.this()) if finding.what == "settings"]
    assert finding.state == "failed"
    assert CONFIG in finding.text


def test_settings_that_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG, "engine: auto")
    with pytest.raises(ValueError, match=f"{CONFIG} and the strategy's config together: .*needs placement='measured'"):
        ORTStrategy(config={"placement": "always"})


def test_wrong_optim(monkeypatch: pytest.MonkeyPatch, make_trainer: Callable[..., Any]) -> None:
    monkeypatch.setenv(OPTIM, "adafacto")
    with pytest.raises(ValueError, match=f"{OPTIM}='adafacto' is not known: did you mean 'adafactor'"):
        make_trainer(strategy="ort")


@pytest.mark.parametrize(
    ("optim", "callbacks", "expected"),
    [
        ("auto", [], "torch.Adafactor"),
        ("keep", [], "torch.Adam"),
        ("adamw_torch_foreach", [], "torch.Adam (foreach)"),
        ("auto", [ORTOptimizer("adamw_torch_fused")], "torch.Adam (fused)"),
    ],
)
def test_optim(
    optim: str, callbacks: list[Any], expected: str, monkeypatch: pytest.MonkeyPatch, make_trainer: Callable[..., Any]
) -> None:
    class WithAdam(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    monkeypatch.setenv(OPTIM, "adafactor")
    monkeypatch.setenv(CONFIG, "placement: always")
    trainer = make_trainer(strategy=ORTStrategy(optim=optim), callbacks=callbacks, max_epochs=1, limit_val_batches=0)
    trainer.fit(WithAdam())
    report = trainer.strategy.report
    assert [entry.runs_as for entry in report.optimizers] == [expected]
    assert report.ort_runs > 0 or obstacle()
    told = [note.reason.text for note in report.notes if note.reason.type is ReasonType.ENVIRONMENT]
    assert told == [f"{CONFIG} sets placement='always'", f"{OPTIM} sets optim='adafactor'"]


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG, "placement: always")
    monkeypatch.setenv(OPTIM, "keep")
    found = [finding for finding in examine(Machine.this()) if finding.what == "settings"]
    assert [finding.state for finding in found] == ["ok", "ok"]
    assert "placement='always'" in found[0].text
    assert "optim='keep'" in found[1].text
