"""100 steps of six modules in PyTorch, in onnxruntime alone, in WebAssembly, and there and back again.

python run.py [--page [differences] [times]] [--json FILE] [--python PYTHON ...] [--minilm FOLDER] [--modules NAME ...]
              [--steps 100]

Other interpreters need numpy and onnxruntime alone; the first is timed, and all are compared. Without the folder of a
pretrained MiniLM a small random BERT takes its place. Node and its packages have to be installed (`make node`). With
``--page`` the tables of docs/test_reports/train_anywhere.md are written, or those of them that are named.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from page import header, onnxruntime_of, written
from torch import Tensor
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from lightning_ort import export_training, load_training_state  # noqa: E402
from lightning_ort.onnx_export.training import runner  # noqa: E402
from lightning_ort.onnx_export.training.batch import fields_of  # noqa: E402
from tests.anywhere.modules import SIX  # noqa: E402

NODE = ROOT / "tests" / "anywhere" / "node"
ROWS = 16
ABOUT = ("trained", "frozen", "nodes", "bytes", "torch_ms")  # of a module; then where it was trained
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


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


class Work:
    """A module of a class, its batches, and a folder for files."""

    def __init__(self, kind: Any, options: argparse.Namespace, folder: Path) -> None:
        self.kind, self.folder, self.pythons = kind, folder, options.python
        self.args = {"path": options.minilm} if kind.__name__ == "MiniLM" and options.minilm else {}
        self.batches = [kind.batch(ROWS, seed) for seed in range(options.steps)]

    def module(self) -> LightningModule:
        """Make the module, with the same weights each time."""
        torch.manual_seed(0)
        return self.kind(**self.args)

    def fit(self, module: LightningModule, batches: Sequence[Any], path: Path | None = None) -> tuple[Watch, Trainer]:
        """Train with a stock Trainer."""
        watch = Watch()
        settings: dict[str, Any] = dict.fromkeys(QUIET, False)
        trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[watch], **settings)
        trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=path and str(path))
        watch.losses = [loss.item() if isinstance(loss, Tensor) else loss for loss in watch.losses]
        return watch, trainer

    def away(self, command: Sequence[str], exported: Path, batches: Sequence[Any], output: Path) -> dict[str, Any]:
        """Train an exported folder by a command, which writes what it found and the state beside ``output``."""
        arrays = {
            f"{number}/{name}": value.numpy()
            for number, batch in enumerate(batches)
            for name, value in fields_of(batch).items()
        }
        file = output.with_name("batches.safetensors")
        runner.write_state(file, arrays, {})
        started = time.time()
        subprocess.run([*command, str(exported), str(file), str(output)], cwd=NODE, check=True)
        return json.loads(Path(f"{output}.json").read_text()) | {"started": started}


def worst(values: Any, expected: Any) -> float:
    """The largest difference, relative where the expected value is above 1."""
    values, expected = np.asarray(values, np.float64), np.asarray(expected, np.float64)
    return float((np.abs(values - expected) / np.maximum(np.abs(expected), 1)).max()) if expected.size else 0.0


def relative(values: Any, expected: Any) -> float:
    """The largest relative difference."""
    return float((np.abs(np.asarray(values) - np.asarray(expected)) / np.abs(np.asarray(expected))).max())


def state_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Parameters and buffers."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach().numpy() for name, value in named.items()}


def typical(times: Sequence[float]) -> float:
    """The median of settled steps."""
    return statistics.median(times[min(5, len(times) // 2) :])


def one(work: Work) -> dict[str, Any]:
    """Train one module everywhere."""
    module = work.module()
    exported = export_training(module, work.batches[0], work.folder / "exported")
    watch, _ = work.fit(module, work.batches)
    state = state_of(module)
    files = {name: (exported.path / name).stat().st_size for name in ("training.onnx", "state.safetensors")}
    frozen = exported.path / "frozen.data"
    result: dict[str, Any] = {
        "trained": exported.trained,
        "frozen": exported.frozen,
        "nodes": exported.nodes,
        "bytes": {**files, "frozen.data": frozen.stat().st_size if frozen.exists() else 0},
        "torch_ms": typical(watch.times),
    }
    steps = str(Path(__file__).with_name("steps.py"))
    commands = {f"onnxruntime {onnxruntime_of(python)}": [python, steps] for python in work.pythons}
    commands |= {"web": ["node", "steps.mjs", "web"], "node": ["node", "steps.mjs", "node"]}
    for name, command in commands.items():
        output = work.folder / name
        found = work.away(command, exported.path, work.batches, output)
        after, _ = runner.read_state(f"{output}.safetensors")
        result[name] = {
            "ms": typical(found["times"]),
            "loss": relative(found["losses"], watch.losses),
            "parameters": max(worst(after[key], value) for key, value in state.items() if key in after),
        }
    result["there and back"] = there_and_back(work, watch.losses, state)
    return result


def there_and_back(work: Work, losses: Sequence[float], state: Mapping[str, np.ndarray]) -> dict[str, float]:
    """A third of the steps in PyTorch, one in WebAssembly, one in PyTorch: compared with never having left it."""
    third = len(work.batches) // 3
    module, folder = work.module(), work.folder / "there"
    watch, trainer = work.fit(module, work.batches[:third])
    export_training(module, work.batches[0], folder, optimizer=trainer.optimizers[0])
    found = work.away(["node", "steps.mjs", "web"], folder, work.batches[third : 2 * third], work.folder / "back")
    back = work.module()
    path = load_training_state(back, work.folder / "back.safetensors").checkpoint(work.folder / "back.ckpt")
    again, _ = work.fit(back, work.batches[2 * third :], path)
    after = state_of(back)
    return {
        "loss": relative([*watch.losses, *found["losses"], *again.losses], losses),
        "parameters": max(worst(after[key], value) for key, value in state.items()),
    }


def places_of(results: Mapping[str, Any]) -> dict[str, str]:
    """Where the modules were trained: what it is called in the results, and in tables."""
    places = list(next(iter(results.values())))[len(ABOUT) :]
    return {place: {"web": "WebAssembly", "node": "Node"}.get(place, place) for place in places}


def differences(results: Mapping[str, Any]) -> list[str]:
    """Sizes, and how far each place is from PyTorch, as Markdown."""
    places = places_of(results)
    named = [f"{name}: loss, parameters" for name in places.values()]
    rows = []
    for name, found in results.items():
        sizes = [size / 1e3 for size in found["bytes"].values()]
        size = f"{sizes[0]:.0f} kB, {sizes[1]:.0f} kB" + (f", frozen {sizes[2] / 1e3:.0f} MB" if sizes[2] else "")
        frozen = f" ({found['frozen'] / 1e6:.1f} million frozen)" if found["frozen"] else ""
        pairs = [f"{found[place]['loss']:.0e}, {found[place]['parameters']:.0e}" for place in places]
        rows.append([name, f"{found['trained']:,}{frozen}", f"{found['nodes']:,}", size, *pairs])
    return table(["module", "trained parameters", "nodes", "model, state", *named], rows)


def times(results: Mapping[str, Any]) -> list[str]:
    """Times of steps, as Markdown."""
    places = {place: name for place, name in places_of(results).items() if place != "there and back"}
    rows = [
        [name, *(f"{each:.2f}" for each in (found["torch_ms"], *(found[place]["ms"] for place in places)))]
        for name, found in results.items()
    ]
    return table(["module", *(f"{name}, ms" for name in ("Trainer", *places.values()))], rows)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *rows)]


PARTS = {"differences": differences, "times": times}


def main() -> None:
    """Train them all, and print and write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", nargs="*", choices=PARTS)
    parser.add_argument("--python", nargs="+", default=[sys.executable])
    parser.add_argument("--minilm")
    parser.add_argument("--modules", nargs="*")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    about = header(NODE)
    print(about, flush=True)
    results: dict[str, Any] = {}
    for kind in SIX:
        if options.modules and kind.__name__ not in options.modules:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = results[kind.__name__] = one(Work(kind, options, Path(folder)))
        print(kind.__name__, json.dumps(found), flush=True)
    for part, made in PARTS.items():
        lines = [f"{part.capitalize()}, {options.steps} steps of {ROWS} rows; {about}.", "", *made(results)]
        print("\n".join(lines), end="\n\n")
        if options.page is not None and part in (options.page or PARTS):
            written(f"run.py, {part}", lines)
    if options.json is not None:
        options.json.write_text(json.dumps({"about": about, "modules": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
