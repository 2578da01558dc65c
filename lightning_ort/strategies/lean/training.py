"""One batch of a fit, around its training step: :class:`LeanEpochLoop`."""

import math
from typing import Any

from typing_extensions import override

from lightning_ort.compat import lightning_bases
from lightning_ort.compat.lightning import SIGTERM_BROADCAST, logger_connector, optimizers_of
from lightning_ort.compat.lightning_loops import BY_TIME, RESTARTING
from lightning_ort.strategies.lean.run import LeanObject, count
from lightning_ort.strategies.race.run_facts import TRAINING

_NO_BATCH = "train_dataloader yielded None. If this was on purpose, ignore this warning..."  # as Lightning says it


class LeanEpochLoop(LeanObject, lightning_bases.TrainingEpochLoop):
    """Does of Lightning's loop what somebody asked for; whatever is unusual is left to Lightning's own code."""

    @property
    def _broadcasts_sigterm(self) -> bool:
        return hasattr(self, SIGTERM_BROADCAST)

    @property
    @override
    def done(self) -> bool:
        trainer, progress = self.trainer, self.batch_progress
        if (
            self._lean.on
            and not trainer.should_stop
            and not progress.is_last_batch
            and progress.current.ready != trainer.fit_loop.max_batches
            and (self.max_steps == -1 or self.global_step < self.max_steps)
        ):
            return False
        return super().done

    @override
    def run(self, data_fetcher: Any) -> None:
        try:
            super().run(data_fetcher)
        finally:
            self._lean.bars.catch_up()

    @override
    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        self._lean.begin_loop(data_fetcher, self._results)

    @override
    def advance(self, data_fetcher: Any) -> None:
        lean, trainer = self._lean, self.trainer
        # a LeanFetcher has it, and isinstance with Lightning's abstract class is a call of Python's
        if self._restarting or "_lean" not in data_fetcher.__dict__ or not lean.begin():
            return super().advance(data_fetcher)
        if self.val_loop.__dict__[RESTARTING]:
            self.val_loop.restarting = False
        if lean.several_processes and self._broadcasts_sigterm:
            getattr(self, SIGTERM_BROADCAST)()
        progress = self.batch_progress
        total: Any = progress.total
        current: Any = progress.current
        batch, *_ = lean.windows.run(self, data_fetcher, TRAINING, current.ready) or next(data_fetcher)
        batch_idx = current.ready
        progress.is_last_batch = data_fetcher.done
        batch = lean.to_device(batch, 0)
        total.ready += 1
        current.ready += 1
        connector, module = logger_connector(trainer), lean.module
        connector.begin_batch(self._results, batch, None)
        output, skips = None, False
        if batch is None:
            self._warning_cache.warn(_NO_BATCH)
        else:
            skips = lean.run_hook(trainer, module, "on_train_batch_start", batch, batch_idx) == -1
            lean.tell_strategy(batch, batch_idx)
            if skips:
                self._skip_rest_of_epoch()
            else:
                total.started += 1
                current.started += 1
                output = self._optimize(batch, batch_idx)
        total.processed += 1
        current.processed += 1
        if lean.strategy.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if skips:
            raise StopIteration
        lean.bars.must_draw = self._may_end_or_validate()
        lean.run_hook(trainer, module, "on_train_batch_end", output, batch, batch_idx)
        connector.on_batch_end()
        total.completed += 1
        current.completed += 1
        if trainer.loggers and self._may_log():
            connector.update_train_step_metrics()
        return None

    def _optimize(self, batch: Any, batch_idx: int) -> Any:
        lean, module = self._lean, self._lean.module
        kwargs: Any = {"batch": batch, "batch_idx": batch_idx}
        if not lean.takes_index("training_step", lambda: self._build_kwargs({}, batch, batch_idx)):  # type: ignore[arg-type]
            del kwargs["batch_idx"]
        if module.automatic_optimization:
            return self.automatic_optimization.run(optimizers_of(lean.strategy)[0], batch_idx, kwargs)
        return self.manual_optimization.run(kwargs)

    def _skip_rest_of_epoch(self) -> None:
        """Do what Lightning does where a hook returned -1."""
        if "should_skip_rest_of_epoch" in self.stock_class.advance.__code__.co_varnames:  # type: ignore[attr-defined]
            self.batch_progress.is_last_batch = True
            return
        self.batch_progress.increment_processed()  # Lightning 2.5.0 and 2.5.1
        raise StopIteration

    def _may_end_or_validate(self) -> bool:
        """Whether this batch may be the last one before something else happens; Lightning decides."""
        trainer, progress = self.trainer, self.batch_progress
        if progress.is_last_batch or trainer.should_stop or trainer.__dict__.get(BY_TIME) is not None:
            return True
        ready = progress.current.ready
        if ready == trainer.fit_loop.max_batches or (self.max_steps != -1 and self.global_step >= self.max_steps):
            return True
        done, every = self._batches_to_validation()
        return not every or done % every == 0

    def _batches_to_validation(self) -> tuple[int, float]:
        """Return the batches until now, and after each how many of them the Trainer may validate; infinity if never."""
        trainer, progress = self.trainer, self.batch_progress
        ready, every = progress.current.ready, trainer.val_check_batch
        assert every is not None
        if every == math.inf:
            limit = trainer.limit_train_batches
            return ready, limit if isinstance(limit, int) and limit else math.inf
        return (progress.total.ready if trainer.check_val_every_n_epoch is None else ready), every

    def batches_to_event(self, fetcher: Any, *_: Any) -> float:
        """Return how many batches there are until one in which the Trainer does more than to train, which counts."""
        trainer = self._lean.trainer
        if (
            trainer.should_stop
            or trainer.received_sigterm
            or trainer.fast_dev_run
            or trainer.__dict__.get(BY_TIME) is not None
        ):
            return 0
        ready, accumulated = self.batch_progress.current.ready, trainer.accumulate_grad_batches
        begun = ready % accumulated  # batches whose gradients wait for others
        done, every = self._batches_to_validation()
        ends = [every - done % every if every else 0, trainer.fit_loop.max_batches - ready]
        if fetcher.length is not None:
            ends.append(fetcher.length - fetcher.fetched)
        if self.max_steps != -1:
            ends.append((self.max_steps - self.global_step) * accumulated - begun)
        if trainer.loggers and (every := trainer.log_every_n_steps):
            # all batches of an update that is logged are looked at
            ends.append(max(1, (every - 1 - self._batches_that_stepped % every) * accumulated - begun + 1))
        return min(ends)

    def count_batches(self, number: int, _: int) -> None:
        """Count batches that have run, with their updates."""
        optimizer = self.automatic_optimization.optim_progress.optimizer
        accumulated, before = self.trainer.accumulate_grad_batches, self.batch_progress.current.ready
        after = before + number
        updates = after // accumulated - before // accumulated
        count(self.batch_progress, number)
        count(optimizer.step, updates)
        count(optimizer.zero_grad, -(-after // accumulated) - -(-before // accumulated))
        self._batches_that_stepped += updates

    def _may_log(self) -> bool:
        trainer = self._lean.trainer
        every = trainer.log_every_n_steps
        return (every and (self._batches_that_stepped + 1) % every == 0) or trainer.should_stop or trainer.fast_dev_run

    @override
    def on_advance_end(self, data_fetcher: Any) -> None:
        trainer = self.trainer
        if not self._lean.on or self._skip_next_val or self._may_end_or_validate() or trainer.received_sigterm:
            self._lean.bars.catch_up()
            return super().on_advance_end(data_fetcher)
        if self._lean.strategy.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=True)
        if trainer.accumulate_grad_batches == 1 or not self._should_accumulate():
            self._batches_that_stepped += 1
        return None
