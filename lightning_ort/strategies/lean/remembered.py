"""An answer that holds as long as what it depends on stays the same: :class:`Remembered`."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class Remembered(Generic[Answer]):
    """Asks again only if attributes are others than they were: methods that people may replace while they train.

    Args:
        ask: What returns the answer.
        attributes: Objects, and names of attributes of each, which may be those of others in them.
    """

    def __init__(self, ask: Callable[[], Answer], *attributes: tuple[Any, Iterable[str]]) -> None:
        self._ask = ask
        self._reads = [(operator.attrgetter(*names), thing) for thing, names in attributes]
        self._seen: Sequence[tuple[Callable[[Any], Any], Any, Any]] = ()
        self._answer: Answer

    def __call__(self) -> Answer:
        """Return the answer."""
        for read, thing, seen in self._seen or self._new():
            if [read(thing)] != seen:
                self._new()
                break
        return self._answer

    def _new(self) -> Sequence[tuple[Callable[[Any], Any], Any, Any]]:
        # in lists, which compare items by identity first: a mock counts other comparisons
        seen = [(read, thing, [read(thing)]) for read, thing in self._reads]
        self._answer, self._seen = self._ask(), seen
        return self._seen
