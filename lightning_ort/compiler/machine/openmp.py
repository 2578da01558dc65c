"""The threads of torch's OpenMP pool: ended while ONNX Runtime computes with its own, left alone by small updates.

After an operation, the workers of torch's OpenMP pool keep their cores busy for several milliseconds while they wait
for the next one. Meanwhile ONNX Runtime's threads take up to twice as long: a product of 1024 x 256 and 256 x 1024 took
2.9 ms alone and 5.6 ms after an addition in torch (torch 2.13, GNU's libgomp, two cores). OpenMP 5.0 has a function
that ends the workers, which takes 40 microseconds; torch's next operation starts them again, in 50 microseconds.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# a lookup includes the libraries that this one depends on, whatever OpenMP's file is called
_LIBRARY = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
_SOFT = 1  # omp_pause_soft: settings are kept


def pause_openmp() -> None:
    """End the workers of the calling thread's OpenMP pool, if it has any."""
    pause = _pause_function()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause_function() -> Callable[[int], int] | None:
    """Return ``omp_pause_resource_all`` of the OpenMP library that torch uses, if it has one."""
    try:
        pause = ctypes.CDLL(_LIBRARY).omp_pause_resource_all
    except (OSError, AttributeError):  # another operating system, OpenMP before 5.0, or no OpenMP
        return None
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return pause


class OneThread:
    """A context in which what is parallel by OpenMP uses no other thread than this one.

    ``torch.set_num_threads`` is for the whole process, whose threads that begin meanwhile would keep it.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _get()
        if self._before != 1:
            _put(1)

    def __exit__(self, *exc_info: object) -> None:
        if self._before != 1:
            _put(self._before)


class OneThreadInAll(OneThread):
    """The same for all that torch calls, and for code that may call ``torch.set_num_threads``, which holds.

    That tells OpenMP, and MKL for the calling thread, which else does as OpenMP says. So MKL is told nothing here.
    """

    __slots__ = ("_mkl",)

    def __enter__(self) -> None:
        super().__enter__()
        if self._before != 1:
            self._mkl = _put_mkl(0)

    def __exit__(self, *exc_info: object) -> None:
        if self._before != 1:
            if told := _put_mkl(self._mkl):
                _put_mkl(told)
            else:
                _put(self._before)


def _functions() -> tuple[Callable[[], int], Callable[[int], Any], Callable[[int], int]]:
    """Return what reads and what sets the number of OpenMP threads of the calling thread, and what sets MKL's.

    MKL's returns the last number, 0 for none. There is one thread where torch has no OpenMP.
    """
    try:
        found = ctypes.CDLL(_LIBRARY)
        get, put = found.omp_get_max_threads, found.omp_set_num_threads
    except (OSError, AttributeError):
        return lambda: 1, lambda number: None, lambda number: 0
    get.argtypes, get.restype, put.argtypes, put.restype = [], ctypes.c_int, [ctypes.c_int], None
    mkl = getattr(found, "MKL_Set_Num_Threads_Local", None)
    if mkl is None:  # other processors than x86
        return get, put, lambda number: 0
    mkl.argtypes, mkl.restype = [ctypes.c_int], ctypes.c_int
    return get, put, mkl


_get, _put, _put_mkl = _functions()
