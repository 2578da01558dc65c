"""Optimizer states from one implementation to another, so that a checkpoint does not bind to the one that wrote it.

Torch's own form (``step``, ``exp_avg``, ``exp_avg_sq``) stands in the middle. A saved state already in the form of the
optimizer that loads it is not touched: requantizing could change it.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch

Algorithm = Literal["adam", "lion", "adafactor", "sgd", "adagrad"]
Form = Literal["torch", "bitsandbytes", "torchao", "anyprecision"]

BNB_BLOCK = 256

# keys of a parameter's state -> the algorithm that keeps them; the first that fits
_KEYS: tuple[tuple[frozenset[str], Algorithm], ...] = (
    (frozenset({"exp_avg", "exp_avg_sq"}), "adam"),
    (frozenset({"state1", "state2"}), "adam"),
    (frozenset({"exp_avg"}), "lion"),
    (frozenset({"state1"}), "lion"),
    (frozenset({"row_var"}), "adafactor"),
    (frozenset({"variance"}), "adafactor"),
    (frozenset({"sum"}), "adagrad"),
    (frozenset({"momentum_buffer"}), "sgd"),
)


def check_algorithm(saved: Mapping[str, Any], algorithm: Algorithm, name: str) -> None:
    """Refuse the states of another algorithm before anything is loaded.

    Args:
        saved: An optimizer's state dict.
        algorithm: That of the optimizer which is to load it.
        name: Of that optimizer, for the message.

    Raises:
        ValueError: If they are of another one.

    """
    for state in map(_flat, filter(None, saved["state"].values())):
        found = next((which for keys, which in _KEYS if keys <= state.keys()), None)
        if found is not None and found != algorithm:
            raise ValueError(
                f"The checkpoint's optimizer states are those of {found} ({', '.join(map(str, state))}), but {name}"
                f" keeps those of {algorithm}. Resume with the optimizer that saved them, or load the weights alone:"
                " `MyModule.load_from_checkpoint(path)` and `trainer.fit(module)` without `ckpt_path`."
            )


def form(state: Mapping[str, Any]) -> Form:
    """Whose form a parameter's state has."""
    flat = _flat(state)
    if "state1" in flat:
        return "bitsandbytes"
    if any(map(_is_quantized, flat.values())):
        return "torchao"
    return "anyprecision" if "exp_avg_sq_compensation" in flat else "torch"


def to_torch_form(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Bring an optimizer's state dict to torch's form.

    Args:
        saved: In the form of any implementation named in :mod:`~lightning_ort.optim.registry`.

    """
    steps = {index: group.get("step") for group in saved["param_groups"] for index in group["params"]}
    states = {}
    for index, state in saved["state"].items():
        state = _one_to_torch_form(_flat(state))
        if "exp_avg" in state:  # apex and DeepSpeed's FusedAdam count in the group
            state["step"] = torch.as_tensor(state.get("step", steps.get(index) or 0), dtype=torch.float32)
        states[index] = state
    groups = [{key: value for key, value in group.items() if key != "step"} for group in saved["param_groups"]]
    return {**saved, "state": states, "param_groups": groups}


def _one_to_torch_form(state: Mapping[str, Any]) -> dict[str, Any]:
    if "state1" in state:
        names = {"state1": "exp_avg", "state2": "exp_avg_sq"}
        plain = {"step": state["step"]} if "step" in state else {}
        for index, (bnb, ours) in enumerate(names.items(), start=1):
            if bnb in state:
                plain[ours] = _dequantize_bnb(state, index)
        return plain
    plain = {key: value.dequantize() if _is_quantized(value) else value for key, value in state.items()}
    if "exp_avg_sq_compensation" in state:  # our AnyPrecisionAdamW
        plain = {key: plain[key].float() for key in ("step", "exp_avg", "exp_avg_sq")}
        plain["exp_avg_sq"] += state["exp_avg_sq_compensation"]
    return plain


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    # bitsandbytes hides its tensors from FSDP in a dictionary of their own
    nested = {key: value for entry in state.values() if isinstance(entry, dict) for key, value in entry.items()}
    return {**{key: value for key, value in state.items() if not isinstance(value, dict)}, **nested}


def _is_quantized(value: Any) -> bool:
    # torchao's OptimState8bit, OptimState4bit
    return type(value) is not torch.Tensor and isinstance(value, torch.Tensor) and hasattr(value, "codes")


def _dequantize_bnb(state: Mapping[str, Any], index: int) -> torch.Tensor:
    value = state[f"state{index}"]
    if value.dtype is not torch.uint8:
        return value
    code, absmax = state[f"qmap{index}"].to(value.device), state[f"absmax{index}"].to(value.device)
    blocks = torch.nn.functional.pad(code[value.flatten().long()], (0, -value.numel() % BNB_BLOCK))
    scaled = blocks.view(-1, BNB_BLOCK) * absmax[:, None]
    return scaled.flatten()[: value.numel()].view(value.shape)


# from torch's form, after loading


def to_torchao_form(optimizer: torch.optim.Optimizer) -> None:
    """Quantize the states of a torchao optimizer that are not, and have tensors as learning rates, as it does."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"])
    for parameter, state in optimizer.state.items():
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if key in state and type(state[key]) is torch.Tensor:
                buffer = optimizer._new_buffer(parameter, signed)  # type: ignore[attr-defined]
                state[key] = buffer.copy_(state[key])


def count_in_integers(optimizer: torch.optim.Optimizer) -> None:
    """Make the step counts integers, as DeepSpeedCPUAdam has them."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = int(state["step"])


def count_in_groups(optimizer: torch.optim.Optimizer) -> None:
    """Count the steps in the parameter groups, as the FusedAdam of apex and DeepSpeed do."""
    for group in optimizer.param_groups:
        counts = [int(optimizer.state[p].pop("step")) for p in group["params"] if "step" in optimizer.state.get(p, {})]
        if counts:
            group["step"] = max(counts)
