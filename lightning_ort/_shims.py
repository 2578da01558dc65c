"""What stands on objects of others in place of their own attributes, and comes off again: :class:`Shims`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MISSING = object()


class Shims:
    """Entries of instance dictionaries that replace others for a while.

    What comes off is only what was put on: an attribute that somebody has replaced meanwhile stays his.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[dict[str, Any], str, Any, Any]] = []  # dictionary, key, shim, value before
        self._installed = False

    def add(self, owner: Any, name: str, shim: Any) -> None:
        """Add the shim of an attribute."""
        self._entries.append((vars(owner), name, shim, vars(owner).get(name, MISSING)))

    def put(self, owner: Any, name: str, shim: Any) -> None:
        """Add the shim of an attribute, and install it."""
        self.add(owner, name, shim)
        vars(owner)[name] = shim

    def install(self) -> bool:
        """Put the shims into the dictionaries, except where the user has since put something; return whether to all."""
        current = self._installed = True
        for attributes, name, shim, before in self._entries:
            if attributes.get(name, MISSING) is before:
                attributes[name] = shim
            else:
                current = False
        return current

    def remove(self) -> None:
        """Restore the dictionaries."""
        self._installed = False
        for attributes, name, shim, before in self._entries:
            if attributes.get(name, MISSING) is not shim:
                continue
            if before is MISSING:
                del attributes[name]
            else:
                attributes[name] = before

    def needed(self, holds: Callable[[], bool]) -> "Shims":
        """Return those shims without which something does not hold."""
        found = Shims()
        entries = found._entries = [*self._entries]
        for index in reversed(range(len(entries))):
            entry = entries.pop(index)
            found.install()
            try:
                if not holds():
                    entries.insert(index, entry)
            finally:
                found.remove()
        return found

    def __reduce__(self) -> Any:
        return Shims, ()  # a copy has put nothing anywhere

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Within the block the dictionaries are as they were."""
        installed = self._installed
        self.remove()
        try:
            yield
        finally:
            if installed:
                self.install()
