"""The processes of candidates: they train, and end with the one that started them."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from running import is_running
from torch.utils.data import DataLoader

from lightning_ort._imports import LIGHTNING
from lightning_ort.tuning import trainer_process
from lightning_ort.tuning.candidate import Candidate, TuneError
from lightning_ort.tuning.probe import probed
from lightning_ort.tuning.project import Project, start
from lightning_ort.tuning.trainer_process import TimeIsUp, VariantFailed, make_sampler, start_method, waiting_batches

LIMIT = 120.0  # seconds, for what takes a few on a quiet machine


class Shared(LightningModule):
    """Writes down its processes."""

    def __init__(self, folder: str, seconds: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.folder, self.seconds = folder, seconds

    def on_train_start(self) -> None:
        (Path(self.folder) / f"{self.global_rank}.pid").write_text(str(os.getpid()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(64, 4), batch_size=4)


@pytest.mark.parametrize("method", [start_method(), pytest.param("spawn", marks=pytest.mark.slow)])
def test_each_process_has_weights_and_data_of_its_own(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "start_method", lambda: method)
    module, batches = Shared(str(tmp_path)), DataLoader(torch.ones(64, 4), batch_size=4)
    before = [parameter.clone() for parameter in module.parameters()]
    project = Project(module=module, data=batches, accelerator="cpu")
    processes = [start(project, Candidate(engine=engine), tmp_path / engine) for engine in ("stock", "ort")]
    losses = [process.sample(8, LIMIT).losses for process in processes]
    for process in processes:
        process.stop()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert all(map(torch.equal, module.parameters(), before))
    assert not any(tensor.is_shared() for tensor in (*module.parameters(), batches.dataset))


def test_what_cannot_be_pickled_where_processes_are_spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Shared):
        pass

    monkeypatch.setattr(trainer_process, "start_method", lambda: "spawn")
    project = Project(module=Local(str(tmp_path)), accelerator="cpu")
    with pytest.raises(TuneError, match="have to be pickled, which fails: .*Local.* at the top level of a file"):
        start(project, Candidate(engine="stock"), tmp_path / "trial")


@pytest.mark.slow
def test_what_a_spawned_process_does_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a class of a notebook."""
    gone = SimpleNamespace(Gone=type("Gone", (Shared,), {"__module__": "gone", "__qualname__": "Gone"}))
    monkeypatch.setitem(sys.modules, "gone", gone)
    monkeypatch.setattr(trainer_process, "start_method", lambda: "spawn")
    project = Project(module=gone.Gone(str(tmp_path)), accelerator="cpu")
    process = start(project, Candidate(engine="stock"), tmp_path / "trial")
    with pytest.raises(VariantFailed, match="could not import your program.* and what is trained in a notebook"):
        process.sample(2, LIMIT)


def test_time_is_up(tmp_path: Path) -> None:
    project = Project(module=Shared, args={"folder": str(tmp_path), "seconds": LIMIT}, accelerator="cpu")
    process = start(project, Candidate(engine="stock"), tmp_path / "trial")
    with pytest.raises(TimeIsUp, match="2 steps were not done within 0.1 seconds"):
        process.sample(2, 0.1)
    process.stop()


class Stubborn(Shared):
    """Does not end when it is asked to."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().training_step(batch, batch_idx)


def test_a_process_that_does_not_end_is_killed(tmp_path: Path) -> None:
    project = Project(module=Stubborn, args={"folder": str(tmp_path)}, accelerator="cpu")
    process = start(project, Candidate(engine="stock"), tmp_path / "trial")
    process.sample(2, LIMIT)
    with pytest.raises(TimeIsUp):
        process.sample(1_000_000, 0.1)
    process.stop()
    assert process._process.exitcode == -signal.SIGKILL


class Starts(Shared):
    """Has a process of its own, which does not end by itself."""

    def on_train_start(self) -> None:
        command = [sys.executable, "-c", f"import time; time.sleep({LIMIT})"]
        (Path(self.folder) / "child.pid").write_text(str(subprocess.Popen(command).pid))


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_a_process_ends_with_what_it_has_started(tmp_path: Path) -> None:
    project = Project(module=Starts, args={"folder": str(tmp_path)}, accelerator="cpu")
    process = start(project, Candidate(engine="stock"), tmp_path / "trial")
    process.sample(2, LIMIT)
    pid = int((tmp_path / "child.pid").read_text())
    assert is_running(pid)
    process.stop()
    end = time.monotonic() + 0.2 * LIMIT
    while is_running(pid):
        assert time.monotonic() < end
        time.sleep(0.05)


class Loaded(Shared):
    """Loads in a process of its own."""

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(256, 4), batch_size=4, num_workers=1)


def test_what_was_loaded_while_it_waited_is_not_timed(tmp_path: Path) -> None:
    project = Project(module=Loaded, args={"folder": str(tmp_path)}, accelerator="cpu")
    process = start(project, Candidate(accumulate=4), tmp_path / "trial")
    first, second = process.sample(4, LIMIT), process.sample(8, LIMIT)
    process.stop()
    assert (first.untimed, first.examples, len(first.losses)) == (0, 16, 4)
    assert (second.untimed, second.examples, len(second.losses)) == (4, 32, 12)  # two that are ready, and whole steps


def test_batches_that_several_loaders_have_ready() -> None:
    data = torch.ones(4, 2)
    loaders = {"a": DataLoader(data, num_workers=2, prefetch_factor=3), "b": [DataLoader(data), [1, 2]]}
    trainer = SimpleNamespace(train_dataloader=loaders, accumulate_grad_batches=4)
    assert waiting_batches(trainer) == 8
    trainer.train_dataloader = DataLoader(data)
    assert waiting_batches(trainer) == 0


def test_what_a_strategy_that_spawns_has_to_pickle() -> None:
    sampler = make_sampler(LIGHTNING, "a connection", 3)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(sampler))
    assert isinstance(again, Callback)
    assert vars(again).keys() == vars(sampler).keys()


def test_processes_are_forked_only_where_nothing_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for system, cuda, hip in (
        ("linux", None, None),
        ("linux", "13.0", None),
        ("linux", None, "7"),
        ("darwin", None, None),
    ):
        monkeypatch.setattr("sys.platform", system)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        found.append(start_method())
    assert found == ["fork", "spawn", "spawn", "spawn"]


def test_what_cannot_be_set_is_a_failure_of_the_candidate(tmp_path: Path) -> None:
    project = Project(module=Shared, args={"folder": str(tmp_path)}, accelerator="cpu")
    process = start(project, Candidate(prefetch_factor=2), tmp_path / "trial")
    with pytest.raises(VariantFailed, match="num_workers"):
        process.sample(2, LIMIT)
    process.stop()


def test_a_dataloader_that_is_passed_cannot_be_another(tmp_path: Path) -> None:
    loader = DataLoader(torch.ones(64, 4), batch_size=4)
    project = Project(module=Shared, args={"folder": str(tmp_path)}, data=loader, accelerator="cpu")
    facts = probed(project, tmp_path / "probe", time.monotonic() + LIMIT)
    assert (facts.loader_changes, facts.batches_change, facts.batch_size) == (False, False, 4)
