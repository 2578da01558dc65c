"""Keep freed host memory in the process for the next step: :class:`HostMemoryMixin`.

On a CPU torch takes the memory of activations from malloc. glibc maps large blocks when they are asked for and unmaps
them when they are freed, so that each step of training meets all its pages anew, with a page fault each. Told to keep
them (``mallopt(3)``: no mapped blocks, no trimming), it does so from the second step on.
"""

import ctypes
import os
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy as _Strategy

    from lightning_ort.compiler.report import CompileReport
else:
    _Strategy = object

HostMemory = Literal["retain", "default"]

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_RETAIN = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 64 << 20}
# glibc moves its thresholds as it goes, and no longer once one was set: these are the ones that it comes to at most
_DEFAULT = {_M_MMAP_MAX: 65536, _M_TRIM_THRESHOLD: 64 << 20, _M_TOP_PAD: 128 << 10, _M_MMAP_THRESHOLD: 32 << 20}
_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")

_users = 0  # runs in this process that want it retained
_lock = threading.Lock()  # they may be in several threads


class HostMemoryMixin(_Strategy):
    """Keeps freed memory in the process while a run on the CPU lasts.

    Args:
        host_memory: ``"retain"``, or ``"default"`` for what malloc does by itself.
        **kwargs: For the strategy.

    Raises:
        ValueError: If ``host_memory`` is neither.

    """

    if TYPE_CHECKING:
        report: CompileReport

    def __init__(self, host_memory: HostMemory = "retain", **kwargs: Any) -> None:
        if host_memory not in get_args(HostMemory):
            raise ValueError(f"host_memory={host_memory!r}: choose 'retain' or 'default'.")
        super().__init__(**kwargs)
        self._host_memory = host_memory
        self._retains = False

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        if self._host_memory == "default" or self.root_device.type != "cpu":
            self.report.host_memory = "default"
        elif (obstacle := why_not_retained()) is not None:
            self.report.host_memory = f"default: {obstacle}"
        else:
            self.report.host_memory = "retained"
            if not self._retains:
                self._retains = True
                retain()

    @override
    def teardown(self) -> None:
        if self._retains:
            self._retains = False
            release()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_retains": False}  # a copy has asked for nothing yet


def why_not_retained() -> str | None:
    """Return why malloc cannot, or should not, be told to keep memory; ``None`` if it can."""
    if _malloc() is None:
        return "malloc is not glibc's"
    chosen = [name for name in _VARIABLES if name in os.environ]
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        chosen.append("GLIBC_TUNABLES")
    return f"malloc is set by {', '.join(chosen)}" if chosen else None


def retain() -> None:
    """Keep freed memory in the process until :func:`release` was called as often as this."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _set(_RETAIN)


def release() -> None:
    """Undo one :func:`retain`; the last one gives the memory back to the system."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _set(_DEFAULT)
            malloc = _malloc()
            assert malloc is not None
            malloc.malloc_trim(0)


def _set(options: dict[int, int]) -> None:
    malloc = _malloc()
    assert malloc is not None
    for option, value in options.items():
        malloc.mallopt(option, value)


@cache
def _malloc() -> ctypes.CDLL | None:
    """Return the C library whose malloc this process uses, if it is glibc."""
    try:
        libc, process = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
        libc.gnu_get_libc_version, libc.mallopt, libc.malloc_trim  # noqa: B018  (AttributeError: another C library)
    except (OSError, AttributeError, TypeError):  # in turn: no such file, musl, Windows
        return None
    # jemalloc, tcmalloc and others are loaded in front of it
    own, used = (ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (libc, process))
    return libc if own == used else None
