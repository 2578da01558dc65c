"""A torch that has renamed what steps are captured with: all else works, and one line says what is missing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from small_modules import Small

from lightning_ort import ORTStrategy
from lightning_ort.strategies.capture.capture import obstacle

# what is renamed, and where it is
NAMES = (
    ("torch._dynamo.variables", "UserMethodVariable"),
    ("torch._dynamo.variables.lists", "SizeVariable"),
    ("torch._dynamo.convert_frame", "input_codes"),
    ("torch._dynamo.guards", "install_guard"),
    ("torch._dynamo.callback", "callback_handler"),
    ("torch._dynamo.trace_rules", "_disallowed_callable_ids"),
    ("torch._dynamo.utils", "orig_code_map"),
    ("torch._dynamo.output_graph:OutputGraph", "compile_subgraph"),
    ("torch._dynamo.guards:GuardBuilder", "EQUALS_MATCH"),
    ("torch._dynamo.config:_config", "allow_rnn"),
    ("torch._functorch._aot_autograd.schemas", "OutputType"),
    ("torch._subclasses.fake_tensor", "unset_fake_temporarily"),
)
SCRIPT = """
import importlib
import json
import os
import sys
import traceback

import lightning.pytorch as pl
import torch
import torch._dynamo

torch.set_num_threads(1)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.losses = []

    def training_step(self, batch):
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def fit(strategy):
    pl.seed_everything(0)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **quiet)
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(80, 8), 4))
    return trainer, module.losses


def rename(where, name):
    place, _, owner = where.partition(":")
    holder = importlib.import_module(place)
    holder = getattr(holder, owner) if owner else holder
    if isinstance(holder, dict):
        holder[f"{name}_renamed"] = holder.pop(name)
        return
    setattr(holder, f"{name}_renamed", vars(holder)[name])
    delattr(holder, name)


def child(where, name, write):
    rename(where, name)
    try:
        import lightning_ort

        trainer, losses = fit(lightning_ort.ORTStrategy(json.loads(sys.argv[1])))
        report = trainer.strategy.report
        found = [trainer.global_step, losses == stock, report.run.trainer_loop, report.verdict, len(report.notes)]
    except BaseException:
        found = traceback.format_exc()
    os.write(write, json.dumps(found).encode())
    os._exit(0)


_, stock = fit("auto")
for where, name in json.loads(sys.argv[2]):
    read, write = os.pipe()
    if (process := os.fork()) == 0:
        child(where, name, write)
    os.close(write)
    with open(read) as result:
        print("FOUND", result.read(), flush=True)
    os.waitpid(process, 0)
"""


def fits(config: dict[str, Any], names: tuple[tuple[str, str], ...]) -> list[Any]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(config), json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]


@pytest.mark.new_torch
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("config", [{}, {"start": "now", "placement": "always"}], ids=["by default", "at once"])
def test_all_else_works(config: dict[str, Any]) -> None:
    for (where, name), found in zip(NAMES, fits(config, NAMES), strict=True):
        assert isinstance(found, list), found
        steps, is_stock, loop, verdict, notes = found
        assert (steps, is_stock, loop, notes) == (20, True, "lean", 1), where
        assert verdict.startswith("nothing is compiled: steps are not captured: "), where
        assert name in verdict


@pytest.mark.new_torch
@pytest.mark.parametrize("place", ["compiled_quickly", "dynamo.compilations_since"])
def test_what_is_missing_only_when_a_step_compiles(
    place: str, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise AttributeError("no such name")

    assert obstacle() == ""  # what it needs at once is there
    monkeypatch.setattr(f"lightning_ort.strategies.capture.dynamo_monitor.{place}", fails)
    losses, strategy = list[Any](), ORTStrategy({"start": "now", "placement": "always"})
    for each in ("auto", strategy):
        module = Small()
        make_trainer(strategy=each, max_epochs=2, limit_val_batches=0).fit(module)
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    told = [str(one) for one in strategy.report.fallbacks]
    assert told
    assert all(one.startswith("training_step: ") and "no such name" in one for one in told)
