"""Two thread pools in one process: torch's rests while ONNX Runtime computes.

The workers of torch's OpenMP pool wait for the next operation without giving up their cores, for several milliseconds.
What ONNX Runtime does meanwhile with threads of its own takes up to twice as long: a product of 1024 x 256 and
256 x 1024 took 2.9 ms by itself, 5.6 ms after an addition in torch (torch 2.13, GNU's libgomp, two cores). OpenMP 5.0
has a call that ends the workers until they are needed again, which takes 40 microseconds, and 50 to start them.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft: settings are kept


def rest() -> None:
    """End the workers of the calling thread's OpenMP pool, if it has any; torch's next operation starts them again."""
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """Return ``omp_pause_resource_all`` of the OpenMP that torch uses."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # looked up in what the library depends on as well, whatever that file is called
        pause = ctypes.CDLL(str(library)).omp_pause_resource_all
    except (OSError, AttributeError):  # another system; an OpenMP before 5.0, or none
        return None
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return pause
