"""What the lean parts of one run of the Trainer share: :class:`LeanRun`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_ort._imports import LightningNamespace
from lightning_ort.compat.lightning import PRECISION, precision_of
from lightning_ort.compat.lightning_loops import CURRENT_HOOK, current_results, says_each_call, transfer_batch
from lightning_ort.strategies.lean.bars import Bars
from lightning_ort.strategies.lean.direct import DirectStep
from lightning_ort.strategies.lean.hooks import OF_CLIPPING, OF_TRANSFERS, Hooks
from lightning_ort.strategies.lean.known import Unreplaced
from lightning_ort.strategies.lean.remembered import Remembered
from lightning_ort.strategies.lean.windows import Windows

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy


class LeanRun:
    """The Trainer's run under one strategy."""

    closure_class: Any
    watch: Callable[[Any], Any]  # makes a fetcher lean
    results: Any = None  # the collection that metrics are logged to, within a batch
    logged = False  # whether the last batch has values of a step
    values: Any = None  # what a batch has logged, until somebody reads it
    values_of_bar: Any = None  # what this batch had logged when a bar asked

    def __init__(self, namespace: LightningNamespace, trainer: "pl.Trainer", strategy: "Strategy") -> None:
        self.namespace = namespace
        self.trainer: Any = trainer  # its attributes are set by its connectors
        self.strategy = strategy
        self.module: Any = strategy.lightning_module
        self.device = strategy.root_device
        self.several_processes = getattr(strategy, "world_size", 1) > 1
        self.bars = Bars(namespace, self.device)
        self.hooks = Hooks(namespace, self.bars)
        self.run_hook = self.hooks.run
        self.direct = DirectStep(self)
        self.windows = Windows(self)
        self._unreplaced = Unreplaced(namespace, trainer, self._tell)
        self.known, self._loop_is_known = self._unreplaced.known, True
        self.on = False  # whether nobody wants to know of each call that Lightning makes in this batch
        self.stage, self.sanity = "validation", False
        self.is_within_another = (
            False  # whether the Trainer logs to another loop, whose hook has called the one that runs
        )
        self.sigterm_exception = namespace.submodule("utilities.exceptions").SIGTERMException
        self._call = namespace.submodule("trainer.call")
        self._says_each_call = says_each_call(namespace)
        self.loaders = namespace.submodule("utilities.combined_loader")
        self.no_profiler = namespace.submodule("profilers").PassThroughProfiler
        base: Any = namespace.submodule("strategies.strategy").Strategy
        self._batch_to_device, self._on_train_batch_start = base.batch_to_device, base.on_train_batch_start
        self.move: Callable[..., Any] = namespace.submodule("strategies.strategy").move_data_to_device
        self._takes_index: dict[str, tuple[Any, bool]] = {}
        # of the class that defines it: people patch the one that inherits it
        self._convert_input = namespace.submodule("plugins.precision.precision").FabricPrecision.convert_input
        # whether gradients are clipped, or somebody may do something in place of that
        self.clips_gradients = Remembered(
            self._clips_gradients,
            (trainer, ("gradient_clip_val", "gradient_clip_algorithm")),
            (self.module, OF_CLIPPING),
            (strategy, (f"{PRECISION}.clip_gradients",)),
        )
        # whether a batch is converted, and whether it is moved to the device as Lightning does it, but for datamodules
        self.how_to_transfer = Remembered(
            self._transfers, (self.module, OF_TRANSFERS), (strategy, ("batch_to_device", f"{PRECISION}.convert_input"))
        )

    def begin(self) -> bool:
        """Begin a batch; return whether it can be a lean one."""
        self.on = (
            self.trainer.profiler.__class__ is self.no_profiler
            and not self._says_each_call()
            and not self.is_within_another
            and self._loop_is_known
            and self._unreplaced.in_batches()
        )
        return self.on

    def _tell(self, name: str) -> None:
        """Report what somebody has replaced in this run."""
        report: Any = self.strategy.report  # type: ignore[attr-defined]
        report.run.trainer_loop = f"lean, but Lightning's own while {name} was replaced"

    def begin_loop(self, fetcher: Any, results: Any) -> None:
        """Begin a loop over the batches that a fetcher fetches, which has its metrics in ``results``."""
        self.is_within_another = current_results(self.trainer) is not results
        self._loop_is_known = self._unreplaced.in_loop()
        self.watch(fetcher)
        self.stage = "test" if self.trainer.testing else "validation"
        self.sanity = self.trainer.sanity_checking

    def _clips_gradients(self) -> bool:
        trainer = self.trainer
        return (
            trainer.gradient_clip_val is not None
            or trainer.gradient_clip_algorithm is not None
            or not self.hooks.clips_as_asked(self.module, precision_of(self.strategy))
        )

    def _transfers(self) -> tuple[bool, bool]:
        convert, move = precision_of(self.strategy).convert_input, self.strategy.batch_to_device
        moves = getattr(move, "__func__", None) is self._batch_to_device and self.hooks.only_is_moved(self.module)
        return getattr(convert, "__func__", None) is not self._convert_input, moves

    def takes_index(self, name: str, build: Callable[[], Any]) -> bool:
        """Return whether a step takes the number of the batch, as Lightning finds it out."""
        step = getattr(self.module, name)
        known, takes = self._takes_index.get(name, (None, False))
        if known != step:
            takes = len(build()) == 2
            self._takes_index[name] = step, takes
        return takes

    def run_step(self, name: str, args: tuple[Any, ...], build: Callable[[Any, str], Any]) -> Any:
        """Run a step of an evaluation."""
        if not self.takes_index(name, lambda: build({"batch": args[0], "batch_idx": args[1]}, name)):
            args = (args[0], *args[2:])
        return self.call(name, getattr(self.strategy, name), *args)

    def call(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method as the hook or step of this name."""
        own = self.module.__dict__
        before, own[CURRENT_HOOK] = own[CURRENT_HOOK], name
        output = method(*args)
        own[CURRENT_HOOK] = before
        return output

    def to_device(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch on the device."""
        trainer = self.trainer
        converts, moves = self.how_to_transfer()
        if converts:
            batch = precision_of(self.strategy).convert_input(batch)
        if not moves or (trainer.datamodule is not None and not self.hooks.only_moves(trainer.datamodule)):
            return transfer_batch(trainer, self._call, batch, dataloader_idx)
        kind = batch.__class__
        if kind is torch.Tensor and batch.device == self.device:
            return batch
        if kind is list or kind is tuple or kind is dict:
            for item in batch.values() if kind is dict else batch:
                if item.__class__ is not torch.Tensor or item.device != self.device:
                    break
            else:
                return kind(batch)  # Lightning makes a new one too
        return self.move(batch, self.device)

    def tell_strategy(self, batch: Any, batch_idx: int) -> None:
        """Call the strategy's hook before a training step."""
        if self.tells_strategy:
            self.call("on_train_batch_start", self.strategy.on_train_batch_start, batch, batch_idx)

    @property
    def tells_strategy(self) -> bool:
        """Whether the strategy has a hook before a training step."""
        return getattr(self.strategy.on_train_batch_start, "__func__", None) is not self._on_train_batch_start


def count(progress: Any, number: int) -> None:
    """Add so many to all numbers that a progress tracks."""
    for counts in (progress.total, progress.current):
        for name in vars(counts):
            vars(counts)[name] += number


class LeanObject:
    """An object of Lightning's that does its work with fewer calls: its class is changed while a run lasts."""

    _lean: LeanRun
    stock_class: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let copies be Lightning's own."""
        twin: Any = object.__new__(self.stock_class)
        twin.__dict__ = {name: value for name, value in vars(self).items() if name != "_lean"}
        return twin.__reduce_ex__(protocol)
