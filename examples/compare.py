"""Train projects of LightningCLI under Lightning's own strategy and under the one they configure, and compare the two.

    python examples/compare.py examples/gan/config.yaml examples/minilm/lora.yaml --batches 30

Each project is the folder of its configuration, with a `main.py`. Both runs start from the same seed and see the same
batches, so their losses have to agree: the script exits with an error if they do not, or if ONNX Runtime ran nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

TOLERANCE = 1e-3


class Recorder(Callback):
    """Writes the loss and the seconds of every batch, and figures of the report, to a file."""

    def __init__(self, output: str) -> None:
        self.output = output
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(trainer.callback_metrics["train_loss"].item())

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        recorded: dict[str, Any] = {"losses": self.losses, "seconds": self.seconds}
        if (report := getattr(trainer.strategy, "report", None)) is not None:
            recorded |= {"share": report.ort_node_fraction_in_use, "runs": report.ort_runs}
            recorded["engine"] = next((step.engine for step in report.steps if step.name == "training_step"), None)
        if trainer.is_global_zero:
            Path(self.output).write_text(json.dumps(recorded), encoding="utf-8")


def train(config: Path, batches: int, *options: str) -> dict[str, Any]:
    """Run a project's ``main.py`` as a person would, for a few batches, and return what was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "recorded.json"
        command = [
            *(sys.executable, os.fspath(config.parent / "main.py"), "fit", "--config", os.fspath(config)),
            *(f"--trainer.limit_train_batches={batches}", "--trainer.max_epochs=1", "--trainer.limit_val_batches=0"),
            *("--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"),
            *("--trainer.enable_model_summary=false", f"--trainer.default_root_dir={folder}"),
            *("--trainer.callbacks+=compare.Recorder", f"--trainer.callbacks.output={output}", *options),
        ]
        path = os.pathsep.join([os.fspath(Path(__file__).resolve().parent), *filter(None, [os.getenv("PYTHONPATH")])])
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}\n{config} failed, see above.")
        return json.loads(output.read_text(encoding="utf-8"))


def compare(config: Path, batches: int) -> None:
    """Print one line about a project, or exit with an error."""
    trainer = yaml.safe_load(config.read_text(encoding="utf-8"))["trainer"]
    stock = train(config, batches, f"--trainer.strategy={'ddp' if trainer.get('devices', 1) > 1 else 'auto'}")
    # with these few batches compiling cannot pay for itself, so do not wait until it can
    ours = train(config, batches, "--trainer.strategy.init_args.config.start=now")
    pairs = list(zip(stock["losses"], ours["losses"], strict=True))
    apart = max(abs(a - b) / abs(a) for a, b in pairs)
    # the first batches compile and take turns
    stock_ms, our_ms = (1000 * statistics.median(run["seconds"][-batches // 3 :]) for run in (stock, ours))
    name = trainer["strategy"]["class_path"].removeprefix("lightning_ort.")
    print(
        f"{config.parent.name}/{config.name}: stock {stock_ms:.1f} ms a batch, {name} {our_ms:.1f} ms; "
        f"loss {stock['losses'][0]:.4f} -> {stock['losses'][-1]:.4f}, at most {apart:.0e} apart, relative; "
        f"{ours['runs']} runs of regions on ONNX Runtime, in the end {ours['share']:.0%} of the compute nodes; "
        f"continues with {ours['engine'] or 'regions as measured'}",
        flush=True,
    )
    if not apart <= TOLERANCE:  # also catches nan
        raise SystemExit(f"{config}: the losses differ by {apart:.1e}; at most {TOLERANCE:.0e} is allowed.")
    if not ours["runs"]:
        raise SystemExit(f"{config}: nothing ran on ONNX Runtime.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+", metavar="CONFIG")
    parser.add_argument("--batches", type=int, default=24)
    args = parser.parse_args()
    for config in args.configs:
        compare(config.resolve(), args.batches)


if __name__ == "__main__":
    main()
