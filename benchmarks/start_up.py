"""Where the seconds of a start go: a short fit under ``start="now"``, part by part, with an empty and a full cache.

``python benchmarks/start_up.py [--models NAME ...] [--repeats N] [--checkout FOLDER ...]``: models of transformers with
random weights, each fit in a fresh process. The start is what the fit takes beyond as many steps as it has at the pace
of its last steps. CPU seconds are those of all threads; of several processes the fastest start counts. With
``--checkout`` other versions of the package are measured too, in turns.
"""

import argparse
import functools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 44  # enough for the longest trial of a step
_LAST = 8  # steps that show the pace
_BATCH = 8


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Parts:
    """Seconds and CPU seconds of functions, without those of measured functions that they call."""

    def __init__(self) -> None:
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._names: list[str] = []
        self._since = _now()

    def enter(self, name: str) -> None:
        """Begin a part."""
        self._count()
        self._names.append(name)
        self.calls[name] += 1

    def leave(self, *_: Any) -> None:
        """End it."""
        self._count()
        self._names.pop()

    def _count(self) -> None:
        now = _now()
        if self._names:
            self.wall[self._names[-1]] += now[0] - self._since[0]
            self.cpu[self._names[-1]] += now[1] - self._since[1]
        self._since = now

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Measure calls of a function, if this version of the package has it."""
        if (function := getattr(owner, attribute, None)) is None:
            return

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        setattr(owner, attribute, measured)


def measure_package(parts: Parts) -> None:
    """Measure the parts of a compilation."""
    from lightning_ort.compat import dynamo
    from lightning_ort.compiler import backend, lowering
    from lightning_ort.compiler.cache import cache
    from lightning_ort.compiler.executors.ort import executor, kernels, session
    from lightning_ort.compiler.placement import autotune, placer, timing
    from lightning_ort.compiler.regions import region

    starts, ends = dynamo.COMPILE_CALLBACKS
    starts.append(lambda args: parts.enter("dynamo"))
    ends.append(parts.leave)
    for owner, function, name in (
        (backend.ORTBackend, "__call__", "AOTAutograd"),
        (backend.ORTBackend, "_compile", "rest of the compiler"),
        (backend, "assemble", "assembly"),
        (lowering, "split_joint", "joint graph split"),
        (lowering, "lower", "lowering"),
        (placer.Placer, "_candidates", "support checks"),
        (kernels, "_load_error", "kernel probes"),
        (placer, "partition", "partition"),
        (placer, "fingerprint", "fingerprints"),
        (autotune, "fingerprint", "fingerprints"),
        (cache, "fingerprint", "fingerprints"),
        (cache, "software", "fingerprints"),
        (executor.OrtExecutor, "convert", "conversion"),
        (session, "untrusted_reason", "check of kept models"),
        (session, "build", "sessions"),
        (autotune.OpAutotuner, "choose", "op trials"),
        (timing, "samples", "samples"),
        (timing, "measure", "region trials"),
        (region._FirstRun, "run", "first runs in torch"),
    ):
        parts.wrap(owner, function, name)


def make(name: str) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Return a model that computes its loss, and what makes a batch."""
    import torch
    import transformers
    from torch import nn

    tokens = lambda count: torch.randint(0, 1000, (_BATCH, count))  # noqa: E731
    if name == "T5":
        sizes = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_heads": 4, "num_layers": 4, "vocab_size": 1000}
        config = transformers.T5Config(**sizes, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config), lambda: {"input_ids": tokens(64), "labels": tokens(32)}
    if name == "BERT":
        sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
        config = transformers.BertConfig(**sizes, vocab_size=1000)
        labels = lambda: torch.randint(0, 2, (_BATCH,))  # noqa: E731
        return transformers.BertForSequenceClassification(config), lambda: {"input_ids": tokens(64), "labels": labels()}
    if name == "GPT":
        config = transformers.GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=1000, n_positions=128)

        def batch() -> dict[str, Any]:
            ids = tokens(64)
            return {"input_ids": ids, "labels": ids}

        return transformers.GPT2LMHeadModel(config), batch

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
            self.head = nn.Linear(256, 10)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": nn.functional.cross_entropy(self.head(self.layers(x)), labels)}

    return Perceptron(), lambda: {"x": torch.randn(_BATCH * 8, 64), "labels": torch.randint(0, 10, (_BATCH * 8,))}


def fit(name: str, strategy: str) -> dict[str, Any]:
    """Fit a model in this process, and return what that took."""
    import lightning.pytorch as pl
    import torch

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, batch = make(name)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Clock(pl.Callback):
        starts: list[tuple[float, float]] = []

        def on_train_batch_start(self, *args: Any) -> None:
            self.starts.append(_now())

        def on_train_end(self, *args: Any) -> None:
            self.starts.append(_now())

    begin, chosen = _now(), "auto"
    if strategy == "ort":
        from lightning_ort.compiler import backend  # noqa: F401
        from lightning_ort.config import ORTConfig
        from lightning_ort.lightning import ORTStrategy

        chosen = ORTStrategy(config=ORTConfig(start="now"))
    imported, parts = _now(), Parts()
    if strategy == "ort":
        measure_package(parts)
    batches = [batch() for _ in range(STEPS)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=chosen,
        max_epochs=1,
        callbacks=[Clock()],
        enable_checkpointing=False,
        **quiet,
    )
    start = _now()
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))
    whole = [a - b for a, b in zip(_now(), start, strict=True)]
    paces = [
        statistics.median(b[clock] - a[clock] for a, b in zip(Clock.starts[-_LAST - 1 :], Clock.starts[-_LAST:]))  # noqa: B905
        for clock in range(2)
    ]
    found: dict[str, Any] = {"step": paces, "fit": whole, "parts": {}}
    if strategy == "ort":
        found["parts"]["imports"] = [1, imported[0] - begin[0], imported[1] - begin[1]]
        for part in parts.wall:
            found["parts"][part] = [parts.calls[part], parts.wall[part], parts.cpu[part]]
        report = trainer.strategy.report
        counted = Counter(region.executor for graph in report.graphs for region in graph.regions)
        found["kept"] = [step.engine for step in report.steps]
        found["regions"] = dict(counted)
        found["trials"] = {step.name: step.ms for step in report.steps}
    sums = [sum(part[1 + clock] for key, part in found["parts"].items() if key != "imports") for clock in range(2)]
    rest = [whole[clock] - STEPS * paces[clock] - sums[clock] for clock in range(2)]
    found["parts"]["step trial and the rest of the fit"] = [1, *rest]
    found["start"] = [sum(part[1 + clock] for part in found["parts"].values()) for clock in range(2)]
    return found


def run(checkout: Path, name: str, strategy: str, folder: str) -> dict[str, Any]:
    """Measure in a fresh process."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "LIGHTNING_ORT_CACHE_DIR": folder, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--only", name, strategy]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure all models that are asked for."""
    here = Path(__file__).parents[1]
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["MLP", "T5", "BERT", "GPT"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkout", nargs="+", type=Path, default=[])
    parser.add_argument("--only", nargs=2)
    parser.add_argument("--cpu", action="store_true", help="show CPU seconds, not wall-clock seconds")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(fit(*args.only)))
        return
    from harness import console, table_of

    checkouts = [folder.resolve() for folder in args.checkout] + [here]
    shown, clock = console(150), 2 if args.cpu else 1
    for name in args.models:
        found: dict[tuple[Path, str], list[dict[str, Any]]] = {}
        for _ in range(args.repeats):
            for checkout in checkouts:
                with tempfile.TemporaryDirectory() as folder:
                    for cache in ("cold", "warm"):
                        found.setdefault((checkout, cache), []).append(run(checkout, name, "ort", folder))
        best = {key: min(runs, key=lambda each: each["start"][clock - 1]) for key, runs in found.items()}
        with tempfile.TemporaryDirectory() as folder:
            stock = run(here, name, "stock", folder)
        title = f"{name}: seconds{' (CPU)' if args.cpu else ''} and calls"
        table = table_of(title, ["part"], [f"{checkout.name} {cache}" for checkout, cache in best])
        last = best[here, "warm"]
        names = list(dict.fromkeys(part for each in best.values() for part in each["parts"]))
        names.sort(key=lambda part: -max(each["parts"].get(part, [0, 0, 0])[clock] for each in best.values()))
        for part in names:
            cells = [each["parts"].get(part, [0, 0, 0]) for each in best.values()]
            table.add_row(part, *(f"{cell[clock]:.2f}  {cell[0]:>4}" for cell in cells))
        table.add_section()
        table.add_row("start, seconds", *(f"{each['start'][0]:.2f}" for each in best.values()))
        table.add_row("start, CPU seconds", *(f"{each['start'][1]:.2f}" for each in best.values()))
        table.add_row("step, ms", *(f"{1000 * each['step'][0]:.1f}" for each in best.values()))
        table.add_row("step, CPU ms", *(f"{1000 * each['step'][1]:.1f}" for each in best.values()))
        table.add_row("kept; regions", *(f"{each['kept']} {each['regions']}" for each in best.values()))
        shown.print(table, f"stock: {1000 * stock['step'][0]:.1f} ms a step; trials: {last['trials']}")


if __name__ == "__main__":
    main()
