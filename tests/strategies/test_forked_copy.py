"""A copy of the process computes from this one's state, and nobody sees anything else of it."""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ort.strategies.audit import forked_copy
from lightning_ort.strategies.audit.forked_copy import ForkedCopy
from tests.running import is_running

pytestmark = pytest.mark.skipif(bool(forked_copy.unavailable()), reason="needs fork and free memory")


def ask(compute: Any, seconds: float = 20.0) -> tuple[Any, str]:
    copy = ForkedCopy(lambda _: compute())
    copy.ask(0)
    answer = copy.answer(seconds)
    copy.close()
    return answer, copy.problem


def test_the_copy_has_the_state_of_the_moment_and_draws_the_same_numbers() -> None:
    state = {"count": 3}
    torch.manual_seed(1), random.seed(2), np.random.seed(3)

    def compute(command: int) -> Any:
        state["count"] += 1
        return command, state["count"], torch.rand(3).tolist(), random.random(), np.random.rand()

    copy = ForkedCopy(compute)
    state["count"] = 100
    expected = torch.rand(3).tolist(), random.random(), np.random.rand()
    for command in (0, 7):  # each answer starts from that state again
        copy.ask(command)
        assert copy.answer(20) == (command, 4, *expected)
    copy.close()
    assert state["count"] == 100


def test_several_threads_of_torch_do_not_hang_it() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(300, 300)
        expected = (x @ x).sum().item()  # the pool has started
        assert ask(lambda: (x @ x).sum().item())[0] == pytest.approx(expected, rel=1e-3)
    finally:
        torch.set_num_threads(threads)


def test_what_it_prints_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(lambda: (print("hello"), os.write(2, b"hello"))[1])[0] == 5
    assert capfd.readouterr() == ("", "")


def test_files_sockets_programs_and_signals_are_out_of_reach(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("before")
    opened = kept.open("a")
    reader, writer = socket.socketpair()
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    attempts = [
        lambda: new.write_text("after"),
        lambda: kept.open("w"),
        lambda: torch.save(torch.ones(3), kept),
        lambda: (opened.write("after"), opened.flush()),
        lambda: kept.unlink(),
        lambda: kept.rename(new),
        lambda: new.mkdir(),
        lambda: writer.send(b"after"),
        lambda: socket.create_connection(("127.0.0.1", 9)),
        lambda: subprocess.run(["touch", str(new)], check=True),
        lambda: os.system(f"touch {new}"),
        lambda: os.kill(os.getppid(), signal.SIGUSR1),
        lambda: os.killpg(os.getpgid(os.getppid()), signal.SIGUSR1),
        lambda: np.save(str(kept), np.ones(3)),
    ]
    try:
        for attempt in attempts:
            ask(attempt)  # some fail, others lead nowhere
        reader.settimeout(0.1)
        with pytest.raises(TimeoutError):
            reader.recv(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
        opened.close(), reader.close(), writer.close()
    assert kept.read_text() == "before"
    assert list(tmp_path.iterdir()) == [kept]
    assert received == []


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
        assert "0 s" in problem
        assert time.monotonic() - start < 10
    finally:
        done.set()
        holder.join()


def test_an_error_is_no_answer_and_is_told() -> None:
    answer, problem = ask(lambda: 1 / 0)
    assert answer is None
    assert "ZeroDivisionError" in problem


@pytest.mark.parametrize("how", [lambda: os.abort(), lambda: os._exit(3), lambda: signal.raise_signal(signal.SIGKILL)])
def test_a_process_that_ends_is_no_answer(how: Any) -> None:
    assert ask(how)[0] is None


def test_nothing_is_left_of_it() -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    pids: list[int] = []
    for seconds in (20.0, 0.05):
        copy = ForkedCopy(lambda _: (time.sleep(0.5), os.getpid(), os.getppid())[1:])
        copy.ask(0)
        pids += copy.answer(seconds) or ()
        copy.close()
        copy.close()
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_it_ends_with_its_parent() -> None:
    code = (
        "import os, time\n"
        "from lightning_ort.strategies.audit.forked_copy import ForkedCopy\n"
        "copy = ForkedCopy(lambda _: time.sleep(60))\n"
        "copy.ask(0)\n"
        "print(copy._pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([os.sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:  # type: ignore[attr-defined]
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    limit = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not is_running(pid)


def test_little_free_memory_is_a_reason_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def scarce(path: Path, *args: Any, **kwargs: Any) -> str:
        return "MemAvailable: 1024 kB\n" if str(path) == "/proc/meminfo" else read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", scarce)
    assert "memory" in forked_copy.unavailable()
