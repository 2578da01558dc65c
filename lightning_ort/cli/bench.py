"""``lightning-ort bench``: trains a user's own module in several variants and compares their speed."""

import dataclasses
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_ort._arguments import check_writable
from lightning_ort._imports import preferred_namespace
from lightning_ort._text import PlainTable, console, digits, plain, say, show
from lightning_ort.cli.bench_worker import Job, Variant, Worker
from lightning_ort.cli.load import check_source, load
from lightning_ort.config import ORTConfig
from lightning_ort.tuning.machine import machine
from lightning_ort.tuning.trainer_process import Sample, Summary, VariantFailed

VARIANTS = ("stock", "stock+auto", "compile+auto", "ort+keep", "ort")
# told apart by the colour-blind, too
_COLORS = {"stock": "#767676", "compile": "#0072b2", "off": "#009e73", "ort": "#d55e00", "auto": "#cc79a7"}


_LARGE = 0.05  # of the loss; more than rounding in half types changes it by

_EXPLANATION = (
    "* the fastest; speed: the baseline's ms a step by the variant's, in brackets the slowest and the fastest round;"
    " pays after: steps until the time for compiling is won back; on ORT: share of the compute nodes in"
    " the end, 0% where the step stays in PyTorch because that was faster"
)


@dataclass
class Row:
    """What was measured of one variant."""

    variant: str
    first: Sample | None = None  # compiles and warms up, and does not count
    samples: list[Sample] = field(default_factory=list)
    summary: Summary | None = None
    error: str | None = None

    @property
    def step_ms(self) -> float:
        """Median over the samples, in milliseconds."""
        return 1000 * statistics.median(sample.step_seconds for sample in self.samples)

    def speed(self, baseline: "Row") -> float:
        """Return how many times as fast as the baseline it was: the ratio of the times that the table shows."""
        return baseline.step_ms / self.step_ms

    @property
    def loss(self) -> float | None:
        """Mean of the last sample's losses."""
        return statistics.fmean(self.samples[-1].losses) if self.samples[-1].losses else None

    def compile_seconds(self, warm_up: int) -> float:
        """Return what the first steps took longer than as many of the later ones; 0 if they took no longer."""
        assert self.first is not None
        return max(0.0, warm_up * (self.first.step_seconds - self.step_ms / 1000))

    def ratios(self, baseline: "Row") -> list[float]:
        """Return how many times as fast as the baseline it was, in each round that both have finished."""
        pairs = zip(baseline.samples, self.samples, strict=False)
        return [theirs.step_seconds / ours.step_seconds for theirs, ours in pairs]

    def to_dict(self, baseline: "Row", warm_up: int) -> dict[str, Any]:
        """Return plain types for JSON."""
        plain: dict[str, Any] = {"variant": self.variant, "error": self.error}
        if self.samples:
            plain["step_ms"] = self.step_ms
            if baseline.samples:
                plain["speed"] = self.speed(baseline)
            plain["ratios"] = self.ratios(baseline)
            plain["compile_seconds"] = self.compile_seconds(warm_up)
            plain["loss"] = self.loss
            plain["samples"] = [dataclasses.asdict(sample) for sample in self.samples]
        if self.summary:
            plain["summary"] = dataclasses.asdict(self.summary)
        return plain


def measure(
    job: Job,
    variants: Sequence[Variant],
    rounds: int,
    steps: int,
    warm_up: int,
    folder: Path,
    advance: Callable[[str], None] = lambda doing: None,
) -> list[Row]:
    """Train a module in several ways and time them against each other.

    Every variant has a process of its own, so that none inherits another's compiled code, memory or settings. The order
    changes from round to round. ``KeyboardInterrupt`` ends the measurement early.

    Args:
        job: What is trained.
        variants: How; the first is what the others are compared with.
        rounds: Number of samples of each.
        steps: Batches in a sample.
        warm_up: Batches before the first one.
        folder: Each variant has a folder in it for what its Trainer writes and prints.
        advance: Called before each sample with what will be done.

    Returns:
        A row for each variant, in their order, with what was finished.

    """
    rows = [Row(str(variant)) for variant in variants]
    with ExitStack() as stack:
        workers = []
        for variant in variants:
            workers.append(Worker(job, variant, folder / str(variant)))
            stack.callback(workers[-1].stop)
        try:
            for number in range(rounds + 1):
                for shift in range(len(rows)):
                    index = (number + shift) % len(rows) if number else shift
                    row, worker = rows[index], workers[index]
                    advance(f"{row.variant}: round {number} of {rounds}" if number else f"{row.variant}: first steps")
                    if row.error is None:
                        _take(row, worker, steps if number else warm_up, first=number == 0, last=number == rounds)
        except KeyboardInterrupt:
            pass
    return rows


def _take(row: Row, worker: Worker, steps: int, first: bool, last: bool) -> None:
    try:
        sample = worker.sample(steps)
        if first:
            row.first = sample
        else:
            row.samples.append(sample)
        if last:
            row.summary = worker.finish()
    except VariantFailed as error:
        row.error = str(error)


def bench(
    module: str | None = None,
    args: dict[str, Any] | None = None,
    data: str | None = None,
    data_args: dict[str, Any] | None = None,
    config: Path | None = None,
    variants: list[str] | None = None,
    rounds: int = 7,
    steps: int = 20,
    warm_up: int = 50,
    accelerator: str = "auto",
    seed: int = 0,
    ort_config: dict[str, Any] | None = None,
    output: Path | None = None,
) -> None:
    """Train a module in several variants on this machine and compare their speed.

    A variant is written ENGINE[+OPTIM][@PRECISION]. The engine is stock, compile (torch.compile of the child modules),
    ort, auto (ort with engine="auto"), or off (ort with engine="torch": its optimizer and its retained memory,
    without ONNX Runtime). OPTIM is an implementation of the optimizer as in ORTStrategy(optim=...).
    PRECISION is a precision of the Trainer, or high or medium for less precise float32 products. The first variant is
    the baseline for the others. Ctrl-C ends the benchmark and shows what is finished.

    Args:
        module: A class or function that returns the LightningModule, as "package.module:name" or
            "path/to/file.py:name".
        args: Keyword arguments for the module.
        data: A LightningDataModule, or a function that returns a DataLoader; by default, the module has its own data.
        data_args: Keyword arguments for the data.
        config: A LightningCLI configuration of module, data and Trainer. Module and data need to be named only if it
            has no class_path for them. Its strategy and devices are not used.
        variants: The variants to compare; by default stock, stock+auto, compile+auto, ort+keep and ort.
        rounds: How often each variant is timed.
        steps: Number of batches in a round.
        warm_up: Number of batches before the first round, in which a variant compiles and its engines take turns: ort
            in up to 38 steps, auto in up to 57.
        accelerator: The Trainer's accelerator, if there is no configuration.
        seed: Seed for the initial weights and the order of the data.
        ort_config: Settings of the ort strategy, such as {"placement": "always"}.
        output: A folder for bench.json, bench.png, and the files and output of the runs.

    """
    job = Job(module, args or {}, data, data_args or {}, config, accelerator, seed, ort_config or {})
    for name, value in (("rounds", rounds), ("steps", steps), ("warm_up", warm_up)):
        if value < 1:
            sys.exit(f"--{name.replace('_', '-')}={value}: must be at least 1.")
    ways = _checked(job, variants or VARIANTS, output)
    __import__(preferred_namespace().package)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        progress = stack.enter_context(Progress(*columns, console=console(stderr=True)))
        task = progress.add_task("", total=len(ways) * (rounds + 1), completed=-1)

        def advance(doing: str) -> None:
            progress.update(task, description=plain(doing), advance=1)

        rows = measure(job, ways, rounds, steps, warm_up, folder, advance)
        progress.update(task, completed=len(ways) * (rounds + 1))
    title = f"{module or config}: median of {rounds} rounds of {steps} steps"
    if output is not None:
        found = [row.to_dict(rows[0], warm_up) for row in rows]
        settings = {**dataclasses.asdict(job), "rounds": rounds, "steps": steps, "warm_up": warm_up}
        text = json.dumps({"machine": machine(), "settings": settings, "rows": found}, indent=2, default=str)
        (output / "bench.json").write_text(text)
    show(to_table(rows, warm_up, title), _EXPLANATION, _footnote())
    for text in _warnings(rows):
        say(text)
    if output is not None:
        plot(rows, title, output / "bench.png")
    if not any(row.samples for row in rows):
        sys.exit("Nothing was measured.")


def _checked(job: Job, variants: Sequence[str], output: Path | None) -> list[Variant]:
    """Refuse what cannot be measured before anything is started; return the variants."""
    check_source(job.module, job.config, bool(job.args or job.data_args))
    if output is not None and find_spec("matplotlib") is None:
        sys.exit("--output draws a plot, which needs matplotlib: pip install 'lightning-ort[plot]'")
    try:
        ways = [Variant.parse(text) for text in variants]
        ORTConfig.parse(job.ort_config)
        if output is not None:
            check_writable("--output", str(output), is_folder=True)
    except (TypeError, ValueError) as error:
        sys.exit(str(error))
    for path, argument in ((job.module, "module"), (job.data, "data")):
        if path is not None:
            load(path, argument)  # an error now rather than in each process, which inherits what this has imported
    return ways


def to_table(rows: Sequence[Row], warm_up: int, title: str) -> PlainTable:
    """Return the measurements as a table, the fastest first; the others are compared with the first of ``rows``."""
    baseline = rows[0]
    # what was not measured comes last
    speeds = {row.variant: row.speed(baseline) if row.samples and baseline.samples else 0.0 for row in rows}
    fastest = max(speeds, key=speeds.__getitem__)
    table = PlainTable("variant", title=title)
    for column in ("ms a step", "steps/s", "speed", "(spread)", "compile s", "pays after", "peak MB", "loss differs"):
        table.add_column(column, justify="right")
    table.add_column("on ORT", justify="right")
    for row in sorted(rows, key=lambda row: -speeds[row.variant]):
        if not row.samples:
            table.add_row(row.variant, row.error or "not finished")
            continue
        ratios = row.ratios(baseline)
        peak = row.samples[-1].peak_bytes
        fraction = row.summary.ort_node_fraction if row.summary else None
        table.add_row(
            f"{row.variant} *" if row.variant == fastest and len(rows) > 1 else row.variant,
            digits(row.step_ms),
            digits(1000 / row.step_ms),
            f"{row.speed(baseline):.2f}x" if ratios else "-",
            f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-",
            f"{row.compile_seconds(warm_up):.1f}",
            _pays_after(row, baseline, warm_up),
            "-" if peak is None else f"{peak / 1e6:,.0f}",
            "-" if (difference := _difference(row, baseline)) is None else f"{difference:.1e}",
            "-" if fraction is None else f"{fraction:.0%}",
        )
    for row in rows:
        if row.samples and row.error:
            table.add_row(row.variant, f"failed later: {row.error}")
    return table


def _pays_after(row: Row, baseline: Row, warm_up: int) -> str:
    """Return after how many steps the time for compiling has been won back."""
    if row is baseline or not baseline.samples:
        return "-"
    saved = (baseline.step_ms - row.step_ms) / 1000
    if saved <= 0:
        return "never"
    spent = row.compile_seconds(warm_up) - baseline.compile_seconds(warm_up)
    return f"{math.ceil(max(0.0, spent) / saved):,}"


def _difference(row: Row, baseline: Row) -> float | None:
    """Return the relative difference of the losses."""
    loss, other = row.loss if row.samples else None, baseline.loss if baseline.samples else None
    return None if loss is None or other is None else abs(loss - other) / max(abs(other), 1e-12)


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what a reader of the table might overlook."""
    for row in rows[1:]:
        difference = _difference(row, rows[0])
        if difference is not None and not difference < _LARGE:
            yield (
                f"{row.variant} does not train as {rows[0].variant} does: after the same batches its loss differs by"
                f" {difference:.0%}. Its speed counts only if it trains as well: compare the losses of longer runs."
            )


def _footnote() -> str:
    return ", ".join(f"{name} {value}" for name, value in machine().items())


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw how many times as fast as the first each variant was: a bar for the median, a dot for each round."""
    from matplotlib.figure import Figure  # slow to import, and only some runs need it

    figure = Figure(figsize=(9, 1.8 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        ratios = row.ratios(rows[0]) if row.samples else []
        color = _COLORS[row.variant.partition("@")[0].partition("+")[0]]
        axes.barh(place, row.speed(rows[0]) if ratios else 0, height=0.6, color=color, alpha=0.45)
        axes.scatter(ratios, [place] * len(ratios), s=14, color=color, edgecolors="white", linewidths=0.4, zorder=3)
        # outside of the axes, where no dot can be in the way
        label = _plot_label(row, rows[0], ratios)
        axes.text(1.02, place, label, transform=axes.get_yaxis_transform(), va="center", parse_math=False)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [plain(row.variant, "utf-8") for row in rows], parse_math=False)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plain(title, "utf-8"), loc="left", parse_math=False)
    explanation = f"speed relative to {rows[0].variant}, longer is faster (bar: median, dots: rounds)"
    axes.set_xlabel(plain(explanation, "utf-8"), parse_math=False)
    figure.text(0.01, -0.01, _footnote(), fontsize="x-small", color="dimgray", va="top", wrap=True, parse_math=False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def _plot_label(row: Row, baseline: Row, ratios: Sequence[float]) -> str:
    if not row.samples:
        return "failed" if row.error else "not finished"
    speed = f"{row.speed(baseline):.2f}x, " if ratios else ""
    return f"{speed}{digits(row.step_ms)} ms a step{', failed later' if row.error else ''}"
