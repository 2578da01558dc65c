"""Plots: samples per second against peak memory, :func:`draw`, and speeds by name, :func:`draw_bars`."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from lightning_ort._text import digits, plain
from lightning_ort.tuning.trials import Trial, ratios, times

# told apart by the colour-blind, too
_OTHERS, _OWN, _CHOSEN, _FRONT = "#999999", "#0072b2", "#d55e00", "#009e73"
_ENGINES = {"stock": "#767676", "compile": "#0072b2", "torch": "#009e73", "ort": "#d55e00", "auto": "#cc79a7"}


def installed() -> bool:
    """Return whether there is what it takes to draw."""
    return find_spec("matplotlib") is not None


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the places of the points (bytes, speed) of which no other has less bytes and more speed."""
    front: list[int] = []
    for place in sorted(range(len(points)), key=lambda place: (points[place][0], -points[place][1])):
        if not front or points[place][1] > points[front[-1]][1]:
            front.append(place)
    return front


def draw(trials: Sequence[Mapping[str, Any]], chosen: int, title: str, footnote: str, path: Path) -> None:
    """Write the plot of a search's trials, of which one was chosen, as a PNG."""
    from matplotlib.figure import Figure  # slow to import, and only some runs need it

    shown: list[tuple[int, Mapping[str, Any]]] = [
        (place, trial)
        for place, trial in enumerate(trials)
        if trial["seconds_per_example"] and trial["peak_bytes"] is not None and trial["verdict"] != "refused"
    ]
    own = trials[0]["seconds_per_example"]
    # of the rounds that both took part in: the machine may have been slower in some
    points = [(trial["peak_bytes"] / 1e6, (trial["speed"] or [1.0])[0] / own) for _, trial in shown]
    axes = Figure(figsize=(8, 5), layout="constrained").subplots()
    front = pareto_front(points)
    axes.plot([points[p][0] for p in front], [points[p][1] for p in front], color=_FRONT, lw=1, label="Pareto front")
    for (place, trial), (x, y) in zip(shown, points, strict=True):
        color = _CHOSEN if place == chosen else _OWN if place == 0 else _OTHERS
        label = "chosen" if place == chosen else "yours" if place == 0 else None
        axes.scatter([x], [y], color=color, s=60 if label else 25, zorder=3, label=label)
        text = plain(trial["candidate"], "utf-8")
        axes.annotate(text, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7, parse_math=False)
    axes.set_xlabel("peak memory, MB")
    axes.set_ylabel("samples/s")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.2)
    axes.legend(frameon=False, fontsize=8)
    with path.open("xb") as file:
        _write(axes, title, footnote, file)


def draw_bars(trials: Sequence[Trial], title: str, footnote: str, path: Path) -> None:
    """Write how many times as fast as the first each trial was as a PNG: a bar for the median, a dot for each round."""
    from matplotlib.figure import Figure  # slow to import, and only some runs need it

    axes = Figure(figsize=(9, 1.8 + 0.45 * len(trials)), layout="constrained").subplots()
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
    with path.open("wb") as file:
        _write(axes, title, footnote, file)


def _write(axes: Any, title: str, footnote: str, file: IO[bytes]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plain(title, "utf-8"), loc="left", parse_math=False)
    text = plain(footnote, "utf-8")
    axes.figure.text(0.01, -0.01, text, fontsize="x-small", color="dimgray", va="top", wrap=True, parse_math=False)
    axes.figure.savefig(file, dpi=110, bbox_inches="tight", format="png")


def _label(trial: Trial, faster: float | None) -> str:
    if (seconds := trial.seconds_per_example) is None:
        return "failed" if trial.why else "not finished"
    speed = f"{faster:.2f}x, " if faster is not None else ""
    return f"{speed}{digits(1000 * seconds)} ms a step{', failed later' if trial.why else ''}"
