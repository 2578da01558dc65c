"""Objects of installed packages in a batch, such as an index of pandas: :class:`Held`."""

import io
import pickle
import weakref
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_ort.world.places import Place, Places

MOST_BYTES = 1 << 16


class _Pickler(pickle.Pickler):
    """Notes what it pickles."""

    def __init__(self, file: io.BytesIO, places: Places) -> None:
        super().__init__(file, 5)
        self.found: list[Any] = []
        self._places = places

    @override
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (Tensor, nn.Module)) or _place_of(self._places, value) is Place.USER:
            raise pickle.PicklingError
        self.found.append(value)
        return NotImplemented


def _place_of(places: Places, value: Any) -> Place:
    module = getattr(value, "__module__", None)  # of functions and classes, too
    return places.of_module(module) if isinstance(module, str) else places.of_class(type(value))


_ANY = Places(set())


def parts_of(value: Any, places: Places = _ANY) -> tuple[bytes, list[Any]] | None:
    """Return the pickle of an object of an installed package, and all in it that is more than plain values.

    ``None`` if it cannot be compared so: there are tensors or objects of the user's in it, or it is large.
    """
    if isinstance(value, (type, Tensor, nn.Module)) or _place_of(places, value) is not Place.PACKAGE:
        return None
    pickler = _Pickler(file := io.BytesIO(), places)
    try:
        pickler.dump(value)
    except Exception:  # of code of the package, too
        return None
    return (text, pickler.found) if len(text := file.getvalue()) <= MOST_BYTES else None


class Held:
    """An object, equal to the same one if that has the same pickle."""

    def __init__(self, value: Any, text: bytes) -> None:
        self._of, self._pickle = weakref.ref(value), text

    @classmethod
    def of(cls, value: Any) -> "Held | None":
        """Return what an object is compared by; none if it cannot be compared."""
        try:
            return None if (found := parts_of(value)) is None else cls(value, found[0])
        except TypeError:  # there are no weak references to it
            return None

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Held) or self._pickle != other._pickle:
            return False
        return (own := self._of()) is not None and own is other._of()

    @override
    def __hash__(self) -> int:
        return hash(self._pickle)
