"""Write docs/test_reports/lightning_features.md: how each feature of Lightning runs under ``ort``, found by running it.

Every feature of the tests, and every way of writing a step, is run under the stock strategy and under ``ort`` with
``placement="always"``; the results are compared, and the report tells the rest. Run as ``make conformance``.
"""

import importlib
import importlib.metadata
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import test_capture_idioms
import torch
from features import FEATURES, How, Trainers, assert_same, be_quiet, feature, fit, how_it_ran, run_feature

from lightning_ort.compiler.report import CompileReport

for _theme in ("gradient", "module", "step", "layer", "trainer", "callback"):  # the order of the page
    importlib.import_module(f"test_{_theme}_features")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "test_reports" / "lightning_features.md"
TEXTS: dict[How, str] = {"step": "on ONNX Runtime", "modules": "on ONNX Runtime, child modules", "torch": "in torch"}

HEAD = """\
# Lightning's features under `ort`

Made by `make conformance` with {versions} on a CPU; do not edit.

Each row was run twice from the same seed: under the stock strategy, and under `strategy="ort"` with
`placement="always"`. Losses, parameters, logged metrics and the effects of callbacks are the same within float32
rounding. So every row works. The columns show how much of it runs on ONNX Runtime:

- *runs*: **{step}** rows run **on ONNX Runtime**: the steps are captured as they are written. **{modules}** run **on
  ONNX Runtime, child modules**: the step itself cannot be captured and stays in Python, and its child modules are
  captured. **{torch}** run **in torch**: the step is not captured, and the report says why.
- *graph breaks*: how often capture ended a graph early, for example before an optimizer step under manual optimization.
  The code between graphs runs in Python.
- *recompiles*: how often a frame was compiled again, for example for a second batch size. Fifty sizes cause one or
  two recompiles for each step.

"""


def enter_idioms() -> None:
    """Add the modules of the idiom tests to the table."""
    for name, (module, how) in test_capture_idioms.IDIOMS.items():
        _enter_idiom(f"`{name}`", module, "step" if how == "either" else how)


def _enter_idiom(name: str, module: Any, how: Any) -> None:
    @feature("Ways of writing a `training_step`", name, how=how)
    def run(trainers: Trainers) -> Any:
        return fit(module(), trainers())


def row(name: str, reports: list[CompileReport]) -> str:
    """The row of the table."""
    breaks = sum(report.graph_breaks for report in reports)
    recompiles = sum(report.recompiles for report in reports)
    cells = [name, TEXTS[how_it_ran(reports)], str(breaks or ""), str(recompiles or "")]
    return f"| {' | '.join(cells)} |\n"


def page(reports: dict[str, list[CompileReport]]) -> str:
    """The page as Markdown."""
    versions = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("lightning", "torch"))
    ways = [how_it_ran(of_one) for of_one in reports.values()]
    text = HEAD.format(versions=versions, **{how: ways.count(how) for how in TEXTS})
    group = None
    for name, of_one in reports.items():
        if FEATURES[name].group != group:
            group = FEATURES[name].group
            text += f"## {group}\n\n| | runs | graph breaks | recompiles |\n|---|---|---|---|\n"
            text = text.replace("|\n## ", "|\n\n## ")
        text += row(name, of_one)
    return text


def main() -> None:
    """Run every feature and write the page, or exit with an error if a result is wrong."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    be_quiet()
    enter_idioms()
    reports, wrong = {}, []
    for name in FEATURES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                stock, _ = run_feature(name, False, Path(folder) / "stock")
                ours, reports[name] = run_feature(name, True, Path(folder) / "ort")
                assert_same(ours, stock)
            except Exception as error:  # whatever it is, it belongs to this feature
                wrong.append(f"{name}: {type(error).__name__}: {error}")
    if wrong:
        sys.exit("\n".join(wrong))
    PAGE.write_text(page(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
