"""Whole fits with a default Trainer, start-up included, against what can be done by hand.

``python benchmarks/by_hand.py [MODEL[:EPOCHS] ...] [--variants ...] [--rounds N]``. A model is one of those of
``MODELS``, or a module of ``zoo.py``, ``small.py`` or ``held_out.py``. Each fit is a process of its own, on a
terminal, with the progress bar, logger and checkpoints that a Trainer has by default; the variants take turns, and
every second round goes backwards. By hand, each variant adds to the one before: a fused optimizer, jemalloc as
malloc, torch.compile of the child modules. Short fits before fill the caches of compilers; with ``--cold`` they are
empty in the first round. ``hand`` and ``hand-fused`` are loops of seven lines, for ``EVERYDAY`` modules; with
``--bare`` the Trainer has no bar, logger, checkpoints and summary. ``python benchmarks/by_hand.py ResNet:200 Llama:80
--variants torch ort --cold --bare --rounds 1`` are fits of five to seven minutes, where inductor has time to pay: its
output is a ``whole-fits`` of the results.

``python benchmarks/by_hand.py | tee benchmarks/results/$(date +%F)-by-hand.txt && make figures`` makes the table of
README.md, in about 20 minutes. Figures of a machine that does something else meanwhile are worth nothing.
"""

import argparse
import ctypes.util
import functools
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
from typing import Any, NamedTuple

from harness import BARE, console, table_of

EXAMPLES = Path(__file__).parent.parent / "examples"


class Model(NamedTuple):
    """What is fitted, for about ten seconds of stock Lightning on two cores."""

    path: str  # module:class
    epochs: int
    batches: int = 100  # of an epoch, where the data is drawn


MODELS = {
    "MLP": Model("small:Layers3x64", 80),
    "CNN": Model("digits:CNN", 100),
    "LSTM": Model("zoo:LSTM", 6),
    "GPT": Model("zoo:GPT", 4, 8),
    "autoencoder": Model("zoo:Autoencoder", 20),
}


EVERYDAY = ("Columns", "DigitsCNN", "GCN", "ShortLSTM", "PolicyGradient")


class Variant(NamedTuple):
    """How it is fitted."""

    ours: dict[str, Any] | None = None  # settings of our strategy
    fused: bool = False
    jemalloc: bool = False
    compiles: bool = False
    precision: str | None = None
    loop: bool = False  # of one's own, without a Trainer


VARIANTS = {
    "stock": Variant(),
    "fused": Variant(fused=True),
    "jemalloc": Variant(fused=True, jemalloc=True),
    "compile": Variant(fused=True, jemalloc=True, compiles=True),
    "ort": Variant({}),
    "bf16": Variant(fused=True, jemalloc=True, precision="bf16-mixed"),
    "ort@bf16": Variant({}, precision="bf16-mixed"),
    "torch": Variant({"engine": "torch"}),
    "hand": Variant(loop=True),
    "hand-fused": Variant(fused=True, loop=True),
}
DEFAULT = ("stock", "fused", "jemalloc", "compile", "ort", "bf16", "ort@bf16")


def model_of(name: str) -> Model:
    """Return a model of the table, or a module of another script; those of the zoo have epochs of 100 batches."""
    if name in MODELS:
        return MODELS[name]
    files = {"held_out": ("ResNet", "Llama"), "small": EVERYDAY}
    return Model(f"{next((file for file, names in files.items() if name in names), 'zoo')}:{name}", 1)


def by_hand(module: Any, epochs: int, ends: list[float]) -> tuple[int, float]:
    """Train a module with a loop of one's own; return the number of steps and the last loss."""
    optimizer, loader, steps = module.configure_optimizers(), module.train_dataloader(), 0
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = module.loss(batch)
            loss.backward()
            optimizer.step()
            steps += 1
        ends.append(time.perf_counter())
    return steps, float(loss)


def fit(name: str, variant: Variant, epochs: int, bare: bool) -> dict[str, Any]:
    """Fit in this process, and return what that took."""
    sys.path.append(os.fspath(EXAMPLES / "digits"))
    import torch
    import zoo
    from lightning.pytorch import Callback, Trainer, seed_everything

    import lightning_ort

    class Epochs(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            ends.append(time.perf_counter())

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    file, _, kind = model_of(name).path.partition(":")
    zoo.BATCHES = model_of(name).batches
    source = __import__(file)
    if variant.fused:
        for optimizer in (torch.optim.AdamW, torch.optim.Adam):
            optimizer.__init__ = functools.partialmethod(optimizer.__init__, fused=True)  # type: ignore[method-assign]
    module = getattr(source, kind)()
    if variant.compiles:  # torch 2.13 raises an error where the whole of a module that logs is compiled
        for child in module.children():
            child.compile()
    data = source.Digits() if file == "digits" else None
    ends: list[float] = []
    report = None
    with tempfile.TemporaryDirectory() as folder:
        own: dict[str, Any] = BARE if bare else {}
        trainer = Trainer(
            accelerator="cpu",
            strategy="auto" if variant.ours is None else lightning_ort.ORTStrategy(config=variant.ours),
            precision=variant.precision,
            max_epochs=epochs,
            callbacks=[Epochs()],
            default_root_dir=folder,
            **own,
        )
        start = time.perf_counter()
        if variant.loop:
            steps, loss = by_hand(module, epochs, ends)
        else:
            trainer.fit(module, data)
            steps, loss = trainer.global_step, trainer.callback_metrics["train_loss"].item()
            report = getattr(trainer.strategy, "report", None)
        found: dict[str, Any] = {"seconds": time.perf_counter() - start, "steps": steps, "loss": loss}
    half = (len(ends) - 1) // 2
    if len(ends) > 1:  # of the later half of the epochs
        found["settled"] = 1000 * (ends[-1] - ends[half]) / (len(ends) - 1 - half) / (found["steps"] / epochs)
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found["report"] = [] if report is None else [report.run.verdict, *map(str, report.run.steps)]
    return found


def in_a_process(name: str, variant: str, epochs: int, caches: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fit in a fresh process on a terminal, which keeps its caches in a folder."""
    kept = {"LIGHTNING_ORT_CACHE_DIR": caches / "ort", "TORCHINDUCTOR_CACHE_DIR": caches / "inductor"}
    environment = {**os.environ, **{key: os.fspath(path) for key, path in kept.items()}, "COLUMNS": "100"}
    if VARIANTS[variant].jemalloc:
        environment["LD_PRELOAD"] = args.jemalloc
    found = caches / "found.json"
    command = [sys.executable, __file__, f"{name}:{epochs}", "--variants", variant, "--found", os.fspath(found)]
    command += ["--bare"] * args.bare
    ours, theirs = pty.openpty()
    shown: list[bytes] = []
    with subprocess.Popen(command, env=environment, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        reader = threading.Thread(target=_drain, args=(ours, shown))
        reader.start()
    reader.join()
    os.close(ours)
    if process.returncode:
        sys.exit(b"".join(shown[-20:]).decode(errors="replace"))
    return json.loads(found.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _drain(terminal: int, shown: list[bytes]) -> None:
    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:  # the last process that wrote to it has ended
            return
        if not read:
            return
        shown.append(read)


def measure(name: str, epochs: int, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return what each fit of a model found, by variant."""
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in args.variants}
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder)
        for variant in args.variants:
            if not args.cold and (VARIANTS[variant].compiles or VARIANTS[variant].ours is not None):
                in_a_process(name, variant, 1, caches, args)
        for number in range(args.rounds):
            for variant in args.variants[:: -1 if number % 2 else 1]:
                found[variant].append(in_a_process(name, variant, epochs, caches, args))
                print(name, variant, f"{found[variant][-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
    return found


def rows_of(name: str, found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Return the rows of the table about a model."""
    rows = []
    for variant, fits in found.items():
        mean = statistics.fmean(fit["seconds"] for fit in fits)
        settled = [fit["settled"] for fit in fits if "settled" in fit]
        rows.append(
            [
                name,
                variant,
                str(fits[0]["steps"]),
                f"{mean:.2f}",
                " ".join(f"{fit['seconds']:.2f}" for fit in fits),
                f"{statistics.fmean(settled):.3f}" if settled else "-",
                f"{statistics.fmean(fit['peak'] for fit in fits):.0f}",
                f"{fits[-1]['loss']:.3g}",
                "\n".join(fits[-1]["report"]) or "-",
            ]
        )
    return rows


def main() -> None:
    """Print a table of the fits of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="*", default=list(MODELS), metavar="MODEL[:EPOCHS]")
    add("--variants", nargs="+", choices=VARIANTS, default=list(DEFAULT))
    add("--rounds", type=int, default=2)
    add("--cold", action="store_true", help="fill no cache before the first round")
    add("--bare", action="store_true", help="no bar, logger, checkpoints and summary")
    add("--jemalloc", default=ctypes.util.find_library("jemalloc"), help="libjemalloc.so.2 (default: the system's)")
    add("--found", type=Path, help=argparse.SUPPRESS)  # of a single fit
    args = parser.parse_args()
    asked = (each.partition(":") for each in args.models)
    pairs = [(name, int(epochs or model_of(name).epochs)) for name, _, epochs in asked]
    if args.found is not None:
        ((name, epochs),) = pairs
        args.found.write_text(json.dumps(fit(name, VARIANTS[args.variants[0]], epochs, args.bare)), encoding="utf-8")
        return
    if not args.jemalloc and any(VARIANTS[variant].jemalloc for variant in args.variants):
        sys.exit("There is no jemalloc: install libjemalloc2, name one with --jemalloc, or leave these variants out.")
    columns = ("steps", "fit s", "each", "ms a settled step", "peak MB", "last loss")
    out = console(180)
    for name, epochs in pairs:
        table = table_of("whole fits, by hand and with ort", ["model", "variant"], columns)
        table.add_column("what the report says of the last")
        for row in rows_of(name, measure(name, epochs, args)):
            table.add_row(*row)
        out.print(table)


if __name__ == "__main__":
    main()
