"""What is replaced for the whole process while runs last: :class:`WhileRunning`."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Run = TypeVar("Run")


class WhileRunning(Generic[Run]):
    """Replaces something when the first run begins, and undoes what ``replace`` did when the last one ends."""

    def __init__(self, replace: Callable[[], Callable[[], None]]) -> None:
        self.runs: tuple[Run, ...] = ()
        self._replace = replace
        self._undo: Callable[[], None] | None = None
        self._lock = threading.Lock()  # runs may be in several threads

    def begin(self, run: Run) -> None:
        """Note a run, which may have been noted before."""
        with self._lock:
            self.runs = (*self._without(run), run)
            self._undo = self._undo or self._replace()

    def end(self, run: Run) -> None:
        """Forget a run, if it was noted."""
        with self._lock:
            self.runs = self._without(run)
            if not self.runs and self._undo is not None:
                self._undo()
                self._undo = None

    def _without(self, run: Run) -> tuple[Run, ...]:
        return tuple(one for one in self.runs if one is not run)
