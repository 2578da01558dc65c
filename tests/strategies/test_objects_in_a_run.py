"""What a run puts on objects of the user's comes off again, and what the user has put on them stays, in any order."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback
from small_modules import Small
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _DatasetKind

from lightning_ort import ORTMixedPrecision, ORTStrategy
from lightning_ort._shims import Shims


def test_only_what_was_put_on_comes_off() -> None:
    owner, shims = SimpleNamespace(kept=1, replaced=2), Shims()
    for name in ("kept", "replaced", "new", "taken"):
        shims.put(owner, name, object())
    owner.replaced = "the user's"
    del owner.taken
    shims.remove()
    assert vars(owner) == {"kept": 1, "replaced": "the user's"}
    shims.remove()
    assert vars(owner) == {"kept": 1, "replaced": "the user's"}


def test_what_a_patch_of_the_users_puts_back_comes_off_as_well() -> None:
    owner, shims = SimpleNamespace(method=1), Shims()
    shims.put(owner, "method", 2)
    with patch.object(owner, "method", 3):
        shims.remove()
        assert owner.method == 3
    shims.remove()
    assert owner.method == 1


class Counts(Callback):
    """Wraps methods of an object so that calls are counted, before the run or in one of its steps."""

    def __init__(self, find: Callable[[Any], Any], names: tuple[str, ...], at: int) -> None:
        self._find, self._names, self._at = find, names, at
        self.calls = dict.fromkeys(names, 0)
        self.put: dict[str, Any] = {}

    def _wrap(self, trainer: Any) -> None:
        owner = self._find(trainer)
        for name in self._names:
            self.put[name] = self._counted(name, getattr(owner, name))
            setattr(owner, name, self.put[name])

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return method(*args, **kwargs)

        return counted

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._at < 0:
            self._wrap(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._at:
            self._wrap(trainer)

    def stay(self, trainer: Any) -> bool:
        return all(vars(self._find(trainer)).get(name) is put for name, put in self.put.items())


PLACES = {
    "strategy": (lambda trainer: trainer.strategy, ("training_step", "backward", "optimizer_step")),
    "module": (lambda trainer: trainer.lightning_module, ("training_step", "log")),
    "scheduler": (lambda trainer: trainer.lr_scheduler_configs[0].scheduler, ("step", "state_dict")),
}


class WithScheduler(Small):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1000), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


@pytest.mark.parametrize("at", [-1, 3, 12])  # 12: while the time of steps is measured
@pytest.mark.parametrize("place", PLACES)
def test_methods_that_the_user_replaces_are_called_and_stay(place: str, at: int, make_trainer: Any) -> None:
    find, names = PLACES[place]
    if place == "scheduler" and at < 0:
        pytest.skip("there is none before")
    found, losses = [], []
    for strategy in ("auto", ORTStrategy()):
        plugin = ORTMixedPrecision("16-mixed", "cpu") if place == "scheduler" else None
        counts, module = Counts(find, names, at), WithScheduler()
        trainer = make_trainer(
            strategy=strategy, max_epochs=15, limit_val_batches=0, callbacks=counts, plugins=plugin and [plugin]
        )
        trainer.fit(module)
        assert counts.stay(trainer)
        found.append(counts.calls)
        losses.append(module.losses)
    assert found[0] == found[1]
    assert all(count for name, count in found[0].items() if name != "state_dict")
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("ends_first", ["the run", "the patch"])
def test_what_makes_batches_is_torchs_again(ends_first: str, make_trainer: Any, monkeypatch: Any) -> None:
    original, made = vars(_DatasetKind)["create_fetcher"], []

    class Patches(Callback):
        def on_train_epoch_start(self, *args: Any) -> None:
            if not made:
                self.before = vars(_DatasetKind)["create_fetcher"]
                _DatasetKind.create_fetcher = staticmethod(self.create)  # type: ignore[method-assign]

        def create(self, *args: Any) -> Any:
            made.append(self.before.__func__(*args))
            return made[-1]

        def on_train_end(self, *args: Any) -> None:
            if ends_first == "the patch":
                self.restore()

        def restore(self) -> None:
            _DatasetKind.create_fetcher = self.before  # type: ignore[method-assign]

    monkeypatch.setattr(_DatasetKind, "create_fetcher", original)  # back after the test, whatever happens
    patches = Patches()
    make_trainer(strategy=ORTStrategy(), max_epochs=2, reload_dataloaders_every_n_epochs=1, callbacks=patches).fit(
        Small()
    )
    assert made
    if ends_first == "the run":
        assert vars(_DatasetKind)["create_fetcher"].__func__ == patches.create
        patches.restore()
    else:
        assert vars(_DatasetKind)["create_fetcher"] is original
    assert "fetch" not in vars(next_fetcher())


def next_fetcher() -> Any:
    return iter(Small().train_dataloader())._dataset_fetcher  # type: ignore[attr-defined]


def test_torchs_fetch_may_be_replaced_in_a_run(make_trainer: Any) -> None:
    """In the middle of a fit, as what measures a loader does."""
    fetched = []
    for strategy in ("auto", ORTStrategy()):
        calls: list[int] = []

        class Replaces(Callback):
            def on_train_batch_start(self, trainer: Any, *args: Any, calls: list[int] = calls) -> None:
                if trainer.global_step == 1:
                    before = _MapDatasetFetcher.fetch

                    def fetch(self: Any, indices: Any) -> Any:
                        calls.append(len(indices))
                        return before(self, indices)

                    self.patch = patch.object(_MapDatasetFetcher, "fetch", fetch)
                    self.patch.start()

            def on_train_end(self, *args: Any) -> None:
                self.patch.stop()

        make_trainer(strategy=strategy, max_epochs=2, limit_val_batches=0, callbacks=Replaces()).fit(Small())
        fetched.append(calls)
    assert fetched[0] == fetched[1] != []
