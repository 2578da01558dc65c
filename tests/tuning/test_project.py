"""What a trial trains: the user's module, without what would end it, write files or slow it down."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from torch.utils.data import DataLoader, IterableDataset

from lightning_ort import OnnxExport
from lightning_ort.tuning import api
from lightning_ort.tuning.candidate import Candidate, TuneError
from lightning_ort.tuning.probe import Facts, probed
from lightning_ort.tuning.project import Project, start
from lightning_ort.tuning.trainer_process import VariantFailed

LIMIT = 30.0


class Stops(EarlyStopping):
    """Whose name says nothing."""

    def __init__(self) -> None:
        super().__init__("loss", patience=0)


class SavesTimer(Callback):
    """Whose name says something else."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.seen.append(type(self).__name__)


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter([torch.ones(4)] * self.length)


class Own(LightningModule):
    """Has what a trial does without, and data of all kinds."""

    def __init__(self, data: str = "plain") -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.data, self.seen = data, []  # type: ignore[var-annotated]

    def configure_callbacks(self) -> Any:
        return [Stops(), ModelCheckpoint(), Timer(duration="00:00:00:00"), OnnxExport("own.onnx"), SavesTimer()]

    def on_train_start(self) -> None:
        kinds = sorted(type(one).__name__ for one in self.trainer.callbacks)
        assert kinds == ["Sampler", "SavesTimer"]
        assert self.seen == ["SavesTimer"]
        self.logger.log_metrics({"started": 1.0})
        assert Path(self.logger.log_dir).is_relative_to(self.trainer.default_root_dir)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.data == "func":
            torch.func.grad(lambda x: x.square().sum())(torch.ones(2))
        loss = self.layer(batch["a"][0] if isinstance(batch, dict) else batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-3, epochs=self.trainer.max_epochs, steps_per_epoch=2
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> Any:
        examples = torch.ones(32, 4)
        return {
            "plain": lambda: DataLoader(examples, batch_size=8),
            "func": lambda: DataLoader(examples, batch_size=8),
            "empty": lambda: DataLoader(examples[:0], batch_size=8),
            "stream": lambda: DataLoader(Stream(32), batch_size=8),
            "empty stream": lambda: DataLoader(Stream(0), batch_size=8),
            "several": lambda: {"a": [DataLoader(examples, batch_size=8)]},
            "sequences": lambda: DataLoader(torch.ones(32, 6, 4), batch_size=8, collate_fn=sequence_first),
            "sampler": lambda: DataLoader(examples, batch_sampler=torch.utils.data.BatchSampler(range(32), 8, False)),
        }[self.data]()


def sequence_first(examples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(examples, 1)


def probe(folder: Path, data: str) -> Facts:
    return probed(Project(module=Own, args={"data": data}, accelerator="cpu"), folder, time.monotonic() + LIMIT)


@pytest.mark.parametrize(
    ("data", "batch_size", "counts_examples", "stream"),
    [
        ("stream", 8, True, True),
        ("several", 1, False, False),
        ("sequences", 8, False, False),
        ("sampler", 8, True, False),
    ],
)
def test_facts_of_data(data: str, batch_size: int, counts_examples: bool, stream: bool, tmp_path: Path) -> None:
    facts = probe(tmp_path, data)
    assert (facts.batch_size, facts.counts_examples, facts.stream) == (batch_size, counts_examples, stream)
    assert facts.loader_changes is (data in ("stream", "sequences", "sampler"))
    assert facts.batches_change is (data in ("stream", "sequences"))
    assert (facts.module, facts.device) == ("Own", "cpu")
    assert facts.bfloat16 > 0


@pytest.mark.parametrize("data", ["empty", "empty stream"])
def test_empty_data(data: str, tmp_path: Path) -> None:
    with pytest.raises(VariantFailed, match="are there batches"):
        probe(tmp_path, data)


CONFIG = {
    "trainer": {
        "accelerator": "cpu",
        "fast_dev_run": True,
        "profiler": "simple",
        "max_epochs": 1,
        "callbacks": [{"class_path": f"{__name__}.Stops"}, {"class_path": "ModelCheckpoint"}, f"{__name__}.SavesTimer"],
    },
    "model": {"class_path": f"{__name__}.Own"},
}


@pytest.mark.parametrize("config", [None, CONFIG], ids=["module", "configuration"])
def test_what_a_trial_does_without(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = Project(module=None if config else Own, config=config, accelerator="cpu")
    process = start(project, Candidate(), tmp_path / "trial")
    assert len(process.sample(20, LIMIT).losses) == 20
    process.stop()
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("path", ["no_such_file.Own", f"{__name__}.NoSuchClass"])
def test_a_class_path_with_a_mistake(path: str) -> None:
    with pytest.raises(TuneError, match=rf"class_path {path}: it cannot be imported: \w+Error"):
        api.tune(config={"model": {"class_path": path}}, time=10)
    with pytest.raises(TuneError, match=rf"class_path {path}"):
        assert Project(config={"data": {"class_path": path}}).batch_argument
