"""Rules of CONTRIBUTING.md that a machine can check: size, layers, no circle of imports, private names in `compat/`."""

import ast
import functools
import graphlib
import importlib
import re
from collections.abc import Callable, Iterator
from inspect import ismodule
from pathlib import Path

import pytest

import lightning_ort

ROOT = Path(lightning_ort.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MOST_LINES = 42_260  # of the whole package; a commit that raises it says why
MAX_FUNCTION_LINES = 50

# A module imports from its own layer and from those before it.
LAYERS = [
    {"_arguments", "_busy", "_imports", "_memory", "_shims", "_strategies", "_text"},
    {"compat"},
    {"config"},
    {"recording", "world"},
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


def module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: not those of functions, nor those for type checkers."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from (node for statement in child.orelse for node in ast.walk(statement))
            continue
        yield child
        yield from module_level(child)


def within_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from ast.walk(node)


def loaded_with(module: str) -> set[str]:
    """Modules of the package that importing one imports."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = imported(module_level(parsed(waiting.pop()))) - found
        found |= new
        waiting += new
    return found


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


@functools.cache
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


def test_the_package_is_no_larger_than_its_budget() -> None:
    """Sizes of files are free; what is added has to be worth its lines, and a smaller package lowers the number."""
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES if path.name != "_version.py")
    assert lines <= MOST_LINES


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
    graph = {module: imported(ast.walk(parsed(module))) - {module} for module in MODULES}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the modules of a circle
    assert len(order) == len(MODULES) > 50


# what takes a step, or a model, apart: torch renames it, and nothing else may fail with it
FRAGILE = re.compile(r"torch\._[a-z]|torch\._C\._dynamo|torch\.fx\.(experimental|graph)")
# what imports some of it when that is asked for, and says what is missing
DOORS = {
    "lightning_ort.callbacks.export_onnx",
    "lightning_ort.compiler.engines",  # `obstacle`, of steps that are captured
    "lightning_ort.onnx_export.predict",
    "lightning_ort.strategies.capture.capture",
}


def other_modules(module: str) -> set[str]:
    """Names that a module imports, be it in a function, and what it reads of them."""
    found = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.match(r"torch\._(dynamo|functorch|inductor)\b", ast.unparse(node)):
            found.add(ast.unparse(node))
    return found


def test_what_needs_nothing_of_dynamo_imports_nothing_of_it() -> None:
    fragile = {module for module in MODULES if any(map(FRAGILE.match, other_modules(module)))}
    assert len(fragile) > 5
    assert {module.split(".")[1] for module in fragile} <= {"compat", "recording"}
    loaded = loaded_with("lightning_ort.lightning")
    assert len(loaded) > 50
    assert loaded & fragile == set()
    later = {module: imported(within_functions(parsed(module))) for module in loaded}
    assert {module for module in later if fragile & {*later[module], *map_all(loaded_with, later[module])}} == DOORS


def map_all(function: Callable[[str], set[str]], names: set[str]) -> set[str]:
    return {found for name in names for found in function(name)}


@pytest.mark.parametrize("module", [name for name in MODULES if re.search(r"\.compat\.(dynamo|aot_)", name)])
def test_names_of_dynamo_are_looked_up_at_once(module: str) -> None:
    """One that is missing shows when its module is imported, and not when a step runs."""
    tree = parsed(module)
    modules = {
        alias.asname or alias.name
        for node in module_level(tree)
        if isinstance(node, ast.ImportFrom) and re.match(r"torch\._(dynamo|functorch)", node.module or "")
        for alias in node.names
        # a configuration is patched, which says what it does not know
        if alias.name != "config" and ismodule(getattr(importlib.import_module(node.module), alias.name))
    }

    def read(nodes: Iterator[ast.AST]) -> set[str]:
        pairs = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
        return {
            f"{node.value.id}.{node.attr}" for node in pairs if node.value.id in modules and node.attr != "__name__"
        }

    assert read(within_functions(tree)) <= read(module_level(tree))


# in the package itself their names would be among those that it offers
@pytest.mark.parametrize("module", sorted(set(MODULES) - {"lightning_ort"}))
def test_imports_within_functions_save_start_up(module: str) -> None:
    """What is loaded anyway is imported at the top."""
    inner = imported(within_functions(parsed(module)))
    assert inner == set() or inner & loaded_with(module) == set()


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
