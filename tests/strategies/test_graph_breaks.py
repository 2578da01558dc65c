"""Where graphs end early: notes with place, reason and count, each place once and not without end."""

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


def test_no_more_than_some_places() -> None:
    report, notes = CompileReport(), GraphBreakNotes("training_step")
    for line in range(10):
        notes.add(report, [(f"train.py:{line}", "why")])
    assert len(report.notes) == 10
    notes.add(report, [("train.py:100", "why")])
    assert report.notes[-1].reason.text == "and in 1 more place"
    notes.add(report, [("train.py:101", "why"), ("train.py:0", "why")])
    assert len(report.notes) == 11
    assert report.notes[0].reason.text == "train.py:0: why (2 times)"
    assert report.notes[-1].reason.text == "and in 2 more places"
    assert CompileReport.from_dict(report.to_dict()).notes == report.notes
