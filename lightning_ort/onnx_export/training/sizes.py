"""Which sizes of a batch may change."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
from torch import Tensor

from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.training import runner
from lightning_ort.onnx_export.training.batch import batch_size, rows

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

    def add(self, condition: Formula, line: str | None) -> None:
        """Add a condition."""
        found = {"formula": condition, "line": line}
        if found not in self.conditions:
            self.conditions.append(found)

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
