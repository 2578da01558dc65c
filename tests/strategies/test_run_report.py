"""The report of a run: on the strategy, in the log, in a file."""

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from small_modules import Small

from lightning_ort import CompileReport, ORTStrategy
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.regions.region import Timing
from lightning_ort.strategies import report_delivery
from lightning_ort.strategies.race.duel import Duel


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
    assert "training_step/step" in texts(caplog)[0]


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
    """Since the run began; what cannot be from the start is an error."""
    strategy = ORTStrategy(config={"engine": "torch", "report": tmp_path / "file" / "run.json"})
    (tmp_path / "file").write_text("")
    make_trainer(strategy=strategy, max_epochs=1).fit(Small())
    assert "could not be written" in caplog.text


def test_report_is_given_after_an_error(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    class Fails(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            raise ValueError("mine")

    path = tmp_path / "run.json"
    logger = CSVLogger(tmp_path)
    strategy = ORTStrategy(config={"placement": "always", "report": path})
    trainer = make_trainer(strategy=strategy, max_epochs=1, logger=logger, log_every_n_steps=1)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(Fails())  # without figures: Lightning has closed the loggers
    assert not (Path(logger.log_dir) / "metrics.csv").exists()
    assert json.loads(path.read_text())["graphs"]


def figures(logger: CSVLogger) -> list[dict[str, float]]:
    """What was logged under ``ort/``, row by row, with the step."""
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [
        {key: value for key, value in row.items() if key == "step" or key.startswith("ort/")}
        for row in rows
        if any(key.startswith("ort/") for key in row)
    ]


def test_figures_for_the_loggers(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    config = {"placement": "always", "report": tmp_path / "run.json"}
    trainer = make_trainer(strategy=ORTStrategy(config=config), max_epochs=2, logger=logger)
    trainer.fit(Small())
    report = trainer.strategy.report
    assert report.ort_runs > 0
    (row,) = figures(logger)  # once, not in each epoch
    assert row.pop("ort/steps_per_second") > 0
    assert row == {
        "step": trainer.global_step,
        "ort/node_fraction": report.ort_node_fraction_in_use,
        "ort/runs": report.ort_runs,
        "ort/fallbacks": 0,
    }
    trainer.validate(trainer.lightning_module, verbose=False)
    assert figures(logger)[-1]["ort/runs"] == trainer.strategy.report.ort_runs > row["ort/runs"]
    assert "ort/steps_per_second" not in figures(logger)[-1]  # which are training's


def test_steps_per_second_are_of_this_run(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100, 10))
    monkeypatch.setattr(report_delivery, "perf_counter", lambda: next(clock))
    logger = CSVLogger(tmp_path)
    strategy = ORTStrategy(config={"engine": "torch", "report": "log"})
    trainer = make_trainer(strategy=strategy, max_epochs=1, logger=logger)
    batches = len(Small().train_dataloader())
    for epochs in (1, 3):  # the second fit goes on where the first one ended
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Small())
    assert [row["ort/steps_per_second"] for row in figures(logger)] == [batches / 10, 2 * batches / 10]


def test_nobody_asked_for_figures(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    make_trainer(
        strategy=ORTStrategy(config={"engine": "torch"}), max_epochs=1, logger=logger, log_every_n_steps=1
    ).fit(Small())
    assert (Path(logger.log_dir) / "metrics.csv").exists()
    assert figures(logger) == []


def test_facts_of_the_run(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    trainer = make_trainer(strategy=ORTStrategy(config={"placement": "always", "report": path}), max_epochs=1)
    trainer.fit(Small())
    report = CompileReport.from_dict(json.loads(path.read_text()))
    assert report.ort_runs > 0
    facts = report.run.facts
    assert list(facts) == ["model", "date", "machine", "versions", "strategy", "precision", "ranks", "batch size"]
    assert (facts["model"], facts["strategy"], facts["ranks"]) == ("Small", "ort", "1")
    assert facts["batch size"] == str(trainer.train_dataloader.batch_size)
    assert "torch " in facts["versions"]


def test_other_ranks_write_files_of_their_own(tmp_path: Path) -> None:
    trainer = SimpleNamespace(is_global_zero=False, global_rank=1, train_dataloader=None)
    delivery = report_delivery.ReportDelivery(str(tmp_path / "run.json"))
    delivery._trainer = trainer
    delivery.teardown(CompileReport())
    assert [path.name for path in tmp_path.iterdir()] == ["run.rank1.json"]


def test_an_interrupted_fit_says_whether_it_was_worth_it(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupted(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            raise KeyboardInterrupt

    with caplog.at_level(logging.INFO), pytest.raises(SystemExit):
        make_trainer(strategy=ORTStrategy(config={"start": "amortized"}), max_epochs=1).fit(Interrupted())
    assert "lightning-ort: interrupted; not compiled yet: training_step: " in caplog.text


@pytest.mark.parametrize("in_torch", [True, False])
def test_a_captured_step_of_which_pytorch_runs_everything_is_not_onnx_runtime(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, in_torch: bool
) -> None:
    monkeypatch.setattr(
        Duel, "medians", property(lambda duel: {way: 2.0 - (way.engine == "ort") for way in duel.steps})
    )
    # regions are not timed, or it would be up to the machine which ones stay
    monkeypatch.setattr(timing, "measure", lambda *args: Timing({}, next(iter(args[1]))))
    debug = {"min_region_nodes": 10_000 if in_torch else 1}
    config = {"engine": "ort", "start": "now", "cache_dir": None, "debug": debug}
    trainer = make_trainer(strategy=ORTStrategy(config=config), max_steps=60, max_epochs=-1, limit_val_batches=0)
    trainer.fit(Small())
    (step,) = (step for step in trainer.strategy.report.steps if step.name == "training_step")
    assert step.engine == "ort"
    assert ("in PyTorch" in str(step)) == in_torch == step.in_torch
    assert CompileReport.from_dict(trainer.strategy.report.to_dict()).steps[0].runs == step.runs
