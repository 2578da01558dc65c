"""Each figure on README.md and docs/index.md is that of the newest result file; docs/contributing.md lists them."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import front_page  # noqa: E402

ZOO = front_page.read(front_page.newest("zoo"))
PRECISION = front_page.read(front_page.newest("bf16"))
BASELINE = front_page.read(front_page.newest("baseline"))
# later runs found inductor's cache warm
COLD = front_page.read(front_page.RESULTS / "2026-11-24-baseline.txt")


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


SMALL = BASELINE["SmallGPT"]


def starts(variant: str) -> str:
    seconds = [rows[variant]["start"] for rows in COLD.values()]
    return f"{min(seconds):.0f} to {max(seconds):.0f}"


# page, text around the figure, figure
CLAIMS = {
    "README.md": [
        ("**{}** comes from PyTorch's own *fused optimizer*", overall("off", BASELINE)),
        ("which you can have without this package, is {}", overall(front_page.FUSED, BASELINE)),
        ("**{}** is `ort` with ONNX Runtime", overall("ort", BASELINE)),
        ("**{}** is `ort` with torch.compile's inductor too", overall("auto", BASELINE)),
        ("A small GPT ran {}", f"{SMALL['off']['ms'] / SMALL['ort']['ms']:.2f}x"),
        ("and 354 s with `ort`: {}.", ratio("ResNet")),
        ("took 372 s and 321 s: {}.", ratio("Llama")),
        ('`precision="bf16-mixed"` is {}', speed(PRECISION, "BERT", "stock@bf16-mixed")),
        ("`ort` with it {}", speed(PRECISION, "BERT", "ort@bf16-mixed")),
        (
            "{} as fast as stock Lightning in the benchmark above (`GPT, batch 1 x 64`)",
            speed(BASELINE, "SmallGPT", "ort"),
        ),
        ("Compiling for ONNX Runtime took {} seconds for the fifteen models", starts("ort")),
        ("and with inductor {}.", starts("auto")),
    ],
    "docs/index.md": [
        ("**{}** with a fused optimizer", overall("off", BASELINE)),
        ("(alone {})", overall(front_page.FUSED, BASELINE)),
        ("**{}** with ONNX Runtime", overall("ort", BASELINE)),
        ("**{}** with torch.compile's inductor", overall("auto", BASELINE)),
        ("was {} as fast as with that optimizer and memory", ratio("ResNet")),
        ("BERT is {}", speed(PRECISION, "BERT", "ort@bf16-mixed")),
    ],
    "docs/quick_start.md": [("sizes is {} times as fast", speed(BASELINE, "SmallGPT", "ort").rstrip("x"))],
    "docs/train_faster.md": [
        ("and retained memory: {} times", overall("ort", BASELINE).rstrip("x")),
        ("modules were {} times", overall("auto", BASELINE).rstrip("x")),
        ("With empty caches, compiling took {} seconds", starts("auto")),
    ],
    "docs/faq.md": [("was as fast as stock Lightning ({})", overall("compile+adamw_torch_fused"))],
}


@pytest.mark.parametrize(("page", "text", "figure"), [(p, *claim) for p, claims in CLAIMS.items() for claim in claims])
def test_figure_is_that_of_the_newest_file(page: str, text: str, figure: str) -> None:
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
    table = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    listed = {figure for line in table.splitlines() for figure in line.split("|")[1:2] for figure in figure.split(", ")}
    assert claimed <= {figure.strip() for figure in listed}


def test_pages_name_the_newest_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for kind in ("baseline", "bf16", "whole-fits"):
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
    pytest.importorskip("matplotlib", "3.11", reason="older ones lay the chart out in another way")
    monkeypatch.setattr(front_page, "IMAGES", tmp_path)
    drawn = front_page.draw(theme).read_text(encoding="utf-8")
    kept = (ROOT / "docs" / "images" / f"speed_{theme}.svg").read_text(encoding="utf-8")
    bars = re.compile(r'<g id="patch_\d+">\s*<path d="([^"]+)"')  # their lengths; letters depend on the fonts
    assert len(bars.findall(drawn)) > 20
    assert bars.findall(drawn) == bars.findall(kept)


def test_what_stays_on_onnx_runtime() -> None:
    found = [rows["ort"]["on_ort"] for rows in BASELINE.values()]
    assert len(found) == len(BASELINE)
    assert all(0 <= share <= 100 for share in found)  # and none is missing
    for page in ("README.md", "docs/benchmarks.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert re.search(rf"\b{found.count(0)} of the {len(found)} (models|training steps)", text)


def test_table_against_the_same_optimizer_and_memory() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    variants = (front_page.FUSED, "off", "ort", "auto")
    for module, rows in BASELINE.items():
        cells = [f"{rows[variant]['speed']:.2f}x" for variant in variants]
        cells += [f"{rows[variant]['slowest']:.2f}-{rows[variant]['fastest']:.2f}" for variant in variants[1:]]
        cells.append("PyTorch" if rows["ort"]["on_ort"] == 0 else "ONNX Runtime")
        cells += [f"{rows[variant]['peak'] / rows['stock']['peak']:.2f}x" for variant in ("ort", "auto")]
        assert f"| {front_page.NAMES[module]} | {' | '.join(cells)} |" in text
    means = [overall(variant, BASELINE) for variant in variants]
    assert f"| geometric mean | {' | '.join(means)} |" in text
    assert f"function make that {means[1]}, ONNX Runtime {means[2]}, and inductor {means[3]}" in " ".join(text.split())
