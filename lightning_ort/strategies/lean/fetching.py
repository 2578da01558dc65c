"""Fetch a batch from one loader: :class:`LeanFetcher`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_ort.strategies.lean.run import LeanObject

if TYPE_CHECKING:
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
else:
    _PrefetchDataFetcher = Iterator  # as it has, or an object's class could not be changed


class LeanFetcher(_PrefetchDataFetcher):
    """Asks the loader itself, where there is but one and its length is known."""

    _put_back: Any = None
    __reduce_ex__ = LeanObject.__reduce_ex__

    @override
    def __next__(self) -> Any:
        if (item := self._put_back) is not None:
            self._put_back = None
            return item
        return super().__next__()

    def put_back(self, item: Any) -> None:
        """Return this the next time."""
        self._put_back = item
