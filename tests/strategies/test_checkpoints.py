"""A checkpoint does not tell under which strategy it was written."""

import errno
import math
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_modules import Small

from lightning_ort import ORTStrategy
from lightning_ort.lightning import AtomicCheckpointIO
from lightning_ort.strategies.capture.capture import obstacle
from lightning_ort.strategies.checkpoints import save_atomically


class Momentum(Small):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"},
        }


def strategy(name: str) -> Any:
    return "auto" if name == "stock" else ORTStrategy(config={"placement": "always"})


def train(name: str, epochs: int, make_trainer: Callable[..., Any], ckpt_path: Path | None = None) -> tuple[Any, Any]:
    module = Momentum()
    trainer = make_trainer(strategy=strategy(name), max_epochs=epochs, limit_val_batches=0)
    trainer.fit(module, ckpt_path=ckpt_path)
    return module, trainer


def assert_same(left: Any, right: Any, **tolerance: float) -> None:
    """Same structure and keys, tensors and floats equal within the tolerance."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key], **tolerance)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other, **tolerance)
    elif isinstance(left, torch.Tensor):
        torch.testing.assert_close(left, right, **tolerance)
    elif isinstance(left, float):
        assert left == pytest.approx(right, rel=1e-3)
    else:
        assert left == right


@pytest.mark.parametrize("resumed", ["ort", "stock"])
@pytest.mark.parametrize("first", ["ort", "stock"])
def test_resume(first: str, resumed: str, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    whole, _ = train("stock", 3, make_trainer)
    module, trainer = train(first, 1, make_trainer)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    continued, _ = train(resumed, 3, make_trainer, ckpt_path=tmp_path / "first.ckpt")
    assert module.losses + continued.losses == pytest.approx(whole.losses, rel=1e-3)


def test_content(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    checkpoints = []
    for name in ("stock", "ort"):
        _, trainer = train(name, 1, make_trainer)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        checkpoints.append(torch.load(tmp_path / f"{name}.ckpt", weights_only=True))
    assert trainer.strategy.report.ort_runs > 0 or obstacle()
    stock, ours = checkpoints
    assert_same(ours, stock, rtol=1e-3, atol=1e-5)
    assert ours["optimizer_states"][0]["state"][0]["exp_avg"].abs().sum() > 0


def test_load_is_exact(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    module, trainer = train("ort", 1, make_trainer)
    trainer.save_checkpoint(tmp_path / "ort.ckpt")
    state = torch.load(tmp_path / "ort.ckpt", weights_only=True)["state_dict"]
    state = dict(state)
    assert_same(state, dict(module.state_dict()), rtol=0, atol=0)
    loaded = Momentum.load_from_checkpoint(tmp_path / "ort.ckpt")
    assert_same(dict(loaded.state_dict()), dict(module.state_dict()), rtol=0, atol=0)


def test_checkpoint_in_the_middle_of_a_run(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    class Saves(Momentum):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            if self.global_step == 2:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    module = Saves()
    make_trainer(strategy=strategy("ort"), max_epochs=1, limit_val_batches=0).fit(module)
    stock, _ = train("stock", 1, make_trainer, ckpt_path=tmp_path / "middle.ckpt")
    ours, trainer = train("ort", 1, make_trainer, ckpt_path=tmp_path / "middle.ckpt")
    assert len(module.losses) > len(stock.losses) > 0
    assert ours.losses == pytest.approx(stock.losses, rel=1e-3)
    assert trainer.strategy.report.ort_runs > 0 or obstacle()


@pytest.mark.parametrize("prefix", ["~", "file://"])
def test_a_path_that_fsspec_reads(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock Lightning writes to the home folder, and to the file of a URL."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = "~/m.ckpt" if prefix == "~" else f"file://{tmp_path}/m.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": torch.ones(2)}, path)
    assert (tmp_path / "m.ckpt").is_file()
    assert list((tmp_path / "work").iterdir()) == []


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full: the system refuses to write beyond a size, with an error of its own."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("limit", [0, 4096, 300_000])  # at its begin, among the pickles, and within a tensor
def test_a_full_disk(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save_atomically({"weight": torch.zeros(3)}, path)
    with files_of_at_most(limit), pytest.raises(OSError, match="bytes of the checkpoint") as caught:
        save_atomically({"weight": torch.zeros(200_000)}, path)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert f"after {limit:,} bytes" in str(caught.value)
    assert torch.load(path)["weight"].numel() == 3  # that of before
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a machine that loses power leaves an empty file in the place of the earlier checkpoint."""
    done: list[str] = []

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size > 800_000}")

    def replace(self: Path, target: Path) -> None:
        done.append("rename")
        os.replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    save_atomically({"weight": torch.zeros(200_000)}, tmp_path / "last.ckpt")
    assert done == ["file of True", "rename", "folder"]

    io = AtomicCheckpointIO()
    io.flush_every = math.inf
    for name, flushes in (("first", True), ("second", False), ("third", False), ("first", True), ("third", True)):
        done.clear()
        io.save_checkpoint({"weight": torch.zeros(200_000)}, tmp_path / f"{name}.ckpt")
        assert done == (["file of True", "rename", "folder"] if flushes else ["rename"]), name
    done.clear()
    io.teardown()
    assert done == ["file of True", "folder"]  # the second
    io.save_checkpoint({"weight": torch.zeros(200_000)}, tmp_path / "fourth.ckpt")
    assert done == ["file of True", "folder", "file of True", "rename", "folder"]
    io.teardown()
    assert len(done) == 5
