"""What is copied to a GPU while it computes, with stand-ins for streams, events and pinned memory.

That whole fits are what they are without it: ``test_recorded_step.py``, with the same stand-ins.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from tape import Streams, Tape
from test_recorded_step import Module, fit, notes, recording
from test_recorded_step import tape as tape
from torch import Tensor

from lightning_ort.strategies.lean.batch_copies import AHEAD, BatchCopies

CPU, BATCHES = torch.device("cpu"), 4


class Moves(Module):
    """With a hook of its own."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


def test_a_hook_of_the_module_moves_batches_itself(make_trainer: Callable[..., Any], tape: Tape) -> None:
    fit(Moves(), make_trainer, recording(), max_epochs=1, limit_train_batches=BATCHES)
    assert tape.streams.copied == []


def test_memory_that_cannot_be_pinned_ends_no_run(make_trainer: Callable[..., Any], tape: Tape) -> None:
    tape.streams.pins = False
    trainer = fit(Module(), make_trainer, recording(), max_epochs=1, limit_train_batches=BATCHES)
    assert trainer.global_step == BATCHES
    assert "batches are copied as Lightning does it: RuntimeError: this memory cannot be pinned" in notes(trainer)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


class Own:
    """Knows how to move itself."""

    moved = 0

    def to(self, device: torch.device) -> None:
        self.moved += 1


def test_what_is_copied_and_what_is_left_to_lightning(gpu: Streams) -> None:
    copies, own = BatchCopies(move_data_to_device, CPU, print), Own()
    x, pinned = torch.ones(4, 4), torch.ones(3).pin_memory()
    left = [x.t()[1:], x.to_sparse(), torch.ones(2, requires_grad=True), own, "a"]
    batch = {"copied": (x, pinned), "left": left}
    found = copies(batch, CPU)
    assert [*map(torch.equal, found["copied"], batch["copied"])] == [True, True]
    assert [one is other for one, other in zip(found["left"], left, strict=True)] == [True] * 5
    assert own.moved == 1
    assert [one is other for one, other in zip(gpu.recorded, found["copied"], strict=True)] == [True, True]
    assert len(gpu.pinned) == 2  # the second one was


def test_the_host_waits_only_for_a_gpu_that_is_far_behind(gpu: Streams) -> None:
    copies = BatchCopies(move_data_to_device, CPU, print)
    for _ in range(2 * AHEAD):
        copies(torch.ones(2), CPU)
    assert gpu.waits == 0
    gpu.is_behind = True
    copies(torch.ones(2), CPU)
    assert gpu.waits == 1


def test_the_stream_of_the_steps_is_the_current_one_after_an_error(gpu: Streams) -> None:
    def fails(batch: Tensor, device: torch.device) -> Any:
        raise ValueError("of Lightning's function")

    with pytest.raises(ValueError, match="of Lightning's function"):
        BatchCopies(fails, CPU, print)(torch.ones(2), CPU)
    assert gpu.current is gpu.main
