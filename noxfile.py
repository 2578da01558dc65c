"""The test suite with other versions: ``nox --session python312``.

A session for each row of docs/test_reports/versions.md. Run by hand: PyPI's torch is the build with CUDA, several
gigabytes with its libraries. Arguments after ``--`` are pytest's. ``make test`` runs the suite with the versions of
constraints.txt.
"""

from functools import partial

import nox

TRAINING = "onnxruntime-training-cpu==1.19.2"
# name: Python, torch, ONNX Runtime
ROWS = {
    "python310": ("3.10", "2.13.0", TRAINING),
    "python312": ("3.12", "2.13.0", TRAINING),
    "python313": ("3.13", "2.13.0", "onnxruntime==1.32.0"),
    "torch211": ("3.11", "2.11.0", TRAINING),
    "torch215": ("3.11", "2.15.0", TRAINING),
}
nox.options.sessions = []


def suite(session: nox.Session, torch: str, onnxruntime: str) -> None:
    """Install the versions and run the tests."""
    session.install(f"torch=={torch}")
    session.install(f"torch=={torch}", onnxruntime, "lightning==2.6.6", "deepspeed==0.19.8", ".[test,plot]")
    tests = session.posargs or ["-n", "auto", "--dist", "worksteal", "-m", "not slow and not gpu"]
    session.run("python", "-m", "pytest", *tests)


for name, (python, torch, onnxruntime) in ROWS.items():
    row = partial(suite, torch=torch, onnxruntime=onnxruntime)
    row.__doc__ = f"Python {python}, torch {torch}, {onnxruntime}"
    nox.session(row, name=name, python=python)
