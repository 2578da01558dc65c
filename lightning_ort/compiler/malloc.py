"""The malloc of this process, where it is glibc's: torch and ONNX Runtime take the CPU's memory from it."""

import ctypes
from functools import cache


@cache
def glibc() -> ctypes.CDLL | None:
    """Return the C library whose malloc this process uses, if it is glibc."""
    try:
        libc, process = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
        libc.gnu_get_libc_version, libc.mallopt, libc.malloc_trim  # noqa: B018  (AttributeError: another C library)
    except (OSError, AttributeError, TypeError):  # no such file, musl and Windows, in this order
        return None
    # jemalloc, tcmalloc and others are loaded before it
    own, used = (ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (libc, process))
    return libc if own == used else None


def trim() -> None:
    """Give freed memory back to the system, where malloc can."""
    if (library := glibc()) is not None:
        library.malloc_trim(0)
