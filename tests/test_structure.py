"""Rules of CONTRIBUTING.md that a machine can check: size, layers, no import cycle, private names in `compat/`."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_ort

ROOT = Path(lightning_ort.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50

# A module imports from its own layer and from those before it.
LAYERS = [
    {"_arguments", "_busy", "_imports", "_memory", "_stopwatch", "_strategies", "_text"},
    {"compat"},
    {"config"},
    {"compiler"},
    {"optim", "precision"},
    {"strategies"},
    {"callbacks", "onnx_export"},
    {"lightning", "pytorch_lightning"},
    {"tuning"},
    {"_registration"},
    {"__init__"},
    {"cli"},
    {"__main__"},
]

# Imports that may close a circle, each with its reason.
CIRCLES: dict[str, set[str]] = {
    # what the steps of a module share is passed to all that a step asks
    **dict.fromkeys(
        (
            "lightning_ort.strategies.audit.graph_audit",
            "lightning_ort.strategies.audit.step_audit",
            "lightning_ort.strategies.capture.room",
            "lightning_ort.strategies.race.view",
            "lightning_ort.strategies.race.ways",
        ),
        {"lightning_ort.strategies.capture.module"},
    ),
    "lightning_ort.strategies.capture.module": {"lightning_ort.strategies.capture.step"},
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def layer_of(module: str) -> int:
    part = module.split(".")[1] if "." in module else "__init__"
    return next(index for index, layer in enumerate(LAYERS) if part in layer)


def test_layers_are_those_of_the_guide() -> None:
    guide = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = re.findall(
        r"^\d+\. (`[\w/.]+`(?:(?:, | and )`[\w/.]+`)*)", guide.split("## Layers")[1].split("\n## ")[0], re.M
    )
    assert [set(re.findall(r"`(\w+)(?:\.py|/)`", line)) for line in lines] == LAYERS


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """Modules of the package that statements import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in inner]
        else:
            continue
        found.update(name for name in names if name in MODULES)
    return found


def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each function and its lines, docstring not counted."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            yield node.name, lines


def test_files_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path.name: count for path, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_names_of_test_files_are_unique() -> None:
    """Without packages pytest imports them by name, and refuses the second."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_functions_are_short() -> None:
    found = {(module, name): lines for module in MODULES for name, lines in functions(parsed(module))}
    assert len(found) > 500
    assert {where: lines for where, lines in found.items() if lines > MAX_FUNCTION_LINES} == {}


def test_no_circle_of_imports() -> None:
    """No file needs another that needs it, be it for a type alone or only when a function runs."""
    graph = {module: imported(ast.walk(parsed(module))) - {module} - CIRCLES.get(module, set()) for module in MODULES}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the modules of a circle
    assert len(order) == len(MODULES) > 50


@pytest.mark.parametrize(("module", "needed"), [(module, name) for module in CIRCLES for name in CIRCLES[module]])
def test_circles_that_are_allowed_are_there(module: str, needed: str) -> None:
    """What is not in the way any more goes from the list."""
    assert needed in imported(ast.walk(parsed(module)))


@pytest.mark.parametrize("module", MODULES)
def test_no_upward_import(module: str) -> None:
    # those inside functions too
    above = {name for name in imported(ast.walk(parsed(module))) if layer_of(name) > layer_of(module)}
    assert above == set()


@pytest.mark.parametrize("module", [module for module in MODULES if ".compat" not in module])
def test_private_names_of_other_packages_are_in_compat(module: str) -> None:
    """Ruff's SLF001 sees attributes; this sees imports."""
    private = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        private |= {name for name in names if not name.startswith("lightning_ort") and re.search(r"\._[a-z]", name)}
    assert private == set()
