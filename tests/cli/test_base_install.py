"""The commands work with what the base installation and one build of ONNX Runtime bring."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightning_ort import CompileReport

ROOT = Path(__file__).parents[2]
# what only extras install; torchmetrics imports others of them wherever they are installed
EXTRAS = (
    *("deepspeed", "bitsandbytes", "torchao", "onnxscript", "tensorboardX"),
    *("nbmake", "mkdocs", "codespell_lib", "optuna", "diffusers", "peft", "timm"),
)
CODE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extras!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
sys.argv = ["lightning-ort", *sys.argv[1:]]
from lightning_ort.cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["report", "run.json"],
        ["memory", "torch.nn:Linear", "--args", '{"in_features": 4, "out_features": 4}'],
        ["cache", "clear", "--folder", "kept"],
        ["doctor", "--json"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_without_extras(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(CompileReport().to_dict()))
    (tmp_path / "kept").mkdir()
    command = [sys.executable, "-c", CODE.format(extras=EXTRAS), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_packages_of_the_commands_are_base_requirements() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    base = text[text.index("\ndependencies = [") : text.index("[project.optional-dependencies]")]
    for name in ("jsonargparse[signatures]", "jinja2", "rich"):
        assert f'"{name}>=' in base


@pytest.mark.parametrize(
    ("python", "system", "machine", "build"),
    [
        ("3.11", "linux", "x86_64", "onnxruntime-training-cpu"),
        ("3.12", "linux", "x86_64", "onnxruntime-training-cpu"),
        ("3.13", "linux", "x86_64", "onnxruntime"),
        ("3.14", "linux", "x86_64", "onnxruntime"),
        ("3.12", "linux", "aarch64", "onnxruntime"),
        ("3.12", "darwin", "arm64", "onnxruntime-training-cpu"),
        ("3.13", "darwin", "arm64", "onnxruntime"),
        ("3.11", "win32", "AMD64", "onnxruntime-training-cpu"),
        ("3.11", "win32", "ARM64", "onnxruntime"),
    ],
)
def test_extra_cpu_takes_one_build_that_has_wheels(python: str, system: str, machine: str, build: str) -> None:
    """Which wheels onnxruntime-training-cpu 1.19.2, its last release, has on PyPI."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("\ncpu = [\n")[2].partition("]\n")[0]
    requirements = [Requirement(line.strip().rstrip(",").strip('"')) for line in lines.splitlines()]
    here = {"python_version": python, "sys_platform": system, "platform_machine": machine}
    assert [each.name for each in requirements if each.marker.evaluate(here)] == [build]
