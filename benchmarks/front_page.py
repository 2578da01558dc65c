"""The chart and the tables of speeds in README.md and docs, from the newest result files: ``make figures``.

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
MACHINE = "2 virtual cores of an AMD EPYC"  # with AVX512-BF16
CHARTED = ("BERT", "ResNet", "ViT", "GPT", "Llama", "Tagger")
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


def peaks(variant: str) -> dict[str, float]:
    """Return peak memory relative to stock by module: of the newest file about memory where it has the module."""
    found = read(newest("baseline")) | {
        module: rows for module, rows in read(newest("memory")).items() if variant in rows
    }
    return {module: rows[variant]["peak"] / rows["stock"]["peak"] for module, rows in found.items()}


def own_gains() -> dict[str, float]:
    """Return how many times as fast ONNX Runtime makes a step that is otherwise the same, where it ran any of it."""
    rows = read(newest("baseline"))
    return {name: row["off"]["ms"] / row["ort"]["ms"] for name, row in rows.items() if row["ort"]["on_ort"] > 0}


def own_mean() -> float:
    """Return the mean of these over all modules: those that it did not run ran the same code, so they count as 1."""
    gains = list(own_gains().values())
    return mean(gains + [1.0] * (len(read(newest("baseline"))) - len(gains)))


def span(ratios: Any) -> str:
    """Return the least and the largest of ratios as text."""
    ratios = list(ratios)
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x"


def gains() -> str:
    """Return the table of README.md."""
    rows, mixed = read(newest("baseline")), read(newest("bf16"))

    def line(what: str, found: dict[str, Any], variant: str, precision: str, memory: Any) -> str:
        speed = mean(row[variant]["speed"] for row in found.values())
        return f"| {what} | {precision} | {speed:.2f}x | {span(memory)} |"

    stock = mean(row["stock@bf16-mixed"]["speed"] for row in mixed.values())
    peak_in_bf16 = [row["ort@bf16-mixed"]["peak"] / row["stock"]["peak"] for row in mixed.values()]
    return "\n".join(
        [
            "| a training step | precision | speed | peak memory |",
            "|---|---|---|---|",
            line("nothing compiled", rows, "off", "float32", peaks("off").values()),
            line("with ONNX Runtime", rows, "ort", "float32", peaks("ort").values()),
            line("with inductor too", rows, "auto", "float32", peaks("auto").values()),
            line(
                f"with bf16, {len(mixed)} models (stock Lightning in bf16: {stock:.2f}x)",
                mixed,
                "ort@bf16-mixed",
                "bf16-mixed",
                peak_in_bf16,
            ),
        ]
    )


def speeds() -> str:
    """Return the table of all modules, the one that gains most first."""
    rows = read(newest("baseline"))
    memory = {variant: peaks(variant) for variant in ("ort", "auto")}
    variants = (FUSED, "off", "ort", "auto")
    lines = [
        "| model | stock, fused optimizer | nothing compiled | with ONNX Runtime | with inductor too"
        " | ONNX Runtime ran it | peak memory: ONNX Runtime, inductor |",
        "|---|---|---|---|---|---|---|",
    ]
    for module in sorted(rows, key=lambda name: -rows[name]["auto"]["speed"]):
        row = rows[module]
        cells = [f"{row[FUSED]['speed']:.2f}x"]
        cells += [f"{row[v]['speed']:.2f}x ({row[v]['slowest']:.2f}-{row[v]['fastest']:.2f})" for v in variants[1:]]
        cells.append("yes" if row["ort"]["on_ort"] > 0 else "no")
        cells.append(", ".join(f"{memory[variant][module]:.2f}x" for variant in memory))
        lines.append(f"| {NAMES[module]} | {' | '.join(cells)} |")
    means = [f"{mean(row[variant]['speed'] for row in rows.values()):.2f}x" for variant in variants]
    means += [f"{len(own_gains())} of {len(rows)}"]
    means.append(", ".join(f"{mean(found.values()):.2f}x" for found in memory.values()))
    return "\n".join([*lines, f"| geometric mean | {' | '.join(means)} |"])


def speeds_in_bf16() -> str:
    """Return the table of the modules that were measured in bf16-mixed."""
    rows = read(newest("bf16"))
    variants = ("stock", FUSED, "off", "ort", "auto")
    titles = ("stock", "stock, fused optimizer", "nothing compiled", "with ONNX Runtime", "with inductor too")
    lines = [f"| model, bf16-mixed | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    found = [(NAMES[name], [row[f"{v}@bf16-mixed"]["speed"] for v in variants]) for name, row in rows.items()]
    found.append(("geometric mean", [mean(column) for column in zip(*(cells for _, cells in found), strict=True)]))
    lines += [f"| {name} | {' | '.join(f'{speed:.2f}x' for speed in cells)} |" for name, cells in found]
    return "\n".join(lines)


def whole_fits() -> dict[tuple[str, str], float]:
    """Return the seconds of whole fits by module and variant; the columns are module, variant, steps, seconds."""
    lines = newest("whole-fits").read_text(encoding="utf-8").replace("│", " ").splitlines()
    rows = [row for row in map(str.split, lines) if row[1:2] in (["off"], ["ort"], ["again"])]
    return {(row[0], row[1]): float(row[3]) for row in rows}


def long_fits() -> dict[tuple[str, str], float]:
    """Return the mean seconds of the first fits of each third-party model by model and strategy."""
    found: dict[tuple[str, str], float] = {}
    line_of = re.compile(r"^(\w+) +(stock|ort) +[\d. ]+ ([\d.]+) +[\d.]+x ")
    for line in newest("long-fits").read_text(encoding="utf-8").splitlines():
        if row := line_of.match(line):
            found.setdefault((row[1], row[2]), float(row[3]))
    return found


def fits() -> str:
    """Return the table of whole fits."""
    ours, others = whole_fits(), long_fits()
    compiled = [("ResNet", "20,000", "inductor"), ("Llama", "8,000", "ONNX Runtime")]
    lines = ["| model | steps | before | with `ort` | | the step ran on |", "|---|---|---|---|---|---|"]
    rows = [(name, steps, ours[name, "off"], ours[name, "ort"], engine) for name, steps, engine in compiled]
    third = [("T5", "t5", "1,500"), ("LoRA of a Llama", "lora", "1,500"), ("Whisper", "whisper", "1,500")]
    third.append(("GPT of the examples", "gpt", "1,000"))
    rows += [(name, steps, others[key, "stock"], others[key, "ort"], "PyTorch") for name, key, steps in third]
    for name, steps, before, after, engine in rows:
        lines.append(f"| {name} | {steps} | {before:.0f} s | {after:.0f} s | {before / after:.2f}x | {engine} |")
    return "\n".join(lines)


# page, name of the table there -> what makes it
TABLES = {
    ("README.md", "gains"): gains,
    ("docs/results.md", "speeds"): speeds,
    ("docs/results.md", "bf16"): speeds_in_bf16,
    ("docs/results.md", "fits"): fits,
}


def table_on(page: str, name: str) -> re.Match[str]:
    """Find a table on a page, between the comments that name it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    match = re.search(rf"(?<=<!-- table: {name} -->\n\n).*?(?=\n\n<!-- end -->)", text, flags=re.DOTALL)
    if match is None:
        raise ValueError(f"{page} has no <!-- table: {name} --> ... <!-- end -->")
    return match


def write_tables() -> None:
    """Put the tables into the pages."""
    for (page, name), make in TABLES.items():
        place = table_on(page, name)
        (ROOT / page).write_text(place.string[: place.start()] + make() + place.string[place.end() :], encoding="utf-8")


def bars() -> list[tuple[int, float, str, float]]:
    """Return the place of the model, the place within it, the kind and the speed of each bar of the chart."""
    rows, mixed = read(newest("baseline")), read(newest("bf16"))
    return [
        (place, height, kind, found[module][variant]["speed"])
        for place, module in enumerate(CHARTED)
        for height, kind, found, variant in (
            (-0.3, "off", rows, "off"),
            (-0.1, "ort", rows, "ort"),
            (0.1, "auto", rows, "auto"),
            (0.3, "bf16", mixed, "ort@bf16-mixed"),
        )
        if variant in found.get(module, {})
    ]


def chart(theme: str) -> Any:
    """Return the chart in the colours of a theme, as a figure of matplotlib."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # letters as outlines, so that the picture is the same everywhere, and the same bytes for the same figures
    rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "lightning-ort", "font.size": 10})
    colours = THEMES[theme]
    figure = Figure(figsize=(6.6, 0.8 + 0.65 * len(CHARTED)), layout="constrained", facecolor=colours["page"])
    axes = figure.subplots()
    axes.set_facecolor(colours["page"])
    for place, height, kind, speed in bars():
        axes.barh(place + height, speed, height=0.19, color=colours[kind])
        axes.text(speed + 0.02, place + height, f"{speed:.2f}x", va="center", color=colours["text"], fontsize=7)
    longest = max(speed for *_, speed in bars())
    axes.axvline(1, color=colours["text"], linewidth=0.8)
    axes.set_yticks(range(len(CHARTED)), [NAMES[module] for module in CHARTED])
    axes.set_xlim(0, 1.1 * longest)  # room for the number behind the longest
    axes.set_ylim(-0.6, len(CHARTED) - 0.4)
    axes.invert_yaxis()
    axes.tick_params(colors=colours["text"], length=0)
    axes.spines[:].set_visible(False)
    ticks = [step / 2 for step in range(int(2 * longest) + 1)]
    axes.set_xticks(ticks, ["1x: stock" if tick == 1 else f"{tick:g}x" for tick in ticks])
    labels = {
        "off": "nothing compiled: fused optimizer, retained memory, faster dropout masks",
        "ort": "with ONNX Runtime",
        "auto": "with ONNX Runtime and inductor, which runs of minutes also try",
        "bf16": 'with ONNX Runtime and precision="bf16-mixed"',
    }
    date = newest("baseline").name[:10]
    legend = figure.legend(
        handles=[Patch(color=colours[kind], label=label) for kind, label in labels.items()],
        title=f'strategy="ort" beside stock Lightning in float32, speed of a step\n({MACHINE}, {date})',
        loc="outside upper left",
        alignment="left",
        frameon=False,
        labelcolor=colours["text"],
        fontsize=9,
        title_fontproperties={"size": 10, "weight": "bold"},
    )
    legend.get_title().set_color(colours["text"])
    return figure


def draw(theme: str) -> Path:
    """Draw the chart in the colours of a theme, and return its path."""
    output = IMAGES / f"speed_{theme}.svg"
    page = THEMES[theme]["page"]
    chart(theme).savefig(output, bbox_inches="tight", facecolor=page, metadata={"Date": None})
    return output


if __name__ == "__main__":
    write_tables()
    for name in THEMES:
        print(draw(name).relative_to(ROOT))
