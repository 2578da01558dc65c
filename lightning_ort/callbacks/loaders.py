"""A DataLoader made anew with other settings: :func:`changed`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

_KEPT = ("collate_fn", "pin_memory", "worker_init_fn", "multiprocessing_context", "generator")
_OF_WORKERS = ("prefetch_factor", "persistent_workers", "timeout")


class WholeBatches(Dataset):
    """Takes the examples of a batch from tensors at once, where a DataLoader takes and stacks them one by one.

    Args:
        dataset: A ``TensorDataset`` or tensor, or a ``Subset`` of one.

    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return the batch as ``default_collate`` makes it."""
        dataset = self._dataset
        while isinstance(dataset, Subset):
            indices = [dataset.indices[index] for index in indices]
            dataset = dataset.dataset
        chosen = torch.as_tensor(indices)
        if isinstance(dataset, Tensor):
            return dataset[chosen]
        return [tensor[chosen] for tensor in dataset.tensors]


def not_in_whole_batches(loader: Any) -> str | None:
    """Return why :class:`WholeBatches` cannot serve a loader, or ``None``."""
    if type(loader) is not DataLoader:
        return f"the data comes from a {type(loader).__name__}, not a plain torch DataLoader"
    if loader.batch_sampler is None or loader.collate_fn is not default_collate:
        return "the DataLoader makes batches with a function of its own"
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is TensorDataset:
        tensors: tuple[Tensor, ...] = dataset.tensors
    elif isinstance(dataset, Tensor):
        tensors = (dataset,)
    else:
        return f"the data is a {type(dataset).__name__}, not a TensorDataset"
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return "the data is in sparse tensors"
    return None


def fixed_batches(loader: Any) -> str | None:
    """Return why the batch size of a loader cannot be changed, or ``None``."""
    if type(loader) is not DataLoader:
        return f"the data comes from a {type(loader).__name__}, not a plain torch DataLoader"
    if loader.batch_sampler is None:
        return "its DataLoader has batch_size=None: the dataset makes the batches"
    if loader.batch_size is None:
        return f"its DataLoader has a batch sampler of its own, {type(loader.batch_sampler).__name__}"
    return None


def changed(
    loader: DataLoader, *, batch_size: int | None = None, whole_batches: bool = False, **settings: Any
) -> DataLoader:
    """Make a DataLoader with the same examples in the same order and other settings.

    Args:
        loader: The loader.
        batch_size: Another batch size.
        whole_batches: Use :class:`WholeBatches`.
        **settings: Further arguments of a DataLoader, such as ``num_workers``.

    Raises:
        ValueError: If the loader cannot be changed so; the message says why.

    """
    reasons = [fixed_batches(loader)] if batch_size is not None else []
    reasons += [not_in_whole_batches(loader)] if whole_batches else []
    if type(loader) is not DataLoader:
        reasons.append(fixed_batches(loader))
    for reason in reasons:
        if reason is not None:
            raise ValueError(f"{reason}. Leave this setting out, or have train_dataloader return a plain DataLoader.")
    arguments: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
    arguments["num_workers"] = settings.get("num_workers", loader.num_workers)
    if arguments["num_workers"] > 0:
        arguments |= {name: getattr(loader, name) for name in _OF_WORKERS}
    arguments |= settings
    dataset = loader.dataset
    if whole_batches:
        dataset, arguments["collate_fn"] = WholeBatches(dataset), _as_it_is
    return DataLoader(dataset, **arguments, **_order(loader, batch_size))


def _order(loader: DataLoader, batch_size: int | None) -> dict[str, Any]:
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    order: dict[str, Any] = {"batch_size": batch_size or loader.batch_size, "drop_last": loader.drop_last}
    if not isinstance(loader.dataset, IterableDataset):
        order["sampler"] = loader.sampler
    return order


def _as_it_is(batch: Any) -> Any:
    return batch
