"""A copy of the process computes from this one's state, and nobody sees anything else of it."""

import contextlib
import ctypes
import fcntl
import gc
import logging
import mmap
import multiprocessing
import os
import random
import resource
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ort import ORTStrategy
from lightning_ort.strategies.audit import forked_copy, schedule, sealed_process, step_audit
from lightning_ort.strategies.audit.forked_copy import ForkedCopy
from tests.running import NEEDS_COPIES, is_running
from tests.strategies.small_modules import Small, batches

pytestmark = NEEDS_COPIES


SECONDS = 20.0


def ask(compute: Any, seconds: float = SECONDS) -> tuple[Any, str]:
    copy = ForkedCopy(lambda _: compute(), SECONDS)
    copy.ask(0, seconds)
    answer = copy.answer()
    copy.close()
    return answer, copy.problem


def test_the_copy_has_the_state_of_the_moment_and_draws_the_same_numbers() -> None:
    torch.rand(1), np.random.rand()  # what a library loads when it is used first is loaded
    state = {"count": 3}
    torch.manual_seed(1), random.seed(2), np.random.seed(3)

    def compute(command: int) -> Any:
        state["count"] += 1
        return command, state["count"], torch.rand(3).tolist(), random.random(), np.random.rand()

    copy = ForkedCopy(compute, SECONDS)
    state["count"] = 100
    expected = torch.rand(3).tolist(), random.random(), np.random.rand()
    for command in (0, 7):  # each answer starts from that state again
        copy.ask(command, SECONDS)
        assert copy.answer() == (command, 4, *expected)
    copy.close()
    assert state["count"] == 100


def test_several_threads_of_torch_do_not_hang_it() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(300, 300)
        expected = (x @ x).sum().item()  # the pool has started
        assert ask(lambda: (x @ x).sum().item())[0] == pytest.approx(expected, rel=1e-3)
        assert torch.get_num_threads() == 2  # here, as before
    finally:
        torch.set_num_threads(threads)


def test_what_it_prints_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(lambda: (print("hello"), logging.getLogger("test").error("hello"), os.write(2, b"hello"))[2])[0] == 5
    assert capfd.readouterr() == ("", "")


NOTHING = ctypes.CDLL(None)
OPEN_IN_C = NOTHING.fopen
OPEN_IN_C.restype = ctypes.c_void_p


class Outside:
    """What a copy could do harm to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "files"
        self.kept, self.new = self.folder / "kept", self.folder / "new"
        self.folder.mkdir()
        self.kept.write_text("before")
        self.opened = self.kept.open("a")
        self.descriptor = os.open(self.kept, os.O_RDWR)
        self.reader, self.writer = socket.socketpair()
        self.database = sqlite3.connect(folder / "rows.db")
        self.database.execute("create table rows(number)")
        self.database.commit()
        self.database.execute("insert into rows values(1)")  # a transaction is open
        self.segment = shared_memory.SharedMemory(create=True, size=64)
        self.semaphore = multiprocessing.get_context("spawn").Semaphore(1)
        self.readable = mmap.mmap(self.descriptor, 6, mmap.MAP_SHARED, mmap.PROT_READ)
        self.writable = mmap.mmap(self.descriptor, 6, mmap.MAP_SHARED, mmap.PROT_WRITE)
        self.signals: list[int] = []
        self.before = {
            number: signal.signal(number, lambda number, _: self.signals.append(number))
            for number in (signal.SIGUSR1, signal.SIGCHLD)
        }
        self.niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def attempts(self) -> dict[str, Any]:
        path, new, parent = str(self.kept), str(self.new), os.getpid()
        raw = path.encode()
        return {
            "write a file": lambda: self.new.write_text("after"),
            "truncate by opening": lambda: self.kept.open("w"),
            "save a tensor": lambda: torch.save(torch.ones(3), path),
            "save an array": lambda: np.save(path, np.ones(3)),
            "write to an open file": lambda: (self.opened.write("after"), self.opened.flush()),
            "move in an open file": lambda: os.lseek(self.descriptor, 3, os.SEEK_SET),
            "truncate": lambda: os.truncate(path, 1),
            "truncate an open file": lambda: NOTHING.ftruncate(self.descriptor, 1),
            "unlink": lambda: os.unlink(path),
            "unlink in C": lambda: NOTHING.unlink(raw),
            "write a file in C": lambda: NOTHING.fputs(b"after", ctypes.c_void_p(OPEN_IN_C(new.encode(), b"w"))),
            "append in C": lambda: NOTHING.fputs(b"after", ctypes.c_void_p(OPEN_IN_C(raw, b"a"))),
            "truncate in C": lambda: NOTHING.truncate(raw, 1),
            "rename": lambda: os.rename(path, new),
            "make a folder": lambda: os.mkdir(new),
            "make a pipe": lambda: os.mkfifo(new),
            "make a pipe in C": lambda: NOTHING.mkfifo(new.encode(), 0o600),
            "change the mode": lambda: os.chmod(path, 0o777),
            "link": lambda: os.symlink(path, new),
            "lock": lambda: fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB),
            "commit a transaction": self.database.commit,
            "roll a transaction back": self.database.rollback,
            "unlink shared memory": self.segment.unlink,
            "take a semaphore": lambda: self.semaphore.acquire(block=False) and self.semaphore.unknown,  # type: ignore[attr-defined]
            "unlink a semaphore": lambda: NOTHING.sem_unlink(self.semaphore._semlock.name.encode()),  # type: ignore[attr-defined]
            "send": lambda: self.writer.send(b"after"),
            "receive": lambda: self.reader.recv(1),
            "connect": lambda: socket.create_connection(("127.0.0.1", 9)),
            "start a program": lambda: subprocess.run(["touch", new], check=True),
            "start a program in C": lambda: os.system(f"touch {new}"),
            "fork": os.fork,
            "start a thread": lambda: threading.Thread(target=print).start(),
            "signal the parent": lambda: os.kill(parent, signal.SIGUSR1),
            "kill the parent": lambda: os.kill(parent, signal.SIGKILL),
            "signal its group": lambda: os.killpg(os.getpgid(parent), signal.SIGUSR1),
            "signal itself": lambda: os.kill(os.getpid(), signal.SIGUSR1),
            "signal in C": lambda: NOTHING.kill(parent, int(signal.SIGUSR1)),
            "change the priority": lambda: os.setpriority(os.PRIO_PROCESS, parent, 19),
            "change limits of the parent": lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE, (64, 64)),
            "wait": os.wait,
            "wait in C": lambda: NOTHING.wait(None),
            "write to shared memory": lambda: self.segment.buf.__setitem__(0, 7),
            "write to a mapping": lambda: self.writable.__setitem__(0, 7),
            "make a mapping writable": self.write_to_readable,
        }

    def write_to_readable(self) -> None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.writable))
        views = [line.split("-") for line in LINES if str(self.kept) in line]
        for view in views:
            start = int(view[0], 16)
            assert NOTHING.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(1), 3) == 0
            ctypes.memset(start, 7, 1)

    def is_untouched(self) -> bool:
        """Whether all is as it was, but for what the parent itself did; it ends the transaction."""
        try:
            self.reader.settimeout(0.1)
            with pytest.raises(TimeoutError):
                self.reader.recv(1)
            self.database.commit()
            return (
                self.kept.read_text() == "before"
                and self.kept.stat().st_mode & 0o777 != 0o777
                and list(self.folder.iterdir()) == [self.kept]
                and self.database.execute("select * from rows").fetchall() == [(1,)]
                and bytes(self.segment.buf) == bytes(64)
                and self.semaphore.acquire(block=False)
                and os.lseek(self.descriptor, 0, os.SEEK_CUR) == 0
                and (self.signals, self.niceness, self.limits)
                == ([], os.getpriority(os.PRIO_PROCESS, 0), resource.getrlimit(resource.RLIMIT_NOFILE))
            )
        finally:
            for number, handler in self.before.items():
                signal.signal(number, handler)
            self.segment.unlink()
            self.segment.close(), self.opened.close(), self.reader.close(), self.writer.close(), self.database.close()
            os.close(self.descriptor)


def children() -> set[int]:
    """Children of this thread."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


LINES: list[str] = []  # of /proc/self/maps


def left() -> tuple[int, int, set[int]]:
    """Descriptors, mappings and children of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum(" rw-s " in line or " r--s " in line for line in maps), children()


FEW = (
    *("write to an open file", "unlink in C", "make a pipe in C", "commit a transaction", "unlink shared memory"),
    *("receive", "start a program", "kill the parent", "change the priority", "make a mapping writable"),
)


def test_a_copy_reaches_nothing_outside(tmp_path: Path) -> None:
    handled: list[str] = []
    os.register_at_fork(
        before=lambda: handled.append("before"),
        after_in_parent=lambda: handled.append("parent"),
        after_in_child=lambda: handled.append("child"),
    )
    outside = Outside(tmp_path)
    before = left()
    LINES[:] = Path("/proc/self/maps").read_text().splitlines()
    attempts = outside.attempts()
    for name in FEW:
        attempt = attempts[name]
        answer, problem = ask(lambda attempt=attempt: (attempt(), len(handled))[1])
        assert answer in (None, 0), name
        assert answer == 0 or problem, name
        with contextlib.suppress(ChildProcessError):  # a tracker of shared memory may be a child
            assert os.waitpid(-1, os.WNOHANG) == (0, 0)
    after = left()
    assert outside.is_untouched()
    assert handled == []
    assert after == before


@pytest.mark.slow
def test_two_hundred_audits_of_a_step_that_reaches_for_what_is_outside(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: Callable[..., None]
) -> None:
    audits = 200
    monkeypatch.setattr(schedule.Schedule, "is_due", lambda *_: True)
    limits(audits=1000.0)
    monkeypatch.setattr(step_audit, "MAX_UNKNOWN", 1000)
    outside, parent, known = Outside(tmp_path), os.getpid(), list[ForkedCopy]()
    attempts = [*outside.attempts().items()]
    LINES[:] = Path("/proc/self/maps").read_text().splitlines()
    handled, before = list[str](), list[Any]()
    os.register_at_fork(
        before=lambda: handled.append("before"),
        after_in_parent=lambda: handled.append("parent"),
        after_in_child=lambda: handled.append("child"),
    )

    @torch.compiler.disable
    def reach(number: int) -> None:
        if os.getpid() != parent:
            attempts[number % len(attempts)][1]()
            raise ArithmeticError

    class Reaching(Small):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            reach(batch_idx)
            return self.loss(batch)

        def train_dataloader(self) -> Any:
            return batches(*[(4, 8)] * (audits + 10))

        def loss(self, batch: Any) -> torch.Tensor:
            return self.net(batch).square().mean()

    class Noted(ForkedCopy):
        def __init__(self, *args: Any) -> None:
            known.append(self)
            if len(known) == 10:  # all that a fit takes is there
                before.append(left())
            super().__init__(*args)

        def close(self) -> None:
            super().close()
            if len(known) == audits:
                before.append(left())

    monkeypatch.setattr(step_audit, "ForkedCopy", Noted)
    strategy = ORTStrategy(config={"placement": "always"})
    make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0).fit(module := Reaching())
    assert len(known) >= audits
    assert all(copy.problem for copy in known)
    assert len({copy.problem for copy in known}) < 6  # it had ended, or raised what each attempt ends with
    assert strategy.report.run.audits == 0
    assert strategy.report.ort_runs >= audits
    assert len(module.losses) == audits + 10
    assert outside.is_untouched()
    assert handled == []
    assert before[0] == before[-1]


@pytest.mark.parametrize(
    "call",
    [(157, 1, 0, 0, 0, 0), (56, 0x8000, 0, 0, 0, 0), (222, 1, None, ctypes.byref(ctypes.c_int()))],
    ids=["prctl", "clone", "timer_create"],
)
def test_what_makes_a_copy_is_not_for_the_code_in_it(call: tuple[Any, ...]) -> None:
    """It would outlive its parent or its limit of time."""
    answer, problem = ask(lambda: NOTHING.syscall(*call) and 0)
    assert answer is None
    assert problem


def test_memory_that_is_shared_with_other_processes_stays_as_it_is(tmp_path: Path) -> None:
    tensor = torch.zeros(4).share_memory_()
    number = multiprocessing.Value("i", 5)
    array = np.memmap(tmp_path / "array", np.float32, "w+", shape=(8,))

    def compute() -> Any:
        tensor.add_(1)
        array[0] = 7
        with number.get_lock():
            number.value += 1
        return tensor.sum().item(), number.value, float(array[0])

    assert ask(compute)[0] == (4.0, 6, 7.0)
    assert (tensor.sum().item(), number.value, float(array[0])) == (0.0, 5, 0.0)


def test_a_lock_that_another_thread_holds_does_not_hang_the_parent() -> None:
    lock, done = threading.Lock(), threading.Event()
    holder = threading.Thread(target=lambda: (lock.acquire(), done.wait()))
    holder.start()
    start = time.monotonic()
    try:
        answer, problem = ask(lambda: lock.acquire(), seconds=0.3)
        assert answer is None
        assert "too long" in problem
        assert time.monotonic() - start < 10
    finally:
        done.set()
        holder.join()


def test_threads_that_wait_for_the_interpreter_do_not_hang_it() -> None:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert [ask(lambda: sum(range(100_000)))[0] for _ in range(4)] == [sum(range(100_000))] * 4
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_it_ends_itself_while_the_parent_is_busy() -> None:
    before = children()
    copy = ForkedCopy(lambda _: time.sleep(60), SECONDS)
    copy.ask(0, 0.2)
    assert (pid := copy._read(4, time.monotonic() + 10))
    assert is_running(int.from_bytes(pid, "little"))
    pids = children() - before
    assert len(pids) == 2
    limit = time.monotonic() + 10
    while sum(map(is_running, pids)) > 1 and time.monotonic() < limit:
        time.sleep(0.05)
    assert sum(map(is_running, pids)) == 1  # that which waits for the next question
    assert copy.answer() is None
    assert children() == before


def test_it_is_used_only_if_it_is_sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = left()
    for name, steps in {"_seal": [], "_made_private": []}.items():
        with monkeypatch.context() as patch, (tmp_path / "file").open("w+b") as file:
            file.truncate(10)
            view = mmap.mmap(file.fileno(), 10)
            patch.setattr(sealed_process, name, lambda *_, steps=steps: steps)
            with pytest.raises(OSError, match="copy (had|shared)"):
                ask(lambda: 1)
            view.close()
    assert left() == before


def test_an_error_is_no_answer_and_is_told() -> None:
    answer, problem = ask(lambda: 1 / 0)
    assert answer is None
    assert "ZeroDivisionError" in problem


@pytest.mark.parametrize("how", [lambda: os.abort(), lambda: os._exit(3), lambda: ctypes.string_at(8)])
def test_a_process_that_ends_is_no_answer(how: Any) -> None:
    assert ask(how)[0] is None


def test_nothing_is_left_of_it() -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    pids, before = set[int](), children()
    for seconds in (20.0, 0.05):
        copy = ForkedCopy(lambda _: (time.sleep(0.5), os.getpid())[1], SECONDS)
        copy.ask(0, seconds)
        copy._read(4, time.monotonic() + 10)  # it has begun
        pids |= children() - before
        copy.close()
        copy.close()
        copy.close()
    assert len(pids) == 4
    assert not any(map(is_running, pids))
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_it_ends_with_its_parent() -> None:
    code = (
        "import os, time\n"
        "from lightning_ort.strategies.audit.forked_copy import ForkedCopy\n"
        "copy = ForkedCopy(lambda _: time.sleep(60), 20.0)\n"
        "copy.ask(0, 60.0)\n"
        "time.sleep(0.5)\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "worker = os.fork()\n"  # such as a loader's, which keeps the pipes open
        "print(worker, flush=True) if worker else None\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([os.sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:  # type: ignore[attr-defined]
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        assert list(map(is_running, pids)) == [True] * 2
        worker = int(parent.stdout.readline())
        parent.kill()
    limit = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    assert not any(map(is_running, pids))


def test_little_free_memory_is_a_reason_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def scarce(path: Path, *args: Any, **kwargs: Any) -> str:
        return "MemAvailable: 1024 kB\n" if str(path) == "/proc/meminfo" else read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", scarce)
    assert "memory" in forked_copy.unavailable()
