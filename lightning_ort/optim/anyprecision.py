"""AdamW with bfloat16 states: :class:`AnyPrecisionAdamW`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override


class AnyPrecisionAdamW(Optimizer):
    """AdamW with bfloat16 states and Kahan summation, for float32 and bfloat16 parameters.

    A bfloat16 number of 1 does not change when 0.001 is added to it. So the rounding errors of the second moment, and
    of parameters with less precision than float32, are kept in another bfloat16 and added in the next step. The states
    take 6 bytes for an element of a float32 parameter, 8 for one of a bfloat16 parameter. `Revisiting BFloat16 Training
    <https://arxiv.org/abs/2010.06192>`_, `Decoupled Weight Decay Regularization <https://arxiv.org/abs/1711.05101>`_.

    Args:
        params: Parameters or groups, of float32, float16 or bfloat16.
        lr: Learning rate.
        betas: Decay of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        maximize: Maximize the objective instead of minimizing it.

    Raises:
        ValueError: If a hyperparameter is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        for name, value, valid in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not valid:
                raise ValueError(f"AnyPrecisionAdamW({name}={value}): must not be negative, and betas must be below 1.")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        loaded: list[dict[str, Any]] = []
        hook = self.register_load_state_dict_pre_hook(lambda _, saved: loaded.append(saved))  # the last of these hooks
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            hook.remove()
        numbers = [number for group in loaded[0]["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            # not as torch has loaded them, in the parameter's dtype: float16 turns small numbers into zero
            values = loaded[0]["state"].get(number) or {}
            saved = {key: value.to(parameter.device).float() for key, value in values.items() if key != "step"}
            if not saved:
                continue
            state = self.state[parameter]
            state.update(_new_state(parameter))
            for key, value in saved.items():
                state[key].copy_(value)
            if "exp_avg_sq_compensation" not in saved:  # from another AdamW
                _store(saved["exp_avg_sq"], state)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; ``closure`` computes the loss and the gradients again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(_new_state(parameter))
        state["step"] += 1
        step, (beta1, beta2), lr = state["step"].item(), group["betas"], group["lr"]
        gradient = parameter.grad.float()
        if group["maximize"]:
            gradient = -gradient
        average = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        state["exp_avg"].copy_(average)
        square = state["exp_avg_sq"].float().add_(state["exp_avg_sq_compensation"])
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        _store(square, state)
        denominator = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        update = average.div_(denominator).mul_(-lr / (1 - beta1**step))
        before = parameter.float()
        update.sub_(before, alpha=lr * group["weight_decay"])
        if "compensation" in state:
            update.add_(state["compensation"])
        parameter.copy_(before + update)
        if "compensation" in state:
            state["compensation"].copy_(update.sub_(parameter.float().sub_(before)))


def _new_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    keys = ["exp_avg", "exp_avg_sq", "exp_avg_sq_compensation"]
    if torch.finfo(parameter.dtype).bits < 32:
        keys.append("compensation")
    return {key: torch.zeros_like(parameter, dtype=torch.bfloat16) for key in keys}


def _store(square: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
    state["exp_avg_sq"].copy_(square)
    state["exp_avg_sq_compensation"].copy_(square - state["exp_avg_sq"].float())
