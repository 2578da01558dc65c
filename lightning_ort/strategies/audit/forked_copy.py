"""Compute something from this process's exact state while the process goes on: :class:`ForkedCopy`.

A copy of the process shares the parent's memory, copy on write, and so has its Python objects, tensors and random
numbers. It is sealed (:mod:`~lightning_ort.strategies.audit.sealed_process`): it can compute and answer, and whatever
else the computation tries ends it.

Of the parent's threads it has one. A lock that another thread held when the process was copied is never released, so
that the computation may hang. It has a limit of time, so that neither it nor the parent hangs for ever.
"""

import contextlib
import fcntl
import io
import os
import pickle
import random
import select
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from lightning_ort._memory import free_bytes, resident_bytes
from lightning_ort.strategies.audit import sealed_process

_PIPE_BYTES = 1 << 20  # an answer waits there for a parent that takes longer than the limit
_COMMAND, _PID = struct.Struct("=Bd"), struct.Struct("=i")


def unavailable() -> str:
    """Return why this process cannot be copied, or nothing."""
    if reason := sealed_process.unavailable():
        return reason
    free, resident = free_bytes(), resident_bytes()
    if free is None or resident is None:
        return "free memory is not known"
    if free < resident:  # if all of it is written to while the copy is there
        return f"only {free >> 20} MB of memory are free"
    return ""


class ForkedCopy:
    """A process that has the state of this one at a moment, and computes from it, each time anew.

    ``compute`` takes what :meth:`ask` got, and returns plain values that can be pickled. Raises ``OSError`` if no
    process can be started within ``seconds``, or what was started could do more than compute.
    """

    def __init__(self, compute: Callable[[int], Any], seconds: float) -> None:
        self.problem = ""  # why there is no answer
        self.processor_seconds = 0.0  # that it took, once it is closed
        self._pid, self._limit = 0, 0.0
        self._ends = commands, own_commands, own_answers, answers = *os.pipe(), *os.pipe()
        self._commands, self._answers = own_commands, own_answers
        with contextlib.suppress(OSError):  # more than the system allows
            fcntl.fcntl(answers, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            serve = partial(_serve, compute, commands, answers, random.getstate())
            self._pid = sealed_process.copy_process(serve, commands, answers)
        finally:
            for end in (commands, answers) if self._pid else self._ends:
                os.close(end)
        if self._read(1, time.monotonic() + seconds) is None:
            problem = "its copy did not begin"
        else:
            problem = sealed_process.problem_of(self._pid, commands, answers)
        if problem:
            self.close()
            raise OSError(problem)

    def ask(self, command: int, seconds: float) -> None:
        """Have something computed from the given state, by a command from 0 to 255, within ``seconds``."""
        self._limit = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._commands, _COMMAND.pack(command, seconds))

    def answer(self) -> Any:
        """Wait for what was asked for; ``None`` if it takes too long, fails or ends. Then it is closed."""
        pid = self._read(_PID.size, self._limit)
        size = None if pid is None else self._read(8, self._limit, *_PID.unpack(pid))
        data = None if size is None else self._read(int.from_bytes(size, "little"), self._limit)
        if data is not None:
            answer, self.problem = pickle.loads(data)
            if not self.problem:
                return answer
        else:
            self.problem = "it takes too long" if time.monotonic() >= self._limit else "its copy ended"
        self.close()
        return None

    def close(self) -> None:
        """End the process; a second call does nothing."""
        pid, self._pid = self._pid, 0
        if pid == 0:
            return
        more, self.processor_seconds = sealed_process.end_copy(pid)
        if more:
            self.problem = "it does more than compute, which ended its copy"
        os.close(self._commands)
        os.close(self._answers)

    def _read(self, length: int, limit: float, writer: int = 0) -> bytes | None:
        """Read from the pipe until a time, or until a process that writes to it has ended."""
        if self._pid == 0:
            return None
        data = b""
        poll = select.poll()  # a descriptor may be too high for select
        poll.register(self._answers, select.POLLIN)
        with contextlib.ExitStack() as stack:
            if writer:
                end = os.pidfd_open(writer)
                stack.callback(os.close, end)
                poll.register(end, select.POLLIN)
            while len(data) < length:
                ready = dict(poll.poll(max(0.0, 1000 * (limit - time.monotonic()))))
                if self._answers not in ready or not (found := os.read(self._answers, length - len(data))):
                    return None
                data += found
        return data


# In the copy


def _serve(compute: Callable[[int], Any], commands: int, answers: int, random_state: Any) -> NoReturn:
    random.setstate(random_state)  # a handler of Python's own seeds anew
    os.write(answers, b"r")
    while message := os.read(commands, _COMMAND.size):
        command, seconds = _COMMAND.unpack(message)
        if sealed_process.copy_again(seconds):
            _answer(compute, command, answers)
    os._exit(0)


def _answer(compute: Callable[[int], Any], command: int, answers: int) -> NoReturn:
    os.write(answers, _PID.pack(os.getpid()))
    sys.stdout = sys.stderr = io.StringIO()  # a notebook's would send messages
    try:
        data = pickle.dumps((compute(command), ""))
    except Exception as error:
        data = pickle.dumps((None, f"{type(error).__name__}: {error}"[:500]))
    message = memoryview(len(data).to_bytes(8, "little") + data)
    while message:
        message = message[os.write(answers, message) :]
    os._exit(0)
