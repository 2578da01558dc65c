"""The report of a run: on the strategy, in the log, in a file."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_modules import Small

from lightning_ort import CompileReport, ORTStrategy


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "what ran where" in record.getMessage()]


def test_report_is_on_the_strategy(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(strategy=ORTStrategy(config={"placement": "always"}), max_epochs=1)
    assert trainer.strategy.report == CompileReport()
    with caplog.at_level(logging.INFO):
        trainer.fit(Small())
    report = trainer.strategy.report
    names = [graph.name for graph in report.graphs]
    assert {name.partition("/")[0] for name in names} == {"training_step", "validation_step"}
    assert report.compile_seconds > 0
    assert report.ort_runs > 0
    assert texts(caplog) == []  # nobody asked for it
    lines = [record for record in caplog.records if record.name.startswith("lightning_ort")]
    assert len([line for line in lines if line.levelno == logging.INFO]) == len(names)  # one for each graph
    assert not [line for line in lines if line.levelno > logging.INFO]


def test_report_in_the_log_after_each_run(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(strategy=ORTStrategy(config={"placement": "always", "report": "log"}), max_epochs=1)
    with caplog.at_level(logging.INFO):
        trainer.fit(Small())
        assert len(texts(caplog)) == 1
        trainer.validate(trainer.lightning_module, verbose=False)
    assert len(texts(caplog)) == 2
    assert "training_step/forward" in texts(caplog)[0]


def test_report_in_a_file(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "reports" / "run.json"
    trainer = make_trainer(strategy=ORTStrategy(config={"placement": "always", "report": path}), max_epochs=1)
    trainer.fit(Small())
    written = json.loads(path.read_text())
    assert written == json.loads(json.dumps(trainer.strategy.report.to_dict()))
    assert written["ort_runs"] > 0
    assert written["graphs"][0]["regions"]


def test_file_that_cannot_be_written(
    make_trainer: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    config = {"capture": "off", "report": tmp_path / "file" / "run.json"}
    make_trainer(strategy=ORTStrategy(config=config), max_epochs=1).fit(Small())
    assert "could not be written" in caplog.text


def test_report_is_given_after_an_error(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    class Fails(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ValueError("mine")

    path = tmp_path / "run.json"
    trainer = make_trainer(strategy=ORTStrategy(config={"placement": "always", "report": path}), max_epochs=1)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(Fails())
    assert json.loads(path.read_text())["graphs"]
