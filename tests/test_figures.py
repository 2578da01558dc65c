"""Each figure in README.md and docs is that of the newest result file; ``CLAIMS`` lists those outside of tables."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import front_page  # noqa: E402
from front_page import newest, read, span  # noqa: E402

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
# a speed or a share: 1.20x, 0.33 of the time
FIGURE = re.compile(r"\b\d+\.\d{2,}x|\b\d+\.\d{2,}(?= of\b| with\b)")
RESULT = re.compile(r"\]\((?:\.\./)?benchmarks/results/(\d{4}-\d\d-\d\d)-([\w-]+)\.txt\)")

BF16, BASELINE = (read(newest(kind)) for kind in ("bf16", "baseline"))
FUSED = front_page.FUSED
# An older file, on purpose: before dropout masks were drawn faster, and with inductor's cache cold
OLD = "2026-11-24-baseline.txt"
BEFORE = read(front_page.RESULTS / OLD)
FITS = front_page.whole_fits()
AUTO = 'engine="auto"'


def starts(variant: str) -> str:
    seconds = [rows[variant]["start"] for rows in BEFORE.values()]
    return f"{min(seconds):.0f} to {max(seconds):.0f} s"


def builds() -> list[str]:
    """Means of the column "one / eager", with the training build and with the newest one."""
    tables = newest("builds").read_text(encoding="utf-8").split("\n2026-")[1:]
    rows = [[line.split("│") for line in table.splitlines() if line.startswith("│")] for table in tables]
    ratios = [[float(row[6]) for row in table if row[6].strip()] for table in rows]
    return [f"{front_page.mean(found):.2f}" for found in ratios]


def ratio_of(kind: str, row: str) -> float:
    """The last number of the first row that begins so in the newest file of a kind."""
    lines = [line.strip("│ ") for line in newest(kind).read_text(encoding="utf-8").splitlines()]
    return float(next(line for line in lines if line.startswith(f"{row} ")).split("│")[-1])


def on_gpu(kind: str, model: str, variant: str) -> str:
    """The speed of a step beside stock's: after the model, the precision, the variant and the milliseconds."""
    rows = map(str.split, newest(kind).read_text(encoding="utf-8").splitlines())
    return next(f"{row[4]}x" for row in rows if row[:3] == [model, "bf16-mixed", variant])


def loss_ratio(optimizer: str) -> float:
    text = newest("optimizer-accuracy").read_text(encoding="utf-8")
    return float(next(line for line in text.splitlines() if line.startswith(f"│ {optimizer} ")).split("│")[4])


def loss_after_steps(optimizer: str) -> str:
    return f"{abs(loss_ratio(optimizer) - 1) * 100:.1f} %"


def gain_on_intel() -> str:
    """The mean of the column "gain", where the slower way counts as 1."""
    rows = re.findall(
        r"^│ .* │ (?:ort|torch) .*│ +([\d.]+) │$", newest("intel").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == 15
    return f"{front_page.mean(max(1.0, float(gain)) for gain in rows):.2f}x"


BEST = f"{max(front_page.own_gains().values()):.2f}x"
OWN = f"{front_page.own_mean():.3f}x"
THIRD_PARTY = re.findall(
    r"^[\w.]+: ([\d.]+) s, ([\d.]+) s", newest("projects").read_text(encoding="utf-8"), re.MULTILINE
)
OTHERS = f"{front_page.mean(float(stock) / float(ort) for stock, ort in THIRD_PARTY):.2f}x"
BETWEEN_SAME = max(
    abs(rows["ort"]["speed"] / rows["torch"]["speed"] - 1) for rows in BASELINE.values() if rows["ort"]["on_ort"] == 0
)

# page -> text around figures, and the figures
CLAIMS: dict[str, list[tuple[str, ...]]] = {
    "README.md": [("{} on the mean, none slower", OTHERS)],
    "docs/results.md": [
        ("on an Intel Xeon [in six](../benchmarks/results/2026-11-29-intel.txt): {}.", gain_on_intel()),
        ("**ONNX Runtime** by itself is {}:", OWN),
        ("is the small GPT, {}.", BEST),
        (": {}, in PyTorch;", f"{read(newest('three-models'))['BERT']['ort']['speed']:.2f}x"),
        ("they differ by up to {} %", f"{BETWEEN_SAME * 100:.0f}"),
        ("took {} for ONNX Runtime and {} with inductor", starts("ort"), starts("auto")),
        (
            "was {} of that of stock float32",
            span(r["ort@bf16-mixed"]["peak"] / r["stock"]["peak"] for r in BF16.values()),
        ),
        ("of the ResNet took {} s", f"{FITS['ResNet', 'again']:.0f}"),
        ("steps took {} of eager's time with `onnxruntime-training-cpu` 1.19.2 and {} with", *builds()),
        ("{} stock on the mean, none slower", OTHERS),
    ],
    "docs/status.md": [
        ("| GPT-2, 8 x 1024, H200 | {} | {} | {} |", *(on_gpu("gpu", "gpt2", v) for v in ("fused", "compile", AUTO))),
        ("8 x 1024, H100 | | {} | {} |", *(on_gpu("gpu-h100", "llama", v) for v in ("compile", AUTO))),
        ("| BERT, 64 x 128, H200 | {} | {} |", *(on_gpu("gpu", "bert", v) for v in ("fused", "compile"))),
        ("| ViT, 64 pictures, H200 | {} | {} |", *(on_gpu("gpu", "vit", v) for v in ("fused", "compile"))),
    ],
    "docs/faster.md": [("in {} of the time for 10 million", f"{ratio_of('optimizer-step', 'adamw_torch_fused'):.2f}")],
    "docs/optimizers.md": [
        ("the training loss is {} above", loss_after_steps("adamw_bnb_8bit")),
        ("with bitsandbytes, and {} below", loss_after_steps("adamw_torchao_8bit")),
        ("it is {} times as high", f"{loss_ratio('adafactor'):.2f}"),
    ],
}


def words_of(page: str) -> str:
    """The text wherever its lines end."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("page", "claim"), [(page, claim) for page, claims in CLAIMS.items() for claim in claims])
def test_figure_is_that_of_the_newest_file(page: str, claim: tuple[str, ...]) -> None:
    text, *figures = claim
    assert text.format(*figures) in words_of(page)


@pytest.mark.parametrize(("page", "name"), front_page.TABLES)
def test_table_is_made_from_the_newest_files(page: str, name: str) -> None:
    assert front_page.table_on(page, name)[0] == front_page.TABLES[page, name](), "make figures"


@pytest.mark.parametrize("page", PAGES)
def test_no_other_figure_is_claimed(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for where, name in front_page.TABLES:
        if where == page:
            text = text.replace(front_page.table_on(page, name)[0], "")
    claimed = {found for _, *figures in CLAIMS.get(page, ()) for figure in figures for found in figure.split(" to ")}
    assert set(FIGURE.findall(text)) <= claimed


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/README.md"])
def test_pages_link_to_the_newest_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").replace("](results/", "](benchmarks/results/")
    linked = {f"{date}-{kind}.txt": newest(kind).name for date, kind in RESULT.findall(text)}
    assert {name: new for name, new in linked.items() if name != new} == (
        {OLD: newest("baseline").name} if page == "docs/results.md" else {}
    )


def test_the_tests_find_what_they_look_for() -> None:
    assert FIGURE.findall("1.20x, 1.017x and 12.34x; 0.33 of the time; version 2.13 and 5 %") == [
        "1.20x",
        "1.017x",
        "12.34x",
        "0.33",
    ]
    assert RESULT.findall((ROOT / "docs/results.md").read_text(encoding="utf-8"))
    assert [rows["ort"]["on_ort"] for rows in BASELINE.values()].count(0) == 11
    assert "11 of the 15 models, which PyTorch ran" in words_of("docs/results.md")
