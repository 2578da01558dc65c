"""Fetch the examples of a batch from tensors at once, with the same values: :data:`whole_batches`.

A DataLoader takes examples one by one and stacks them. Where a data set is made of tensors, or its ``__getitem__`` only
indexes what it has, and the loader has torch's own ``collate_fn`` and no workers, that is one operation per tensor or
array. Other examples are collated by columns (:mod:`.columns`). Only the way from the indices of a batch to the batch
is replaced: loaders, samplers, random numbers and pinned memory are torch's. Any doubt is resolved by what is replaced,
which also raises what there is to be raised.
"""

import bisect
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from lightning_ort.compat.torch import collates_as_usual, fetches_tensors_as_usual, replace_fetch, tree_map
from lightning_ort.compiler.machine.while_running import WhileRunning
from lightning_ort.strategies.columns import FEWEST, SCALARS, OneByOne, by_columns, column
from lightning_ort.world.indexing import Empty, Row, has_code_for, what_is_indexed

_INTEGERS = {int}
_LARGEST = 2**15  # numbers of an example
# what reads the examples of torch's data sets, and where they keep them
_FIELDS: dict[Any, tuple[str, ...]] = {
    TensorDataset: ("tensors",),
    Subset: ("dataset", "indices"),
    StackDataset: ("datasets",),
    ConcatDataset: ("datasets", "cumulative_sizes"),
}
_METHODS = {kind: (kind.__getitem__, getattr(kind, "__getitems__", None)) for kind in _FIELDS}


def is_made_of_tensors(dataset: Any) -> bool:
    """Return whether the examples of a data set are parts of tensors or arrays, as far as its classes say."""
    kind = _kind(dataset)
    if kind is Subset:
        return is_made_of_tensors(dataset.dataset)
    if kind in (StackDataset, ConcatDataset):
        parts = dataset.datasets
        return all(map(is_made_of_tensors, parts.values() if isinstance(parts, dict) else parts))
    return kind is not None or _is_of_arrays(_indexed(dataset))


def _indexed(dataset: Any) -> Any:
    """Return what the examples are made of now (:mod:`lightning_ort.world.indexing`); ``None`` if that is not known."""
    if has_code_for(type(dataset), "__getitems__") or "__getitems__" in getattr(dataset, "__dict__", ()):
        return None
    return what_is_indexed(dataset)


def _is_of_arrays(examples: Any) -> bool:
    if type(examples) is Row:
        held = examples.of
        return type(held) is Tensor or (type(held) is np.ndarray and not held.dtype.hasobject)
    if type(examples) in (dict, list, tuple):
        return all(map(_is_of_arrays, examples.values() if type(examples) is dict else examples))
    return type(examples) is Empty


def _kind(dataset: Any) -> type | None:
    """Return which of torch's classes reads the examples; ``None`` if it is another, or a part is overridden."""
    own = type(dataset)
    if own is Tensor:
        return Tensor
    kind = own if own in _FIELDS else next((one for one in _FIELDS if isinstance(dataset, one)), None)
    if kind is None or "__getitems__" in vars(dataset):
        return None
    if own is not kind and has_code_for(own, *_FIELDS[kind]):
        return None
    return kind if (own.__getitem__, getattr(own, "__getitems__", None)) == _METHODS[kind] else None


def _replaced(dataset: Any, one_by_one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what fetches the examples of a data set at the indices of a batch and collates them."""
    if not is_made_of_tensors(dataset) and _indexed(dataset) is None:
        return one_by_one
    at_once = True

    def fetch(indices: Any) -> Any:
        nonlocal at_once
        if at_once and type(indices) is list and len(indices) >= FEWEST and fetches_tensors_as_usual():
            try:
                return _batch(dataset, indices if set(map(type, indices)) == _INTEGERS else _integers(indices))
            except Exception:  # whatever it is, torch's own way knows what to do
                at_once = False
        return one_by_one(indices)

    return fetch


# has the DataLoaders of this process fetch whole batches while runs last
whole_batches: WhileRunning[Any] = WhileRunning(functools.partial(replace_fetch, _replaced, by_columns))


def _batch(dataset: Any, indices: list[int]) -> Any:
    """Return the examples as ``default_collate`` returns them."""
    kind = Tensor if type(dataset) is Tensor else _kind(dataset)
    if kind is Tensor:
        return _rows(dataset, _positions(indices))
    if kind is TensorDataset:
        index = _positions(indices)
        return [_rows(tensor, index) for tensor in dataset.tensors]
    if kind is Subset:
        return _batch(dataset.dataset, _of_subset(dataset.indices, indices))
    if kind is StackDataset:
        parts = dataset.datasets
        if isinstance(parts, dict):
            return {name: _batch(part, indices) for name, part in parts.items()}
        return [_batch(part, indices) for part in parts]
    if kind is ConcatDataset:
        return _of_concatenated(dataset, indices)
    if (examples := _indexed(dataset)) is None or not collates_as_usual():
        raise OneByOne
    return _filled(examples, indices, _positions(indices))


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    if tensor.__class__ is not Tensor or tensor.requires_grad:
        raise OneByOne
    # examples that are large, or not contiguous, are copied slower at once than one by one
    if tensor.numel() > _LARGEST * tensor.shape[0]:
        raise OneByOne
    if not (tensor.is_contiguous() or tensor[0].is_contiguous()):
        raise OneByOne
    return tensor.index_select(0, index if tensor.is_cpu else index.to(tensor.device))


def _filled(examples: Any, indices: list[int], index: Tensor) -> Any:
    """Return a batch of examples of which it is known what they are made of."""
    if type(examples) is dict:
        return {key: _filled(one, indices, index) for key, one in examples.items()}
    if type(examples) is Empty:
        return column([torch.Tensor()] * len(indices))
    if type(examples) is not Row:
        return [_filled(one, indices, index) for one in examples]
    held = examples.of
    if type(held) is list or type(held) is tuple:
        return column([held[one] for one in indices])
    if type(held) is np.ndarray:
        # torch warns of an array that is read-only, and takes the numbers of one that is flat one by one
        plain = held.ndim > 1 or held.dtype.type in SCALARS
        if not plain or not held.flags.writeable or not torch.empty(0).is_cpu:  # on another device by default
            raise OneByOne
        held = torch.from_numpy(held)
    return _rows(held, index)


def _positions(indices: list[int]) -> Tensor:
    return torch.from_numpy(np.array(indices, dtype=np.int64))  # a fifth of the time of torch.tensor


def _integers(indices: list[Any]) -> list[int]:
    kinds = set(map(type, indices))
    if kinds == _INTEGERS:
        return indices
    if all(issubclass(kind, np.integer) for kind in kinds):
        return list(map(int, indices))
    if kinds == {Tensor} and all(index.dtype is torch.int64 and index.dim() == 0 for index in indices):
        return torch.stack(indices).tolist()
    raise OneByOne  # to a tensor True is no number, and a slice no example


def _of_subset(own: Any, indices: list[int]) -> list[int]:
    if type(own) in (list, tuple, range):
        return _integers([own[index] for index in indices])
    is_vector = getattr(own, "ndim", 0) == 1
    if is_vector and type(own) is np.ndarray and own.dtype.kind in "iu":
        return own[np.array(indices)].tolist()
    if is_vector and type(own) is Tensor and own.dtype is torch.int64:
        return own[_positions(indices).to(own.device)].tolist()
    raise OneByOne


def _of_concatenated(dataset: ConcatDataset[Any], indices: list[int]) -> Any:
    ends = dataset.cumulative_sizes
    places: dict[int, list[int]] = {}  # in the batch, by data set
    for place, index in enumerate(indices):
        if index < 0:
            raise OneByOne
        places.setdefault(bisect.bisect_right(ends, index), []).append(place)
    parts = [
        _batch(dataset.datasets[number], [indices[place] - (ends[number - 1] if number else 0) for place in found])
        for number, found in places.items()
    ]
    if len(parts) == 1:
        return parts[0]
    order = [place for found in places.values() for place in found]
    back = _positions(sorted(range(len(order)), key=order.__getitem__))

    def merged(*same: Tensor) -> Tensor:
        if len({part.dtype for part in same}) > 1:
            raise OneByOne
        return torch.cat(same).index_select(0, back.to(same[0].device))

    return tree_map(merged, *parts)
