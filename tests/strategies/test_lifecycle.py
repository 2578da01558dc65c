"""Any order of runs, any end of them: the Trainer sees the same hooks, and the module is left as it was."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from ort_settings import config_of
from small_modules import Small, loader
from torch import Tensor, nn

from lightning_ort import ORTStrategy
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.strategies.capture.capture import STEPS

HOOKS = [name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
MODULE_HOOKS = [name for name in dir(Small) if name.startswith("on_") and name != "on_gpu"]
MODULE_HOOKS += ["setup", "teardown", "configure_model", "configure_gradient_clipping", "backward", "optimizer_step"]


def always(**config: Any) -> ORTStrategy:
    return ORTStrategy(config=config_of(**{"placement": "always", **config}))


def assert_plain(module: nn.Module, like: nn.Module) -> None:
    """Nothing of a capture is left on the module or its children."""
    assert vars(module).keys() - {"_hparams"} == vars(like).keys() - {"_hparams"}  # Lightning makes it when asked
    for child, other in zip(list(module.modules())[1:], list(like.modules())[1:], strict=True):
        assert vars(child).keys() == vars(other).keys()
        assert child._compiled_call_impl is None
    for name in (*STEPS, "log", "forward"):
        assert getattr(module, name).__func__ is getattr(type(module), name)
    assert module.state_dict().keys() == like.state_dict().keys()


class Witness(Callback):
    """Notes every hook, with the metrics that it could see."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


def _note(hook: str) -> Callable[..., None]:
    def note(self: Witness, trainer: Any, *args: Any, **kwargs: Any) -> None:
        metrics = sorted(trainer.callback_metrics) if "end" in hook else None
        self.seen.append((hook, trainer.state.stage, trainer.global_step, metrics))

    return note


for _hook in HOOKS:
    setattr(Witness, _hook, _note(_hook))


class HookedModule(Small):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []


def _pass_on(hook: str) -> Callable[..., Any]:
    def method(self: HookedModule, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(hook)
        return getattr(super(HookedModule, self), hook)(*args, **kwargs)

    return method


for _hook in MODULE_HOOKS:
    setattr(HookedModule, _hook, _pass_on(_hook))


def test_hooks_in_the_same_order(make_trainer: Callable[..., Any]) -> None:
    seen = []
    for strategy in ("auto", always()):
        witness, module = Witness(), HookedModule()
        trainer = make_trainer(strategy=strategy, max_epochs=2, callbacks=[witness], gradient_clip_val=0.5)
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        trainer.test(module, verbose=False)
        trainer.predict(module)
        seen.append((witness.seen, module.seen))
    assert trainer.strategy.report.ort_runs > 0
    assert seen[1] == seen[0]


ORDERS = (["validate", "fit", "test", "predict"], ["fit", "fit", "validate"], ["predict", "test", "fit", "predict"])


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_any_order_of_runs(order: list[str], make_trainer: Callable[..., Any]) -> None:
    results = []
    for strategy in ("auto", always()):
        module = Small()
        trainer = make_trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
        values: list[float] = []
        for run in order:
            if run == "fit" and trainer.fit_loop.epoch_progress.current.completed:
                trainer.fit_loop.max_epochs += 1
            output = getattr(trainer, run)(module, **({"verbose": False} if run in ("validate", "test") else {}))
            if run == "predict":
                values += torch.cat(output).flatten().tolist()
            else:
                values += [float(value) for value in trainer.callback_metrics.values()]
            assert_plain(module, Small())
        results.append(values + module.losses)
    assert results[1] == pytest.approx(results[0], rel=1e-3, abs=1e-5)
    assert trainer.strategy.report.ort_runs > 0


class CountsRuns(Callback):
    """Counts the runs of sessions in the sanity check."""

    runs = -1

    def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
        self.runs = trainer.strategy.report.ort_runs


def test_a_sanity_check_compiles_where_all_is_compiled_at_once(make_trainer: Callable[..., Any]) -> None:
    counts = CountsRuns()
    make_trainer(strategy=always(), max_epochs=1, num_sanity_val_steps=2, callbacks=[counts]).fit(Small())
    assert counts.runs > 0


def test_same_code_is_compiled_once_for_all_runs(make_trainer: Callable[..., Any]) -> None:
    module, trainer = Small(), make_trainer(strategy=always(), max_epochs=1, limit_val_batches=0)
    trainer.fit(module)
    graphs = len(trainer.strategy.report.graphs)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    assert len(trainer.strategy.report.graphs) == graphs


def test_another_module_in_the_same_trainer(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(strategy=always())
    first, second = Small(), Small()
    with torch.no_grad():
        second.net[0].weight.mul_(2)
    for module in (first, second, first):
        expected = torch.cat([module(x) for x, _ in loader(16)])
        torch.testing.assert_close(torch.cat(trainer.predict(module)), expected, rtol=1e-4, atol=1e-5)


def test_modules_made_in_configure_model(make_trainer: Callable[..., Any]) -> None:
    class Late(Small):
        def __init__(self) -> None:
            super().__init__()
            self.net = None

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(3)
                self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    losses = []
    for strategy in ("auto", always()):
        module = Late()
        trainer = make_trainer(strategy=strategy, max_epochs=1)
        trainer.fit(module)
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert trainer.strategy.report.ort_runs > 0


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("capture", ["step", "modules"])
def test_module_is_restored_after_an_error(error: Any, capture: str, make_trainer: Callable[..., Any]) -> None:
    class Fails(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if self.trainer.global_step == 2:
                raise error
            return loss

    module = Fails()
    trainer = make_trainer(strategy=always(capture=capture), max_epochs=1)
    # Lightning ends the process on an interrupt
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else type(error)) as caught:
        trainer.fit(module)
    if isinstance(error, ValueError):
        assert caught.value is error
    assert_plain(module, Fails())
    assert not torch._dynamo.config.suppress_errors
    assert len(module.losses) == 2


def test_mock_on_the_instance_stays(make_trainer: Callable[..., Any]) -> None:
    module = Small()
    module.validation_step = mock.Mock(wraps=module.validation_step)
    log = module.log
    module.log = mock.Mock(side_effect=log)
    spies = module.validation_step, module.log
    make_trainer(strategy=always(), max_epochs=1).fit(module)
    assert (module.validation_step, module.log) == spies
    assert spies[0].call_count > 0
    assert spies[1].call_count > 0


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("strategy", [always, ORTStrategy], ids=["captured", "unchanged"])
def test_mocks_in_lightnings_classes_are_called(
    strategy: Callable[[], ORTStrategy], automatic: bool, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    class Module(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.automatic_optimization:
                return super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()
            return None

    module, expected = Module(), Module()
    module.automatic_optimization = expected.automatic_optimization = automatic
    make_trainer(max_epochs=1).fit(expected)
    trainer = make_trainer(strategy=strategy(), max_epochs=1)
    with (
        mock.patch.object(Strategy, "backward", wraps=trainer.strategy.backward) as backward,
        mock.patch.object(TorchCheckpointIO, "save_checkpoint") as save,
    ):
        trainer.fit(module)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    save.assert_called_once_with(mock.ANY, tmp_path / "last.ckpt", storage_options=None)
    assert backward.call_count == trainer.global_step > 0
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-5)
    assert (trainer.strategy.report.ort_runs > 0) == (strategy is always)


@pytest.mark.parametrize("first", [0, 9], ids=["before the run", "in it"])
@pytest.mark.parametrize("strategy", [always, ORTStrategy], ids=["captured", "unchanged"])
def test_methods_that_come_in_the_place_of_lightnings_are_called(
    strategy: Callable[[], ORTStrategy], first: int, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def replace(name: str) -> None:
        stock = getattr(Strategy, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return stock(self, *args, **kwargs)

        monkeypatch.setattr(Strategy, name, method)

    names = ("training_step", "backward", "optimizer_step")

    class Replaces(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == first > 0:
                for name in names:
                    replace(name)

    if not first:
        for name in names:
            replace(name)
    trainer = make_trainer(strategy=strategy(), callbacks=[Replaces()], max_epochs=4)
    trainer.fit(Small())
    assert trainer.global_step > first
    assert {name: called.count(name) for name in names} == dict.fromkeys(names, trainer.global_step - first)
    assert (trainer.strategy.report.ort_runs > 0) == (strategy is always)


def test_a_mocked_clock_is_for_others(make_trainer: Callable[..., Any]) -> None:
    """A test of somebody's callback says what each of the calls that Lightning makes reads."""
    with mock.patch("time.perf_counter", side_effect=AssertionError):
        make_trainer(strategy=ORTStrategy(), max_epochs=1).fit(Small())


def test_other_runs_after_a_fit_of_one_step(make_trainer: Callable[..., Any]) -> None:
    module, strategy = Small(), always(start="now")
    trainer = make_trainer(strategy=strategy, max_steps=1)
    trainer.fit(module)
    for run in (trainer.test, trainer.validate, trainer.predict):
        run(module)
    assert len(module.losses) == 1
    assert strategy.report.ort_runs > 0


class ReadsIterator(Small):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Any:
        loss = self.loss(next(dataloader_iter)[0])
        with pytest.raises(MisconfigurationException, match="batch_size"):
            self.log("loss", loss)
        return loss


def test_only_children_of_a_step_that_is_given_an_iterator_are_captured(make_trainer: Callable[..., Any]) -> None:
    losses = []
    for strategy in ("auto", always(start="now")):
        module, trainer = ReadsIterator(), make_trainer(strategy=strategy, max_epochs=2)
        trainer.fit(module)
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0])
    assert len(losses[1]) == 8
    assert strategy.report.ort_runs > 0
    kinds = [note.reason.type for note in strategy.report.notes if note.where == "training_step"]
    assert kinds == [ReasonType.GIVEN_ITERATOR]


def test_step_replaced_between_runs(make_trainer: Callable[..., Any]) -> None:
    module, trainer = Small(), make_trainer(strategy=always())
    before = torch.cat(trainer.predict(module))
    module.predict_step = lambda batch, batch_idx: module(batch[0]) * 2
    torch.testing.assert_close(torch.cat(trainer.predict(module)), before * 2)
    del module.predict_step
    torch.testing.assert_close(torch.cat(trainer.predict(module)), before)


class Recurrent(Small):
    """Has a layer that runs outside of graphs, whose method is replaced after an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.layer(x)[0])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            run = self.layer.forward
            self.layer.forward = lambda x: (run(x)[0] * 3, None)


def test_a_method_that_is_replaced_while_it_trains_is_used(make_trainer: Callable[..., Any]) -> None:
    stock, ours = Recurrent(), Recurrent()
    make_trainer(max_epochs=2).fit(stock)
    trainer = make_trainer(strategy=always(), max_epochs=2)
    trainer.fit(ours)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-4)
    assert trainer.strategy.report.ort_runs > 0


def test_teardown_is_forgiving(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(strategy=always(report="log"))
    trainer.strategy.teardown()  # Lightning tears down what failed before its setup
    module = Small()
    trainer.validate(module, verbose=False)
    trainer.strategy.teardown()
    trainer.strategy.teardown()
    assert_plain(module, Small())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_of_the_strategy_work(clone: Callable[[Any], Any], make_trainer: Callable[..., Any]) -> None:
    strategy = always()
    module, trainer = Small(), make_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(module)
    strategy._lightning_module = strategy.model = None  # a module is not the strategy's to copy
    other = clone(strategy)
    assert other.ort_config == strategy.ort_config
    assert other.report.to_dict() == strategy.report.to_dict()
    module, trainer = Small(), make_trainer(strategy=other, accelerator="auto", max_epochs=1)
    trainer.fit(module)
    assert trainer.strategy.report.ort_runs > 0


def test_module_can_be_copied_during_a_run(make_trainer: Callable[..., Any]) -> None:
    copies = []

    class Copies(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            copies.append(copy.deepcopy(pl_module.net))
            pickle.dumps(pl_module.net)

    make_trainer(strategy=always(capture="modules"), max_epochs=1, callbacks=[Copies()]).fit(Small())
    assert all(child._compiled_call_impl is None for child in copies)
