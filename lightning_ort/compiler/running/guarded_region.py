"""A region as the compiled graph calls it: on its executor, and in torch once that has failed."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_ort.compiler.machine.out_of_memory import free_memory_of, is_out_of_memory
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.region import TORCH, Region, RegionRejected, is_emptied_fn
from lightning_ort.compiler.regions.reproducer_script import largest_difference
from lightning_ort.compiler.report.data import RegionReport

# how far the first run may be from torch under check_against_eager: a share of the largest magnitude
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-9, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class GuardedRegion:
    """Runs a region on its executor; if a run fails, torch repeats it, and does all later ones.

    ``on_failure`` gets the reason and may raise to refuse that. With ``check`` the first run is compared with torch.
    """

    def __init__(
        self,
        region: Region,
        run: Callable[..., Sequence[torch.Tensor]],
        report: RegionReport,
        on_failure: Callable[[Reason], None],
        check: bool,
    ) -> None:
        # how it appears in the code of the compiled graph
        self.__name__ = region.name
        self._module = region.module
        self._run: Callable[..., Sequence[torch.Tensor]] | None = self._checked(run) if check else run
        self._is_emptied = is_emptied_fn(region)
        self.report = report
        self._on_failure = on_failure

    def __call__(self, *args: Any) -> Sequence[torch.Tensor]:
        """Run the region."""
        if self._run is None or (self._is_emptied is not None and self._is_emptied(*args)):
            return self._module(*args)
        try:
            outputs = self._run(*args)
        except RegionRejected as error:
            reason = error.reason
        except Exception as error:  # onnxruntime's own exceptions derive from Exception directly
            reason = RegionRejected(ReasonType.RUN_FAILED, error).reason
            if is_out_of_memory(error):  # torch needs what the session has
                self._leave(reason)
                free_memory_of(error)
        else:
            self.report.runs += 1
            return outputs
        # a region has no side effects, so torch can run it again; if torch raises too, such as for a label that is out
        # of range, the error is the user's, and the region stays as it is
        outputs = self._module(*args)
        if self._run is not None:
            self._leave(reason)
        return outputs

    def _leave(self, reason: Reason) -> None:
        self._run = None
        self.report.executor, self.report.reason = TORCH, reason
        self._on_failure(reason)

    def rename(self, name: str) -> None:
        """Change the name in the report and in the code of the compiled graph."""
        self.__name__ = self.report.name = name

    def _checked(self, run: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., Sequence[torch.Tensor]]:
        def compare_first(*args: Any) -> Sequence[torch.Tensor]:
            outputs = run(*args)
            for index, (got, expected) in enumerate(zip(outputs, self._module(*args), strict=True)):
                if (difference := mismatch(got, expected)) is not None:
                    raise RegionRejected(ReasonType.MISMATCH, f"output {index}: {difference}")
            self._run = run
            return outputs

        return compare_first


def mismatch(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return how a result differs from torch's by more than :data:`TOLERANCE`, or ``None``."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    difference, allowed = largest_difference(got, expected, least=1e-3), TOLERANCE.get(expected.dtype, 0.0)
    if difference <= allowed:
        return None
    if not expected.is_floating_point():
        return f"{difference:.2%} of the elements differ"
    if difference == math.inf:
        return "infinities or NaN in other places"
    return f"largest difference {difference:.3g} of the largest value, allowed {allowed:.3g}"
