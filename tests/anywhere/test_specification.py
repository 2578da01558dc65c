"""The runners, and the folders that are written, have what the specification says."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ort import export_training
from lightning_ort.onnx_export.training import runner
from lightning_ort.onnx_export.training.folder import ABOUT, RUNNERS, STATE
from tests.anywhere.test_training_export import Small, small_batch

# what else than the keys for which a runner asks is in every training.json, for people
MORE_KEYS = ("format", "module", "frozen", "float16", "clip", "versions")
MODEL_KEYS = ("file", "fields", "inputs", "outputs", "sizes", "conditions")
# of an input or output of a model, and, without `key`, of a field and of the state
PORT_KEYS = ("name", "role", "key", "dtype", "shape")
STATE_ROLES = ("parameter", "buffer", "state")  # the last of the optimizer
INPUT_ROLES = ("field", *STATE_ROLES, "setting", "random")
OUTPUT_ROLES = (*STATE_ROLES, "gradient", "loss", "logged", "result", "check")
SETTINGS = {"optimizer/learning_rate": "float32", "optimizer/step": "int64", "optimizer/update": "bool"}
RANDOM = ("uniform", "normal")  # keys of inputs with the role `random`
JAVASCRIPT = (Path(runner.__file__).parent / "runner.mjs").read_text(encoding="utf-8")


def constant(name: str) -> Any:
    """A constant of the runner in JavaScript, as Python has it; of an object its keys and words."""
    (text,) = re.findall(rf"^const {name} = (.*?);$", JAVASCRIPT, re.MULTILINE | re.DOTALL)
    if text.startswith("{"):
        return dict(re.findall(r"(\w+): '?(\w+)", text))
    return json.loads(text.replace("'", '"'))


def test_the_runner_in_javascript() -> None:
    assert constant("FORMAT") == runner.FORMAT
    assert tuple(constant("KEYS")) == runner.KEYS
    codes = {name: code for name, code in runner.DTYPES.items() if name != "float16"}  # of which it has no arrays
    assert constant("CODES") == codes
    assert constant("ARRAYS").keys() == codes.keys()


@pytest.mark.parametrize("words", [INPUT_ROLES, OUTPUT_ROLES, SETTINGS, RANDOM])
def test_both_runners_know_each_word(words: Any) -> None:
    python = Path(runner.__file__).read_text(encoding="utf-8")
    usual = {"setting", "field", "normal", "loss", "logged", "result", *STATE_ROLES}  # what is left over, or both
    for text in (python, JAVASCRIPT):
        assert {word for word in words if not re.search(rf"['\"]{word}['\"]", text)} <= usual


def test_a_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "exported"
    export_training(Small(), small_batch(), folder, accumulate_grad_batches=2)
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    models: Mapping[str, Any] = about["models"]
    assert about["format"] == runner.FORMAT
    assert {*runner.KEYS, *MORE_KEYS} == about.keys()
    assert "training" in models
    assert set(models) <= ({"training", "evaluation", "prediction"})
    written = {each.name for each in folder.iterdir()}
    assert written == {ABOUT, STATE, *RUNNERS.values(), *(f"{name}.onnx" for name in models)}
    for model in models.values():
        assert set(model) == set(MODEL_KEYS)
        for ports, roles in ((model["inputs"], INPUT_ROLES), (model["outputs"], OUTPUT_ROLES)):
            assert all(set(port) == set(PORT_KEYS) for port in ports)
            assert {port["role"] for port in ports} <= set(roles)
            assert {port["dtype"] for port in ports} <= runner.DTYPES.keys()
    settings = {port["name"]: port["dtype"] for port in models["training"]["inputs"] if port["role"] == "setting"}
    assert settings.items() <= SETTINGS.items()  # this optimizer does not ask for the number of steps
    assert {each["role"] for each in about["state"]} <= set(STATE_ROLES)
    values, counts = runner.read_state(folder / STATE)
    assert {name: np.dtype(value.dtype).name for name, value in values.items()} == {
        each["name"]: each["dtype"] for each in about["state"]
    }
    assert {"step", "pending"} <= counts.keys()
