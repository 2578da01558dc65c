"""Batches that are collated by columns are those of ``default_collate``, errors and warnings included."""

import random
import warnings
from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_whole_batches import assert_same, in_a_run
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_ort.strategies.columns import by_columns

Pair = namedtuple("Pair", ["first", "second"])
DTYPES = [
    "?",
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "f2",
    "f4",
    "f8",
    "c8",
    "c16",
    ">f4",
    ">i8",
    "u8",
    "g",
    "M8[s]",
    "U3",
    "O",
]


class Own:
    pass


class OwnInt(int):
    pass


class OwnArray(np.ndarray):
    pass


class OwnTensor(Tensor):
    pass


def an_array(choose: random.Random, shape: tuple[int, ...], dtype: str) -> Any:
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + choose.randrange(9)
    array: Any = np.asarray(numbers, dtype)
    form = choose.random()
    if form < 0.03:
        array.flags.writeable = False
    elif form < 0.06:
        array = np.asfortranarray(array)
    elif form < 0.09 and shape:
        array = np.concatenate([array, array])[::2]
    elif form < 0.10 and shape:
        array = array[::-1]
    elif form < 0.11:
        array = array.view(OwnArray)
    return array


def a_column(choose: random.Random) -> Callable[[], Any]:
    """What makes the values of one place of examples, which are nearly always alike."""
    shape = choose.choice([(), (1,), (0,), (3,), (2, 3), (1, 4, 4), (3, 1, 1), (3, 4, 5)])
    dtype = choose.choice(DTYPES[:12] if choose.random() < 0.9 else DTYPES)
    other = choose.choice([True, 2**70, 1.5, None, np.float32(2), torch.ones(()), "text", np.ones(2), Own(), OwnInt(3)])
    makes: list[Callable[[], Any]] = [
        lambda: choose.randrange(-5, 5),
        lambda: choose.choice([0.1, -0.0, float("inf"), 1e300]),
        lambda: choose.random() < 0.5,
        lambda: choose.choice(["a", "bc"]),
        lambda: choose.choice([b"a", b"bc"]),
        lambda: an_array(choose, shape, dtype),
        lambda: an_array(choose, shape, dtype),
        lambda: an_array(choose, (1,), dtype)[0],
        lambda: torch.from_numpy(an_array(choose, shape, "f4").copy()),
        lambda: torch.ones(shape, dtype=torch.complex64).conj(),
        lambda: torch.ones(shape, requires_grad=True),
        lambda: torch.ones(2, 3).as_subclass(OwnTensor),
        lambda: torch.ones(4, 4).to_sparse(),
        lambda: torch.ones(3, 4, 4).permute(1, 2, 0),
        lambda: np.ones((4, 4, 3)).transpose(2, 0, 1),
    ]
    make = choose.choice(makes)
    rare = choose.random() < 0.05
    return lambda: other if rare and choose.random() < 0.2 else make()


def an_example(choose: random.Random, depth: int = 0) -> Callable[[], Any]:
    kind = choose.random() if depth < 3 else 1.0
    if kind > 0.55:
        return a_column(choose)
    parts = [an_example(choose, depth + 1) for _ in range(choose.randrange(4))]
    odd = choose.random() < 0.03

    def size() -> int:
        return len(parts) - (odd and choose.random() < 0.3)

    if kind < 0.2:
        return lambda: {f"key{at}": make() for at, make in enumerate(parts[: size()])}
    if kind < 0.4:
        return lambda: tuple(make() for make in parts[: size()])
    if kind < 0.5:
        return lambda: [make() for make in parts[: size()]]
    first = an_example(choose, depth + 1)
    containers: list[Callable[[], Any]] = [
        lambda: Pair(first(), first()),
        lambda: OrderedDict(b=first(), a=first()),
        lambda: defaultdict(list, a=first()),
        lambda: UserDict(a=first()),
        lambda: UserList([first()]),
        lambda: range(3),
    ]
    return choose.choice(containers)


def result_of(collate: Callable[[Any], Any], items: Any) -> Any:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            made = collate(items)
        except Exception as error:
            made = f"{type(error).__name__}: {error}"
    return made, sorted({str(one.message) for one in seen})


def test_any_examples_are_collated_as_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    warn_always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    together = 0
    try:
        for seed in range(1500):
            choose = random.Random(seed)
            make = an_example(choose)
            items: Any = [make() for _ in range(choose.choice([1, 2, 4, 4, 8]))]
            items = tuple(items) if choose.random() < 0.02 else items
            expected = result_of(default_collate, items)
            state = torch.get_rng_state()
            assert_same(result_of(by_columns(), items), expected)
            assert torch.equal(torch.get_rng_state(), state)
            with monkeypatch.context() as patch:
                patch.setattr("lightning_ort.strategies.columns.default_collate", None)  # it would fail
                found = result_of(by_columns(), items)
                together += isinstance(expected[0], (list, dict, Tensor)) and found[0].__class__ is not str
    finally:
        torch.set_warn_always(warn_always)
    assert together > 200


def test_a_new_tensor_may_be_resized_and_is_aligned() -> None:
    for items in ([np.ones(3)] * 4, [1, 2, 3, 4], [np.float32(1)] * 5):
        made = by_columns()(items)
        assert made.data_ptr() % 64 == default_collate(items).data_ptr() % 64 == 0
        made.resize_(100)


def test_it_is_torchs_where_a_default_is_another() -> None:
    items = [(np.ones(3), 1, 1.5, np.float32(2))] * 4
    with torch.device("meta"):
        assert [one.device.type for one in by_columns()(items)] == ["meta"] * 4


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([{"x": np.full(3, one), "y": one} for one in range(10)])


@pytest.mark.parametrize("drop_last", [False, True])
def test_streams(drop_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Stream(), batch_size=4, drop_last=drop_last)
    expected, arrays, as_tensor = list(loader), [], torch.as_tensor
    monkeypatch.setattr(torch, "as_tensor", lambda data: arrays.append(data) or as_tensor(data))
    with in_a_run():
        assert_same(list(loader), expected)
    assert len(arrays) == (0 if drop_last else 2)  # those of the last batch, which are few


def plus_one(batch: Any, **_: Any) -> Any:
    return torch.tensor(batch) + 1


class Calls(list[Any]):
    """Counts how often it is asked for its length."""

    asked = 0

    def __len__(self) -> int:
        Calls.asked += 1
        return super().__len__()


def test_what_is_registered_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    collate, items = by_columns(), [(1, np.ones(2)), (2, np.ones(2))]
    collate(items)
    monkeypatch.setitem(default_collate_fn_map, int, plus_one)
    assert collate(items)[0].tolist() == [2, 3]
    monkeypatch.undo()
    assert collate(items)[0].tolist() == [1, 2]
    monkeypatch.setitem(default_collate_fn_map, Own, lambda batch, **_: len(batch))
    assert collate([{"own": Own(), "x": 1.0}] * 3)["own"] == 3


def test_code_of_the_users_runs_as_often_as_otherwise() -> None:
    items = [(np.ones(3), Calls([1, 2])) for _ in range(5)]
    Calls.asked = 0
    expected, usual = default_collate(items), Calls.asked
    Calls.asked = 0
    made, asked = by_columns()(items), Calls.asked
    assert asked == usual > 0
    assert_same(made, expected)
