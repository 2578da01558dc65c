"""One captured step of a LightningModule: :class:`CapturedStep`.

The strategy's ``training_step`` (and validation, test, predict) runs as Lightning wrote it. Meanwhile a
:class:`CapturedStep` replaces the module's own step, and

1. installs the shims of Lightning's helpers (:mod:`~lightning_ort.strategies.capture.shims`),
2. calls the compiled step, or, in module mode, the step itself with its child modules compiled,
3. removes the shims and gives Lightning what was logged,
4. if dynamo compiled anything (:mod:`~lightning_ort.strategies.capture.dynamo_monitor`), decides how to continue.

The first step runs unchanged if more are to come, and shows what it does
(:mod:`~lightning_ort.strategies.capture.first_steps`). Under ``start="amortized"`` steps stay unchanged until capturing
them is expected to pay; inductor waits longer (:mod:`~lightning_ort.strategies.capture.gate`).

Under ``placement="measured"`` the first steps that compile nothing run alternately captured and unchanged, under
``engine="auto"`` also compiled by inductor, and the fastest way is kept
(:mod:`~lightning_ort.strategies.capture.autotuner`).

Nothing stays on the module between calls.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import FunctionType
from typing import Any

import torch
from typing_extensions import override

from lightning_ort.compat import dynamo
from lightning_ort.compat.autograd import next_number
from lightning_ort.compat.dynamo_messages import is_about_numbers, plain_reason
from lightning_ort.compat.torch import is_double_backward_error
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.out_of_memory import free_memory_of, is_out_of_memory
from lightning_ort.compiler.report import Reason, ReasonType
from lightning_ort.compiler.run_part import LABELS
from lightning_ort.strategies.audit.step_audit import StepAudit
from lightning_ort.strategies.capture.account import StepAccount
from lightning_ort.strategies.capture.autotuner import Engine, StepAutotuner
from lightning_ort.strategies.capture.dynamo_monitor import Outcome
from lightning_ort.strategies.capture.first_steps import LATE_SECOND_GRADIENT, OWN_GRADIENT, FirstSteps
from lightning_ort.strategies.capture.gate import Stage, StartGate
from lightning_ort.strategies.capture.graph_breaks import GraphBreakNotes
from lightning_ort.strategies.capture.hook_watch import HookWatch
from lightning_ort.strategies.capture.module import CapturedModule, Mode
from lightning_ort.strategies.capture.shims import MISSING, Shims, reads_logged, restore_attribute
from lightning_ort.strategies.capture.trials import StepTrials

# A counter compiles as a constant, as a second constant and then as a symbol. More steps in a row that recompile mean
# that something differs in each step, until dynamo gives up.
_MAX_RECOMPILING_STEPS = 3
# In all, as many as dynamo by default allows a frame: a partial last batch, a first epoch and a few counters stay below
# it, and what does not costs a compilation each time that a new case comes up, however long that takes.
_MAX_RECOMPILING_STEPS_IN_ALL = 8
_CHOICE = {
    "step": "the step is captured as two graphs",
    "modules": "its child modules are captured instead",
    "off": "the step stays in PyTorch",
}


class CapturedStep(AbstractContextManager[None]):
    """One captured step: in a ``with`` block, the module's step of this name is the compiled one."""

    def __init__(self, module: CapturedModule, name: str) -> None:
        self._module = module
        self._name = name
        self._mode: Mode = "off"
        self._step: Any = None  # the user's, bound
        self._first: FirstSteps  # the same
        self._function: Any = None
        self._compiled: dict[Engine, Any] = {}
        self._one_graph = name == "training_step"  # whether to try
        self._replacement: Any = None
        self._before: Any = MISSING
        self._recompiling = 0  # steps in a row
        self._recompiled = 0  # steps since the mode was chosen
        self._hooks = HookWatch(module.module)
        self._with_new_hooks = 0  # steps
        self._breaks = GraphBreakNotes(name)
        self._gate: StartGate | None = None  # while something waits to be tried
        self._uncaptured = False  # while nothing has been tried
        self._left: Mode = "off"  # how the step was captured before it turned out to be faster unchanged
        self._account = StepAccount(module, name)
        self._trials = StepTrials(module, name, self._account, self._leave)
        self._audit = StepAudit(module, name)

    def begin_run(self) -> None:
        """Begin a run of the Trainer, which is another to wait for."""
        self._audit.begin_run()
        self._account.begin_run()
        self._trials.begin_run()
        report = self._module.backend.report
        stale = [(self._name, kind) for kind in (ReasonType.NOT_COMPILED, ReasonType.NOT_TRIED)]
        report.notes = [note for note in report.notes if (note.where, note.reason.type) not in stale]
        self._waits_no_more()
        if self._gate is not None and self._module.amortized:
            self._gate = self._module.new_gate(self._name, list(self._gate.decisions))
        elif self._gate is not None:
            self._gate = None
            if self._uncaptured:
                self._uncaptured = False
                self._trials.wait(())
                self._set_mode(self._mode)

    def _waits_no_more(self) -> None:
        run = self._module.backend.report.run
        if run.waiting.startswith(f"{self._name}: "):
            run.waiting = ""

    def end_run(self) -> None:
        """End a run of the Trainer: report what was not compiled, and remember what was."""
        self._audit.close()
        gate, run = self._gate, self._module.backend.report.run
        if not self._uncaptured:
            self._account.end_run()
        if gate is None or gate.done == 0:
            return
        if self._uncaptured:
            self._record_choice(ReasonType.NOT_COMPILED, gate.why_closed)
            run.waiting = run.waiting or f"{self._name}: {gate.why_closed}"
        else:
            waiting = LABELS[next(iter(gate.decisions))]
            self._record_choice(ReasonType.NOT_TRIED, f"{waiting}: {gate.why_closed.partition(';')[0]}", announced=True)

    @property
    def timer(self) -> StepAutotuner | None:
        """What times the step and its backward pass now."""
        return self._gate.timer if self._uncaptured and self._gate is not None else self._trials.timer

    @override
    def __enter__(self) -> None:
        self._module.refresh()
        step = getattr(self._module.module, self._name)
        if step != self._step:  # bound methods are equal if function and object are the same
            self._prepare(step)
        attributes = vars(self._module.module)
        self._before = attributes.get(self._name, MISSING)
        attributes[self._name] = self._replacement

    @override
    def __exit__(self, *exc_info: object) -> None:
        self._restore()

    def _restore(self) -> None:
        attributes = vars(self._module.module)
        if attributes.get(self._name) is self._replacement:
            restore_attribute(attributes, self._name, self._before)

    def _prepare(self, step: Callable[..., Any]) -> None:
        """Choose how to run a new step; dynamo compiles it at the first call."""
        self._step, self._function = step, getattr(step, "__func__", step)
        self._first = FirstSteps(step)
        self._trials.forget_failures()
        mode = self._module.mode
        if mode == "step":
            if dynamo.is_wrapped(step):
                self._record_choice(ReasonType.ALREADY_COMPILED, _CHOICE["off"])
                mode = "off"
            elif not isinstance(self._function, FunctionType):  # a mock, a partial: nothing that dynamo could trace
                mode = "modules"
            elif reads_logged(self._function, type(self._module.module)):
                self._record_choice(ReasonType.READS_LOGGED, _CHOICE["modules"])
                mode = "modules"
        self._account.milliseconds = {}  # of another step
        stages = self._module.stages if mode != "off" else ()
        self._trials.wait(stages)
        self._set_mode(mode)
        self._gate = self._module.new_gate(self._name, stages) if stages else None
        self._uncaptured = self._gate is not None

        @functools.wraps(step)  # Lightning reads the signature of a step
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        self._replacement = replacement

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run instead of the module's step."""
        self._restore()
        account = self._account
        if (gate := self._gate) is not None:
            busy = not self._uncaptured and self._trials.timer is not None
            if (stage := gate.opens((args, kwargs), account.milliseconds, busy)) is not None:
                self._try(stage, gate)
            elif self._uncaptured:
                return self._watched(gate, *args, **kwargs) if gate.timer is not None else self._step(*args, **kwargs)
        elif not self._first.seen and self._mode != "off" and self._module.waits_for_first(self._name):
            return self._watched(None, *args, **kwargs)
        account.count_step(self._trials.timer is not None)
        if self._one_graph and (misfit := self._module.backend.misfit) is not None:
            self._one_graph = False
            self._change_mode(self._mode, ReasonType.SPLIT, misfit)
        if (reason := self._module.backend.refused.pop(self._name, None)) is not None and self._mode != "off":
            self._change_mode("off", reason.type, reason.text)
        if account.exceeded and self._mode != "off" and self._module.at_window_start():
            self._stop_compiling(account.stage, account.exceeded)
        if self._hooks.found_new() and self._mode != "off":
            self._compile_with_hooks()
        while account.failures:
            self._drop(*account.failures.popitem())
        engine = self._trials.next_engine()
        self._module.begin_step(engine)
        if (timer := self._trials.timer) is None:
            return self._run_on(engine, *args, **kwargs)
        with timer.timed():
            return self._run_on(engine, *args, **kwargs)

    def _watched(self, gate: StartGate | None, *args: Any, **kwargs: Any) -> Any:
        """Run the step unchanged; it may show that it is for eager alone."""
        run = self._first if gate is None else functools.partial(gate.run, self._first)
        output = run(*args, **kwargs)
        self._module.operations[self._name] = self._first.operations
        if (text := self._first.takes_gradients(self._mode == "step")) is not None:
            self._waits_no_more()
            self._change_mode("off", ReasonType.SECOND_GRADIENT, text)
        return output

    def _try(self, stage: Stage, gate: StartGate) -> None:
        """Try what has waited, from this step on."""
        self._account.start(gate, stage)
        self._trials.admit(stage)
        if self._uncaptured or self._mode == "off":
            self._set_mode(self._mode if self._uncaptured else self._left)
        self._gate = gate if gate.decisions else None
        self._uncaptured = False
        self._recompiling = self._recompiled = 0

    def _stop_compiling(self, stage: Stage, why: str) -> None:
        """Give up what takes too much to compile; what is captured otherwise stays."""
        if stage == "inductor" and self._trials.has_others(stage):
            self._gate = None
            self._module.backend.report.run.waiting = ""
            self._drop(stage, why, ReasonType.BUDGET)
        else:
            self._change_mode("off", ReasonType.BUDGET, why)

    def _compile_with_hooks(self) -> None:
        """Compile again with hooks that were added to modules: dynamo looks for them only when it compiles."""
        if not self._compiled and self._mode == "step":
            return  # dynamo has yet to look
        self._with_new_hooks += 1
        if self._with_new_hooks > _MAX_RECOMPILING_STEPS:
            self._change_mode("off", ReasonType.RECOMPILING, f"{self._with_new_hooks} steps came with new hooks")
        else:
            self._module.forget_children()
            self._set_mode(self._mode)

    def _run_on(self, engine: Engine, *args: Any, **kwargs: Any) -> Any:
        if engine == "torch" or self._mode == "off":
            return self._step(*args, **kwargs)
        if engine == inductor.GRAPHS and not self._module.may_record(self._name):
            self._drop(engine, "gradients are accumulated now")
            return self._step(*args, **kwargs)
        module, monitor = self._module, self._module.monitor
        module.backend.label, module.backend.began_at = self._name, next_number()
        module.backend.one_graph = (
            self._one_graph
            and self._mode == "step"
            and module.may_join
            and not torch.is_anomaly_enabled()  # its gradients come from one operation, and nobody could say from which
        )
        call, shims = self._captured(engine)
        module.account = self._account
        self._account.begin_call(engine)
        is_audited = self._audit.begin(call=self._step, args=args, kwargs=kwargs, logs=self._mode == "step")
        if is_audited and self._trials.timer is not None:
            self._trials.timer.discard_sample()
        try:
            try:
                shims.install()
                monitor.begin()
                with self._module.stance(self._trials.has_won(engine)):
                    output = call(*args, **kwargs)
            finally:
                monitor.end()
                shims.remove()
        except BaseException as error:
            self._close_call(error)
            raise
        differs = self._audit.after_step(output)
        module.shims.logger.replay()
        if monitor.saw_compile:
            self._audit.after_compiling()
            self._decide(self._count_compiles(), engine)
        elif self._recompiling:
            self._recompiling = 0
        if differs:
            self._leave_as_wrong(differs)
        return output

    def _close_call(self, error: BaseException) -> None:
        """After a captured step that failed."""
        logger = self._module.shims.logger
        self._audit.close()
        if isinstance(error, Exception):  # eager too logs what was logged before the user's error
            with suppress(Exception):
                logger.replay()
        logger.discard()
        if self._module.monitor.saw_compile:
            self._count_compiles()
        if is_double_backward_error(error):
            raise RuntimeError(LATE_SECOND_GRADIENT) from error

    def _captured(self, engine: Engine) -> tuple[Callable[..., Any], Shims]:
        """Return what to call, and what to install before."""
        if self._mode == "modules":
            return self._step, self._module.module_shims(engine)
        if engine not in self._compiled:
            self._compiled[engine] = self._module.compile(self._step, engine)
        return self._compiled[engine], self._module.shims

    def after_backward(self) -> None:
        """After the backward pass of the training step."""
        if differs := self._audit.after_backward():
            self._leave_as_wrong(differs)

    def _leave_as_wrong(self, text: str) -> None:
        """Run the step unchanged from now on, as an audit has found that it does something else when it is captured."""
        self._set_mode("off")
        self._module.backend.fall_back(self._name, Reason(ReasonType.MISMATCH, text))

    def _count_compiles(self) -> Outcome:
        outcome = self._module.monitor.outcome(getattr(self._function, "__code__", None))
        if (timer := self._trials.timer) is not None:
            timer.discard_sample()
        report = self._module.backend.report
        report.graph_breaks += outcome.graph_breaks
        report.recompiles += outcome.recompiles
        self._breaks.add(report, outcome.breaks)
        self._account.end_compiling_call(outcome, timer is not None)
        return outcome

    def _decide(self, outcome: Outcome, engine: Engine) -> None:
        """Continue to capture this step as before, or in another way."""
        cause = dynamo.backend_error(outcome.error)
        if engine in inductor.ENGINES and (outcome.error is not None or outcome.limit is not None):
            if outcome.error is not None and is_out_of_memory(outcome.error):
                free_memory_of(outcome.error)
            self._drop(engine, dynamo.explanation(str(cause or outcome.error or outcome.limit)))
            return
        if engine == inductor.GRAPHS and outcome.recompiles:
            self._drop(engine, "sizes vary")
            return
        if outcome.untraceable is not None and outcome.skipped is outcome.skipped_rest is None:
            self._record_choice(ReasonType.DYNAMIC_SHAPE, f"{outcome.untraceable}; the graph ends there")
        self._recompiling = self._recompiling + 1 if outcome.recompiles else 0
        self._recompiled += outcome.recompiles > 0
        if outcome.error is not None and is_about_numbers(outcome.error) and self._module.compile_without_numbers():
            self._set_mode(self._mode)
        elif outcome.error is not None:
            self._fall_back(ReasonType.CAPTURE_FAILED, plain_reason(str(cause or outcome.error)), outcome.error)
        elif outcome.limit is not None:
            self._fall_back(ReasonType.RECOMPILING, outcome.limit)
        elif self._mode != "step":
            if self._module.config.capture == "auto" and self._recompiled > _MAX_RECOMPILING_STEPS_IN_ALL:
                text = f"{self._recompiled} steps compiled child modules again"
                self._change_mode("off", ReasonType.RECOMPILING, text)
        elif outcome.calls_autograd_grad:
            self._change_mode("off", ReasonType.SECOND_GRADIENT, OWN_GRADIENT)
        elif outcome.skipped is not None:
            self._fall_back(ReasonType.CAPTURE_FAILED, plain_reason(outcome.skipped))
        elif self._module.closure_seen:
            text = "an optimizer runs a closure, which no graph can hold"
            self._change_mode("modules", ReasonType.CAPTURE_FAILED, text)
        elif self._module.config.capture == "auto":
            if outcome.skipped_rest is not None:
                text = f"of a part: {plain_reason(outcome.skipped_rest)}"
                self._change_mode("modules", ReasonType.CAPTURE_FAILED, text)
            elif self._recompiling > _MAX_RECOMPILING_STEPS:
                text = f"{self._recompiling} steps in a row compiled again"
                self._change_mode("modules", ReasonType.RECOMPILING, text)
            elif self._recompiled > _MAX_RECOMPILING_STEPS_IN_ALL:
                text = f"{self._recompiled} steps compiled again"
                self._change_mode("modules", ReasonType.RECOMPILING, text)

    def _drop(self, engine: Engine, why: str, kind: ReasonType = ReasonType.INDUCTOR_FAILED) -> None:
        """Go on without one of inductor's engines."""
        was_used = self._trials.give_up(engine)
        is_last = self._trials.is_over_without
        self._account.give_up(engine, is_last)
        self._record_choice(kind, f"{why}; {engine} is {'given up' if was_used else 'not tried'}")
        if is_last:
            self._set_mode("off", may_return=True)
        elif was_used:
            self._set_mode(self._mode)

    def _leave(self, text: str) -> None:
        """Run the step unchanged, which is faster; what waits may be faster still."""
        self._set_mode("off", may_return=True)
        self._record_choice(ReasonType.SLOWER, f"{text}; {_CHOICE['off']}", announced=True)

    def _fall_back(self, kind: ReasonType, text: str, error: BaseException | None = None) -> None:
        """Report that a part of the step cannot be captured; capture its child modules instead, or nothing."""
        config = self._module.config
        inner = dynamo.backend_error(error)
        if inner is not None and config.fallback == "raise":
            raise inner  # from our compiler, which has reported it
        if self._mode == "step":
            self._set_mode("modules" if config.capture == "auto" else "off")
            text += f"; {_CHOICE[self._mode]}"
        else:
            text += "; that part stays in PyTorch"
        text += " (no result changes)"
        self._module.backend.fall_back(self._name, Reason(kind, text))

    def _change_mode(self, mode: Mode, kind: ReasonType, why: str) -> None:
        if mode == "off":
            self._trials.leave()
        if mode == "off" and kind is not ReasonType.BUDGET:
            self._account.refused = str(Reason(kind, why))
            self._module.takes_gradients = self._module.takes_gradients or kind is ReasonType.SECOND_GRADIENT
        self._set_mode(mode)
        self._record_choice(kind, f"{why}; {_CHOICE[mode]}")

    def _set_mode(self, mode: Mode, may_return: bool = False) -> None:
        """Capture the step in another way; ``may_return`` lets what waits be tried later though nothing is captured."""
        dynamo.release_regions([dynamo.region_of(compiled) for compiled in self._compiled.values()])
        if may_return:
            self._left = self._mode
        elif mode == "off":
            self._gate = None
        self._mode, self._compiled = mode, {}
        self._recompiling = self._recompiled = 0
        self._account.close()
        self._trials.restart(mode)

    def _record_choice(self, kind: ReasonType, text: str, announced: bool = False) -> None:
        self._module.record_choice(self._name, kind, text, announced)
