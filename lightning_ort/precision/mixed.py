"""Mixed precision for every optimizer: :class:`MixedPrecisionMixin`, over Lightning's ``MixedPrecision``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import override

from lightning_ort._arguments import check_choice, check_device, check_integer, check_type, names_its_arguments
from lightning_ort._imports import LightningNamespace
from lightning_ort._shims import Shims
from lightning_ort.compat import lightning_bases
from lightning_ort.compat.torch_optimizers import calls_step_hooks, unscaled_by_scaler

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import Precision


MixedPrecisionName = Literal["16-mixed", "bf16-mixed"]


@names_its_arguments
class MixedPrecisionMixin(lightning_bases.MixedPrecision):
    """Automatic mixed precision that supports fused optimizers with gradient clipping, and counts overflows.

    The step runs under ``torch.autocast``. With ``"16-mixed"`` the loss is scaled. The gradients are unscaled and
    checked for infinity and NaN in one pass, clipped, and applied if they are finite. If they are not, the optimizer
    skips the step, and so does a scheduler with ``interval="step"``. The saved state is that of ``MixedPrecision``.

    `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_

    Args:
        precision: ``"16-mixed"`` or ``"bf16-mixed"``.
        device: ``"cuda"`` or ``"cpu"``; ``None`` for the module's device.
        scaler: For ``"16-mixed"``; ``None`` for one with torch's defaults.
        max_overflows: Number of consecutive skipped steps at which training ends with an error.

    Attributes:
        overflows: Number of steps of the last fit that were skipped because of an infinite or NaN gradient.

    Raises:
        ValueError: If a setting is out of range.
        TypeError: If a setting is of another type.
    """

    def __init__(
        self,
        precision: MixedPrecisionName = "16-mixed",
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        max_overflows: int = 100,
    ) -> None:
        check_choice("precision", precision, get_args(MixedPrecisionName))
        if device is not None:
            check_device("device", device)
        check_type("scaler", scaler, (torch.amp.GradScaler, type(None)), "a torch.amp.GradScaler or None")
        if scaler is not None and precision == "bf16-mixed":
            raise ValueError("scaler: 'bf16-mixed' has the range of float32 and scales nothing. Leave the scaler out.")
        self.max_overflows = check_integer("max_overflows", max_overflows, 1)
        if scaler is None:
            super().__init__("bf16-mixed", device or "")
            self.precision = precision  # with "16-mixed" a scaler is made when the device is known
        else:
            super().__init__(precision, device or "", scaler)
        self.overflows = 0
        self._in_a_row = 0
        self._first_optimizer: Optimizer | None = None  # of the fit whose overflows are counted
        self._skipped: set[int] = set()  # ids of the optimizers whose last step was skipped
        self._wrapped = Shims()  # of methods of schedulers, while a fit lasts

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if not self.device:
            self.device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        if self.precision == "16-mixed" and self.scaler is None:
            self.scaler = torch.amp.GradScaler(self.device)
        if optimizers and optimizers[0] is not self._first_optimizer:  # a fit; an evaluation has those of the last fit
            self._first_optimizer = optimizers[0]
            self.overflows = self._in_a_row = 0
            self._skipped.clear()
        if self.scaler is not None:
            for config in lr_schedulers:
                if config.interval == "step" and not isinstance(config.scheduler, ReduceLROnPlateau):
                    self._skip_with_optimizer(config.scheduler)
        return super().connect(model, optimizers, lr_schedulers)

    def _skip_with_optimizer(self, scheduler: Any) -> None:
        step, state_dict = scheduler.step, scheduler.state_dict

        def step_or_skip(*args: Any, **kwargs: Any) -> None:
            if id(scheduler.optimizer) not in self._skipped:
                step(*args, **kwargs)

        def own_state() -> dict[str, Any]:  # a scheduler saves all of its attributes
            return {key: value for key, value in state_dict().items() if key not in ("step", "state_dict")}

        self._wrapped.put(scheduler, "step", step_or_skip)
        self._wrapped.put(scheduler, "state_dict", own_state)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None or not calls_step_hooks(optimizer):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        losses: list[Any] = []
        steps: list[Any] = []

        def watched_closure() -> Any:
            losses.append(closure())
            return losses[-1]

        handle = optimizer.register_step_post_hook(lambda *_: steps.append(optimizer))  # not called for a skipped step
        try:
            with unscaled_by_scaler(optimizer):
                output = super().optimizer_step(optimizer, model=model, closure=watched_closure, **kwargs)
        finally:
            handle.remove()
        if not losses or losses[-1] is not None or not model.automatic_optimization:  # else there are no gradients
            self._count(optimizer, bool(steps))
        return output

    def _count(self, optimizer: Optimizer, stepped: bool) -> None:
        if stepped:
            self._skipped.discard(id(optimizer))
            self._in_a_row = 0
            return
        self._skipped.add(id(optimizer))
        self.overflows += 1
        self._in_a_row += 1
        if self._in_a_row >= self.max_overflows:
            assert self.scaler is not None
            raise RuntimeError(
                f"{self._in_a_row} optimizer steps in a row had infinite or NaN gradients and were skipped; the loss"
                f" scale has dropped to {self.scaler.get_scale():g}. Lower the learning rate, look for NaN in the"
                " data and the loss, or use precision='bf16-mixed', which has the range of float32."
            )

    @override
    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        with unscaled_by_scaler(optimizer):  # for bfloat16 too, where Lightning refuses the mark as well
            super().clip_gradients(optimizer, *args, **kwargs)

    @override
    def teardown(self) -> None:
        self._wrapped.remove()
        super().teardown()


def choose_precision(plugin: "Precision | None", namespace: LightningNamespace) -> Any:
    """Return ours for exactly Lightning's ``MixedPrecision``, with the same settings, and other plugins as is."""
    if type(plugin) is not namespace.submodule("plugins.precision").MixedPrecision:
        return plugin
    ours = namespace.classes.ORTMixedPrecision
    return ours(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[union-attr]
