"""A training step and its update, called one after the other: :class:`DirectStep`.

Lightning's loop gives the optimizer a closure, by way of the module, a wrapper, the strategy and the precision plugin,
and each of them passes it on. Where they are Lightning's own, what they lead to is called here, in the same order.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_ort.compat.lightning import AFTER_CLOSURE, WRAP_CLOSURE, lightning_optimizers
from lightning_ort.compat.lightning_loops import CURRENT_HOOK, after_closure
from lightning_ort.compat.torch_optimizers import drop_gradients
from lightning_ort.optim.fused_update import may_update

SKIPPED = "`training_step` returned `None`. If this was on purpose, ignore this warning..."  # as Lightning says it
_AROUND = ("pre_backward", "post_backward")
_RETRY = 64  # steps until it is looked again whether everything is Lightning's own
_OF_STRATEGY = ("training_step", "backward", *_AROUND, "optimizer_step")
_OF_CLOSURE = ("optimizer_step", WRAP_CLOSURE, AFTER_CLOSURE, "train_step_context", "forward_context")
_OF_PRECISION = (*_OF_CLOSURE, "backward", *_AROUND, "clip_gradients")
_OF_WRAPPER = ("step", "_on_before_step", "_on_after_step")


class DirectStep:
    """Runs steps of a :class:`~.run.LeanRun` directly, as long as nobody has replaced what is left out."""

    def __init__(self, lean: Any) -> None:
        self._lean = lean
        self._known: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self._wrapper: Any = None
        self._wait = 0  # steps that run as Lightning has them

    def may_run(self, optimizer: Any) -> bool:
        """Return whether the next step can be run directly."""
        strategy: Any = self._lean.strategy
        if strategy.is_watched:
            return False
        if self._wait:
            self._wait -= 1
            return False
        if self._wrapper is None and not self._look():
            self._wait = _RETRY
            return False
        wrappers, things = lightning_optimizers(strategy), (self._wrapper.optimizer, strategy.precision_plugin)
        is_known = wrappers == [self._wrapper] and things == (optimizer, self._known[-1][1])
        for get, thing, known in self._known:
            is_known = is_known and get(thing) == known
        if not is_known:
            self._wrapper = None
            return False
        return torch.is_grad_enabled() and may_update(optimizer)

    def _look(self) -> bool:
        """Look whether all that is left out is Lightning's own, and remember it."""
        lean = self._lean
        strategy, module, wrappers = lean.strategy, lean.module, lightning_optimizers(lean.strategy)
        if len(wrappers) != 1 or not _is_stock(lean, wrappers[0]):
            return False
        self._wrapper = wrappers[0]
        parts: Sequence[tuple[Any, Sequence[str]]] = (
            (module, ("optimizer_step", "optimizer_step")),
            (strategy, _OF_STRATEGY),
            (self._wrapper, _OF_WRAPPER),
            (strategy.precision_plugin, _OF_PRECISION),
        )
        getters = [(operator.attrgetter(*names), thing) for thing, names in parts]
        self._known = [(get, thing, get(thing)) for get, thing in getters]
        return True

    def run(self, loop: Any, optimizer: Any, batch_idx: int, args: tuple[Any, ...]) -> dict[str, Any]:
        """Run a step, with its update, for Lightning's loop of automatic optimization; return what that does."""
        lean = self._lean
        strategy: Any = lean.strategy
        own = lean.module.__dict__
        steps = loop.optim_progress.optimizer.step
        steps.total.ready += 1
        steps.current.ready += 1
        before, own[CURRENT_HOOK] = own[CURRENT_HOOK], "training_step"
        output = strategy.direct_step(args)
        own[CURRENT_HOOK] = "optimizer_step"
        loss = output.get("loss") if type(output) is dict else output
        is_captured = type(loss) is torch.Tensor and loss.is_leaf
        if is_captured and (hand_over := strategy.take_gradients(loss)) is not None:
            found = self._go_on(loop, optimizer, output, loss, hand_over)
        else:
            found = self._go_on_with_hooks(loop, optimizer, batch_idx, output)
        strategy.update(optimizer)
        own[CURRENT_HOOK] = before
        steps.total.completed += 1
        steps.current.completed += 1
        return found

    def _go_on(
        self, loop: Any, optimizer: Any, output: Any, loss: Any, hand_over: Callable[[], None]
    ) -> dict[str, Any]:
        """Do what is between a step and its update where nobody has anything of his own there."""
        lean, progress = self._lean, loop.optim_progress.optimizer.zero_grad
        found = {"loss": loss.detach().clone()}  # as Lightning's result has it
        if output is not loss:
            found |= {key: value for key, value in output.items() if key != "loss"}
        for counts in (progress.total, progress.current):
            counts.ready += 1
            counts.started += 1
            counts.completed += 1
        drop_gradients(optimizer)
        hand_over()
        if lean.clips_gradients:
            after_closure(lean.strategy.precision_plugin, lean.module, optimizer)
        return found

    def _go_on_with_hooks(self, loop: Any, optimizer: Any, batch_idx: int, output: Any) -> dict[str, Any]:
        lean, own = self._lean, self._lean.module.__dict__
        result = loop.output_result_cls.from_training_step_output(output, 1)
        if result.closure_loss is None:
            lean.closure_class.warning_cache.warn(SKIPPED)
        loop.drop_gradients(optimizer, batch_idx)
        if result.closure_loss is not None:
            own[CURRENT_HOOK] = "backward"
            lean.strategy.backward(result.closure_loss, optimizer)
            own[CURRENT_HOOK] = "optimizer_step"
        after_closure(lean.strategy.precision_plugin, lean.module, optimizer)
        return {} if result.loss is None else result.asdict()


def _is_stock(lean: Any, wrapper: Any) -> bool:
    """Whether all that is between the Trainer's loop and the step is Lightning's, or does the same."""
    strategy: Any = lean.strategy
    namespace, plugin = lean.namespace, strategy.precision_plugin
    precision: Any = namespace.submodule("plugins.precision.precision").Precision
    optimizer: Any = namespace.submodule("core.optimizer")
    kind: Any = namespace.submodule("strategies.strategy").Strategy
    return (
        strategy.is_stock_step
        and all(getattr(type(strategy), name) is getattr(kind, name) for name in _AROUND)
        and strategy.model is lean.module
        and not lean.several_processes
        and getattr(type(plugin), "stock_class", None) is precision
        and not any(name in vars(plugin) for name in _OF_PRECISION)
        and not any(name in vars(strategy) for name in _OF_STRATEGY)
        and lean.hooks.is_stock(lean.module, "optimizer_step")
        and getattr(wrapper.step, "__func__", None) is optimizer.LightningOptimizer.step
        and all(vars(wrapper)[name] is optimizer.do_nothing_closure for name in _OF_WRAPPER[1:])
    )
