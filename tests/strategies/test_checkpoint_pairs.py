"""A checkpoint goes from any strategy and number of processes to any other, and is saved there with the same bits."""

import itertools
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_modules import Small
from test_two_nodes import free_port

PLACES = [("auto", 1), ("ort", 1)] + [
    (name, processes) for processes in (1, 2) for name in ("ddp", "ort_ddp", "ort_zero1_native", "ort_zero1")
]
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


class Groups(Small):
    """Has two groups and a schedule; writes a checkpoint where it begins, or where it ends."""

    def __init__(self, optimizer: str, begins: Path | None = None, ends: Path | None = None) -> None:
        super().__init__()
        self._optimizer, self._begins, self._ends = optimizer, begins, ends

    def configure_optimizers(self) -> Any:
        weights, biases = ([p for p in self.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
        optimizer = OPTIMIZERS[self._optimizer]([{"params": weights}, {"params": biases, "weight_decay": 0.0}])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def on_train_start(self) -> None:
        if self._begins is not None:
            self.trainer.save_checkpoint(self._begins)

    def on_train_end(self) -> None:
        if self._ends is not None:
            self.trainer.save_checkpoint(self._ends)


def fits(rank: int, processes: int, port: int, make_trainer: Callable[..., Any], folder: Path, writes: bool) -> None:
    """What one process does: a fit for each checkpoint that is written, or for each that is gone on with."""
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0}
    env |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in env.items()})
    os.environ["LIGHTNING_ORT_CONFIG"] = '{"engine": "torch"}'

    def fit(name: str, module: Groups, **kwargs: Any) -> None:
        trainer = make_trainer(strategy=name, devices=processes, max_epochs=2 if writes else 3, limit_val_batches=0)
        trainer.fit(module, **kwargs)

    for (name, _), optimizer in itertools.product((place for place in PLACES if place[1] == processes), OPTIMIZERS):
        if writes:
            fit(name, Groups(optimizer, ends=folder / f"{optimizer} {name} {processes}.ckpt"))
            continue
        for first, ran in PLACES:
            begins = folder / f"{optimizer} {first} {ran} {name} {processes}.ckpt"
            fit(name, Groups(optimizer, begins), ckpt_path=folder / f"{optimizer} {first} {ran}.ckpt")


def differs(one: Any, other: Any, where: str = "") -> list[str]:
    """Say where two checkpoints have not the same bits."""
    if isinstance(one, torch.Tensor):
        return [] if one.dtype is other.dtype and torch.equal(one, other) else [where]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{where}: {list(one)} {list(other)}"]
        return [found for key in one for found in differs(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple):
        pairs = itertools.zip_longest(one, other)
        return [found for i, pair in enumerate(pairs) for found in differs(*pair, where=f"{where}.{i}")]
    return [] if one == other else [f"{where}: {one} {other}"]


@pytest.mark.slow
def test_all_pairs(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    context = multiprocessing.get_context("fork")
    for writes, processes in itertools.product((True, False), (1, 2)):
        args = (processes, free_port(), make_trainer, tmp_path, writes)
        started = [context.Process(target=fits, args=(rank, *args)) for rank in range(processes)]
        for process in started:
            process.start()
        for process in started:
            process.join(900)
        assert [process.exitcode for process in started] == [0] * processes
    found, compared = [], 0
    for optimizer, (first, ran), (second, runs) in itertools.product(OPTIMIZERS, PLACES, PLACES):
        paths = (f"{optimizer} {first} {ran}.ckpt", f"{optimizer} {first} {ran} {second} {runs}.ckpt")
        one, other = (torch.load(tmp_path / path, weights_only=True) for path in paths)
        assert one["optimizer_states"][0]["state"]
        compared += 1
        for key in ("state_dict", "optimizer_states", "lr_schedulers"):
            found += [f"{paths[1]}: {each}" for each in differs(one[key], other[key], key)]
    assert compared == 200
    assert found == []
