"""What was compiled for the ways of one step, and how it is freed: :class:`CompiledWays`."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from lightning_ort.compat import dynamo
from lightning_ort.strategies.race.race import Way


class CompiledWays:
    """The compiled functions of one step, by way, and their graphs; tells before any is freed."""

    def __init__(self, before_freeing: Callable[[], None]) -> None:
        self._before_freeing = before_freeing
        self._functions: dict[Way, Callable[..., Any]] = {}
        self.settled: dict[Way, Any] = {}  # what calls them while nothing changes
        self._lost: list[Callable[..., Any]] = []  # of ways that do not run any more; their graphs are freed
        self._graphs: defaultdict[Way, weakref.WeakSet[Any]] = defaultdict(weakref.WeakSet)
        self._recompiling: list[int] = []  # numbers of steps that have compiled again

    def begin_run(self) -> None:
        """Begin a run of the Trainer, which counts its steps anew."""
        self._recompiling = []

    def get(self, way: Way, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """Return the function of a way, which is made if there is none."""
        if way not in self._functions:
            self._functions[way] = make()
        return self._functions[way]

    def keep(self, way: Way, graph: Any) -> None:
        """Note what runs a graph of a way, which its ``leave()`` frees."""
        self._graphs[way].add(graph)

    def recompiling(self, step: int, again: bool) -> tuple[int, int]:
        """Return how many steps in a row, up to this one, have compiled again, and how many since nothing was compiled.

        ``again``: whether this one has.
        """
        self._recompiling += [step] * again
        in_a_row = sum(step - number == back for back, number in enumerate(reversed(self._recompiling)))
        return in_a_row, len(self._recompiling)

    def free_lost(self, living: set[Way]) -> None:
        """Free what was compiled for ways that do not run any more."""
        lost = self._functions.keys() - living
        for way in lost:
            self.settled.pop(way, None)
        if lost == self._functions.keys():
            self.release(lost)
        elif lost:
            self._before_freeing()
            # dynamo keeps its code, since to free that of one way makes it compile the others again
            for way in lost:
                self._lost.append(self._functions.pop(way))
                for graph in self._graphs.pop(way, ()):
                    graph.leave()
            gc.collect()  # graphs are part of reference cycles; on a GPU their sessions have an arena each

    def release(self, ways: Iterable[Way] | None = None) -> None:
        """Free what was compiled for ways, by default for all, with dynamo's code."""
        self.settled.clear()
        wanted = self._functions.keys() if ways is None else self._functions.keys() & set(ways)
        released = [self._functions.pop(way) for way in list(wanted)]
        if not self._functions:
            released, self._lost = released + self._lost, []
            self._graphs.clear()
        if released:
            self._recompiling = []
            self._before_freeing()
            dynamo.release_regions([*map(dynamo.region_of, released)])
            gc.collect()
