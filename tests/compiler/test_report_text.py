"""The text of a report in terminals of four widths; `python -m tests.compiler.test_report_text` writes the files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ort._text import duration
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.report.data import FallbackReport, GraphReport, RegionReport, in_use
from lightning_ort.compiler.report.report import CompileReport
from lightning_ort.compiler.report.view import ReportView, counted, folded, rank_file, short_ops, speedup, startup_parts
from lightning_ort.compiler.run_part import OptimizerReport, RunReport, StepReport, StepTimeReport

SNAPSHOTS = Path(__file__).parent / "snapshots"
WIDTHS = (80, 100, 120, 200)
LAYER = {"aten.addmm.default": 4, "aten.gelu.default": 2, "aten.mul.Tensor": 2, "aten.mul.Scalar": 1}
ATTENTION = {"aten._scaled_dot_product_flash_attention_for_cpu_backward.default": 1, "aten.view.default": 1}


def report() -> CompileReport:
    slower = Reason(ReasonType.SLOWER, "by 12 %")
    attention = Reason(ReasonType.BETTER_IN_TORCH, "flash attention runs in one pass over memory")
    layers = [RegionReport(f"ort_{n}", "ort", 9, LAYER, ms={"ort": 2.5, "torch": 3.75}, runs=40) for n in (1, 3, 5)]
    between = [RegionReport(f"torch_{n}", "torch", 1, ATTENTION, attention, ms={"torch": 1530.0}) for n in (2, 4)]
    forward = [RegionReport("torch_0", "torch", 0), layers[0], between[0], layers[1], between[1], layers[2]]
    backward = [RegionReport("torch_1", "torch", 12, LAYER, slower, ms={"ort": 140.0, "torch": 125.0}, runs=7)]
    return CompileReport(
        graphs=[
            GraphReport("training_step/forward_0", forward, 1.5),
            GraphReport("training_step/backward_1", backward, 2.25),
            GraphReport("validation_step/inference_2", layers[:1], 0.5),
        ],
        fallbacks=[FallbackReport("training_step/forward_0", Reason(ReasonType.RUN_FAILED, "out of memory"))],
        notes=[FallbackReport("validation_step", slower)],
        graph_breaks=1,
        compile_seconds=4.25,
        run=RunReport(
            optimizers=[OptimizerReport("torch.AdamW", "torch.AdamW (fused)")],
            steps=[
                StepReport("training_step", {"ort": 1530.0, "torch": 2040.0}),
                StepReport("validation_step", {"ort": 20.0, "torch": 10.0}),
            ],
            host_memory="retained",
            step_time=StepTimeReport({"loader": 800.0, "Trainer": 1.0, "step": 1530.0, "optimizer": 9.0}, "a worker"),
            dropout_masks="drawn by a compiled function",
            startup_seconds=8.5,
            trial_seconds=1.5,
            saved_seconds=20.0,
            paid_after=17,
        ),
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_text_at_a_width(width: int) -> None:
    text = report().to_text(width)
    assert text == (SNAPSHOTS / f"report_{width}.txt").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= width
    assert text.splitlines()[0].startswith("paid for itself after step 17")
    assert "e+0" not in text
    assert "1.53 s ort, 2.04 s torch" in text
    assert "torch_0" not in text  # computes nothing
    assert "ort_1 (x 3)" in text


def test_a_time_of_zero_has_no_speedup() -> None:
    steps = [StepReport("training_step", {"ort": 0.0, "torch": 1.0})]
    assert speedup(CompileReport(run=RunReport(steps=steps))) is None


def test_str_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        assert str(report()) == report().to_text(width)


def test_names_and_numbers() -> None:
    assert short_ops(LAYER) == {"addmm": 4, "mul": 3, "gelu": 2}
    assert list(short_ops({"mine.op": 1, "aten.neg.default": 2})) == ["neg", "mine.op"]
    assert [counted(number, "graph") for number in (0, 1, 2)] == ["no graphs", "1 graph", "2 graphs"]
    assert [duration(ms) for ms in (0.0123, 3.0, 999.4, 999.6, 1530.0, 5e6)] == [
        "0.0123 ms",
        "3 ms",
        "999 ms",
        "1 s",
        "1.53 s",
        "5,000 s",
    ]


def test_what_is_in_use() -> None:
    found = report()
    assert [graph.name for graph in in_use(found)] == ["training_step/forward_0", "training_step/backward_1"]
    assert speedup(found) == pytest.approx(4 / 3)
    assert speedup(CompileReport()) is None
    assert "of the compute nodes in use on ONNX Runtime" in found.to_text()
    lost = CompileReport(found.graphs[2:], run=RunReport(steps=found.steps[1:]))
    assert "nothing compiled stays in use" in lost.to_text()
    assert lost.ort_node_fraction > lost.ort_node_fraction_in_use == 0
    assert 0 < found.ort_node_fraction_in_use != found.ort_node_fraction


def test_equal_regions_share_a_row() -> None:
    first, second = folded(report().graphs[0])
    assert (first.name, first.ms) == ("ort_1 (x 3)", {"ort": 2.5, "torch": 3.75})
    assert [column.cell(first) for column in ReportView.of(report()).columns] == ["9", "120", "2.500", "3.750"]
    assert (second.name, second.first.reason.type) == ("torch_2 (x 2)", ReasonType.BETTER_IN_TORCH)


def test_parts_of_the_start() -> None:
    parts = startup_parts(report())
    assert sum(parts.values()) == pytest.approx(8.5)
    assert list(parts.values()) == [4.25, 1.5, 2.75]
    assert rank_file(Path("run/report.json"), 2) == Path("run/report.rank2.json")


if __name__ == "__main__":
    for each in WIDTHS:
        (SNAPSHOTS / f"report_{each}.txt").write_text(report().to_text(each), encoding="utf-8")


def test_a_choice_is_new_once() -> None:
    report = CompileReport()
    reason = Reason(ReasonType.USER, "as asked for")
    assert [report.record_choice(where, reason) for where in ("a", "a", "b")] == [True, False, True]
    assert len(report.notes) == 2


def test_a_report_before_the_fit() -> None:
    assert str(CompileReport()) == "nothing has run yet\n"


def test_times_of_a_busy_machine_are_called_so(limits: Callable[..., None]) -> None:
    limits(slowdown=1.25)  # other tests know no busy machine
    busy = StepReport("training_step", {"ort": 1.0, "torch": 2.0}, slowdown={"ort": 1.0, "torch": 3.0})
    idle = StepReport("training_step", {"ort": 1.0, "torch": 2.0}, slowdown={"ort": 1.0, "torch": 1.1})
    for step, says in ((busy, True), (idle, False)):
        run = RunReport(steps=[step], startup_seconds=1.0, saved_seconds=2.0, paid_after=3)
        assert [text.count("while other programs used the machine") for text in (str(step), run.verdict)] == [says] * 2
