"""Between DeepSpeed's form of ZeRO stage 1's optimizer states and torch's.

DeepSpeed flattens each parameter group into one tensor, pads it, and gives each process an equal piece. The optimizer
sees nothing but that piece. A checkpoint in this form fits one number of processes; one in torch's form, with a state
for each parameter, fits any, and any other strategy.

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

from lightning_ort.optim.shard_files import load

log = logging.getLogger(__name__)

PARAMETER_NAMES = "optimizer_parameter_names"
# what DeepSpeed adds to the checkpoint that it is given
_DEEPSPEED_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    "ds_version",
}
# each element of a parameter is updated by itself, so a flat piece of a group is updated as the parameters would be
_ELEMENTWISE = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


def why_not_flat(optimizer: optim.Optimizer) -> str | None:
    """Why an optimizer does not do the same to flat pieces of parameters as to the parameters, or ``None``."""
    module = type(optimizer).__module__
    if module.startswith(("bitsandbytes", "torchao", "lightning_ort.optim.eight_bit")):
        return "would give embeddings and small parameters quantized states too, which no plain checkpoint could hold"
    if module.startswith("torch.") and not isinstance(optimizer, _ELEMENTWISE):
        return "looks at whole parameters"
    return None


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies in its flattened group."""

    number: int  # in the optimizer's state dict
    offset: int
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)


class FlatShards:
    """The states of a DeepSpeed optimizer, in torch's form.

    Args:
        zero: DeepSpeed's ``DeepSpeedZeroOptimizer``, around the optimizer that the module configured.
        groups: The parameters of each group, as they were configured; frozen ones have no state.

    """

    def __init__(self, zero: Any, groups: Sequence[Sequence[Tensor]]) -> None:
        self.groups = groups
        self._zero = zero
        self._sizes = [len(group) for group in groups]
        self._parameters = list(itertools.chain(*groups))  # by the numbers that a state dict gives them
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._places = [
            [
                _Place(numbers[id(parameter)], offset, parameter.shape)
                for parameter, offset in zip(parameters, offsets, strict=True)
            ]
            for parameters, offsets in zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Gather the states on rank 0, one piece after the other; call it on all ranks.

        Returns:
            A state dict as the optimizer would have it in one process, on the CPU; empty on the other ranks.

        """
        saved = self._zero.optimizer.state_dict()
        states: dict[int, dict[str, Any]] = {}
        for index, places in enumerate(self._places):
            size = self._zero.partition_size[index]
            for key, value in saved["state"].get(index, {}).items():
                flat = _is_flat(value, size)
                whole = self._gather(value) if flat else value
                if whole is not None:
                    _deal(states, places, key, whole, flat)
        return _whole(states, saved["param_groups"], _numbers(self._sizes)) if dist.get_rank() == 0 else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load whole states; each rank keeps its piece.

        Args:
            saved: A state dict in torch's form, for all parameters.

        Raises:
            ValueError: If it is of another algorithm, or of other parameter groups.

        """
        inner = self._zero.optimizer
        for hook in inner._optimizer_load_state_dict_pre_hooks.values():  # they expect a state for each parameter
            saved = hook(inner, saved) or saved
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        if sizes != self._sizes:
            raise ValueError(
                f"The checkpoint's optimizer has parameter groups of {sizes} parameters, this one of {self._sizes}."
            )
        states = {}
        for index, places in enumerate(self._places):
            if state := self._flat_state(index, {place: saved["state"].get(place.number) or {} for place in places}):
                states[index] = state
        groups = [{**group, "params": [index]} for index, group in enumerate(saved["param_groups"])]
        inner.load_state_dict({**saved, "state": states, "param_groups": groups})

    def master_weights(self) -> dict[int, Tensor] | None:
        """Gather on rank 0 the float32 weights that the optimizer updates; call it on all ranks.

        Returns:
            By the id of the module's parameter; ``None`` on the other ranks.

        """
        weights: dict[int, dict[str, Tensor]] = {}
        for index, places in enumerate(self._places):
            whole = self._gather(self._zero.single_partition_of_fp32_groups[index].detach())
            if whole is not None:
                _deal(weights, places, "weight", whole, True)
        if dist.get_rank() != 0:
            return None
        return {id(self._parameters[number]): weight["weight"] for number, weight in weights.items()}

    def load_master_weights(self, weight_of: Callable[[Tensor], Tensor | None]) -> None:
        """Give the optimizer the weights to go on from.

        Args:
            weight_of: The weight for one of the module's parameters, or ``None`` for the parameter as it is.

        """
        self._zero.refresh_fp32_params()
        for index, places in enumerate(self._places):
            piece = self._zero.single_partition_of_fp32_groups[index].detach()
            for place in places:
                weight = weight_of(self._parameters[place.number])
                if weight is not None:
                    self._copy_part(index, place, weight, piece)

    def _gather(self, piece: Tensor) -> Tensor | None:
        """Collect a tensor's pieces on rank 0, in turn: no process but that one ever has more than one."""
        rank, world = dist.get_rank(), dist.get_world_size()
        device = self._zero.bit16_groups_flat[0].device  # offloaded states travel by way of it
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
        """Cut this rank's piece out of the states of a group's parameters."""
        state: dict[str, Any] = {}
        for key in dict.fromkeys(key for saved in states.values() for key in saved):
            values = {place: saved[key] for place, saved in states.items() if key in saved}
            first = next(iter(values.values()))
            if key == "step" or not isinstance(first, Tensor):
                state[key] = max(values.values())
                if min(values.values()) != state[key]:
                    log.warning("The checkpoint counts the parameters' steps apart, a flattened group all together.")
                continue
            state[key] = torch.zeros(self._zero.partition_size[index], dtype=first.dtype)
            for place, value in values.items():
                self._copy_part(index, place, value, state[key])
        return state

    def _copy_part(self, index: int, place: _Place, whole: Tensor, piece: Tensor) -> None:
        """Copy what this rank has of one parameter."""
        start = dist.get_rank() * self._zero.partition_size[index]
        first, last = max(place.offset, start), min(place.end, start + piece.numel())
        if first < last:
            piece[first - start : last - start] = whole.reshape(-1)[first - place.offset : last - place.offset]


def _numbers(sizes: Sequence[int]) -> list[list[int]]:
    """The numbers that a state dict gives to the parameters of each group."""
    count = itertools.count()
    return [list(itertools.islice(count, size)) for size in sizes]


def _is_flat(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == size


def _deal(states: dict[int, dict[str, Any]], places: Sequence[_Place], key: str, value: Any, flat: bool) -> None:
    """Give each parameter its part of a group's state: a piece of what is flat, all of what is not."""
    for place in places:
        part = value[place.offset : place.end].view(place.shape) if flat else value
        states.setdefault(place.number, {})[key] = part.clone() if isinstance(part, Tensor) else part


def _whole(
    states: Mapping[int, Any], flat_groups: Sequence[Mapping[str, Any]], numbers: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Make a state dict of the parameters' states, and of groups that knew one flat tensor each."""
    groups = [{**group, "params": ids} for group, ids in zip(flat_groups, numbers, strict=True)]
    return {"state": dict(sorted(states.items())), "param_groups": groups}


def read_directory(directory: Path, trust: bool = False) -> dict[str, Any]:
    """Read a checkpoint that DeepSpeed wrote under ZeRO stage 1 or 2, for any number of processes.

    Args:
        directory: As given to ``Trainer.save_checkpoint``.
        trust: Call the functions and classes, too, that its files name.

    Returns:
        A plain Lightning checkpoint, on the CPU: float32 weights and, in torch's form, the optimizer's states.

    Raises:
        NotTrusted: If a file names something to call that is not known to be harmless.
        ValueError: If it is not such a directory, or parts of it are missing or damaged.

    """
    latest = directory / "latest"
    if not latest.is_file():
        raise ValueError(f"{directory} is not a checkpoint of DeepSpeed: it has no file 'latest'.")
    name = latest.read_bytes()[:1000].decode(errors="replace").strip()
    folder = directory / name
    if not name or Path(name).name != name or not folder.is_dir():
        raise ValueError(f"{directory} is not a checkpoint of DeepSpeed: 'latest' names {name!r}, which is not in it.")
    model_files = sorted(folder.glob("*mp_rank_*_model_states.pt"))
    if len(model_files) != 1:
        raise ValueError(f"{folder} has {len(model_files)} files with model states, not 1: stage 3 is not supported.")
    model = load(model_files[0], trust)
    files = sorted(folder.glob("*pp_rank_*_optim_states.pt"), key=_rank)
    try:
        if [_rank(file) for file in files] != list(range(model["dp_world_size"])):
            raise ValueError(
                f"{folder} has the optimizer states of {len(files)} processes, and {model['dp_world_size']} saved them."
            )
        shards = [load(file, trust)["optimizer_state_dict"] for file in files]
        checkpoint = {key: value for key, value in model.items() if key not in _DEEPSPEED_KEYS}
        checkpoint["state_dict"] = _weights(model, shards)
        names = checkpoint.pop(PARAMETER_NAMES, None) or [list(shapes) for shapes in model["param_shapes"]]
        checkpoint["optimizer_states"] = [_join(shards, names, model["param_shapes"])]
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} is not what DeepSpeed writes under ZeRO stage 1 or 2 ({text}).") from error
    return checkpoint


def _rank(file: Path) -> int:
    rank = file.name.partition("pp_rank_")[2].partition("_")[0]
    return int(rank) if rank.isdecimal() else -1


def _weights(model: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Put the weights together that the processes updated, in float32, and those that none did."""
    buffers = {name: model["module"][name] for name in model["buffer_names"] if name in model["module"]}
    weights = {name: value.float() if value.is_floating_point() else value for name, value in buffers.items()}
    weights.update(model.get("frozen_param_fragments") or {})
    for index, shapes in enumerate(model["param_shapes"]):
        whole = torch.cat([shard["single_partition_of_fp32_groups"][index].detach() for shard in shards])
        for name, place in zip(shapes, _places(shards, model["param_shapes"], index), strict=True):
            weights[name] = whole[place.offset : place.end].view(place.shape).clone()
    for name, same in model.get("shared_params", {}).items():
        if same in weights:
            weights[name] = weights[same]
    return weights


def _places(
    shards: Sequence[Mapping[str, Any]],
    shapes: Sequence[Mapping[str, torch.Size]],
    index: int,
    numbers: Sequence[int] | None = None,
) -> list[_Place]:
    """Where the parameters of a group lie in it."""
    paddings = shards[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    extents = (
        math.prod(shape) + padding for shape, padding in zip(shapes[index].values(), paddings[index], strict=True)
    )
    offsets = itertools.accumulate(extents, initial=0)
    found = zip(numbers or range(len(shapes[index])), offsets, shapes[index].values(), strict=False)
    return [_Place(number, offset, torch.Size(shape)) for number, offset, shape in found]


def _join(
    shards: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]], shapes: Sequence[Mapping[str, torch.Size]]
) -> dict[str, Any]:
    """Put the states together that the processes saved."""
    bases = [shard["base_optimizer_state"] for shard in shards]
    states: dict[int, dict[str, Any]] = {}
    numbers = _numbers([len(group) for group in names])
    for index, group in enumerate(shapes):
        by_name = dict(zip(names[index], numbers[index], strict=True))
        places = _places(shards, shapes, index, [by_name[name] for name in group])
        size = shards[0]["single_partition_of_fp32_groups"][index].numel()
        for key, value in bases[0]["state"].get(index, {}).items():
            flat = _is_flat(value, size)
            whole = torch.cat([base["state"][index][key] for base in bases]) if flat else value
            _deal(states, places, key, whole, flat)
    return _whole(states, bases[0]["param_groups"], numbers)
