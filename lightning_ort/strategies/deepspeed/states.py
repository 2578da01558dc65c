"""Converts ZeRO stage 1's optimizer states from DeepSpeed's form to torch's and back.

DeepSpeed flattens each parameter group into one tensor and gives each process an equal partition of it, so its
optimizers never see whole parameters. A checkpoint in that form fits one number of processes. One in torch's form, with
a state for each parameter, fits any number and any other strategy.

`ZeRO: Memory Optimizations Toward Training Trillion Parameter Models <https://arxiv.org/abs/1910.02054>`_
"""

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim

from lightning_ort.compat import deepspeed
from lightning_ort.compat.torch_optimizers import run_load_state_dict_pre_hooks
from lightning_ort.optim.registry import runs
from lightning_ort.optim.shard_files import load

log = logging.getLogger(__name__)

PARAMETER_NAMES = "optimizer_parameter_names"
# they update each element of a parameter independently, so a flattened group gets the same updates
_ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
)
# their states that are one number for each parameter
_PER_PARAMETER = {"step", "eta", "mu", "mu_product"}


def check_optimizer(optimizer: optim.Optimizer, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` if DeepSpeed cannot flatten an optimizer's groups, or that would change its updates.

    ``dtype`` is that of the precision: DeepSpeed updates weights in float32, and casts no others to it.
    """
    if reason := _flatten_unsupported_reason(optimizer):
        raise ValueError(
            f"DeepSpeed gives the optimizer a flat piece of each parameter group, but {runs(optimizer)} {reason}."
            " Use torch's Adam, AdamW or SGD, or the strategy 'ort_ddp'."
        )
    for index, group in enumerate(optimizer.param_groups):
        dtypes = {str(parameter.dtype) for parameter in group["params"] if parameter.requires_grad}
        if not dtypes:
            raise ValueError(
                f"Parameter group {index} has no parameter that requires a gradient, and DeepSpeed cannot flatten"
                " an empty group. Leave the group out."
            )
        if len(dtypes) > 1:
            raise ValueError(
                f"Parameter group {index} has parameters of {' and '.join(sorted(dtypes))}, but DeepSpeed flattens"
                " them into one tensor. Create a group for each dtype."
            )
        if not dtypes <= {str(torch.float32), str(dtype)}:
            raise ValueError(
                f"Parameter group {index} has parameters of {dtypes.pop()}, but DeepSpeed trains in {dtype}, with"
                " weights of torch.float32. Freeze or convert them, or use the strategy 'ort_zero1_native'."
            )


def _flatten_unsupported_reason(optimizer: optim.Optimizer) -> str | None:
    module = type(optimizer).__module__
    if module.startswith(("bitsandbytes", "torchao", "lightning_ort.optim.eight_bit")):
        return (
            "would also quantize the states of embeddings and small parameters, which a plain checkpoint cannot contain"
        )
    if module.startswith("torch.") and not isinstance(optimizer, _ELEMENTWISE):
        return "needs whole parameters"
    return None


@dataclass(frozen=True)
class _Place:
    """Where a parameter is in its flattened group."""

    number: int  # in the optimizer's state dict
    offset: int
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)


class DeepSpeedStates:
    """The states and float32 weights of a ``DeepSpeedZeroOptimizer`` in torch's form; call the methods on all ranks.

    ``groups`` are the parameters of each group as the module configured them; ``None`` if DeepSpeed's configuration has
    the optimizer.
    """

    def __init__(self, zero: Any, groups: Sequence[Sequence[Tensor]] | None) -> None:
        flattened = deepspeed.flattened_groups(zero)
        self.groups = groups or [[parameter for parameter, _ in group] for group in flattened]
        self._zero = zero
        self._parameters = list(itertools.chain(*self.groups))  # by their numbers in a state dict
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._places = [
            [_Place(numbers[id(parameter)], offset, parameter.shape) for parameter, offset in group]
            for group in flattened
        ]

    def state_dict(self) -> dict[str, Any]:
        """Gather the states on the CPU of rank 0; return an empty dict on the other ranks."""
        saved = deepspeed.wrapped_optimizer(self._zero).state_dict()
        sizes = [deepspeed.partition_size(self._zero, index) for index in range(len(self._places))]
        whole = _state_dict(saved, self.groups, self._places, sizes, lambda index, key, value: self._gather(value))
        return whole if dist.get_rank() == 0 else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the states of all parameters; each rank keeps its partition."""
        inner = deepspeed.wrapped_optimizer(self._zero)
        saved = run_load_state_dict_pre_hooks(inner, dict(saved))  # they expect a state for each parameter
        sizes, expected = [len(group["params"]) for group in saved["param_groups"]], [len(g) for g in self.groups]
        if sizes != expected:
            raise ValueError(
                f"The checkpoint's optimizer has parameter groups of {sizes} parameters, but this one has {expected}."
            )
        states = {}
        for index, places in enumerate(self._places):
            if state := self._flat_state(index, {place: saved["state"].get(place.number) or {} for place in places}):
                states[index] = state
        groups = [{**group, "params": [index]} for index, group in enumerate(saved["param_groups"])]
        inner.load_state_dict({**saved, "state": states, "param_groups": groups})

    def master_weights(self) -> dict[int, Tensor]:
        """Gather the float32 weights on rank 0, by the ``id`` of the parameter; return an empty dict on other ranks.

        A weight that was changed in the module since the last step is the module's.
        """
        weights: dict[int, dict[str, Tensor]] = {}
        for index, places in enumerate(self._places):
            whole = self._gather(self._weights(index))
            if whole is not None:
                _distribute(weights, places, "weight", whole, True)
        return {id(self._parameters[number]): weight["weight"] for number, weight in weights.items()}

    def load_master_weights(self, weights: Mapping[int, Tensor]) -> None:
        """Set the float32 weights, by the ``id`` of the parameter; those that are absent to the parameters' values."""
        deepspeed.copy_parameters_to_master(self._zero)
        for index, places in enumerate(self._places):
            piece = deepspeed.master_partition(self._zero, index)
            for place in places:
                weight = weights.get(id(self._parameters[place.number]))
                if weight is not None:
                    self._copy_part(index, place, weight, piece)

    def take_changed_weights(self) -> None:
        """Set the float32 weights that were changed in the module, which the next step would overwrite."""
        for index in range(len(self._places)):
            deepspeed.master_partition(self._zero, index).copy_(self._weights(index))

    def _weights(self, index: int) -> Tensor:
        """Return this rank's float32 weights of a group, with the module's values where those are not their copies."""
        master, module = (of(self._zero, index) for of in (deepspeed.master_partition, deepspeed.parameter_partition))
        module = module.to(master.device)
        return torch.where(module == master.to(module.dtype), master, module.to(master.dtype))

    def _gather(self, piece: Tensor) -> Tensor | None:
        """Gather the partitions of a tensor on rank 0 one after the other, so that no rank else needs more memory."""
        rank, world = dist.get_rank(), dist.get_world_size()
        device = deepspeed.parameter_device(self._zero)  # the process group may not take offloaded states
        if rank != 0:
            dist.send(piece.to(device).contiguous(), dst=0)
            return None
        whole = torch.empty(world * piece.numel(), dtype=piece.dtype)
        whole[: piece.numel()] = piece
        received = torch.empty_like(piece, device=device)
        for source in range(1, world):
            dist.recv(received, src=source)
            whole[source * piece.numel() : (source + 1) * piece.numel()] = received
        return whole

    def _flat_state(self, index: int, states: Mapping[_Place, Mapping[str, Any]]) -> dict[str, Any]:
        """Return this rank's partition of the states of a group's parameters."""
        state: dict[str, Any] = {}
        for key in dict.fromkeys(key for saved in states.values() for key in saved):
            values = {place: saved[key] for place, saved in states.items() if saved.get(key) is not None}
            if not values:
                continue
            first = next(iter(values.values()))
            if key in _PER_PARAMETER or not isinstance(first, Tensor):
                state[key] = values[max(values, key=lambda place: states[place].get("step", 0))]
                if key == "step" and min(values.values()) != state[key]:
                    log.warning("The checkpoint has several step counts in one parameter group; the largest is used.")
                continue
            state[key] = torch.zeros(deepspeed.partition_size(self._zero, index), dtype=first.dtype)
            for place, value in values.items():
                self._copy_part(index, place, value, state[key])
        return state

    def _copy_part(self, index: int, place: _Place, whole: Tensor, piece: Tensor) -> None:
        """Copy the part of a parameter that is in this rank's partition."""
        start = dist.get_rank() * deepspeed.partition_size(self._zero, index)
        first, last = max(place.offset, start), min(place.end, start + piece.numel())
        if first < last:
            piece[first - start : last - start] = whole.reshape(-1)[first - place.offset : last - place.offset]


def _distribute(
    states: dict[int, dict[str, Any]], places: Sequence[_Place], key: str, value: Any, is_flat: bool
) -> None:
    """Give each parameter its part of a group's state if that is flat, else all of it."""
    for place in places:
        part = value[place.offset : place.end].view(place.shape) if is_flat else value
        states.setdefault(place.number, {})[key] = part.clone() if isinstance(part, Tensor) else part


def _numbers(groups: Sequence[Sequence[Any]]) -> list[list[int]]:
    """Return the numbers of the parameters of each group in a state dict."""
    count = itertools.count()
    return [list(itertools.islice(count, len(group))) for group in groups]


def _state_dict(
    saved: Mapping[str, Any],
    groups: Sequence[Sequence[Any]],
    places: Sequence[Sequence[_Place]],
    sizes: Sequence[int],
    gather: Callable[[int, str, Tensor], Tensor | None],
) -> dict[str, Any]:
    """Return an optimizer's state dict with the parameters of ``groups`` in place of one flat tensor per group.

    ``gather`` gets the group, the key and the value of a partition with ``sizes`` elements, and returns the whole.
    """
    states: dict[int, dict[str, Any]] = {}
    for index, (of_group, size) in enumerate(zip(places, sizes, strict=True)):
        for key, value in saved["state"].get(index, {}).items():
            is_flat = isinstance(value, Tensor) and value.dim() == 1 and value.numel() == size
            whole = gather(index, key, value) if is_flat else value
            if whole is not None:
                _distribute(states, of_group, key, whole, is_flat)
    numbered = [{**group, "params": ids} for group, ids in zip(saved["param_groups"], _numbers(groups), strict=True)]
    return {"state": dict(sorted(states.items())), "param_groups": numbered}


def read_directory(directory: Path, trust: bool = False) -> dict[str, Any]:
    """Read a checkpoint directory that DeepSpeed wrote under ZeRO stage 1 or 2 as a plain Lightning checkpoint.

    It has float32 weights, and the optimizer's states in torch's form, on the CPU. The errors are those of
    :func:`~lightning_ort.optim.shard_files.load`.
    """
    folder = deepspeed.checkpoint_folder(directory)
    model_files, files = deepspeed.checkpoint_files(folder)
    if len(model_files) != 1:
        raise ValueError(f"{folder} has {len(model_files)} files with model states, not 1: stage 3 is not supported.")
    model = load(model_files[0], trust)
    try:
        if [rank for rank, _ in files] != list(range(model["dp_world_size"])):
            raise ValueError(
                f"{folder} has the optimizer states of {len(files)} processes, but {model['dp_world_size']} saved it."
            )
        shards = [load(file, trust)["optimizer_state_dict"] for _, file in files]
        checkpoint = deepspeed.passed_entries(model)
        checkpoint["state_dict"] = _weights(model, shards)
        names = checkpoint.pop(PARAMETER_NAMES, None) or [list(shapes) for shapes in model["param_shapes"]]
        checkpoint["optimizer_states"] = [_optimizer_state(shards, names, model["param_shapes"])]
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} is not a DeepSpeed checkpoint of ZeRO stage 1 or 2 ({text}).") from error
    return checkpoint


_Shards = Sequence[Mapping[str, Any]]
_Shapes = Sequence[Mapping[str, torch.Size]]


def _weights(model: Mapping[str, Any], shards: _Shards) -> dict[str, Tensor]:
    """Return all weights in float32."""
    weights = deepspeed.unpartitioned_weights(model)
    for index, shapes in enumerate(model["param_shapes"]):
        whole = torch.cat([deepspeed.saved_master_partition(shard, index) for shard in shards])
        places = _places(shards, model["param_shapes"], index, range(len(shapes)))
        for name, place in zip(shapes, places, strict=True):
            weights[name] = whole[place.offset : place.end].view(place.shape).clone()
    for name, same in deepspeed.tied_weights(model).items():
        if same in weights:
            weights[name] = weights[same]
    return weights


def _places(shards: _Shards, shapes: _Shapes, index: int, numbers: Sequence[int]) -> list[_Place]:
    offsets = deepspeed.saved_offsets(shards[0], shapes, index)
    found = zip(numbers, offsets, shapes[index].values(), strict=True)
    return [_Place(number, offset, torch.Size(shape)) for number, offset, shape in found]


def _optimizer_state(shards: _Shards, names: Sequence[Sequence[str]], shapes: _Shapes) -> dict[str, Any]:
    bases = [deepspeed.saved_optimizer(shard) for shard in shards]
    places, sizes = [], []
    for index, (group, numbers) in enumerate(zip(names, _numbers(names), strict=True)):
        by_name = dict(zip(group, numbers, strict=True))
        places.append(_places(shards, shapes, index, [by_name[name] for name in shapes[index]]))
        sizes.append(deepspeed.saved_master_partition(shards[0], index).numel())

    def concatenate(index: int, key: str, value: Tensor) -> Tensor:
        return torch.cat([base["state"][index][key] for base in bases])

    return _state_dict(bases[0], names, places, sizes, concatenate)
