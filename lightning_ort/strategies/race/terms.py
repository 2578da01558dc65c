"""The words of a race: what it is told, and what it says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_ort._busy import slowdown


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Args:
        engine: What runs it, of :data:`~lightning_ort.compiler.engines.ENGINES`; ``"torch"`` is the unchanged step.
        part: What is compiled: the step, or its child modules.
        graphs: Of a captured step on ONNX Runtime: 1 if forward and backward pass are one graph, else 2.
    """

    engine: str
    part: Literal["step", "modules"] = "step"
    graphs: int = 2

    def __str__(self) -> str:
        return f"{self.engine}/{self.part}/{self.graphs}"


UNCHANGED = Way("torch")

# What it is told


@dataclass(frozen=True)
class Now:
    """What is known before a step.

    Args:
        steps_left: How many steps are to come; infinite if they are taken to be many; ``None`` if nobody knows: then as
            many as were done.
        may_change: Whether another way may begin here, and not within a window of accumulated gradients.
        obstacle: Returns why a way may not run now beside the champion; may be empty.
        memory: Returns the bytes that the process uses; 0 if nobody knows.
    """

    steps_left: float | None = None
    may_change: bool = True
    obstacle: Callable[[Way], str] = lambda way: ""
    memory: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True)
class Took:
    """How a step went.

    Args:
        seconds: What it took, with its backward pass; it matters if :attr:`~.race.Race.wants_time`, or if something was
            compiled.
        waited: Of these, the seconds in which it was ready to go on and other programs had the processors.
        compiled: Whether something was compiled in it.
        projected: Working seconds that compiling would have taken, if :meth:`~.race.Race.may_compile` has left a part
            uncompiled.
        counts: Whether the time says how fast the way is.
        memory: Bytes that the process uses; it matters in duels.
    """

    seconds: float = 0.0
    waited: float = 0.0
    compiled: bool = False
    projected: float = 0.0
    counts: bool = True
    memory: float = 0.0

    @property
    def working(self) -> float:
        """The seconds without those in which it waited for a processor: what an idle machine would have needed."""
        return max(0.0, self.seconds - self.waited)

    @property
    def slowdown(self) -> float:
        """How many times as long it took as on an idle machine."""
        return slowdown(self.seconds, self.waited)


@dataclass(frozen=True)
class Expected:
    """What is expected of a way that has not been tried in this run.

    Args:
        cost: Working seconds until it runs.
        saves: The share of the unchanged step that it saves at most: 1 if nobody knows, 0 if it has lost before.
        why: Where that is from, for people; may be empty.
        stake: The share of what it saves that it may cost at most.
    """

    cost: float
    saves: float = 1.0
    why: str = ""
    stake: float = 1.0


@dataclass(frozen=True)
class Failure:
    """Why a way cannot go on.

    Args:
        why: For people; nothing here reads it.
        instead: What is tried in its place, if anything.
        final: Whether nothing else can go on either: the step is for eager alone.
    """

    why: Any
    instead: Way | None = None
    final: bool = False


# What it says


@dataclass(frozen=True)
class Waiting:
    """What a way is expected to cost, or has cost, and what may be spent, in working seconds."""

    cost: float
    allowed: float
    slowdown: float = 1.0  # of the machine now


@dataclass(frozen=True)
class Verdict:
    """How a duel ended, beside its times."""

    after: int = 0  # so many steps the champion met the unchanged step again; 0 if the challenger was new
    more_memory: float = 0.0  # the share that the challenger takes more, if it lost for that
    is_clear: bool = True  # whether the times differ by more than the samples do
    slowdown: Mapping[Way, float] = field(default_factory=dict)  # of each way's steps
    is_busy: bool = False  # whether the machine was, so that the verdict is taken again


@dataclass(frozen=True)
class Event:
    """What happened to a way.

    Args:
        way: Which one.
        what: ``"waits"`` (the rule to start says no), ``"starts"``, ``"compiles"``, ``"wins"``, ``"loses"``,
            ``"fails"``, ``"refused"`` (the step is for eager alone), ``"costs too much"``, or ``"pays"`` (more is saved
            than was spent).
        step: How many steps of the run were done.
        why: For people; a :class:`Waiting` or :class:`Verdict` where that says it.
        seconds: Of compiling, or the medians of a duel (working seconds), by way.
    """

    way: Way
    what: str
    step: int
    why: Any = ""
    seconds: Mapping[Way, float] = field(default_factory=dict)
