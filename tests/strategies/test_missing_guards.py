"""What dynamo looks at only when it compiles, and what changes later: the step compiles again."""

import abc
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from lightning_ort import ORTStrategy
from tests.strategies.small_modules import Small, loader

NAME = "module_of_a_test"


class Abstract(abc.ABC):  # noqa: B024
    """Something that other classes are registered with."""


class Changing(Small):
    """Does something else from the eighth batch on, for a reason that dynamo itself does not guard."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.plain, self.zero, self.losses = kind, object(), 0.0, list[float]()

    def train_dataloader(self) -> Any:
        return loader(8 * 16)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            if self.kind == "registered":
                Abstract.register(type(self.plain))
            elif self.kind == "module":
                sys.modules[NAME] = module_with(3.0)
            elif self.kind == "builtin":
                globals()["sum"] = lambda values: 3.0
            elif self.kind == "zero":
                self.zero = -0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        import module_of_a_test  # type: ignore[import-not-found]

        factor = 2.0 if isinstance(self.plain, Abstract) else 1.0
        return self.loss(batch) * (factor * module_of_a_test.number * sum([1.0]) + self.signed())

    def signed(self) -> float:
        return math.copysign(0.5, self.zero)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def module_with(number: float) -> types.ModuleType:
    module = types.ModuleType(NAME)
    module.number = number  # type: ignore[attr-defined]
    return module


@pytest.fixture
def undone() -> Iterator[None]:
    yield
    sys.modules.pop(NAME, None)
    globals().pop("sum", None)


@pytest.mark.parametrize("kind", ["registered", "module", "builtin", "zero", "nothing"])
def test_a_change_that_dynamo_does_not_guard(make_trainer: Callable[..., Any], undone: None, kind: str) -> None:
    losses = []
    for strategy in ("auto", ORTStrategy(config={"placement": "always", "audit": "off"})):
        sys.modules[NAME] = module_with(1.0)
        globals().pop("sum", None)
        module = Changing(kind)
        module.plain = type("Fresh", (), {})()  # a class that was registered stays so
        trainer = make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0)
        trainer.fit(module)
        losses.append(module.losses)
    report = trainer.strategy.report
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert report.ort_runs > 0
    assert len(report.graphs) == (1 if kind == "nothing" else 2)
