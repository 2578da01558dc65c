"""How much of a Trainer's run is to come, as far as the Trainer knows: :func:`outlook_of`."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_ort._imports import LightningNamespace

if TYPE_CHECKING:
    import lightning.pytorch as pl

TRAINING = "training_step"


@dataclass(frozen=True)
class Outlook:
    """What is known about the rest of a run of the Trainer, with ``None`` for what is unknown."""

    steps: float | None  # steps of one kind that are to come
    seconds: float | None = None  # until a limit of time ends the run

    def steps_left(self, done: int, working: float) -> float | None:
        """Return how many steps of the kind are to come, after so many, and working seconds without compiling."""
        known = [] if self.steps is None else [self.steps]
        if self.seconds is not None and working > 0:
            known.append(done * self.seconds / working)
        return max(0.0, min(known)) if known else None


def outlook_of(trainer: "pl.Trainer", namespace: LightningNamespace, name: str, done: int, first_batch: int) -> Outlook:
    """Return what is known about the rest of a run, after so many of its steps of a name are done.

    ``first_batch`` is the fit loop's count of batches when the run began, which is not 0 after a checkpoint.
    """
    if trainer.state.fn != "fit":
        batches = {
            "validation_step": lambda: trainer.num_val_batches,
            "test_step": lambda: trainer.num_test_batches,
            "predict_step": lambda: trainer.num_predict_batches,
        }.get(name, lambda: [])()  # none of another run's steps, as of the fit before
        return Outlook(_known(sum(batches) - done))
    batches_done = trainer.fit_loop.total_batch_idx - first_batch
    batches_left = _training_batches(trainer)
    steps: float | None
    if name == TRAINING:
        # an optimizer that takes a closure runs the step several times for a batch
        steps = None if batches_left is None else batches_left * max(1.0, done / max(batches_done, 1))
    else:
        steps = _validation_batches(trainer, batches_left, done)
    return Outlook(steps, _seconds(trainer, namespace))


def at_window_start(trainer: "pl.Trainer") -> bool:
    """Return whether no gradients are accumulated now."""
    return not trainer.training or trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0


def _training_batches(trainer: "pl.Trainer") -> float | None:
    """Return how many batches are to be trained on, from the current one."""
    left = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        left = trainer.num_training_batches * (trainer.max_epochs - trainer.current_epoch) - trainer.fit_loop.batch_idx
    if trainer.max_steps >= 0:
        batches_per_step = float(trainer.accumulate_grad_batches)
        if not trainer.lightning_module.automatic_optimization and trainer.global_step > 0:
            batches_per_step = trainer.fit_loop.total_batch_idx / trainer.global_step
        left = min(left, (trainer.max_steps - trainer.global_step) * batches_per_step)
    return _known(left)


def _validation_batches(trainer: "pl.Trainer", training_batches: float | None, done: int) -> float | None:
    """Return how many batches are to be validated on, those of the current validation included."""
    each = _known(sum(trainer.num_val_batches))
    interval = trainer.val_check_batch  # None if it is a time
    if each is None or each == 0 or training_batches is None or interval is None:
        return None
    epoch, every = trainer.num_training_batches, trainer.check_val_every_n_epoch
    if every is None:  # the interval goes on over epochs
        validations = training_batches // interval
    elif math.isinf(epoch):
        validations = 0.0 if math.isinf(interval) else training_batches // interval
    else:
        in_epoch = max(1.0, epoch // interval)
        validations = in_epoch * (training_batches / epoch) // every
    return each * validations + each - done % each


def _seconds(trainer: "pl.Trainer", namespace: LightningNamespace) -> float | None:
    """Return the seconds until ``max_time``, or a ``Timer`` with a duration, ends the run."""
    timer = namespace.submodule("callbacks").Timer
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    left = [callback.time_remaining() for callback in callbacks if isinstance(callback, timer)]
    return min((max(0.0, seconds) for seconds in left if seconds is not None), default=None)


def _known(count: float) -> float | None:
    return max(0.0, count) if math.isfinite(count) else None
