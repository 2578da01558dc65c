"""Write docs/test_reports/supported_models.md: who runs each model of tests/models/zoo.py, found out by training it.

Every model is trained twice from one seed, with the stock strategy and with ``ORTStrategy(config={"placement":
"always"})``, and losses and parameters are compared; the report tells who ran what. Run as ``make conformance``, or for
some models, without writing the page, as ``python -m tests.models.conformance BERT Llama``.
"""

import importlib.metadata
import importlib.util
import logging
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ort import ORTStrategy
from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.reason import Reason
from lightning_ort.compiler.report import CompileReport
from tests.models.zoo import MODELS, Batch, Made, Model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "test_reports" / "supported_models.md"
STEPS = 5
LOSS_TOLERANCE = 1e-3
CHANGE_TOLERANCE = 1e-2
BETTER = "better in torch"

HEAD = """\
# Supported models

Made by `make conformance` with {versions} on a CPU; do not edit.

Every LightningModule trains under `ort`. This page shows how much of some well-known models ONNX Runtime runs. Each
model is small, has random initial weights, and is created from a config in float32. A Trainer trains it for {steps}
steps with AdamW, once with the stock strategy and once with `ORTStrategy(config={{"placement": "always"}})`, from the
same seed and with the dropout of the config. With `placement="measured"`, the default, a region that is slower on ONNX
Runtime stays in torch.

**All {total} train as with the stock strategy.** {whole} of them run every compute node on ONNX Runtime, except those
for which torch has the better kernel.

- *loss*: largest relative difference from the loss under the stock strategy in any step. *parameters*: largest
  difference of a parameter or buffer after the last step. *change*: norm of all these differences, relative to the norm
  of what training changed. In these runs, batch norms see only a few values per channel, which makes float32 rounding
  large. Under the stock strategy, EfficientNet's losses differ as much from those in float64.
- *on ORT*: share of the compute nodes that ONNX Runtime runs. Views, random draws and the forward pass of torch's flash
  attention, which may draw random numbers, are not counted. *regions*: number of regions that ONNX Runtime runs, and
  number of graphs.
- *breaks*: how often capture ended a graph early. The code at a break, such as a recurrent layer or the installation of
  transformers' hooks in the first step, runs in torch and is not counted. *recompiles*: how often a function was
  compiled again.
- *in torch*: what stayed in torch, with the number of nodes, and why. *better in torch* is a deliberate choice, see
  [how it works](../how_it_works.md).

| model | library | loss | parameters | change | on ORT | regions | breaks | recompiles | in torch |
|---|---|---|---|---|---|---|---|---|---|
"""


class Training(LightningModule):
    """Trains a model whose output has a loss, and keeps the losses.

    Args:
        made: The network, and what draws a batch.
    """

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.network, draw = made
        self.network.train()
        self._batches = [draw() for _ in range(STEPS)]
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.network(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # with the default eps the rounding of a gradient that is zero (of an attention's key bias) makes whole steps
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, eps=1e-5)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self._batches, batch_size=None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Row:
    """What training one model showed.

    Args:
        model: The model.
        loss: Largest relative difference of a loss.
        parameters: Largest difference of a parameter or buffer.
        change: Norm of these differences, relative to that of what training changed.
        report: Of the strategy.
    """

    model: Model
    loss: float
    parameters: float
    change: float
    report: CompileReport

    @property
    def in_torch(self) -> dict[str, Counter[str]]:
        """What stayed in torch: why, and how many nodes of each op."""
        left: dict[str, Counter[str]] = {}
        for graph in self.report.graphs:
            for region in graph.regions:
                if region.executor == "torch":
                    for op, count in region.ops.items():
                        reason = region.node_reasons.get(op, region.reason)
                        left.setdefault(_why(reason), Counter())[op.removeprefix("aten.")] += count
        return left

    def settled(self) -> str:
        """The last columns, which are the same in every run."""
        graphs = self.report.graphs
        regions = sum(region.executor == "ort" for graph in graphs for region in graph.regions)
        reasons = [
            f"{why}: {', '.join(f'`{op}` ({count})' for op, count in ops.most_common())}"
            for why, ops in sorted(self.in_torch.items())
        ]
        cells = [
            f"{100 * self.report.ort_node_fraction:.1f} %",
            f"{regions} in {len(graphs)}",
            str(self.report.graph_breaks),
            str(self.report.recompiles),
            "; ".join(reasons),
        ]
        return f"{' | '.join(cells)} |"

    def line(self) -> str:
        """The row of the table."""
        numbers = [f"{number:.0e}" for number in (self.loss, self.parameters, self.change)]
        return f"| {' | '.join([self.model.name, self.model.library, *numbers])} | {self.settled()}"


def _why(reason: Reason | None) -> str:
    """The kind of a reason."""
    assert reason is not None
    return reason.type.value


def train(model: Model, strategy: Any) -> tuple[Training, dict[str, Tensor]]:
    """Train a model from the same seed as ever, in a Trainer that writes nothing; also return where it started."""
    seed_everything(0, verbose=False)
    torch._dynamo.reset()
    module = Training(model.make())
    start = {key: value.clone() for key, value in module.state_dict().items()}
    seed_everything(1, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            max_steps=STEPS,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module)
    return module, start


def examine(model: Model) -> Row:
    """Train a model with the stock strategy and on ONNX Runtime.

    Raises:
        AssertionError: If a loss or a parameter differs, a region failed, or ONNX Runtime ran nothing.
    """
    stock, start = train(model, "auto")
    strategy = ORTStrategy(config={"placement": "always", "cache_dir": None})
    ours, _ = train(model, strategy)
    report = strategy.report
    assert len(stock.losses) == len(ours.losses) == STEPS
    loss = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, stock.losses, strict=True))
    state, changed = ours.state_dict(), {key: value - start[key] for key, value in stock.state_dict().items()}
    differences = [value - start[key] - changed[key] for key, value in state.items()]
    parameters = max(difference.abs().max().item() for difference in differences)
    change = _norm(differences) / _norm(changed.values())
    assert loss < LOSS_TOLERANCE, f"losses {ours.losses}, with the stock strategy {stock.losses}"
    assert change < CHANGE_TOLERANCE, f"training changed the parameters otherwise: by {change:.1e} of the change"
    assert report.ort_runs > 0, report.to_text()
    failures = [entry for entry in report.fallbacks if entry.reason.type.is_failure]
    assert not failures, failures
    return Row(model, loss, parameters, change, report)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def versions(model: Model) -> str:
    """What the numbers of a model were found with."""
    return f"{model.library} {importlib.metadata.version(model.library)}"


def page(rows: list[Row]) -> str:
    """The page as Markdown."""
    installed = next(name for name in kernels.DISTRIBUTIONS if kernels.installed(name))
    used = dict.fromkeys(versions(row.model) for row in sorted(rows, key=lambda row: row.model.library))
    head = HEAD.format(
        versions=", ".join([*used, f"{installed} {importlib.metadata.version(installed)}"]),
        steps=STEPS,
        total=len(rows),
        whole=sum(row.in_torch.keys() <= {BETTER} for row in rows),
    )
    return head + "".join(f"{row.line()}\n" for row in rows)


def main(names: list[str]) -> None:
    """Examine every model and write the page, or only print the rows of some; exit with an error if one is wrong.

    Args:
        names: Of the models; empty for all, and the page.
    """
    if unknown := set(names) - set(MODELS):
        sys.exit(f"no such model: {', '.join(sorted(unknown))}. The models are {', '.join(MODELS)}.")
    chosen = [MODELS[name] for name in names or MODELS]
    missing = {model.library for model in chosen if importlib.util.find_spec(model.library) is None}
    if missing:
        sys.exit(f"{', '.join(sorted(missing))} not installed: pip install -c constraints.txt -e '.[conformance]'")
    torch.set_num_threads(1)
    for name in ("lightning_ort", "lightning.pytorch"):  # what stays in torch is the page's matter
        logging.getLogger(name).setLevel(logging.ERROR)
    rows, wrong = [], []
    for model in chosen:
        try:
            rows.append(examine(model))
        except Exception as error:  # whatever it is, it belongs to this model
            wrong.append(f"{model.name}: {type(error).__name__}: {error}")
        else:
            print(rows[-1].line(), flush=True)
    if wrong:
        sys.exit("\n".join(wrong))
    if not names:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
