"""The runner in Python: what is passed, damaged folders, and a kill while it saves."""

import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from lightning_ort import export_training
from lightning_ort.onnx_export.training import runner
from lightning_ort.onnx_export.training.runner import TrainingError
from tests.anywhere.modules import TabularMLP
from tests.anywhere.test_training_export import Small

BATCH = {name: value.numpy() for name, value in TabularMLP.batch(6, 0).items()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runner") / "tabular"
    export_training(TabularMLP(), TabularMLP.batch(6, 0), folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "tabular")


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from training import Training
import numpy as np
training = Training.load()
sizes = {{"batch": 3}}
batch = {{}}
for name, (dtype, shape) in training.fields.items():
    batch[name] = np.zeros([sizes.get(size, size) for size in shape], dtype)
before = training.step(batch)["loss"]
for _ in range(20):
    after = training.step(batch)["loss"]
training.save()
assert after < before
print(sorted({{"torch", "lightning", "lightning_ort", "onnxruntime.training"}} & set(sys.modules)))
"""


def test_it_needs_neither_torch_nor_this_package(folder: Path) -> None:
    """The training build of onnxruntime imports torch, where both are installed; the runner keeps it off."""
    code = PROGRAM.format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
    assert runner.Training.load(folder).updates == 21


def changed(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in {**BATCH, **values}.items() if value is not None}


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": (changed(target=None), ValueError, r"has the fields numbers, category; expected are .*target: float32"),
    "unknown": (changed(other=BATCH["target"]), ValueError, "has the fields numbers, category, target, other"),
    "count": ([BATCH["numbers"]], ValueError, "has 1 fields; expected are"),
    "shape": (changed(numbers=BATCH["numbers"][:, 1:]), ValueError, r"'numbers' has shape \[6, 15\]"),
    "rank": (changed(target=BATCH["target"][:, None]), ValueError, r"'target' has shape \[6, 1\]"),
    "rows": (changed(target=BATCH["target"][1:]), ValueError, r"'target' has shape \[5\].* with \{'batch': 6\}"),
    "dtype": (changed(target=BATCH["target"].astype("f8")), TypeError, "'target' is float64, but the model takes"),
    "no numbers": (changed(category=["a"] * 6), TypeError, "field 'category' is <U1"),
    "empty": (changed(**{name: value[:0] for name, value in BATCH.items()}), ValueError, "it must be at least 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_batch_is_refused_and_changes_nothing(case: str, original: Path) -> None:
    batch, kind, message = WRONG[case]
    training = runner.Training.load(original)
    before = training.state
    with pytest.raises(kind, match=message):
        training.step(batch)
    assert training.updates == 0
    for name, value in training.state.items():
        np.testing.assert_array_equal(value, before[name])
    # what is narrower is taken
    assert training.step(changed(category=BATCH["category"].astype("i4")))["loss"] > 0


def test_inputs_may_be_passed_one_by_one(original: Path) -> None:
    training = runner.Training.load(original)
    inputs = BATCH["numbers"], BATCH["category"]
    for name, value in training.predict(*inputs).items():
        np.testing.assert_array_equal(value, training.predict(inputs)[name])
    for wrong in ((), (*inputs, BATCH["target"])):
        with pytest.raises(ValueError, match=f"the batch has {len(wrong)} fields; expected are numbers: float32"):
            training.predict(*wrong)
    assert training.evaluate(*BATCH.values()) == training.evaluate(BATCH)


def test_learning_rates_are_checked(original: Path) -> None:
    training = runner.Training.load(original)
    assert [group["learning_rate"] for group in training.about["optimizer"]["groups"]] == [0.03, 0.01, 0.03]
    for wrong in (float("nan"), -1, 1e39, "fast", [0.1, 0.1], [0.1, None, 0.1]):
        with pytest.raises(ValueError, match="lr"):
            training.step(BATCH, lr=wrong)
    training.step(BATCH, lr=[0.0, 0.1, 0.0])
    fresh = runner.Training.load(original).state
    same = {name for name, value in training.state.items() if np.array_equal(value, fresh[name])}
    assert {"net.0.weight", "embedding.weight"} <= same
    assert "head.weight" not in same


def test_fit_with_progress_and_a_schedule(original: Path) -> None:
    training = runner.Training.load(original)
    rates, seen = [], []

    def schedule(updates: int) -> float:
        rates.append(updates)
        return 0.01 / (1 + updates)

    mean = training.fit([BATCH] * 9, schedule, lambda number, results: seen.append(results["loss"]) or number < 3)
    assert (rates, len(seen), training.updates) == ([0, 1, 2, 3], 4, 4)
    assert mean == pytest.approx(np.mean(seen))


def broken(file: str, change: Callable[[Path], Any], message: str) -> tuple[str, Callable[[Path], Any], str]:
    return file, change, message


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def flip_last(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def outside(path: Path) -> None:
    about = json.loads(path.read_text())
    about["models"]["training"]["file"] = "../training.onnx"
    path.write_text(json.dumps(about))


def header(**values: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        text = json.dumps(values).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)

    return write


DAMAGED = {
    "no folder": broken("training.json", lambda path: shutil.rmtree(path.parent), "has no training.json"),
    "no json": broken("training.json", lambda path: path.write_text("{"), r"training\.json cannot be read"),
    "other json": broken("training.json", lambda path: path.write_text("[]"), "has format list"),
    "format": broken("training.json", lambda path: path.write_text('{"format": 3}'), "has format 3; this file reads"),
    "no fields": broken("training.json", lambda path: path.write_text('{"format": 2}'), "has no 'fields'"),
    "outside": broken("training.json", outside, r"names '\.\./training\.onnx', which is not in the folder"),
    "no model": broken("training.onnx", Path.unlink, r"training\.onnx is missing"),
    "half a model": broken("training.onnx", lambda path: os.truncate(path, 999), "has 999 bytes instead of"),
    "another model": broken("evaluation.onnx", flip, r"evaluation\.onnx is damaged"),
    "no state": broken("state.safetensors", Path.unlink, r"state\.safetensors cannot be read"),
    "empty state": broken("state.safetensors", lambda path: path.write_bytes(b""), "no safetensors file"),
    "half a state": broken("state.safetensors", lambda path: os.truncate(path, 3000), "or it is damaged"),
    "long header": broken("state.safetensors", lambda path: path.write_bytes(b"\xff" * 64), "ends too early"),
    "strange header": broken("state.safetensors", header(x=3), "no safetensors file"),
    "strange type": broken(
        "state.safetensors", header(x={"dtype": "F8", "shape": [], "data_offsets": [0, 1]}), "damaged"
    ),
    "changed state": broken("state.safetensors", flip_last, "is not what its metadata's sha256 says"),
    "other state": broken("state.safetensors", header(), "of another model: 'embedding.weight' is missing"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_refused(case: str, folder: Path) -> None:
    file, change, message = DAMAGED[case]
    change(folder / file)
    with pytest.raises(TrainingError, match=message):
        runner.Training.load(folder)


def test_a_model_for_a_newer_runtime_says_what_is_needed(folder: Path) -> None:
    path = folder / "training.onnx"
    model = onnx.load(path)
    model.opset_import[0].version = 999
    path.write_bytes(model.SerializeToString())
    about = json.loads((folder / "training.json").read_text())
    del about["files"]["training.onnx"]
    (folder / "training.json").write_text(json.dumps(about))
    with pytest.raises(TrainingError, match=r"cannot be loaded by onnxruntime .*, which has to be 1\.17 or later"):
        runner.Training.load(folder)


def test_the_oldest_opset_that_serves(original: Path) -> None:
    for path in original.glob("*.onnx"):
        model = onnx.load(path)
        assert ([(entry.domain, entry.version) for entry in model.opset_import], model.ir_version) == ([("", 18)], 9)
        onnx.checker.check_model(model, full_check=True)


def test_a_save_that_fails_leaves_the_state(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = runner.Training.load(folder)
    training.step(BATCH)
    before = (folder / "state.safetensors").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        training.save()
    assert (folder / "state.safetensors").read_bytes() == before
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_training_that_has_failed_is_not_saved(folder: Path) -> None:
    training = runner.Training.load(folder)
    before = (folder / "state.safetensors").read_bytes()
    for _ in range(5):
        training.step(BATCH, lr=1e30)
    with pytest.raises(TrainingError, match="the training has failed, and nothing is saved"):
        training.save()
    assert (folder / "state.safetensors").read_bytes() == before


SAVING = """
import sys
sys.path.insert(0, {folder!r})
from training import Training
import numpy as np
training = Training.load()
print("ready", flush=True)
while True:
    training.updates += 1
    training.set_state({{name: np.full_like(value, training.updates) for name, value in training.state.items()}})
    training.save()
"""


def test_a_kill_while_it_saves_loses_nothing(folder: Path) -> None:
    program = SAVING.format(folder=str(folder))
    for attempt in range(6):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.01 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        training = runner.Training.load(folder)
        values = {float(value) for array in training.state.values() for value in np.unique(array)}
        assert values == {float(training.updates)} or training.updates == 0  # whole, whichever save it is of
    training.save()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_safetensors_is_what_others_write(original: Path, tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    values, metadata = runner.read_state(original / "state.safetensors")
    for name, value in numpy.load_file(original / "state.safetensors").items():
        np.testing.assert_array_equal(value, values[name])
    numpy.save_file(values, tmp_path / "theirs.safetensors", metadata)
    again, theirs = runner.read_state(tmp_path / "theirs.safetensors")
    assert (set(again), theirs) == (set(values), metadata)


def test_parameters_stay_where_they_are(original: Path) -> None:
    """A step reads one array and writes another, and the next step the other way round."""
    training = runner.Training.load(original)
    places = []
    for _ in range(6):
        training.step(BATCH)
        places.append({name: array.ctypes.data for name, array in training._front.items()})
    assert places[0] == places[2] == places[4]
    assert places[1] == places[3] == places[5]
    assert not set(places[0].values()) & set(places[1].values())


class CopyingSession(onnxruntime.InferenceSession):
    """As on a provider with memory of its own: an input is copied when it is bound, not when the model runs."""

    def __init__(self, path: str, options: Any, providers: list[str]) -> None:
        super().__init__(path, options, providers=["CPUExecutionProvider"])

    def io_binding(self) -> Any:
        binding = super().io_binding()
        bind, self.kept = binding.bind_input, dict[str, np.ndarray]()

        def bind_copy(name: str, kind: str, number: int, dtype: Any, shape: Any, address: int) -> None:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            self.kept[name] = np.frombuffer(ctypes.string_at(address, size), dtype).copy()
            bind(name, kind, number, dtype, shape, self.kept[name].ctypes.data)

        binding.bind_input = bind_copy
        return binding


def test_a_provider_with_memory_of_its_own(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = runner.Training.load(original)
    monkeypatch.setattr(runner.onnxruntime, "InferenceSession", CopyingSession)
    ours = runner.Training.load(original, providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    for rows in (6, 6, 6, 4, 4, 4):
        batch = {name: value[-rows:] for name, value in BATCH.items()}
        assert ours.step(batch, lr=0.01 * rows) == usual.step(batch, lr=0.01 * rows)
    assert ours.evaluate(BATCH) == usual.evaluate(BATCH)
    for name, value in usual.state.items():
        np.testing.assert_array_equal(ours.state[name], value)


def test_state_of_a_step_that_fails_stays(tmp_path: Path) -> None:
    """An index beyond an embedding is found while the model runs."""

    class Looks(Small):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(5, 4)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(self.table(batch["i"])).square().mean()

    export_training(Looks(), {"i": torch.arange(5)}, tmp_path / "looks")
    training = runner.Training.load(tmp_path / "looks")
    before = training.state
    with pytest.raises(Exception, match="out of"):
        training.step({"i": np.array([1, 99])})
    assert training.updates == 0
    for name, value in training.state.items():
        np.testing.assert_array_equal(value, before[name])
    assert training.step({"i": np.array([1, 2])})["loss"] > 0
