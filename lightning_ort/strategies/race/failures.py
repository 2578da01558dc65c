"""What happens when a step cannot be captured as it is: :func:`after_compiling`, the one place that decides it.

Others only say what has failed: the backend, for a graph that differs from eager when it is captured
(:mod:`lightning_ort.compiler.graphs.conflicts`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_ort.compat import dynamo
from lightning_ort.compat.dynamo_left_out import Unsound
from lightning_ort.compat.dynamo_messages import plain_reason
from lightning_ort.compiler.engines import ENGINES, label_of
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.running.graph_check import GraphDiffers
from lightning_ort.strategies.race.terms import RECORDING, Failure, Way

if TYPE_CHECKING:
    from lightning_ort.strategies.capture.dynamo_monitor import Outcome

OWN_GRADIENT = "it calls `torch.autograd.grad`, and graphs of torch.compile have one gradient"

# A counter compiles as a constant, as a second constant and then as a symbol. More steps in a row that recompile mean
# that something differs in each step, until dynamo gives up.
MAX_RECOMPILING_STEPS = 3
# In all, as many as dynamo by default allows a frame: a partial last batch, a first epoch and a few counters stay below
# it, and what does not costs a compilation each time that a new case comes up, however long that takes.
MAX_RECOMPILING_STEPS_IN_ALL = 8


@dataclass(frozen=True)
class Cause:
    """Why a way fails, for the report."""

    reason: Reason  # in words
    warns: bool = False  # whether that is a failure, with a warning, and not a known limit
    error: BaseException | None = None  # what our compiler raised, which is an error under ``fallback="raise"``


def after_compiling(
    way: Way, outcome: "Outcome", children: bool, in_a_row: int, in_all: int, closure: bool
) -> Failure | None:
    """Return why a way cannot go on after a step in which something was compiled, if it cannot.

    ``children``: whether child modules may be captured instead; ``in_a_row`` and ``in_all``, how many steps have
    compiled again, with this one, and since the way began; ``closure``: whether an optimizer was given one.
    """
    if isinstance(outcome.error, Unsound):
        return for_eager_alone(Reason(ReasonType.PYTHON_STATE, plain_reason(str(outcome.error))))
    if ENGINES[way.engine].backend is not None:
        return _of_torch_compile(way, outcome)
    instead = Way(way.engine, "modules") if children or way.part == "modules" else None
    cause = dynamo.backend_error(outcome.error)
    if outcome.error is not None:
        return _failure(plain_reason(str(cause or outcome.error)), instead, ReasonType.CAPTURE_FAILED, cause)
    if outcome.limit is not None:
        return _failure(outcome.limit, instead, ReasonType.RECOMPILING)
    if way.part == "modules":
        if in_all > MAX_RECOMPILING_STEPS_IN_ALL and children:
            return _choice(f"{in_all} steps compiled child modules again", None, ReasonType.RECOMPILING)
        return None
    if outcome.calls_autograd_grad:
        return for_eager_alone(Reason(ReasonType.SECOND_GRADIENT, OWN_GRADIENT))
    if outcome.skipped is not None:
        return _failure(plain_reason(outcome.skipped), instead, ReasonType.CAPTURE_FAILED)
    if closure:
        instead = Way(way.engine, "modules")
        return _choice("an optimizer runs a closure, which no graph can hold", instead, ReasonType.CAPTURE_FAILED)
    if instead is None:
        return None
    if outcome.skipped_rest is not None:
        return _choice(f"of a part: {plain_reason(outcome.skipped_rest)}", instead, ReasonType.CAPTURE_FAILED)
    if in_a_row > MAX_RECOMPILING_STEPS:
        return _choice(f"{in_a_row} steps in a row compiled again", instead, ReasonType.RECOMPILING)
    if in_all > MAX_RECOMPILING_STEPS_IN_ALL:
        return _choice(f"{in_all} steps compiled again", instead, ReasonType.RECOMPILING)
    return None


def for_eager_alone(reason: Reason) -> Failure:
    """Return the failure of a step that nothing but eager can run."""
    return Failure(Cause(reason), final=True)


def without_one_graph(way: Way, why: str) -> Failure:
    """Return the failure of a step that turned out to need a backward pass of its own."""
    return Failure(Cause(Reason(ReasonType.SPLIT, why)), Way(way.engine, way.part))


def of_graph(way: Way, error: Exception) -> Failure:
    """Return the failure of a way that another backend runs, of which a graph has failed, or differs from eager."""
    if isinstance(error, GraphDiffers):
        return wrong(f"compiled by {label_of(way.engine)}, {error}. It stays uncompiled from now on")
    return of_torch_compile(way, f"{type(error).__name__}: {error}".splitlines()[0])


def of_torch_compile(way: Way, why: str) -> Failure:
    """Return the failure of a way that another backend of torch.compile runs."""
    other = ENGINES[way.engine].otherwise
    return _choice(why, Way(other, way.part) if other else None, ReasonType.INDUCTOR_FAILED)


def of_recording(way: Way, why: str, is_wrong: bool) -> Failure:
    """Return the failure of a step that cannot be recorded, or whose replay was not what the step itself does."""
    if way != RECORDING:  # an engine
        if is_wrong:
            return Failure(Cause(Reason(ReasonType.MISMATCH, f"compiled by {label_of(way.engine)}, {why}"), warns=True))
        return _choice(why, None, ReasonType.NOT_COMPILED)
    if is_wrong:
        text = f"{why}. It runs as it is from now on; to begin again so, pass ORTConfig(engine='torch') to the strategy"
        return Failure(Cause(Reason(ReasonType.MISMATCH, text), warns=True))
    return _choice(why, None, ReasonType.NOT_RECORDED)


def wrong(why: str) -> Failure:
    """Return the failure of a step that was found to do something else when it is captured."""
    return Failure(Cause(Reason(ReasonType.MISMATCH, why), warns=True), final=True)


def describe(way: Way, failure: Failure, was_used: bool) -> str:
    """Say why a way, which ``was_used`` if it was the fastest, cannot go on, and what follows."""
    reason: Reason = failure.why.reason
    on_engine = way.replays and way != RECORDING  # which runs what was recorded
    if reason.type is ReasonType.MISMATCH and not on_engine:  # which says it
        return reason.text
    if failure.instead == way:
        follows = "that part stays in PyTorch"
    elif failure.instead is not None:
        follows = "its child modules are captured instead"
        if failure.instead.engine != way.engine:
            follows = f"{label_of(failure.instead.engine)} is tried instead"
        elif failure.instead.part == "step":
            follows = "the step is captured as two graphs"
    elif (on_engine or ENGINES[way.engine].backend is not None) and not failure.final:
        follows = f"{label_of(way.engine)} is {'given up' if was_used else 'not tried'}"
    else:
        follows = "it is not recorded" if way == RECORDING else "the step stays uncompiled"
    return f"{reason.text}; {follows}" + (" (no result changes)" if failure.why.warns else "")


def _of_torch_compile(way: Way, outcome: "Outcome") -> Failure | None:
    cause = outcome.error and (dynamo.backend_error(outcome.error) or outcome.error)
    if cause is not None or outcome.limit is not None:
        return of_torch_compile(way, dynamo.explanation(str(cause or outcome.limit)))
    return of_torch_compile(way, "sizes vary") if ENGINES[way.engine].records and outcome.recompiles else None


def _failure(text: str, instead: Way | None, kind: ReasonType, error: BaseException | None = None) -> Failure:
    return Failure(Cause(Reason(kind, text), warns=True, error=error), instead)


def _choice(text: str, instead: Way | None, kind: ReasonType) -> Failure:
    return Failure(Cause(Reason(kind, text)), instead)
