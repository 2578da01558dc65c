"""The tensors of a batch, by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES


def fields_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name: keys, joined by ``_``, and ``batch_0``, ``batch_1``, ... of a sequence.

    Raises:
        TypeError: If something in it is no tensor, or of a dtype that ONNX has not.
        ValueError: If it is empty, or two tensors have one name.
    """
    found: dict[str, Tensor] = {}

    def add(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
            raise TypeError(
                f"The batch's {name!r} is {kind}; a training model takes tensors of numbers and booleans. Leave it out"
                " of the batch, or make it a tensor in the dataset or `collate_fn`."
            )
        if name in found:
            raise ValueError(f"Two tensors of the batch are called {name!r}: rename a key.")
        found[name] = value
        return value

    _walk(batch, "", add)
    if not found:
        raise ValueError(f"The batch ({type(batch).__name__}) has no tensors.")
    return found


def rebuilt(batch: Any, fields: Mapping[str, Tensor]) -> Any:
    """Return a batch of the same structure with other tensors."""
    return _walk(batch, "", lambda name, _: fields[name])


def _walk(value: Any, name: str, function: Callable[[str, Any], Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        items = {key: _walk(item, f"{name}_{key}".lstrip("_"), function) for key, item in value.items()}
        return items if type(value) is dict else _as_before(value, items)
    if isinstance(value, (tuple, list)):
        parts = [_walk(item, f"{name or 'batch'}_{index}", function) for index, item in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(name or "batch", value)


def _as_before(value: Any, items: dict[Any, Any]) -> Any:
    try:
        return type(value)(items)
    except Exception:  # of a class whose constructor takes something else
        return items


def resized(
    fields: Mapping[str, Tensor], dims: Mapping[str, Sequence[int]], count: int, start: int = 0
) -> dict[str, Tensor]:
    """Return fields with another size along some dimensions of each: entries from one on, repeated if there are few."""

    def pick(tensor: Tensor, dim: int) -> Tensor:
        places = (torch.arange(count, device=tensor.device) + start) % tensor.shape[dim]
        return tensor.index_select(dim, places)

    found = dict(fields)
    for name, axes in dims.items():
        for dim in axes:
            found[name] = pick(found[name], dim)
    return found


def rows(fields: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return fields with another number of rows."""
    size = batch_size(fields)
    dims = {name: [0] for name, tensor in fields.items() if tensor.dim() and tensor.shape[0] == size}
    return resized(fields, dims, count)


def batch_size(fields: Mapping[str, Tensor]) -> int:
    """Return the first size of the first field that has one; 0 if none has."""
    return next((int(tensor.shape[0]) for tensor in fields.values() if tensor.dim()), 0)
