"""What the scripts share: what figures depend on, and the parts of the page that they write."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from lightning_ort.tuning.api import machine

PAGE = Path(__file__).parents[2] / "docs" / "test_reports" / "train_anywhere.md"


def onnxruntime_of(python: str) -> str:
    """The version of onnxruntime that an interpreter has."""
    program = "import os; os.environ['DS_ACCELERATOR'] = 'cpu'; import onnxruntime; print(onnxruntime.__version__)"
    done = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True)
    return done.stdout.split()[-1]


def header(node: Path | None = None) -> str:
    """The machine and the versions, in one line."""
    found = machine()
    if node is not None:
        found["node"] = subprocess.run(["node", "--version"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("onnxruntime-web", "onnxruntime-node"):
            found[name] = json.loads((node / "node_modules" / name / "package.json").read_text())["version"]
    return ", ".join(f"{name} {value}" for name, value in found.items())


def written(script: str, lines: Sequence[str]) -> None:
    """Write a script's part of the page."""
    start, end = f"<!-- {script} -->\n", f"<!-- end of {script} -->\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(start)
    _, _, after = rest.partition(end)
    PAGE.write_text(before + start + "\n".join(lines) + "\n" + end + after, encoding="utf-8")
