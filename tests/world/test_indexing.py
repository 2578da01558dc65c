"""What a ``__getitem__`` returns is known where it only indexes, and nothing of it runs to find out."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import ones

from lightning_ort.world.indexing import Empty, Row, what_is_indexed

X = [1, 2]


class Data:
    """Holds something of each kind; its ``__getitem__`` is one of those below."""

    def __init__(self) -> None:
        self.x, self.y, self.both = ones(2), [3, 4], (ones(3), 1)
        self.held, self.data, self.pairs = SimpleNamespace(y=7), {"labels": (5, 6)}, [[7, 8], [9, 0]]
        self.train, self.columns, self.seen, self.odd = True, ["a"], {}, Odd()

    @property
    def made(self) -> Any:
        raise AssertionError("it runs")

    def transform(self, x: Any) -> Any:
        raise AssertionError("it runs")


class Odd:
    """Has its own truth."""

    def __init__(self) -> None:
        self.x = 1

    def __bool__(self) -> bool:
        raise AssertionError("it runs")


def found_for(function: Callable[..., Any], **changed: Any) -> Any:
    """What is found, with what is indexed in the place of each row."""
    data = type("Own", (Data,), {"__getitem__": function})()
    vars(data).update(changed)
    return data, plain(what_is_indexed(data))


def plain(value: Any) -> Any:
    if isinstance(value, Row):
        return value.of
    if isinstance(value, Empty):
        return "empty"
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value if value is None else type(value)(map(plain, value))


def one(self: Any, i: int) -> Any:
    return self.x[i]


def several(self: Any, index: int) -> Any:
    """Has a docstring."""
    x, y = self.x[index], self.y[index]
    sample = {"x": x}
    sample["y"] = [y, self.data["labels"][index]]
    first, second, third, fourth = x, y, x, y
    return sample, (first, second, third, fourth), self.pairs[0][index]


def branches(self: Any, i: int) -> Any:
    return {"x": self.x[i] if self.columns else torch.Tensor(), "y": torch.Tensor() if not self.train else self.y[i]}


def test_what_is_known() -> None:
    data, found = found_for(one)
    assert found is data.x
    data, found = found_for(several)
    x, y = data.x, data.y
    assert found == ({"x": x, "y": [y, data.data["labels"]]}, (x, y, x, y), data.pairs[0])


def test_what_depends_on_what_is_held() -> None:
    data, found = found_for(branches)
    assert found == {"x": data.x, "y": data.y}
    for columns in ([], None, "", 0, {}, ()):
        data, found = found_for(branches, columns=columns, train=False)
        assert found == {"x": "empty", "y": "empty"}
    assert found_for(branches, columns=ones(1))[1] is None
    assert found_for(branches, columns=Odd())[1] is None


def test_another_module_is_not_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "torch", SimpleNamespace(Tensor=lambda: 1))
    assert found_for(branches, columns=[])[1] is None
    monkeypatch.undo()
    monkeypatch.setattr(torch, "Tensor", lambda: 1)
    assert found_for(branches, columns=[])[1] is None


def calls(self: Any, i: int) -> Any:
    return self.x[i].float()


def calls_itself(self: Any, i: int) -> Any:
    return self.transform(self.x[i])


def a_global(self: Any, i: int) -> Any:
    return X[i]


def another_index(self: Any, i: int) -> Any:
    return self.x[i + 1]


def a_slice(self: Any, i: int) -> Any:
    return self.x[i : i + 4]


def of_a_row(self: Any, i: int) -> Any:
    return self.x[i][0]


def arithmetic(self: Any, i: int) -> Any:
    return self.x[i] * 2


def the_index(self: Any, i: int) -> Any:
    return self.x[i], i


def the_whole(self: Any, i: int) -> Any:
    return self.x[i], self.y


def a_constant(self: Any, i: int) -> Any:
    return self.x[i], 1


def a_loop(self: Any, i: int) -> Any:
    while self.train:
        x = self.x[i]
    return x


def a_truth(self: Any, i: int) -> Any:
    return self.x[i] if self.odd else self.y[i]


def a_property(self: Any, i: int) -> Any:
    return self.made[i]


def a_size(self: Any, i: int) -> Any:
    return self.x[i] if len(self.columns) else self.y[i]


def an_identity(self: Any, i: int) -> Any:
    return self.x[i] if self.columns is None else self.y[i]


def a_tensor(self: Any, i: int) -> Any:
    return torch.Tensor(self.x[i])


def a_number(self: Any, i: int) -> Any:
    return self.x[i], torch.rand(1)


def appends(self: Any, i: int) -> Any:
    self.y.append(1)
    return self.x[i]


def of_a_number(self: Any, i: int) -> Any:
    return self.held["y"][i]


def writes(self: Any, i: int) -> Any:
    self.last = i
    return self.x[i]


def writes_an_item(self: Any, i: int) -> Any:
    self.seen[i] = 1
    return self.x[i]


def nothing(self: Any, i: int) -> Any:
    self.x[i]


def imports(self: Any, i: int) -> Any:
    import random  # noqa: F401

    return self.x[i]


def more(self: Any, i: int, j: int = 0) -> Any:
    return self.x[i]


def yields(self: Any, i: int) -> Any:
    yield self.x[i]


def keys(self: Any, i: int) -> Any:
    return {i: self.x[i]}


def itself(self: Any, i: int) -> Any:
    sample = {"x": self.x[i]}
    sample["all"] = sample
    return sample


def unpacks(self: Any, i: int) -> Any:
    x, y = self.both
    return x[i], y[i]


@pytest.mark.parametrize(
    "function",
    [
        calls,
        calls_itself,
        a_global,
        another_index,
        a_slice,
        of_a_row,
        arithmetic,
        the_index,
        the_whole,
        a_constant,
        a_loop,
        a_truth,
        a_property,
        a_size,
        an_identity,
        a_tensor,
        a_number,
        appends,
        of_a_number,
        writes,
        writes_an_item,
        nothing,
        imports,
        more,
        yields,
        keys,
        itself,
        unpacks,
    ],
)
def test_what_is_not(function: Callable[..., Any]) -> None:
    data, found = found_for(function)
    assert found is None
    assert data.seen == {}
    assert data.y == [3, 4]
