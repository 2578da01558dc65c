"""Deliver the report when a run of the Trainer ends: :class:`ReportDelivery`."""

import json
import logging
import os
import platform
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from lightning_ort.compat.lightning import log_to_loggers
from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.report.view import counted, rank_file

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_ort.compiler.report import CompileReport

log = logging.getLogger(__name__)


class ReportDelivery:
    """Writes the report to the log or a file, as ``ORTConfig.report`` says, and its figures to the Trainer's loggers.

    The figures are logged once, when a run has ended without an error: ``ort/node_fraction``, ``ort/runs``,
    ``ort/fallbacks``, and after a fit ``ort/steps_per_second``: its batches by the time from the start of the first one
    to the end, with everything that happens in between.
    """

    def __init__(self, destination: str | None) -> None:
        self._destination = destination
        self._trainer: pl.Trainer | None = None  # of the run that is to be reported
        self._first_batch = 0
        self._train_start: float | None = None

    def setup(self, trainer: "pl.Trainer", report: "CompileReport") -> None:
        """Expect a report at the end of this run."""
        self._trainer = trainer
        report.run.facts = facts_of(trainer)
        self._train_start = None

    def on_train_start(self) -> None:
        """Start the clock."""
        assert self._trainer is not None
        self._first_batch, self._train_start = _batches(self._trainer), perf_counter()

    def teardown(self, report: "CompileReport") -> None:
        """Deliver the report once; other ranks write a file beside that of rank 0, without waiting for anybody."""
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        if (batch_size := _batch_size(trainer)) is not None:
            report.run.facts["batch size"] = str(batch_size)
        if (
            trainer.is_global_zero and trainer.interrupted and report.run.verdict
        ):  # the program ends here, before it could show its report
            rank_zero_info("lightning-ort: interrupted; %s", report.run.verdict)
        if self._destination is None:
            return
        if trainer.is_global_zero:
            self._write(report, self._destination)
            self._log_figures(report, trainer)
        elif self._destination != "log":
            self._write(report, str(rank_file(Path(self._destination), trainer.global_rank)))

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
            "ort/node_fraction": report.ort_node_fraction_in_use,
            "ort/runs": report.ort_runs,
            "ort/fallbacks": len(report.fallbacks),
        }
        if self._train_start is not None:
            seconds = perf_counter() - self._train_start
            figures["ort/steps_per_second"] = (_batches(trainer) - self._first_batch) / seconds
        log_to_loggers(trainer, figures)


def facts_of(trainer: "pl.Trainer") -> dict[str, str]:
    """Return what a reader of the report wants to know of a run besides its figures."""
    machine = (
        f"{platform.system()} {platform.machine()}, {counted(os.cpu_count() or 1, 'processor')},"
        f" {counted(torch.get_num_threads(), 'thread')}"
    )
    device = trainer.strategy.root_device
    if device.type == "cuda":  # on a CPU nothing may wake up CUDA: a process that has cannot fork
        machine += f", {torch.cuda.get_device_name(device)}"
    names = ("lightning-ort", "torch", trainer.strategy.namespace.distribution, *kernels.builds())  # type: ignore[attr-defined]
    return {
        "model": type(trainer.lightning_module).__name__,
        "date": datetime.now().isoformat(" ", "minutes"),
        "machine": machine,
        "versions": ", ".join(f"{name} {number}" for name in names if (number := kernels.installed(name))),
        "strategy": getattr(trainer.strategy, "strategy_name", type(trainer.strategy).__name__),
        "precision": str(trainer.precision),
        "ranks": str(trainer.world_size),
    }


def _batch_size(trainer: "pl.Trainer") -> int | None:
    loader = trainer.train_dataloader
    return loader.batch_size if isinstance(loader, DataLoader) else None


def _batches(trainer: "pl.Trainer") -> int:
    """Return how many batches the fit has trained on so far, in all epochs."""
    return trainer.fit_loop.total_batch_idx + 1
