"""Ends the threads of torch's OpenMP pool while ONNX Runtime computes with threads of its own.

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

_SOFT = 1  # omp_pause_soft: settings are kept


def pause_openmp() -> None:
    """End the workers of the calling thread's OpenMP pool, if it has any."""
    pause = _pause_function()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause_function() -> Callable[[int], int] | None:
    """Return ``omp_pause_resource_all`` of the OpenMP library that torch uses, if it has one."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # the lookup includes the libraries that this one depends on, whatever OpenMP's file is called
        pause = ctypes.CDLL(str(library)).omp_pause_resource_all
    except (OSError, AttributeError):  # another operating system, OpenMP before 5.0, or no OpenMP
        return None
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return pause
