"""Whole fits in processes of their own, start-up included: of minutes, where inductor has time to pay, or of seconds.

``python benchmarks/whole_fits.py [MODULE:STEPS ...] [--variants stock off ort again hand fused] [--trainer ...]``.
``off`` is ``ort`` with ``engine="torch"``: its fused optimizer and retained memory alone; ``ort`` is the default
settings with empty caches, ``again`` the same with what ``ort`` has left in them. ``hand`` is a loop of seven lines
without bar, logger or checkpoints, ``fused`` the same with the fused optimizer (both for modules of ``small.py``).
``--trainer bare`` is a Trainer without bar, logger, checkpoints and summary; ``defaults`` one with nothing set, on a
(pseudo-)terminal. A settled step is one of the second half. Variants run one after the other, in the order given, in
each round: the figures of a machine that does something else meanwhile are worth nothing.
"""

import argparse
import importlib
import json
import logging
import os
import pty
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from harness import BARE, console, table_of

DEFAULT = ("ResNet:20000", "Llama:8000")  # five to seven minutes each on two cores
BY_HAND = {"hand": False, "fused": True}


def by_hand(module: Any, steps: int, fused: bool, times: list[float]) -> float:
    """Train a module with a loop of one's own; return the last loss."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)
    loader = module.train_dataloader()
    done = 0
    while True:
        for batch in loader:
            optimizer.zero_grad()
            loss = module.loss(batch)
            loss.backward()
            optimizer.step()
            done += 1
            if done == steps // 2:
                times.append(time.perf_counter())
            if done == steps:
                return float(loss)


def by_trainer(module: Any, variant: str, steps: int, settings: str, times: list[float]) -> Any:
    """Train a module with the Trainer, which is returned."""
    from lightning.pytorch import Callback, Trainer

    from lightning_ort import ORTStrategy

    class Half(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == steps // 2:
                times.append(time.perf_counter())

    strategy: Any = (
        "auto" if variant == "stock" else ORTStrategy(config={"engine": "torch"} if variant == "off" else {})
    )
    own: dict[str, Any] = BARE if settings == "bare" else {"default_root_dir": tempfile.mkdtemp()}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=Half(),
        **own,
    )
    trainer.fit(module)
    return trainer


def fit(name: str, variant: str, steps: int, settings: str) -> dict[str, Any]:
    """Fit a module in this process, and return what that took."""
    from lightning.pytorch import seed_everything

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    for place in ("small", "zoo", "held_out"):  # the last imports much
        if (kind := getattr(importlib.import_module(place), name, None)) is not None:
            break
    module = kind()
    times: list[float] = []
    found: dict[str, Any] = {}
    start, used = time.perf_counter(), time.process_time()
    if variant in BY_HAND:
        found["loss"] = by_hand(module, steps, BY_HAND[variant], times)
    else:
        trainer = by_trainer(module, variant, steps, settings, times)
        found["loss"] = trainer.callback_metrics["train_loss"].item()
        if (report := getattr(trainer.strategy, "report", None)) is not None:
            found["steps"] = [str(step) for step in report.steps]
            found["start_up"] = report.run.startup_seconds
    end = time.perf_counter()
    found["seconds"], found["used"] = end - start, time.process_time() - used
    found["settled"] = (end - times[0]) / (steps - steps // 2)
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def in_a_process(name: str, variant: str, steps: int, settings: str, caches: Path) -> dict[str, Any]:
    """Fit in a fresh process on a terminal, which keeps its caches in a folder."""
    kept = {"LIGHTNING_ORT_CACHE_DIR": caches / "ort", "TORCHINDUCTOR_CACHE_DIR": caches / "inductor"}
    caches.mkdir(exist_ok=True)
    output = caches / "found.json"
    command = [sys.executable, __file__, f"{name}:{steps}", "--variants", variant, "--trainer", settings]
    terminal, end = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while written := os.read(terminal, 1 << 16):
                shown.append(written)
        except OSError:  # its other end was closed
            pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    environment = {
        **os.environ,
        "TERM": "xterm",
        "COLUMNS": "100",
        **{key: os.fspath(path) for key, path in kept.items()},
    }
    ended = subprocess.run([*command, "--output", os.fspath(output)], env=environment, stdout=end, stderr=end)
    os.close(end)
    reader.join(5)
    os.close(terminal)
    if ended.returncode:
        sys.exit(b"".join(shown[-20:]).decode(errors="replace"))
    return json.loads(output.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def row(name: str, settings: str, variant: str, steps: int, fits: list[dict[str, Any]]) -> list[str]:
    """Return a row of the table: means of some fits."""
    mean = {key: statistics.mean(each[key] for each in fits) for key in ("seconds", "used", "settled", "peak", "loss")}
    start_up = statistics.mean(each.get("start_up", 0.0) for each in fits)
    per_step = (
        f"{1000 * mean[key] / count:.2f}" for key, count in (("seconds", steps), ("settled", 1), ("used", steps))
    )
    timed = "\n".join(fits[-1].get("steps") or ["-"])
    numbers = (f"{mean['seconds']:.1f}", f"{start_up:.1f}", *per_step, f"{mean['peak']:.0f}", f"{mean['loss']:.1e}")
    return [name, settings, variant, str(steps), *numbers, timed]


def main() -> None:
    """Print a table of all fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=DEFAULT, metavar="MODULE:STEPS")
    parser.add_argument("--variants", nargs="+", default=["off", "ort", "again"])
    parser.add_argument("--trainer", nargs="+", default=["bare"], choices=["bare", "defaults"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)  # of a single fit
    args = parser.parse_args()
    pairs = [(name, int(steps)) for name, _, steps in (module.partition(":") for module in args.modules)]
    if args.output is not None:
        ((name, steps),) = pairs
        args.output.write_text(json.dumps(fit(name, args.variants[0], steps, args.trainer[0])), encoding="utf-8")
        return
    columns = ("module", "Trainer", "variant", "steps", "fit s", "start-up s", "ms a step", "settled ms", "CPU ms")
    table = table_of("whole fits", [*columns, "peak MB", "last loss", "the step was timed"], [])
    for name, steps in pairs:
        plans = [(settings, variant) for settings in args.trainer for variant in args.variants]
        plans = [plan for plan in plans if plan[1] not in BY_HAND or plan[0] == args.trainer[0]]  # they have no Trainer
        found: dict[tuple[str, str], list[dict[str, Any]]] = {plan: [] for plan in plans}
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as caches:
                for settings, variant in plans:
                    made = in_a_process(name, variant, steps, settings, Path(caches) / settings)
                    found[settings, variant].append(made)
                    print(*row(name, settings, variant, steps, [made]), file=sys.stderr, flush=True)
        for (settings, variant), fits in found.items():
            table.add_row(*row(name, "-" if variant in BY_HAND else settings, variant, steps, fits))
    console(160).print(table)


if __name__ == "__main__":
    main()
