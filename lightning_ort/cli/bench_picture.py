"""The plot of ``lightning-ort bench``: :func:`draw_bars`."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning_ort._text import digits, plain
from lightning_ort.tuning.trials import Trial, ratios, times

# told apart by the colour-blind, too
_ENGINES = {"stock": "#767676", "compile": "#0072b2", "torch": "#009e73", "ort": "#d55e00", "auto": "#cc79a7"}


def installed() -> bool:
    """Return whether there is what it takes to draw."""
    return find_spec("matplotlib") is not None


def draw_bars(trials: Sequence[Trial], title: str, footnote: str, path: Path) -> None:
    """Write how many times as fast as the first each trial was as a PNG: a bar for the median, a dot for each round."""
    from matplotlib.figure import Figure  # slow to import, and only some runs need it

    figure = Figure(figsize=(9, 1.8 + 0.45 * len(trials)), layout="constrained")
    axes = figure.subplots()
    for place, trial in enumerate(trials):
        faster, each = times(trial, trials[0]), ratios(trial, trials[0])
        color = _ENGINES[trial.candidate.engine or "stock"]
        axes.barh(place, faster or 0, height=0.6, color=color, alpha=0.45)
        axes.scatter(each, [place] * len(each), s=14, color=color, edgecolors="white", linewidths=0.4, zorder=3)
        # outside of the axes, where no dot can be in the way
        axes.text(
            1.02, place, _label(trial, faster), transform=axes.get_yaxis_transform(), va="center", parse_math=False
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(trials)), [plain(trial.name, "utf-8") for trial in trials], parse_math=False)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    explanation = f"speed relative to {trials[0].name}, longer is faster (bar: median, dots: rounds)"
    axes.set_xlabel(plain(explanation, "utf-8"), parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plain(title, "utf-8"), loc="left", parse_math=False)
    text = plain(footnote, "utf-8")
    figure.text(0.01, -0.01, text, fontsize="x-small", color="dimgray", va="top", wrap=True, parse_math=False)
    figure.savefig(path, dpi=110, bbox_inches="tight", format="png")


def _label(trial: Trial, faster: float | None) -> str:
    if (seconds := trial.seconds_per_example) is None:
        return "failed" if trial.why else "not finished"
    speed = f"{faster:.2f}x, " if faster is not None else ""
    return f"{speed}{digits(1000 * seconds)} ms a step{', failed later' if trial.why else ''}"
