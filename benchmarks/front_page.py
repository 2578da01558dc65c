"""The chart of README.md and docs/index.md, drawn from the newest result files: ``python benchmarks/front_page.py``.

``read`` has the figures, which ``tests/test_figures.py`` compares with those on the pages.
"""

import math
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
TITLE = re.compile(r"^ *(\w+): median of \d+ rounds of \d+ steps *$")
ROW = re.compile(
    r"^│ (\S+)(?: \*)? +│ +([\d.,]+) │ +([\d.]+) │ +([\d.]+)x │ +([\d.]+)-([\d.]+) │ +(-?[\d.]+) │.*│ +([\d,]+) │"
    r" +\S+ │ +(\d+%|-) │$"
)
NAMES = {
    "MLP": "MLP",
    "Autoencoder": "autoencoder",
    "CNN": "CNN",
    "LSTM": "LSTM",
    "GPT": "GPT, batch 8 x 128",
    "SmallGPT": "GPT, batch 1 x 64",
    "BERT": "BERT, MiniLM's sizes",
    "ViT": "ViT",
    "UNet": "UNet",
    "FTTransformer": "FT-Transformer",
    "Mixer": "MLP-Mixer",
    "ResNet": "ResNet",
    "Tagger": "GRU tagger",
    "VAE": "VAE",
    "Llama": "Llama",
}
FUSED = "stock+adamw_torch_fused"
THEMES = {
    "light": {
        "text": "#1c2024",
        "quiet": "#5b636b",
        "page": "#ffffff",
        "off": "#8a949d",
        "ort": "#0b62b5",
        "auto": "#1b8a5a",
        "bf16": "#c4570b",
    },
    "dark": {
        "text": "#e6e9ec",
        "quiet": "#a3acb5",
        "page": "#14171a",
        "off": "#8d97a0",
        "ort": "#6db3f5",
        "auto": "#5fce9d",
        "bf16": "#f0a35e",
    },
}


def newest(kind: str) -> Path:
    """Return the newest result file of a kind, such as ``"zoo"``; their names begin with the date."""
    return max(RESULTS.glob(f"????-??-??-{kind}.txt"))


def read(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of a table of ``trainer_steps.py``, by module and variant."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    module = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if title := TITLE.match(line):
            module = title[1]
        elif row := ROW.match(line):
            names = ("ms", "steps", "speed", "slowest", "fastest", "start", "peak")
            *values, share = row.groups()[1:]
            figures = dict(zip(names, (float(value.replace(",", "")) for value in values), strict=True))
            figures["on_ort"] = math.nan if share == "-" else float(share.rstrip("%"))  # percent
            found.setdefault(module, {})[row[1]] = figures
    return found


def mean(values: Any) -> float:
    """Return the geometric mean of ratios."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def draw(theme: str) -> Path:
    """Draw the chart in the colours of a theme, and return its path."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # letters as outlines, so that the picture is the same everywhere, and the same bytes for the same figures
    rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "lightning-ort", "font.size": 10})
    colours, path = THEMES[theme], newest("baseline")
    rows, mixed = read(path), read(newest("bf16"))
    modules = sorted(rows, key=lambda module: -rows[module]["auto"]["speed"])
    bars = [
        (place, height, colour, found[module][variant]["speed"])
        for place, module in enumerate(modules)
        for height, colour, found, variant in (
            (-0.3, "off", rows, "off"),
            (-0.1, "ort", rows, "ort"),
            (0.1, "auto", rows, "auto"),
            (0.3, "bf16", mixed, "ort@bf16-mixed"),
        )
        if variant in found.get(module, {})
    ]
    figure = Figure(figsize=(8, 0.55 + 0.52 * len(modules)), layout="constrained", facecolor=colours["page"])
    axes = figure.subplots()
    axes.set_facecolor(colours["page"])
    for place, height, colour, speed in bars:
        axes.barh(place + height, speed, height=0.19, color=colours[colour])
        axes.text(speed + 0.02, place + height, f"{speed:.2f}x", va="center", color=colours["text"], fontsize=7)
    axes.axvline(1, color=colours["text"], linewidth=0.8)
    axes.set_yticks(range(len(modules)), [NAMES[module] for module in modules])
    axes.set_xlim(0, 2.2)
    axes.set_ylim(-0.6, len(modules) - 0.4)
    axes.invert_yaxis()
    axes.tick_params(colors=colours["text"], length=0)
    axes.spines[:].set_visible(False)
    axes.set_xticks([0, 0.5, 1, 1.5, 2], ["0", "0.5x", "1x: stock", "1.5x", "2x"])
    labels = {
        "off": 'fused optimizer and retained memory: strategy="ort" without compiling',
        "ort": 'strategy="ort" with ONNX Runtime',
        "auto": 'strategy="ort" with ONNX Runtime and inductor, which runs of minutes also try',
        "bf16": 'strategy="ort" with ONNX Runtime, precision="bf16-mixed"',
    }
    title = f"Speed of training steps relative to stock Lightning in float32 (two virtual cores, {path.name[:10]})"
    legend = figure.legend(
        handles=[Patch(color=colours[colour], label=label) for colour, label in labels.items()],
        title=title,
        loc="outside upper left",
        alignment="left",
        frameon=False,
        labelcolor=colours["text"],
        fontsize=9,
        title_fontproperties={"size": 10, "weight": "bold"},
    )
    legend.get_title().set_color(colours["text"])
    output = IMAGES / f"speed_{theme}.svg"
    figure.savefig(output, bbox_inches="tight", facecolor=colours["page"], metadata={"Date": None})
    return output


if __name__ == "__main__":
    for name in THEMES:
        print(draw(name).relative_to(ROOT))
