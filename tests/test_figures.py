"""Each figure on README.md and docs/index.md is that of the newest result file; docs/contributing.md lists them."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import front_page  # noqa: E402

ZOO = front_page.read(front_page.newest("zoo"))
PRECISION = front_page.read(front_page.newest("precision"))
BASELINE = front_page.read(front_page.newest("baseline"))


def overall(variant: str, found: dict = ZOO) -> str:
    return f"{front_page.mean(rows[variant]['speed'] for rows in found.values()):.2f}x"


def speed(found: dict, module: str, variant: str) -> str:
    return f"{found[module][variant]['speed']:.2f}x"


def whole_fits() -> dict[tuple[str, str], float]:
    """Seconds by module and variant; the columns are module, variant, steps, seconds."""
    lines = front_page.newest("whole-fits").read_text(encoding="utf-8").replace("│", " ").splitlines()
    rows = [row for row in map(str.split, lines) if row[1:2] in (["off"], ["ort"], ["again"])]
    return {(row[0], row[1]): float(row[3]) for row in rows}


FITS = whole_fits()


def ratio(module: str) -> str:
    return f"{FITS[module, 'off'] / FITS[module, 'ort']:.2f}x"


ORT_OVER_FUSED = front_page.mean(rows["ort"]["speed"] / rows[front_page.FUSED]["speed"] for rows in ZOO.values())
SMALL = BASELINE["SmallGPT"]
# page, text around the figure, figure
CLAIMS = {
    "README.md": [
        ("**{}** comes from PyTorch's own *fused optimizer*", overall(front_page.FUSED)),
        ("**{}** is the whole of `ort`", overall("ort")),
        ("ONNX Runtime. The last two add {} to the fused optimizer", f"{ORT_OVER_FUSED:.2f}x"),
        ("memory alone were {}", overall("off", BASELINE)),
        ("`ort` with ONNX Runtime {}", overall("ort", BASELINE)),
        ("a small GPT, ran {}", f"{SMALL['off']['ms'] / SMALL['ort']['ms']:.2f}x"),
        ("start-up included: {}.", ratio("ResNet")),
        ("took 372 s and 321 s: {}.", ratio("Llama")),
        ('`precision="bf16-mixed"` is {}', speed(PRECISION, "BERT", "stock@bf16-mixed")),
        ("`ort` with it {}", speed(PRECISION, "BERT", "ort@bf16-mixed")),
        ("{} as fast as stock Lightning in the benchmark above (`GPT, batch 1 x 64`)", speed(ZOO, "SmallGPT", "ort")),
        ("Compiling for ONNX Runtime took {} seconds for the nine models", ""),
    ],
    "docs/index.md": [
        ("**{}** is the geometric mean of `ort`", overall("ort")),
        ("can use too, is {}", overall(front_page.FUSED)),
        ("not used in development, `ort` was {}", overall("ort", BASELINE)),
        ("and {} came from that optimizer", overall("off", BASELINE)),
        ("was {} as fast as with that optimizer and memory", ratio("ResNet")),
        ("BERT is {}", speed(PRECISION, "BERT", "ort@bf16-mixed")),
    ],
    "docs/quick_start.md": [("sizes is {} times as fast", speed(ZOO, "SmallGPT", "ort").rstrip("x"))],
    "docs/faq.md": [("was as fast as stock Lightning ({})", overall("compile+adamw_torch_fused"))],
}
STARTS = [rows["ort"]["start"] for rows in ZOO.values()]


@pytest.mark.parametrize(("page", "text", "figure"), [(p, *claim) for p, claims in CLAIMS.items() for claim in claims])
def test_figure_is_that_of_the_newest_file(page: str, text: str, figure: str) -> None:
    figure = figure or f"{min(STARTS):.0f} to {max(STARTS):.0f}"
    found = (ROOT / page).read_text(encoding="utf-8")
    assert text.format(figure) in " ".join(found.split())  # wherever its lines end


def test_seconds_of_whole_fits() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for module in ("ResNet", "Llama"):
        for variant in ("off", "ort"):
            assert f"{FITS[module, variant]:.0f} s" in text


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_no_other_figure_is_claimed(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    claimed = {figure for _, figure in CLAIMS[page]}
    assert set(re.findall(r"\b\d\.\d\dx", text)) <= claimed
    listed = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    for figure in claimed:
        assert f"| {figure or '1 to 12 s'} |" in listed


def test_pages_name_the_newest_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for kind in ("zoo", "precision", "whole-fits"):
        assert f"](benchmarks/results/{front_page.newest(kind).name})" in text


def test_table_of_the_benchmarks() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    variants = ("ort", "auto", front_page.FUSED, "compile+adamw_torch_fused")
    for module, rows in ZOO.items():
        cells = [f"{rows[variant]['speed']:.2f}x" for variant in variants]
        assert f"| {front_page.NAMES[module]} | {' | '.join(cells)} |" in text
    assert f"| geometric mean | {' | '.join(map(overall, variants))} |" in text


@pytest.mark.parametrize("theme", front_page.THEMES)
def test_chart_is_drawn_from_the_newest_files(theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(front_page, "IMAGES", tmp_path)
    drawn = front_page.draw(theme).read_text(encoding="utf-8")
    kept = (ROOT / "docs" / "images" / f"speed_{theme}.svg").read_text(encoding="utf-8")
    bars = re.compile(r'<g id="patch_\d+">\s*<path d="([^"]+)"')  # their lengths; letters depend on the fonts
    assert len(bars.findall(drawn)) > 20
    assert bars.findall(drawn) == bars.findall(kept)


def test_what_stays_on_onnx_runtime() -> None:
    lines = front_page.newest("baseline").read_text(encoding="utf-8").splitlines()
    shares = [line.split("│")[-2].strip() for line in lines if line.startswith("│ ort") and front_page.ROW.match(line)]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(shares) == len(BASELINE)
    assert f"{shares.count('0%')} of the {len(shares)} training steps in PyTorch" in text


def test_table_against_the_same_optimizer_and_memory() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for module, rows in BASELINE.items():
        off, ort = rows["off"], rows["ort"]
        spreads = [f"{row['slowest']:.2f}-{row['fastest']:.2f}" for row in (off, ort)]
        name = front_page.NAMES[module]
        assert f"| {name} | {off['speed']:.2f}x | {ort['speed']:.2f}x | {' | '.join(spreads)} |" in text
    assert f"| geometric mean | {overall('off', BASELINE)} | {overall('ort', BASELINE)} |" in text
    nine = {module: BASELINE[module] for module in ZOO}
    assert f"are {overall('off', nine)} with `off` and {overall('ort', nine)} with `ort` here" in text
