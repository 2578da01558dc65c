"""Two nodes, as ``torchrun`` would start them, on the loopback device of one machine."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from processes import START, Recorded, fit

from lightning_ort import ORTDDPStrategy, ORTZeRO1Strategy
from lightning_ort.strategies.distributed.ending import launching

ALWAYS = {"placement": "always"}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def train(strategy: Any, folder: Path) -> None:
    """What a script does on each node: one process, of two in all."""
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        max_epochs=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Recorded(folder, "nodes"))


def _node(rank: int, port: int, strategy: type, folder: Path) -> None:
    torchrun = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    settings = {**torchrun, "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in settings.items()})
    train(strategy(config=ALWAYS), folder)


def facts_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"nodes.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("strategy", [pytest.param(ORTDDPStrategy, marks=pytest.mark.slow), ORTZeRO1Strategy])
def test_equal_two_processes_of_one_node(strategy: type, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    if strategy is ORTZeRO1Strategy:
        pytest.importorskip("deepspeed")
    stock = fit(Recorded(tmp_path, "stock"), DDPStrategy(start_method=START), make_trainer)
    with launching(SimpleNamespace(procs=[None])):  # a process of another run, which is none of those forked here
        pass
    context, port = multiprocessing.get_context("fork"), free_port()
    nodes = [context.Process(target=_node, args=(rank, port, strategy, tmp_path)) for rank in range(2)]
    for node in nodes:
        node.start()
    with launching(SimpleNamespace(procs=[])):
        pass
    for node in nodes:
        node.join(300)
        assert node.exitcode == 0
    for facts, expected in zip(facts_of(tmp_path), stock, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert facts["report"]["ort_runs"] > 0


SCRIPT = """
from pathlib import Path

from test_two_nodes import train

import lightning_ort

train("ort_ddp", Path({folder!r}))
"""


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(tmp_path)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test"]
    settings = {"LIGHTNING_ORT_CONFIG": json.dumps(ALWAYS), "OMP_NUM_THREADS": "1"}  # a short run compiles nothing
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), **settings}
    agents = [subprocess.Popen([*command, str(tmp_path / "script.py")], env=env) for _ in range(2)]
    assert [agent.wait(900) for agent in agents] == [0, 0]
    assert all(facts["report"]["graphs"] for facts in facts_of(tmp_path))
    weights = [facts["weight"] for facts in facts_of(tmp_path)]
    assert weights[0] == weights[1]
