"""``lightning-ort tune``: a real search in processes of their own, its files, and what is refused."""

import json
import runpy
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning_utilities.core.imports import RequirementCache
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ort
from lightning_ort import TuneResult
from lightning_ort._busy import Stopwatch
from lightning_ort.cli import main
from lightning_ort.cli import tune as command
from lightning_ort.tuning import api, measuring, probe, search, trainer_process
from lightning_ort.tuning.candidate import Candidate, TuneError
from lightning_ort.tuning.project import Project
from lightning_ort.tuning.trials import Speed

MODULES = Path(__file__).parent / "bench_modules.py"
SECONDS = 200.0  # of a search that ends long before


class Net(LightningModule):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(LightningDataModule):
    def __init__(self, width: int = 32, batch_size: int = 8) -> None:
        super().__init__()
        self.width, self.batch_size = width, batch_size

    def train_dataloader(self) -> Any:
        data = torch.randn(512, self.width, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(data), batch_size=self.batch_size, shuffle=True)


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "tune", *args])
    monkeypatch.setenv("COLUMNS", "250")
    main()


@pytest.fixture
def everything_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dimension, whose candidate wins: how fast it is on a busy machine is not what is tested."""

    only = {"engine": [({"engine": "ort"}, "regions of the step on ONNX Runtime")]}
    monkeypatch.setattr(search, "dimensions", lambda *args: only)
    monkeypatch.setattr(search, "speed", lambda trial, other: Speed(2.0, 2.0, 2.0) if trial.rounds else None)
    monkeypatch.setattr(search, "_FINAL_ROUNDS", 1)
    monkeypatch.setattr(search, "_MAX_ROUNDS", 3)
    monkeypatch.setattr(measuring, "_SLOWER", 0.1)
    monkeypatch.setattr(measuring, "_UNIT", 0.1)
    monkeypatch.setenv("LIGHTNING_ORT_CONFIG", '{"start": "now", "placement": "always"}')


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A LightningCLI project with no word about this package."""
    config = {
        "seed_everything": 1,
        "trainer": {
            "max_epochs": 1,
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": "runs",
            "enable_checkpointing": False,
        },
        "model": {"class_path": "test_tune.Net", "init_args": {"width": 16}},
        "data": {"class_path": "test_tune.Data", "init_args": {"width": 16, "batch_size": 8}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "main.py").write_text("from lightning.pytorch.cli import LightningCLI\ncli = LightningCLI()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return tmp_path


@pytest.mark.usefixtures("everything_wins")
def test_a_project_of_lightning_cli(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limits: Callable[..., None]
) -> None:
    limits(slowdown=1.25)
    monkeypatch.setattr(Stopwatch, "slowdown", 3.0)
    monkeypatch.setattr(trainer_process, "start_method", lambda: "fork")  # which has what is replaced here
    run(monkeypatch, "--config=config.yaml", f"--time={SECONDS:.0f}s", "-o", "tuned.yaml")
    shown = capsys.readouterr().out
    found = json.loads((project / "tuned.json").read_text())
    assert found["chosen"] == 1
    own, best = found["trials"]
    assert best["settings"] == {"engine": "ort"}
    assert best["loss_difference"] < 1e-3
    assert best["speed"][0] > 0
    assert own["peak_bytes"] > 0
    assert "-> " in shown
    assert "other programs used the machine (steps took 3.0 times as long)" in shown
    assert "Written: tuned.yaml, tuned.json" in shown
    text = (project / "tuned.yaml").read_text()
    assert "\n# other programs used the machine (steps took 3.0 times as long)" in text
    assert "\n# ort: regions of the step on ONNX Runtime: " in text
    # what LightningCLI makes of it, in a script that does not know of us
    monkeypatch.setattr(sys, "argv", ["main.py", "fit", "--config", "tuned.yaml"])
    trainer = runpy.run_path(str(project / "main.py"))["cli"].trainer
    assert trainer.global_step == 64
    assert trainer.strategy.report.ort_runs > 0
    with pytest.raises(SystemExit, match=r"tuned\.yaml is there already, and nothing is overwritten"):
        run(monkeypatch, "--config=config.yaml")


@pytest.mark.usefixtures("everything_wins")
def test_from_python(tmp_path: Path) -> None:
    heard: list[str] = []
    result = lightning_ort.tune(
        Net(), Data(), time=SECONDS, accelerator="cpu", listen=lambda doing, best: heard.append(doing)
    )
    assert isinstance(result, TuneResult)
    assert result.best["settings"] == {"engine": "ort"}
    assert result.speed_up > 0
    assert heard[0] == "looking at the module and its data"
    assert "ort" in heard[-1] or "yours" in heard[-1]
    trainer = Trainer(max_steps=3, logger=False, enable_checkpointing=False, **result.trainer_arguments())
    trainer.fit(Net(), Data())
    assert trainer.strategy.report.ort_runs > 0


def test_without_optuna(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "OPTUNA", RequirementCache("optuna>=1000"))
    with pytest.raises(SystemExit, match="tune searches with Optuna: pip install optuna"):
        run(monkeypatch, "--config=config.yaml")
    with pytest.raises(ModuleNotFoundError, match="tune searches with Optuna"):
        lightning_ort.tune(Net(), Data(), time=SECONDS)


def test_python_refuses_too() -> None:
    with pytest.raises(ValueError, match="Nothing to train"):
        lightning_ort.tune()
    with pytest.raises(ValueError, match="no data to train with.*train_dataloader"):
        lightning_ort.tune(Net)
    with pytest.raises(TypeError, match="pass a LightningModule"):
        lightning_ort.tune(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False))
    with pytest.raises(ValueError, match=r"time=0: must be above 0"):
        lightning_ort.tune(Net(), Data(), time=0)
    with pytest.raises(TuneError, match="does not train as it is.*NameError"):
        lightning_ort.tune(Broken(), Data(), time=60)


class Broken(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise NameError("no such thing")


class NoBatchSize(LightningDataModule):
    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(32, 32))
        batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), 8, False)
        return DataLoader(data, batch_sampler=type("Buckets", (list,), {})(batches))


ME = f"{__file__}:"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Nothing to train"),
        (["nowhere.py:Small"], "there is no file"),
        (["--config=nowhere.yaml"], "there is no such file"),
        ([f"{MODULES}:Small", "--time=soon"], "--time=soon: write it as 90s, 5m or 1h"),
        ([f"{MODULES}:Small", "--output=/proc/x.yaml"], "--output='/proc/x.yaml'"),
        ([f"{MODULES}:Small", "-o", "tuned.json"], "-o tuned.json: .json is written beside the configuration"),
        ([f"{MODULES}:Small", "--time=0.5s"], "--time 0.5s is too short: it was over before anything"),
        ([f"{MODULES}:Small", "--time=1.01s"], "--time 1.01s is too short"),
        ([f"{ME}Broken", f"--data={ME}Data"], "does not train as it is, so there is nothing to tune: NameError"),
    ],
)
def test_bad_input(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, *arguments)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "cache"])


def test_a_configuration_without_class_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("model: {width: 8}\n")
    with pytest.raises(SystemExit, match="its model has no class_path, so name the class"):
        run(monkeypatch, f"--config={tmp_path / 'config.yaml'}")
    (tmp_path / "config.yaml").write_text("- a\n- list\n")
    with pytest.raises(SystemExit, match="no LightningCLI configuration"):
        run(monkeypatch, f"--config={tmp_path / 'config.yaml'}")


def test_what_the_parser_of_lightning_cli_says(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (project / "config.yaml").read_text()
    (project / "config.yaml").write_text(text.replace("width", "breadth"))
    with pytest.raises(SystemExit, match=r"does not train as it is.*error: .*breadth"):
        run(monkeypatch, "--config=config.yaml")


def test_notes_on_devices_and_batches() -> None:
    def notes(project: Project, candidate: Candidate) -> list[str]:
        return list(api.notes_on(project, candidate))

    four = Project(config={"trainer": {"devices": 4}, "data": {"class_path": "test_tune.Data"}})
    (note,) = notes(four, Candidate(batch_size=4))
    assert "on one device of one node, not with your devices 4" in note
    (note,) = notes(Project(module=Net, data=NoBatchSize), Candidate(batch_size=4))
    assert "give it an argument batch_size" in note
    assert notes(Project(module=Net, data=Data), Candidate(batch_size=4)) == []
    assert notes(Project(module=Net, data=NoBatchSize), Candidate(engine="ort")) == []


def test_float32_is_plain_however_it_is_written() -> None:
    for precision, plain in ((32, True), ("32", True), ("32-true", True), ("bf16-mixed", False), (16, False)):
        assert api.is_plain(Project(config={"trainer": {"precision": precision}})) == plain


def test_the_time_includes_what_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "start", None)  # nothing is started
    parser = ArgumentParser()
    command.add_arguments(parser)
    for spent in (59.9, 61.0):
        with pytest.raises(SystemExit, match="--time 60s is too short: it was over before anything"):
            command.tune(
                parser.parse_args([f"{MODULES}:Small", "--time=60s"], Namespace(started=time.monotonic() - spent))
            )


def test_torch_is_not_imported_before_the_time_runs() -> None:
    program = (
        "import sys; from lightning_ort.cli import main; sys.argv = ['', 'tune', '--help'];"
        " import atexit; atexit.register(lambda: print('torch' in sys.modules)); main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--keep-numerics" in done.stdout
    assert "--started" not in done.stdout
    assert done.stdout.endswith("False\n")
