"""Undocumented names of DeepSpeed, and the files of its checkpoints. Importing this does not import DeepSpeed.

DeepSpeed's ZeRO optimizer flattens each parameter group into one tensor, pads it, and gives each process an equal
partition. ``zero`` is that optimizer, DeepSpeed's ``DeepSpeedZeroOptimizer``.
"""

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

# the classes of objects in a checkpoint other than tensors and plain values, deepspeed 0.19.8
CHECKPOINT_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
# what DeepSpeed adds to the checkpoint that Lightning passes to it, deepspeed 0.19.8
_ADDED_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    "ds_version",
}


@contextmanager
def without_gpu_search() -> Iterator[None]:
    """Tell DeepSpeed while it is imported if there is no GPU; it searches and warns otherwise (deepspeed 0.19.8)."""
    name = "DS_ACCELERATOR"
    if torch.cuda.is_available() or name in os.environ:
        yield
        return
    os.environ[name] = "cpu"
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make DeepSpeed use the CPU in this process, also if there is a GPU (deepspeed 0.19.8)."""
    import deepspeed
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    operations = deepspeed.ops.__compatible_ops__
    before = real_accelerator.ds_accelerator, dict(operations)
    real_accelerator.ds_accelerator = CPU_Accelerator()
    operations["deepspeed_shm_comm"] = False  # a collective for inference, which would be compiled now
    try:
        yield
    finally:
        real_accelerator.ds_accelerator = before[0]
        operations.clear()
        operations.update(before[1])


@contextmanager
def broadcasting_any_shape() -> Iterator[None]:
    """Let engines send all parameters to the other processes (deepspeed 0.19.8).

    They view them as bytes, which those without dimensions, and those of other strides, cannot be.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    broadcast = DeepSpeedEngine._broadcast_model

    def broadcast_rows(engine: Any) -> None:
        before = [(parameter, parameter.data) for parameter in engine.module.parameters()]
        for parameter, data in before:
            parameter.data = data.reshape(-1)
        try:
            broadcast(engine)
        finally:
            for parameter, data in before:
                data.copy_(parameter.data.view(data.shape))
                parameter.data = data

    DeepSpeedEngine._broadcast_model = broadcast_rows
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = broadcast


def forward_hooks(engine: Any) -> list[RemovableHandle]:
    """Return the hooks that an engine has put on the module; none if it is no engine (deepspeed 0.19.8)."""
    handles = (getattr(engine, f"module_forward_{when}_hook", None) for when in ("pre", "post"))
    return [handle for handle in handles if handle is not None]


# the ZeRO optimizer


def flattened_groups(zero: Any) -> list[list[tuple[Tensor, int]]]:
    """Return the parameters of each flattened group, in its order, with their offsets (deepspeed 0.19.8)."""
    groups = zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
    return [list(zip(parameters, offsets, strict=True)) for parameters, offsets in groups]


def wrapped_optimizer(zero: Any) -> torch.optim.Optimizer:
    """Return the optimizer that updates this process's partition of each group (deepspeed 0.19.8)."""
    return zero.optimizer


def partition_size(zero: Any, group: int) -> int:
    """Return the number of elements of each process's partition of a group (deepspeed 0.19.8)."""
    return int(zero.partition_size[group])


def master_partition(zero: Any, group: int) -> Tensor:
    """Return this process's partition of the float32 weights of a group, not a copy (deepspeed 0.19.8)."""
    return zero.single_partition_of_fp32_groups[group].detach()


def parameter_partition(zero: Any, group: int) -> Tensor:
    """Return what this process's partition is in the module's parameters, not a copy (deepspeed 0.19.8)."""
    partitions = zero.parallel_partitioned_bit16_groups[group]
    return partitions[torch.distributed.get_rank(zero.real_dp_process_group[group])].detach()


def copy_parameters_to_master(zero: Any) -> None:
    """Set the float32 weights to the values of the module's parameters (deepspeed 0.19.8)."""
    zero.refresh_fp32_params()


def gradient(zero: Any, parameter: Tensor) -> Tensor | None:
    """Return the gradient that the next step takes, which is not ``parameter.grad`` in 16 bits (deepspeed 0.19.8)."""
    found: Tensor | None = zero.get_gradient_for_reduction(parameter)
    return found


def set_gradient(zero: Any, parameter: Tensor, value: Tensor | None) -> Tensor:
    """Set the gradient that the next step takes, ``None`` for zero, and return it (deepspeed 0.19.8)."""
    name, dtype = "grad", parameter.dtype
    if zero.use_grad_accum_attribute:
        name, dtype = "grad_accum", zero.gradient_accumulation_dtype
    gradient = torch.zeros_like(parameter, dtype=dtype) if value is None else value.to(dtype)
    setattr(parameter, name, gradient)
    return gradient


def max_norm(zero: Any) -> float:
    """Return the norm to which steps clip the averaged gradients; 0 for none (deepspeed 0.19.8)."""
    return float(zero.clip_grad)


def set_max_norm(zero: Any, value: float) -> None:
    """Set the norm to which steps clip the averaged gradients (deepspeed 0.19.8)."""
    zero.clip_grad = value


def parameter_device(zero: Any) -> torch.device:
    """Return the device of the module's parameters; the states may be offloaded (deepspeed 0.19.8)."""
    return zero.bit16_groups_flat[0].device


# checkpoint directories; ``model`` and ``shard`` are the contents of the two kinds of files


def checkpoint_folder(directory: Path) -> Path:
    """Return the folder with a checkpoint's files; raise ``ValueError`` if there is none (deepspeed 0.19.8)."""
    if not directory.is_dir():
        what = "is a file: pass the folder of a checkpoint" if directory.exists() else "does not exist"
        raise ValueError(f"{directory} {what}.")
    latest = directory / "latest"
    if not latest.is_file():
        raise ValueError(f"{directory} is not a checkpoint of DeepSpeed: it has no file 'latest'.")
    name = latest.read_bytes()[:1000].decode(errors="replace").strip()
    folder = directory / name
    if not name or Path(name).name != name or not folder.is_dir():
        raise ValueError(f"{directory} is not a checkpoint of DeepSpeed: 'latest' names {name!r}, which is not in it.")
    return folder


def checkpoint_files(folder: Path) -> tuple[list[Path], list[tuple[int, Path]]]:
    """Return the files with model states, and those with optimizer states with their ranks (deepspeed 0.19.8)."""
    ranks = [(file.name.partition("pp_rank_")[2].partition("_")[0], file) for file in folder.glob("*_optim_states.pt")]
    optimizer_files = sorted((int(rank) if rank.isdecimal() else -1, file) for rank, file in ranks)
    return sorted(folder.glob("*mp_rank_*_model_states.pt")), optimizer_files


def passed_entries(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that the caller of ``save_checkpoint`` passed as ``client_state`` (deepspeed 0.19.8)."""
    return {key: value for key, value in model.items() if key not in _ADDED_KEYS}


def unpartitioned_weights(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return buffers and frozen parameters, in float32 if they are floating-point (deepspeed 0.19.8)."""
    partitioned = {name for shapes in model["param_shapes"] for name in shapes} | tied_weights(model).keys()
    names = dict.fromkeys([*model["buffer_names"], *model["module"]])
    found = {name: model["module"][name] for name in names if name in model["module"] and name not in partitioned}
    weights = {name: value.float() if value.is_floating_point() else value for name, value in found.items()}
    return {**weights, **(model.get("frozen_param_fragments") or {})}  # stage 1 saves them as part of the module only


def tied_weights(model: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of weights that are saved under another name, and that name (deepspeed 0.19.8)."""
    return dict(model.get("shared_params", {}))


def saved_offsets(shard: Mapping[str, Any], shapes: Sequence[Mapping[str, torch.Size]], group: int) -> list[int]:
    """Return the offsets of the parameters in a flattened group, which may be padded each (deepspeed 0.19.8)."""
    paddings = shard.get("param_alignment_paddings") or [[0] * len(parameters) for parameters in shapes]
    sizes = (math.prod(shape) + pad for shape, pad in zip(shapes[group].values(), paddings[group], strict=True))
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def saved_master_partition(shard: Mapping[str, Any], group: int) -> Tensor:
    """Return a process's partition of the float32 weights of a group (deepspeed 0.19.8)."""
    return shard["single_partition_of_fp32_groups"][group].detach()


def saved_optimizer(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of the optimizer that updated a process's partitions (deepspeed 0.19.8)."""
    return shard["base_optimizer_state"]
