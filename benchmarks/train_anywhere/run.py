"""100 steps of six modules in PyTorch, in onnxruntime alone, and in WebAssembly: docs/test_reports/train_anywhere.md.

python run.py --output results.json [--python PYTHON] [--minilm FOLDER] [--modules NAME ...] [--steps 100]

Another interpreter is one with numpy and onnxruntime alone. Without the folder of a pretrained MiniLM a small random
BERT takes its place. Node and its packages have to be installed (`make node`).
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from lightning_ort import export_training  # noqa: E402
from lightning_ort.onnx_export.training import runner  # noqa: E402
from lightning_ort.onnx_export.training.batch import fields_of  # noqa: E402
from tests.anywhere.modules import SIX  # noqa: E402

NODE = ROOT / "tests" / "anywhere" / "node"
ROWS = 16


class Watch(Callback):
    """The loss and the time of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.times: list[float] = []
        self._last = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Take the time since the last step began."""
        now = time.perf_counter()
        if self._last:
            self.times.append((now - self._last) * 1e3)
        self._last = now

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Keep the loss."""
        self.losses.append(outputs["loss"].detach())


def worst(values: Any, expected: Any) -> float:
    """The largest difference, relative where the expected value is above 1."""
    values, expected = np.asarray(values, np.float64), np.asarray(expected, np.float64)
    return float((np.abs(values - expected) / np.maximum(np.abs(expected), 1)).max()) if expected.size else 0.0


def relative(values: Any, expected: Any) -> float:
    """The largest relative difference."""
    return float((np.abs(np.asarray(values) - np.asarray(expected)) / np.abs(np.asarray(expected))).max())


def one(kind: Any, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train one module everywhere."""
    torch.manual_seed(0)
    args = {"path": options.minilm} if kind.__name__ == "MiniLM" and options.minilm else {}
    module = kind(**args)
    batches = [kind.batch(ROWS, seed) for seed in range(options.steps)]
    exported = export_training(module, batches[0], folder / kind.__name__)
    arrays: dict[str, np.ndarray] = {}
    for number, batch in enumerate(batches):
        arrays |= {f"{number}/{name}": value.numpy() for name, value in fields_of(batch).items()}
    runner.write_state(folder / "batches.safetensors", arrays, {})

    watch = Watch()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[watch], **quiet)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    losses = [loss.item() if isinstance(loss, Tensor) else loss for loss in watch.losses]
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    files = {name: (exported.path / name).stat().st_size for name in ("training.onnx", "state.safetensors")}
    frozen = exported.path / "frozen.data"
    result: dict[str, Any] = {
        "trained": exported.trained,
        "frozen": exported.frozen,
        "nodes": exported.nodes,
        "bytes": {**files, "frozen.data": frozen.stat().st_size if frozen.exists() else 0},
        "torch_ms": statistics.median(watch.times[5:]),
    }
    commands = {
        "python": [options.python, str(Path(__file__).with_name("steps.py"))],
        "web": ["node", "steps.mjs", "web"],
        "node": ["node", "steps.mjs", "node"],
    }
    for name, command in commands.items():
        output = folder / name
        done = [*command, str(exported.path), str(folder / "batches.safetensors"), str(output)]
        started = time.time()
        subprocess.run(done, cwd=NODE, check=True)
        found = json.loads(Path(f"{output}.json").read_text())
        after, _ = runner.read_state(f"{output}.safetensors")
        result[name] = {
            "ms": statistics.median(found["times"][5:]),
            "loss": relative(found["losses"], losses),
            "parameters": max(
                worst(after[key], value.detach().numpy()) for key, value in state.items() if key in after
            ),
        }
        if name == "python":
            result[name] |= {"first_s": found["first"] - started, "mb": found["mb"]}
    return result


def main() -> None:
    """Train them all, and print and write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--minilm")
    parser.add_argument("--modules", nargs="*")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": platform.machine(), "torch": torch.__version__, "modules": {}}
    for kind in SIX:
        if options.modules and kind.__name__ not in options.modules:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = results["modules"][kind.__name__] = one(kind, options, Path(folder))
        print(kind.__name__, json.dumps(found), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
