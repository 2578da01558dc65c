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
    """A context in which torch's operations of this thread use no other one.

    ``torch.set_num_threads`` is for the whole process, whose threads that begin meanwhile would keep it.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        functions = _num_threads_functions()
        self._before = 1 if functions is None else functions[0]()
        if functions is not None and self._before != 1:
            functions[1](1)

    def __exit__(self, *exc_info: object) -> None:
        functions = _num_threads_functions()
        if functions is not None and self._before != 1:
            functions[1](self._before)


@functools.cache
def _num_threads_functions() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Return what reads and what sets the number of OpenMP threads of the calling thread, if torch has them."""
    try:
        found = ctypes.CDLL(_LIBRARY)
        get, put = found.omp_get_max_threads, found.omp_set_num_threads
    except (OSError, AttributeError):
        return None
    get.argtypes, get.restype, put.argtypes, put.restype = [], ctypes.c_int, [ctypes.c_int], None
    return get, put
