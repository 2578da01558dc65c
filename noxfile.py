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
    "python312": ("3.12", "torch==2.13.0", TRAINING),
    "python313": ("3.13", "torch==2.13.0", "onnxruntime==1.32.0"),
    "python314": ("3.14", "torch==2.15.0", "onnxruntime==1.32.0"),
    "torch215": ("3.11", "torch==2.15.0", TRAINING),
    "newest": ("3.14", "torch", "onnxruntime"),
}
# what needs nothing of dynamo, and so runs with each torch from 2.6 and each Lightning from 2.5 on
LEAN = (
    *(f"tests/compat/test_{name}.py" for name in ("lightning", "lightning_loops", "torch", "torch_optimizers")),
    *("tests/optim", "tests/precision"),
    *(
        f"tests/strategies/test_{name}.py"
        for name in (
            *("advice", "checkpoints", "ddp", "dropout_masks", "environment", "host_memory", "late_bars", "lean"),
            *("optimizers", "sigterm", "single_device", "step_time", "unknown_lightning", "whole_batches"),
        )
    ),
    *("tests/test_config.py", "tests/test_import_is_lean.py", "tests/test_registration.py"),
    "tests/tuning/test_training_settings.py",
)
# name: torch, Lightning
LEAN_ROWS = {"torch26": ("torch==2.6.0", "lightning==2.5.0"), "lean_newest": ("torch", "lightning")}
nox.options.sessions = []


def suite(session: nox.Session, torch: str, onnxruntime: str, lightning: str, of: tuple[str, ...] = ()) -> None:
    """Install the versions and run the tests."""
    session.install(torch)
    extras = ".[test,plot]" if not of else ".[plot]"
    needed = ["deepspeed==0.19.8"] if not of else ["pytest", "pytest-xdist", "psutil", "scikit-learn", "tensorboardX"]
    session.install(torch, onnxruntime, lightning, *needed, extras)
    tests = session.posargs or ["-n", "auto", "--dist", "worksteal", "-m", "not slow and not gpu", *of]
    session.run("python", "-m", "pytest", *tests)


for name, (python, torch, onnxruntime) in ROWS.items():
    lightning = "lightning" if name == "newest" else "lightning==2.6.6"
    row = partial(suite, torch=torch, onnxruntime=onnxruntime, lightning=lightning)
    row.__doc__ = f"Python {python}, {torch}, {onnxruntime}"
    nox.session(row, name=name, python=python)
for name, (torch, lightning) in LEAN_ROWS.items():
    row = partial(suite, torch=torch, onnxruntime=TRAINING, lightning=lightning, of=LEAN)
    row.__doc__ = f"what needs nothing of dynamo: Python 3.11, {torch}, {lightning}"
    nox.session(row, name=name, python="3.11")
