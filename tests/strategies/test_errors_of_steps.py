"""An error that depends on values has the type and text of eager's, and comes where the step would catch it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_modules import Small, asserts, asserts_in_silence
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ort import ORTStrategy


class Checks(Small):
    """Trains on six batches, of which the fourth is not as it should be."""

    check: Callable[[Any, Tensor, Tensor], Any]

    def __init__(self) -> None:
        super().__init__()
        self.after, self.kept = 0, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["x"], batch["y"]
        found = type(self).check(self, torch.sigmoid(self(x)[:, :1]), y)
        self.after += 1
        loss = self(x).square().mean()
        return loss + found if isinstance(found, Tensor) else loss

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        sizes = (4, 4, 4, 4, 4, 2)
        return DataLoader(
            [
                {"x": torch.randn(n, 8, generator=generator), "y": torch.full((n, 1), 2.0 if i == 3 else 1.0)}
                for i, n in enumerate(sizes)
            ],
            batch_size=None,
        )


def checks(m: Any, p: Tensor, y: Tensor) -> None:
    torch._check(bool((y <= 1).all()), lambda: "a label is too large")


def checks_value(m: Any, p: Tensor, y: Tensor) -> None:
    torch._check_value(y.max().item() <= 1, lambda: "a label is too large")


def logs_again(m: Any, p: Tensor) -> None:
    m.log("q", p.mean(), prog_bar=True)
    m.log("q", p.mean())


RAISE: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "assert": asserts,
    "assert without a text": asserts_in_silence,
    "torch._check": checks,
    "torch._check_value": checks_value,
    "binary_cross_entropy": lambda m, p, y: F.binary_cross_entropy(p, y),
    "a probability": lambda m, p, y: F.binary_cross_entropy(p * y * y, torch.ones_like(y)),
    "a class": lambda m, p, y: F.cross_entropy(p.expand(-1, 2), y.long()[:, 0]),
    "log of a text": lambda m, p, y: m.log("text", "text" if m.after == 3 else 1.0),
    "log of several values": lambda m, p, y: m.log("values", p[: 4 if m.after == 3 else 1]),
    "log with other arguments": lambda m, p, y: m.log("p", p.mean(), on_epoch=m.after == 3),
    "log with other arguments than before": lambda m, p, y: logs_again(m, p) if m.after == 3 else m.log("p", p.mean()),
    "log of an unknown reduction": lambda m, p, y: m.log("p", p.mean(), reduce_fx="mean" if m.after < 3 else "median"),
    "log of a reserved name": lambda m, p, y: m.log_dict({"p" if m.after < 3 else "p/dataloader_idx_0": p.mean()}),
}


@pytest.mark.parametrize("name", RAISE)
def test_errors_are_eager_s(name: str, make_trainer: Callable[..., Any]) -> None:
    found = []
    for strategy in ("auto", ORTStrategy(config={"placement": "always", "cache_dir": None})):
        module = type("Checks", (Checks,), {"check": RAISE[name]})()
        with pytest.raises(Exception) as error:  # noqa: PT011
            make_trainer(strategy=strategy, limit_val_batches=0).fit(module)
        found.append((error.type, str(error.value), module.after, module.losses))
    assert found[1][:3] == found[0][:3]
    assert found[1][3] == pytest.approx(found[0][3], rel=1e-4)


def logs_text(m: Any, p: Tensor, y: Tensor) -> None:
    for name, value in {"p": p.mean(), "text": "text"}.items():
        try:
            m.log(name, value)
        except ValueError as error:
            m.kept.append(str(error))


class Changes(Checks):
    """Changes its batch, which Lightning reads for the weights of means."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = batch.pop("y")
        loss = (self(batch["x"]) - y).square().mean()
        self.log("loss", loss, on_epoch=True)
        self.log("rows", float(len(y)), on_epoch=True)
        batch["x"] = batch["x"].reshape(-1)[:3]
        return loss


@pytest.mark.parametrize("kind", [Changes, type("Caught", (Checks,), {"check": logs_text})])
def test_logged_when_eager_logs_it(kind: Any, make_trainer: Callable[..., Any]) -> None:
    found = []
    for strategy in ("auto", ORTStrategy(config={"placement": "always", "cache_dir": None})):
        module = kind()
        trainer = make_trainer(strategy=strategy, limit_val_batches=0, max_epochs=1)
        trainer.fit(module)
        found.append((module.kept, {key: float(value) for key, value in trainer.callback_metrics.items()}))
    assert found[1][0] == found[0][0]
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4)
    assert strategy.report.graphs or strategy.report.notes  # type: ignore[union-attr]
