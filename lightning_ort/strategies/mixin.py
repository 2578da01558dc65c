"""What every strategy of this package does: :class:`ORTMixin`.

The mixin overrides hooks of Lightning's strategies and calls its parts there. No part knows of the others:

- :class:`~lightning_ort.strategies.report_delivery.ReportDelivery`: the report at the end of a run
- :class:`~lightning_ort.strategies.capture.capture.Capture`: the steps of the module, compiled
- :class:`~lightning_ort.strategies.host_memory.RetainedMemory`: freed memory stays in the process
- :class:`~lightning_ort.strategies.lean.lean.Lean`: the Trainer does in each batch what somebody asked for
- :class:`~lightning_ort.strategies.dropout_masks.DropoutMasks`: masks of dropout are drawn faster
- :data:`~lightning_ort.strategies.whole_batches.whole_batches`: batches of tensors are fetched at once
- :mod:`~lightning_ort.strategies.optimizers`: other implementations of the optimizers
- :mod:`~lightning_ort.strategies.checkpoints`: checkpoint files that are complete or absent
- :class:`~lightning_ort.strategies.step_time.StepTime`: what the time of a training step is made of
- :mod:`~lightning_ort.strategies.advice`: what a GPU offers and the run leaves unused, and what would save time
- :mod:`~lightning_ort.precision.mixed`: our mixed precision in place of Lightning's
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from lightning_ort._arguments import check_keywords
from lightning_ort._imports import LightningNamespace, namespace_of
from lightning_ort._strategies import STRATEGIES, StrategyNames
from lightning_ort.compat import lightning_bases
from lightning_ort.compat.lightning import closure_of_step, hide_leaf_spec_deprecation, set_checkpoint_io
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.report.report import CompileReport
from lightning_ort.config import ORTConfig
from lightning_ort.optim.fused_update import FusedUpdate, may_update, only_own_hooks
from lightning_ort.optim.registry import OptimName
from lightning_ort.optim.swap import OptimizerSwap
from lightning_ort.precision.mixed import choose_precision
from lightning_ort.strategies.advice import advice_for, advice_on_time
from lightning_ort.strategies.capture.capture import Capture
from lightning_ort.strategies.checkpoints import atomic_io
from lightning_ort.strategies.dropout_masks import DropoutMasks
from lightning_ort.strategies.environment import read_environment
from lightning_ort.strategies.host_memory import HostMemory, RetainedMemory
from lightning_ort.strategies.lean.direct import OF_STEP
from lightning_ort.strategies.lean.lean import Lean
from lightning_ort.strategies.optimizers import SwapOptimizersCallback, choose_swap, steps_with_closure, swap_optimizers
from lightning_ort.strategies.race.run_facts import STEPS, TRAINING
from lightning_ort.strategies.race.turn import NO_CONTEXT
from lightning_ort.strategies.report_delivery import ReportDelivery
from lightning_ort.strategies.step_time import OPTIMIZER, STEP, StepTime
from lightning_ort.strategies.whole_batches import whole_batches

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

    from lightning_ort.strategies.recording.window import Window

_DEFAULT = ORTConfig()


class ORTMixin(lightning_bases.Strategy):
    """Runs the steps of the LightningModule on ONNX Runtime, under any strategy that it is put in front of.

    Args:
        config: Settings of the ONNX Runtime compiler; a mapping with the same keys will do. Fields that are left at
            their defaults may be set by the environment variable ``LIGHTNING_ORT_CONFIG``.
        optim: The implementation of the optimizers that the module configures: a name, or an
            :class:`~lightning_ort.ORTOptimizer` for its further settings. ``"auto"`` fuses torch's Adam, AdamW, SGD
            and Adagrad where torch can, and does not replace others, unless ``LIGHTNING_ORT_OPTIM`` is set.
        host_memory: ``"retain"`` keeps freed memory in the process for the next step while a run on the CPU lasts
            (glibc only), ``"default"`` returns it each time.
        **kwargs: For the strategy.

    Raises:
        TypeError: If a keyword argument is unknown.
        ValueError: If a setting is not one of the allowed ones.
    """

    namespace: ClassVar[LightningNamespace]
    strategy_name: ClassVar[str]
    _names: ClassVar[StrategyNames]
    stock_class: ClassVar[Any]  # Lightning's strategy, and methods of it, whatever somebody puts in their place
    stock_step: ClassVar[Mapping[str, Callable[..., Any]]]
    stock_backward: ClassVar[Callable[..., Any]]
    # takes the keyword arguments that Lightning's strategy passes on, such as torch's DistributedDataParallel
    wrapper: ClassVar[type | None] = None

    def __init__(
        self,
        config: ORTConfig | dict[str, Any] = _DEFAULT,
        optim: OptimName | SwapOptimizersCallback = "auto",
        host_memory: HostMemory = "retain",
        **kwargs: Any,
    ) -> None:
        self._check_arguments(kwargs)
        self._memory = RetainedMemory(host_memory)
        super().__init__(**kwargs)
        self._environment = read_environment()
        self.ort_config = self._environment.complete(config)
        self._swap = optim.swap if isinstance(optim, SwapOptimizersCallback) else OptimizerSwap(optim)
        self._capture = Capture(self.ort_config)
        self._masks = DropoutMasks()
        self._times = StepTime()
        self._delivery = ReportDelivery(self.ort_config.report)
        self._lean = Lean()
        self._accelerator_of_trainer: Accelerator | None = None
        self._updates = False  # whether the update may be called without the closure
        self._update: FusedUpdate | None = None
        self._precision_step: Any = None
        self._in_backward = False

    @classmethod
    def _check_arguments(cls, given: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError for keyword arguments that Lightning's strategy would take, and fail later."""
        for name in given.keys() & vars(_DEFAULT).keys():
            setting = f"config={{{name!r}: {given[name]!r}}}"
            raise TypeError(f"{cls.__name__} has no argument {name!r}: it is a setting of `config`, {setting}.")
        check_keywords(cls.__name__, given, _keywords_of(cls))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (namespace := namespace_of(cls)) is not None:
            cls.namespace = namespace
            stock: Any = next(base for base in cls.__mro__ if base.__module__.startswith(namespace.package))
            cls.stock_class = stock
            cls.stock_step = {name: getattr(stock, name) for name in (*OF_STEP, *STEPS)}
            cls.stock_backward = stock.backward
            read = super().precision_plugin.fget  # type: ignore[attr-defined]
            # Lightning reads it seven times a step, which a property that calls the other would double
            cls.precision_plugin = property(read, ORTMixin._set_precision_plugin)  # type: ignore[assignment]
            if cls.__module__ == namespace.module and cls.__name__ in STRATEGIES:  # not a user's class of that name
                cls.strategy_name, cls._names = STRATEGIES[cls.__name__].name, STRATEGIES[cls.__name__]

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for suffix, arguments in {"": {}, **cls._names.variants}.items():  # of a subclass with a name of its own, too
            name, description = f"{cls.strategy_name}{suffix}", cls._names.description
            strategy_registry.register(name, cls, description=description, **arguments)

    @property
    def report(self) -> CompileReport:
        """What ran where, why not, and how fast; empty before the first run."""
        return self._capture.report

    @report.setter
    def report(self, report: CompileReport) -> None:
        self._capture.report = report

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        hide_leaf_spec_deprecation()
        super().setup(trainer)
        self._capture.setup(self)
        self._delivery.setup(trainer, self.report)
        for text in self._environment.describe():
            self.report.record_choice("settings", Reason(ReasonType.ENVIRONMENT, text))
        self.report.host_memory = self._memory.setup(self.root_device)
        self._masks.setup(self.root_device, self.ort_config.cache_dir)
        whole_batches.begin(self)
        self._times.setup()
        self.report.run.trainer_loop = self._lean.setup(trainer, self, self.ort_config.debug.trainer_loop)

    @override
    def teardown(self) -> None:
        self._lean.teardown()
        self._update = None
        self._memory.teardown()
        self._masks.teardown()
        whole_batches.end(self)
        self._times.teardown()
        self.report.run.step_time = advice_on_time(self._times.found, self.lightning_module)
        self.report.dropout_masks = self._masks.text
        self._capture.teardown()
        self._delivery.teardown(self.report)
        super().teardown()

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        # here for the callback too: the next step may be to split the optimizers' states
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        swap_optimizers(choose_swap(self._swap, callbacks, self.precision_plugin, self._environment.optim), trainer)
        self._precision_step = type(self.precision_plugin).optimizer_step  # which is known
        self._updates = self.root_device.type == "cpu" and steps_with_closure(self, self.namespace)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._delivery.on_train_start()
        module = self.lightning_module
        assert module is not None
        for text in advice_for(module.trainer, module, self.root_device, self.ort_config):
            self.report.record_choice("advice", Reason(ReasonType.ADVICE, text))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._masks.begin_step()
        times = self._times
        times.steps += 1
        if times.steps >= times.next_look:
            times.look(self.lightning_module.trainer)  # type: ignore[union-attr]
        step = times.timed(STEP, super().training_step)
        with self._capture.step("training_step"):
            return step(*args, **kwargs)

    @property
    def is_stock_step(self) -> bool:
        """Whether a step is what Lightning and this class make of it, and its update may be called directly."""
        return self._updates and self.is_stock(*OF_STEP)

    def is_stock(self, *names: str) -> bool:
        """Return whether methods are what Lightning and this class make of them."""
        return all(
            getattr(type(self), name) is getattr(ORTMixin, name)
            and getattr(self.stock_class, name) is self.stock_step[name]
            for name in names
        )

    @property
    def is_watched(self) -> bool:
        """Whether the parts of the next step are timed, as Lightning calls them."""
        return self._times.steps + 1 >= self._times.next_look

    def direct_step(self, module: Any, args: tuple[Any, ...]) -> Any:
        """Do what :meth:`training_step` does, where neither a clock nor a precision plugin is around it."""
        self._masks.begin_step()
        self._times.steps += 1
        training = self._capture.training
        return module.training_step(*args) if training is None else training.run(args)

    def take_gradients(self, loss: Any) -> Callable[[], None] | None:
        """Return what does what ``loss.backward()`` does, where nothing of others runs until the update."""
        training = self._capture.training
        return None if training is None else training.take_gradients(loss)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward:  # called by what somebody has put in the place of Lightning's
            return self.stock_backward(*args, **kwargs)
        self._in_backward = True
        try:
            return self._times.timed(STEP, self._capture.backward)(super().backward, *args, **kwargs)
        finally:
            self._in_backward = False

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._times.timed(OPTIMIZER, self._optimizer_step)(*args, **kwargs)

    def _optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        is_stock = (
            self._updates
            and self.stock_class.optimizer_step is self.stock_step["optimizer_step"]
            and type(self.precision_plugin).optimizer_step is self._precision_step
        )
        if kwargs or not is_stock or not may_update(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        step = optimizer.step
        result = closure_of_step(self.precision_plugin, model or self.lightning_module, optimizer, closure)
        self.update(optimizer, step)
        return result

    def update(self, optimizer: Any, step: Callable[[], Any]) -> None:
        """Do what ``step`` of an optimizer does, where :func:`may_update` has allowed it before the training step."""
        if (update := self._update) is None or update.optimizer is not optimizer:
            update = self._update = FusedUpdate(optimizer)
        training = self._capture.training
        is_plain = training is None or training.turn.is_plain
        if is_plain and update():
            return
        with NO_CONTEXT if training is None or is_plain else training.turn.around_update():
            if is_plain or not update():
                with only_own_hooks(optimizer):
                    step()

    def may_have_window(self, name: str) -> bool:
        """Return whether the last step of this name was replayed, so that the next may be one of many."""
        step = self._capture.running.get(name)
        return step is not None and step.recorded.last is not None

    def begin_window(self, name: str, loader: int, optimizer: Any) -> "Window | None":
        """Return what replays the next steps without a look in between, and updates parameters in a fit."""
        step, fused, update = self._capture.running.get(name), self._update, None
        if step is None or (window := step.window(loader)) is None:
            return None
        if name == TRAINING:
            is_known = fused is not None and fused.optimizer is optimizer
            if not is_known or (update := fused.with_gradients(window.parameters)) is None:  # type: ignore[union-attr]
                return None
            window.steps = min(window.steps, self._times.next_look - self._times.steps - 2)
        window.begin(update, step.turn)
        return window

    def end_window(self, name: str, window: "Window") -> None:
        """Count the steps of a window."""
        self._capture.running[name].end_window(window)
        if name == TRAINING:
            self._times.steps += window.done

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation_step", super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test_step", super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("predict_step", super().predict_step, *args, **kwargs)

    def _evaluation_step(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._capture.step(name):
            return step(*args, **kwargs)

    @property
    @override
    def accelerator(self) -> "Accelerator | None":
        return self._accelerator_of_trainer or super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: "Accelerator | None") -> None:
        # not where the constructor puts one: packages that make several Trainers pass each the same strategy and
        # `accelerator`, and Lightning refuses a strategy with an accelerator of its own beside that
        self._accelerator_of_trainer = accelerator

    def _set_precision_plugin(self, plugin: "Precision | None") -> None:
        set_plugin = super(ORTMixin, type(self)).precision_plugin.fset  # type: ignore[attr-defined]
        set_plugin(self, plugin)  # first as it is: a strategy may refuse it
        set_plugin(self, choose_precision(plugin, self.namespace))

    @property
    @override
    def checkpoint_io(self) -> "CheckpointIO":
        return atomic_io(self, self.namespace)

    @checkpoint_io.setter
    def checkpoint_io(self, io: "CheckpointIO | None") -> None:
        set_checkpoint_io(self, io)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # a copy of the strategy has its own
        parts = ("_memory", "_masks", "_times", "_capture", "_delivery", "_lean")
        return {**state, "_update": None, **{name: copy.copy(state[name]) for name in parts}}


def _keywords_of(kind: type[ORTMixin]) -> list[str]:
    """Return the keyword arguments of a strategy: ours, those of Lightning's strategy, and those of its wrapper."""
    order = kind.__mro__
    last = order.index(kind.stock_class)
    kinds = [*order[order.index(ORTMixin) : last + 1], *([kind.wrapper] if kind.wrapper else [])]
    parameters = [one for base in kinds for one in inspect.signature(base.__init__).parameters.values()]  # type: ignore[misc]
    names = dict.fromkeys(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
    return [name for name in names if name not in ("self", "module")]
