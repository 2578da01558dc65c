"""The training step, its backward pass and the optimizer's step.

:class:`LeanAutomatic` and :class:`LeanManual` are Lightning's loops for the two ways to optimize, :class:`LeanClosure`
is what an optimizer gets, and :class:`LeanPrecision` is where Lightning calls hooks between backward pass and step.
"""

from typing import Any

import torch
from typing_extensions import override

from lightning_ort.compat import lightning_bases
from lightning_ort.compat.lightning import lightning_optimizers
from lightning_ort.compat.lightning_loops import CURRENT_HOOK
from lightning_ort.compat.torch_optimizers import drop_gradients
from lightning_ort.strategies.lean.direct import SKIPPED
from lightning_ort.strategies.lean.run import LeanObject, LeanRun

# as Lightning says it
REFUSED = (
    "Skipping the `training_step` by returning None in distributed training is not supported."
    " It is recommended that you rewrite your training logic to avoid having to skip the step in the first place."
)


class LeanClosure(lightning_bases.Closure):
    """What the optimizer calls: training step, dropping the old gradients, backward pass."""

    def __init__(self, lean: LeanRun, loop: "LeanAutomatic", optimizer: Any, batch_idx: int, args: Any) -> None:
        self._result = None
        self._lean, self._loop, self._optimizer, self._batch_idx, self._args = lean, loop, optimizer, batch_idx, args
        self._drops = batch_idx % loop.trainer.accumulate_grad_batches == 0

    @override
    def closure(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self.closure()
        try:
            return self._run()
        finally:
            if not torch.is_grad_enabled():  # the step has switched them off
                torch.set_grad_enabled(True)

    def _run(self) -> Any:
        lean, loop = self._lean, self._loop
        output = lean.call("training_step", lean.strategy.training_step, *self._args)
        lean.strategy.post_training_step()
        if output is None and lean.several_processes:
            raise RuntimeError(REFUSED)
        result = loop.output_result_cls.from_training_step_output(output, loop.trainer.accumulate_grad_batches)
        if (loss := result.closure_loss) is None:
            self.warning_cache.warn(SKIPPED)
        if self._drops:
            loop.drop_gradients(self._optimizer, self._batch_idx)
        if loss is not None:
            lean.call("backward", lean.strategy.backward, loss, self._optimizer)
        return result


class LeanAutomatic(LeanObject, lightning_bases.AutomaticOptimization):
    """Optimization by Lightning."""

    @override
    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        lean, trainer = self._lean, self.trainer
        if not lean.on or self._skip_backward or trainer.accumulate_grad_batches != 1:
            return super().run(optimizer, batch_idx, kwargs)
        if lean.direct.may_run(optimizer):
            return lean.direct.run(self, optimizer, batch_idx, tuple(kwargs.values()))
        closure = lean.closure_class(lean, self, optimizer, batch_idx, kwargs.values())
        steps, module = self.optim_progress.optimizer.step, lean.module
        steps.total.ready += 1
        steps.current.ready += 1
        wrapper = lightning_optimizers(lean.strategy)[0]
        lean.call("optimizer_step", module.optimizer_step, trainer.current_epoch, batch_idx, wrapper, closure)
        steps.total.completed += 1
        steps.current.completed += 1
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    @override
    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        lean = self._lean
        if not lean.on or self._skip_backward:
            return super()._make_closure(kwargs, optimizer, batch_idx)
        return lean.closure_class(lean, self, optimizer, batch_idx, kwargs.values())

    def drop_gradients(self, optimizer: Any, batch_idx: int) -> None:
        """Drop the gradients of the last step, with its hooks."""
        lean, trainer, progress = self._lean, self.trainer, self.optim_progress.optimizer.zero_grad
        total: Any = progress.total
        current: Any = progress.current
        module = lean.module
        total.ready += 1
        current.ready += 1
        lean.run_hook(trainer, module, "on_before_zero_grad", optimizer)
        total.started += 1
        current.started += 1
        own = module.__dict__
        before, own[CURRENT_HOOK] = own[CURRENT_HOOK], "optimizer_zero_grad"
        if lean.hooks.is_stock(module, "optimizer_zero_grad"):
            drop_gradients(optimizer)
        else:
            module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
        own[CURRENT_HOOK] = before
        total.completed += 1
        current.completed += 1


class LeanManual(LeanObject, lightning_bases.ManualOptimization):
    """Optimization by the training step itself."""

    @override
    def advance(self, kwargs: Any) -> None:
        lean = self._lean
        if not lean.on:
            return super().advance(kwargs)
        output = lean.call("training_step", lean.strategy.training_step, *kwargs.values())
        lean.strategy.post_training_step()
        self._output = self.output_result_cls.from_training_step_output(output).asdict()
        return None


class LeanPrecision(LeanObject, lightning_bases.Precision):
    """What any precision plugin inherits: its class derives from this in place of Lightning's base class."""

    @override
    def pre_backward(self, tensor: Any, module: Any) -> Any:
        if not self._lean.on:
            return super().pre_backward(tensor, module)
        self._lean.run_hook(self._lean.trainer, module, "on_before_backward", tensor)
        return tensor

    @override
    def post_backward(self, tensor: Any, module: Any) -> Any:
        if not self._lean.on:
            return super().post_backward(tensor, module)
        closure_loss = tensor.detach()
        self._lean.run_hook(self._lean.trainer, module, "on_after_backward")
        return closure_loss

    @override
    def _after_closure(self, model: Any, optimizer: Any) -> None:
        lean = self._lean
        if not lean.on:
            return super()._after_closure(model, optimizer)
        trainer = lean.trainer
        lean.run_hook(trainer, model, "on_before_optimizer_step", optimizer)
        if not lean.clips_gradients():
            return None
        value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        return self._clip_gradients(model, optimizer, value, gradient_clip_algorithm=algorithm)
