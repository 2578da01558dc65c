"""A copy of this process that the kernel lets compute and answer, and nothing else: :func:`copy_process`.

A list of what code may not do is never complete: C code deletes files, and no hook of Python's sees it. So before any
Python runs in the copy, its descriptors lead nowhere, but for two pipes; memory that others see is made its own; and a
filter of system calls (``seccomp(2)``) ends it at whatever is not among a few: for memory, clocks, answers.

The process itself is not touched. The system call that makes the copy runs no handlers for forks, and a copy ends
without a signal, so that no handler runs then either, and no ``wait`` sees it (``clone(2)``). It ends with the thread
that made it, or at its limit of time. What it has become is looked up before anything is asked of it.

All until the filter is there are calls of C, made by :func:`any`: the first instruction of Python might wait for a
thread that waited for the interpreter when the copy was made, and which is not in it.
"""

import contextlib
import ctypes
import gc
import operator
import os
import platform
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from lightning_ort.compat.cpython import adopt_interpreter, handlers_of_forked_children, holding_imports

MAX_SHARED_BYTES = 1 << 28  # of memory that others see, which is copied

# <asm/unistd_64.h>
_READ, _WRITE, _MMAP, _CLONE, _PRCTL, _TIMER_CREATE, _TIMER_SETTIME, _SECCOMP = 0, 1, 9, 56, 157, 222, 223, 317
_ALLOWED = (
    *(10, 11, 12, 25, 28),  # mprotect munmap brk mremap madvise
    *(24, 35, 96, 201, 202, 219, 228, 229, 230),  # sched_yield nanosleep gettimeofday time futex restart clock_*
    *(14, 60, 231, 318),  # sigprocmask exit exit_group getrandom
    *(39, 63, 79, 98, 99, 186, 204, 309),  # getpid uname getcwd getrusage sysinfo gettid sched_getaffinity getcpu
    *(_WRITE, 20),  # write writev: it has no descriptors that lead anywhere
)
_ALLOWED_IF = {  # an argument, by number, has a value
    _MMAP: (4, 0xFFFFFFFF),  # memory that is no file's
    **{7: (1, 0), 23: (0, 0), 270: (0, 0)},  # poll select pselect6 of no descriptors: they sleep
}
_CLONE_PARENT, _CLONE_PARENT_SETTID = 0x8000, 0x100000  # <sched.h>
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER, _GET_ACTION_AVAIL = 1, 38, 22, 2, 2
_ALLOW, _END = 0x7FFF0000, 0x00030000  # SECCOMP_RET_TRAP, a signal, which is blocked: the end, and nothing is logged
_X86_64 = 0xC000003E
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # <linux/filter.h>
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # places in struct seccomp_data
_PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x02, 0x10, 0x20, 0x4000  # <sys/mman.h>
_MAY_MOVE_TO = 3
_ANY_CHILD = 0x40000000  # __WALL: also those that end without a signal
_RLIMIT_CORE, _NO_DUMP = 4, (ctypes.c_ulong * 2)(1, 1)  # 1: also none that is piped to a program

try:
    _LIBC: Any = ctypes.PyDLL(None, use_errno=True)  # with the interpreter's lock, which a copy must not wait for
except (OSError, TypeError):  # Windows
    _LIBC = None


class _Mapping(NamedTuple):
    """Addresses of memory that other processes see changes of, or make them."""

    start: int
    end: int
    mode: str
    name: str

    @property
    def is_memory(self) -> bool:
        """Whether it can be read, and is no device's."""
        of_device = not self.name.startswith("/") or self.name.startswith("/dev/")
        return self.mode[:2] != "--" and (not of_device or self.name.startswith(("/dev/zero", "/dev/shm/")))


@cache
def unsupported() -> str:
    """Return why no process can have such a copy on this system, or nothing."""
    if sys.platform != "linux" or _LIBC is None:
        return "it takes Linux"
    if platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return f"there is no filter of system calls for {platform.machine()} yet"
    if _system_call(_SECCOMP, _GET_ACTION_AVAIL, 0, ctypes.byref(ctypes.c_uint32(_END)))() != 0:
        return "this system does not let a process filter its system calls"
    return ""


def unavailable() -> str:
    """Return why this process cannot have such a copy now, or nothing."""
    if reason := unsupported():
        return reason
    size = sum(one.end - one.start for one in _shared("self") if one.is_memory)
    return f"{size >> 20} MB of memory are shared with other processes" if size > MAX_SHARED_BYTES else ""


def copy_process(serve: Callable[[], NoReturn], commands: int, answers: int) -> int:
    """Start a copy of this process that runs a function; return its process ID.

    ``serve`` ends the process, and may make copies of the copy by :func:`copy_again`; it reads from the end of one pipe
    and writes to that of another. Raises ``OSError`` if no process can be started.
    """
    own, pid = os.getpid(), ctypes.c_int(0)
    with contextlib.ExitStack() as undo:
        null = os.open(os.devnull, os.O_RDWR)
        undo.callback(os.close, null)
        steps: list[Callable[[], Any]] = [
            _system_call(_CLONE, _CLONE_PARENT_SETTID, 0, ctypes.byref(pid), 0, 0),
            partial(_LIBC.setpgid, 0, 0),  # apart from the terminal, and to be found by
            partial(_LIBC.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            partial(_LIBC.setrlimit, _RLIMIT_CORE, ctypes.byref(_NO_DUMP)),
        ]
        others = set(_descriptors("self")) - {commands, answers, null}
        steps += [partial(_unchecked("dup2"), null, one) for one in others]
        for mapping in _shared("self"):
            steps += _made_private(mapping, undo)
        steps += [*_seal(_first_filter(commands)), handlers_of_forked_children().clear, adopt_interpreter()]
        if gc.isenabled():
            undo.callback(gc.enable)
        undo.callback(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS))
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.enter_context(holding_imports())
        gc.disable()
        torch.set_num_threads(1)  # the workers of its pool are not in the copy
        failed = any(map(operator.methodcaller("__call__"), steps))  # up to the first that returns neither 0 nor None
        if os.getpid() != own:
            _run(serve, failed)
    if pid.value == 0:
        raise OSError(ctypes.get_errno(), f"a process could not be copied: {os.strerror(ctypes.get_errno())}")
    return pid.value


def problem_of(pid: int, commands: int, answers: int) -> str:
    """Say what else than computing and answering a copy could do, if anything: it is not to be used then."""
    try:
        null = os.stat(os.devnull).st_rdev
        open_files = {one: os.stat(f"/proc/{pid}/fd/{one}") for one in _descriptors(str(pid))}
        if others := [
            one for one, file in open_files.items() if one not in (commands, answers) and file.st_rdev != null
        ]:
            return f"its copy had open files: {len(others)}"
        if shared := _shared(str(pid)):
            return f"its copy shared memory: {shared[0].name}"
        filtered = "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError as error:  # also if it has ended
        return f"nothing is known of its copy: {error}"
    return "" if filtered else "its copy had no filter of system calls"


def end_copy(pid: int) -> tuple[bool, float]:
    """End a copy and its copies; return whether one had tried to do more than compute, and their processor seconds."""
    tried, seconds = False, 0.0
    for target in (-pid, pid):  # its group; there is none before it has begun
        with contextlib.suppress(OSError):
            os.kill(target, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                _, status, usage = os.wait4(target, _ANY_CHILD)
                tried = tried or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS)
                seconds += usage.ru_utime + usage.ru_stime
    return tried, seconds


# In the copy


def copy_again(seconds: float) -> bool:
    """Make a copy of the copy, which ends at a limit of time; return whether this process is it."""
    if _system_call(_CLONE, _CLONE_PARENT, 0, 0, 0, 0)() != 0:
        return False
    timer = ctypes.c_int()
    kills = ctypes.create_string_buffer(struct.pack("qii48x", 0, signal.SIGKILL, 0))
    limit = ctypes.create_string_buffer(struct.pack("qqqq", 0, 0, int(seconds), 1 + int(seconds % 1 * 1e9)))
    steps: list[Callable[[], Any]] = [
        partial(_LIBC.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        _system_call(_TIMER_CREATE, 1, kills, ctypes.byref(timer)),
        lambda: _system_call(_TIMER_SETTIME, timer.value, 0, limit, 0)(),
        *_seal(_second_filter()),
    ]
    if any(step() for step in steps):
        os._exit(1)
    return True


def _run(serve: Callable[[], NoReturn], failed: bool) -> NoReturn:
    try:
        if not failed:
            serve()
    finally:
        os._exit(1)


# What it is made from

_SIGNALS = signal.valid_signals()


def _system_call(*arguments: Any) -> Callable[[], int]:
    function = _LIBC["syscall"]
    function.restype = ctypes.c_long
    return partial(function, *(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))


def _unchecked(name: str) -> Any:
    """Return a function of C that returns nothing."""
    function = _LIBC[name]
    function.restype = None
    return function


def _descriptors(process: str) -> Iterator[int]:
    return map(int, os.listdir(f"/proc/{process}/fd"))


def _shared(process: str) -> list[_Mapping]:
    """Memory that others see, but not of files that were opened for reading alone: nobody can write to that."""
    found = []
    for line in Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, mode, _, _, _, *name = line.split(maxsplit=5)
        if mode[3] == "s":
            try:
                writable = os.lstat(f"/proc/{process}/map_files/{addresses}").st_mode & 0o200
            except OSError:
                writable = 1
            if writable:
                start, end = (int(address, 16) for address in addresses.split("-"))
                found.append(_Mapping(start, end, mode, "".join(name)))
    return found


def _made_private(mapping: _Mapping, undo: contextlib.ExitStack) -> list[Callable[[], Any]]:
    """Return what replaces a mapping at its addresses: by a copy, or by nothing that can be reached."""
    start, size = ctypes.c_void_p(mapping.start), ctypes.c_size_t(mapping.end - mapping.start)
    flags = _PRIVATE | _ANONYMOUS | _NORESERVE
    if not mapping.is_memory:
        return [partial(_unchecked("mmap"), start, size, 0, flags | _FIXED, -1, ctypes.c_long(0))]
    allocate = _LIBC["mmap"]
    allocate.restype = ctypes.c_void_p
    spare = ctypes.c_void_p(allocate(None, size, 3, flags, -1, ctypes.c_long(0)))
    undo.callback(_LIBC.munmap, spare, size)
    protection = sum(bit for bit, letter in zip((1, 2, 4), "rwx", strict=True) if letter in mapping.mode)
    return [
        partial(_unchecked("memcpy"), spare, start, size),
        partial(_unchecked("mremap"), spare, size, size, _MAY_MOVE_TO, start),
        partial(_LIBC.mprotect, start, size, protection),
    ]


_Filter = list[tuple[int, int, int, int]]  # of <linux/filter.h>: code, jump if true, jump if false, value


def _first_filter(commands: int) -> _Filter:
    code = [(_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _END), (_LOAD, 0, 0, _NUMBER)]
    for number in (*_ALLOWED, _PRCTL, _TIMER_CREATE, _TIMER_SETTIME):
        code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, (index, value) in {**_ALLOWED_IF, _READ: (0, commands), _CLONE: (0, _CLONE_PARENT)}.items():
        code += [(_IF_EQUAL, 0, 4, number), (_LOAD, 0, 0, _ARGUMENTS + 8 * index), (_IF_EQUAL, 0, 1, value)]
        code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _END)]
    return [*code, (_RETURN, 0, 0, _END)]


def _second_filter() -> _Filter:
    """What a copy's copy may not do beyond that: code of others runs in it."""
    code = [(_LOAD, 0, 0, _NUMBER)]
    for number in (_READ, _CLONE, _PRCTL, _TIMER_CREATE, _TIMER_SETTIME):
        code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _END)]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _seal(code: _Filter) -> list[Callable[[], Any]]:
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(instructions)))
    program.instructions = instructions  # type: ignore[attr-defined]  # alive as long as it
    return [
        partial(_LIBC.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        partial(_LIBC.prctl, _PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0),
    ]
