"""Who looks at objects of the user runs none of their code: what they do when they are asked is not for us."""

import collections.abc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from small_modules import Small, batches
from torch import Tensor

from lightning_ort import ORTStrategy


def fail(*args: Any) -> Any:
    raise RuntimeError("not to be called")


class Closed:
    """Does not say what it is."""

    __class__ = property(fail)
    __bool__ = __eq__ = __hash__ = __iter__ = __len__ = __repr__ = fail


class Remote(collections.abc.Mapping[str, Any]):
    """Loads what is asked for."""

    __getitem__ = fail
    __iter__, __len__ = lambda self: iter("ab"), lambda self: 2


class Kind(type):
    """A class of classes that says nothing of them."""

    __eq__ = __hash__ = __instancecheck__ = __repr__ = __subclasscheck__ = fail


class Nameless(metaclass=Kind):
    """Its class is none to ask."""


class Shy:
    """Cannot be shown."""

    __repr__ = fail


class Loader:
    """Reads batches, and has no data set."""

    batch_size = dataset = num_workers = property(fail)

    def __iter__(self) -> Iterator[Any]:
        yield from batches(*[(4, 8)] * 6)


class Holds(Small):
    """Has such objects among its attributes, hyperparameters and data."""

    def __init__(self) -> None:
        super().__init__()
        self.objects, self.remote = [Closed(), Remote(), Nameless()], Remote()
        self.save_hyperparameters({"closed": Shy(), "remote": Remote()})

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self(batch).square().mean()
        return {"loss": loss, "more": Remote()}

    def train_dataloader(self) -> Any:
        return Loader()


@pytest.mark.parametrize("config", [{"placement": "always"}, {}], ids=str)
def test_they_are_left_alone(config: dict[str, Any], make_trainer: Callable[..., Any]) -> None:
    found = []
    for strategy in ("auto", ORTStrategy(config=config)):
        module = Holds()
        make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0).fit(module)
        found.append(module.losses)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert strategy.report.ort_runs or not config  # type: ignore[union-attr]
