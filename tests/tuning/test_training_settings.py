"""``ORTTrainingSettings``: the batches stay the same, and what was changed is as before when the fit is over."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lightning_ort import ORTTrainingSettings
from lightning_ort.callbacks.training_settings import _recomputing, changed, fixed_batches, repeated_blocks

DATA = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x).relu()


class Blocks(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(2, 1)
        self.convolution = nn.Conv2d(2, 2, 2)
        self.seen: list[Any] = []
        self.threads = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append([part.clone() for part in batch])
        self.threads = torch.get_num_threads()
        return self.head(self.blocks(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=4, shuffle=True)


def fit(make_trainer: Callable[..., Any], callback: Callback | None, data: Any = None) -> Blocks:
    module = Blocks()
    torch.manual_seed(1)
    trainer = make_trainer(max_epochs=1, callbacks=[callback] if callback else None)
    trainer.fit(module, data or Data())
    return module


def assert_same(batches: list[Any], others: list[Any]) -> None:
    assert len(batches) == len(others) > 0
    for ours, theirs in zip(batches, others, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)


def test_batch_size(make_trainer: Callable[..., Any]) -> None:
    assert [len(batch[0]) for batch in fit(make_trainer, ORTTrainingSettings(batch_size=5)).seen] == [5, 5]


def test_workers() -> None:
    loader = changed(DataLoader(DATA, batch_size=4), num_workers=1, persistent_workers=True, prefetch_factor=3)
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (1, True, 3)
    back = changed(loader, num_workers=0)
    assert (back.num_workers, back.persistent_workers, back.prefetch_factor) == (0, False, None)


def test_threads_and_layout_are_for_the_fit(make_trainer: Callable[..., Any]) -> None:
    torch.set_num_threads(2)
    module = fit(make_trainer, ORTTrainingSettings(threads=1, channels_last=True))
    assert (module.threads, torch.get_num_threads()) == (1, 2)
    torch.set_num_threads(1)
    assert module.convolution.weight.is_contiguous(memory_format=torch.channels_last)


def test_blocks_are_computed_again(make_trainer: Callable[..., Any]) -> None:
    usual = fit(make_trainer, None)
    again = fit(make_trainer, ORTTrainingSettings(checkpoint_blocks=True))
    assert [block.calls for block in usual.blocks] == [3, 3]
    assert [block.calls for block in again.blocks] == [6, 6]
    assert torch.equal(usual.head.weight, again.head.weight)
    assert all("forward" not in vars(block) for block in again.blocks)


def test_repeated_blocks_are_the_outermost() -> None:
    inner = nn.ModuleList([nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())])
    assert list(repeated_blocks(nn.ModuleDict({"stack": inner, "head": nn.Linear(2, 2)}))) == list(inner)
    assert list(repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == []


def test_everything_is_put_back_after_an_error(make_trainer: Callable[..., Any]) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise RuntimeError("stop")

    data, before = Data(), torch.get_num_threads()
    trainer = make_trainer(max_epochs=1, callbacks=[ORTTrainingSettings(threads=before + 1, batch_size=5), Fails()])
    with pytest.raises(RuntimeError, match="stop"):
        trainer.fit(Blocks(), data)
    assert torch.get_num_threads() == before
    assert "train_dataloader" not in vars(data)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(8))


class Own(DataLoader):
    pass


@pytest.mark.parametrize(
    ("loader", "batches"),
    [
        (Own(DATA), "comes from a Own"),
        (DataLoader(DATA, batch_size=None), "batch_size=None"),
        (DataLoader(Stream(), batch_size=None), "batch_size=None"),
        (DataLoader(DATA, batch_sampler=Own), "a batch sampler of its own"),
        (DataLoader(Stream(), batch_size=2), None),
    ],
)
def test_what_cannot_be_changed(loader: Any, batches: str | None) -> None:
    found = fixed_batches(loader)
    assert (found is None) == (batches is None)
    assert batches is None or batches in found


def test_a_stream_in_other_batches() -> None:
    assert [len(batch) for batch in changed(DataLoader(Stream(), batch_size=2), batch_size=4)] == [4, 4]


def test_a_batch_sampler_is_kept() -> None:
    class Mine(BatchSampler):
        pass

    sampler = Mine(SequentialSampler(DATA), 5, False)
    assert changed(DataLoader(DATA, batch_sampler=sampler), num_workers=0).batch_sampler is sampler


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_sampler=BatchSampler([3, 1, 4, 9, 5], 2, False)),  # whose batch_size is None
        DataLoader(DATA, sampler=BatchSampler([3, 1, 4, 9, 5], 2, False), batch_size=None),
        DataLoader(DATA, sampler=[3, 1, 4], batch_size=None),
        DataLoader(Stream(), batch_size=None),
    ],
)
def test_batches_that_are_not_the_loaders_stay(loader: DataLoader) -> None:
    usual, again = list(loader), list(changed(loader, pin_memory=False))
    assert len(usual) == len(again) > 0
    assert repr(usual) == repr(again)


@pytest.mark.parametrize(
    ("settings", "data", "message"),
    [
        ({"batch_size": 2}, DataLoader(DATA, batch_size=4), "passed to Trainer.fit: pass a LightningDataModule"),
        ({"checkpoint_blocks": True}, "flat", "has no ModuleList or Sequential"),
        ({"prefetch_factor": 2}, "own", r"ORTTrainingSettings\(prefetch_factor=2\): .*num_workers"),
        ({"persistent_workers": True}, "own", r"ORTTrainingSettings\(persistent_workers=True\): .*num_workers"),
        ({"batch_size": 2}, "fixed", r"ORTTrainingSettings\(batch_size=2\): the data comes from a Own"),
    ],
)
def test_what_cannot_be_set(settings: Any, data: Any, message: str, make_trainer: Callable[..., Any]) -> None:
    module, datamodule = Blocks(), Data()
    if data == "flat":
        module.blocks = nn.Linear(2, 2)
    if data == "fixed":
        datamodule.train_dataloader = lambda: Own(DATA)  # type: ignore[method-assign]
    trainer = make_trainer(max_epochs=1, callbacks=ORTTrainingSettings(**settings))
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(module, data if isinstance(data, DataLoader) else datamodule)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, r"ORTTrainingSettings\(batch_size=0\): must be at least 1"),
        ({"threads": 1.5}, "pass an integer"),
        ({"channels_last": "yes"}, "choose one of True, False"),
        ({"num_workers": 0, "persistent_workers": True}, "needs num_workers of 1 or more"),
    ],
)
def test_bad_values(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ORTTrainingSettings(**settings)


def test_checkpointed_blocks_update_batch_norms_once() -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(2)))
    module, x = copy.deepcopy(stock), torch.randn(6, 4)
    for block in module:
        block.forward = _recomputing(block, block.forward)
    for each in (stock, module):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    assert int(module[0][1].num_batches_tracked) == 1
    for mine, theirs in zip(module.buffers(), stock.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(module.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
