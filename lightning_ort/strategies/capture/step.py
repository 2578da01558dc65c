"""One step of a LightningModule, run in the way that its race says: :class:`CapturedStep`.

The strategy's ``training_step`` (and validation, test, predict) runs as Lightning wrote it. Meanwhile a
:class:`CapturedStep` replaces the module's own step. It asks the race (:mod:`~lightning_ort.strategies.capture.race`)
which way the step runs. For a captured one it

1. installs the shims of Lightning's helpers (:mod:`~lightning_ort.strategies.capture.shims`),
2. calls the compiled step, or the step itself with its child modules compiled,
3. removes the shims and gives Lightning what was logged,
4. if dynamo compiled anything (:mod:`~lightning_ort.strategies.capture.dynamo_monitor`), looks up what that leads to
   (:mod:`~lightning_ort.strategies.capture.failures`).

Before the next step it tells the race how this one went. It decides nothing. Nothing stays on the module between calls.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FunctionType
from typing import Any

from torch import fx
from typing_extensions import override

from lightning_ort.compat import dynamo
from lightning_ort.compat.autograd import next_number
from lightning_ort.compat.dynamo_messages import is_about_numbers
from lightning_ort.compat.torch import is_double_backward_error
from lightning_ort.compiler import malloc
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.nodes import num_operations
from lightning_ort.compiler.out_of_memory import free_memory_of, is_out_of_memory
from lightning_ort.compiler.report import Reason, ReasonType
from lightning_ort.compiler.request import CompileRequest
from lightning_ort.strategies.audit.step_audit import StepAudit
from lightning_ort.strategies.capture import failures
from lightning_ort.strategies.capture.failures import Cause, Situation
from lightning_ort.strategies.capture.first_steps import LATE_SECOND_GRADIENT, FirstSteps
from lightning_ort.strategies.capture.graph_breaks import GraphBreakNotes
from lightning_ort.strategies.capture.hook_watch import HookWatch
from lightning_ort.strategies.capture.module import CapturedModule
from lightning_ort.strategies.capture.outlook import TRAINING
from lightning_ort.strategies.capture.race import FIRST, NO_LIMIT, UNCHANGED, Failure, Race, Way
from lightning_ort.strategies.capture.race_view import STAYS, RaceView, is_announced
from lightning_ort.strategies.capture.shims import MISSING, Shims, reads_logged, restore_attribute
from lightning_ort.strategies.capture.ways import Ways, challengers
from lightning_ort.strategies.host_memory import obstacle, resident_bytes

_QUIET = 64  # steps in which the race is not asked, at most: the report is that much behind
_NEW_HOOKS = 3  # steps that come with new hooks, until the step is not captured any more


class CapturedStep(AbstractContextManager[None]):
    """In a ``with`` block, the module's step of this name runs in the way that its race says."""

    def __init__(self, module: CapturedModule, name: str) -> None:
        self._module, self._name = module, name
        self._step: Any = None  # the user's, bound
        self._first: FirstSteps  # the same
        self._replacement: Any = None
        self._before: Any = MISSING
        self._race: Race | None = None  # from the first call on, if there is something to try
        self._ways: Ways
        self._turn = _Turn()
        self._compiled: dict[Way, Callable[..., Any]] = {}
        self._recompiling: list[int] = []  # numbers of steps that have compiled again, since the way began
        self._hooks, self._new_hooks = HookWatch(module.module), 0
        self._failures: list[tuple[Way, Failure]] = []  # that the race is to be told of
        self._refused = ""  # why the step is for eager alone
        self._breaks = GraphBreakNotes(name)
        self._audit = StepAudit(module, name)
        self._view = RaceView(module, name)

    # Runs of the Trainer

    def begin_run(self) -> None:
        """Begin a run of the Trainer."""
        self._audit.begin_run()
        self._view.begin_run()
        self._turn = _Turn()
        if self._race is not None and self._race_settings() == (self._race.share, self._race.measured):
            self._race.begin_run(self._unchanged_steps())
        else:
            self._race = None

    def end_run(self) -> None:
        """End a run of the Trainer: report what was not compiled, and remember what was."""
        self._audit.close()
        race = self._race
        if race is None:
            return
        self._tell(race)
        self._view.end_run(race)
        if self._module.module.trainer.is_global_zero and self._module.is_amortized:
            self._ways.store(race.of_run, self._refused)

    # The step of the module

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
        """Begin with a new step."""
        self._step, self._first = step, FirstSteps(step)
        self._release(self._compiled.keys())
        self._race, self._refused, self._failures = None, "", []

        @functools.wraps(step)  # Lightning reads the signature of a step
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        self._replacement = replacement

    def _first_way(self) -> Way | None:
        """How the step is captured at first, if it can be."""
        module, function = self._module, getattr(self._step, "__func__", self._step)
        part = module.part
        if part == "step":
            if dynamo.is_wrapped(self._step):
                module.record_choice(self._name, ReasonType.ALREADY_COMPILED, STAYS)
                part = None
            elif not isinstance(function, FunctionType):  # a mock, a partial: nothing that dynamo could trace
                part = "modules"
            elif reads_logged(function, type(module.module)):
                text = "its child modules are captured instead"
                module.record_choice(self._name, ReasonType.READS_LOGGED, text)
                part = "modules"
        if part is None:
            return None
        return Way("ort", part, 1 if self._name == TRAINING and part == "step" else 2)

    # Which way

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run instead of the module's step."""
        self._restore()
        turn = self._turn
        if turn.quiet > 0 and not self._failures and not self._hooks.found_new():
            turn.quiet -= 1
        else:
            way = self._ask((args, kwargs))
            if way is None:
                return self._step(*args, **kwargs)
            turn = self._turn
        if not turn.is_timed:
            return self._run_on(turn.way, *args, **kwargs)
        with turn.timed():
            return self._run_on(turn.way, *args, **kwargs)

    def _ask(self, batch: Any) -> Way | None:
        """Tell the race what has happened, and ask it for the way of the next step; ``None`` to leave it alone."""
        module = self._module
        if module.module.trainer.sanity_checking and module.is_amortized:
            return None
        module.begin_run()
        race = self._race or self._new_race(batch)
        if race is None:
            return None
        self._tell(race)
        if self._hooks.found_new() or self._turn.new_hooks:
            self._compile_with_hooks(race)
        way = race.next(
            module.steps_left(self._name, race.steps),
            module.at_window_start(),
            "" if race.is_settled else obstacle(module.device),
            0.0 if race.is_settled else resident_bytes(module.device),
        )
        self._release([old for old in self._compiled if old not in race.living])
        if way.engine == inductor.GRAPHS:
            inductor.begin_recorded_step()
        self._turn = _Turn(way, min(race.quiet_steps, _QUIET), race.wants_time, module.synchronize)
        return way

    def _new_race(self, batch: Any) -> Race | None:
        first = self._first_way()
        if first is None:
            return None
        module, agree = self._module, self._module.agree
        self._ways = Ways(module, self._name, batch)
        share, measured = self._race_settings()
        self._race = module.races[self._name] = Race(
            challengers(module, self._name, first),
            share,
            self._ways.expect,
            measured,
            (lambda key, figures: figures)
            if agree is None
            else (lambda key, figures: agree(f"{self._name}/{key}", dict(figures))),
            self._unchanged_steps(),
        )
        return self._race

    def _race_settings(self) -> tuple[float, bool]:
        module = self._module
        return module.config.compile_budget if module.is_amortized else NO_LIMIT, module.is_measured

    def _unchanged_steps(self) -> int:
        """How many steps run unchanged in any case: one of several shows the user's errors before anything compiles."""
        module = self._module
        if module.is_amortized:
            return FIRST
        if self._step is not None and self._first.seen:
            return 0
        left = module.steps_left(self._name, 0)
        return int(left is None or left > 1 or module.takes_gradients)

    def _tell(self, race: Race) -> None:
        """Tell the race how the last steps went."""
        turn = self._turn
        if turn.passed:
            race.pass_by(turn.passed)
        if turn.is_open:
            memory = resident_bytes(self._module.device) if race.is_trying else 0.0
            race.done(turn.seconds, turn.compiled, turn.projected, turn.counts, memory)
        while self._failures:
            way, failure = self._failures.pop(0)
            race.fail(way, failure)
        events = len(race.events)
        self._view.update(race)
        self._turn = _Turn()
        if any(event.what in ("wins", "loses", "costs too much", "fails") for event in race.events[events:]):
            malloc.trim()  # the ways that were tried have left holes in the heap, 20 to 40 MB for a small GPT or ViT

    def _release(self, ways: Any) -> None:
        """Free what was compiled for ways that do not run any more."""
        for way in list(ways):
            dynamo.release_regions([dynamo.region_of(self._compiled.pop(way))])
            self._recompiling = []

    def _compile_with_hooks(self, race: Race) -> None:
        """Compile again with hooks that were added to modules: dynamo looks for them only when it compiles."""
        if not self._compiled and race.champion.part == "step":
            return  # dynamo has yet to look
        self._new_hooks += 1
        if self._new_hooks > _NEW_HOOKS:
            text = f"{self._new_hooks} steps came with new hooks"
            self._fail(race.champion, failures.for_eager_alone(Reason(ReasonType.RECOMPILING, text)))
            race.fail(*self._failures.pop())
        else:
            self._module.forget_children()
            self._release(self._compiled.keys())

    # One call

    def _run_on(self, way: Way, *args: Any, **kwargs: Any) -> Any:
        if way is UNCHANGED:
            return self._run_unchanged(*args, **kwargs)
        if way.engine == inductor.GRAPHS and not self._module.may_record(self._name):
            text = "gradients are accumulated now"
            self._fail(way, Failure(Cause(Reason(ReasonType.INDUCTOR_FAILED, text))))
            return self._step(*args, **kwargs)
        module, monitor, turn = self._module, self._module.monitor, self._turn
        module.running = self
        call, shims = self._captured(way)
        turn.begin_call()
        if self._audit.begin(call=self._step, args=args, kwargs=kwargs, logs=way.part == "step"):
            turn.counts = False
        try:
            try:
                shims.install()
                monitor.begin()
                with module.stance(way.engine in inductor.ENGINES and way is self._race.champion):
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
            self._look_at_compiling(way)
        if differs:
            self._leave_as_wrong(differs)
        return output

    def _run_unchanged(self, *args: Any, **kwargs: Any) -> Any:
        output = self._first(*args, **kwargs)
        if not self._first.is_over:
            self._module.operations[self._name] = self._first.operations
            if (text := self._first.takes_gradients(self._module.part == "step")) is not None:
                self._fail(UNCHANGED, failures.for_eager_alone(Reason(ReasonType.SECOND_GRADIENT, text)))
        return output

    def _captured(self, way: Way) -> tuple[Callable[..., Any], Shims]:
        """Return what to call, and what to install before."""
        if way.part == "modules":
            return self._step, self._module.module_shims(way.engine)
        if way not in self._compiled:
            self._compiled[way] = self._module.compile(self._step, way.engine)
        return self._compiled[way], self._module.shims

    def request(self) -> CompileRequest:
        """Return what is compiled in this call."""
        module, turn = self._module, self._turn
        return CompileRequest(
            label=self._name,
            one_graph=turn.way.graphs == 1 and module.may_join,
            by_hand=not module.module.automatic_optimization,
            began_at=turn.began_at,
            logs_graphs=not is_announced(module.module.trainer),
            may_compile=self._may_compile,
            writes_gradients=module.writes_gradients,
            drop_gradients=module.drop_gradients,
            agree=module.agree,
            refuse=lambda reason: self._fail(turn.way, failures.for_eager_alone(reason)),
            split=lambda why: self._fail(turn.way, failures.without_one_graph(turn.way, why)),
        )

    def _may_compile(self, gm: fx.GraphModule) -> bool:
        # AOTAutograd's graphs have no second gradient, and say so only when the loss is back-propagated, which is too
        # late. What a call of `torch.autograd.grad` is for cannot be known before.
        if self._module.monitor.calls_autograd_grad():
            return False
        turn, race = self._turn, self._race
        assert race is not None
        seconds = time.perf_counter() - turn.call_start
        projected = self._ways.projected_cost(seconds, turn.operations, turn.is_first_compilation)
        turn.operations += num_operations(gm)
        if not race.may_compile(seconds, projected):
            turn.projected = race.spent + max(seconds, projected)
        return turn.projected == 0

    def _look_at_compiling(self, way: Way) -> None:
        """Find out what the compilations of a call lead to."""
        module, turn = self._module, self._turn
        outcome = module.monitor.outcome(getattr(getattr(self._step, "__func__", self._step), "__code__", None))
        report = module.backend.report
        report.graph_breaks += outcome.graph_breaks
        report.recompiles += outcome.recompiles
        self._breaks.add(report, outcome.breaks)
        turn.end_compiling_call()
        race = self._race
        assert race is not None
        if outcome.untraceable is not None and outcome.skipped is outcome.skipped_rest is None:
            text = f"{outcome.untraceable}; the graph ends there"
            module.record_choice(self._name, ReasonType.DYNAMIC_SHAPE, text)
        if outcome.error is not None and is_out_of_memory(outcome.error):
            free_memory_of(outcome.error)
        if outcome.error is not None and is_about_numbers(outcome.error) and module.compile_without_numbers():
            self._release([way] if way in self._compiled else [])
            return
        step = race.steps + turn.passed
        self._recompiling = [*self._recompiling, step] if outcome.recompiles else self._recompiling
        in_a_row = sum(step - number == back for back, number in enumerate(reversed(self._recompiling)))
        situation = Situation(
            module.config.capture == "auto", in_a_row, len(self._recompiling), module.closure_seen
        )
        if (failure := failures.after_compiling(way, outcome, situation)) is not None:
            self._fail(way, failure)

    def _close_call(self, error: BaseException) -> None:
        """After a captured step that failed."""
        logger = self._module.shims.logger
        self._audit.close()
        if isinstance(error, Exception):  # eager too logs what was logged before the user's error
            with suppress(Exception):
                logger.replay()
        logger.discard()
        if self._module.monitor.saw_compile:
            self._look_at_compiling(self._turn.way)
        if is_double_backward_error(error):
            raise RuntimeError(LATE_SECOND_GRADIENT) from error

    # The backward pass

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Within the block the training step's backward pass runs, which is a part of the step."""
        with self._module.backward():
            if self._turn.is_timed:
                with self._turn.timed():
                    yield
            else:
                yield
        if differs := self._audit.after_backward():
            self._leave_as_wrong(differs)

    @property
    def is_recorded(self) -> bool:
        """Whether the last call was a recording of inductor's."""
        return self._turn.way.engine == inductor.GRAPHS

    # Failures

    def engine_failed(self, engine: str, error: Exception) -> None:
        """A graph of inductor's has failed while it ran."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        way = Way(engine, self._turn.way.part)  # type: ignore[arg-type]
        self._fail(way, Failure(Cause(Reason(ReasonType.INDUCTOR_FAILED, text))))

    def _leave_as_wrong(self, text: str) -> None:
        """Run the step unchanged from now on, as an audit has found that it does something else when it is captured."""
        self._fail(self._turn.way, Failure(Cause(Reason(ReasonType.MISMATCH, text), warns=True), final=True))

    def _fail(self, way: Way, failure: Failure) -> None:
        """Report that a way cannot go on; the race is told before the next step."""
        cause: Cause = failure.why
        module, kind, text = self._module, cause.reason.type, cause.reason.text
        if failure.instead != way:
            self._failures.append((way, failure))
        if failure.final:
            self._refused = str(cause.reason)
            module.takes_gradients = module.takes_gradients or kind is ReasonType.SECOND_GRADIENT
        if cause.error is not None and module.config.fallback == "raise":
            raise cause.error  # from our compiler, which has reported it
        if kind is not ReasonType.MISMATCH:
            text = f"{text}; {self._what_follows(way, failure)}"
        if cause.warns:
            same = "" if kind is ReasonType.MISMATCH else " (no result changes)"
            module.backend.fall_back(self._name, Reason(kind, f"{text}{same}"))
        else:
            module.record_choice(self._name, kind, text)

    def _what_follows(self, way: Way, failure: Failure) -> str:
        if failure.instead == way:
            return "that part stays in PyTorch"
        if failure.instead is not None:
            return "its child modules are captured instead" if failure.instead.part == "modules" else (
                "the step is captured as two graphs"
            )
        if way.engine in inductor.ENGINES and not failure.final:
            was_used = self._race is not None and self._race.champion == way
            return f"{way.engine} is {'given up' if was_used else 'not tried'}"
        return STAYS


class _Turn:
    """The step that runs, and the quiet ones after it."""

    def __init__(
        self,
        way: Way = UNCHANGED,
        quiet: int = 0,
        is_timed: bool = False,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        self.way, self.is_timed = way, is_timed
        self.quiet = max(0, quiet - 1)  # steps that may follow without a question
        self.counts = True  # whether its time is a sample
        self.seconds = 0.0
        self.compiled = False
        self.projected = 0.0  # seconds of compiling, for which the rest of the call is not compiled
        self.call_start = 0.0
        self.began_at = 0  # the number of autograd's first node of the call
        self.operations = 0  # in graphs of the call
        self.is_first_compilation = False
