"""A training step and its update, called one after the other: :class:`DirectStep`.

Lightning's loop gives the optimizer a closure, by way of the module, a wrapper, the strategy and the precision plugin,
and each of them passes it on. Where they are Lightning's own, what they lead to is called here, in the same order.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_ort.compat.lightning import (
    AFTER_CLOSURE,
    MODEL,
    PRECISION,
    WRAP_CLOSURE,
    WRAPPED,
    lightning_optimizers,
    precision_of,
)
from lightning_ort.compat.lightning_loops import CURRENT_HOOK, after_closure
from lightning_ort.compat.torch_optimizers import drop_gradients
from lightning_ort.optim.fused_update import may_update
from lightning_ort.strategies.lean.remembered import Remembered

SKIPPED = "`training_step` returned `None`. If this was on purpose, ignore this warning..."  # as Lightning says it
_AROUND = ("pre_backward", "post_backward")
OF_STEP = ("training_step", "backward", "optimizer_step")  # methods of Lightning's strategy that it goes without
_OF_STRATEGY = (*OF_STEP, *_AROUND)
_OF_CLOSURE = ("optimizer_step", WRAP_CLOSURE, AFTER_CLOSURE, "train_step_context", "forward_context")
_OF_PRECISION = (*_OF_CLOSURE, "backward", *_AROUND, "clip_gradients")
_OF_WRAPPER = ("step", "_on_before_step", "_on_after_step")


class DirectStep:
    """Runs steps of a :class:`~.run.LeanRun` directly, as long as nobody has replaced what is left out."""

    def __init__(self, lean: Any) -> None:
        self._lean = lean
        self._wrappers: list[Any] = []
        self._optimizer: Callable[[], Any] = lambda: None  # returns that of steps that may be run directly, if any

    def may_run(self, optimizer: Any) -> bool:
        """Return whether the next step can be run directly."""
        strategy: Any = self._lean.strategy
        if strategy.is_watched:
            return False
        if (wrappers := lightning_optimizers(strategy)) != self._wrappers:
            self._look(wrappers)
        return self._optimizer() is optimizer and torch.is_grad_enabled() and may_update(optimizer)

    def may_evaluate(self, name: str) -> bool:
        """Return whether nothing of others is around the step of an evaluation."""
        lean, strategy, plugin = self._lean, self._lean.strategy, precision_of(self._lean.strategy)
        precision: Any = lean.namespace.submodule("plugins.precision.precision").Precision
        contexts = f"{name.replace('validation', 'val')}_context", "forward_context"
        return (
            strategy.is_stock(name)
            and strategy.model is lean.module
            and getattr(type(plugin), "stock_class", None) is precision
            and getattr(precision, contexts[0]).__module__ == precision.__module__
            and vars(plugin).keys().isdisjoint(contexts)
            and name not in vars(strategy)
        )

    def _look(self, wrappers: list[Any]) -> None:
        """Look who is to be asked whether all that is left out is Lightning's own."""
        lean, self._wrappers = self._lean, [*wrappers]
        self._optimizer = Remembered(
            functools.partial(_directly, lean, self._wrappers),
            (lean.module, ("optimizer_step",)),
            (
                lean.strategy,
                (
                    MODEL,
                    *_OF_STRATEGY,
                    *(f"stock_class.{name}" for name in OF_STEP),
                    *(f"{PRECISION}.{name}" for name in _OF_PRECISION),
                ),
            ),
            *((wrapper, (WRAPPED, *_OF_WRAPPER)) for wrapper in wrappers),
        )

    def run(self, loop: Any, optimizer: Any, batch_idx: int, args: tuple[Any, ...]) -> dict[str, Any]:
        """Run a step, with its update, for Lightning's loop of automatic optimization; return what that does."""
        lean = self._lean
        strategy: Any = lean.strategy
        own = lean.module.__dict__
        steps = loop.optim_progress.optimizer.step
        steps.total.ready += 1
        steps.current.ready += 1
        before, own[CURRENT_HOOK] = own[CURRENT_HOOK], "training_step"
        update = optimizer.step  # what the step puts in its place is for the next one
        try:
            output = strategy.direct_step(lean.module, args)
            own[CURRENT_HOOK] = "optimizer_step"
            strategy.post_training_step()
            loss = output.get("loss") if type(output) is dict else output
            is_usual = type(loss) is torch.Tensor and loop.trainer.accumulate_grad_batches == 1
            if is_usual and torch.is_grad_enabled() and (backward := strategy.take_gradients(loss)) is not None:
                found = self._go_on(loop, optimizer, output, loss, backward)
            else:
                found = self._go_on_with_hooks(loop, optimizer, batch_idx, output)
        finally:
            if not torch.is_grad_enabled():  # as after Lightning's closure
                torch.set_grad_enabled(True)
        strategy.update(optimizer, update)
        own[CURRENT_HOOK] = before
        steps.total.completed += 1
        steps.current.completed += 1
        return found

    def _go_on(self, loop: Any, optimizer: Any, output: Any, loss: Any, backward: Callable[[], None]) -> dict[str, Any]:
        """Do what is between a step and its update where nobody has anything of his own there."""
        lean, progress = self._lean, loop.optim_progress.optimizer.zero_grad
        own = lean.module.__dict__
        found = {"loss": loss.detach().clone()}  # as Lightning's result has it
        if output is not loss:
            found |= {key: value for key, value in output.items() if key != "loss"}
        for counts in (progress.total, progress.current):
            counts.ready += 1
            counts.started += 1
            counts.completed += 1
        drop_gradients(optimizer)
        own[CURRENT_HOOK] = "backward"  # hooks of tensors may log
        backward()
        own[CURRENT_HOOK] = "optimizer_step"
        if lean.clips_gradients():
            after_closure(precision_of(lean.strategy), lean.module, optimizer)
        return found

    def _go_on_with_hooks(self, loop: Any, optimizer: Any, batch_idx: int, output: Any) -> dict[str, Any]:
        lean, own = self._lean, self._lean.module.__dict__
        result = loop.output_result_cls.from_training_step_output(output, loop.trainer.accumulate_grad_batches)
        if result.closure_loss is None:
            lean.closure_class.warning_cache.warn(SKIPPED)
        loop.drop_gradients(optimizer, batch_idx)
        if result.closure_loss is not None:
            own[CURRENT_HOOK] = "backward"
            lean.strategy.backward(result.closure_loss, optimizer)
            own[CURRENT_HOOK] = "optimizer_step"
        torch.set_grad_enabled(True)  # as after Lightning's closure
        after_closure(precision_of(lean.strategy), lean.module, optimizer)
        return {} if result.loss is None else result.asdict()


def _directly(lean: Any, wrappers: list[Any]) -> Any:
    """Return the optimizer if all that is between the Trainer's loop and the step is Lightning's, or does the same."""
    strategy: Any = lean.strategy
    namespace, plugin, known = lean.namespace, precision_of(strategy), lean.known
    precision: Any = namespace.submodule("plugins.precision.precision").Precision
    nothing: Any = namespace.submodule("core.optimizer").do_nothing_closure
    is_stock = (
        len(wrappers) == 1
        and strategy.is_stock_step
        and all(getattr(type(strategy), name) is known[f"strategies.strategy.Strategy.{name}"] for name in _AROUND)
        and strategy.model is lean.module
        and not lean.several_processes
        and getattr(type(plugin), "stock_class", None) is precision
        and not any(name in vars(plugin) for name in _OF_PRECISION)
        and not any(name in vars(strategy) for name in _OF_STRATEGY)
        and lean.hooks.is_stock(lean.module, "optimizer_step")
        and getattr(wrappers[0].step, "__func__", None) is known["core.optimizer.LightningOptimizer.step"]
        and all(vars(wrappers[0])[name] is nothing for name in _OF_WRAPPER[1:])
    )
    return wrappers[0].optimizer if is_stock else None
