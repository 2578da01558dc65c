"""Collate the examples of a batch as ``default_collate`` does, with one operation per column: :func:`by_columns`.

torch makes a tensor of each array of each example, and reads the numbers of a column one by one as Python objects. Here
the arrays of a column are put together by one call of NumPy's, and so are numbers. Where an example holds something
whose class may have code of its own, or torch's collate functions are not the usual ones, the batch is torch's.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lightning_ort.compat.torch import collates_as_usual

FEWEST = 4  # examples: fewer are faster one by one
# of a column of them torch makes a tensor of the same dtype, unlike of other numbers of NumPy's
SCALARS: dict[type, torch.dtype] = {
    getattr(np, {"bool": "bool_"}.get(name, name)): getattr(torch, name)
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "float16", "float32")
    + ("float64", "complex64", "complex128")
}
_NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool, **SCALARS}
# nothing of the user's runs when torch collates them
_PLAIN = {Tensor, np.ndarray, str, bytes, *_NUMBERS}


class OneByOne(Exception):
    """Whether these examples can be taken together is not known."""


def by_columns() -> Callable[[Any], Any]:
    """Return a function that does what ``default_collate`` does, for the batches of one loader."""
    together = True

    def collate(items: Any) -> Any:
        nonlocal together
        if together and type(items) is list and len(items) >= FEWEST and collates_as_usual():
            try:
                return column(items)
            except Exception:  # whatever it is, torch's own function knows what to do
                together = False
        return default_collate(items)

    return collate


def column(items: Any) -> Any:
    """Return what ``default_collate`` makes of a sequence, or raise anything before code of the user's has run."""
    first = items[0]
    kinds = set(map(type, items))
    kind = type(first) if len(kinds) == 1 else None
    if kind is dict:
        return {key: column([one[key] for one in items]) for key in first}
    if kind is tuple or kind is list:
        if len(set(map(len, items))) != 1:
            raise OneByOne
        return list(map(column, zip(*items, strict=True)))
    if kind in _NUMBERS:
        return torch.empty(len(items), dtype=_NUMBERS[kind]).copy_(torch.from_numpy(np.array(items, kind)))
    if kind is np.ndarray and (made := _stacked(items)) is not None:
        return made
    if not kinds <= _PLAIN:
        raise OneByOne
    return default_collate(items)


def _stacked(arrays: Any) -> Tensor | None:
    """Return a tensor with these arrays as its rows; ``None`` if torch may arrange it otherwise, or warns or fails."""
    first, count = arrays[0], len(arrays)
    shape, dtype = first.shape, first.dtype
    if not shape:
        return None
    for one in arrays:
        flags = one.flags
        if one.shape != shape or one.dtype != dtype or not (flags.c_contiguous and flags.writeable):
            return None
    made = torch.empty((count, *shape), dtype=torch.from_numpy(first).dtype)
    # after Tensor.numpy() a tensor cannot be resized
    np.concatenate(arrays, out=np.from_dlpack(made).reshape(count * shape[0], *shape[1:]))
    return made
