"""What a step only hands on may change from step to step; what it reads of its batch does not, or it is open."""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gated_fits import CHANGED, Case, Step, batches, compared

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("recordings_win")]
RIGHT: dict[str, Callable[[], Case]] = {}  # replayed, and right
EXACT: dict[str, Callable[[], Case]] = {}  # right, whether it is replayed or not


class Hands(Step):
    """A step whose loss and number something is done with."""

    def __init__(self, **kept: Any) -> None:
        super().__init__(history=[], other=[], total=0.0, **kept)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.use(self.net(batch).square().mean(), batch)


def to(table: dict[str, Callable[[], Case]], **kept: Any) -> Callable[[Any], Any]:
    def add(use: Any) -> Any:
        change = kept.pop("change", lambda m: None)

        def make() -> Case:
            values = {name: one() if callable(one) else one for name, one in kept.items()}
            return Case(type("Made", (Hands,), {"use": use})(**values), change)

        table[use.__name__] = make
        return use

    return add


@to(RIGHT)
def a_number_and_the_step(self: Any, loss: Any, x: Any) -> Any:
    number = loss.detach().item()
    self.log("number", number, batch_size=x.size(0), on_epoch=True)
    self.history.append((self.global_step, [number, {"epoch": self.trainer.current_epoch}]))
    return loss


@to(RIGHT)
def a_number_at_once(self: Any, loss: Any, x: Any) -> Any:
    self.history.append(loss.item())
    self.log_dict({"sum": (x
                           .sum()
                           .item())})  # fmt: skip
    self.log("step", float(1), batch_size=4)
    return loss


@to(RIGHT)
def equal_constants_beside_it(self: Any, loss: Any, x: Any) -> Any:
    number = (x > 0).any().item()
    self.history.append((number, True, self.global_step, 0, 1, 2, 3))
    self.log("one", 1.0)
    return loss


@to(RIGHT)
def the_step_alone(self: Any, loss: Any, x: Any) -> Any:
    self.log("at", self.global_step)
    self.other.append([self.trainer.global_step])
    return loss


@to(RIGHT)
def a_number_now_and_then(self: Any, loss: Any, x: Any) -> Any:
    number = x.max().item()
    if loss > 1e9:
        self.log("large", number)
    self.history.append(number)
    return loss


@to(EXACT)
def the_step_in_a_branch(self: Any, loss: Any, x: Any) -> Any:
    self.history.append(self.global_step)
    return loss * (3 if self.global_step > CHANGED else 1)


@to(EXACT)
def the_step_by_its_name(self: Any, loss: Any, x: Any) -> Any:
    self.history.append((self.global_step, 1))
    return loss * (3 if getattr(self, "global" + "_step") > CHANGED else 1)


@to(EXACT)
def the_step_of_somebody_else(self: Any, loss: Any, x: Any) -> Any:
    self.history.append((self.global_step, helper(self)))
    return loss * (1 + helper(self))


def helper(module: Any) -> float:
    return float(module.global_step > CHANGED)


@to(EXACT)
def a_number_that_is_computed_with(self: Any, loss: Any, x: Any) -> Any:
    number = x.sum().item()
    self.history.append(number)
    return loss * number


@to(EXACT)
def a_number_in_a_text(self: Any, loss: Any, x: Any) -> Any:
    number = x.sum().item()
    self.history.append(f"{number}")
    return loss


@to(EXACT)
def a_number_that_changes(self: Any, loss: Any, x: Any) -> Any:
    number = x.sum().item()
    number += 1
    self.history.append(number)
    return loss


@to(EXACT)
def a_number_by_two_ways(self: Any, loss: Any, x: Any) -> Any:
    number = 0.0
    if loss > 0.02:
        number = x.sum().item()
    self.history.append(number)
    return loss


@to(EXACT)
def numbers_in_a_loop(self: Any, loss: Any, x: Any) -> Any:
    for row in x:
        number = row.sum().item()
        self.history.append(number)
    return loss


@to(EXACT)
def a_list_that_is_read(self: Any, loss: Any, x: Any) -> Any:
    self.history.append(x.sum().item())
    return loss * sum(self.history[-3:])


@to(EXACT)
def a_list_that_is_read_by_another_name(self: Any, loss: Any, x: Any) -> Any:
    self.history.append(x.sum().item())
    return loss * len(self.same.kept)


class Holds:
    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept


def aliased() -> Case:
    case = RIGHT_MADE["a_list_that_is_read_by_another_name"]()
    case.module.same = Holds(case.module.history)
    return case


RIGHT_MADE = dict(EXACT)
EXACT["a_list_that_is_read_by_another_name"] = aliased


@to(EXACT)
def a_list_of_the_step_itself(self: Any, loss: Any, x: Any) -> Any:
    before, self.history = self.history, []
    self.history.append(x.sum().item())
    loss = loss * sum(self.history)
    self.history = before
    return loss


@to(EXACT)
def a_list_that_is_put_there_by_its_name(self: Any, loss: Any, x: Any) -> Any:
    before = self.history
    setattr(self, "hist" + "ory", [])
    self.history.append(x.sum().item())
    loss = loss * sum(self.history)
    setattr(self, "hist" + "ory", before)
    return loss


@to(EXACT, counts=lambda: Counts())
def what_looks_like_a_list(self: Any, loss: Any, x: Any) -> Any:
    self.counts.append(x.sum().item())
    return loss * self.counts.total


class Counts:
    total, global_step = 0.0, 0

    def append(self, value: float) -> None:
        self.total = value


@to(EXACT, rows=lambda: Rows())
def a_list_of_another_class(self: Any, loss: Any, x: Any) -> Any:
    self.rows.append(x.sum().item())
    return loss * self.rows.last


class Rows(list):  # type: ignore[type-arg]
    last = 1.0

    def append(self, value: float) -> None:
        self.last = value
        super().append(value)


@to(RIGHT)
def several_numbers(self: Any, loss: Any, x: Any) -> Any:
    self.history.append((x.sum().item(), x.max().item()))
    self.log_dict({"least": x.min().item(), "greatest": x.max().item()}, batch_size=x.argmax().item())
    return loss


@to(EXACT)
def a_number_within_a_number(self: Any, loss: Any, x: Any) -> Any:
    self.history.append((x[:, x[0].argmax().item()].sum().item(), x.max().item()))
    return loss


@to(EXACT)
def a_number_that_nobody_gets_beside_one(self: Any, loss: Any, x: Any) -> Any:
    self.history.append(([x.sum().item(), 1][1], x.max().item()))
    return loss


@to(EXACT)
def an_index_beside_a_number(self: Any, loss: Any, x: Any) -> Any:
    self.history.append((list(range(9))[(x > 0).sum()], x.max().item()))
    return loss


@to(EXACT)
def ways_to_append(self: Any, loss: Any, x: Any) -> Any:
    self.history.append(x.max().item())
    any(map(self.history.append, (1.0, 2.0)))
    return loss


@to(EXACT, counts=lambda: Counts(), change=lambda m: setattr(m.counts, "global_step", 7))
def an_attribute_with_the_name_of_the_step(self: Any, loss: Any, x: Any) -> Any:
    self.history.append((self.counts.global_step, self.trainer.fit_loop.total_batch_idx))
    return loss


@to(EXACT)
def a_number_of_which_a_branch_is_beside_it(self: Any, loss: Any, x: Any) -> Any:
    self.history.append(x.sum().item() if x.max() > 1 else 0.5)
    return loss


@to(EXACT)
def an_item_of_an_array(self: Any, loss: Any, x: Any) -> Any:
    self.history.append(np.float64(2.5).item())
    return loss


@to(EXACT)
def one_more_log_in_a_log(self: Any, loss: Any, x: Any) -> Any:
    self.log("a", self.log("b", 2.0) or x.sum().item())
    return loss


@to(EXACT)
def a_log_that_is_replaced(self: Any, loss: Any, x: Any) -> Any:
    seen: list[float] = []
    own, self.log = self.log, lambda name, value: seen.append(value)
    self.log("a", x.sum().item())
    self.log = own
    return loss * sum(seen)


@to(EXACT, change=lambda m: setattr(m, "history", Rows()))
def a_list_that_somebody_replaces(self: Any, loss: Any, x: Any) -> Any:
    self.history.append(x.sum().item())
    return loss


@to(EXACT)
def a_generator_that_goes_on(self: Any, loss: Any, x: Any) -> Any:
    if not self.other:
        self.going = goes_on(self)
        self.other.append(1)
    self.x = x
    next(self.going)
    return loss


def goes_on(self: Any) -> Any:
    first = True
    while True:
        if not first:
            self.history.append(number)  # noqa: F821
        number = self.x.sum().item()  # noqa: F841
        first = False
        yield


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_only_handed_on_may_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compared(RIGHT[name], monkeypatch)
    assert outcome.replayed > 20, outcome.notes


@pytest.mark.parametrize("name", EXACT)
def test_what_is_read_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared(EXACT[name], monkeypatch)


SOURCE = """
def step(self, loss, x):
    number = x.sum().item()
    self.history.append({})
    return loss
"""


def test_source_that_is_another_by_now_says_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "steps.py"
    file.write_text(SOURCE.format("number + 1.0"))
    monkeypatch.syspath_prepend(str(tmp_path))
    step = importlib.import_module("steps").step
    file.write_text(SOURCE.format("number"))
    compared(lambda: Case(type("Made", (Hands,), {"use": step})()), monkeypatch)
    del sys.modules["steps"]


# Objects of packages in batches

OUTSIDE = """
class Index:
    def __init__(self, *names):
        self.names = list(names)
        self.looked_up = {}

    def place(self, name):
        if name not in self.looked_up:
            self.looked_up[name] = float(self.names.index(name))
        return self.looked_up[name]

    def rename(self):
        self.names.reverse()

    def __reduce__(self):
        return Index, tuple(self.names)
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A package that is installed, with a class that leaves out attributes where it is pickled."""
    folder = tmp_path_factory.mktemp("env") / "site-packages"
    folder.mkdir()
    (folder / "outside.py").write_text(OUTSIDE)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("outside")
    sys.path.remove(str(folder))
    del sys.modules["outside"]


class Reads(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch["x"]).square().mean()
        return loss * self.use(batch["held"])


def held(use: Any, make: Callable[[int], Any], change: Any = lambda m: None, **kept: Any) -> Case:
    """Batches that hold something of a package, which a step uses."""
    module = type("Made", (Reads,), {"use": use})(**kept)
    return Case(module, change, batches=[{"x": x, "held": make(i)} for i, x in enumerate(batches())])


def place(self: Any, index: Any) -> Any:
    return 1.0 + index.place("b")


def gain(self: Any, index: Any) -> Any:
    return getattr(index, "gain", 1.0)


def by_name(self: Any, index: Any) -> Any:
    return getattr(index, self.name, 1.0)


def box(self: Any, index: Any) -> Any:
    return index.box[0]


def identity(self: Any, index: Any) -> Any:
    return 2.0 if index is self.first else 1.0


def renames(self: Any, index: Any) -> Any:
    index.rename()
    return 1.0 + index.names.index("b")


def method(self: Any, index: Any) -> Any:
    return 1.0 + index.place("b")


def test_an_object_of_a_package_that_stays_the_same_is_recorded(outside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Case:
        index = outside.Index("a", "b")
        return held(place, lambda i: index)

    outcome = compared(make, monkeypatch)
    assert outcome.replayed > 20, outcome.notes


def _of_two(of: Any) -> Case:
    one, other = of.Index("a", "b"), of.Index("b", "a")
    return held(place, lambda i: other if i > CHANGED else one)


def _with(of: Any, use: Any, change: Callable[[Any], Any], name: str = "", **attributes: Any) -> Case:
    index = of.Index("a", "b")
    vars(index).update(attributes)
    return held(use, lambda i: index, lambda m: change(index), name=name)


def _identity(of: Any) -> Case:
    one, other = of.Index("a", "b"), of.Index("a", "b")
    return held(identity, lambda i: other if i > CHANGED else one, first=one)


def _of_user(of: Any) -> Case:
    index = type("Mine", (of.Index,), {"__module__": __name__})("a", "b")
    return held(gain, lambda i: index, lambda m: setattr(index, "gain", 3.0))


def _holds(of: Any, one: Any, use: Any, change: Callable[[Any], Any]) -> Case:
    index = of.Index("a", "b", one)
    return held(use, lambda i: index, lambda m: change(index.names[2]))


HELD: dict[str, Callable[[Any], Case]] = {
    "another each time": lambda of: held(place, lambda i: of.Index("a", "b")),
    "another now": _of_two,
    "it is changed": lambda of: _with(of, renames_by_name, lambda index: index.rename()),
    "an attribute comes": lambda of: _with(of, gain, lambda index: setattr(index, "gain", 3.0)),
    "an attribute changes": lambda of: _with(of, gain, lambda index: setattr(index, "gain", 3.0), gain=2.0),
    "by a name": lambda of: _with(of, by_name, lambda index: setattr(index, "gain", 3.0), "gain", gain=2.0),
    "by any name": lambda of: _with(of, lambda m, i: vars(i)["gain"], lambda i: setattr(i, "gain", 3.0), gain=2.0),
    "what an attribute holds": lambda of: _with(of, box, lambda index: index.box.__setitem__(0, 3.0), box=[2.0]),
    "a method of it": lambda of: _with(of, method, lambda index: setattr(index, "place", lambda name: 5.0)),
    "its identity": _identity,
    "the step writes to it": lambda of: _with(of, renames, lambda index: None),
    "the user's class": _of_user,
    "the user's object in it": lambda of: _holds(
        of, Holds([2.0]), lambda m, i: i.names[2].kept[0], lambda one: one.kept.__setitem__(0, 3.0)
    ),
    "a tensor in it": lambda of: _holds(of, torch.ones(2), lambda m, i: i.names[2].sum(), lambda one: one.fill_(3.0)),
    "an array in it": lambda of: _holds(
        of, np.ones(2), lambda m, i: torch.from_numpy(i.names[2]).sum(), lambda one: one.fill(3.0)
    ),
}


def renames_by_name(self: Any, index: Any) -> Any:
    return 1.0 + index.names.index("b")


@pytest.mark.parametrize("name", HELD)
def test_what_a_step_reads_of_an_object_of_a_package_is_exact(
    outside: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = compared(lambda: HELD[name](outside), monkeypatch)
    assert outcome.values["losses"].count(",") > 30, outcome.values["error"]
