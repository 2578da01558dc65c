"""Fetch a batch from one loader: :class:`LeanFetcher`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_ort.compat.lightning_loops import next_of_only, only_loader
from lightning_ort.strategies.lean.run import LeanObject, LeanRun

if TYPE_CHECKING:
    from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
else:
    _PrefetchDataFetcher = Iterator  # as it has, or an object's class could not be changed


class LeanFetcher(_PrefetchDataFetcher):
    """Asks the loader itself, where there is but one, or it is the one that is due."""

    _lean: LeanRun
    found: Any = None  # what was fetched and not used
    __reduce_ex__ = LeanObject.__reduce_ex__

    @override
    def __next__(self) -> Any:
        if (found := self.found) is not None:
            self.found = None
            return found
        lean = self._lean
        loader, length, ahead = only_loader(self, lean.loaders), self.length, self.batches
        if loader is None or bool(ahead) != (length is None) or not lean.on:
            return super().__next__()
        item = ahead.pop(0) if length is None else None  # one is fetched in advance, to know which is the last
        try:
            fetched = next_of_only(loader)
        except StopIteration:
            self.done = not ahead
            if length is None:
                return item
            raise
        self.fetched += 1
        if length is None:
            ahead.append(fetched)
            return item
        self.done = self.fetched >= length
        return fetched
