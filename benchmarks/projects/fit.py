"""Train one row once and write what happened: ``python fit.py ROW --strategy ort --steps 100 --output fit.json``.

Runs in the environment of the row's group, in a process of its own. Packages that build their Trainer themselves get
the strategy's name; all Trainers are watched through their ``fit``.
"""

import argparse
import functools
import importlib
import importlib.metadata
import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cpu_torchvision
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

STRATEGIES = {"stock": {"strategy": "auto"}, "ort": {"strategy": "ort"}, "double": {"precision": "64-true"}}


class Watch:
    """The losses, times and report of all fits of this process.

    Args:
        namespace: The Lightning whose Trainers are watched.
        record: What a fit adds to.
    """

    def __init__(self, namespace: Any, record: dict[str, Any]) -> None:
        self._record = record
        self._callback = type("Losses", (namespace.Callback,), {"on_train_batch_end": self._on_train_batch_end})()
        self._fit = namespace.Trainer.fit

        @functools.wraps(self._fit)
        def watched(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            return self.fit(trainer, *args, **kwargs)

        namespace.Trainer.fit = watched

    def fit(self, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``Trainer.fit``."""
        trainer.callbacks.append(self._callback)
        wall, processor = time.perf_counter(), time.process_time()
        try:
            return self._fit(trainer, *args, **kwargs)
        finally:
            self._record["seconds"] += time.perf_counter() - wall
            self._record["processor_seconds"] += time.process_time() - processor
            self._record["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
            report = getattr(trainer.strategy, "report", None)
            if report is not None:
                self._record["report"], self._record["text"] = report.to_dict(), report.to_text()

    def _on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, _batch: Any, _index: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:  # manual optimization returns none
            self._record["losses"].append(float(loss))


def in_double(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert a module's arguments: Lightning's plugin for float64 leaves the tensors of a graph's own classes."""
    return tree_map_only(torch.Tensor, lambda one: one.double() if one.is_floating_point() else one, args)


def main() -> None:
    """Train and write the file, also after an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", help="such as neuralforecast.nhits")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ort")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    cpu_torchvision.make_importable()
    import lightning.pytorch
    import pytorch_lightning

    import lightning_ort  # noqa: F401  registers the strategies

    # one line for each, wherever it comes from: the same warning may come from a captured step and from stock's
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {' '.join(str(message).split())}\n"
    group, function = args.row.split(".")
    record: dict[str, Any] = {"losses": [], "metrics": {}, "seconds": 0.0, "processor_seconds": 0.0, "error": ""}
    train = getattr(importlib.import_module(f"rows.{group}"), function)
    for namespace in (lightning.pytorch, pytorch_lightning):
        Watch(namespace, record)
    lightning.pytorch.seed_everything(0, verbose=False)
    if args.strategy == "double":
        register_module_forward_pre_hook(in_double)
    unused = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    try:
        train(args.steps, accelerator="cpu", devices=1, **dict.fromkeys(unused, False), **STRATEGIES[args.strategy])
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        record["versions"] = {name: importlib.metadata.version(name) for name in ("torch", "lightning")}
        record["threads"] = torch.get_num_threads()
        if args.output is not None:
            args.output.write_text(json.dumps(record), encoding="utf-8")
        else:
            print(record.pop("text", ""))
            print({name: value for name, value in record.items() if name != "report"})


if __name__ == "__main__":
    main()
