"""One batch of a validation, a test or a prediction: :class:`LeanEvaluation`, :class:`LeanPrediction`."""

import math
from typing import Any

import torch
from typing_extensions import override

from lightning_ort.compat import lightning_bases
from lightning_ort.compat.lightning import logger_connector
from lightning_ort.strategies.lean.run import LeanObject, count


class _LeanRun(LeanObject):
    """What both of Lightning's loops without an optimizer have in common."""

    _data_fetcher: Any

    _results: Any
    num_dataloaders: int
    max_batches: Any
    batch_progress: Any
    _seen_batches_per_dataloader: Any

    def run(self) -> Any:
        lean = self._lean
        before = lean.is_within_another
        lean.bars.catch_up()
        try:
            return super().run()  # type: ignore[misc]
        finally:
            lean.is_within_another = before
            lean.bars.catch_up()

    def on_run_start(self) -> None:
        super().on_run_start()  # type: ignore[misc]
        self._lean.begin_loop(self._data_fetcher, self._results)

    def _run_windows(self, name: str, batch_idx: int, dataloader_idx: int) -> bool:
        """Run what may follow a batch without a look in between; return whether that has fetched the next one."""
        fetcher = self._data_fetcher
        if fetcher.done or "_lean" not in fetcher.__dict__:
            return False
        fetcher.found = self._lean.windows.run(self, fetcher, name, batch_idx + 1, dataloader_idx)
        return fetcher.found is not None

    def batches_to_event(self, fetcher: Any, done: int, dataloader_idx: int) -> float:
        """Return how many batches there are, after so many, until the last one of a loader, which counts."""
        lean = self._lean
        if lean.trainer.received_sigterm or (self._results is not None and lean.logged and lean.trainer.loggers):
            return 0
        last = self.max_batches[dataloader_idx]
        return 0 if last == math.inf and self.num_dataloaders > 1 else last - done

    def count_batches(self, number: int, dataloader_idx: int) -> None:
        """Count batches that have run."""
        count(self.batch_progress, number)
        if self._results is not None and not self._lean.sanity:
            self._seen_batches_per_dataloader[dataloader_idx] += number


class LeanEvaluation(_LeanRun, lightning_bases.EvaluationLoop):
    """Does of Lightning's loop what somebody asked for."""

    @override
    def _store_dataloader_outputs(self) -> None:
        self._lean.bars.catch_up()
        super()._store_dataloader_outputs()

    @override
    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        lean, trainer = self._lean, self.trainer
        if dataloader_iter is not None or not lean.begin():
            return super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        module, progress, stage = lean.module, self.batch_progress, lean.stage
        batch = lean.to_device(batch, dataloader_idx)
        total: Any = progress.total
        current: Any = progress.current
        number = dataloader_idx if self.num_dataloaders > 1 and self._is_sequential else None
        args = (batch, batch_idx) if number is None else (batch, batch_idx, number)
        total.ready += 1
        current.ready += 1
        connector = logger_connector(trainer)
        connector.begin_batch(self._results, batch, number)
        lean.run_hook(trainer, module, f"on_{stage}_batch_start", *args)
        total.started += 1
        current.started += 1
        output = lean.run_step(f"{stage}_step", args, self._build_step_args_from_hook_kwargs)
        total.processed += 1
        current.processed += 1
        lean.bars.must_draw = (
            lean.sanity or progress.is_last_batch or batch_idx + 1 == self._max_batches[dataloader_idx]
        )
        lean.run_hook(trainer, module, f"on_{stage}_batch_end", output, *args)
        connector.on_batch_end()
        total.completed += 1
        current.completed += 1
        if not lean.sanity:
            self._has_run = True
            connector.update_eval_step_metrics(self._seen_batches_per_dataloader[dataloader_idx])
            self._seen_batches_per_dataloader[dataloader_idx] += 1
        has_next = self._run_windows(f"{stage}_step", batch_idx, dataloader_idx)
        if not progress.is_last_batch and trainer.received_sigterm and not has_next:
            raise lean.sigterm_exception
        return None


class LeanPrediction(_LeanRun, lightning_bases.PredictionLoop):
    """Does of Lightning's loop what somebody asked for."""

    @override
    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        lean, trainer = self._lean, self.trainer
        if dataloader_iter is not None or not lean.begin():
            return super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        module, progress = lean.module, self.batch_progress
        batch = lean.to_device(batch, dataloader_idx)
        total: Any = progress.total
        current: Any = progress.current
        total.ready += 1
        current.ready += 1
        keeps = self._store_data_for_prediction_writer(batch_idx, dataloader_idx)
        args = (batch, batch_idx) if self.num_dataloaders == 1 else (batch, batch_idx, dataloader_idx)
        lean.run_hook(trainer, module, "on_predict_batch_start", *args)
        total.started += 1
        current.started += 1
        predictions = lean.run_step("predict_step", args, self._build_step_args_from_hook_kwargs)
        if predictions is None:
            self._warning_cache.warn("predict returned None if it was on purpose, ignore this warning...")
        total.processed += 1
        current.processed += 1
        lean.bars.must_draw = batch_idx + 1 == self.max_batches[dataloader_idx] or bool(self._data_fetcher.done)
        lean.run_hook(trainer, module, "on_predict_batch_end", predictions, *args)
        total.completed += 1
        current.completed += 1
        if self._return_predictions or keeps:
            self._predictions[dataloader_idx].append(lean.move(predictions, torch.device("cpu")))
        if not keeps:
            self._run_windows("predict_step", batch_idx, dataloader_idx)
        return None

    def keep(self, predictions: Any, dataloader_idx: int) -> None:
        """Keep what a step in a window returns."""
        if self._return_predictions:
            self._predictions[dataloader_idx].append(self._lean.move(predictions, torch.device("cpu")))
