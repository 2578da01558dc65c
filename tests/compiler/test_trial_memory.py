"""Trials take no second copy of a large module's parameters, and give back the memory that they took."""

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort import session
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.compiler.executors.ort.executor import OrtExecutor
from lightning_ort.compiler.machine import malloc
from lightning_ort.compiler.machine.out_of_memory import is_out_of_memory
from lightning_ort.compiler.placement import placer, timing
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.regions.region import RegionRejected

MB = 1 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def squares(x: Tensor, w: Tensor) -> Tensor:
    """Four results of 64 MB each that live at once inside of one region, and a small one that leaves it."""
    made = [(x * scale) @ w for scale in (1.0, 2.0, 3.0, 4.0)]
    return (made[0] * made[1] * made[2] * made[3]).sum()


@pytest.mark.skipif(sys.platform != "linux" or malloc.glibc() is None, reason="reads /proc, needs glibc's malloc")
def test_trials_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4096, 8), torch.randn(8, 4096)
    torch.compile(lambda x: x.exp() + 1, backend="ort")(torch.ones(3))  # imports, the sessions' arena
    before, after_trial, released = resident(), [], OrtExecutor.release_memory

    def release(self: OrtExecutor) -> None:
        after_trial.append(resident())
        released(self)
        after_trial.append(resident())

    monkeypatch.setattr(OrtExecutor, "release_memory", release)
    backend = ORTBackend(ORTConfig(placement="measured", debug={"torch_ops": (), "intra_op_threads": 1}))
    with torch.no_grad():
        got = torch.compile(squares, backend=backend)(x, w)
    torch.testing.assert_close(got, squares(x, w), rtol=1e-5, atol=0)
    kept, *_, given_back = after_trial
    if (
        session._cpu_arena()
    ):  # the trial itself, without which nothing is tested; malloc keeps no large block by default
        assert kept - before > 150 * MB
    assert given_back - before < 64 * MB


@pytest.mark.parametrize("growth", [1.0, 1.2])
def test_a_region_is_timed_without_what_the_last_one_has_left(monkeypatch: pytest.MonkeyPatch, growth: float) -> None:
    sizes, seen = [100.0], list[str]()
    original = timing.measure

    def measure(*args: Any) -> Any:
        seen.append("timed")
        sizes[0] *= growth
        return original(*args)

    def release(self: OrtExecutor) -> None:
        seen.append("released")
        sizes[0] = 100.0

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(placer, "resident_bytes", lambda: sizes[0])
    monkeypatch.setattr(OrtExecutor, "release_memory", release)
    x = torch.randn(64, 64)
    backend = ORTBackend(
        ORTConfig(placement="measured", cache_dir=None, debug={"torch_ops": ("aten.cos",), "min_region_nodes": 1})
    )
    with torch.no_grad():
        got = torch.compile(lambda x: ((x @ x).cos() @ x).cos() @ x, backend=backend)(x)
        torch.testing.assert_close(got, ((x @ x).cos() @ x).cos() @ x, rtol=1e-4, atol=1e-4)
    regions = seen.count("timed")
    assert regions >= 3
    between = ["timed", "released"] if growth > 1 else ["timed"]
    assert seen == [*between * regions, "released"]


SESSION_MEMORY = """
import ctypes, sys
import torch
from lightning_ort import ORTConfig
from lightning_ort.compiler.machine import malloc
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort import session

def in_use():
    counts = malloc.glibc().mallinfo2()
    return counts.uordblks + counts.hblkhd

malloc._counts(malloc.glibc(), ctypes.CDLL(None))  # declares what mallinfo2 returns
if sys.argv[1] == "retained":
    malloc.retained.begin("a run")
x, w = torch.randn(4096, 8), torch.randn(8, 4096)
squares = lambda x, w: torch.stack([((x * scale) @ w).square().sum() for scale in (1.0, 2.0, 3.0, 4.0)])
backend = ORTBackend(ORTConfig(placement="always", cache_dir=None))
compiled = torch.compile(squares, backend=backend)
before = in_use()
with torch.no_grad():
    torch.testing.assert_close(compiled(x, w), squares(x, w), rtol=1e-4, atol=0)
kept = in_use() - before
session.release_cpu_memory()
print(backend.report.ort_runs, session._cpu_arena(), kept >> 20, in_use() - before >> 20)
"""


@pytest.mark.skipif(not hasattr(malloc.glibc(), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize("choice", ["retained", pytest.param("default", marks=pytest.mark.slow)])
def test_where_sessions_take_memory(choice: str) -> None:
    """Where malloc keeps what is freed, a session keeps nothing itself."""
    command = [sys.executable, "-c", SESSION_MEMORY, choice]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs, in_arena, kept, kept_after = done.stdout.split()
    assert int(runs) > 0
    assert in_arena == str(choice == "default")
    assert (int(kept) >= 64) == (choice == "default")
    assert int(kept_after) < 48


class Large(nn.Module):
    """Eight layers of 16 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))
        self.transposed = nn.Parameter(torch.randn(2048, 600).t())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x @ self.transposed.t()


def test_large_inputs_of_trials_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[Any]] = []
    original = timing.samples

    def samples(region: Any) -> list[Any]:
        made.append(original(region))
        for node, sample in zip(region.inputs, made[-1], strict=True):
            val = node.meta["val"]
            assert (sample.shape, sample.stride(), sample.dtype) == (val.shape, val.stride(), val.dtype)
            assert torch.isfinite(sample).all()
        return made[-1]

    monkeypatch.setattr(timing, "samples", samples)
    monkeypatch.setattr(timing, "_SHARED_ELEMENTS", 3 * 2048 * 2048)
    module, x = Large(), torch.randn(2, 2048)
    backend = ORTBackend(ORTConfig(placement="measured"))
    with torch.no_grad():
        got = torch.compile(module, backend=backend)(x)
        torch.testing.assert_close(got, module(x), rtol=1e-3, atol=1e-3)
    largest = max(made, key=len)
    tensors = [sample for sample in largest if sample.numel() > 1 << 18]
    assert len(tensors) == 9
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(storages.values()) <= 4 * 3 * 2048 * 2048
    assert len({tensor.data_ptr() for tensor in tensors}) > 1  # not all at one place, which a cache would hold


def test_nothing_is_released_where_nothing_was_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    released: list[str] = []
    monkeypatch.setattr(OrtExecutor, "release_memory", lambda self: released.append(self.name))
    x, w = torch.randn(64, 128), torch.randn(128, 64)
    for _ in range(2):  # the second time from the cache, as in a second run
        torch.compiler.reset()
        backend = ORTBackend(ORTConfig(placement="measured", cache_dir=str(tmp_path)))
        with torch.no_grad():
            got = torch.compile(squares, backend=backend)(x, w)
        torch.testing.assert_close(got, squares(x, w), rtol=1e-4, atol=1e-4)
        assert backend.report.graphs
        released.append("end of a run")
    assert released == ["ort", "end of a run", "end of a run"]


ERRORS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes."),
    RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def test_what_is_about_memory() -> None:
    for error in ERRORS:
        assert is_out_of_memory(error)
        rejection = RegionRejected(ReasonType.RUN_FAILED, "it failed")
        rejection.__cause__ = error
        assert is_out_of_memory(rejection)
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


@pytest.mark.parametrize("error", ERRORS[:2] + ERRORS[3:4], ids=["memory", "torch", "onnxruntime"])
@pytest.mark.parametrize("where", ["samples", "build", "run", "torch"])
def test_a_trial_that_runs_out_of_memory_is_over(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The region stays in torch, as before it was tried, and nobody is warned or refused."""
    held: list[Any] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        big = torch.empty(1000)
        held.append(weakref.ref(big))
        raise error

    if where == "samples":
        monkeypatch.setattr(timing, "samples", fail)
    elif where == "torch":
        measure = timing.measure
        monkeypatch.setattr(timing, "measure", lambda name, calls, run, *args: measure(name, calls, fail, *args))
    else:
        monkeypatch.setattr(*((session, "build") if where == "build" else (BoundSession, "__call__")), fail)
    x, w = torch.randn(300, 256), torch.randn(256, 300)
    backend = ORTBackend(ORTConfig(placement="measured", cache_dir=None, fallback="raise"))
    with torch.no_grad():
        got = torch.compile(lambda x, w: F.gelu(squares(x, w) + x @ w), backend=backend)(x, w)
        torch.testing.assert_close(got, F.gelu(squares(x, w) + x @ w), rtol=1e-4, atol=1e-4)
    assert not [one for one in held if one() is not None]
    reasons = [region.reason for graph in backend.report.graphs for region in graph.regions]
    assert {reason and reason.type for reason in reasons} == {ReasonType.NOT_TIMED}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_numbers_of_threads_are_not_compared_without_memory_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    held, error = list[Any](), MemoryError("injected")  # whoever keeps an error keeps what its frames hold

    def fail(*args: Any) -> Any:
        big = torch.empty(1000)
        held.append(weakref.ref(big))
        raise error

    monkeypatch.setattr(timing, "samples", fail)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    x, w = torch.randn(32, 64), torch.randn(64, 32)
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, fallback="raise"))
    with torch.no_grad():
        got = torch.compile(squares, backend=backend)(x, w)
        torch.testing.assert_close(got, squares(x, w), rtol=1e-4, atol=1e-4)
    assert held
    assert not [one for one in held if one() is not None]
    assert backend.report.ort_runs > 0


def test_a_region_without_memory_for_its_session_has_failed_where_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, refused = session.new_session, list[int]()

    def once(*args: Any) -> Any:
        if not refused:
            refused.append(1)
            raise MemoryError("injected")
        return make(*args)

    monkeypatch.setattr(session, "new_session", once)
    debug: Any = {"torch_ops": ("aten.cos",), "min_region_nodes": 1, "intra_op_threads": 1}
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, debug=debug))
    x = torch.randn(8, 8)
    with torch.no_grad():
        got = torch.compile(lambda x: (x @ x).cos() @ x, backend=backend)(x)
    torch.testing.assert_close(got, (x @ x).cos() @ x, rtol=1e-4, atol=1e-4)
    (fallback,) = backend.report.fallbacks
    assert fallback.where == "inference_0/ort_1"
    assert fallback.reason.type is ReasonType.SESSION_FAILED
    assert backend.report.ort_runs > 0
