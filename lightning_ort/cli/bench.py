"""``lightning-ort bench``: compares the speed of candidates that the user names, trained in turns."""

import dataclasses
import json
import statistics
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_ort._arguments import check_writable, closest
from lightning_ort._text import PlainTable, console, digits, plain, say, show
from lightning_ort.cli.arguments import add_mapping, add_project
from lightning_ort.cli.bench_picture import draw_bars, installed
from lightning_ort.cli.load import load_project
from lightning_ort.compiler.report import CompileReport
from lightning_ort.config import ORTConfig
from lightning_ort.optim.registry import check_name
from lightning_ort.tuning.api import machine
from lightning_ort.tuning.candidate import ENGINES, MATMUL_PRECISIONS, MEASURED, Candidate, TuneError
from lightning_ort.tuning.project import Project, start
from lightning_ort.tuning.trainer_process import TrainerProcess, VariantFailed
from lightning_ort.tuning.trials import Trial, break_even, in_turns, in_words, not_measured, ratios, times, while_busy

VARIANTS = ("stock", "stock+fused", "compile+fused", "ort", "stock+fused@bf16-mixed", "ort@bf16-mixed")  # page one
_PRECISIONS = (
    *MATMUL_PRECISIONS,
    *("bf16-mixed", "16-mixed", "bf16-true", "16-true", "32-true", "64-true", "bf16", "16", "32", "64"),
    *("transformer-engine", "transformer-engine-float16"),
)
NAMED = MEASURED | {"engine": "ort"}  # settings of variants: inductor is one of its own, "auto"
_LARGE = 0.05  # of the loss; more than rounding in half types changes it by

_EXPLANATION = (
    "* the fastest; speed: the baseline's ms a step divided by the variant's, in brackets the slowest and the fastest"
    " round; pays after: steps that win the start-up back; on ORT: share of the compute nodes in"
    " the end, 0% where the step stays uncompiled because that was faster"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add what :func:`bench` takes."""
    add = parser.add_argument
    add_project(parser)
    add("--variants", nargs="+", help=f"the variants to compare (default: {' '.join(VARIANTS)})")
    add("--rounds", type=int, default=7, help="how often each variant is timed (default: %(default)s)")
    add("--steps", type=int, default=20, help="number of batches in a round (default: %(default)s)")
    add(
        "--warm-up",
        type=int,
        default=50,
        help="number of batches before the first round, in which a variant compiles and its engines take turns: ort in"
        " up to 38 steps, auto in up to 57 (default: %(default)s)",
    )
    add_mapping(parser, "--ort-config", 'settings of the ort strategy, such as {"placement": "always"}')
    add("--output", type=Path, help="a folder for bench.json, bench.png, and the files and output of the runs")


def bench(given: Namespace) -> None:
    """Train a module in several variants on this machine and compare their speed.

    A variant is written ENGINE[+OPTIM][@PRECISION]. The engine is stock, compile (torch.compile of the child modules),
    or strategy="ort" with the engine of that name: torch (nothing compiled), ort, or auto (inductor too), which compile
    after the first step. OPTIM is fused (torch's fused kernels, as strategy="ort" uses), or a name of
    ORTStrategy(optim=...). PRECISION is a precision of the Trainer, or high or medium for less precise float32
    products. The first variant is the baseline for the others. Ctrl-C ends the benchmark and shows what is finished.
    """
    rounds, steps, warm_up, output = given.rounds, given.steps, given.warm_up, given.output
    for name, value in (("rounds", rounds), ("steps", steps), ("warm-up", warm_up)):
        if value < 1:
            sys.exit(f"--{name}={value}: must be at least 1.")
    trials = _checked(given.variants or VARIANTS, given.ort_config or {}, output)
    project = load_project("bench", given, ort_config=NAMED | (given.ort_config or {}))
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        progress = stack.enter_context(Progress(*columns, console=console(stderr=True)))
        task = progress.add_task("", total=len(trials) * (rounds + 1), completed=-1)

        def advance(doing: str) -> None:
            progress.update(task, description=plain(doing), advance=1)

        try:
            project.namespace.load()  # which processes inherit
            compare(project, trials, rounds, steps, warm_up, folder, advance)
        except TuneError as error:
            sys.exit(f"lightning-ort bench: {error}")
        progress.update(task, completed=len(trials) * (rounds + 1))
    title = f"{given.module or given.config}: median of {rounds} rounds of {steps} steps"
    if output is not None:
        asked = {name: value for name, value in vars(given).items() if name not in ("variants", "output", "started")}
        asked |= {name: asked[name] or {} for name in ("args", "data_args", "ort_config")}
        found = {"machine": machine(), "settings": asked, "rows": [to_dict(trial, trials[0]) for trial in trials]}
        (output / "bench.json").write_text(json.dumps(found, indent=2, default=str))
    show(to_table(trials, title), _EXPLANATION, in_words(machine()))
    for text in (*problems(trials), *while_busy(trials)):
        say(text)
    if output is not None:
        draw_bars(trials, title, in_words(machine()), output / "bench.png")
    if not any(trial.rounds for trial in trials):
        sys.exit("Nothing was measured.")


def _checked(variants: Sequence[str], ort_config: dict[str, Any], output: Path | None) -> list[Trial]:
    """Return what is to be measured; refuse what is not allowed before anything is started."""
    if output is not None and not installed():
        sys.exit("--output draws a plot, which needs matplotlib: pip install 'lightning-ort[plot]'")
    try:
        ORTConfig.parse(ort_config)
        if output is not None:
            check_writable("--output", str(output), is_folder=True)
        return named(variants)
    except (TypeError, ValueError) as error:
        sys.exit(str(error))


@dataclass(frozen=True)
class Summary:
    """What a finished Trainer's strategy reports, if it is one of ours; see :class:`CompileReport`."""

    ort_node_fraction: float | None = None  # of the graphs that are still in use
    ort_runs: int = 0
    optimizers: list[str] = field(default_factory=list)


def summary_of(trainer: Any) -> Summary:
    """Return what a Trainer's strategy reports; nothing for one of Lightning's own."""
    report = getattr(trainer.strategy, "report", None)
    if not isinstance(report, CompileReport):
        return Summary()
    return Summary(report.ort_node_fraction_in_use, report.ort_runs, [str(line) for line in report.optimizers])


def named(variants: Sequence[str]) -> list[Trial]:
    """Return a trial for each variant; ``ValueError`` if an engine or an optimizer is unknown."""
    trials: list[Trial] = []
    for place, text in enumerate(variants):
        again = variants[:place].count(text)
        trials.append(Trial(parse(text), name=f"{text} ({again + 1})" if again else text))
    return trials


def parse(text: str) -> Candidate:
    """Read what people write, ``ENGINE[+OPTIM][@PRECISION]``; ``ValueError`` if one of them is unknown."""
    rest, _, precision = text.partition("@")
    engine, _, optim = rest.partition("+")
    if engine not in ENGINES:
        raise ValueError(
            f"Variant {text!r}: unknown engine {engine!r}; allowed are {', '.join(ENGINES)}. "
            "Write ENGINE[+OPTIM][@PRECISION], such as ort+adamw_bnb_8bit@bf16-mixed."
        )
    optim = "auto" if optim == "fused" else optim  # "auto" alone is an engine
    if optim:
        check_name(optim, f"variant {text!r}: optim")
    if precision and precision not in _PRECISIONS:
        text = f"Variant {text!r}: unknown precision {precision!r}: {closest(precision, _PRECISIONS, 'precisions')}"
        raise ValueError(text)
    return Candidate(engine=engine, optim=optim or None, precision=precision or None)


def to_dict(trial: Trial, baseline: Trial) -> dict[str, Any]:
    """Return plain types for JSON."""
    found: dict[str, Any] = {"variant": trial.name, "error": trial.why or None}
    if (seconds := trial.seconds_per_example) is not None:
        found["step_ms"] = 1000 * seconds
        if (faster := times(trial, baseline)) is not None:
            found["speed"] = faster
        found["ratios"] = ratios(trial, baseline)
        found["startup_seconds"] = trial.startup
        found["loss"] = _loss(trial)
        found["samples"] = [dataclasses.asdict(sample) for sample in trial.samples]
    if trial.summary is not None:
        found["summary"] = dataclasses.asdict(trial.summary)
    return found


def to_table(trials: Sequence[Trial], title: str) -> PlainTable:
    """Return the measurements as a table, the fastest first; the others are compared with the first of ``trials``."""
    baseline = trials[0]
    ranked = sorted(trials, key=lambda trial: -(times(trial, baseline) or 0.0))  # what was not measured comes last
    table = PlainTable("variant", title=title)
    for column in ("ms a step", "steps/s", "speed", "(spread)", "start-up s", "pays after", "peak MB", "loss differs"):
        table.add_column(column, justify="right")
    table.add_column("on ORT", justify="right")
    for trial in ranked:
        name = f"{trial.name} *" if trial is ranked[0] and len(trials) > 1 and trial.rounds else trial.name
        table.add_row(name, *_cells(trial, baseline))
    return table


def _cells(trial: Trial, baseline: Trial) -> list[str]:
    seconds, faster = trial.seconds_per_example, times(trial, baseline)
    if seconds is None:
        return ["failed" if trial.why else "not finished"]
    each, difference = ratios(trial, baseline), _difference(trial, baseline)
    steps = break_even(trial, baseline, faster)
    pays = "-" if trial is baseline or faster is None else "never" if steps is None else f"{steps:,}"
    fraction = trial.summary.ort_node_fraction if trial.summary else None
    return [
        digits(1000 * seconds),
        digits(1 / seconds),
        f"{faster:.2f}x" if faster is not None else "-",
        f"{min(each):.2f}-{max(each):.2f}" if each else "-",
        "-" if trial.startup is None else f"{trial.startup:.1f}",
        pays,
        "-" if trial.peak is None else f"{trial.peak / 1e6:,.0f}",
        "-" if difference is None else f"{difference:.1e}",
        "-" if fraction is None else f"{fraction:.0%}",
    ]


def _loss(trial: Trial) -> float | None:
    """Return the mean of the last round's losses."""
    losses = trial.samples[-1].losses if trial.samples else []
    return statistics.fmean(losses) if losses else None


def _difference(trial: Trial, baseline: Trial) -> float | None:
    loss, other = _loss(trial), _loss(baseline)
    return None if loss is None or other is None else abs(loss - other) / max(abs(other), 1e-12)


def problems(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield what a reader of the table might overlook."""
    failed = [(trial.name, "failed later" if trial.rounds else "failed", trial.why) for trial in trials if trial.why]
    yield from not_measured(failed)
    if names := [trial.name for trial in trials if trial.samples and not trial.losses]:
        yield f"loss differs: not known, since training_step returns no loss ({', '.join(names)})"
    for trial in trials[1:]:
        difference = _difference(trial, trials[0])
        if difference is not None and not difference < _LARGE:
            yield (
                f"{trial.name} does not train as {trials[0].name} does: after the same batches its loss differs by"
                f" {difference:.0%}. Its speed counts only if it trains as well: compare the losses of longer runs."
            )


def compare(
    project: Project,
    trials: Sequence[Trial],
    rounds: int,
    steps: int,
    warm_up: int,
    folder: Path,
    advance: Callable[[str], None] = lambda doing: None,
) -> None:
    """Train a module in several ways and time them against each other; what came of it is noted in the trials.

    If the first one fails in its first steps, the others are not tried: they are compared with it. Every candidate has
    a process of its own, so that none inherits another's compiled code, memory or settings, and a folder of its name.
    The order changes from round to round. ``KeyboardInterrupt`` ends the measurement early.

    Rounds have so many ``steps`` and are noted in seconds per batch; ``advance`` is called before each sample. Raises
    :class:`TuneError` if the first one does not train.
    """
    first: dict[str, float] = {}  # seconds of a step while it compiles and warms up
    with ExitStack() as stack:
        processes: dict[str, TrainerProcess] = {}
        for trial in trials:
            processes[trial.name] = start(project, trial.candidate, folder / trial.name.replace("/", "_"), summary_of)
            stack.callback(processes[trial.name].stop)
        with suppress(KeyboardInterrupt):
            for trial in trials:
                advance(f"{trial.name}: first steps")
                if (sample := _tried(trial, partial(processes[trial.name].sample, warm_up))) is not None:
                    first[trial.name] = sample.step_seconds
                elif trial is trials[0]:
                    raise TuneError(f"{trial.name}, which the others are compared with, does not train: {trial.why}")
            for number in range(1, rounds + 1):
                for trial in in_turns(trials, number):
                    advance(f"{trial.name}: round {number} of {rounds}")
                    if (sample := _tried(trial, partial(processes[trial.name].sample, steps))) is not None:
                        trial.note(sample)
                        trial.count(number, sample)
            for trial in trials:
                trial.summary = _tried(trial, processes[trial.name].finish)
    for trial in trials:
        if (seconds := trial.seconds_per_example) is not None:
            trial.startup = max(0.0, warm_up * (first[trial.name] - seconds))


def _tried(trial: Trial, call: Callable[[], Any]) -> Any:
    if trial.verdict == "failed":
        return None
    try:
        return call()
    except VariantFailed as error:
        trial.verdict, trial.why = "failed", str(error)
    return None
