"""Which sizes of a batch may change."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_ort.onnx_export.training.batch import batch_size, rows


def of_distinct_sizes(fields: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return fields of some rows, a number that is no other size: equal sizes are taken for the same."""
    if batch_size(fields) == 0:
        if any(tensor.dim() for tensor in fields.values()):
            raise ValueError("The batch has no rows: pass one that has.")
        return fields
    taken = {size for tensor in fields.values() for size in tensor.shape[1:]}
    count = max(batch_size(fields), 3)
    while count in taken:
        count += 1
    return rows(fields, count)


def chosen_sizes(fields: Mapping[str, Tensor], sizes: Mapping[str, Any] | None) -> dict[str, list[int]]:
    """Return which dimensions of each field may change: those that were passed, or rows and lengths of integers."""
    if sizes is not None:
        for name, dims in sizes.items():
            if name not in fields:
                raise ValueError(f"sizes: the batch has no field {name!r}; it has {', '.join(fields)}.")
            if any(not isinstance(dim, int) or not 0 <= dim < fields[name].dim() for dim in dims):
                raise ValueError(f"sizes: {name!r} has {fields[name].dim()} dimensions; got {list(dims)}.")
        return {name: list(dims) for name, dims in sizes.items()}
    count = batch_size(fields)
    lengths = {
        int(tensor.shape[1])
        for tensor in fields.values()
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[1] > 1
    }
    return {
        name: [
            dim
            for dim, size in enumerate(tensor.shape)
            if (dim == 0 and size == count) or (dim == 1 and size in lengths)
        ]
        for name, tensor in fields.items()
    }
