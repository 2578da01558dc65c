"""Dropout masks from a C function that draws them as torch does, about nine times as fast: :class:`MaskKernel`.

On processors other than Intel's, torch's ``bernoulli`` takes two 32-bit numbers from its generator (mt19937) for each
element, one element at a time (torch 2.13). The function in ``mask_kernel.c`` computes the same numbers many at a time,
and leaves the generator in the same state. It is compiled in another thread, when about as much time was spent on
drawing as it would have saved, and kept for later runs, which load it about when that pays.
"""

import ctypes
import functools
import hashlib
import itertools
import logging
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_ort.compat.cpython import in_forked_children
from lightning_ort.compiler.cache.cache_folder import folder_of, read_sealed, write_sealed

log = logging.getLogger(__name__)

# for fewer elements torch's own function is as fast
MIN_ELEMENTS = 4096
# to draw so many takes 0.2 s longer without the function, and to compile it about as long
_COMPILE_AFTER = 40_000_000
# the same of a kept one, which is loaded and checked in a millisecond
_LOAD_AFTER = 100_000
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
_LIBRARY = "mask_kernel.so"
_SOURCE = Path(__file__).with_name("mask_kernel.c")
# the bits of a 1, by dtype
_ONES = {
    torch.bool: 1,
    torch.uint8: 1,
    torch.float16: 0x3C00,
    torch.bfloat16: 0x3F80,
    torch.float32: 0x3F800000,
    torch.float64: 0x3FF0000000000000,
}
# at::uniform_real_distribution<double> uses this many bits of each 64-bit number
BITS = 53


_generator_lock = threading.RLock()


@in_forked_children
def _reset_after_fork() -> None:
    """Replace what a thread of the parent may have held, which does not exist in a forked process."""
    global _generator_lock
    _generator_lock = threading.RLock()


class MaskKernel:
    """The C function, once it is compiled.

    Attributes:
        drawn: The elements that could have been drawn by it.
        problem: Why there is none.
        cache_dir: The setting that says in which folder it is kept.
    """

    def __init__(self) -> None:
        self.drawn = 0
        self.problem = ""
        self.cache_dir: str | None = None
        self._function: Any = None
        self._has_looked = False
        self._thread: threading.Thread | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it draws."""
        return self._function is not None

    def draw(self, out: torch.Tensor, p: float, generator: torch.Generator | None) -> bool:
        """Fill a tensor as ``out.bernoulli_(p, generator=generator)`` does; return whether that was possible."""
        if out.dtype not in _ONES or not _is_dense(out) or not 0 <= p <= 1:
            return False
        self.drawn += out.numel()
        if self._function is None and self.drawn >= _LOAD_AFTER and not self._has_looked:
            self._has_looked = True
            self._load_kept()
        if self._function is None:
            if self.drawn >= _COMPILE_AFTER and self._thread is None:
                self._thread = threading.Thread(target=self._compile, name="lightning_ort_compile", daemon=True)
                self._thread.start()
            return False
        with _generator_lock:  # no other thread's masks between reading the generator's state and setting it
            self._draw(self._function, out, p, torch.default_generator if generator is None else generator)
        return True

    @staticmethod
    def _draw(function: Any, out: torch.Tensor, p: float, generator: torch.Generator) -> None:
        state = generator.get_state()
        below = math.ceil(p * 2**BITS)  # exact: a double has 53 bits, which are only shifted
        function(state.data_ptr(), out.data_ptr(), out.numel(), out.element_size(), below, _ONES[out.dtype])
        generator.set_state(state)

    def _load_kept(self) -> None:
        if sys.platform != "linux" or (kept := folder_of(self.cache_dir)) is None:
            return
        try:
            if not (content := read_sealed(kept / _name())):
                return
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                path = Path(folder, _LIBRARY)
                path.write_bytes(content)  # which was read whole, and cannot change while it is loaded
                problem = self._load(path)
        except OSError as error:
            problem = str(error)
        if problem:
            log.debug("The kept function for dropout masks is not used: %s", problem)

    def _compile(self) -> None:
        if problem := unsupported_reason():
            self.problem = problem
            return
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                path = Path(folder, _LIBRARY)
                command = [*_compiler(), *_FLAGS, "-o", str(path), str(_SOURCE)]
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
                )
                if done.returncode != 0:
                    self.problem = f"{command[0]} failed: {done.stderr.strip()[:200]}"
                    return
                self.problem = self._load(path)
                if not self.problem and (kept := folder_of(self.cache_dir)) is not None:
                    with suppress(OSError):  # a later run compiles it again
                        write_sealed(kept / _name(), path.read_bytes())
        except (OSError, subprocess.SubprocessError) as error:
            self.problem = str(error)
        finally:
            if self.problem:
                log.debug("Dropout masks are drawn by torch: %s", self.problem)

    def _load(self, path: Path) -> str:
        """Draw with the function in a library from now on; return why not, if so."""
        try:
            function = ctypes.CDLL(str(path)).draw_mask
        except (OSError, AttributeError) as error:
            return str(error)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, *[ctypes.c_uint64] * 2]
        function.restype = None
        if not self._agrees(function):
            return "it draws other masks than torch"
        self._function = function
        return ""

    def _agrees(self, function: Any) -> bool:
        """Whether the function draws the same as torch, from generators of its own."""
        one, other = (torch.Generator().manual_seed(0) for _ in range(2))
        for skipped, dtype in enumerate(_ONES):
            for count in (1, 311, 313, 2000):
                for generator in (one, other):  # an odd number of 32-bit numbers between two draws
                    torch.empty(skipped, dtype=torch.float32).uniform_(generator=generator)
                drawn, expected = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
                self._draw(function, drawn, 0.3, one)
                expected.bernoulli_(0.3, generator=other)
                if not torch.equal(drawn, expected) or not torch.equal(one.get_state(), other.get_state()):
                    return False
        return True


@functools.cache
def mask_kernel() -> MaskKernel:
    """Return the one of this process."""
    return MaskKernel()


@functools.cache
def matches_torch() -> bool:
    """Return whether torch draws in this way here; with MKL on Intel processors it uses another generator."""
    one, other = (torch.Generator().manual_seed(0) for _ in range(2))
    expected = torch.empty(MIN_ELEMENTS, dtype=torch.bool).bernoulli_(0.3, generator=one)
    numbers = torch.empty(MIN_ELEMENTS, dtype=torch.int64).random_(generator=other) & (2**BITS - 1)
    alike = torch.equal(numbers < math.ceil(0.3 * 2**BITS), expected)
    return alike and torch.equal(one.get_state(), other.get_state())


def unsupported_reason() -> str:
    """Return why the function cannot be compiled here, or nothing."""
    if sys.platform != "linux":
        return "it is compiled on Linux only"
    compiler = os.environ.get("CC", "cc")
    return "" if _compiler() else f"no C compiler: {compiler} is not on the PATH"


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CC", "cc"))
    found = shutil.which(command[0]) if command else None
    return [found, *command[1:]] if found else []


def _name() -> str:
    """Return under which name the function is kept: for this source, and the instructions that this processor has."""
    found = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode())
    with open("/proc/cpuinfo", "rb") as lines:
        for line in itertools.takewhile(bytes.strip, lines):  # of the first core
            if line.startswith((b"model name", b"flags", b"Features", b"isa")):
                found.update(line)
    return f"masks-{found.hexdigest()}.so"


def _is_dense(x: torch.Tensor) -> bool:
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
