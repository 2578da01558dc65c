"""The trials as a plot, samples per second against peak memory: :func:`draw`."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ort._text import plain

if TYPE_CHECKING:
    from lightning_ort.tuning.result import TuneResult

# told apart by the colour-blind, too
_OTHERS, _OWN, _CHOSEN, _FRONT = "#999999", "#0072b2", "#d55e00", "#009e73"


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


def draw(result: "TuneResult", path: Path) -> None:
    """Write the plot as a PNG."""
    from matplotlib.figure import Figure  # slow to import, and only some runs need it

    shown: list[tuple[int, dict[str, Any]]] = [
        (place, trial)
        for place, trial in enumerate(result.trials)
        if trial["seconds_per_example"] and trial["peak_bytes"] is not None and trial["verdict"] != "refused"
    ]
    own = result.trials[0]["seconds_per_example"]
    # of the rounds that both took part in: the machine may have been slower in some
    points = [(trial["peak_bytes"] / 1e6, (trial["speed"] or [1.0])[0] / own) for _, trial in shown]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    front = pareto_front(points)
    axes.plot([points[p][0] for p in front], [points[p][1] for p in front], color=_FRONT, lw=1, label="Pareto front")
    for (place, trial), (x, y) in zip(shown, points, strict=True):
        color = _CHOSEN if place == result.chosen else _OWN if place == 0 else _OTHERS
        label = "chosen" if place == result.chosen else "yours" if place == 0 else None
        axes.scatter([x], [y], color=color, s=60 if label else 25, zorder=3, label=label)
        text = plain(trial["candidate"], "utf-8")
        axes.annotate(text, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7, parse_math=False)
    axes.set_xlabel("peak memory, MB")
    axes.set_ylabel("samples/s")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(plain(f"{result.module}: {result.speed_up:.2f}x", "utf-8"), loc="left", parse_math=False)
    axes.legend(frameon=False, fontsize=8)
    footnote = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    figure.text(0.01, -0.01, plain(footnote, "utf-8"), fontsize="x-small", color="dimgray", va="top", parse_math=False)
    with path.open("xb") as file:
        figure.savefig(file, dpi=110, bbox_inches="tight", format="png")
