"""``lightning-ort report``: one page that has all of a report, and needs nothing else."""

import json
import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import escape
from torch import nn

from lightning_ort.cli import main
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.report.data import FallbackReport, GraphReport, RegionReport, in_column
from lightning_ort.compiler.report.page import render
from lightning_ort.compiler.report.report import CompileReport
from lightning_ort.compiler.run_part import OptimizerReport, RunReport, StepReport

VOID = {"meta", "br"}  # elements of the page that have no end tag


class Page(HTMLParser):
    """Reads a page, and refuses what is not well formed.

    Attributes:
        rows: The text of each table's body, row by row and cell by cell.
        links: What the page would load.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"an attribute twice in {tag}"
        self.ids += [value for key, value in attrs if key == "id" and value]
        self.references += [value for key, value in attrs if key == "aria-labelledby" and value]
        self.links += [value for key, value in attrs if key in ("src", "href", "data", "action") and value]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "td":
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            assert "url(" not in data
            assert "@import" not in data
            return
        self.text += data
        if "td" in self.open:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def report() -> CompileReport:
    """Of a module of which a part runs in torch, for two reasons."""
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    backend = ORTBackend({"placement": "always", "cache_dir": None, "debug": {"torch_ops": ["aten.gelu"]}})
    torch.compile(module, backend=backend)(torch.randn(8, 16)).square().cumsum(0).sum().backward()
    found = backend.report
    assert found.ort_runs > 0
    assert {region.executor for graph in found.graphs for region in graph.regions} == {"ort", "torch"}
    return found


@pytest.fixture
def everything(report: CompileReport) -> CompileReport:
    """The same with all that a Trainer adds."""
    return CompileReport(
        graphs=report.graphs,
        fallbacks=[FallbackReport("training_step/forward_0", Reason(ReasonType.RUN_FAILED, "out of memory"))],
        notes=[FallbackReport("training_step", Reason(ReasonType.SLOWER, "by far"))],
        compile_seconds=1.25,
        run=RunReport(
            optimizers=[OptimizerReport("torch.AdamW", "torch.AdamW (fused)", "since it can")],
            steps=[StepReport("training_step", {"ort": 2.5, "torch": 1.5})],
            host_memory="default: the malloc in use is not glibc's",
            dropout_masks="drawn by a compiled function",
        ),
    )


def command(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "report", *map(str, arguments)])
    main()


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_all_of_a_report_is_on_the_page(
    everything: CompileReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file, output = tmp_path / "report.json", tmp_path / "page.html"
    file.write_text(json.dumps(everything.to_dict()))
    command(monkeypatch, file, "-o", output)
    assert capsys.readouterr().out == f"{output}\n"
    page = Page(output.read_text(encoding="utf-8"))
    regions = [region for graph in everything.graphs for region in graph.regions]
    shown = [row for row in page.rows if row and re.fullmatch(r"(ort|torch)_\d+", row[0])]
    assert [row[0] for row in shown] == [region.name for region in regions]  # in order
    for row, region in zip(shown, regions, strict=True):
        assert row[1].startswith({"ort": "ONNX Runtime", "torch": "PyTorch"}[region.executor])
        assert row[3:5] == [str(region.num_nodes), str(region.runs)]
        why = squeezed(row[2])
        assert region.reason is None or str(region.reason) in why
        for op, count in region.ops.items():
            assert f"{op} × {count}" in why
        for op, reason in region.node_reasons.items():
            assert op in why
            assert str(reason) in why
    assert any(region.node_reasons for region in regions)
    text = squeezed(page.text)
    for graph in everything.graphs:
        assert f"{graph.name} {graph.num_ort_nodes} of {graph.num_nodes} compute nodes" in text
    for entry in (*everything.fallbacks, *everything.notes):
        assert [entry.where, str(entry.reason)] in page.rows
    assert ["torch.AdamW", "torch.AdamW (fused)", "since it can"] in page.rows
    assert ["training_step", "uncompiled PyTorch", "2.5", "1.5"] in page.rows
    assert everything.host_memory in text
    assert "faster dropout masks" in text
    assert f"{everything.ort_node_fraction:.0%}" in text


def test_page_needs_nothing_else(everything: CompileReport) -> None:
    page = Page(render(everything, "report.json"))
    assert page.links == []
    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)


def test_graphs_of_a_step_that_was_left_to_torch_say_so() -> None:
    graphs = [GraphReport(f"{step}_step/inference_0") for step in ("training", "validation")]
    report = CompileReport(graphs, run=RunReport(steps=[StepReport("training_step", {"ort": 2.0, "inductor": 1.0})]))
    text = squeezed(Page(render(report, "report.json")).text)
    training, validation = text.partition("training_step/inference_0")[2].split("validation_step/inference_0")
    assert "The step continues with inductor" in training
    assert "goes on" not in validation


def test_page_and_text_say_the_same_of_a_run() -> None:
    said = RunReport(dropout_masks="drawn by PyTorch: no C compiler", audits=1)
    report = CompileReport(run=said)
    page = squeezed(Page(render(report, "report.json")).text)
    for name, text in (("dropout masks", said.dropout_masks), ("audits", said.audit_text)):
        assert f"{name.capitalize()}: {text}" in page
        assert f"{name}: {text}" in report.to_text(200)
    assert "ost memory" not in page


def test_a_run_that_compiled_nothing() -> None:
    page = Page(render(CompileReport(), "report.json"))
    assert "None: nothing was compiled." in page.text
    assert page.rows == []


def test_other_executors_are_shown_by_their_name() -> None:
    region = RegionReport("openvino_1", "openvino", 1, {"aten.mm.default": 1}, ms={"openvino": 1.5, "torch": 2.0})
    report = CompileReport([GraphReport("inference_0", [region])])
    page = Page(render(CompileReport.from_dict(json.loads(json.dumps(report.to_dict()))), "report.json"))
    (row,) = [row for row in page.rows if row]
    assert row[1].strip() == "openvino"
    assert row[3:] == ["1", "0", "2.000", "1.500"]  # no empty column for ONNX Runtime
    assert "openvino ms" in report.to_text()


def test_values_are_escaped() -> None:
    evil = """<script>alert(1)</script>"'&"""
    reason = Reason(ReasonType.RUN_FAILED, evil)
    region = RegionReport(evil, "torch", 1, {evil: 1}, reason, {evil: reason, f"{evil}2": reason})
    entries = [FallbackReport(evil, reason)]
    report = CompileReport(
        [GraphReport(evil, [region])],
        entries,
        entries,
        run=RunReport([OptimizerReport(evil, evil, evil)], [StepReport(evil, {"ort": 1.0})], evil),
    )
    text = render(report, evil)
    assert "<script" not in text
    assert text.count(escape(evil)) > 10
    assert evil in Page(text).text


def test_output_is_beside_the_report(report: CompileReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text(json.dumps(report.to_dict()))
    command(monkeypatch, tmp_path / "run.json")
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(SystemExit, match="would overwrite the report"):
        command(monkeypatch, tmp_path / "run.html")
    with pytest.raises(SystemExit, match=r"lightning-ort report: .*run\.json"):
        command(monkeypatch, tmp_path / "run.json", "--output", tmp_path / "run.json" / "run.html")
    command(monkeypatch, tmp_path / "run.json", "--output", tmp_path / "new" / "run.html")
    assert (tmp_path / "new" / "run.html").exists()


def test_report_comes_back_from_json(everything: CompileReport) -> None:
    assert CompileReport.from_dict(json.loads(json.dumps(everything.to_dict()))) == everything


def change(report: CompileReport, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The report's JSON with another value in one place; ``...`` takes the place out."""
    data = json.loads(json.dumps(report.to_dict()))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return data


REGION = ("graphs", 0, "regions", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 10**6, "a later version"),
        ((*REGION, "executor"), ..., "'executor' is missing"),
        ((*REGION, "executor"), 3, "3 is not"),
        ((*REGION, "ms"), {"ort": "fast"}, "'fast' is not"),
        ((*REGION, "num_nodes"), "3", "'3' is not"),
        ((*REGION, "reason"), {"type": "BORED", "text": ""}, "'BORED' is missing or unknown"),
        (("graphs",), {"a": 1}, "is not"),
        (("graphs",), ..., "not a report"),
        (("optimizers", 0, "runs_as"), ..., "'runs_as' is missing"),
        (("fallbacks", 0), "text", "'text' is not"),
    ],
)
def test_other_reports_are_refused(
    everything: CompileReport, path: Any, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(change(everything, path, value)))
    with pytest.raises(SystemExit, match=f"report.json: .*{message}") as info:
        command(monkeypatch, file)
    assert "ORTConfig(report=PATH)" in str(info.value)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [(("format",), ...), (("host_memory",), ...), (("steps",), ...), (("gone",), 1), ((*REGION, "gone"), 1)],
)
def test_reports_of_older_versions_are_read(
    everything: CompileReport, path: Any, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lack what is new, and have what is gone."""
    (tmp_path / "report.json").write_text(json.dumps(change(everything, path, value)))
    command(monkeypatch, tmp_path / "report.json")
    assert len(Page((tmp_path / "report.html").read_text()).rows) > len(everything.graphs)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"null", b"{}", b"<html>", b"\xff\xfe"])
def test_other_files_are_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(SystemExit, match=r"report\.json: .*\nPass a file that a run"):
        command(monkeypatch, tmp_path / "report.json")


def test_no_such_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"absent\.json: No such file or directory\nPass a file"):
        command(monkeypatch, tmp_path / "absent.json")


def test_facts_parts_and_timeline_are_on_the_page(everything: CompileReport) -> None:
    region = RegionReport("ort_1", "ort", 3, {"aten.mm.default": 3}, ms={"ort": 1.5, "torch": 2.0}, runs=9)
    other = RegionReport("torch_2", "torch", 1, {"aten.cumsum.default": 1}, ms={"torch": 0.25})
    everything.graphs = [GraphReport("training_step/step_0", [region, other])]
    everything.steps = [StepReport("training_step", {"ort": 2.5, "torch": 5.0})]
    everything.run.startup_seconds, everything.run.saved_seconds = 3.0, 5.0
    everything.run.facts = {"model": "GPT", "precision": "bf16-mixed"}
    page = Page(render(everything, "report.json"))
    text = squeezed(page.text)
    assert (
        text.index("2.00x") < text.index("2.0 s") < text.index("100%" if "100%" in text else "75%")
    )  # the first tiles
    assert "model GPT" in text.replace("modelGPT", "model GPT")
    assert "1.5 ms in ONNX Runtime, 0.25 ms in PyTorch, 0.75 ms elsewhere." in text
    assert ["gradients, ONNX models, sessions and timing of regions", "1.2"] in page.rows
    assert sum(float(row[1]) for row in page.rows if len(row) == 2 and row[1].replace(".", "").isdecimal()) == 3.0


def test_ranks_have_a_row_each(everything: CompileReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything.run.facts = {"ranks": "2"}
    (tmp_path / "run.json").write_text(json.dumps(everything.to_dict()))
    command(monkeypatch, tmp_path / "run.json")
    assert "rank 1" not in (tmp_path / "run.html").read_text()  # its file is on another disk
    (tmp_path / "run.rank1.json").write_text(json.dumps(CompileReport().to_dict()))
    command(monkeypatch, tmp_path / "run.json")
    rows = Page((tmp_path / "run.html").read_text()).rows
    assert [row for row in rows if row and row[0].startswith("rank")] == [
        ["rank 0", "0.0", "0.0", str(everything.ort_runs), "1", "1.5 ms"],
        ["rank 1", "0.0", "0.0", "0", "0", ""],
    ]


def test_two_runs_are_compared(everything: CompileReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything.run.facts = {"model": "GPT", "precision": "32-true"}
    (tmp_path / "a.json").write_text(json.dumps(everything.to_dict()))
    everything.steps = [StepReport("training_step", {"ort": 1.25, "torch": 1.5})]
    everything.run.facts = {"model": "GPT", "precision": "bf16-mixed"}
    (tmp_path / "b.json").write_text(json.dumps(everything.to_dict()))
    command(monkeypatch, tmp_path / "a.json", tmp_path / "b.json")
    page = Page((tmp_path / "a-b.html").read_text())
    assert ["training_step", "ort", "2.5 ms", "1.25 ms", "0.50"] in page.rows
    facts = [row for row in page.rows if row and row[0] in ("model", "precision")]
    assert facts == [["precision", "32-true", "bf16-mixed"], ["model", "GPT", "GPT"]]
    assert page.links == []
    assert set(page.references) <= set(page.ids)


def test_report_writes_its_page(everything: CompileReport, tmp_path: Path) -> None:
    path = everything.to_html(tmp_path / "new" / "run.html")
    assert path.read_text(encoding="utf-8") == render(everything, "run.html")
    frame = everything._repr_html_()
    assert frame.startswith("<iframe srcdoc=")
    assert "<script" not in frame


def test_an_absurd_count_of_ranks(report: CompileReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**report.to_dict(), "facts": {"ranks": "9" * 5000}}))
    command(monkeypatch, path)
    assert path.with_suffix(".html").is_file()


def test_a_field_is_a_column_of_page_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Wider(RegionReport):
        flops: float = field(default=0.0, metadata=in_column("flops", max, "{:.0e}".format))

    monkeypatch.setattr("lightning_ort.compiler.report.view.RegionReport", Wider)
    regions = [Wider(f"ort_{number}", "ort", 3, {"aten.mm.default": 3}, flops=100.0 * number) for number in (1, 2)]
    report = CompileReport([GraphReport("forward_0", list(regions))])
    page = Page(render(report, "report.json"))
    assert page.rows[-1][3:] == ["3", "0", "2e+02"]
    assert page.text.count("flops") == 1
    heading, row = (line.split() for line in report.to_text(100).splitlines() if "flops" in line or "ort_1" in line)
    assert heading[:4] == ["region", "nodes", "runs", "flops"]
    assert row[3:6] == ["3", "0", "2e+02"]
