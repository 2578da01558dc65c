"""Capture the steps of a LightningModule, for any strategy: :class:`Capture`, the door to all that needs dynamo.

Nothing on this side of it needs a name of dynamo, AOTAutograd or inductor. What does is imported in
:meth:`Capture.setup`, and where this torch lacks a part of it (:func:`obstacle`) steps run unchanged.
"""

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.report.data import FallbackReport
from lightning_ort.compiler.report.report import CompileReport
from lightning_ort.config import ORTConfig
from lightning_ort.strategies.race.run_facts import STEPS, TRAINING, is_amortized, setting_for

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    from lightning_ort.compiler.backend import ORTBackend
    from lightning_ort.compiler.request import CompileRequest
    from lightning_ort.strategies.capture.module import CapturedModule
    from lightning_ort.strategies.capture.step import CapturedStep

log = logging.getLogger(__name__)

_NO_CONTEXT = nullcontext()


@functools.cache
def obstacle() -> str:
    """Return why steps are not captured with this torch, or nothing."""
    try:
        from lightning_ort.compat import torch_graphs  # noqa: F401 (first, since it says which torch is too old)
        from lightning_ort.strategies.capture import step  # noqa: F401 (the rest of what captures)
        from lightning_ort.strategies.capture.dynamo_monitor import rehearse

        rehearse()
    except Exception as error:
        log.debug("steps are not captured", exc_info=True)
        return missing(error)
    return ""


@functools.cache
def _say(why: str) -> None:
    rank_zero_only(log.warning)("lightning-ort: steps are not captured: %s; they run as they are", why)


def missing(error: Exception) -> str:
    """Return what this torch lacks, by an error that says so, or the error."""
    name = ""
    if isinstance(error, AttributeError) and error.name and error.obj is not None:
        name = f"{getattr(error.obj, '__name__', type(error.obj).__name__)}.{error.name}"
    elif found := re.match(r"cannot import name '(\w+)' from '(torch[\w.]*)'", str(error)):
        name = f"{found[2]}.{found[1]}"
    elif isinstance(error, ModuleNotFoundError):
        name = error.name or ""
    return f"torch {torch.__version__} has no {name}" if name else str(error) or type(error).__name__


class Capture:
    """Captures the steps of a strategy's LightningModule."""

    def __init__(self, config: ORTConfig) -> None:
        self.config = config
        self._report = CompileReport()  # until there is a backend, which has its own
        self.backend: ORTBackend | None = None  # until the first setup, and if capture is off
        self._module: CapturedModule | None = None
        self._steps: dict[str, CapturedStep] = {}
        self.running: dict[str, CapturedStep] = {}  # while a run lasts
        self.training: CapturedStep | None = None  # of these

    @property
    def report(self) -> CompileReport:
        """What was compiled."""
        return self._report if self.backend is None else self.backend.report

    @report.setter
    def report(self, report: CompileReport) -> None:
        """Set that of another process, which has run in place of this one."""
        self._report = report

    def setup(self, strategy: "Strategy") -> None:
        """Start to capture the steps of the strategy's module, for one run of the Trainer."""
        if why := self._why_not():
            self.report.notes = [FallbackReport("module", Reason(ReasonType.CAPTURE_OFF, why))]
            return
        from lightning_ort.compiler.backend import ORTBackend
        from lightning_ort.compiler.request import weakly
        from lightning_ort.strategies.capture.module import CapturedModule
        from lightning_ort.strategies.capture.step import CapturedStep

        if self.backend is None:
            debug = self.config.debug
            for_regions = dataclasses.replace(self.config, engine="ort", start="now", dropout_masks="exact")
            # most short runs compile nothing, and need no onnxruntime
            is_named = debug.providers is not None or debug.kernels != "auto"
            loads = is_named or self.config.fallback == "raise" or not is_amortized(self.config)
            self.backend = ORTBackend(for_regions, weakly(self._request), loads)
            self.backend.report.optimizers = self._report.optimizers
        if not self.backend.available and setting_for(self.config, strategy.root_device) == "ort":
            return
        module = strategy.lightning_module
        assert module is not None
        if self._module is None or self._module.module is not module:
            self._module, self._steps = CapturedModule(strategy, module, self.config, self.backend), {}
        part = self._module.part
        self._module.start()
        if self._module.part != part or not self._steps:
            self._steps = {name: CapturedStep(self._module, name) for name in STEPS}
        for step in self._steps.values():
            step.begin_run()
        self.running, self.training = self._steps, self._steps[TRAINING]

    def _why_not(self) -> str:
        """Return why no step of this run is captured, or nothing."""
        if self.config.engine == "torch":
            return "engine='torch'"
        # with either of them `torch.compile` compiles nothing
        for variable in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
            if os.environ.get(variable) == "1":
                return f"{variable}=1 is set"
        if (why := obstacle()) and self.config.fallback == "raise":
            raise RuntimeError(f"steps are not captured: {why}")
        if why:
            _say(why)
        return why

    def teardown(self) -> None:
        """End the run; without a :meth:`setup` before it, do nothing."""
        for step in self.running.values():
            step.end_run()
        self.running, self.training = {}, None
        if self._module is not None:
            self._module.stop()

    def step(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which the module's step of this name is the captured one."""
        if not self.running or (step := self._steps[name]).passes():
            return _NO_CONTEXT
        return step

    def backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, as part of the training step."""
        if not self.running:
            return run(*args, **kwargs)
        return self._steps["training_step"].backward(run, *args, **kwargs)

    def _request(self) -> "CompileRequest":
        assert self._module is not None
        return self._module.request()

    def __getstate__(self) -> dict[str, Any]:
        # sessions and compiled code belong to a process; the next setup makes new ones
        return {**vars(Capture(self.config)), "_report": self.report}
