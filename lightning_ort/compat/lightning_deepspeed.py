"""Lightning's classes for DeepSpeed, with public names for what is overridden or called (lightning 2.5, 2.6)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ort.compat import lightning_bases

if TYPE_CHECKING:
    import lightning.pytorch as pl


class DeepSpeedNames(lightning_bases.DeepSpeedStrategy):
    """Has a method of its own for each private one of ``DeepSpeedStrategy`` that a subclass changes."""

    def check_configuration(self) -> None:
        """Called before the configuration is completed."""

    def complete_batch_sizes(self, complete: Callable[[], None]) -> None:
        """Complete the configuration by the sizes of batches, as ``complete`` does."""

    def optimizer_and_scheduler(self) -> tuple[Optimizer, Any]:
        """Return what the engine gets."""
        raise NotImplementedError

    def start_training(self, start: Callable[[nn.Module], None], model: nn.Module) -> None:
        """Make the engine that trains, as ``start`` does."""

    def start_inference(self, model: nn.Module) -> None:
        """Prepare what evaluates."""

    @override
    def _format_config(self) -> None:
        self.check_configuration()
        super()._format_config()

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        self.complete_batch_sizes(super()._format_batch_size_and_grad_accum_config)

    @override
    def _auto_select_batch_size(self) -> int:
        try:
            return super()._auto_select_batch_size()
        except AttributeError:  # a loader without a batch sampler
            return 1

    @override
    def _init_optimizers(self) -> tuple[Optimizer, Any]:
        return self.optimizer_and_scheduler()

    @override
    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        self.start_training(super()._initialize_deepspeed_train, model)

    @override
    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        self.start_inference(model)

    @property
    def batch_size(self) -> int:
        """The size of the Trainer's batches."""
        return self._auto_select_batch_size()

    def start_processes_by(self, method: Any) -> None:
        """Set how Lightning starts the other processes."""
        self._start_method = method

    def take_precision(self, plugin: Any) -> None:
        """Set the precision plugin without Lightning's own checks."""
        self._precision_plugin = plugin

    def tell_node(self) -> None:
        """Tell DeepSpeed by environment variables which process this is."""
        self._set_node_environment_variables()

    def reset_configuration(self, config: dict[str, Any]) -> None:
        """Take a configuration that is not completed yet."""
        self.config, self._config_initialized = config, False


class DeepSpeedPrecisionNames(lightning_bases.DeepSpeedPrecision):
    """The same for ``DeepSpeedPrecision``."""

    def around_hooks(self, module: "pl.LightningModule", *names: str) -> AbstractContextManager[None]:
        """Return what is entered while these hooks are called, which see gradients."""
        raise NotImplementedError

    @override
    def post_backward(self, tensor: Any, module: Any) -> Any:
        with self.around_hooks(module, "on_after_backward"):
            return super().post_backward(tensor, module)

    @override
    def _after_closure(self, model: "pl.LightningModule", optimizer: Any) -> None:
        with self.around_hooks(model, "on_before_optimizer_step", "configure_gradient_clipping"):
            super()._after_closure(model, optimizer)
