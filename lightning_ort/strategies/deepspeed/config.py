"""A user's DeepSpeed configuration beside what the Trainer says.

The functions that find a contradiction return what to tell the user, both values included, or ``None``. The keys are
those of `DeepSpeed's configuration <https://www.deepspeed.ai/docs/config-json/>`_.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_ort._arguments import passed

_PRECISIONS = {"bf16": ("bf16-mixed", "bf16-true"), "fp16": ("16-mixed", "16-true")}


# the keys that have keys below them, as far as they are looked at here or by Lightning
_SECTIONS = ("zero_optimization", "activation_checkpointing", "bf16", "bfloat16", "fp16", "optimizer", "scheduler")


def read(config: Any) -> dict[str, Any] | None:
    """Return a configuration that was passed as it is or as a file.

    Raises:
        TypeError: If it is neither, or something in it is of another type.
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read, or has something else in it.

    """
    if config is None:
        return None
    name, shown = "deepspeed_config", passed("deepspeed_config", config)
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(f"{shown}: there is no such file. Pass a path of JSON, or a dict.") from None
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(f"{shown}: this is no file with JSON: {reason}. Pass a path of one, or a dict.") from None
    if not isinstance(config, Mapping):
        raise TypeError(f"{shown}: pass DeepSpeed's configuration as a dict, or the path of a JSON file with one.")
    for key in _SECTIONS:
        if not isinstance(section := config.get(key, {}), Mapping) and section != "auto":
            raise TypeError(f"{name} has {passed(key, section)}: pass a dict, such as {_EXAMPLES.get(key, '{}')}.")
    zero = config.get("zero_optimization", {})
    offload = zero.get("offload_optimizer", {}) if isinstance(zero, Mapping) else {}
    if not isinstance(offload, Mapping) and offload != "auto":
        raise TypeError(f"{name} has {passed('offload_optimizer', offload)}: pass a dict, such as {{'device': 'cpu'}}.")
    return dict(config)


_EXAMPLES = {
    "zero_optimization": "{'stage': 1}",
    "bf16": "{'enabled': True}",
    "fp16": "{'enabled': True}",
    "optimizer": "{'type': 'AdamW', 'params': {'lr': 1e-3}}",
}


def check_stage(stage: Any) -> None:
    """Refuse another stage than 1.

    Raises:
        ValueError: If it is.

    """
    if stage != 1 or isinstance(stage, bool):
        raise ValueError(
            f"This is ZeRO stage 1, and the DeepSpeed configuration has stage={stage!r}. Leave it out; Lightning's"
            f" DeepSpeedStrategy(stage={stage!r}) has the other stages."
        )


def stage_one(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration as it is for ZeRO stage 1, without what it leaves to the Trainer by ``"auto"``.

    Raises:
        ValueError: If it asks for another stage, or for what goes with other stages only.

    """
    config = _without_auto(config)
    zero = config.setdefault("zero_optimization", {})
    check_stage(zero.get("stage", 1))
    if zero.get("overlap_comm"):
        raise ValueError(
            "overlap_comm=True has no effect on ZeRO stage 1 as it runs here: gradients are reduced when the optimizer"
            " steps. Leave it out, or use Lightning's DeepSpeedStrategy(stage=2)."
        )
    zero.update(stage=1, overlap_comm=False)
    return config


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }


def precision_conflict(config: dict[str, Any], precision: str) -> str | None:
    """Compare with the Trainer's precision.

    Args:
        config: DeepSpeed's.
        precision: Such as ``"bf16-mixed"``.

    """
    for key, names in _PRECISIONS.items():
        if key in config and config[key].get("enabled", True) != (precision in names):
            return _contradiction(f"{key}={config[key]}", f"precision={precision!r}")
    return None


def take_trainer_arguments(
    config: dict[str, Any],
    *,
    accumulate_grad_batches: int,
    gradient_clip_val: float | None,
    batch_size: int | None,
    world_size: int,
) -> str | None:
    """Compare with the Trainer's arguments, and drop from the configuration what is the Trainer's to do.

    Args:
        config: DeepSpeed's; changed.
        accumulate_grad_batches: The Trainer's.
        gradient_clip_val: The Trainer's.
        batch_size: Of the training data, where it is known.
        world_size: Number of processes.

    """
    accumulate = config.pop("gradient_accumulation_steps", accumulate_grad_batches)
    if accumulate != accumulate_grad_batches:
        return _contradiction(
            f"gradient_accumulation_steps={accumulate}", f"accumulate_grad_batches={accumulate_grad_batches}"
        )
    clipping = config.get("gradient_clipping", gradient_clip_val)
    if gradient_clip_val is not None and clipping != gradient_clip_val:
        return _contradiction(f"gradient_clipping={clipping}", f"gradient_clip_val={gradient_clip_val}")
    micro = config.get("train_micro_batch_size_per_gpu", batch_size)
    if batch_size is not None and micro != batch_size:
        return _contradiction(f"train_micro_batch_size_per_gpu={micro}", f"batches of {batch_size} samples")
    total = config.pop("train_batch_size", None)
    if total is not None and batch_size is not None and total != batch_size * accumulate * world_size:
        return _contradiction(
            f"train_batch_size={total}",
            f"{batch_size} samples a batch x {accumulate} batches accumulated x {world_size} processes",
        )
    return None


def _contradiction(deepspeeds: str, trainers: str) -> str:
    return (
        f"The DeepSpeed configuration has {deepspeeds}, and the Trainer has {trainers}. Give it in one place: leave it"
        " out of the DeepSpeed configuration."
    )
