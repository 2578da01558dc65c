"""The malloc of this process, where it is glibc's: torch and ONNX Runtime take the CPU's memory from it."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from lightning_ort.compiler.machine.while_running import WhileRunning

# <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_RETAIN = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 64 << 20}  # no mapped blocks, no trimming
# glibc adapts its thresholds until one of them is set: these are the highest values that it adapts them to
_DEFAULT = {_M_MMAP_MAX: 65536, _M_TRIM_THRESHOLD: 64 << 20, _M_TOP_PAD: 128 << 10, _M_MMAP_THRESHOLD: 32 << 20}


@cache
def glibc() -> ctypes.CDLL | None:
    """Return the C library whose malloc this process uses, if it is glibc."""
    try:
        libc, process = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
        libc.gnu_get_libc_version, libc.mallopt, libc.malloc_trim  # noqa: B018  (AttributeError: another C library)
    except (OSError, AttributeError, TypeError):  # no such file, musl and Windows, in this order
        return None
    # jemalloc, tcmalloc and others are loaded before it
    return libc if _address(libc) == _address(process) or _counts(libc, process) else None


def _address(library: Any) -> int | None:
    return ctypes.cast(library.malloc, ctypes.c_void_p).value


_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


def _counts(libc: Any, process: Any) -> bool:
    """Whether a library counts what the process allocates: Debian's Python has its own address for any malloc."""
    if not hasattr(libc, "mallinfo2"):  # before glibc 2.33
        return False
    size = 1 << 24  # more than other threads free meanwhile
    libc.mallinfo2.restype, process.malloc.restype = _Counts, ctypes.c_void_p
    before = libc.mallinfo2()
    block = process.malloc(ctypes.c_size_t(size))
    after = libc.mallinfo2()
    process.free(ctypes.c_void_p(block))
    return bool(after.uordblks + after.hblkhd - before.uordblks - before.hblkhd >= size)


def trim() -> None:
    """Give freed memory back to the system, where malloc can."""
    if (library := glibc()) is not None:
        library.malloc_trim(0)


def _set(options: dict[int, int]) -> None:
    library = glibc()
    assert library is not None
    for option, value in options.items():
        library.mallopt(option, value)


def _retain() -> Callable[[], None]:
    _set(_RETAIN)
    return _release


def _release() -> None:
    _set(_DEFAULT)
    trim()


# freed memory stays in the process, ``mallopt(3)``, and goes to the system when the last run ends
retained: WhileRunning[Any] = WhileRunning(_retain)
