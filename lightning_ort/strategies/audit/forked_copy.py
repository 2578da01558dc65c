"""Compute something from this process's exact state while the process goes on: :class:`ForkedCopy`.

A forked process shares the parent's memory, copy on write, and so has its Python objects, tensors and random numbers.
It may only compute and answer: of its open files two pipes are left, all others lead nowhere, and it can open none;
memory that is shared with others becomes its own; signals act as in a fresh process; Python's functions that change
files, start programs or signal processes raise; it ends without cleaning up. So whatever the computation does, nobody
else sees it.

Of the parent's threads it has one. A lock that another thread held when the process was forked is never released, so
that the computation may hang. The parent waits with a limit, and then ends it: it can never hang itself. Torch computes
with one thread, since the workers of its pool are not there.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import pickle
import random
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from lightning_ort._memory import free_bytes, resident_bytes

try:
    _LIBC: Any = ctypes.CDLL(None, use_errno=True)
except (OSError, TypeError):  # Windows
    _LIBC = None

_PR_SET_PDEATHSIG = 1
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x02, 0x10, 0x20
_COMMANDS, _ANSWERS = 3, 4  # file descriptors in the process
_START_SECONDS = 10.0
MAX_SHARED_BYTES = 1 << 28  # of memory that is shared with other processes, which is copied
# what Python's audit hooks say of harmless calls; all others of these modules raise
_REFUSED = ("os.", "shutil.", "socket.", "subprocess.", "tempfile.", "signal.", "syslog.", "sqlite3.", "pty.")
_HARMLESS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv", "os.chdir"}


def unavailable() -> str:
    """Return why this process cannot be copied, or nothing."""
    if sys.platform != "linux" or _LIBC is None:
        return "it takes Linux"
    free, resident = free_bytes(), resident_bytes()
    if free is None or resident is None:
        return "free memory is not known"
    if free < resident:  # if all of it is written to while the copy is there
        return f"only {free >> 20} MB of memory are free"
    if (shared := sum(stop - start for start, stop in _shared_mappings())) > MAX_SHARED_BYTES:
        return f"{shared >> 20} MB of memory are shared with other processes"
    return ""


class ForkedCopy:
    """A process that has the state of this one at a moment, and computes from it, each time anew.

    Args:
        compute: Takes what :meth:`ask` got, and returns plain values that can be pickled.

    Raises:
        OSError: If no process can be started.

    """

    def __init__(self, compute: Callable[[int], Any]) -> None:
        self.problem = ""  # why there is no answer
        self._pid = 0
        states = random.getstate()  # Python gives a forked process other random numbers
        commands, answers = os.pipe(), os.pipe()
        self._commands, self._answers = commands[1], answers[0]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of other threads (Python 3.12)
                self._pid = os.fork()
            if self._pid == 0:
                _serve(compute, commands[0], answers[1], states)
        finally:
            os.close(commands[0])
            os.close(answers[1])
            if self._pid == 0:
                self._close_pipes()
        if self._read(1, time.monotonic() + _START_SECONDS) is None:
            self.close()

    def ask(self, command: int) -> None:
        """Have something computed, from the state that the process was given; commands are from 0 to 255."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._commands, bytes([command]))

    def answer(self, seconds: float) -> Any:
        """Wait for what was asked for; ``None`` if it takes longer than that, fails or ends. Then it is closed."""
        limit = time.monotonic() + seconds
        size = self._read(8, limit)
        data = None if size is None else self._read(int.from_bytes(size, "little"), limit)
        if data is None:
            self.problem = f"nothing came within {seconds:.0f} s" if time.monotonic() >= limit else "its process ended"
        else:
            answer, self.problem = pickle.loads(data)
            if not self.problem:
                return answer
        self.close()
        return None

    def close(self) -> None:
        """End the process; a second call does nothing."""
        pid, self._pid = self._pid, 0
        if pid == 0:
            return
        for target in (-pid, pid):  # its group, with what it has forked; there is none before it has begun
            with contextlib.suppress(OSError):
                os.kill(target, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
            os.waitpid(pid, 0)
        self._close_pipes()

    def _close_pipes(self) -> None:
        os.close(self._commands)
        os.close(self._answers)

    def _read(self, length: int, limit: float) -> bytes | None:
        if self._pid == 0:
            return None
        data = b""
        poll = select.poll()  # a descriptor may be too high for select
        poll.register(self._answers, select.POLLIN)
        while len(data) < length:
            if not poll.poll(max(0.0, 1000 * (limit - time.monotonic()))):
                return None
            if not (found := os.read(self._answers, length - len(data))):
                return None
            data += found
        return data


# In the forked process


def _serve(compute: Callable[[int], Any], commands: int, answers: int, random_state: Any) -> NoReturn:
    try:
        _isolate(commands, answers)
        os.write(_ANSWERS, b"r")
        while command := os.read(_COMMANDS, 1):
            if (pid := os.fork()) == 0:
                random.setstate(random_state)
                _answer(compute, command[0])
            if os.waitpid(pid, 0)[1] != 0:
                break
    finally:
        os._exit(0)


def _answer(compute: Callable[[int], Any], command: int) -> NoReturn:
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_ANSWERS + 1, _ANSWERS + 1))
        sys.addaudithook(_refuse)
        torch.set_num_threads(1)
        try:
            data = pickle.dumps((compute(command), ""))
        except Exception as error:
            data = pickle.dumps((None, f"{type(error).__name__}: {error}"[:500]))
        message = memoryview(len(data).to_bytes(8, "little") + data)
        while message:
            message = message[os.write(_ANSWERS, message) :]
        status = 0
    finally:
        os._exit(status)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event.startswith(_REFUSED) and event not in _HARMLESS:
        raise PermissionError(f"{event} in a process that may only compute")


def _isolate(commands: int, answers: int) -> None:
    os.setpgid(0, 0)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    gc.disable()  # finalizers belong to the parent
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # the C library's own
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python starts: errors, not ends
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _unshare_memory()
    pipes = [fcntl.fcntl(pipe, fcntl.F_DUPFD, 16) for pipe in (commands, answers)]
    null = fcntl.fcntl(os.open(os.devnull, os.O_RDWR), fcntl.F_DUPFD, 16)
    for source, target in zip((null, null, null, *pipes), range(_ANSWERS + 1), strict=True):
        os.dup2(source, target)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > _ANSWERS:  # not closed: whoever writes to it must not fail
            os.dup2(null, descriptor)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (a notebook's are no files)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _shared_mappings() -> list[tuple[int, int]]:
    """The addresses of writable memory that other processes, or files, see changes of."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    fields = [line.split(maxsplit=2)[:2] for line in lines]
    ranges = [addresses.split("-") for addresses, mode in fields if mode.startswith("rw") and mode[3] == "s"]
    return [(int(start, 16), int(stop, 16)) for start, stop in ranges]


def _unshare_memory() -> None:
    """Replace it by copies, at the same addresses."""
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for start, stop in _shared_mappings():
        data = ctypes.string_at(start, stop - start)
        flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS
        if _LIBC.mmap(start, len(data), 0x1 | 0x2, flags, -1, 0) != start:
            raise OSError(ctypes.get_errno(), "mmap")
        ctypes.memmove(start, data, len(data))
