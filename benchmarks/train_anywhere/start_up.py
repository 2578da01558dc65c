"""From the start of a process to the end of its first step, peak memory and time of a step: runner and stock Lightning.

python start_up.py [--page] [--python PYTHON] [--rounds 5] [--steps 300]

The module is tests/anywhere/modules.py's TabularMLP, 32 rows. Processes are new in each round; medians are printed, and
with ``--page`` written into docs/test_reports/train_anywhere.md. Another interpreter needs numpy and onnxruntime alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from page import header, onnxruntime_of, written

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from lightning_ort import export_training  # noqa: E402
from lightning_ort.onnx_export.training import runner  # noqa: E402
from tests.anywhere.modules import TabularMLP  # noqa: E402

LIGHTNING = """
import json, sys, time
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader
sys.path.insert(0, sys.argv[1])
from tests.anywhere.modules import TabularMLP

class Watch(Callback):
    ends = []
    def on_train_batch_end(self, *_):
        self.ends.append(time.time())

torch.manual_seed(0)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
batches = [TabularMLP.batch(32, seed) for seed in range(int(sys.argv[3]))]
trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=[Watch()], **quiet)
trainer.fit(TabularMLP(), DataLoader(batches, batch_size=None))
ends = Watch.ends
times = [(after - before) * 1e3 for before, after in zip(ends, ends[1:])]
with open("/proc/self/status") as status:
    mb = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
json.dump({"first": ends[0], "times": times, "mb": mb}, open(sys.argv[2] + ".json", "w"))
"""


def main() -> None:
    """Run both some times, in turn, and print and write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    about = header()
    print(about, flush=True)
    found: dict[str, list[tuple[float, float, float]]] = {"runner": [], "Lightning": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        export_training(TabularMLP(), TabularMLP.batch(32, 0), folder / "exported")
        batches = [TabularMLP.batch(32, seed) for seed in range(options.steps)]
        arrays = {f"{i}/{key}": value.numpy() for i, batch in enumerate(batches) for key, value in batch.items()}
        runner.write_state(folder / "batches.safetensors", arrays, {})
        steps = str(Path(__file__).with_name("steps.py"))
        commands = {
            "runner": [options.python, steps, str(folder / "exported"), str(folder / "batches.safetensors")],
            "Lightning": [sys.executable, "-c", LIGHTNING, str(ROOT)],
        }
        for _ in range(options.rounds):
            for kind, command in commands.items():
                more = [str(folder / "out"), *([str(options.steps)] if kind == "Lightning" else [])]
                started = time.time()
                subprocess.run([*command, *more], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
                process = json.loads((folder / "out.json").read_text())
                times = process["times"]
                found[kind].append(
                    (process["first"] - started, process["mb"], statistics.median(times[min(20, len(times) // 2) :]))
                )
    runtime = onnxruntime_of(options.python)
    lines = [
        "From the start of a process to the end of its first step, peak memory, and a settled step, made by",
        f"`benchmarks/train_anywhere/start_up.py`: TabularMLP, {options.steps} steps of 32 rows, medians of",
        f"{options.rounds} processes each; {about}.",
        "",
        "| | first step ends after | peak memory | step |",
        "|---|---|---|---|",
    ]
    for kind, rounds in found.items():
        first, memory, step = (statistics.median(values) for values in zip(*rounds, strict=True))
        name = f"runner, onnxruntime {runtime}" if kind == "runner" else "stock Lightning"
        lines.append(f"| {name} | {first:.2f} s | {memory:.0f} MB | {step:.3f} ms |")
    print("\n".join(lines))
    if options.page:
        written("start_up.py", lines)


if __name__ == "__main__":
    main()
