"""Reads a user's DeepSpeed configuration and compares it with the Trainer's arguments.

The functions that find a contradiction return a message with both values, or ``None``. The keys are those of
`DeepSpeed's configuration <https://www.deepspeed.ai/docs/config-json/>`_.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_ort._arguments import passed

_PRECISIONS = {"bf16": ("bf16-mixed", "bf16-true"), "fp16": ("16-mixed", "16-true")}
# the keys with a dict that are read here or by Lightning -> an example
_SECTIONS = {
    "zero_optimization": "{'stage': 1}",
    "activation_checkpointing": "{}",
    "bf16": "{'enabled': True}",
    "bfloat16": "{}",
    "fp16": "{'enabled': True}",
    "optimizer": "{'type': 'AdamW', 'params': {'lr': 1e-3}}",
    "scheduler": "{}",
}


def read(config: Any) -> dict[str, Any] | None:
    """Return a configuration that was passed as a mapping or as the path of a JSON file; check its sections' types."""
    if config is None:
        return None
    name, shown = "deepspeed_config", passed("deepspeed_config", config)
    if isinstance(config, (str, Path)):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{shown}: there is no such file. Pass the path of a JSON file, or a dict."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(f"{shown}: this is not a JSON file: {reason}. Pass the path of one, or a dict.") from None
    if not isinstance(config, Mapping):
        raise TypeError(f"{shown}: pass DeepSpeed's configuration as a dict, or the path of a JSON file with one.")
    zero = config.get("zero_optimization", {})
    offload = {"offload_optimizer": zero.get("offload_optimizer", {})} if isinstance(zero, Mapping) else {}
    for section, key, example in (
        *((config, key, example) for key, example in _SECTIONS.items()),
        (offload, "offload_optimizer", "{'device': 'cpu'}"),
    ):
        if not isinstance(value := section.get(key, {}), Mapping) and value != "auto":
            raise TypeError(f"{name} has {passed(key, value)}: pass a dict, such as {example}.")
    return dict(config)


def check_stage(stage: Any) -> None:
    """Raise ``ValueError`` for another stage than 1."""
    if stage != 1 or isinstance(stage, bool):
        raise ValueError(
            f"This strategy is ZeRO stage 1, but the DeepSpeed configuration has stage={stage!r}. Leave it out, or use"
            f" Lightning's DeepSpeedStrategy(stage={stage!r})."
        )


def stage_one(config: dict[str, Any], offload_optimizer: bool) -> dict[str, Any]:
    """Return the configuration for ZeRO stage 1, without what is ``"auto"``, which the Trainer decides."""
    config = _without_auto(config)
    zero = config.setdefault("zero_optimization", {})
    check_stage(zero.get("stage", 1))
    if zero.get("overlap_comm"):
        raise ValueError(
            "overlap_comm=True has no effect on this strategy, which reduces gradients when the optimizer"
            " steps. Leave it out, or use Lightning's DeepSpeedStrategy(stage=2)."
        )
    zero.update(stage=1, overlap_comm=False)
    if offload_optimizer:
        zero.setdefault("offload_optimizer", {"device": "cpu"})
    return config


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }


def precision_conflict(config: dict[str, Any], precision: str) -> str | None:
    """Compare the configuration with the Trainer's precision, such as ``"bf16-mixed"``."""
    for key, names in _PRECISIONS.items():
        if key in config and config[key].get("enabled", True) != (precision in names):
            return _contradiction(f"{key}={config[key]}", f"precision={precision!r}")
    return None


def trainer_conflict(config: dict[str, Any], trainer: Any, batch_size: int | None, world_size: int) -> str | None:
    """Compare the configuration with the Trainer's arguments and the training data, if its batch size is known."""
    accumulate, clip = trainer.accumulate_grad_batches, trainer.gradient_clip_val
    each = f"{batch_size} samples per batch x {accumulate} accumulated batches x {world_size} processes"
    for key, wanted, text in (
        ("gradient_accumulation_steps", accumulate, f"accumulate_grad_batches={accumulate}"),
        ("gradient_clipping", clip, f"gradient_clip_val={clip}"),
        ("train_micro_batch_size_per_gpu", batch_size, f"batches of {batch_size} samples"),
        ("train_batch_size", batch_size and batch_size * accumulate * world_size, each),
    ):
        if wanted is not None and config.get(key) not in (None, wanted):
            return _contradiction(f"{key}={config[key]}", text)
    return None


def _contradiction(deepspeeds: str, trainers: str) -> str:
    return (
        f"The DeepSpeed configuration has {deepspeeds}, but the Trainer has {trainers}. Remove it from the DeepSpeed"
        " configuration."
    )
