"""Calls of torch's own test database: functions, the tensors they take, and other values and layouts of those."""

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, OpInfo, ReductionOpInfo, SampleInput, UnaryUfuncInfo
from torch.utils import _pytree as pytree

# torch's test modules forbid the process to set torch's flags, such as cuDNN's, which Trainers do
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
# random ops of the database set a seed of their own, which tracing does not capture: whoever calls sets it
for _name, _module in list(sys.modules.items()):
    if _name.startswith("torch.testing._internal") and hasattr(_module, "wrapper_set_seed"):
        _module.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # type: ignore[attr-defined]

OPS: dict[str, OpInfo] = {op.formatted_name: op for op in op_db}

INF, NAN = float("inf"), float("nan")
# what is put among the values of every tensor, in turns with the sample's own
SPECIAL = {
    "nan": [NAN, INF, -INF, -0.0, NAN],
    "inf": [INF, -INF, 0.0, INF],
    "tiny": [1e-40, -1e-40, 1e-8, -1e-8, -0.0, 1.2e-38, 0.0],
    "huge": [3e38, -3e38, 1e30, -2e38, 1e-30],
}
# torch promises no order among equal values
TIES = ("sort", "argsort", "topk", "msort")
LIMITS = [-(2**63), 2**63 - 1, -1, 0, 2**53 + 1, -7]


@dataclass
class Case:
    """One call.

    Args:
        fn: A function of tensors that returns a tuple.
        inputs: The tensors.
        mutates: Whether it writes to its first input.
        elementwise: Whether each element of the result is computed of one element of each input.
        reduces: Whether it adds up or multiplies elements, which may cancel.
        ties: Whether it lists the places of values, and those of equal values in any order.
    """

    fn: Callable[..., tuple[Any, ...]]
    inputs: list[torch.Tensor]
    mutates: bool = False
    elementwise: bool = False
    reduces: bool = False
    ties: bool = False


def samples(op: OpInfo, dtype: torch.dtype, requires_grad: bool) -> Iterator[SampleInput]:
    """The samples of an op, the same ones at each call."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # some samples are drawn from it
    yield from op.sample_inputs("cpu", dtype, requires_grad=requires_grad and op.supports_autograd)


def case_of(op: OpInfo, sample: SampleInput, in_place: bool = False) -> Case | None:
    """A sample as a function of its tensors; ``None`` where a tensor is sparse or the like."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[place] for place in places]
    if any(x.layout is not torch.strided or x.is_quantized or x.is_nested for x in tensors):
        return None
    call = op.inplace_variant if in_place else op.op
    finish = sample.output_process_fn_grad

    def fn(*given: torch.Tensor) -> tuple[Any, ...]:
        filled = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        result = call(*args, **kwargs)
        return tuple(pytree.tree_leaves(result if in_place else finish(result)))

    ties = op.name in TIES and not sample.kwargs.get("stable")
    elementwise, reduces = isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo)), isinstance(op, ReductionOpInfo)
    return Case(fn, tensors, in_place, elementwise, reduces, ties)


def copies(inputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The inputs as fresh leaves over fresh memory: same strides, same sharing, floating ones in ``dtype``."""
    storages: dict[int, torch.Tensor] = {}
    fresh: dict[int, torch.Tensor] = {}
    for x in inputs:
        if id(x) in fresh:
            continue
        target = x.dtype
        if dtype is not None and (x.is_floating_point() or x.is_complex()):
            target = dtype.to_complex() if x.is_complex() else dtype
        whole = x.detach().resolve_conj().resolve_neg()
        storage = whole.untyped_storage()
        if storage._cdata not in storages:
            length = storage.nbytes() // whole.element_size()
            storages[storage._cdata] = whole.as_strided((length,), (1,), 0).to(target, copy=True)
        flat = storages[storage._cdata]
        fresh[id(x)] = flat.as_strided(whole.size(), whole.stride(), whole.storage_offset()).detach()
        fresh[id(x)].requires_grad_(x.requires_grad)
    return [fresh[id(x)] for x in inputs]


def transposed(case: Case) -> Case | None:
    """The same values in memory with the first and last dimension swapped, or every other element of a vector."""

    def change(x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        return torch.stack([x, x], -1)[..., 0] if x.dim() else x

    return _changed(case, change)


def expanded(case: Case) -> Case | None:
    """The first row of every tensor over and over: stride 0."""
    return _changed(case, lambda x: x[:1].expand_as(x) if x.dim() and x.numel() else x)


def offset(case: Case) -> Case | None:
    """The same tensors a few elements into their memory, where vector loads are not aligned."""

    def change(x: torch.Tensor) -> torch.Tensor:
        room = x.new_zeros(x.numel() + 3)
        room[3:] = x.reshape(-1)
        return room[3:].view(x.shape)

    return _changed(case, change)


def same_twice(case: Case) -> Case | None:
    """One tensor in two places."""
    pair = _alike(case)
    if pair is None:
        return None
    inputs = list(case.inputs)
    inputs[pair[1]] = inputs[pair[0]]
    return replace(case, inputs=inputs)


def overlapping(case: Case) -> Case | None:
    """Two inputs that are views of one buffer, one element apart."""
    pair = _alike(case)
    if pair is None:
        return None
    inputs = list(case.inputs)
    first, second = (inputs[index] for index in pair)
    buffer = torch.cat([first.detach().reshape(-1), second.detach().reshape(-1)[-1:]])
    for start, index in enumerate(pair):
        view = buffer[start : start + first.numel()].view(first.shape)
        inputs[index] = view.detach().requires_grad_(inputs[index].requires_grad)
    return replace(case, inputs=inputs)


LAYOUTS: dict[str, Callable[[Case], Case | None]] = {
    "transposed": transposed,
    "stride 0": expanded,
    "offset": offset,
    "same twice": same_twice,
    "overlapping": overlapping,
}


def with_values(inputs: Sequence[torch.Tensor], kind: str) -> list[torch.Tensor] | None:
    """The inputs with special values in every other place; ``None`` where there is nothing to put them in."""
    fresh = copies(inputs)
    changed = False
    for number, x in enumerate(dict.fromkeys(fresh)):
        if kind == "limits":
            if x.dtype not in (torch.int32, torch.int64):
                continue
            lowest, highest = torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max
            values = [min(max(value, lowest), highest) for value in LIMITS]
        elif x.dtype in (torch.float32, torch.float64):
            values = SPECIAL[kind]
        else:
            continue
        if not x.numel():
            continue
        # every other element stays; turned by two for the next tensor, so that the smallest integer meets -1, and by
        # one more after each turn, so that in the end all meet all
        place = torch.arange(x.numel())
        turn = place // 2
        chosen = torch.tensor(values, dtype=x.dtype)[(turn + number * (2 + turn // len(values))) % len(values)]
        chosen, keep = chosen.view(x.shape), (place % 2 == 1).view(x.shape)
        with torch.no_grad():
            x.copy_(torch.where(keep, x, chosen))
        changed = True
    return fresh if changed else None


def _changed(case: Case, change: Callable[[torch.Tensor], torch.Tensor]) -> Case | None:
    made: dict[int, torch.Tensor] = {id(x): change(x.detach()).requires_grad_(x.requires_grad) for x in case.inputs}
    inputs = [made[id(x)] for x in case.inputs]
    lies = [(x.stride(), x.storage_offset()) for x in inputs]
    if lies == [(x.stride(), x.storage_offset()) for x in case.inputs]:
        return None
    return replace(case, inputs=inputs)


def _alike(case: Case) -> tuple[int, int] | None:
    """The places of two floating inputs that one tensor can serve; none of them a buffer, which the op may write to."""
    differentiable = any(x.requires_grad for x in case.inputs)
    places = [
        index
        for index, x in enumerate(case.inputs)
        if x.is_floating_point() and x.numel() and x.requires_grad == differentiable
    ]
    for first, second in itertools.combinations(places, 2):
        x, y = case.inputs[first], case.inputs[second]
        if x is not y and (x.shape, x.dtype) == (y.shape, y.dtype):
            return first, second
    return None
