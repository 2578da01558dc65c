"""Deliver the report when a run of the Trainer ends: :class:`RunReport`."""

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ort.compat.lightning import log_to_loggers

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_ort.compiler.report import CompileReport

log = logging.getLogger(__name__)


class RunReport:
    """Writes the report to the log or a file, as ``ORTConfig.report`` says, and its figures to the Trainer's loggers.

    The figures are logged once, when a run has ended without an error: ``ort/node_fraction``, ``ort/runs``,
    ``ort/fallbacks``, and after a fit ``ort/steps_per_second``: its batches by the time from the start of the first one
    to the end, with everything that happens in between.

    Args:
        destination: ``"log"``, the path of a file, or ``None`` for no report.

    """

    def __init__(self, destination: str | None) -> None:
        self._destination = destination
        self._trainer: pl.Trainer | None = None  # of the run that is to be reported
        self._first_batch = 0
        self._train_start: float | None = None

    def setup(self, trainer: "pl.Trainer") -> None:
        """Expect a report at the end of this run."""
        self._trainer = trainer
        self._train_start = None

    def on_train_start(self) -> None:
        """Start the clock."""
        assert self._trainer is not None
        self._first_batch, self._train_start = _batches(self._trainer), time.perf_counter()

    def teardown(self, report: "CompileReport") -> None:
        """Deliver the report on rank 0; a second call does nothing."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None and self._destination is not None and trainer.is_global_zero:
            self._write(report, self._destination)
            self._log_figures(report, trainer)

    def _write(self, report: "CompileReport", destination: str) -> None:
        if destination == "log":
            log.info("%s", report.to_text())
            return
        try:
            path = Path(destination)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report.to_dict(), indent=2), encoding="utf-8")
        except OSError as error:  # a run must not fail because of its report
            log.warning("The report could not be written to %s: %s", destination, error)

    def _log_figures(self, report: "CompileReport", trainer: "pl.Trainer") -> None:
        if trainer.interrupted:  # Lightning has closed the loggers
            return
        figures = {
            "ort/node_fraction": report.ort_node_fraction,
            "ort/runs": report.ort_runs,
            "ort/fallbacks": len(report.fallbacks),
        }
        if self._train_start is not None:
            seconds = time.perf_counter() - self._train_start
            figures["ort/steps_per_second"] = (_batches(trainer) - self._first_batch) / seconds
        log_to_loggers(trainer, figures)


def _batches(trainer: "pl.Trainer") -> int:
    """Return how many batches the fit has trained on so far, in all epochs."""
    return trainer.fit_loop.total_batch_idx + 1
