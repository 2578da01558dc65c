"""The words of a race: what it is told, and what it says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lightning_ort._busy import slowdown


class Way(NamedTuple):
    """One way to run a step."""

    engine: str  # what runs it, of :data:`~lightning_ort.compiler.engines.ENGINES`; ``"torch"`` is the unchanged step
    # what is compiled: the step, its child modules, or what was recorded of the step
    part: Literal["step", "modules", "recording"] = "step"
    graphs: int = 2  # of a captured step on ONNX Runtime: 1 if forward and backward pass are one graph, else 2
    threads: int = 0  # of torch, for the unchanged step; 0: as many as it has

    @property
    def replays(self) -> bool:
        """Whether calls are replayed that were recorded."""
        return self.part == "recording"

    def __str__(self) -> str:
        return f"{self.engine}/{self.part}/{self.graphs}"


UNCHANGED = Way("torch")
RECORDING = Way("recorded", "recording")
ON_ONE_THREAD = Way("torch", threads=1)

# What it is told


@dataclass(frozen=True)
class Now:
    """What is known before a step."""

    # how many steps are to come; infinite if they are taken to be many; ``None`` if nobody knows: then as many as were
    # done
    steps_left: float | None = None
    may_change: bool = True  # whether another way may begin here, and not within a window of accumulated gradients
    # returns why a way may not run now beside the champion; may be empty
    obstacle: Callable[[Way], str] = lambda way: ""
    memory: Callable[[], float] = lambda: 0.0  # returns the bytes that the process uses; 0 if nobody knows


@dataclass(frozen=True)
class Took:
    """How a step went."""

    # what it took, with its backward pass; it matters if :attr:`~.race.Race.wants_time`, or if something was compiled
    seconds: float = 0.0
    waited: float = 0.0  # of these, the seconds in which it was ready to go on and other programs had the processors
    compiled: bool = False  # whether something was compiled in it
    # working seconds that compiling would have taken, if :meth:`~.race.Race.may_compile` has left a part uncompiled
    projected: float = 0.0
    counts: bool = True  # whether the time says how fast the way is
    memory: float = 0.0  # bytes that the process uses; it matters in duels
    steps: int = 1  # so many were timed as one, and each took as long on average

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
    """What is expected of a way that has not been tried in this run."""

    cost: float  # working seconds until it runs
    # the share of the unchanged step that it saves at most: 1 if nobody knows, 0 if it has lost before
    saves: float = 1.0
    why: str = ""  # where that is from, for people; may be empty
    stake: float = 1.0  # the share of what it saves that it may cost at most
    # whether that was measured, by the same program, or is known as well, so that no other share limits it
    measured: bool = False
    earlier: bool = False  # whether an earlier run on this machine has found what it costs


@dataclass(frozen=True)
class Failure:
    """Why a way cannot go on."""

    why: Any  # for people; nothing here reads it
    instead: Way | None = None  # what is tried in its place, if anything
    final: bool = False  # whether nothing else can go on either: the step is for eager alone


# What it says


@dataclass(frozen=True)
class Waiting:
    """What a way is expected to cost, or has cost, and what may be spent, in working seconds."""

    cost: float
    allowed: float
    slowdown: float = 1.0  # of the machine now
    earlier: bool = False  # whether the cost is from an earlier run on this machine
    by_budget: bool = True  # whether ``compile_budget`` is what limits it, and not what the way saves


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
    """What happened to a way."""

    way: Way  # which one
    # ``"waits"`` (the rule to start says no), ``"starts"``, ``"compiles"``, ``"wins"``, ``"loses"``, ``"fails"``,
    # ``"refused"`` (the step is for eager alone), ``"costs too much"``, or ``"pays"`` (more is saved than was spent)
    what: str
    step: int  # how many steps of the run were done
    why: Any = ""  # for people; a :class:`Waiting` or :class:`Verdict` where that says it
    # of compiling, or the medians of a duel (working seconds), by way
    seconds: Mapping[Way, float] = field(default_factory=dict)
