"""The tensors of a batch, by name, and which of their sizes may change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor

from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.training import runner
from lightning_ort.recording import replay


def fields_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name: keys, joined by ``_``, and ``batch_0``, ``batch_1``, ... of a sequence."""
    found: dict[str, Tensor] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                add(item, f"{name}_{key}".lstrip("_"))
            return
        if isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                add(item, f"{name or 'batch'}_{index}")
            return
        if value is None:
            return
        name = name or "batch"
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
            raise TypeError(
                f"The batch's {name!r} is {kind}; a training model takes tensors of numbers and booleans. Leave it out"
                " of the batch, or make it a tensor in the dataset or `collate_fn`."
            )
        if name in found:
            raise ValueError(f"Two tensors of the batch are called {name!r}: rename a key.")
        found[name] = value

    add(batch, "")
    if not found:
        hint = "Pass a batch as `training_step` takes it, a DataLoader, or a LightningDataModule."
        raise ValueError(f"The batch ({type(batch).__name__}) has no tensors. {hint}")
    return found


def rebuilt(batch: Any, fields: Mapping[str, Tensor]) -> Any:
    """Return a batch of the same structure with other tensors, in the order of :func:`fields_of`."""
    tensors = iter(fields.values())
    return replay.rebuilt(batch, lambda _: next(tensors))


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


# what runners compute: a number, the name of a size, or an operator and what it is applied to
Formula: TypeAlias = "int | str | list[Any]"
_OPERATORS = {"Add": "+", "Mul": "*", "Max": "max", "Min": "min", "CleanDiv": "//", "FloorDiv": "//"}
_OPERATORS |= {"Mod": "%", "PythonMod": "%", "Pow": "**", "PowByNatural": "**"}
_OPERATORS |= {"Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<="}
_OPERATORS |= {"StrictGreaterThan": ">", "GreaterThan": ">=", "And": "and", "Or": "or", "Not": "not"}


@dataclass
class Limits:
    """For which sizes a model is right."""

    sizes: dict[str, list[int | None]]  # the lowest and the highest value of each, by name
    # what has to hold besides: a formula, and the line where the step asks for it
    conditions: list[dict[str, Any]] = field(default_factory=list)

    def refused(self, sizes: dict[str, int]) -> str | None:
        """Why a runner refuses some sizes, or ``None``."""
        return runner.refused(sizes, {"sizes": self.sizes, "conditions": self.conditions})


def formula(expression: sympy.Basic, names: Mapping[Any, str]) -> Formula:
    """Write an expression of sizes for the runners; ``ExportFailed`` if something in it has no operator there."""
    if expression.is_Integer:
        return int(expression)
    if expression in names:
        return names[expression]
    operator = _OPERATORS.get(type(expression).__name__)
    if operator is None:
        raise ExportFailed(f"The size {expression} is none that the runners can compute.")
    return [operator, *(formula(part, names) for part in expression.args)]


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
