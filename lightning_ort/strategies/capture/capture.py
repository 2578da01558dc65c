"""Capture the steps of a LightningModule, for any strategy: :class:`Capture`."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_ort.compat import dynamo
from lightning_ort.compiler.engines import ENGINES
from lightning_ort.compiler.machine import recorder
from lightning_ort.compiler.machine.recorder import Recorder
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.report.data import FallbackReport
from lightning_ort.compiler.report.report import CompileReport
from lightning_ort.compiler.request import CompileRequest, weakly
from lightning_ort.config import ORTConfig
from lightning_ort.strategies.capture.module import CapturedModule
from lightning_ort.strategies.capture.step import CapturedStep
from lightning_ort.strategies.race.run_facts import STEPS, TRAINING, is_amortized, setting_for

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
    from torch.optim import Optimizer

    from lightning_ort.compiler.backend import ORTBackend
    from lightning_ort.optim.recorded_update import RecordedUpdate


_NO_CONTEXT = nullcontext()


class Capture:
    """Captures the steps of a strategy's LightningModule."""

    def __init__(self, config: ORTConfig) -> None:
        self.config = config
        self._report = CompileReport()  # until there is a backend, which has its own
        self.backend: ORTBackend | None = None  # until the first setup, and if capture is off
        self._module: CapturedModule | None = None
        self._steps: dict[str, CapturedStep] = {}
        self._active = False
        self.training: CapturedStep | None = None  # the training step, while a run lasts

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
        recorder = _recorder_of(strategy) if self.config.debug.record_step else None
        if self.config.engine == "torch":
            self.report.notes = [FallbackReport("all steps", Reason(ReasonType.CAPTURE_OFF, "engine='torch'"))]
            return
        if (variable := dynamo.switched_off_by()) is not None:
            self.report.notes = [FallbackReport("all steps", Reason(ReasonType.CAPTURE_OFF, f"{variable}=1 is set"))]
            return
        if self.backend is None:
            from lightning_ort.compiler.backend import ORTBackend

            debug = dataclasses.replace(self.config.debug, record_step=False)
            others = dataclasses.replace(self.config, debug=debug)
            for_regions = dataclasses.replace(others, engine="ort", start="now", dropout_masks="exact")
            # most short runs compile nothing, and need no onnxruntime
            is_named = debug.providers is not None or debug.kernels != "auto"
            loads = is_named or self.config.fallback == "raise" or not is_amortized(self.config)
            self.backend = ORTBackend(for_regions, weakly(self._request, CompileRequest()), loads)
            self.backend.report.optimizers = self._report.optimizers
        if not self.backend.available and setting_for(self.config, strategy.root_device) == "ort":
            return
        module = strategy.lightning_module
        assert module is not None
        if self._module is None or self._module.module is not module:
            self._module, self._steps = CapturedModule(strategy, module, self.config, self.backend), {}
        self._module.recorder = self._module.recorder or recorder
        part = self._module.part
        self._module.start()
        if self._module.part != part or not self._steps:
            self._steps = {name: CapturedStep(self._module, name) for name in STEPS}
        for step in self._steps.values():
            step.begin_run()
        self._active, self.training = True, self._steps[TRAINING]

    def teardown(self) -> None:
        """End the run; without a :meth:`setup` before it, do nothing."""
        if self._active:
            for step in self._steps.values():
                step.end_run()
        self._active, self.training = False, None
        if self._module is not None:
            self._module.stop()

    def step(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which the module's step of this name is the captured one."""
        if not self._active or (step := self._steps[name]).passes():
            return _NO_CONTEXT
        return step

    def backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, as part of the training step."""
        if not self._active:
            return run(*args, **kwargs)
        return self._steps["training_step"].backward(run, *args, **kwargs)

    def update(self, optimizer: "Optimizer") -> "RecordedUpdate | None":
        """Return what clips and updates after a backward pass that was a replay, once for each."""
        module = self._module
        if not self._active or module is None or module.recording_made is None:
            return None
        replayed, module.replayed = module.replayed, None
        if replayed is None:
            return None
        if replayed.update is None or replayed.update.optimizer is not optimizer:
            from lightning_ort.optim.recorded_update import RecordedUpdate  # not at the top: it loads the passes

            replayed.update = RecordedUpdate(optimizer, module.recording_made)
        update: RecordedUpdate = replayed.update
        return update

    def _request(self) -> CompileRequest:
        return CompileRequest() if self._module is None else self._module.request()

    def __getstate__(self) -> dict[str, Any]:
        # sessions and compiled code belong to a process; the next setup makes new ones
        return {**vars(Capture(self.config)), "_report": self.report}


def _recorder_of(strategy: "Strategy") -> Recorder:
    """Return what records on a strategy's device; ``ValueError`` if nothing can be recorded there."""
    device, given = strategy.root_device, "DebugSettings(record_step=True)"
    if (found := recorder.recorder_for(device)) is None:
        raise ValueError(f"{given} records CUDA graphs, which {device} has not. Train on a GPU, or leave it out.")
    if strategy.model is not strategy.lightning_module or getattr(strategy, "world_size", 1) > 1:
        raise ValueError(f"{given} is for one process: {type(strategy).__name__} takes part in backward passes.")
    if strategy.precision_plugin.precision == "16-mixed":
        raise ValueError(f"{given}: 16-mixed scales the loss by a number that varies. Use 'bf16-mixed'.")
    if obstacle := ENGINES["inductor"].obstacle(device.type == "cuda"):
        raise ValueError(f"{given} needs inductor: {obstacle}.")
    return found
