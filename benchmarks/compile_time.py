"""How long compiling takes: the language model example's training step under this backend and under inductor.

Each in a fresh process with empty caches; what is timed is the first forward and backward, less a step's own time.
``python benchmarks/compile_time.py``
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from lightning_ort.compiler.backend import ORTBackend

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "language_model"))


def seconds(backend_name: str) -> tuple[float, float]:
    """Compile and run one training step; return seconds of the first step and of a later one."""
    from model import GPT

    torch.manual_seed(0)
    model = GPT()
    tokens, targets = torch.randint(0, 256, (2, 16, model.hparams["context"]))

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    backend = ORTBackend() if backend_name == "ort" else backend_name
    compiled = torch.compile(loss, backend=backend)
    compiled_times = []
    for _ in range(3):
        start = time.perf_counter()
        compiled().backward()
        compiled_times.append(time.perf_counter() - start)
    return compiled_times[0], compiled_times[-1]


parser = argparse.ArgumentParser()
parser.add_argument("--only", choices=["ort", "inductor", "aot_eager"])
only = parser.parse_args().only
if only:
    first, later = seconds(only)
    print(first - later)
    sys.exit()

table = Table(title="compile time of the language model example's forward and backward graphs")
for column in ("backend", "seconds", "ratio to inductor"):
    table.add_column(column, justify="left" if column == "backend" else "right")
results = {}
for name in ("inductor", "ort", "aot_eager"):
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        command = [sys.executable, __file__, "--only", name]
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    results[name] = float(run.stdout.split()[-1])
for name, value in results.items():
    table.add_row(name, f"{value:.2f}", f"{value / results['inductor']:.2f}")
console = Console(width=100)
console.print(
    f"{time.strftime('%Y-%m-%d')}  torch {torch.__version__}, Python {platform.python_version()}, "
    f"{torch.get_num_threads()} threads, {platform.machine()}"
)
console.print(table)
