"""Importing the package loads nothing that is slow, or that patches torch, before it is needed."""

import json
import subprocess
import sys

import pytest

from lightning_ort.compiler.executors.ort import kernels

HEAVY = ("onnxruntime", "onnx", "deepspeed", "bitsandbytes", "transformers", "lightning.pytorch", "pytorch_lightning")

CODE = f"""
import sys
import lightning_ort
print(",".join(name for name in {HEAVY!r} if name in sys.modules))
import torch
assert not torch.cuda.is_initialized()
from lightning_ort import ORTStrategy
strategy = ORTStrategy()
print(",".join(name for name in {HEAVY[:4]!r} if name in sys.modules))  # torchmetrics loads transformers
assert not torch.cuda.is_initialized()
"""


@pytest.mark.slow
def test_import_is_lean() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["", ""]


ONNXRUNTIME = """
import sys
import torch.utils.checkpoint
from lightning_ort.compiler.executors.ort import kernels
assert kernels.unavailable() is None
print(",".join(name for name in ("deepspeed", "onnxruntime.training") if name in sys.modules))
print(torch.utils.checkpoint.checkpoint.__module__)
from onnxruntime.training import artifacts
print(artifacts.__name__)
"""


@pytest.mark.skipif(
    not kernels.Kernels("auto", ("CPUExecutionProvider",)).has_training("SoftmaxGrad_13"),
    reason="for the training build",
)
def test_onnxruntime_comes_without_ortmodule() -> None:
    done = subprocess.run([sys.executable, "-c", ONNXRUNTIME], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()  # DeepSpeed, which the last import brings, has something to say before it
    assert [*lines[:2], lines[-1]] == ["", "torch.utils.checkpoint", "onnxruntime.training.artifacts"]


FIT = """
import json
import linecache
import sys
import torch
import lightning_ort
from lightning.pytorch import LightningModule, Trainer

torch.set_num_threads(1)

class Module(LightningModule):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(8, width)

    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 8)), 4)
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
fits, *names = sys.argv[1:]
linecache.getlines(torch.__file__)
linecache.cache |= {name: (7, time, ["x = 1\\n"], name) for name, time in (("cell", 1.0), ("other", None))}
fresh = "lightning_ort.lightning" not in sys.modules
for width, config in json.loads(fits):
    strategy = lightning_ort.ORTStrategy(config)
    # sources that are in a file are read again, and those in memory stay
    assert not fresh or torch.__file__ not in linecache.cache and {"cell", "other"} <= linecache.cache.keys()
    fresh = False
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **quiet)
    trainer.fit(Module(width), data)
    assert trainer.global_step == 4
    print("ran", trainer.strategy.report.ort_runs, *(name for name in names if name in sys.modules))
"""
# what has compiled for the first time has loaded no more than it needs, and the rest is there when it is asked for
AFTER = """
print([name for name in ("networkx", "torch.distributed.tensor.experimental", "torch._inductor.compile_fx")
       if name in sys.modules])
print([file for file, found in linecache.cache.items() if len(found) > 1 and file.endswith(
    ("symbolic_convert.py", "fake_tensor.py", "output_graph.py"))])  # sources that were read stay in memory

from torch._functorch._activation_checkpointing.graph_info_provider import GraphInfoProvider as Graph

graph = Graph(["a", "b"], [("a", "b")], ["a", "b"], {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0})
print(list(graph.recomputable_node_only_graph.edges))
import networkx
print(type(graph.recomputable_node_only_graph) is networkx.DiGraph)
"""
OURS = {"lightning_ort.compiler.compilation"}
COMPILER = OURS | {"onnxruntime", "onnx", "onnx_ir", "torch._functorch.partitioners"}
INDUCTOR = "torch._inductor.ir"  # takes 0.3 s and 24 MB
ZERO = "torch.distributed.optim"  # takes 0.2 s


@pytest.mark.new_torch
def test_fits_load_what_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """First one that compiles nothing, then one that an earlier run has compiled, then one on ONNX Runtime."""
    always = {"placement": "always", "debug": {"min_region_nodes": 1}}
    monkeypatch.setattr(sys, "argv", ["fit", json.dumps([(4, always)])])
    exec(compile(FIT, "fit", "exec"), {"__name__": "fit"})
    fits = json.dumps([(4, {}), (4, always), (5, always)])
    command = [sys.executable, "-c", FIT + AFTER, fits, *COMPILER, INDUCTOR, ZERO]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert [runs != "0" for runs, *_ in lines] == [False, True, True]
    assert [{*loaded} for _, *loaded in lines] == [set(), OURS | {"onnxruntime"}, COMPILER]
    assert done.stdout.splitlines()[-4:] == ["[]", "[]", "[('a', 'b')]", "True"]


COMMAND = """
import sys
from lightning_ort.cli import main
sys.argv = ["lightning-ort", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code or "empty" in str(ended.code), ended.code
print(",".join(name for name in ("torch", "numpy", "onnx", "lightning") if name in sys.modules))
"""


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["cache", "info"], ["cache", "--help"]])
def test_commands_that_need_no_torch_do_not_load_it(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
