"""Give the report of a run when it ends: :class:`RunReportMixin`."""

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_ort.compiler.report import CompileReport
from lightning_ort.config import ORTConfig

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy as _Strategy
else:
    _Strategy = object

log = logging.getLogger(__name__)


class RunReportMixin(_Strategy):
    """Where ``ORTConfig.report`` asks for it, gives the report to the log or a file, and its figures to the loggers.

    The figures go to the Trainer's loggers once, when a run has ended without an error: ``ort/node_fraction``,
    ``ort/runs``, ``ort/fallbacks``, and after a fit ``ort/steps_per_second``, its batches by the time from the first
    one's start to the end, with all that happens in between.
    """

    ort_config: ORTConfig
    _report: CompileReport
    _report_due = False
    _first_batch = 0
    _train_start: float | None = None

    @property
    def report(self) -> CompileReport:
        """What ran where, why not, and how fast; empty before the first run."""
        return self._report

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        self._report_due = True
        self._train_start = None

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._first_batch, self._train_start = self._batches(), time.perf_counter()

    @override
    def teardown(self) -> None:
        if self._report_due:
            self._report_due = False
            if self.ort_config.report is not None and self.is_global_zero:
                self._give_report(self.ort_config.report)
                self._log_figures()
        super().teardown()

    def _give_report(self, destination: str) -> None:
        if destination == "log":
            log.info("%s", self.report.to_text())
            return
        try:
            path = Path(destination)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.report.to_dict(), indent=2), encoding="utf-8")
        except OSError as error:  # a run is not lost for its report
            log.warning("The report could not be written to %s: %s", destination, error)

    def _log_figures(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.interrupted:  # Lightning has closed the loggers
            return
        figures = {
            "ort/node_fraction": self.report.ort_node_fraction,
            "ort/runs": self.report.ort_runs,
            "ort/fallbacks": len(self.report.fallbacks),
        }
        if self._train_start is not None:
            seconds = time.perf_counter() - self._train_start
            figures["ort/steps_per_second"] = (self._batches() - self._first_batch) / seconds
        # with the step and epoch of all that Lightning logs
        trainer._logger_connector.log_metrics(figures)  # type: ignore[arg-type]  # takes numbers too

    def _batches(self) -> int:
        """Of training, so far, in all epochs."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer.fit_loop.total_batch_idx + 1
