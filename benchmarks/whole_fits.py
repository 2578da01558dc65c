"""Whole fits of minutes, start-up included: where inductor has time to pay.

``python benchmarks/whole_fits.py [MODULE:STEPS ...] [--variants stock off ort again]``. Each fit is its own process.
``off`` is ``ort`` with ``engine="torch"``: its fused optimizer and retained memory alone; ``ort`` is the default
settings with empty caches, ``again`` the same with what ``ort`` has left in them. Variants run one after the other, in
the order given: the figures of a machine that does something else meanwhile are worth nothing.
"""

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from harness import console, table_of

DEFAULT = ("ResNet:20000", "Llama:8000")  # five to seven minutes each on two cores


def fit(name: str, variant: str, steps: int) -> dict[str, Any]:
    """Fit a module of the zoo in this process, and return what that took."""
    import held_out
    import zoo
    from lightning.pytorch import Trainer, seed_everything

    import lightning_ort

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    module = {kind.__name__: kind for kind in (*zoo.MODULES, *held_out.MODULES)}[name]()
    config = {"engine": "torch"} if variant == "off" else {}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy="auto" if variant == "stock" else lightning_ort.ORTStrategy(config=config),
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(module)
    found: dict[str, Any] = {"seconds": time.perf_counter() - start}
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found["loss"] = trainer.callback_metrics["train_loss"].item()
    if (report := getattr(trainer.strategy, "report", None)) is not None:
        found["steps"] = [str(step) for step in report.steps]
        found["start_up"] = report.run.startup_seconds
    return found


def in_a_process(name: str, variant: str, steps: int, caches: Path) -> dict[str, Any]:
    """Fit in a fresh process, which keeps its caches in a folder."""
    kept = {"LIGHTNING_ORT_CACHE_DIR": caches / "ort", "TORCHINDUCTOR_CACHE_DIR": caches / "inductor"}
    output = caches / "found.json"
    command = [sys.executable, __file__, f"{name}:{steps}", "--variants", variant, "--output", os.fspath(output)]
    subprocess.run(command, env={**os.environ, **{key: os.fspath(path) for key, path in kept.items()}}, check=True)
    return json.loads(output.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def main() -> None:
    """Print a table of all fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=DEFAULT, metavar="MODULE:STEPS")
    parser.add_argument("--variants", nargs="+", default=["off", "ort", "again"])
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)  # of a single fit
    args = parser.parse_args()
    pairs = [(name, int(steps)) for name, _, steps in (module.partition(":") for module in args.modules)]
    if args.output is not None:
        ((name, steps),) = pairs
        args.output.write_text(json.dumps(fit(name, args.variants[0], steps)), encoding="utf-8")
        return
    columns = ("module", "variant", "steps", "fit s", "start-up s", "ms a step", "peak MB", "last loss")
    table = table_of("whole fits", [*columns, "the step was timed"], [])
    for name, steps in pairs:
        with tempfile.TemporaryDirectory() as caches:
            for variant in args.variants:
                found = in_a_process(name, variant, steps, Path(caches))
                timed = "\n".join(found.get("steps") or ["-"])
                seconds = found["seconds"]
                numbers = (f"{seconds:.1f}", f"{found.get('start_up', 0.0):.1f}", f"{1000 * seconds / steps:.2f}")
                table.add_row(
                    name, variant, str(steps), *numbers, f"{found['peak']:.0f}", f"{found['loss']:.1e}", timed
                )
    console(140).print(table)


if __name__ == "__main__":
    main()
