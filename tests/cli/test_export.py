"""``lightning-ort export``: from a checkpoint to a file that onnxruntime runs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ort.cli import main
from lightning_ort.onnx_export import export as export_module

pytest.importorskip("onnxscript")


class Net(LightningModule):
    def __init__(self, width: int = 4, slope: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.LeakyReLU(slope), nn.Linear(width, 2))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.net(x) if scale is None else self.net(x) * scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(4, 3), batch_size=2)


class WithExample(Net):
    example_input_array = torch.ones(2, 3)


class Sorts(Net):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return torch.linalg.eigvalsh(x.T @ x)


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "export", *map(str, args)])
    main()


def outputs(path: Path, **inputs: np.ndarray) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, inputs)[0])


@pytest.fixture
def trained(make_trainer: Callable[..., Any], tmp_path: Path) -> tuple[Net, Path]:
    module, path = Net(width=5), tmp_path / "trained.ckpt"
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    return module.eval(), path


def test_a_shape(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    module, checkpoint = trained
    before, output = checkpoint.read_bytes(), tmp_path / "model.onnx"
    run(monkeypatch, checkpoint, "--module", f"{__file__}:Net", "-o", output, "--input-shape", 2, 3)
    assert f"{output}: x: float32[batch, 3] -> output: float32[batch, 2]" in capsys.readouterr().out
    x = torch.randn(7, 3)
    torch.testing.assert_close(outputs(output, x=x.numpy()), module(x).detach(), rtol=0, atol=1e-4)
    hparams = {p.key: p.value for p in onnx.load(output).metadata_props}["lightning_ort.hparams"]
    assert json.loads(hparams) == {"width": 5, "slope": 0.1}
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize("kind", ["tensor.pt", "dict.pt", "names.npz"])
def test_a_file(kind: str, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, checkpoint = trained
    inputs = {"x": torch.randn(2, 3), "scale": torch.tensor(2.0)}
    if kind == "names.npz":
        np.savez(tmp_path / kind, **{name: tensor.numpy() for name, tensor in inputs.items()})
    else:
        torch.save(inputs if kind == "dict.pt" else inputs["x"], tmp_path / kind)
    sample = ("--sample", tmp_path / kind, "--quantize", "fp16")
    run(monkeypatch, checkpoint, "--module", f"{__file__}:Net", "--output", tmp_path / "model.onnx", *sample)
    used = inputs if kind != "tensor.pt" else {"x": inputs["x"]}
    got = outputs(tmp_path / "model.onnx", **{name: tensor.numpy() for name, tensor in used.items()})
    torch.testing.assert_close(got, module(**used).detach(), rtol=0, atol=1e-2)


def test_example_input_array_and_arguments(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("--module", f"{__file__}:WithExample", "-o", tmp_path / "model.onnx", "--args", '{"slope": 0.5}')
    run(monkeypatch, trained[1], *args)
    model = onnx.load(tmp_path / "model.onnx")
    (leaky,) = [node for node in model.graph.node if node.op_type == "LeakyRelu"]
    assert leaky.attribute[0].f == 0.5


@pytest.mark.parametrize(
    ("module", "args", "message"),
    [
        ("Net", (), "has no sample inputs: set `self.example_input_array` in it, or pass --sample"),
        ("Net", ("--input-shape", "2", "4"), r"Net.forward\(x \[2, 4\]\) fails: RuntimeError.*\n  at .*self.net\(x\)"),
        ("Net", ("--input-shape", "0", "3"), "each size must be at least 1"),
        ("Net", ("--input-shape", "2", "3", "--sample", "a.pt"), "not both"),
        ("Net", ("--sample", "a.pt"), "a.pt: there is no such file"),
        ("Net", ("--sample", __file__), "pass a .pt or .npz file"),
        ("Net", ("--input-shape", "2", "3", "--args", '{"width": 6}'), "size mismatch for net.0.weight"),
        ("Net", ("--input-shape", "2", "3", "--args", '{"wide": 6}'), "Net has no argument 'wide': did you mean"),
        ("Net", ("--input-shape", "2", "3", "--tolerance", "-1"), "tolerance=-1.0"),
        ("Sorts", ("--input-shape", "2", "3"), r"the op aten._linalg_eigh.*\n  at .*test_export.py:\d+ in forward"),
        ("outputs", ("--input-shape", "2", "3"), "is not a LightningModule class"),
        ("Nothing", ("--input-shape", "2", "3"), "Nothing"),
    ],
)
def test_bad_input(
    module: str, args: Any, message: str, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, trained[1], "--module", f"{__file__}:{module}", "-o", tmp_path / "model.onnx", *args)
    assert not (tmp_path / "model.onnx").exists()


def test_a_module_in_place_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"net.py:Net names a module: pass a checkpoint and --module .*--training"):
        run(monkeypatch, "net.py:Net", "-o", tmp_path / "model.onnx")


def test_a_training_step_with_the_data_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ort.cli.export.export_training", lambda module, data, *_, **__: seen.append(data))
    seen: list[Any] = []
    run(monkeypatch, "--training", f"{__file__}:Net", "-o", tmp_path / "out")
    assert isinstance(seen[0].train_dataloader(), DataLoader)
    with pytest.raises(SystemExit, match="the module has no train_dataloader"):
        run(monkeypatch, "--training", "lightning.pytorch:LightningModule", "-o", tmp_path / "out")


def test_files(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("--module", f"{__file__}:WithExample", "-o")
    with pytest.raises(SystemExit, match="trained.ckpt already exists"):
        run(monkeypatch, trained[1], *args, trained[1])
    with pytest.raises(SystemExit, match="nothing.ckpt: there is no such file"):
        run(monkeypatch, tmp_path / "nothing.ckpt", *args, tmp_path / "model.onnx")
    with pytest.raises(SystemExit, match="lightning-ort convert"):
        run(monkeypatch, tmp_path, *args, tmp_path / "model.onnx")


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("where", ["checkpoint", "sample"])
def test_hostile_files(where: str, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, ran = trained[1], tmp_path / "ran"
    args = ("--module", f"{__file__}:WithExample", "-o", tmp_path / "model.onnx")
    if where == "sample":
        torch.save({"x": Hostile(ran)}, tmp_path / "sample.pt")
        args = (*args, "--sample", tmp_path / "sample.pt")
    else:
        torch.save({**torch.load(checkpoint, weights_only=True), "more": Hostile(ran)}, checkpoint)
    with pytest.raises(SystemExit, match="exec, which may do anything"):
        run(monkeypatch, checkpoint, *args)
    assert not ran.exists()
    if where == "checkpoint":
        run(monkeypatch, checkpoint, *args, "--trust")
        assert ran.exists()
        assert (tmp_path / "model.onnx").is_file()


def test_onnxscript_is_missing(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "ONNXSCRIPT", RequirementCache("onnxscript>=1000"))
    with pytest.raises(SystemExit, match=r"pip install 'lightning-ort\[export\]'"):
        run(monkeypatch, trained[1], "--module", f"{__file__}:WithExample", "-o", tmp_path / "model.onnx")
