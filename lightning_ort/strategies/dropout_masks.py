"""Draw the masks of dropout on a CPU faster, with the same values: :class:`DropoutMasks`.

While a run lasts, torch's CPU kernel of ``aten::bernoulli_.float(Tensor(a!) self, float p, *, Generator? generator)``
is replaced, which all of torch's dropouts call, by one that leaves large tensors to
:class:`~lightning_ort.compiler.executors.mask_kernel.MaskKernel`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_ort.compat.torch import CAN_REPLACE_KERNELS, replace_kernel
from lightning_ort.compiler.executors.mask_kernel import MIN_ELEMENTS, mask_kernel, matches_torch
from lightning_ort.compiler.machine.while_running import WhileRunning

_OP = "aten::bernoulli_.float"
# A call from C++ into Python takes some microseconds. Where this many have come and most were small, that is all there
# is to gain.
_CALLS = 64


class DropoutMasks:
    """Has masks drawn by a function in C while a run on the CPU lasts; it is compiled when that pays."""

    def __init__(self) -> None:
        self.large, self.small = 0, 0  # calls in this run
        self._drawn_before = 0  # elements

    def setup(self, device: torch.device, cache_dir: str | None) -> None:
        """Begin a run that computes on a device; ``cache_dir`` is where the function is kept."""
        self.large = self.small = 0
        self._drawn_before = mask_kernel().drawn
        mask_kernel().cache_dir = cache_dir
        if device.type == "cpu" and CAN_REPLACE_KERNELS and matches_torch():
            _replaced.begin(self)

    def begin_step(self) -> None:
        """End it if there is nothing to gain."""
        if self.small > _CALLS and self.small > self.large:
            self.teardown()

    def teardown(self) -> None:
        """Undo :meth:`setup`; a second call does nothing."""
        _replaced.end(self)

    @property
    def text(self) -> str:
        """What a report says about it; nothing if no mask was large."""
        kernel = mask_kernel()
        if kernel.drawn == self._drawn_before or not (kernel.is_ready or kernel.problem):
            return ""
        return "drawn by a compiled function" if kernel.is_ready else f"drawn by PyTorch: {kernel.problem}"

    def __getstate__(self) -> dict[str, Any]:
        return vars(DropoutMasks())  # a copy is in no run


def _kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    # dynamo sees this call where a frame that it leaves to Python draws a mask
    @torch.compiler.disable
    def bernoulli_(out: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Any:
        large = out.numel() >= MIN_ELEMENTS
        for run in _replaced.runs:
            if large:
                run.large += 1
            else:
                run.small += 1
        return out if large and mask_kernel().draw(out, p, generator) else original(out, p, generator=generator)

    return bernoulli_


_replaced: WhileRunning[DropoutMasks] = WhileRunning(functools.partial(replace_kernel, _OP, "CPU", _kernel))
