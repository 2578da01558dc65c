"""Private names of Lightning."""

import functools
import operator
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from lightning_ort._shims import Shims

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.strategies import Strategy


def chosen_checkpoint_io(strategy: "Strategy") -> "CheckpointIO | None":
    """Return the checkpoint IO that a strategy was given, without Lightning's default (2.6)."""
    return strategy._checkpoint_io


def set_checkpoint_io(strategy: "Strategy", io: "CheckpointIO | None") -> None:
    """Do what Lightning's setter of ``checkpoint_io`` does, for a class that overrides the property (2.6)."""
    strategy._checkpoint_io = io


def wrap_start_of_scripts(launcher: Any, context: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Enter a context while a launcher starts the script once per device; others, and a wrapped one, stay (2.6)."""
    start = getattr(launcher, "_call_children_scripts", None)  # a launcher that forks or spawns has none
    if start is None or "_call_children_scripts" in vars(launcher):
        return

    def start_in_context() -> None:
        with context(launcher):
            start()

    launcher._call_children_scripts = start_in_context


def hand_over(launcher: Any, name: str, get: Callable[[Any], Any], put: Callable[[Any, Any], None]) -> None:
    """Have a launcher that forks or spawns also hand something over from its first process to this one (2.6).

    ``get`` takes that process's Trainer, ``put`` this one's and what ``get`` returned; both are pickled.
    """
    more = getattr(launcher, "get_extra_results", None)  # a launcher that starts scripts has none
    if more is None or "get_extra_results" in vars(launcher):
        return
    launcher.get_extra_results = functools.partial(_and_more, more, name, get)
    launcher.update_main_process_results = functools.partial(_put, launcher.update_main_process_results, name, put)


def _and_more(inherited: Callable[[Any], dict[str, Any]], name: str, get: Callable[[Any], Any], trainer: Any) -> Any:
    return {**inherited(trainer), name: get(trainer)}


def _put(
    inherited: Callable[..., None], name: str, put: Callable[[Any, Any], None], trainer: Any, extra: dict[str, Any]
) -> None:
    put(trainer, extra[name])
    inherited(trainer, extra)


SIGTERM_BROADCAST = "_broadcast_sigterm_tensor"  # the method of a loop, since 2.6.0


def set_sigterm_handler(shims: Shims, trainer: "pl.Trainer", handler: Callable[[int, Any], None]) -> None:
    """Replace what Lightning itself does at SIGTERM; handlers that the user installed still run (2.6)."""
    shims.put(trainer._signal_connector, "_sigterm_notifier_fn", handler)


def leave_out_sigterm_broadcast(shims: Shims, trainer: "pl.Trainer") -> None:
    """Let training batches begin without the flag that rank 0 broadcasts since Lightning 2.6."""
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, SIGTERM_BROADCAST):
        shims.put(loop, SIGTERM_BROADCAST, _broadcast_nothing)


def _broadcast_nothing() -> None:
    pass


def end_after_this_batch(trainer: "pl.Trainer") -> None:
    """Let the fit loop save its progress and raise ``SIGTERMException`` after the running batch (2.6)."""
    trainer._signal_connector.received_sigterm = True


def train_fetcher(trainer: "pl.Trainer") -> Any:
    """Return what fetches batches in a fit; its ``iterator`` is what it asks for the next one (2.6)."""
    return trainer.fit_loop._data_fetcher


LOGGED = "_logger_connector"  # the attribute of a Trainer that has what was logged (2.6)
logger_connector: Callable[[Any], Any] = operator.attrgetter(LOGGED)


def is_mock_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether Lightning made an optimizer because ``configure_optimizers`` returned ``None`` (2.6)."""
    return type(optimizer).__name__ == "_MockOptimizer"


def log_to_loggers(trainer: "pl.Trainer", figures: dict[str, float]) -> None:
    """Log figures with the step and epoch that Lightning gives its own metrics (2.6)."""
    logger_connector(trainer).log_metrics(figures)


def hide_leaf_spec_deprecation() -> None:
    """Hide a warning about code of Lightning 2.6, which each fit causes under torch 2.13, with any strategy."""
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")


# DeepSpeed


def has_training_data(trainer: Any) -> bool:
    """Return whether the Trainer has a training dataloader, or a module or datamodule with one (Lightning 2.6)."""
    return trainer.fit_loop._data_source.is_defined()


def deepspeed_dtype(plugin: Any) -> torch.dtype:
    """Return the dtype in which DeepSpeed trains under a ``DeepSpeedPrecision`` (Lightning 2.6)."""
    return plugin._desired_dtype


# captured steps

TRAINER_ATTRIBUTE = "_trainer"
"""The attribute of a LightningModule with its Trainer, or ``None`` (2.6)."""

# the callbacks of the Trainer of a LightningModule, without properties (2.6)
callbacks_of: Callable[[Any], list[Any]] = operator.attrgetter(f"{TRAINER_ATTRIBUTE}.callbacks")


# attributes of a strategy, its precision plugin or ``None``, and of a wrapper of an optimizer, the optimizer (2.6)
PRECISION, WRAPPED = "_precision_plugin", "_optimizer"
MODEL = "_model"  # and what it calls in each step, if not the module (2.6)
# what a strategy's properties return (2.6)
optimizers_of: "Callable[[Strategy], list[Any]]" = operator.attrgetter("_optimizers")
precision_of: "Callable[[Strategy], Any]" = operator.attrgetter(PRECISION)
# the wrappers of a strategy's optimizers that `self.optimizers()` returns, in a list that is new with them (2.6)
lightning_optimizers: "Callable[[Strategy], list[Any]]" = operator.attrgetter("_lightning_optimizers")


def backward_with(strategy: "Strategy", run: Callable[[Any], bool], loss: torch.Tensor, *args: Any) -> torch.Tensor:
    """Do what ``Strategy.backward`` does, with a function that computes gradients if it returns True (2.6)."""
    module, precision = strategy.lightning_module, strategy.precision_plugin
    assert module is not None
    strategy.pre_backward(loss)
    loss = precision.pre_backward(loss, module)
    if not run(loss):
        precision.backward(loss, module, *args)
    loss = precision.post_backward(loss, module)
    strategy.post_backward(loss)
    return loss


# methods of a precision plugin: around the closure of an optimizer's step, and what is between it and the update (2.6)
WRAP_CLOSURE, AFTER_CLOSURE = "_wrap_closure", "_after_closure"


def closure_of_step(precision: Any, model: Any, optimizer: Any, closure: Callable[[], Any]) -> Any:
    """Run the closure of an optimizer's step, the hooks before the update and clipping, as ``Precision`` does (2.6)."""
    return getattr(precision, WRAP_CLOSURE)(model, optimizer, closure)


def is_compiled_by_lightning(module: Any) -> bool:
    """Return whether a module is a LightningModule that was compiled before the Trainer got it (2.6)."""
    return getattr(module, "_compiler_ctx", None) is not None


def with_reads(connector: Any, wrap: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> Any:
    """Return what shares the state of that attribute, but has what reads logged values wrapped (2.6)."""
    kind, names = type(connector), ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    cls = type(kind.__name__, (kind,), {name: property(wrap(getattr(kind, name).fget)) for name in names})
    twin: Any = object.__new__(cls)
    twin.__dict__ = vars(connector)
    return twin
