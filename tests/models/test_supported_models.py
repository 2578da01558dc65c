"""The page of supported models: complete, and still true."""

import pytest
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import CONVERTERS, GraphBuilder
from tests.models import conformance
from tests.models.zoo import MODELS

FAST = ("nn.GRU", "nn.LSTM")


def lines() -> dict[str, str]:
    """The rows of the page by model."""
    page = conformance.PAGE.read_text(encoding="utf-8").splitlines()
    rows = page[page.index("|---|---|---|---|---|---|---|---|---|---|") + 1 :]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def test_every_model_has_a_line_on_the_page() -> None:
    assert list(lines()) == list(MODELS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in MODELS]
)
def test_what_the_page_says_of_a_model(name: str) -> None:
    model = MODELS[name]
    pytest.importorskip(model.library)
    row = conformance.examine(model)
    assert row.report.ort_runs > 0
    page = conformance.PAGE.read_text(encoding="utf-8")
    if conformance.versions(model) in page and f"torch {torch.__version__}," in page:
        assert lines()[name].endswith(row.settled())


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> object:
        return ctx.op("Sigmoid", ctx.value(x))

    monkeypatch.setitem(CONVERTERS, torch.ops.aten.tanh.default, wrong)
    with pytest.raises(AssertionError, match="differs"):
        conformance.examine(MODELS["nn.GRU"])


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="no such model: Bert"):
        conformance.main(["Bert"])
