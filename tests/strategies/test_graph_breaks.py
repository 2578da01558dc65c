"""Where graphs end early: notes with place, reason and count, each place once."""

from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.report import CompileReport, FallbackReport
from lightning_ort.strategies.capture.graph_breaks import GraphBreakNotes


def test_one_note_for_each_place() -> None:
    report = CompileReport(notes=[FallbackReport("net", Reason(ReasonType.ALREADY_COMPILED))])
    notes, others = GraphBreakNotes("training_step"), GraphBreakNotes("validation_step")
    notes.add(report, [("train.py:3", "why"), ("", "unknown")])
    others.add(report, [("train.py:3", "why")])
    notes.add(report, [("train.py:3", "why"), ("train.py:3", "another")])
    notes.add(report, [])
    assert [str(note) for note in report.notes] == [
        "net: compiled by the user",
        "validation_step: graph ends early: train.py:3: why",
        "training_step: graph ends early: train.py:3: why (2 times)",
        "training_step: graph ends early: unknown",
        "training_step: graph ends early: train.py:3: another",
    ]


def test_the_text_has_one_line_for_a_step() -> None:
    report, notes = CompileReport(), GraphBreakNotes("training_step")
    for line in range(12):
        notes.add(report, [(f"train.py:{line}", "why")])
    notes.add(report, [("train.py:0", "why")])
    GraphBreakNotes("validation_step").add(report, [("train.py:50", "why")])
    assert len(report.notes) == 13
    assert [line for line in report.to_text().splitlines() if line.startswith("note")] == [
        "note: training_step: graph ends early: train.py:0: why (2 times); and 11 more (report.notes)",
        "note: validation_step: graph ends early: train.py:50: why",
    ]
    assert CompileReport.from_dict(report.to_dict()).notes == report.notes
