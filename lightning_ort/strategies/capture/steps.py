"""Capture the steps of a LightningModule, for any strategy: :class:`CompiledStepsMixin`.

The strategy's ``training_step`` (and validation, test, predict) runs as Lightning wrote it. For its length the module
has a :class:`StepCapture` where its own step was, and the capture

1. puts the stand-ins for Lightning's helpers in place (:mod:`~lightning_ort.strategies.capture.shims`),
2. calls the compiled step, or, in module mode, the step itself with its child modules compiled,
3. takes the stand-ins out and gives Lightning what was logged,
4. looks at what dynamo did, if anything (:mod:`~lightning_ort.strategies.capture.dynamo_monitor`), and decides how to go on.

Under ``placement="measured"`` the first steps that compile nothing are done by turns captured and as they are, under
``engine="auto"`` compiled by inductor too, and the fastest way is kept (:mod:`~lightning_ort.strategies.capture.autotuner`).

Nothing stays on the module between calls.
"""

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_ort.compiler.report import CompileReport, FallbackReport, Reason, ReasonType, StepReport
from lightning_ort.config import ORTConfig
from lightning_ort.strategies.capture.autotuner import Engine, StepAutotuner
from lightning_ort.strategies.capture.dynamo_monitor import DynamoMonitor, Outcome, forget_backend, release
from lightning_ort.strategies.capture.shims import (
    MISSING,
    ModulePatches,
    StepPatches,
    callable_children,
    compiled_by_user,
    put_back,
)
from lightning_ort.strategies.run_report import RunReportMixin

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch.utils.hooks import RemovableHandle

    from lightning_ort.compiler.backend import ORTBackend

STEPS = ("training_step", "validation_step", "test_step", "predict_step")

# A counter compiles as a constant, as a second constant and then as a symbol. More steps in a row than that which
# compile what was compiled before mean that something differs in each step, until dynamo gives up.
_MAX_RECOMPILING_STEPS = 3
# Of one frame, in dynamo; the default of 8 is for one model, not for four steps with their partial batches and epochs.
_RECOMPILE_LIMIT = 32

Mode = Literal["step", "modules", "off"]

_regions_of_the_dead: list[int] = []  # what dynamo has compiled for modules that are gone
_living: "weakref.WeakSet[CapturedModule]" = weakref.WeakSet()
_collect_at = 8  # so many, most of which are likely to be gone but for a collection of garbage


class CapturedModule:
    """A LightningModule whose steps are captured.

    Args:
        strategy: The strategy that runs its steps.
        module: The module.
        backend: Compiles the graphs, and keeps the report.

    """

    def __init__(self, strategy: "CompiledStepsMixin", module: "pl.LightningModule", backend: "ORTBackend") -> None:
        self.module = module
        self.attributes = vars(module)
        self.backend = backend
        self.config = strategy.ort_config
        self.watch = DynamoMonitor()
        self.step_patches = StepPatches(module, self._on_closure)
        self.recorder = self.step_patches.recorder
        self.mode: Mode = "off"
        self.closure_seen = False
        self._strategy = strategy
        self._optimizers: Any = None
        self._module_patches: dict[Engine, ModulePatches] = {}
        self.steps: dict[str, AbstractContextManager[None]] = {}
        self._regions: list[int] = []
        # now, between the runs of the Trainer, and not when the collector of garbage comes by
        _collect()
        release(_regions_of_the_dead)
        _living.add(self)
        weakref.finalize(self, _regions_of_the_dead.extend, self._regions).atexit = False

    def start(self) -> None:
        """Prepare for a run of the Trainer: the module may have changed since the last one."""
        self._optimizers = None
        if (mode := self._choose_mode()) != self.mode or not self.steps:
            self.mode = mode
            self.steps = {name: StepCapture(self, name) for name in STEPS}
            self._module_patches = {}
        if self.config.engine == "auto" and torch.are_deterministic_algorithms_enabled():
            self.note("all steps", ReasonType.STATIC_RULE, "nothing is timed, so inductor is not tried")
        self.watch.install()
        # AOTAutograd's graphs have no second gradient, and it says so when the loss is back-propagated, too late; what
        # a call of `torch.autograd.grad` is for cannot be known before
        self.backend.leave = self.watch.met_autograd

    def stop(self) -> None:
        """End a run of the Trainer."""
        self.backend.leave = None
        self.watch.remove()

    def refresh(self) -> None:
        """Prepare for a step, where something has changed; what has not changed stays the same object to dynamo."""
        if self._optimizers is self._strategy._lightning_optimizers:
            return
        self._optimizers = self._strategy._lightning_optimizers
        optimizers = [] if self.module.automatic_optimization else self._optimizers
        # only a strategy that wraps the module in something with hooks has any
        wrapper_hooks: Iterable[RemovableHandle] = getattr(self._strategy, "wrapper_hooks", tuple)()
        self.step_patches.refresh(optimizers, wrapper_hooks)

    def _choose_mode(self) -> Mode:
        compiled = compiled_by_user(self.module)
        if compiled is None:
            return "modules" if self.config.capture == "modules" else "step"
        if compiled == "":
            self.note("module", ReasonType.ALREADY_COMPILED, f"{type(self.module).__name__} is left as it is")
            return "off"
        self.note(compiled, ReasonType.ALREADY_COMPILED, "left as it is; only its siblings are captured")
        return "modules"

    def new_trial(self) -> StepAutotuner | None:
        """Make a trial for a step, where timing is to decide."""
        if self.config.placement != "measured" or torch.are_deterministic_algorithms_enabled():
            return None
        device = self._strategy.root_device
        engines: list[Engine] = ["ort", "torch", "inductor"] if self.config.engine == "auto" else ["ort", "torch"]
        synchronize = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else _do_nothing
        return StepAutotuner(engines, synchronize)

    def compile(self, function: Callable[..., Any], engine: Engine = "ort") -> Callable[..., Any]:
        """Compile a function for an engine; dynamo starts its work at the first call."""
        compiled = torch.compile(  # type: ignore[call-overload]
            function,
            backend=self.backend if engine == "ort" else engine,
            options=None if engine == "ort" else {"fallback_random": True},  # the masks of eager
            dynamic=self.config.dynamic,
            recompile_limit=_RECOMPILE_LIMIT,
            # the limit is for this function, not for all modules of its class, nor for all our frames around children
            isolate_recompiles=True,
        )
        forget_backend(self.backend)
        self._regions.append(compiled._isolate_recompiles_id)
        return compiled

    def module_patches(self, engine: Engine) -> ModulePatches:
        """Return the compiled children, for module mode."""
        if engine not in self._module_patches:
            children = [child for child in callable_children(self.module) if compiled_by_user(child) is None]
            self._module_patches[engine] = ModulePatches(children, functools.partial(self.compile, engine=engine))
        return self._module_patches[engine]

    def note(self, where: str, kind: ReasonType, text: str) -> None:
        """Report a choice that was made for the user, once."""
        reason = Reason(kind, text)
        if self.backend.report.record_choice(where, reason):
            rank_zero_info("lightning-ort: %s: %s", where, reason)

    def _on_closure(self) -> None:
        self.closure_seen = self.watch.dirty = True


def _collect() -> None:
    """Have modules of earlier runs go, with their sessions: each is part of a cycle with its Trainer."""
    global _collect_at
    if len(_living) >= _collect_at:
        gc.collect()
        _collect_at = max(8, 2 * len(_living))


class StepCapture(AbstractContextManager):
    """One captured step: in a ``with`` block, the module's step is the compiled one.

    Args:
        steps: The captured module.
        name: Such as ``"training_step"``.

    """

    def __init__(self, steps: "CapturedModule", name: str) -> None:
        self._steps = steps
        self._name = name
        self._mode: Mode = steps.mode
        self._step: Any = None  # the user's, bound
        self._function: Any = None
        self._code: CodeType | None = None
        self._compiled: dict[Engine, Any] = {}
        self._engine: Engine = "ort"  # once there is nothing to try
        self._stand_in: Callable[..., Any] = _not_prepared
        self._before: Any = MISSING
        self._recompiling = 0
        self._trials = 0
        self.trial: StepAutotuner | None = None

    @override
    def __enter__(self) -> None:
        self._steps.refresh()
        step = getattr(self._steps.module, self._name)
        # bound methods are made anew by each access, so their function tells whether the user replaced the step
        if getattr(step, "__func__", step) is not self._function:
            self._prepare(step)
        attributes = self._steps.attributes
        self._before = attributes.get(self._name, MISSING)
        attributes[self._name] = self._stand_in

    @override
    def __exit__(self, *exc_info: object) -> None:
        self._restore()

    def _restore(self) -> None:
        attributes = self._steps.attributes
        if attributes.get(self._name) is self._stand_in:
            put_back(attributes, self._name, self._before)

    def _prepare(self, step: Callable[..., Any]) -> None:
        """Compile a step that is new here; dynamo starts its work at the first call."""
        self._step, self._function = step, getattr(step, "__func__", step)
        self._code = getattr(self._function, "__code__", None)
        self._recompiling = 0
        self._mode = self._steps.mode
        if self._mode == "step":
            if hasattr(step, "_torchdynamo_orig_callable"):
                self._steps.note(self._name, ReasonType.ALREADY_COMPILED, "left as it is")
                self._mode = "off"
            elif not isinstance(self._function, FunctionType):  # a mock, a partial: nothing that dynamo could trace
                self._mode = "modules"
        self._compiled, self._engine = {}, "ort"
        self.trial = self._steps.new_trial() if self._mode != "off" else None

        @functools.wraps(step)  # Lightning reads the signature of a step
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        self._stand_in = stand_in

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for the module's step."""
        self._restore()
        trial = self.trial
        if trial is None:
            return self._run_on(self._engine, *args, **kwargs)
        engine = trial.next()
        if trial.over:
            self._judge(trial)
            return self._run(*args, **kwargs)
        with trial.clock():
            return self._run_on(engine, *args, **kwargs)

    def _run_on(self, engine: Engine, *args: Any, **kwargs: Any) -> Any:
        if engine == "torch" or self._mode == "off":
            return self._step(*args, **kwargs)
        steps = self._steps
        steps.backend.label = self._name
        call = self._step
        patches: StepPatches | ModulePatches = steps.step_patches
        if self._mode == "modules":
            patches = steps.module_patches(engine)
        elif engine in self._compiled:
            call = self._compiled[engine]
        else:
            call = self._compiled[engine] = steps.compile(call, engine)
        try:
            patches.apply()
            steps.watch.begin()
            output = call(*args, **kwargs)
        except BaseException as error:
            self._leave(patches)
            if isinstance(error, Exception):  # what was logged before the user's error is logged in eager mode too
                with suppress(Exception):
                    steps.recorder.replay()
            steps.recorder.discard()
            if steps.watch.dirty:
                self._count(steps.watch.outcome(self._code))
            raise
        self._leave(patches)
        steps.recorder.replay()
        if steps.watch.dirty:
            self._decide(steps.watch.outcome(self._code), engine)
        elif self._recompiling:
            self._recompiling = 0
        return output

    def _leave(self, patches: StepPatches | ModulePatches) -> None:
        self._steps.watch.end()
        patches.undo()

    def _count(self, outcome: Outcome) -> None:
        if self.trial is not None:
            self.trial.spoil()
        report = self._steps.backend.report
        report.graph_breaks += outcome.graph_breaks
        report.recompiles += outcome.recompiles

    def _decide(self, outcome: Outcome, engine: Engine) -> None:
        """Go on capturing this step as before, or in another way."""
        self._count(outcome)
        if engine == "inductor" and (outcome.error is not None or outcome.limit is not None):
            cause = getattr(outcome.error, "inner_exception", outcome.error)
            self._do_without_inductor(_explanation(str(cause or outcome.limit)))
            return
        if outcome.untraceable is not None and outcome.skipped is outcome.skipped_rest is None:
            self._steps.note(self._name, ReasonType.DYNAMIC_SHAPE, f"{outcome.untraceable}; the graph ends there")
        self._recompiling = self._recompiling + 1 if outcome.recompiles else 0
        if outcome.error is not None:
            self._give_up(ReasonType.CAPTURE_FAILED, _explanation(str(outcome.error)), outcome.error)
        elif outcome.limit is not None:
            self._give_up(ReasonType.RECOMPILING, outcome.limit)
        elif self._mode != "step":
            return
        elif outcome.skipped is not None:
            self._give_up(ReasonType.CAPTURE_FAILED, _explanation(outcome.skipped))
        elif outcome.met_autograd:
            self._set_mode("off")
            text = "it calls `torch.autograd.grad`, and graphs of torch.compile have one gradient; it is left as it is"
            self._steps.note(self._name, ReasonType.SECOND_GRADIENT, text)
        elif self._steps.closure_seen:
            self._use_modules(ReasonType.CAPTURE_FAILED, "an optimizer runs a closure, which no graph can hold")
        elif self._steps.config.capture == "auto":
            if outcome.skipped_rest is not None:
                self._use_modules(ReasonType.CAPTURE_FAILED, f"of a part: {_explanation(outcome.skipped_rest)}")
            elif self._recompiling > _MAX_RECOMPILING_STEPS:
                self._use_modules(ReasonType.RECOMPILING, f"{self._recompiling} steps in a row compiled again")

    def _judge(self, trial: StepAutotuner) -> None:
        """Keep the fastest engine; the processes of a run go by the first one's times."""
        backend = self._steps.backend
        times = trial.milliseconds
        self._trials += 1
        if backend.agree is not None:
            times = backend.agree(f"{self._name}/{self._trials}", times)
        self.trial = None
        report = StepReport(self._name, times)
        backend.report.steps.append(report)
        if report.engine == "torch":
            self._set_mode("off")
            text = f"{times['ort']:.3g} ms captured, {times['torch']:.3g} ms as it is; it is left as it is"
            self._steps.note(self._name, ReasonType.SLOWER, text)
        elif report.engine == "inductor":
            self._engine = "inductor"
            text = f"{times['ort']:.3g} ms, {times['inductor']:.3g} ms compiled by inductor, which keeps it"
            self._steps.note(self._name, ReasonType.SLOWER, text)

    def _do_without_inductor(self, why: str) -> None:
        self._steps.note(self._name, ReasonType.INDUCTOR_FAILED, f"{why}; inductor is not tried")
        self._engine = "ort"
        if self.trial is not None:
            self.trial.drop("inductor")

    def _give_up(self, kind: ReasonType, text: str, error: BaseException | None = None) -> None:
        """Report that a part of the step cannot be captured; a step becomes its child modules, or is left to torch.

        Raises:
            ORTFallbackError: Under ``fallback="raise"``.

        """
        inner = getattr(error, "inner_exception", None)
        if inner is not None and self._steps.config.fallback == "raise":
            raise inner  # from our compiler, which has reported it
        if self._mode == "step":
            if self._steps.config.capture == "auto":
                self._set_mode("modules")
                text += "; its child modules are captured instead"
            else:
                self._set_mode("off")
        self._steps.backend.fall_back(self._name, Reason(kind, text))

    def _use_modules(self, kind: ReasonType, why: str) -> None:
        self._set_mode("modules")
        self._steps.note(self._name, kind, f"{why}; its child modules are captured instead")

    def _set_mode(self, mode: Mode) -> None:
        release([compiled._isolate_recompiles_id for compiled in self._compiled.values()])
        self._mode, self._compiled, self._engine, self._recompiling = mode, {}, "ort", 0
        self.trial = self._steps.new_trial() if mode != "off" else None


class CompiledStepsMixin(RunReportMixin):
    """Runs the steps of the LightningModule on ONNX Runtime, under any strategy that it is put in front of.

    Args:
        config: Settings, or a mapping with the same keys.
        **kwargs: For the strategy.

    """

    def __init__(self, config: ORTConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ort_config = ORTConfig.parse(config)
        self._backend: ORTBackend | None = None
        self._report = CompileReport()
        self._captured: CapturedModule | None = None
        self._steps = _NO_CAPTURE

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        if self.ort_config.capture == "off":
            note = FallbackReport("all steps", Reason(ReasonType.CAPTURE_OFF))
            self._report.notes = [note]
            return
        if self._backend is None:
            # here and not above: onnxruntime is loaded when there is something to run on it
            from lightning_ort.compiler.backend import ORTBackend

            self._backend = ORTBackend(dataclasses.replace(self.ort_config, engine="ort"))
            self._backend.report.optimizers = self._report.optimizers
            self._report = self._backend.report
        if not self._backend.available:
            return
        module = self.lightning_module
        assert module is not None
        if self._captured is None or self._captured.module is not module:
            self._captured = CapturedModule(self, module, self._backend)
        self._captured.start()
        self._steps = self._captured.steps

    @override
    def teardown(self) -> None:
        self._steps = _NO_CAPTURE
        if self._captured is not None:
            self._captured.stop()
        super().teardown()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._steps["training_step"]:
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        trial = getattr(self._steps["training_step"], "trial", None)
        with trial.clock() if trial is not None else _NO_CONTEXT:
            try:
                return super().backward(*args, **kwargs)
            except RuntimeError as error:
                if "does not currently support double backward" not in str(error):
                    raise
                raise RuntimeError(
                    "The gradient of a gradient was asked for (`create_graph=True`), and a graph on ONNX Runtime or"
                    " another torch.compile backend has none. Pass ORTConfig(capture='off') to the strategy, or put"
                    " @torch.compiler.disable in front of the method that computes what is differentiated twice."
                ) from error

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._steps["validation_step"]:
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._steps["test_step"]:
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._steps["predict_step"]:
            return super().predict_step(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # sessions and compiled code belong to a process; the next setup makes them anew
        state = super().__getstate__()
        return {**state, "_backend": None, "_captured": None, "_steps": _NO_CAPTURE}


_NO_CONTEXT = nullcontext()
_NO_CAPTURE: Mapping[str, AbstractContextManager[None]] = dict.fromkeys(STEPS, _NO_CONTEXT)


def _do_nothing() -> None:
    pass


def _not_prepared(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a capture is prepared when it is entered")


def _explanation(message: str) -> str:
    """Return the sentence of one of dynamo's messages that is worth a line, which they hide in a page."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["no message"]
    return next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), lines[0])
