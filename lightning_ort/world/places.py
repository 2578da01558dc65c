"""Whose code is it: the user's, which is read, or that of packages, which is known or trusted."""

import enum
import functools
import sys
import sysconfig
import types
from pathlib import Path

# packages whose functions are known: what of them is open is listed in `watch.py`
KNOWN = {"torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities"}
KNOWN |= {"torchgen", "functorch", "sympy"}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
# modules of the standard library whose functions depend on their arguments alone
PURE = {"builtins", "math", "cmath", "operator", "functools", "itertools", "collections", "dataclasses", "typing"}
PURE |= {"abc", "types", "enum", "copy", "numbers", "contextlib", "inspect", "re", "string", "textwrap", "warnings"}
PURE |= {"fractions", "statistics", "bisect", "heapq", "struct", "datetime", "calendar", "keyword"}
PURE |= {"reprlib", "typing_extensions", "annotationlib", "copyreg", "_abc", "_bisect", "_collections"}
PURE |= {"_collections_abc", "_datetime", "_functools", "_heapq", "_operator", "_sre", "_statistics"}
PURE |= {"_string", "_struct", "_typing", "_warnings", "_weakrefset", "sre_compile", "sre_parse", "sre_constants"}


class Place(enum.Enum):
    """Whose a piece of code is."""

    OURS = enum.auto()
    KNOWN = enum.auto()
    PURE = enum.auto()
    STANDARD = enum.auto()  # the rest of the standard library
    PACKAGE = enum.auto()  # installed, trusted for its code
    USER = enum.auto()


def root_of(name: str | None) -> str:
    """The top-level package of a module."""
    return (name or "").partition(".")[0]


@functools.cache
def _of_installation() -> tuple[str, ...]:
    return tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(enum.__file__).parent)})


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


class Places:
    """Tells whose code is which.

    Args:
        packages: Top-level packages that are the user's, wherever they are installed.
    """

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages - KNOWN - {"lightning_ort"}
        self._of_modules: dict[str, Place] = {}

    def of_module(self, name: str | None, file: str | None = None) -> Place:
        """The place of a module's code; ``file`` is where the code comes from."""
        name = name or ""
        if (place := self._of_modules.get(name)) is None:
            place = self._of_modules[name] = self._find(name, file)
        return place

    def _find(self, name: str, file: str | None) -> Place:
        root = root_of(name)
        if root in self._packages:
            return Place.USER
        if root == "lightning_ort":
            return Place.OURS
        if root in KNOWN:
            return Place.USER if ".demos" in name else Place.KNOWN
        if file is None:
            file = getattr(sys.modules.get(name), "__file__", None) or ""
        if (
            root in sys.stdlib_module_names
            and name != "__main__"
            and (not file or file.startswith(("<frozen", *_of_installation())) and not _is_installed(file))
        ):
            return Place.PURE if name in PURE or root in PURE - {"collections"} else Place.STANDARD
        if name.startswith("namedtuple_"):
            return Place.PURE
        return Place.PACKAGE if _is_installed(file) else Place.USER

    def of_class(self, kind: type) -> Place:
        """The place of a class."""
        return self.of_module(kind.__module__) if isinstance(kind.__module__, str) else Place.USER

    def of_code(self, code: types.CodeType, namespace: dict[str, object]) -> Place:
        """The place of code that runs with these globals."""
        name = namespace.get("__name__")
        file = code.co_filename
        return self.of_module(name if isinstance(name, str) else "", None if file.startswith("<string") else file)
