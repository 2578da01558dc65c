"""Audits of captured steps: :class:`StepAudit`.

What dynamo traces is not always what Python does: it misses changes of objects that a step compares, drops mutations of
containers, and computes with substitutes of NumPy. No list of such cases is complete. So some captured steps are
repeated in eager by a copy of the process (:mod:`~lightning_ort.strategies.audit.forked_copy`), from the same state.
The results are compared: what the step returned and logged, what it left behind in the module and the objects that this
holds, and its gradients (:mod:`~lightning_ort.strategies.audit.snapshot`).

A difference counts if eager, repeated, has the same result again, and if it is beyond what roundings explain: the step
is repeated with parameters and inputs that differ by roundings, to see how much its results change.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import nn

from lightning_ort._busy import Stopwatch, slowdown
from lightning_ort.compat.in_double import InDouble
from lightning_ort.compat.lightning import backward_of_step, current_epoch
from lightning_ort.compat.torch import without_collectives
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.running.graph_check import PLAIN, ROUNDED, TOLERANCE
from lightning_ort.strategies.audit import forked_copy, schedule, sealed_process
from lightning_ort.strategies.audit.forked_copy import ForkedCopy
from lightning_ort.strategies.audit.snapshot import (
    GRADIENT,
    Findings,
    Value,
    differences,
    gradients,
    left_behind,
    random_numbers,
    snapshot,
    tensors_in,
)
from lightning_ort.strategies.capture.dynamo_monitor import DynamoMonitor
from lightning_ort.strategies.capture.shims import StepShims, given_iterator
from lightning_ort.strategies.race.run_facts import TRAINING, RunFacts

MAX_SHOWN = 3  # differences in a message
MAX_UNKNOWN = 3  # audits in a row that find nothing out, until there are no more
FEW = 10  # captured steps of a run, of which too few audits are nothing to tell

# a command beside PLAIN and ROUNDED: other roundings and exact operations, since a loss near 0 may be the rounding of
# what it is a difference of
_EXACT = 1 + max(ROUNDED)
_EXACT_PATIENCE = 6.0  # times the limit of all others: a convolution in float64 takes up to 20 times as long
_LARGE = 0.1  # a relative difference that needs no second audit
# a difference may be this many times what other roundings of parameters and inputs make
_ROUNDINGS = 30.0


def unexplained(
    own: Mapping[str, Value], copy: Callable[[int], Mapping[str, Value] | None], tolerance: float
) -> Findings | None:
    """Return in what a captured step differs from eager; ``None`` if that cannot be told.

    ``copy`` returns what eager computes: as it is for 0, with other roundings for 1 and 2, exactly for 3. Exact
    operations take much longer than others: without an answer, what they might explain counts.
    """
    eager = copy(PLAIN)
    if eager is None:
        return None
    found = differences(own, eager, tolerance)
    if not found.names:
        return found
    if (again := copy(PLAIN)) is None:
        return None
    unsteady = differences(again, eager, 0.0).names  # clocks, and what is random beyond torch's generators
    if found.names <= unsteady:
        return Findings()
    explained, left = Findings(), found
    for command in (*ROUNDED, _EXACT):
        if command == _EXACT and not left.relative:
            break
        if (rounded := copy(command)) is None:
            return left if command == _EXACT else None
        change = differences(rounded, eager, 0.0)
        unsteady |= change.other.keys()
        for name, relative in change.relative.items():
            explained.relative[name] = max(relative, explained.relative.get(name, 0.0))
        left = Findings(
            {
                name: relative
                for name, relative in found.relative.items()
                if name not in unsteady and relative > _ROUNDINGS * explained.relative.get(name, 0.0)
            },
            {name: text for name, text in found.other.items() if name not in unsteady},
        )
    return left


def may_copy_process(device: torch.device) -> bool:
    """Return whether a copy of the process can repeat a step; else compiled graphs are compared with eager."""
    return device.type == "cpu" and not sealed_process.unsupported()


def not_audited(run: RunFacts, name: str, args: Iterable[Any]) -> str:
    """Say why a step of a name, with these arguments, is not audited; nothing if it may be."""
    if given_iterator(args):
        return "it is given an iterator, which its copy would read too"
    if not may_copy_process(run.device):
        where = "this system" if run.device.type == "cpu" else run.device.type
        return f"no process that uses {where} can be copied; the first runs of its graphs are compared with eager"
    if run.config.dropout_masks == "fast":
        return "dropout_masks='fast' draws other masks than eager"
    if not run.is_alone and name == TRAINING and not run.module.automatic_optimization:
        return "it exchanges gradients with other processes"
    return ""


class AuditBudget:
    """What the audits of one run of the Trainer take, all steps together."""

    def __init__(self, run: RunFacts) -> None:
        self._run = run
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a run of the Trainer."""
        self._spent = 0.0
        self._stopwatch = Stopwatch()

    @property
    def allowed(self) -> float:
        """Seconds that they may take in all."""
        return schedule.allowed_seconds(self._run.elapsed, self._run.spent - self._spent)

    @property
    def left(self) -> float:
        """Seconds that the next one may take."""
        return self.allowed - self._spent

    def slowdown(self) -> float:
        """Return how many times as long as on an idle machine this thread took for everything since the last call."""
        (seconds, waited), self._stopwatch = self._stopwatch.read(), Stopwatch()
        return slowdown(seconds, waited)

    def add(self, name: str, seconds: float) -> None:
        """Count an audit of a step, as something that this has cost."""
        self._spent += seconds
        self._run.races[name].spend(seconds)
        self._run.backend.report.run.audit_seconds += seconds


class StepAudit:
    """Audits one kind of step of a module: decides when, and says what is wrong."""

    def __init__(self, run: RunFacts, name: str, budget: AuditBudget, shims: StepShims, monitor: DynamoMonitor) -> None:
        self._run, self._name, self._budget = run, name, budget
        self._shims, self._monitor = shims, monitor
        self.audit: _Audit | None = None  # that runs
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a run of the Trainer."""
        self._steps, self._captured = -1, 0  # captured, since the last one that compiled and in all
        self._schedule = schedule.Schedule(f"{self._name} {torch.initial_seed()}")
        self._off = self._run.config.audit == "off"
        self._unknown = self._done = 0  # audits in a row that found nothing out, and others
        self._processor = 0.0  # seconds of the last copy
        self._expected = 0.0  # seconds, of the last one that was due
        self._suspected = False  # whether the next audit has to confirm what the last one has found

    def end_run(self) -> None:
        """End a run: say of a step that it is not audited if it hardly was."""
        self.close()
        if not self._off and self._done < schedule.ENOUGH and self._captured >= FEW:
            allowed = self._budget.allowed
            self._note(
                f"only {self._done} of {self._captured} captured steps were repeated: one takes about"
                f" {self._expected:.2g} s, and {allowed:.2g} s may be spent in a run of {self._run.elapsed:.2g} s"
            )

    def after_compiling(self) -> None:
        """Audit the steps that follow."""
        self._steps = 0
        self._schedule.restart()

    def begin(self, call: Callable[..., Any], args: Any, kwargs: Any, logs: bool) -> bool:
        """Copy the process before a captured step that is to be audited; return whether it is."""
        if self.audit is not None:
            self.close()
        self._steps += 1
        self._captured += 1
        epoch = current_epoch(self._run.module)
        if self._off or not self._schedule.is_due(self._steps, epoch) or self._would_disturb:
            return False
        if reason := not_audited(self._run, self._name, args) or forked_copy.unavailable():
            self._stop(reason)
            return False
        self._schedule.passed(self._steps, epoch)
        budget, usual = self._budget, self._run.races[self._name].usual
        expected = schedule.expected_seconds(usual, torch.get_num_threads(), self._processor, budget.slowdown())
        self._expected = expected
        if expected > budget.left and not self._suspected:
            return False
        seconds = schedule.limit_seconds(expected)
        try:
            self.audit = _Audit(self._run, self._name, self._shims, self._monitor, call, args, kwargs, logs, seconds)
        except OSError as error:
            self._count_unknown(error.strerror or str(error))
        return self.audit is not None

    def passes(self) -> bool:
        """Count a captured step that is not to be audited; return whether it is one."""
        is_due = not self._off and self._schedule.is_due(self._steps + 1, current_epoch(self._run.module))
        if self.audit is not None or (is_due and not self._would_disturb):
            return False
        self._steps += 1
        self._captured += 1
        return True

    @property
    def _would_disturb(self) -> bool:
        """Whether something is timed that an audit would make slower, which writes to memory shared with a copy."""
        compiles = self._steps == 0  # the first call, in which regions are timed
        in_turns = self._run.races[self._name].trying is not None and not self._suspected
        return (compiles and self._run.config.placement == "measured") or (in_turns and self._done > 0)

    def after_step(self, output: Any) -> str:
        """After the captured step, before what it logged is handed on; return in what it differs from eager."""
        if (audit := self.audit) is None:
            return ""
        if not self._look(audit.after_step, output):
            return ""
        return "" if audit.has_backward else self._finish(audit)

    def after_backward(self) -> str:
        """After the backward pass of a training step; return in what it differs from eager."""
        if (audit := self.audit) is None or not audit.waits_for_backward:
            return ""
        return self._finish(audit) if self._look(audit.after_backward) else ""

    def close(self) -> None:
        """Give up an audit that runs: the step has failed, or has no backward pass."""
        if self.audit is not None:
            self.audit.close()
            self.audit = None

    def _look(self, look: Callable[..., None], *args: Any) -> bool:
        """Look at what the step has done; return whether that was possible: an audit never ends a run."""
        try:
            look(*args)
        except Exception as error:  # such as an object that cannot be read
            self.close()
            self._count_unknown(f"{type(error).__name__}: {error}".partition("\n")[0])
            return False
        return True

    def _finish(self, audit: "_Audit") -> str:
        try:
            found = audit.findings()
        finally:
            self.close()
        self._budget.add(self._name, audit.seconds)
        self._processor = audit.processor_seconds
        if found is None:
            self._count_unknown(audit.problem)
            return ""
        self._unknown = 0
        self._done += 1
        run = self._run.backend.report.run
        run.audits += 1
        run.audit_difference = max(run.audit_difference, audit.largest)
        large = bool(found.other) or max(found.relative.values(), default=0.0) >= _LARGE
        confirmed, self._suspected = self._suspected, bool(found.names)
        if not self._suspected:
            return ""
        if not large and not confirmed:
            # the next step confirms it, or it was a tie that a rounding has decided
            self._schedule.passed(self._steps, current_epoch(self._run.module), again=True)
            return ""
        return audit.describe(found)

    def _count_unknown(self, problem: str) -> None:
        self._unknown += 1
        if self._unknown >= MAX_UNKNOWN:
            self._stop(f"a copy of the process could not repeat it: {problem}")

    def _stop(self, reason: str) -> None:
        self._off = True
        self._note(reason)

    def _note(self, reason: str) -> None:
        self._run.backend.report.record_choice(self._name, Reason(ReasonType.NOT_AUDITED, reason))


class _Audit:
    """One captured step, and the copy of the process that repeats it."""

    def __init__(
        self,
        run: RunFacts,
        name: str,
        shims: StepShims,
        monitor: DynamoMonitor,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        logs: bool,
        seconds: float,
    ) -> None:
        self._run, self._name, self._logs = run, name, logs
        self._shims, self._monitor = shims, monitor
        module = run.module
        self._function = getattr(call, "__func__", call)
        manual = name == TRAINING and not module.automatic_optimization
        self.has_backward = name == TRAINING and not manual and run.is_alone
        self._manual = manual
        self.seconds = 0.0  # all that the step took, but for compiling: beside its copy it is slower itself
        self.processor_seconds = 0.0  # of its copy
        self._begun = perf_counter()
        self._limit, self._exact_limit = self._begun + seconds, _EXACT_PATIENCE * seconds
        self._tolerance = max(TOLERANCE.get(dtype, 0.0) for dtype in _dtypes(module))
        self._own: dict[str, Value] = {}
        self._eager: Mapping[str, Value] = {}

        def compute(command: int) -> dict[str, Value]:
            if command != PLAIN:
                _round(module, (args, kwargs), command)
            exact = InDouble() if command == _EXACT else nullcontext()
            with torch.compiler.set_stance("force_eager"), without_collectives(), exact:
                return self._repeat(call, args, kwargs)

        self._copy = ForkedCopy(compute, seconds)
        self._ask(PLAIN)
        self._step_begun = perf_counter()

    def _ask(self, command: int) -> None:
        left = self._exact_limit if command == _EXACT else self._limit - perf_counter()
        self._copy.ask(command, max(0.01, left))

    def _repeat(self, call: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Value]:
        """Run the step in eager, in the copy."""
        shims = self._shims
        shims.logger.loggers_too = False
        if self._logs:
            shims.install()
        output = call(*args, **kwargs)
        shims.remove()
        self.after_step(output)
        if self.has_backward:
            with torch.autocast("cpu", enabled=False):  # as around Lightning's backward pass
                backward_of_step(self._run.module.trainer, output)
            self.after_backward()
        return self._own

    def after_step(self, output: Any) -> None:
        if self._monitor.saw_compile:
            compiling = perf_counter() - self._step_begun
            self._begun, self._limit = self._begun + compiling, self._limit + compiling
        module = self._run.module
        logger = self._shims.logger
        logged = [(names, value) for _, _, names, value, *_ in logger.made + logger.calls] if self._logs else []
        left = left_behind(module, self._function)
        self._own = snapshot({"output": output, **left, "logged": logged}) | random_numbers()
        if self._manual:
            self._own |= gradients(module)

    def after_backward(self) -> None:
        """Look at the gradients, and at what hooks of the backward pass have left behind."""
        module = self._run.module
        parts = {key: value for key, value in vars(module).items() if not key.startswith("_")}  # those are Lightning's
        # what has a method of the module, such as a partial function, leads back to what is Lightning's
        self._own |= gradients(module) | snapshot({"after the backward pass, self": parts}, met={"self": module})

    @property
    def waits_for_backward(self) -> bool:
        """Whether the step is over; one may run backward passes itself."""
        return self.has_backward and bool(self._own)

    def findings(self) -> Findings | None:
        """Return in what the captured step differs from eager; ``None`` if that cannot be told."""
        answers = 0

        def copy(command: int) -> Mapping[str, Value] | None:
            nonlocal answers
            if answers:  # the first one is asked for at the beginning
                self._ask(command)
            found = self._copy.answer()
            self._eager = found if found is not None and not answers else self._eager
            answers += 1
            return found

        return unexplained(self._own, copy, self._tolerance)

    @property
    def problem(self) -> str:
        """Why eager could not be asked."""
        return self._copy.problem

    @property
    def largest(self) -> float:
        """The largest relative difference of a result or gradient; attributes may be clocks."""
        found = differences(self._own, self._eager, 0.0).relative
        return max((found[name] for name in found if name.startswith(("output", GRADIENT))), default=0.0)

    def describe(self, found: Findings) -> str:
        trainer = self._run.module.trainer
        batch = f"batch {trainer.fit_loop.batch_idx} of " if self._name == TRAINING else ""
        numbers = sorted(found.relative, key=lambda name: (name.startswith(GRADIENT), -found.relative[name]))
        texts = [f"{name} {text}" for name, text in found.other.items()]
        texts += [f"{name} is {self._own[name]} instead of {self._eager[name]}" for name in numbers]
        more = f", and {len(texts) - MAX_SHOWN} more" if len(texts) > MAX_SHOWN else ""
        return (
            f"captured, in {batch}epoch {trainer.current_epoch}, {'; '.join(texts[:MAX_SHOWN])}{more}. It stays in"
            " PyTorch from now on; its captured steps before may have differed too. To begin again without capture,"
            " pass ORTConfig(engine='torch') to the strategy"
        )

    def close(self) -> None:
        self._copy.close()
        self.processor_seconds = self._copy.processor_seconds
        self.seconds = perf_counter() - self._begun


def _dtypes(module: nn.Module) -> set[torch.dtype]:
    """The dtypes in which a step may compute."""
    found = {parameter.dtype for parameter in module.parameters()} or {torch.float32}
    return found | ({torch.get_autocast_dtype("cpu")} if torch.is_autocast_enabled("cpu") else set())


def _round(module: nn.Module, batch: Any, seed: int) -> None:
    """Change parameters and inputs by about as much as roundings do."""
    generator = torch.Generator().manual_seed(seed)
    halves = _dtypes(module) & {torch.float16, torch.bfloat16}
    tensors = [*module.parameters(), *(tensor for _, tensor in tensors_in(batch))]
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.layout is torch.strided:
                size = 4 * torch.finfo(next(iter(halves), tensor.dtype)).eps
                noise = torch.empty(tensor.shape, dtype=torch.float64).uniform_(-size, size, generator=generator)
                tensor.data.mul_((1 + noise).to(tensor.dtype))
