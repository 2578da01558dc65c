"""A table of Lightning's features, each a function that is run under the stock strategy and under ``ort``.

The tests compare the two; ``feature_table.py`` makes a page of what the reports say.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_ort import ORTStrategy
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.report import CompileReport

How = Literal["step", "modules", "torch"]

MODULES = (ReasonType.RECOMPILING, ReasonType.CAPTURE_FAILED)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}


@dataclass
class Trainers:
    """Makes the Trainers of one run of a feature, all under one strategy, and keeps their reports.

    Args:
        ort: Whether the strategy is ours; else it is the stock one.
        folder: Where the Trainers write.
    """

    ort: bool
    folder: Path
    _strategies: list[ORTStrategy] = field(default_factory=list)

    def __call__(self, **kwargs: Any) -> Trainer:
        """Make a Trainer that shows nothing, with changes."""
        return Trainer(strategy=self.strategy(), default_root_dir=self.folder, **{**QUIET, **kwargs})

    def strategy(self) -> Any:
        """Make a strategy; placement does not decide."""
        if not self.ort:
            return "auto"
        self._strategies.append(ORTStrategy(config={"placement": "always"}))
        return self._strategies[-1]

    @property
    def reports(self) -> list[CompileReport]:
        """What the strategies report."""
        return [strategy.report for strategy in self._strategies]


Run = Callable[[Trainers], Any]


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Args:
        group: The heading that it stands under.
        run: Uses the feature, and returns the numbers and tensors to compare.
        how: How ONNX Runtime gets at it: it runs the steps, or only the child modules, or nothing.
        slow: Whether it takes more than a few seconds.
    """

    group: str
    run: Run
    how: How
    slow: bool


FEATURES: dict[str, Feature] = {}


def feature(group: str, name: str, how: How = "step", slow: bool = False) -> Callable[[Run], Run]:
    """Enter a function in the table; see :class:`Feature`."""

    def enter(run: Run) -> Run:
        assert name not in FEATURES, f"{name} is there already"
        FEATURES[name] = Feature(group, run, how, slow)
        return run

    return enter


def features_of(module: str) -> list[Any]:
    """The features that a module of tests has entered, as parameters of a test."""
    own = {name: entry for name, entry in FEATURES.items() if entry.run.__module__ == module}
    return [pytest.param(name, marks=[pytest.mark.slow] if entry.slow else []) for name, entry in own.items()]


def result(module: Any, trainer: Any = None) -> dict[str, Any]:
    """Collect what a run of the Trainer leaves behind."""
    trainer = trainer or module.trainer
    return {
        "losses": module.losses,
        "parameters": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "steps": trainer.global_step,
    }


def fit(module: Any, trainer: Any, **kwargs: Any) -> dict[str, Any]:
    """Train, and return what that left behind."""
    trainer.fit(module, **kwargs)
    return result(module, trainer)


def run_feature(name: str, ort: bool, folder: Path) -> tuple[Any, list[CompileReport]]:
    """Run a feature from a fresh start, and return its results and reports."""
    torch._dynamo.reset()
    seed_everything(0, verbose=False)
    folder.mkdir(parents=True, exist_ok=True)
    trainers = Trainers(ort, folder)
    return FEATURES[name].run(trainers), trainers.reports


def how_it_ran(reports: list[CompileReport]) -> How:
    """Tell from the reports how ONNX Runtime got at the steps."""
    if not any(report.ort_runs for report in reports):
        return "torch"
    kinds = {note.reason.type for report in reports for note in (*report.notes, *report.fallbacks)}
    return "modules" if kinds & set(MODULES) else "step"


def assert_same(ours: Any, stock: Any) -> None:
    """Compare results, leaf by leaf."""
    torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-5, equal_nan=True)


def check_feature(name: str, folder: Path) -> list[CompileReport]:
    """Compare a feature's results under both strategies, and who ran its steps; return our reports."""
    stock, _ = run_feature(name, False, folder / "stock")
    ours, reports = run_feature(name, True, folder / "ort")
    assert_same(ours, stock)
    assert how_it_ran(reports) == FEATURES[name].how
    failures = [entry for report in reports for entry in report.fallbacks if entry.reason.type.is_failure]
    assert not failures
    return reports


def be_quiet() -> None:
    """Leave out the notices of Lightning."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_ort"):
        logging.getLogger(name).setLevel(logging.ERROR)
