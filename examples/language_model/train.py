"""Train the same small GPT in four ways, and compare the whole runs, start-up included.

    python examples/language_model/train.py
    python examples/language_model/train.py --steps 1000 --rounds 1

Each run is a process of its own, and they take turns. All start from the same seed and see the same batches, so their
losses have to agree: the script exits with an error if they differ by more than 1e-3, relative, in the first 50 steps.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

from rich.console import Console
from rich.table import Table

TOLERANCE = 1e-3
COMPARED_STEPS = 50
VARIANTS = {
    "stock": "stock Lightning",
    "fused": "stock, fused optimizer",
    "torch": '"ort", not compiled',
    "ort": '"ort"',
}


def train(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train in one way, in this process."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

    import lightning_ort
    from data import StandardLibrarySource
    from model import GPT

    class Recorder(Callback):
        """Keeps the loss and the seconds of every training step."""

        def __init__(self) -> None:
            self.losses: list[float] = []
            self.seconds: list[float] = []

        def on_train_batch_start(self, *args: Any) -> None:
            self._start = time.perf_counter()

        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
            self.seconds.append(time.perf_counter() - self._start)
            self.losses.append(outputs["loss"].item())

    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    seed_everything(args.seed, verbose=False)
    recorder = Recorder()
    callbacks: list[Callback] = [recorder]
    strategy: Any = "auto"
    if variant == "fused":
        callbacks.append(lightning_ort.ORTOptimizer("adamw_torch_fused"))
    elif variant == "torch":
        strategy = lightning_ort.ORTStrategy(config={"engine": "torch"})
    elif variant == "ort":
        strategy = "ort"
    trainer = Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=1,
        max_steps=args.steps,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
        limit_val_batches=args.validation_batches,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(context=args.context), StandardLibrarySource(args.context, args.batch_size, args.seed))
    report = getattr(trainer.strategy, "report", None)
    return {
        "losses": recorder.losses,
        # the first steps compile and take turns
        "step": statistics.median(recorder.seconds[len(recorder.seconds) // 2 :]),
        "validation": trainer.callback_metrics["val_loss"].item(),
        "report": "" if report is None else report.to_text(),
        "threads": torch.get_num_threads(),
    }


def run(variant: str, options: list[str]) -> dict[str, Any]:
    """Train in one way in a process of its own; its time is that of the whole process."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, __file__, *options, "--only", variant], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{done.stderr}\n{VARIANTS[variant]} failed, see above.")
    return {**json.loads(done.stdout.splitlines()[-1]), "whole": seconds}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest relative difference of the first losses."""
    pairs = zip(one["losses"][:COMPARED_STEPS], other["losses"][:COMPARED_STEPS], strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


def table_of(runs: dict[str, list[dict[str, Any]]]) -> Table:
    """Return the comparison; it fits 80 columns."""
    table = Table("", title=f"a small GPT, {len(runs['stock'][0]['losses'])} steps")
    for column in ("whole run", "(spread)", "speed", "step", "val. loss"):
        table.add_column(column, justify="right", no_wrap=True)
    stock = statistics.median(each["whole"] for each in runs["stock"])
    for variant, each in runs.items():
        whole = [one["whole"] for one in each]
        table.add_row(
            VARIANTS[variant],
            f"{statistics.median(whole):.1f} s",
            f"{min(whole):.1f}-{max(whole):.1f}",
            f"{stock / statistics.median(whole):.2f}x",
            f"{1000 * statistics.median(one['step'] for one in each):.0f} ms",
            f"{each[0]['validation']:.4f}",
        )
    return table


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--validation-batches", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=VARIANTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.only:
        print(json.dumps(train(args.only, args)))
        return
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for number in range(args.rounds):
        for variant, name in VARIANTS.items():
            runs[variant].append(run(variant, sys.argv[1:]))
            print(f"round {number + 1} of {args.rounds}: {name}, {runs[variant][-1]['whole']:.1f} s", flush=True)
    console = Console(width=80)
    console.print(table_of(runs))
    threads = runs["stock"][0]["threads"]
    print(f"Whole processes, imports and start-up included, {threads} threads. The losses of the first steps differ by")
    largest = max(apart(runs["stock"][0], one) for each in runs.values() for one in each)
    print(f'at most {largest:.0e}, relative. What ran where under "ort":\n\n{runs["ort"][-1]["report"]}')
    if not largest <= TOLERANCE:  # also catches nan
        raise SystemExit(f"The losses differ by {largest:.1e}; at most {TOLERANCE:.0e} is allowed.")


if __name__ == "__main__":
    main()
