"""How long compiling takes: the language model example's training step under this backend and under inductor.

Each in a fresh process with empty caches, and this backend once more with what its first run kept; what is timed is the
first forward and backward, less a step's own time. Most of that is dynamo's and AOTAutograd's: "own work" is what
conversion, sessions and placement took of it. ``python benchmarks/compile_time.py [--without-inductor]``
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from harness import console, seconds, table_of

from lightning_ort.compiler.backend import ORTBackend

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "language_model"))


def measured(backend_name: str) -> tuple[float, float]:
    """Compile and run one training step; return seconds of the first step less a later one's, and of our own work."""
    from model import GPT

    torch.manual_seed(0)
    model = GPT()
    tokens, targets = torch.randint(0, 256, (2, 16, model.hparams["context"]))

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    ours = ORTBackend()
    compiled = torch.compile(loss, backend=ours if backend_name == "ort" else backend_name)
    times = [seconds(lambda: compiled().backward()) for _ in range(3)]
    return times[0] - times[-1], sum(graph.seconds for graph in ours.report.graphs)


parser = argparse.ArgumentParser()
parser.add_argument("--only", choices=["ort", "inductor", "aot_eager"])
parser.add_argument("--without-inductor", action="store_true", help="it takes ten times as long as the others")
args = parser.parse_args()
if args.only:
    print(*measured(args.only))
    sys.exit()

table = table_of(
    "compile time of the language model example's forward and backward graphs",
    ["backend"],
    ["seconds", "ratio to inductor", "own work", "ratio to empty cache"],
)
results: dict[str, tuple[float, float]] = {}
with tempfile.TemporaryDirectory() as folder:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    env["LIGHTNING_ORT_CACHE_DIR"] = folder
    for name in ("inductor", "ort", "ort again", "aot_eager"):
        if name != "inductor" or not args.without_inductor:
            command = [sys.executable, __file__, "--only", name.removesuffix(" again")]
            run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            whole, own = run.stdout.split()[-2:]
            results[name] = float(whole), float(own)
for name, (whole, own) in results.items():
    to_inductor = f"{whole / results['inductor'][0]:.2f}" if "inductor" in results else "-"
    ours = (f"{own:.2f}", f"{own / results['ort'][1]:.2f}") if name.startswith("ort") else ("", "")
    table.add_row(name, f"{whole:.2f}", to_inductor, *ours)
console(100).print(table)
