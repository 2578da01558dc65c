"""The JavaScript runner, in WebAssembly and in Node: `npm test` in the folder `node`, and steps beside Python's."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ort import export_training
from lightning_ort.onnx_export.training import runner
from tests.anywhere.modules import DigitsCNN, TabularMLP
from tests.anywhere.test_training_export import Small, small_batch

NODE = Path(__file__).parent / "node"
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules" / "onnxruntime-web").is_dir(),
    reason="Node, or what `make node` installs, is not there",
)


class Frozen(TabularMLP):
    """With a frozen layer that is too large to be in the models themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(16, 3000).requires_grad_(False)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        numbers = batch["numbers"] + self.wide(batch["numbers"]).mean(1, keepdim=True)
        return super().loss({**batch, "numbers": numbers})


class Noisy(Small):
    """Draws, and does something else for one size."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.layer(batch["x"])
        noise = torch.randn_like(hidden)
        dropped = torch.nn.functional.dropout(torch.ones_like(hidden), 0.25)
        self.log_dict(
            {"noise": noise.mean(), "spread": noise.square().mean(), "dropped": (dropped == 0).float().mean()}
        )
        return (hidden + noise).square().mean() * (2 if hidden.shape[0] == 5 else 1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("in_node")
    torch.manual_seed(0)
    export_training(DigitsCNN(4), DigitsCNN.batch(6, 0), folder / "digits")
    for name in ("frozen", "halved"):
        torch.manual_seed(0)
        export_training(Frozen(), TabularMLP.batch(6, 0), folder / name, float16=name == "halved")
        assert (folder / name / "frozen.data").is_file()
    export_training(Noisy(), small_batch(8), folder / "noisy")
    names = {"NOISY": "noisy", "FOLDER": "digits", "OTHER": "frozen", "FROZEN": "frozen", "HALVED": "halved"}
    return {name: folder / path for name, path in names.items()}


def test_runner(folders: dict[str, Path]) -> None:
    import os

    environment = {**os.environ, **{name: str(path) for name, path in folders.items()}}
    done = subprocess.run(["npm", "test"], cwd=NODE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("runtime", ["web", "node"])
@pytest.mark.parametrize("which", ["FOLDER", "FROZEN", "HALVED"])
def test_it_trains_as_in_python(which: str, runtime: str, folders: dict[str, Path], tmp_path: Path) -> None:
    kind: Any = DigitsCNN if which == "FOLDER" else TabularMLP
    training = runner.Training.load(folders[which])
    names = list(training.fields)
    arrays, losses = {}, []
    for step in range(20):
        batch = kind.batch(16 + step % 3, step)  # few rows, and the losses of one grow without end
        values = [value.numpy() for value in (batch.values() if isinstance(batch, dict) else batch)]
        arrays |= {f"{step}/{name}": value for name, value in zip(names, values, strict=True)}
        losses.append(training.step(values)["loss"])
    assert np.isfinite(losses).all()
    runner.write_state(tmp_path / "batches.safetensors", arrays, {})
    command = ["node", "steps.mjs", runtime, str(folders[which]), str(tmp_path / "batches.safetensors")]
    subprocess.run([*command, str(tmp_path / "out")], cwd=NODE, check=True)
    results = json.loads((tmp_path / "out.json").read_text())
    np.testing.assert_allclose(results["losses"], losses, rtol=1e-4)
    state, metadata = runner.read_state(tmp_path / "out.safetensors")
    assert metadata["step"] == "20"
    for name, value in training.state.items():
        largest = max(1.0, float(np.abs(value).max()))
        tolerance = (
            1e-3 if "/" in name else 1e-4
        )  # states of the optimizer: sums of gradients have no size of their own
        np.testing.assert_allclose(state[name], value, rtol=tolerance, atol=tolerance * largest, err_msg=name)
