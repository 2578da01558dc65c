"""benchmarks/projects: the table of models fits its modules and environments, and the page says what was found."""

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROJECTS = Path(__file__).parent.parent / "benchmarks" / "projects"


@pytest.fixture
def projects(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROJECTS))
    return importlib.import_module("run")


def test_each_row_has_a_function_and_an_environment(projects: ModuleType) -> None:
    assert len(projects.ROWS) >= 20
    assert len({row.name for row in projects.ROWS}) == len(projects.ROWS)
    for row in projects.ROWS:
        tree = ast.parse((PROJECTS / "rows" / f"{row.group}.py").read_text(encoding="utf-8"))
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert row.function in functions
        assert (PROJECTS / "requirements" / f"{row.group}.txt").is_file()


def test_environments_are_pinned_and_leave_torch_alone() -> None:
    lines = [line for path in PROJECTS.glob("requirements/*.txt") for line in path.read_text().splitlines()]
    assert len(lines) > 50
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    names = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    assert names & {"torch", "lightning", "pytorch-lightning", "onnxruntime", "lightning-ort"} == set()


def made(
    losses: list[float], metrics: dict[str, float] | None = None, lines: list[str] | None = None
) -> dict[str, Any]:
    """What one fit leaves."""
    return {"losses": losses, "metrics": metrics or {}, "lines": lines or []}


def test_difference_is_the_largest_of_all_losses_and_metrics(projects: ModuleType) -> None:
    assert projects.difference(made([1.0, 2.0]), made([1.0, 2.0])) == 0
    assert projects.difference(made([1.0, 2.0]), made([1.0, 1.0])) == 0.5
    assert projects.difference(made([1.0], {"val": 4.0}), made([1.0], {"val": 3.0})) == 0.25
    assert projects.difference(made([1.0]), made([1.0, 1.0])) == float("inf")
    assert projects.difference(made([]), made([])) == float("inf")  # a fit that shows no loss shows nothing


@pytest.mark.parametrize(("one", "other"), [(float("nan"), 1.0), (1.0, float("nan"))])
def test_not_a_number_on_one_side_is_a_difference(projects: ModuleType, one: float, other: float) -> None:
    assert projects.difference(made([one, 1.0]), made([other, 1.0])) == float("inf")
    assert projects.difference(made([1.0, one]), made([1.0, other])) == float("inf")
    assert projects.difference(made([1.0, float("nan")]), made([1.0, float("nan")])) == 0


def test_lines_that_only_ort_printed(projects: ModuleType) -> None:
    stock = made([], lines=["epoch 1 took 2.5 s", "hello"])
    assert projects.new_lines(stock, made([], lines=["hello", "epoch 3 took 4.5 s", "oh"])) == ["oh"]
    ours = ["lightning-ort: torch.Adam runs as torch.Adam (fused)", "step runs in torch: capture failed"]
    assert projects.new_lines(stock, made([], lines=ours)) == ours[1:]


@pytest.mark.parametrize(
    ("engine", "seconds", "note", "text"),
    [
        ("ort", 1.0, "", "ORT"),
        ("torch", 1.0, "SLOWER", "PyTorch"),
        ("inductor", 1.0, "", "inductor"),
        ("", 0.0, "NOT_COMPILED", "nothing compiled"),
        ("", 1.0, "BUDGET", "PyTorch"),
        ("", 1.0, "NOT_COMPILED", "PyTorch"),  # a validation step was compiled
        ("", 1.0, "GRAPH_BREAK", "captured, not timed"),
    ],
)
def test_what_was_kept(projects: ModuleType, engine: str, seconds: float, note: str, text: str) -> None:
    steps = [{"name": "validation_step", "engine": "ort"}]
    steps += [{"name": "training_step", "engine": engine}] if engine else []
    notes = [{"where": "training_step", "reason": {"type": note}}] if note else []
    assert projects.kept({"steps": steps, "notes": notes, "startup_seconds": seconds}) == text


def test_page(projects: ModuleType, tmp_path: Path) -> None:
    report = {"startup_seconds": 1.5, "graph_breaks": 2, "recompiles": 3, "graphs": [{}], "verdict": "not worth it"}
    row = projects.ROWS[0]
    result = {"row": row.name, "length": "short", "start": "now", "steps": 40, "error": "", "date": "2026-11-23"}
    result |= {"versions": {"torch": "2.13.0"}, "report": report, "kept": "ORT", "lines": ["oh"]}
    result |= {"stock_seconds": 2.0, "ort_seconds": 1.0, "difference": 2e-3}
    result |= {"stock_from_double": 3e-3, "ort_from_double": 4e-3}
    failed = {**result, "row": projects.ROWS[1].name, "error": "ort: oh no"}
    page = tmp_path / "projects.md"
    projects.write_page(page, {"a": result, "b": failed})
    text = page.read_text(encoding="utf-8")
    assert "Measured on 2026-11-23 with torch 2.13.0." in text
    losses = "2e-03 (stock 3e-03, ort 4e-03 from float64)"
    assert f"| neuralforecast | {row.model} | 40 | 2.0 s | 1.0 s | ORT | 1.5 s | 2 | 3 | {losses} | 1 |" in text
    assert "failed: ort: oh no" in text
