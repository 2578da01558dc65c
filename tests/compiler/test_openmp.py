"""Torch's threads are gone while ONNX Runtime computes, and come back."""

import gc
import multiprocessing
import os
import sys
import threading
import time

import pytest
import torch

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort import binding as runtime
from lightning_ort.compiler.executors.ort import session
from lightning_ort.compiler.machine import openmp
from lightning_ort.config import ORTConfig

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux does"),
    pytest.mark.skipif(openmp._pause_function() is None, reason="torch's OpenMP cannot"),
]


@pytest.fixture(autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
    openmp.pause_openmp()  # other tests fork


def threads() -> int:
    """Return how many there are besides Python's own, which earlier tests may have left to end at any time."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def are_left(count: int) -> bool:
    """Return whether so many are there soon: the kernel lists a thread a little longer than others wait for its end."""
    deadline = time.monotonic() + 10
    while threads() != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads() == count


def test_pause():
    openmp.pause_openmp()
    time.sleep(0.1)  # see are_left
    alone = threads()
    x = torch.randn(1000, 1000)
    expected = x + x
    assert threads() == alone + 2
    openmp.pause_openmp()
    assert are_left(alone)
    openmp.pause_openmp()
    assert torch.equal(x + x, expected)
    assert threads() == alone + 2


def test_only_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    x, small = torch.randn(512, 512), torch.randn(64, 64)
    with monkeypatch.context() as patch:  # undone before the fixture is
        patch.setattr(runtime.openmp, "pause_openmp", lambda: calls.append(1))
        for given, rests in ((x, 1), (small, 0)):
            calls.clear()
            backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, debug={"intra_op_threads": 3}))
            got = torch.compile(lambda x: (x @ x).relu() @ x, backend=backend)(given)
            torch.testing.assert_close(got, (given @ given).relu() @ given, rtol=1e-4, atol=1e-2)
            assert backend.report.ort_runs == 1
            assert len(calls) == rests
            torch._dynamo.reset()


def _collect() -> None:
    before = len(session._alive)
    gc.collect()
    sys.exit(0 if before == len(session._alive) > 0 else 1)


def test_a_forked_process_destroys_no_session_of_its_parent() -> None:
    x = torch.randn(64, 64)
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, debug={"intra_op_threads": 3}))
    torch.compile(lambda x: (x @ x).relu() @ x, backend=backend)(x)
    assert backend.report.ort_runs == 1
    openmp.pause_openmp()
    gc.disable()
    garbage: list[object] = list(session._alive)
    garbage.append(garbage)  # found by the garbage collector alone
    del garbage, backend
    torch._dynamo.reset()
    process = multiprocessing.get_context("fork").Process(target=_collect)
    process.start()
    gc.enable()
    process.join(60)
    assert process.exitcode == 0
