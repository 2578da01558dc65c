"""Training steps that are recorded: what a replay saves, what engines make of it, whether bits are equal.

``python benchmarks/recordings.py [MODULE ...] [--steps N] [--threads N] [--inductor] [--seconds N]``: the modules of
``zoo.py`` and ``held_out.py``, each in two fits of a process of its own: with ``engine="torch"`` and with
``engine="recorded"``, which both have the fused optimizer and the retained memory; their states are compared. At the
end of the second, one batch runs in turns as the step itself (forward and backward pass), as a replay by PyTorch's
interpreter, by ONNX Runtime, whose regions are placed as in a fit, and with ``--inductor`` by that: medians of 12
rounds. "Recording" are the seconds of the steps that were recorded, beyond those that they take anyhow; others are
those of compiling.
"""

import argparse
import functools
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
from harness import BARE, console, printed_by, table_of
from lightning.pytorch import Callback, Trainer, seed_everything

ROUNDS, LEAST = 12, 0.03  # seconds of each way in each round


class Turns(Callback):
    """Times the last step in all ways, in turns."""

    def __init__(self, engines: list[str]) -> None:
        self.engines = engines
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Time it."""
        if trainer.global_step < trainer.max_steps or self.found:
            return
        from lightning_ort.recording.replay import flatten

        step = trainer.strategy._capture.training
        if (last := step.recorded.last) is None:
            return
        tensors: list[Any] = []
        flatten((batch, batch_idx), tensors)
        replay, ways, seconds = last[0].replay, {}, {}

        def unchanged() -> None:
            for parameter in module.parameters():
                parameter.grad = None
            result = step._user.call(batch, batch_idx)
            (result["loss"] if isinstance(result, dict) else result).backward()

        ways["torch"], ways["recorded"] = unchanged, lambda: replay(tensors)
        for engine in self.engines:
            start = time.perf_counter()
            try:
                made = replay.on(functools.partial(step._compile_recording, engine), tensors)
            except Exception as error:
                self.found[engine] = str(error)
                continue
            ways[engine], seconds[engine] = functools.partial(made, tensors), time.perf_counter() - start
        took: dict[str, list[float]] = {name: [] for name in ways}
        torch.set_grad_enabled(True)
        for _ in range(ROUNDS):
            for name, way in ways.items():
                way()
                begin, runs = time.perf_counter(), 0
                while time.perf_counter() - begin < LEAST or runs < 2:
                    way()
                    runs += 1
                took[name].append((time.perf_counter() - begin) / runs)
        graphs = trainer.strategy.report.graphs
        nodes = sum(graph.num_nodes for graph in graphs), sum(graph.num_ort_nodes for graph in graphs)
        self.found |= {"seconds": seconds, "calls": len(replay._program.calls), "nodes": nodes}
        self.found["ms"] = {name: 1000 * statistics.median(own) for name, own in took.items()}


def fit(name: str, steps: int, threads: int, engines: list[str]) -> dict[str, Any]:
    """Fit twice in this process."""
    import held_out
    import zoo

    from lightning_ort import ORTStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    kind = next(kind for kind in (*zoo.MODULES, *held_out.MODULES) if kind.__name__ == name)
    states, turns = [], Turns(engines)
    for settings in ({"engine": "torch"}, {"engine": "recorded", "start": "now"}):
        seed_everything(0, verbose=False)
        module = kind()
        with tempfile.TemporaryDirectory() as folder:
            strategy = ORTStrategy(config={**settings, "cache_dir": folder})
            callbacks = [turns] if settings["engine"] == "recorded" else []
            options = {"max_steps": steps, "max_epochs": -1, "callbacks": callbacks, **BARE}
            Trainer(accelerator="cpu", strategy=strategy, **options).fit(module)
        states.append(module.state_dict())
    run = strategy.report.run
    notes = [str(note.reason) for note in strategy.report.notes if note.where == "training_step"]
    return {
        "why": next((note for note in notes if "not recorded" in note), "it was not replayed in the last step"),
        "startup": run.startup_seconds - run.trial_seconds,
        "equal": all(torch.equal(one, other) for one, other in zip(*(one.values() for one in states), strict=True)),
        **turns.found,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--steps", type=int, default=60, help="of each fit")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--seconds", type=int, default=300, help="for one process")
    parser.add_argument("--only")
    args = parser.parse_args()
    engines = ["ort", *["inductor"] * args.inductor]
    if args.only:
        print(json.dumps(fit(args.only, args.steps, args.threads, engines)))
        return
    import held_out
    import zoo

    names = args.modules or [kind.__name__ for kind in (*zoo.MODULES, *held_out.MODULES)]
    labels = {"ort": "ONNX Runtime", "inductor": "inductor"}
    numbers = ["calls", "recording, s", "unchanged, ms", "replayed, ms", "gain"]
    numbers += [f"{labels[engine]}, {unit}" for engine in engines for unit in ("s", "ms")] + ["nodes on ONNX Runtime"]
    table = table_of(f"training steps, {args.threads} threads", ["module", "bits equal"], numbers)
    gains: dict[str, list[float]] = {name: [] for name in ("recorded", *engines)}
    for name in names:
        command = [sys.executable, __file__, "--only", name, "--steps", str(args.steps)]
        command += ["--threads", str(args.threads), *["--inductor"] * args.inductor]
        one = printed_by(command, args.seconds)
        if isinstance(one, str) or "ms" not in one:
            table.add_row(name, one if isinstance(one, str) else one["why"])
            continue
        ms = one["ms"]
        for engine, own in gains.items():
            own.append(ms["torch"] / ms.get(engine, ms["recorded"]))
        cells = [f"{one['startup']:.2f}", f"{ms['torch']:.2f}", f"{ms['recorded']:.2f}"]
        cells.append(f"{ms['torch'] / ms['recorded']:.2f}")
        for engine in engines:
            cells += [f"{one['seconds'][engine]:.1f}", f"{ms[engine]:.2f}"] if engine in ms else ["-", one[engine][:40]]
        ran, on_ort = one["nodes"]
        table.add_row(name, "yes" if one["equal"] else "no", str(one["calls"]), *cells, f"{on_ort} of {ran}")
    console(170).print(table)
    means = (f"{name} {statistics.geometric_mean(own):.3f}x" for name, own in gains.items() if own)
    print(f"geometric means of the gain over the unchanged step: {', '.join(means)}")


if __name__ == "__main__":
    main()
