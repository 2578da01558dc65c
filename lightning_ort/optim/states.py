"""Converts optimizer states between implementations, so that a checkpoint is not bound to the one that wrote it.

Every conversion goes through torch's own form (``step``, ``exp_avg``, ``exp_avg_sq``). A saved state that already has
the form of the optimizer that loads it is left alone, because quantizing again could change it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from lightning_ort.compat import bitsandbytes, torchao

Algorithm = Literal["adam", "lion", "adafactor", "sgd", "adagrad"]
Form = Literal["torch", "bitsandbytes", "torchao", "anyprecision", "apex"]

# what a plain optimizer of torch computes, which loads other implementations' states of that
ALGORITHMS: Mapping[type[torch.optim.Optimizer], Algorithm] = {
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adafactor: "adafactor",
}

# keys of a parameter's state -> the algorithm that keeps them; the first match counts
_KEYS: tuple[tuple[set[str], Algorithm], ...] = (
    ({"exp_avg", "exp_avg_sq"}, "adam"),
    ({"state1", "state2"}, "adam"),
    ({"exp_avg"}, "lion"),
    ({"state1"}, "lion"),
    ({"row_var"}, "adafactor"),
    ({"variance"}, "adafactor"),
    ({"sum"}, "adagrad"),
    ({"momentum_buffer"}, "sgd"),
)


def check_algorithm(saved: Mapping[str, Any], algorithm: Algorithm, name: str) -> None:
    """Raise ``ValueError`` if a state dict is of another algorithm than that of the optimizer ``name``."""
    for state in map(bitsandbytes.flatten_state, filter(None, saved["state"].values())):
        found = next((which for keys, which in _KEYS if keys <= state.keys()), None)
        if found is not None and found != algorithm:
            raise ValueError(
                f"The checkpoint's optimizer states are those of {found} ({', '.join(map(str, state))}), but {name}"
                f" keeps those of {algorithm}. Resume with the optimizer that saved them, or load the weights alone:"
                " `MyModule.load_from_checkpoint(path)` and `trainer.fit(module)` without `ckpt_path`."
            )


def form(state: Mapping[str, Any]) -> Form:
    """Return which implementation's form a parameter's state has."""
    state = bitsandbytes.flatten_state(state)
    if bitsandbytes.is_state(state):
        return "bitsandbytes"
    if any(map(torchao.is_quantized, state.values())):
        return "torchao"
    if "exp_avg_sq_compensation" in state:
        return "anyprecision"
    # apex counts in the group, DeepSpeed in plain numbers
    counted = isinstance(state.get("step"), torch.Tensor) or not {"exp_avg", "exp_avg_sq"} <= state.keys()
    return "torch" if counted else "apex"


def to_torch_form(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of any implementation in torch's form."""
    steps = {index: group.get("step") for group in saved["param_groups"] for index in group["params"]}
    states = {index: _to_torch_form(bitsandbytes.flatten_state(state)) for index, state in saved["state"].items()}
    for index, state in states.items():
        if "exp_avg" in state:  # apex counts in the group
            state["step"] = torch.as_tensor(state.get("step", steps.get(index) or 0), dtype=torch.float32)
    groups = [{key: value for key, value in group.items() if key != "step"} for group in saved["param_groups"]]
    return {**saved, "state": states, "param_groups": groups}


def _to_torch_form(state: Mapping[str, Any]) -> dict[str, Any]:
    if bitsandbytes.is_state(state):
        return bitsandbytes.to_torch(state)
    if "exp_avg_sq_compensation" in state:  # our AnyPrecisionAdamW
        plain = {key: state[key].float() for key in ("step", "exp_avg", "exp_avg_sq")}
        plain["exp_avg_sq"] = plain["exp_avg_sq"] + state["exp_avg_sq_compensation"]
        return plain
    return {key: value.dequantize() if torchao.is_quantized(value) else value for key, value in state.items()}


# from torch's form, after loading


def to_torchao_form(optimizer: torch.optim.Optimizer) -> None:
    """Quantize the states of a torchao optimizer, and make its learning rates tensors, as torchao has them."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"])
    for parameter, state in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state and type(state[key]) is torch.Tensor:
                state[key] = torchao.quantize(optimizer, parameter, key, state[key])


def count_in_integers(optimizer: torch.optim.Optimizer) -> None:
    """Make the step counts integers, as DeepSpeedCPUAdam has them."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = int(state["step"])


def count_in_groups(optimizer: torch.optim.Optimizer) -> None:
    """Move the step counts to the parameter groups, where apex's FusedAdam has them."""
    for group in optimizer.param_groups:
        counts = [int(optimizer.state[p].pop("step")) for p in group["params"] if "step" in optimizer.state.get(p, {})]
        if counts:
            group["step"] = max(counts)


# DeepSpeed's FusedAdam has a count in each state, but uses and increases only that of a group's last parameter


def count_in_last_state(optimizer: torch.optim.Optimizer) -> None:
    """Give all states of a parameter group the group's step count as an integer, as DeepSpeed's FusedAdam has it."""
    for group in optimizer.param_groups:
        states = [optimizer.state[parameter] for parameter in group["params"] if optimizer.state.get(parameter)]
        count = _largest_count(states)
        for state in states:
            state["step"] = count


def save_count_of_last_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Set the step counts in a state dict of DeepSpeed's FusedAdam to those of the parameter groups."""
    for group in saved["param_groups"]:
        states = {number: saved["state"][number] for number in group["params"] if saved["state"].get(number)}
        count = _largest_count(list(states.values()))
        saved["state"].update({number: {**state, "step": count} for number, state in states.items()})


def _largest_count(states: Sequence[Mapping[str, Any]]) -> int:
    return max((int(state.get("step", 0)) for state in states), default=0)
