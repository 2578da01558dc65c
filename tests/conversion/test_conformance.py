"""The page of supported ops: complete, and still true."""

import pytest
import torch
from torch import fx

from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.executors.ort.conversion import CONVERTERS, GraphBuilder
from tests.conversion import conformance
from tests.conversion.core_op_samples import SAMPLES


def test_every_core_op_has_samples_and_a_line_on_the_page() -> None:
    names = {conformance.name_of(op) for op in conformance.core_ops()}
    lines = conformance.PAGE.read_text(encoding="utf-8").splitlines()
    listed = {line.split("`")[1] for line in lines if line.startswith("| `")}
    assert names == set(SAMPLES) == listed


@pytest.mark.parametrize("kernel_set", ["auto", "standard"])
def test_what_the_page_says_of_an_op_is_found_out_by_running_it(kernel_set: str) -> None:
    on_ort = conformance.examine(torch.ops.aten.add.Tensor, torch.float32, kernel_set)
    in_torch = conformance.examine(torch.ops.aten._cdist_forward.default, torch.float32, kernel_set)
    assert on_ort is not None
    assert in_torch is not None
    assert (on_ort.cell("forward"), on_ort.cell("backward"), on_ort.reasons) == ("yes", "yes", {})
    assert (in_torch.cell("forward"), in_torch.is_whole) == ("in torch", False)
    assert "no converter" in in_torch.reasons["aten._cdist_forward.default"]


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> object:
        return ctx.op("Sub", ctx.value(x), ctx.value(y))

    monkeypatch.setitem(CONVERTERS, torch.ops.aten.add.Tensor, wrong)
    with pytest.raises(AssertionError, match="output 0"):
        conformance.examine(torch.ops.aten.add.Tensor, torch.float32)


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    text = conformance.PAGE.read_text(encoding="utf-8")
    if f"torch {torch.__version__} " not in text or not kernels.installed("onnxruntime-training-cpu"):
        pytest.skip("the page was made with other versions")
    assert conformance.page([conformance.row(op) for op in conformance.core_ops()]) == text
