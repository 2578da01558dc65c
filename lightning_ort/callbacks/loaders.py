"""A DataLoader made anew with other settings: :func:`changed`."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

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
