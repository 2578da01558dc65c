"""Batches of tensors are fetched at once while a run lasts, and are those that torch's loaders give."""

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from small_modules import Small
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_ort.strategies.whole_batches import whole_batches

ONE_BY_ONE = {TensorDataset.__getitem__.__code__}


@contextmanager
def in_a_run() -> Iterator[None]:
    run = object()
    whole_batches.begin(run)
    try:
        yield
    finally:
        whole_batches.end(run)


@contextmanager
def taken() -> Iterator[list[int]]:
    """Count the examples that are taken one by one."""
    found: list[int] = []

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in ONE_BY_ONE:
            found.append(1)

    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(None)


def assert_same(one: Any, other: Any) -> None:
    """Equal to the bit, in all that can be asked of a batch."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        for name in ("dtype", "shape", "requires_grad", "is_cpu"):
            assert getattr(one, name) == getattr(other, name)
        for name in ("stride", "storage_offset", "is_conj", "is_neg", "is_inference"):
            assert getattr(one, name)() == getattr(other, name)()
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert one.tolist() == other.tolist()
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, Sequence) and not isinstance(one, (str, bytes)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, np.ndarray):
        assert one.tolist() == other.tolist()
    else:
        assert one == other


def a_tensor(choose: random.Random, rows: int) -> Tensor:
    shape = choose.choice([(), (3,), (0,), (2, 3), (3, 4, 4), (1,)])
    x = torch.arange(rows * int(np.prod([3, *shape]))).view(rows, *shape, 3)[..., 0] % 251
    forms: list[Callable[[], Tensor]] = [
        lambda: x.float().clone(),
        lambda: x,  # examples with gaps within
        lambda: (x > 7).clone(),
        lambda: x.to(torch.int8),
        lambda: x.to(torch.uint16),
        lambda: x.half(),
        lambda: x.to(torch.complex64).conj(),
        lambda: torch.stack([x, x], -1).double().sum(-1).t() if x.dim() == 2 and rows == x.shape[1] else x.double(),
        lambda: torch.cat([x, x])[::2].bfloat16(),
        lambda: x[:1].expand(x.shape),
        lambda: x.float().contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.float(),
        lambda: x.float().requires_grad_() if choose.random() < 0.3 else x.float(),
    ]
    return choose.choice(forms)()


class Indexes(Dataset[Any]):
    """Of a user: its examples are what it has at an index."""

    def __init__(self, x: Any, y: Any, *more: Any) -> None:
        self.x, self.y, self.more = x, y, {"first": more}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Any:
        x, y = self.x[index], self.y[index]
        more = self.more["first"][0][index] if self.more else torch.Tensor()
        return {"x": x, "both": (x, y), "more": [more]}


ONE_BY_ONE.add(Indexes.__getitem__.__code__)


def an_array(choose: random.Random, rows: int) -> Any:
    """What a data set may index: an array, tensor or list."""
    shape = choose.choice([(), (), (3,), (0,), (2, 3), (3, 4, 4)])
    dtypes = ["?", "i1", "i4", "i8", "u1", "u2", "f2", "f4", "f8", "c8"]
    dtype = choose.choice(dtypes if choose.random() < 0.95 else ["u8", ">f4", "U2"])
    x: Any = (np.arange(rows * int(np.prod(shape))).reshape(rows, *shape) % 251).astype(dtype)
    forms: list[Callable[[], Any]] = [
        lambda: x,
        lambda: x,
        lambda: x,
        lambda: np.concatenate([x, x])[::2],
        lambda: np.asfortranarray(x),
        lambda: x.tolist(),
        lambda: list(x),
        lambda: tuple(x),
        lambda: a_tensor(choose, rows),
        lambda: torch.from_numpy(x.real.astype("f4")),
        lambda: np.broadcast_to(x[:1], x.shape),  # read-only
        lambda: np.ma.masked_array(x),
    ]
    return choose.choice(forms)()


def some_indices(choose: random.Random, rows: int, count: int) -> Any:
    lowest = -rows if choose.random() < 0.05 else 0
    found = [choose.randrange(lowest, rows) for _ in range(count)]
    kinds = [
        list,
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda own: list(np.array(own)),
        lambda own: list(torch.tensor(own)),
    ]
    return choose.choice([*kinds, lambda own: np.array(own, np.int32), lambda own: range(min(count, rows))])(found)


def a_dataset(choose: random.Random, depth: int = 0) -> Any:
    kind = choose.random() if depth < 3 else 1.0
    if kind < 0.5:
        inner = a_dataset(choose, depth + 1)
        size = len(inner)
        if kind < 0.25:
            return Subset(inner, some_indices(choose, size, choose.randrange(3, 30)))
        if kind < 0.35:
            again = Subset(inner, [choose.randrange(size) for _ in range(size)])
            return choose.choice([StackDataset(inner, again), StackDataset(first=inner, second=again)])
        return ConcatDataset([inner, choose.choice([Subset(inner, range(size // 2)), a_dataset(choose, depth + 1)])])
    rows = choose.randrange(5, 40)
    if kind < 0.7 or (depth and choose.random() < 0.3):
        return Indexes(*(an_array(choose, choose.choice([rows] * 20 + [rows - 1])) for _ in range(3)))
    tensors = [a_tensor(choose, rows) for _ in range(choose.randrange(1, 4))]
    return tensors[0] if choose.random() < 0.1 else TensorDataset(*tensors)


ODD = [[0, 1, 2, 3], [4, 1, True, 2], [3, 2, -1, 2, 0], (0, 1, 2, 3, 4), torch.tensor([0, 1, 2, 3]), [0, 1, 2, 999], []]


def a_loader(choose: random.Random, dataset: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(1) if choose.random() < 0.3 else None
    size = choose.choice([1, 2, 3, 4, 5, 8, 64])
    settings: list[dict[str, Any]] = [
        {"shuffle": True, "generator": generator},
        {"shuffle": False, "generator": generator},
        {"sampler": WeightedRandomSampler(torch.ones(len(dataset)), 30, generator=generator)},
        {"sampler": SubsetRandomSampler(torch.arange(len(dataset)))},
        {"sampler": DistributedSampler(dataset, 2, 1)},
    ]
    kind = choose.random()
    if kind < 0.1:
        return DataLoader(dataset, batch_size=None)
    if kind < 0.2:
        return DataLoader(dataset, batch_sampler=choose.sample(ODD, choose.randrange(1, 5)))
    return DataLoader(dataset, batch_size=size, drop_last=choose.random() < 0.3, **choose.choice(settings))


def two_epochs(seed: int) -> list[Any]:
    """Of a loader from a seed: its batches or how it fails, and the random numbers after it."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    loader = a_loader(choose, a_dataset(choose))
    seen: list[Any] = []
    try:
        for _ in range(2):
            seen.extend(loader)
    except Exception as error:
        seen.append(f"{type(error).__name__}: {error}")
    generators = [torch.default_generator, *([loader.generator] if loader.generator else [])]
    return [*seen, [generator.get_state() for generator in generators]]


def test_any_loader_gives_what_it_gives_otherwise() -> None:
    faster = 0
    for seed in range(400):
        with taken() as usual:
            expected = two_epochs(seed)
        with taken() as whole, in_a_run():
            found = two_epochs(seed)
        assert_same(found, expected)
        faster += len(whole) < len(usual)
    assert faster > 80  # the others fail, are a tensor themselves, have few examples, or are odd


X, Y = torch.arange(40.0).view(20, 2), torch.arange(20)


class Doubles(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Lazy(TensorDataset):
    reads = 0

    @property
    def tensors(self) -> Any:
        Lazy.reads += 1
        return X + Lazy.reads, Y

    @tensors.setter
    def tensors(self, tensors: Any) -> None:
        pass


class Listed(TensorDataset):
    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


class ReadsByCode(Indexes):
    reads = 0

    def __getattr__(self, name: str) -> Any:
        ReadsByCode.reads += 1
        return X + ReadsByCode.reads if name == "x" else self.__getattribute__(name)

    def __init__(self) -> None:
        super().__init__(X, Y, Y)
        del self.x


class HasProperty(Indexes):
    @property
    def y(self) -> Any:
        return Y + 7

    @y.setter
    def y(self, value: Any) -> None:
        pass


class IndexesMore(Indexes):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)["x"] + torch.rand(2)


class Named(TensorDataset):
    """Reads as its base does."""

    name = "mine"


class Tagged(Tensor):
    pass


def kept_out(monkeypatch: pytest.MonkeyPatch, name: str) -> DataLoader:
    dataset: Any = TensorDataset(X, Y)
    settings: dict[str, Any] = {}
    if name == "own collate":
        settings = {"collate_fn": lambda items: default_collate(items[::-1])}
    elif name == "workers":
        settings = {"num_workers": 1}
    elif name == "method of the class":
        monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: (X[index] + 1, Y[index]))
    elif name == "attribute of the data set":
        dataset.__getitems__ = lambda indices: [(X[index] - 1, Y[index]) for index in indices]
    elif name == "collate of tensors":
        monkeypatch.setitem(default_collate_fn_map, Tensor, lambda batch, **_: torch.stack(batch) + 1)
    elif name == "collate of tuples":
        monkeypatch.setitem(default_collate_fn_map, tuple, lambda batch, **_: batch)
    elif name == "collate of arrays":
        dataset = Indexes(X.numpy(), Y, Y)
        monkeypatch.setitem(default_collate_fn_map, np.ndarray, lambda batch, **_: torch.tensor(np.array(batch)) + 1)
    elif name == "a class of tensors":
        dataset = TensorDataset(X.as_subclass(Tagged), Y)
    elif name == "method of an own class":
        dataset = Indexes(X, Y, Y)
        monkeypatch.setattr(Indexes, "__getitem__", lambda self, index: X[index] + 1)
    elif name == "attributes by code":
        dataset = ReadsByCode()
    elif name in ("own property", "random"):
        dataset = {"own property": HasProperty, "random": IndexesMore}[name](X, Y, Y)
    else:
        dataset = {"overridden": Doubles, "property": Lazy, "lists": Listed}[name](X, Y)
    return DataLoader(dataset, batch_size=5, **settings)


@pytest.mark.parametrize(
    "name",
    [
        "own collate",
        "workers",
        "method of the class",
        "attribute of the data set",
        "collate of tensors",
        "collate of tuples",
        "collate of arrays",
        "a class of tensors",
        "overridden",
        "property",
        "lists",
        "method of an own class",
        "attributes by code",
        "own property",
        "random",
    ],
)
def test_what_is_read_otherwise_stays_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = kept_out(monkeypatch, name)
    seen: list[Any] = []
    for context in (contextlib.nullcontext(), in_a_run()):
        Lazy.reads = ReadsByCode.reads = 0
        torch.manual_seed(0)
        with context:
            seen.append([list(loader), Lazy.reads, ReadsByCode.reads, torch.get_rng_state()])
    assert_same(*seen)


def test_a_subclass_that_changes_nothing_is_fetched_at_once() -> None:
    with taken() as found, in_a_run():
        list(DataLoader(Named(X, Y), batch_size=5))
    assert not found


def test_large_examples_are_fetched_one_by_one() -> None:
    with taken() as found, in_a_run():
        list(DataLoader(TensorDataset(torch.ones(8, 40_000)), batch_size=4))
    assert len(found) == 8


def test_data_that_changes_while_it_is_read() -> None:
    def batches() -> list[Any]:
        dataset = TensorDataset(X.clone(), Y.clone())
        seen = []
        for number, batch in enumerate(DataLoader(dataset, batch_size=4)):
            seen.append([(tensor.requires_grad, tensor.detach().clone()) for tensor in batch])
            batch[0].detach().fill_(-1)  # which is no part of the data
            if number == 1:
                dataset.tensors[0].mul_(3)
            if number == 2:
                dataset.tensors = (dataset.tensors[0] + 1, dataset.tensors[1], dataset.tensors[1] * 2)
            if number == 3:
                dataset.tensors[0].requires_grad_()
        return [*seen, dataset.tensors]

    usual = batches()
    with in_a_run():
        assert_same(batches(), usual)


@pytest.mark.parametrize("of", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(20))])
def test_what_is_indexed_may_be_replaced(of: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own = Indexes.__getitem__

    def batches() -> list[Any]:
        dataset = Indexes(X.clone(), Y.numpy().copy(), Y.tolist())
        seen = []
        for number, batch in enumerate(DataLoader(of(dataset), batch_size=4)):
            seen.append(copy.deepcopy(batch))
            batch["x"].fill_(-1)  # which is no part of the data
            batch["both"][1].fill_(-1)
            if number == 0:
                dataset.x, dataset.y[:] = dataset.x.numpy() * 2, 5
            if number == 1:
                dataset.more = {"first": [Y + 3]}
            if number == 3:
                dataset.more = {}
            if number == 2:
                monkeypatch.setattr(Indexes, "__getitem__", lambda self, index: own(self, (index + 1) % 4))
        monkeypatch.undo()
        return [*seen, dataset.x, dataset.y.tolist()]

    usual = batches()
    with in_a_run():
        assert_same(batches(), usual)


@pytest.mark.parametrize("indices", [[0, 1, 2, 20], [0, -1, 2, -20], [0, -21, 3, 4]])
@pytest.mark.parametrize("x", [X, X.numpy(), X.tolist()])
def test_indices_out_of_range(x: Any, indices: list[int]) -> None:
    def batch() -> Any:
        try:
            return list(DataLoader(Indexes(x, Y, Y), batch_sampler=[[0, 1, 2, 3], indices]))
        except IndexError as error:
            return str(error)

    usual = batch()
    with in_a_run():
        assert_same(batch(), usual)


def test_a_collate_function_that_is_replaced_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_a_run():
        batches = iter(DataLoader(TensorDataset(X), batch_size=4))
        next(batches)
        monkeypatch.setitem(default_collate_fn_map, Tensor, lambda batch, **_: torch.stack(batch) + 1)
        torch.testing.assert_close(next(batches)[0], X[4:8] + 1)


class Sees(Small):
    """Keeps all batches, and logs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.data = TensorDataset(torch.randn(50, 8), torch.randint(0, 3, (50,)))
        self.loaders: dict[str, Any] = {}

    def see(self, where: str, batch: Any, batch_idx: int) -> None:
        self.seen.append((where, batch_idx, copy.deepcopy(batch)))
        for tensor in batch if isinstance(batch, list) else []:
            tensor.zero_()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.see("transfer", batch, dataloader_idx)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.see("train", batch, batch_idx)
        return self(self.data.tensors[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.see("validate", batch, batch_idx)

    test_step = predict_step = validation_step

    def train_dataloader(self) -> Any:
        return self.loaders.setdefault("train", DataLoader(self.data, batch_size=8, shuffle=True))

    def val_dataloader(self) -> Any:
        first, second = random_split(self.data, [30, 20])
        return [DataLoader(Subset(first, range(0, 30, 2)), batch_size=4), DataLoader(second, batch_size=16)]

    def test_dataloader(self) -> Any:
        loaders = {"all": DataLoader(self.data, batch_size=20), "x": DataLoader(self.data.tensors[0], batch_size=10)}
        return CombinedLoader(loaders, "max_size_cycle")

    def predict_dataloader(self) -> Any:
        return self.test_dataloader().iterables


class Stops(Callback):
    """Saves in the middle of an epoch."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 9:
            trainer.save_checkpoint(self.path)


def everything(make_trainer: Callable[..., Any], strategy: str, path: Any) -> list[Any]:
    module = Sees()
    trainer = make_trainer(strategy=strategy, max_epochs=2, callbacks=Stops(path), val_check_interval=4)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)
    loader = module.loaders["train"]
    again = Sees()
    make_trainer(strategy=strategy, max_epochs=2).fit(again, ckpt_path=path)
    few = Sees()
    make_trainer(strategy=strategy, max_epochs=1, overfit_batches=2).fit(few)
    mixed = Sees()
    loaders = {"a": DataLoader(mixed.data, batch_size=7), "b": DataLoader(mixed.data, batch_size=20, drop_last=True)}
    for mode in ("min_size", "max_size"):
        make_trainer(strategy=strategy, max_epochs=1).fit(mixed, CombinedLoader(loaders, mode))
    is_as_before = (sorted(vars(loader)), loader.dataset is module.data, loader.collate_fn is default_collate)
    return [module.seen, again.seen, few.seen, mixed.seen, is_as_before]


def test_whatever_the_trainer_runs(make_trainer: Callable[..., Any], tmp_path: Any) -> None:
    with taken() as usual:
        expected = everything(make_trainer, "auto", tmp_path / "stock.ckpt")
    with taken() as whole:
        found = everything(make_trainer, "ort", tmp_path / "ort.ckpt")
    assert_same(found, expected)
    assert len(usual) > 500
    assert len(whole) < 30  # those of last batches of three and less
    with taken() as after:
        list(DataLoader(TensorDataset(X, Y), batch_size=5))
    assert len(after) == len(X)  # and when no run lasts


def test_a_fit_within_a_fit(make_trainer: Callable[..., Any]) -> None:
    class Inner(Callback):
        def on_train_epoch_start(self, trainer: Any, module: LightningModule) -> None:
            if trainer.current_epoch == 1:
                with pytest.raises(RuntimeError, match="stop"):
                    make_trainer(strategy="ort", max_steps=2, callbacks=Fails()).fit(Small())

    class Fails(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise RuntimeError("stop")

    with taken() as found:
        make_trainer(strategy="ort", max_epochs=3, callbacks=Inner(), limit_val_batches=0).fit(Small())
    assert not found
    with taken() as after:
        list(DataLoader(TensorDataset(X, Y), batch_size=5))
    assert len(after) == len(X)
