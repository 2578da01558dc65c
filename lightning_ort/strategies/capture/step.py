"""One step of a LightningModule, run in the way that its race says: :class:`CapturedStep`.

The strategy's ``training_step`` (and validation, test, predict) runs as Lightning wrote it. Meanwhile a
:class:`CapturedStep` replaces the module's own step. It asks the race (:mod:`~lightning_ort.strategies.race.race`)
which way the step runs. For a captured one it

1. installs the shims of Lightning's helpers (:mod:`~lightning_ort.strategies.capture.shims`),
2. calls the compiled step, or the step itself with its child modules compiled,
3. removes the shims and gives Lightning what was logged,
4. if dynamo compiled anything (:mod:`~lightning_ort.strategies.capture.dynamo_monitor`), looks up what that leads to
   (:mod:`~lightning_ort.strategies.race.failures`).

Before the next step it tells the race how this one went. It decides nothing. Nothing stays on the module between calls.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from time import perf_counter
from typing import Any

import torch
from torch import fx
from typing_extensions import override

from lightning_ort._shims import Shims
from lightning_ort.compat import dynamo
from lightning_ort.compat.autograd import next_number
from lightning_ort.compat.dynamo_messages import is_about_numbers
from lightning_ort.compat.lightning import backward_with, lightning_optimizers
from lightning_ort.compat.torch_graphs import is_double_backward_error
from lightning_ort.compiler.engines import ENGINES, TORCH
from lightning_ort.compiler.graphs.nodes import num_operations
from lightning_ort.compiler.machine.out_of_memory import free_memory_of
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.recorded import on_engine
from lightning_ort.compiler.request import CompileRequest, Stopped, weakly
from lightning_ort.recording.program import Program
from lightning_ort.strategies.capture.compiled_ways import CompiledWays
from lightning_ort.strategies.capture.dynamo_monitor import Outcome
from lightning_ort.strategies.capture.first_steps import LATE_SECOND_GRADIENT, LOOKED_AT, FirstSteps, UserStep
from lightning_ort.strategies.capture.graph_audit import GraphAudit
from lightning_ort.strategies.capture.graph_breaks import GraphBreakNotes
from lightning_ort.strategies.capture.module import CapturedModule
from lightning_ort.strategies.capture.room import QUIET
from lightning_ort.strategies.capture.settled import SettledCall
from lightning_ort.strategies.capture.step_failures import StepFailures
from lightning_ort.strategies.race import failures
from lightning_ort.strategies.race.race import NO_LIMIT, Race
from lightning_ort.strategies.race.run_facts import TRAINING, is_announced, processors, share_for
from lightning_ort.strategies.race.terms import RECORDING, UNCHANGED, Failure, Now, Way
from lightning_ort.strategies.race.threads import Threads
from lightning_ort.strategies.race.turn import NO_CONTEXT, Turn
from lightning_ort.strategies.race.view import RaceView
from lightning_ort.strategies.race.ways import Ways, challengers
from lightning_ort.strategies.recording.recorded_step import RecordedStep
from lightning_ort.strategies.recording.window import Window


def _is_settled(race: Race) -> bool:
    """Whether the step runs in one way, and in torch's kernels alone, whose threads may be chosen."""
    return race.living in ({UNCHANGED}, {RECORDING})


class CapturedStep(AbstractContextManager[None]):
    """In a ``with`` block, the module's step of this name runs in the way that its race says."""

    def __init__(self, module: CapturedModule, name: str) -> None:
        self._module, self._name = module, name
        self._user = UserStep(None, FirstSteps(lambda: None), None)  # of nobody yet
        self._shim = Shims()  # of the module's attribute of its name
        self._race: Race | None = None  # from the first call on, if there is something to try
        self._ways: Ways
        self.turn = Turn()
        self._compiled = CompiledWays(module.recorded.own)
        self._failures = StepFailures(module, name)
        self._threads = Threads(1, 1)  # until a run begins
        self._breaks = GraphBreakNotes(name)
        self._opening = ""  # why its world is open, as far as the last unchanged step has shown
        self._in_backward = False  # whether a backward pass of the Trainer runs
        self._graph_audit = GraphAudit(module, name)
        self._view = RaceView(module, name)
        self.recorded = RecordedStep(
            module.module,
            name == TRAINING,
            self._recording_fails,
            module.let_wait,
            module.writes_gradients,
            module.at_window_start,
            lambda: 1 / module.module.trainer.accumulate_grad_batches,
            lambda: module.module.trainer.current_epoch,
            self._compile_recording,
        )

    # Runs of the Trainer

    def begin_run(self) -> None:
        """Begin a run of the Trainer."""
        self._view.begin_run()
        self.turn, self._threads = Turn(), Threads(1, 1)
        self._compiled.begin_run()
        if self._race is not None and self._race_settings() == (self._race.share, self._race.measured):
            self._race.begin_run(self._user.unchanged_steps(self._module, self._name))
        else:
            self._race = None

    def end_run(self) -> None:
        """End a run of the Trainer: report what was not compiled, and remember what was."""
        self._tell()
        if self._race is None:
            return
        self._view.end_run(self._race)
        if self.recorded.replayed:
            self._module.backend.report.run.recorded[self._name] = str(self.recorded)
        self.recorded.end_run()
        if self._module.module.trainer.is_global_zero:
            self._ways.store(self._race.of_run)

    # The step of the module

    def passes(self) -> bool:
        """Count a step that runs unchanged and that nobody has to watch; return whether it is one."""
        turn = self.turn
        if turn.way is not UNCHANGED or turn.is_timed or not turn.quiet or turn.is_new or self._failures:
            return False
        turn.quiet -= 1
        turn.steps += 1
        return True

    def run(self, args: tuple[Any, ...]) -> Any:
        """Run the step, not by the module's attribute."""
        step = getattr(self._module.module, self._name)
        if self.turn.is_unchanged and self.passes():
            return step(*args)
        if step != self._user.call:  # bound methods are equal if function and object are the same
            self._user = self._prepare(step)
        return self._begin(args, {})

    @override
    def __enter__(self) -> None:
        step = getattr(self._module.module, self._name)
        if step != self._user.call:
            self._user = self._prepare(step)
        self._shim = Shims()
        self._shim.put(self._module.module, self._name, self._user.replacement)

    @override
    def __exit__(self, *exc_info: object) -> None:
        """Restore the module's step, if it was not called."""
        self._shim.remove()

    def _prepare(self, step: Callable[..., Any]) -> UserStep:
        """Begin with a new step."""
        self._compiled.release()
        self.recorded.release()
        self._failures.clear()
        self._race, self.turn, self._threads, self._opening = None, Turn(), Threads(1, 1), ""
        return UserStep(step, FirstSteps(step), functools.partial(self._run))

    # Which way

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run instead of the module's step."""
        self._shim.remove()
        return self._begin(args, kwargs)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        turn = self.turn
        if not turn.is_new or self._failures:
            if turn.quiet and not self._failures:
                turn.quiet -= 1
            else:
                turn = self._ask((args, kwargs))
        turn.is_new = False
        turn.steps += 1
        if turn.is_plain:
            return self._run_on(turn.way, args, kwargs)
        with turn.around():
            return self._run_on(turn.way, args, kwargs)

    def _ask(self, batch: Any) -> Turn:
        """Tell what has happened, and ask how the next step runs."""
        module = self._module
        if module.module.trainer.sanity_checking and module.is_amortized:
            return Turn()
        module.begin_run()
        race = self._race or self._new_race(batch)
        events = 0 if race is None else len(race.events)
        begins = module.at_window_start()
        self._tell(begins)
        if self._threads.number != module.threads:
            self._threads = Threads(module.threads, processors())
        threads, way, quiet, is_timed = self._threads, UNCHANGED, QUIET, False
        if race is not None and race.champion.replays:
            way = race.champion
        left = module.steps_left(self._name, (race or threads).steps)
        # a way of the race that takes turns with another is asked for, whatever the threads look for meanwhile
        if race is not None and not (threads.is_trying and _is_settled(race)):
            room = module.room
            if race.champion is UNCHANGED:
                room.see_unchanged()
            way = race.next(Now(left, begins, room.obstacle, room.used))
            self._compiled.free_lost(race.kept)
            replaying = {way.engine for way in race.kept if way.replays}
            self.recorded.keep_engines(replaying)
            if not replaying:
                self.recorded.release()
            has_changed = any(event.what not in ("waits", "pays") for event in race.events[events:])
            quiet = min(quiet, race.quiet_steps, room.give_back(race.steps, has_changed))
            is_timed = race.wants_time
        on = UNCHANGED
        if way in (UNCHANGED, RECORDING):  # what runs in torch's kernels alone
            on = threads.next(left, race is None or _is_settled(race))
            way = on if way is UNCHANGED else way
            quiet, is_timed = min(quiet, threads.quiet_steps), is_timed or threads.wants_time
        quiet = quiet if not is_timed or module.may_record(self._name) else 1
        self.turn = Turn(way, quiet, is_timed, module.synchronize, on)
        self.turn.longest, self.turn.otherwise = threads.longest * max(1, quiet), threads.kept
        return self.turn

    def _new_race(self, batch: Any) -> Race | None:
        if (first := self._user.first_way(self._module, self._name, batch)) is None:
            return None
        module = self._module
        self._ways = Ways(module, self._name, batch)
        ways, (share, measured) = challengers(module, self._name, first), self._race_settings()
        self._race = Race(
            ways, share, self._ways.expect, measured, self._agree, self._user.unchanged_steps(self._module, self._name)
        )
        module.enters(self._name, self._race)
        return self._race

    def _race_settings(self) -> tuple[float, bool]:
        module = self._module
        if module.saves_memory(self._name):
            return NO_LIMIT, False
        return share_for(module.config, module.device), module.is_measured

    def _agree(self, key: str, figures: Any) -> Any:
        return figures if (agree := self._module.agree) is None else agree(f"{self._name}/{key}", dict(figures))

    def _tell(self, ends: bool = True) -> None:
        """Tell how the last steps went, after which no gradients are accumulated if that ``ends`` them."""
        turn, race, threads = self.turn, self._race, self._threads
        self.turn, kept, found = Turn(), threads.kept, threads.found
        if turn.is_unchanged or turn.way == RECORDING:
            turn.counts = turn.counts and turn.threads is kept
            turn.tell_threads(threads, ends)
        if threads.found is not found:
            self._view.show_threads(threads, threads.kept is not kept)
        if race is not None:
            turn.tell(race, self._module.room.used)
            if threads.kept is not kept:
                race.time_again()
            self._failures.tell(race)
            self._view.update(race)

    # One call

    def _run_on(self, way: Way, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if way.engine == TORCH:
            return self._run_unchanged(*args, **kwargs)
        if way.replays:
            return self._run_recorded(way.engine, args, kwargs)
        module, settled = self._module, self._compiled.settled.get(way)
        # not with keywords: arguments are missing then
        if settled is not None and module.optimizers is lightning_optimizers(module.strategy):
            if module.running is not self:
                module.runs(self)
            try:
                found = settled(args)
            except BaseException as error:
                self._close_call(error)
                raise
            if found is not None:  # else somebody has to watch
                return found[0]
        return self._run_watched(way, *args, **kwargs)

    def _run_recorded(self, engine: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorded, turn = self.recorded, self.turn
        turn.call_start = perf_counter()
        if self._name == TRAINING and recorded.has_recordings:
            self._module.drop_gradients()
        output = recorded(self._user.call, args, kwargs, engine)
        if recorded.did == "recorded" or recorded.has_compiled:
            turn.has_compiled()
        elif recorded.did != "replayed":
            turn.is_spoiled()
        if recorded.did in ("recorded", "checked"):  # as many threads in its backward pass, or its bits are others
            turn.longest = math.inf
        turn.counts_for_threads = turn.counts_for_threads and recorded.did == "replayed"
        return output

    def _run_watched(self, way: Way, *args: Any, **kwargs: Any) -> Any:
        module, turn = self._module, self.turn
        if ENGINES[way.engine].records:
            if not module.may_record(self._name):
                self._fail(way, failures.of_torch_compile(way, "gradients are accumulated now"))
                turn.is_spoiled()
                return self._user.call(*args, **kwargs)
            module.recorded.begin_step(self._name == TRAINING)
        if self._opening and way.part == "step" and not module.asks_to_compile:
            self._fail(UNCHANGED, failures.for_eager_alone(Reason(ReasonType.PYTHON_STATE, self._opening)))
            turn.is_spoiled()
            self._opening = ""
            return self._user.call(*args, **kwargs)
        self._compiled.settled.pop(way, None)
        if module.optimizers is not lightning_optimizers(module.strategy):
            module.refresh()
        if module.running is not self:
            module.runs(self)
        try:
            call, shims = turn.captured = turn.captured or self._captured(way)
        except Exception as error:  # such as an ImportError of what makes its backend
            self._continue_after(Outcome(error=error), way)
            turn.is_spoiled()
            return self._user.call(*args, **kwargs)
        turn.call_start, turn.began_at = perf_counter(), next_number()
        try:
            try:
                if not shims.install() and shims is module.shims:
                    shims.remove()
                    module.refresh()
                    shims.install()
                module.monitor.begin()
                with NO_CONTEXT if way.engine == "ort" else self._stance(way):
                    output = call(*args, **kwargs)
            finally:
                module.monitor.end()
                shims.remove()
        except BaseException as error:
            self._close_call(error)
            raise
        module.shims.logger.end_step()
        if module.monitor.saw_compile:
            self._continue_after(self._count_compiled(), way)
            if self._opening and way.part == "step" and not self._failures:
                module.record_choice(self._name, ReasonType.OPEN, self._opening, warns=True)
                self._opening = ""
        elif isinstance(call, dynamo.WithoutWrapper) and not self._failures:
            self._compiled.settled[way] = SettledCall(call, module.shims)
        return output

    def _run_unchanged(self, *args: Any, **kwargs: Any) -> Any:
        first, module = self._user.first, self._module
        if first.is_over or self._race is None:
            return self._user.call(*args, **kwargs)
        if first.seen < LOOKED_AT and module.captures_on_cpu and self._race.trying is None and not kwargs:
            self.turn.is_spoiled()  # which takes longer
            output, self._opening = first.look(module.module, args)
        else:
            output = first(*args, **kwargs)
        module.saw_operations(self._name, first.operations)
        if not first.is_over and (reason := first.unfit(module.part == "step")) is not None:
            self._fail(UNCHANGED, failures.for_eager_alone(reason))
        return output

    def _captured(self, way: Way) -> tuple[Callable[..., Any], Shims]:
        """Return what to call, and what to install before."""
        self._ways.program()  # before anything compiles, and somebody edits it meanwhile
        if way.part == "modules":
            return self._user.call, self._module.module_shims(way.engine)
        compiled = self._compiled.get(way, lambda: self._module.compile(self._user.call, way.engine))
        is_whole = way.engine == "ort" and not self._breaks
        call = dynamo.without_wrapper(compiled, self._user.call) if is_whole else compiled
        return call, self._module.shims

    def _stance(self, way: Way) -> AbstractContextManager[Any]:
        """Return a context in which another compiler's champion runs unchanged what it would have to compile again.

        These are the last batches of epochs, which are smaller: they are few, and compiling for them takes as long as
        the first time.
        """
        keeps = self._race is not None and way == self._race.champion and not self._module.saves_memory(self._name)
        return torch.compiler.set_stance("eager_on_recompile") if keeps else NO_CONTEXT

    def request(self) -> CompileRequest:
        """Return what is compiled in this call."""
        module, turn, way, fail = self._module, self.turn, self.turn.way, weakly(self._fail)
        return CompileRequest(
            label=self._name,
            one_graph=way.graphs == 1 and module.may_join,
            by_hand=not module.module.automatic_optimization,
            began_at=turn.began_at,
            logs_graphs=not is_announced(module.module.trainer),
            may_compile=weakly(self._may_compile),
            check_budget=weakly(self._check_budget),
            writes_gradients=weakly(self._writes_gradients),
            drop_gradients=weakly(module.drop_gradients),
            leave_gradients=weakly(module.leave_gradients, False),
            agree=module.agree,
            refuse=lambda reason: fail(way, failures.for_eager_alone(reason)),
            split=lambda why: fail(way, failures.without_one_graph(way, why)),
            keep=functools.partial(weakly(self._compiled.keep), way),
            activation_memory_budget=module.memory_budget(self._name),
            check=weakly(self._graph_audit.check),
        )

    def _writes_gradients(self) -> bool:
        return self._in_backward and self._module.writes_gradients()

    def _may_compile(self, gm: fx.GraphModule) -> bool:
        # AOTAutograd's graphs have no second gradient, and say so only when the loss is back-propagated, which is too
        # late. What a call of `torch.autograd.grad` is for cannot be known before.
        if self._module.monitor.calls_autograd_grad():
            return False
        turn, race = self.turn, self._race
        assert race is not None
        projected = self._ways.projected_cost(turn.since_call, turn.operations)
        turn.operations += num_operations(gm)
        return turn.may_go_on(race, projected)

    def _check_budget(self) -> None:
        if self._race is not None and not self.turn.may_go_on(self._race):
            raise Stopped

    def _count_compiled(self) -> Outcome:
        """Report what was compiled in a call."""
        module = self._module
        try:
            outcome = module.monitor.outcome(getattr(self._user.function, "__code__", None))
        except Exception as error:  # what dynamo tells is called otherwise in this torch
            outcome = Outcome(error=error)
        report = module.backend.report
        report.graph_breaks += outcome.graph_breaks
        report.recompiles += outcome.recompiles
        self._breaks.add(report, outcome.breaks)
        self.turn.has_compiled()
        return outcome

    def _continue_after(self, outcome: Outcome, way: Way) -> None:
        """Find out what the compilations of a call lead to."""
        module, race = self._module, self._race
        assert race is not None
        if outcome.untraceable is not None and outcome.skipped is outcome.skipped_rest is None:
            text = f"{outcome.untraceable}; the graph ends there"
            module.record_choice(self._name, ReasonType.DYNAMIC_SHAPE, text)
        if outcome.error is not None:
            free_memory_of(outcome.error)
        if outcome.error is not None and is_about_numbers(outcome.error) and module.compile_without_numbers():
            self._compiled.release([way])
            return
        recompiling = self._compiled.recompiling(race.steps + self.turn.steps, bool(outcome.recompiles))
        facts = (module.config.debug.capture == "auto", *recompiling, module.closure_seen)
        if (failure := failures.after_compiling(way, outcome, *facts)) is not None:
            self._fail(way, failure)

    def _close_call(self, error: BaseException) -> None:
        """After a captured step that failed."""
        self.turn.is_spoiled()
        with suppress(Exception):  # eager too logs what was logged before the user's error
            self._module.shims.logger.end_step()
        if self._module.monitor.saw_compile:
            self._count_compiled()
        if is_double_backward_error(error):
            raise RuntimeError(LATE_SECOND_GRADIENT) from error

    # The backward pass

    def backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of the training step, as a part of it."""
        turn = self.turn
        if turn.is_unchanged:
            with NO_CONTEXT if turn.is_plain else turn.around():
                return run(*args, **kwargs)
        if self.recorded.running is not None:
            with turn.around():
                return self.recorded.backward(run, *args, **kwargs)
        module = self._module
        strategy: Any = module.strategy
        recorded: AbstractContextManager[None] = NO_CONTEXT
        if ENGINES[turn.way.engine].records:
            recorded = module.recorded.made_by(strategy.precision_plugin, module.module.parameters())
        self._in_backward = True
        try:
            with turn.timed() if turn.is_timed else NO_CONTEXT, recorded:
                if module.waiting is None or kwargs or run != strategy.stock_backward:
                    result = run(*args, **kwargs)
                else:
                    result = backward_with(strategy, module.hand_over_gradients, *args)
        except RuntimeError as error:
            if not is_double_backward_error(error):
                raise
            raise RuntimeError(LATE_SECOND_GRADIENT) from error
        finally:
            self._in_backward = False
        return result

    def take_gradients(self, loss: torch.Tensor) -> Callable[[], None] | None:
        """Return what does what ``loss.backward()`` does, if nothing of others runs from the step to its update."""
        turn, module = self.turn, self._module
        if not module.may_touch_gradients[3]:
            return None
        if turn.is_unchanged:  # where Lightning divides the loss by 1 first
            if loss.is_leaf or loss.numel() != 1 or torch.is_anomaly_enabled():
                return None
            return loss.backward if turn.is_plain else functools.partial(self.backward, loss.backward)
        if self.recorded.running is not None:
            return functools.partial(self.backward, loss.backward)
        waiting = module.waiting
        if waiting is None or not waiting.are_of(loss):
            return None
        module.waiting = None
        return turn.timed()(waiting.hand_over) if turn.is_timed else waiting.hand_over

    # Windows

    def window(self, loader: int) -> Window | None:
        """Return what replays the next steps without a look in between, if they may be."""
        module, turn, race = self._module, self.turn, self._race
        if race is None or getattr(module.module, self._name) != self._user.call:
            return None
        if self._name == TRAINING and not module.may_touch_gradients[3]:
            return None
        if not turn.is_new and (not turn.quiet or self._failures):
            turn = self._ask(None)
            turn.is_new = True
        if not turn.way.replays or (window := self.recorded.window(turn.way.engine, loader)) is None:
            return None
        window.steps = min(window.steps, turn.quiet + turn.is_new)
        return window

    def end_window(self, window: Window) -> None:
        """Count its steps."""
        if window.done:
            turn = self.turn
            turn.quiet -= window.done - turn.is_new
            turn.steps += window.done
            turn.is_new = False
        self.recorded.end_window(window)

    def _compile_recording(self, engine: str, program: Program, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        module = self._module
        return on_engine(engine, module.backend, module.config.dropout_masks, self.request(), program, inputs)

    # Failures

    def _recording_fails(self, why: str, is_wrong: bool) -> None:
        way = self.turn.way if self.turn.way.replays else RECORDING
        self._fail(way, failures.of_recording(way, why, is_wrong))

    def engine_failed(self, engine: str, error: Exception) -> None:
        """A graph of another compiler has failed while it ran."""
        if (way := self.turn.way).engine == engine:
            self._fail(way, failures.of_graph(way, error))

    def _fail(self, way: Way, failure: Failure) -> None:
        """Report that a way cannot go on; the race is told before the next step."""
        if failure.final:
            self._user.first.stop()
        self._failures.add(way, failure)
