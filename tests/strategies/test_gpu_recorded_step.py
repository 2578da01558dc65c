"""One GPU: a training step that is replayed as CUDA graphs. None of these tests has run on a real one yet."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback
from small_modules import loader
from test_recorded_step import Module, Values, named, notes
from torch import Tensor

from lightning_ort import ORTStrategy
from lightning_ort.compat.cuda_graphs import free_workspaces
from lightning_ort.compiler.machine.recorder import Recorder
from lightning_ort.strategies.lean.batch_copies import BatchCopies

pytestmark = pytest.mark.gpu
STEPS, LOGS = 120, 10  # a logger reads values, which waits for them


class Fused(Module):
    """Its stock runs have the same kernels; it keeps nodes of autograd that belong to the stream of the steps."""

    def on_train_start(self) -> None:
        self.kept = [parameter.sum() for parameter in self.parameters()]

    def train_dataloader(self) -> Any:
        return named(loader(8 * STEPS))

    def configure_optimizers(self) -> Any:
        (optimizer,), schedules = super().configure_optimizers()
        for group in (optimizer.defaults, *optimizer.param_groups):
            group["fused"] = True
        return [optimizer], schedules


class WaitsForNothing(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if STEPS - LOGS <= batch_idx < STEPS - 1 else "default")


@pytest.fixture(autouse=True)
def inductor_wins(paces: Callable[..., None]) -> None:
    paces(torch=1.0, inductor=0.5, **{"inductor-graphs": 0.5})


def fit(make_trainer: Callable[..., Any], strategy: Any, **settings: Any) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    values = Values()
    defaults: Any = {"accelerator": "gpu", "max_epochs": 1, "limit_val_batches": 0, "logger": values}
    trainer = make_trainer(strategy=strategy, log_every_n_steps=LOGS, **defaults, **settings)
    trainer.fit(Fused())
    return trainer, [float(one["loss"]) for one in values.found if "loss" in one]


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=str)
def test_it_is_what_eager_computes_and_waits_for_nothing(settings: Any, make_trainer: Callable[..., Any]) -> None:
    is_exact = "precision" not in settings  # where roundings add up, it is what inductor computes otherwise
    _, expected = fit(make_trainer, "auto" if is_exact else ORTStrategy(config={"start": "now"}), **settings)
    ours = ORTStrategy(config={"start": "now", "debug": {"record_step": True}})
    try:
        trainer, found = fit(make_trainer, ours, callbacks=[WaitsForNothing()], **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "its forward and backward pass are one recording" in notes(trainer)
    assert "clipping and update are one recording" in notes(trainer)
    assert not trainer.strategy.report.fallbacks
    assert len(found) == STEPS / LOGS
    assert found == pytest.approx(expected, rel=1e-3 if is_exact else 3e-2)


def test_random_numbers_go_on_where_eager_would(make_trainer: Callable[..., Any]) -> None:
    fit(make_trainer, "auto")
    expected = torch.rand(4, device="cuda")
    fit(make_trainer, ORTStrategy(config={"start": "now", "audit": "off", "debug": {"record_step": True}}))
    torch.testing.assert_close(torch.rand(4, device="cuda"), expected)


def test_a_capture_that_fails_leaves_the_gpu_as_it_was() -> None:
    recorder, x = Recorder(torch.device("cuda", torch.cuda.current_device())), torch.ones(8, device="cuda")

    def waits() -> None:
        torch.nn.functional.dropout(x).sum().item()

    numbers, stream = torch.cuda.get_rng_state(), torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        recorder.record(waits)
    assert recorder.failed
    assert torch.cuda.current_stream() == stream
    torch.cuda.set_rng_state(numbers)
    found: list[Tensor] = []
    expected = torch.nn.functional.dropout(x)
    torch.cuda.set_rng_state(numbers)
    replay = Recorder(x.device).record(lambda: found.append(torch.nn.functional.dropout(x)))
    replay()
    torch.testing.assert_close(found[0], expected)


def test_a_recording_goes_on_where_torch_has_freed_what_its_kernels_worked_with() -> None:
    x, found = torch.randn(512, 512, device="cuda"), list[Tensor]()
    recorder = Recorder(x.device)
    recorder.rehearse(lambda: found.append(x @ x))
    replay = recorder.record(lambda: found.append(x @ x))
    free_workspaces()
    torch.cuda.empty_cache()
    replay()
    torch.testing.assert_close(*found)


def test_copies_of_batches_are_there_when_a_busy_gpu_reads_them() -> None:
    busy, found = torch.randn(4096, 4096, device="cuda"), list[Tensor]()
    copies = BatchCopies(move_data_to_device, busy.device, pytest.fail)
    for number in range(50):
        busy = (busy @ busy).clamp(-1, 1)
        batch = copies([torch.full((1 << 20,), number), torch.full((1 << 20,), number).pin_memory()], busy.device)
        found += [one.sum() for one in batch]
    assert [int(one) >> 20 for one in found] == [number for number in range(50) for _ in range(2)]
