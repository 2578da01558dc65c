"""How a fit runs, where the Trainer has no argument for it: :class:`TrainingSettingsCallback`."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_ort._arguments import check_choice, check_integer, names_its_arguments, passed
from lightning_ort._imports import LightningNamespace, namespace_of
from lightning_ort.compat import lightning_bases

if TYPE_CHECKING:
    import lightning.pytorch as pl


_OWNER = "ORTTrainingSettings"

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@names_its_arguments
class TrainingSettingsCallback(lightning_bases.Callback):
    """Sets the training batches, the layout, the threads and what is recomputed, for the time of a fit.

    ``lightning-ort tune`` writes it into its configuration. Of the data it changes what ``train_dataloader`` of the
    LightningDataModule or the LightningModule returns: that has to be a plain ``DataLoader``.

    Args:
        batch_size: Examples in a batch.
        num_workers: Processes that load data.
        pin_memory: Have the data in memory from which a GPU copies faster.
        persistent_workers: Keep the processes from epoch to epoch.
        prefetch_factor: Batches that each process has ready.
        channels_last: Keep the weights of convolutions in the memory layout in which their kernels are fastest.
        threads: Threads of torch's operations.
        checkpoint_blocks: Keep only the inputs of repeated blocks, and compute the rest again in the backward pass.

    Raises:
        ValueError: If a value is not allowed.
        TypeError: If a value has the wrong type.

    Example::

        Trainer(callbacks=ORTTrainingSettings(channels_last=True))
    """

    def __init__(
        self,
        batch_size: int | None = None,
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool | None = None,
        prefetch_factor: int | None = None,
        channels_last: bool = False,
        threads: int | None = None,
        checkpoint_blocks: bool = False,
    ) -> None:
        lowest = {"batch_size": 1, "num_workers": 0, "prefetch_factor": 1, "threads": 1}
        for name, value in zip(lowest, (batch_size, num_workers, prefetch_factor, threads), strict=True):
            if value is not None:
                check_integer(name, value, lowest[name], owner=_OWNER)
        for name, value in (("channels_last", channels_last), ("checkpoint_blocks", checkpoint_blocks)):
            check_choice(name, value, (True, False), _OWNER)
        of_workers = {"persistent_workers": persistent_workers, "prefetch_factor": prefetch_factor}
        for name, value in of_workers.items():
            if value and num_workers == 0:
                raise ValueError(f"{passed(name, value, _OWNER)}: needs num_workers of 1 or more.")
        settings = {"num_workers": num_workers, "pin_memory": pin_memory, **of_workers, "batch_size": batch_size}
        self._loader: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        self._channels_last, self._threads, self._checkpoint_blocks = channels_last, threads, checkpoint_blocks
        self._undo: list[Callable[[], Any]] = []

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            return
        if self._threads is not None:
            self._undo.append(functools.partial(torch.set_num_threads, torch.get_num_threads()))
            torch.set_num_threads(self._threads)
        if self._channels_last:
            pl_module.to(memory_format=torch.channels_last)
        if self._checkpoint_blocks:
            self._recompute_blocks(pl_module)
        if self._loader:
            self._change_data(trainer, pl_module)

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._restore()

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()

    @property
    def _namespace(self) -> LightningNamespace:
        namespace = namespace_of(type(self))
        assert namespace is not None
        return namespace

    def _recompute_blocks(self, module: nn.Module) -> None:
        blocks = list(repeated_blocks(module))
        if not blocks:
            raise self._namespace.misconfiguration(
                f"{_OWNER}(checkpoint_blocks=True): {type(module).__name__} has no ModuleList or Sequential with two or"
                " more blocks of one class. Leave the setting out."
            )
        for block in blocks:
            block.forward = _recomputing(block, block.forward)
            self._undo.append(functools.partial(delattr, block, "forward"))

    def _change_data(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        is_overridden = self._namespace.submodule("utilities.model_helpers").is_overridden
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        owner: Any = datamodule if datamodule is not None else module
        if not is_overridden("train_dataloader", owner):
            raise self._namespace.misconfiguration(
                f"{_OWNER} cannot change a DataLoader that is passed to Trainer.fit: pass a LightningDataModule, or"
                " define train_dataloader in the module."
            )
        original = owner.train_dataloader
        namespace = self._namespace

        @functools.wraps(original)
        def train_dataloader() -> Any:
            try:
                return changed(original(), **self._loader)
            except ValueError as error:
                settings = ", ".join(f"{name}={value!r}" for name, value in self._loader.items())
                raise namespace.misconfiguration(f"{_OWNER}({settings}): {error}") from None

        owner.train_dataloader = train_dataloader
        self._undo.append(functools.partial(delattr, owner, "train_dataloader"))


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks of which a list has two or more of one class with children of their own."""
    for child in module.children():
        found: list[nn.Module] = []
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            kinds = [type(block) for block in child]
            found = [block for block in child if kinds.count(type(block)) > 1 and any(True for _ in block.children())]
        if found:
            yield from found
        else:
            yield from repeated_blocks(child)


@contextmanager
def _statistics_kept(norms: list[Any]) -> Iterator[None]:
    """Keep the statistics of batch norms as they are: the forward pass has updated them."""
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def _recomputing(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def norms() -> list[Any]:  # asked in the first step: Lightning may replace batch norms before it
        return [child for child in block.modules() if isinstance(child, BATCH_NORMS)]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(norms())

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            # a graph of torch.compile writes to statistics once anyway
            plain = torch.compiler.is_compiling() or not norms()
            again: dict[str, Any] = {} if plain else {"context_fn": contexts}
            return checkpoint(forward, *args, use_reentrant=False, **again, **kwargs)
        return forward(*args, **kwargs)

    return recomputing


_KEPT = ("collate_fn", "pin_memory", "worker_init_fn", "multiprocessing_context", "generator")
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "timeout")


def fixed_batches(loader: Any) -> str | None:
    """Return why the batch size of a loader cannot be changed, or ``None``."""
    if type(loader) is not DataLoader:
        return f"the data comes from a {type(loader).__name__}, not a plain torch DataLoader"
    if loader.batch_sampler is None:
        return "its DataLoader has batch_size=None: the dataset makes the batches"
    if loader.batch_size is None:
        return f"its DataLoader has a batch sampler of its own, {type(loader.batch_sampler).__name__}"
    return None


def changed(loader: DataLoader, *, batch_size: int | None = None, **settings: Any) -> DataLoader:
    """Make a DataLoader with the same examples in order and other settings; ``ValueError`` if that cannot be."""
    reason = fixed_batches(loader)
    if reason is not None and (batch_size is not None or type(loader) is not DataLoader):
        raise ValueError(f"{reason}. Leave this setting out, or have train_dataloader return a plain DataLoader.")
    arguments: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
    arguments["num_workers"] = settings.get("num_workers", loader.num_workers)
    if arguments["num_workers"] > 0:
        arguments |= {name: getattr(loader, name) for name in _OF_WORKERS}
    arguments |= settings
    return DataLoader(loader.dataset, **arguments, **_order(loader, batch_size))


def _order(loader: DataLoader, batch_size: int | None) -> dict[str, Any]:
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    order: dict[str, Any] = {"batch_size": batch_size or loader.batch_size, "drop_last": loader.drop_last}
    if not isinstance(loader.dataset, IterableDataset):
        order["sampler"] = loader.sampler
    return order
