"""The tables of speeds in README.md and docs, from the newest result files: ``make figures``.

``read`` has the figures, which ``tests/test_figures.py`` compares with those on the pages.
"""

import math
import re
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
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
            variant = re.sub(r"^off\b", "torch", row[1])  # its name until 2026-11-27
            found.setdefault(module, {})[variant] = figures
    return found


def mean(values: Any) -> float:
    """Return the geometric mean of ratios."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))


def peaks(variant: str) -> dict[str, float]:
    """Return peak memory relative to stock by module: of the newest file that has the module."""
    files = sorted((newest(kind) for kind in ("baseline", "memory", "three-models")), key=lambda path: path.name)
    found = [item for path in files for item in read(path).items() if variant in item[1]]
    return {module: rows[variant]["peak"] / rows["stock"]["peak"] for module, rows in found}


def own_gains() -> dict[str, float]:
    """Return how many times as fast ONNX Runtime makes a step that is otherwise the same, where it ran any of it."""
    rows = read(newest("baseline"))
    return {name: row["torch"]["ms"] / row["ort"]["ms"] for name, row in rows.items() if row["ort"]["on_ort"] > 0}


def own_mean() -> float:
    """Return the mean of these over all modules: those that it did not run ran the same code, so they count as 1."""
    gains = list(own_gains().values())
    return mean(gains + [1.0] * (len(read(newest("baseline"))) - len(gains)))


def span(ratios: Any) -> str:
    """Return the least and the largest of ratios as text."""
    ratios = list(ratios)
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x"


def by_hand() -> str:
    """Return the table of README.md: whole fits beside what can be done without this package."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for line in newest("by-hand").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) > 8 and cells[3].isdigit():
            figures = {"seconds": cells[5], "settled": cells[6], "peak": cells[7]}
            found.setdefault(cells[1], {})[cells[2]] = {
                name: [*map(float, text.split())] for name, text in figures.items()
            }

    def spread(values: list[float], unit: str, digits: int) -> str:
        """The median of rounds with the least and the greatest; of two rounds these alone."""
        least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
        if least == most:
            return f"{least}{unit}"
        middle = f"{statistics.median(values):.{digits}f}{unit} " if len(values) > 2 else ""
        return f"{middle}({least}-{most}{unit})" if middle else f"{least}-{most}{unit}"

    def row(what: str, variant: str, figure: str) -> str:
        ratios = [rows[variant]["peak"][0] / rows["stock"]["peak"][0] for rows in found.values()]
        memory = f"{min(ratios):.2f}x-{max(ratios):.2f}x"
        rounds = [zip(rows["stock"][figure], rows[variant][figure], strict=True) for rows in found.values()]
        cells = [spread([stock / own for stock, own in pairs], "x", 2) for pairs in rounds]
        return f"| {' | '.join([what, *cells, memory])} |"

    seconds = [spread(rows["stock"]["seconds"], " s", 1) for rows in found.values()]
    return "\n".join(
        [
            f"| whole fits, start-up included | {' | '.join(found)} | peak memory |",
            "|---" * (len(found) + 2) + "|",
            f"| stock Lightning | {' | '.join(seconds)} | |",
            row("`fused=True`", "fused", "seconds"),
            row("+ jemalloc", "jemalloc", "seconds"),
            row("+ `torch.compile`", "compile", "seconds"),
            row("... without its start-up", "compile", "settled"),
            row('**`strategy="ort"`**', "ort", "seconds"),
            row("bf16-mixed, fused, jemalloc", "bf16", "seconds"),
            row("**bf16-mixed, `ort`**", "ort@bf16", "seconds"),
        ]
    )


def speeds() -> str:
    """Return the table of all modules, the one that gains most first."""
    rows = read(newest("baseline"))
    memory = {variant: peaks(variant) for variant in ("ort", "auto")}
    variants = (FUSED, "torch", "ort", "auto")
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
    variants = ("stock", FUSED, "torch", "ort", "auto")
    titles = ("stock", "stock, fused optimizer", "nothing compiled", "with ONNX Runtime", "with inductor too")
    lines = [f"| model, bf16-mixed | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    found = [(NAMES[name], [row[f"{v}@bf16-mixed"]["speed"] for v in variants]) for name, row in rows.items()]
    found.append(("geometric mean", [mean(column) for column in zip(*(cells for _, cells in found), strict=True)]))
    lines += [f"| {name} | {' | '.join(f'{speed:.2f}x' for speed in cells)} |" for name, cells in found]
    return "\n".join(lines)


def whole_fits() -> dict[tuple[str, str], float]:
    """Return the seconds of whole fits by module and variant.

    The columns are module, variant, steps, seconds; in older files ``torch`` is ``off``.
    """
    lines = newest("whole-fits").read_text(encoding="utf-8").replace("│", " ").splitlines()
    rows = [row for row in map(str.split, lines) if len(row) > 3 and row[1] in ("off", "torch", "ort", "again")]
    return {(row[0], row[1].replace("off", "torch")): float(row[3]) for row in rows}


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
    rows = [(name, steps, ours[name, "torch"], ours[name, "ort"], engine) for name, steps, engine in compiled]
    third = [("T5", "t5", "1,500"), ("LoRA of a Llama", "lora", "1,500"), ("Whisper", "whisper", "1,500")]
    third.append(("GPT of the examples", "gpt", "1,000"))
    rows += [(name, steps, others[key, "stock"], others[key, "ort"], "PyTorch") for name, key, steps in third]
    for name, steps, before, after, engine in rows:
        lines.append(f"| {name} | {steps} | {before:.0f} s | {after:.0f} s | {before / after:.2f}x | {engine} |")
    return "\n".join(lines)


# page, name of the table there -> what makes it
TABLES = {
    ("README.md", "by hand"): by_hand,
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


if __name__ == "__main__":
    write_tables()
