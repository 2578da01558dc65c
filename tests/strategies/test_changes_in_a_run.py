"""What changes while a run lasts: hooks, methods, weights and copies, each as under the stock strategy."""

import copy
import functools
import io
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import Precision
from ort_settings import config_of
from small_modules import Small
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torchmetrics import MeanSquaredError

from lightning_ort import ORTStrategy

Fit = Callable[..., tuple[Any, Any]]


class From(Callback):
    """Does something at the start of the second of three epochs."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self.made: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.made.append(self._change(pl_module))


@pytest.fixture
def fit(make_trainer: Callable[..., Any]) -> Fit:
    """Train a module under the stock strategy and on ONNX Runtime; return both modules, and compare them."""

    def run(make: Callable[[], Any], change: Callable[[Any], Any] | None = None, **config: Any) -> tuple[Any, Any]:
        modules = []
        for strategy in ("auto", ORTStrategy(config=config_of(**{"placement": "always", "cache_dir": None, **config}))):
            module, callback = make(), From(change or (lambda _: None))
            make_trainer(strategy=strategy, max_epochs=3, callbacks=[callback]).fit(module)
            for made in callback.made:
                if hasattr(made, "remove"):
                    made.remove()
            modules.append(module)
        assert strategy.report.ort_runs > 0
        assert not strategy.report.fallbacks
        stock, ours = modules
        assert ours.losses == pytest.approx(stock.losses, rel=1e-4)
        for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        return stock, ours

    return run


def twice(module: Any, inputs: Any, output: Any) -> Any:
    return output * 2 if isinstance(module, nn.Tanh) else None


class WithOthers(Small):
    """Has modules that are not its children: one to take another's place, with a hook, and one that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [copy.deepcopy(self.net), nn.Tanh()]
        self.others[0][1].register_forward_hook(twice)

    def forward(self, x: Tensor) -> Tensor:
        return self.others[1](super().forward(x))


HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda module: module.net[1].register_forward_hook(twice),
    "forward of the whole": lambda module: module.register_forward_hook(lambda m, i, o: o * 2),
    "pre": lambda module: module.net[2].register_forward_pre_hook(lambda m, i: (i[0] * 2,)),
    "backward": lambda module: module.net[2].register_full_backward_hook(lambda m, i, o: (i[0] * 3,)),
    "with another module": lambda module: setattr(module, "net", module.others[0]),
    "of a module elsewhere": lambda module: module.others[1].register_forward_hook(twice),
    "all modules": lambda module: register_module_forward_hook(twice),
}


@pytest.mark.parametrize("capture", ["step", "modules"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooks_that_come_later_run(hook: Callable[[Any], Any], capture: str, fit: Fit) -> None:
    fit(WithOthers, hook, capture=capture)


def test_a_hook_between_two_predictions_runs(make_trainer: Callable[..., Any]) -> None:
    strategy, module, seen = ORTStrategy(config={"placement": "always"}), Small(), []
    trainer = make_trainer(strategy=strategy)
    trainer.predict(module)
    module.net[1].register_forward_hook(lambda m, i, o: seen.append(o.shape))
    trainer.predict(module)
    assert len(seen) == len(module.predict_dataloader())
    assert strategy.report.ort_runs > 0


def test_hooks_that_come_in_each_step_are_not_compiled_for_ever(make_trainer: Callable[..., Any]) -> None:
    class HookedSteps(Callback):
        calls = 0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.handle = pl_module.net[1].register_forward_hook(self.count)

        def on_train_batch_end(self, *args: Any) -> None:
            self.handle.remove()

        def count(self, *args: Any) -> None:
            self.calls += 1

    strategy, callback = ORTStrategy(config={"placement": "always"}), HookedSteps()
    make_trainer(strategy=strategy, max_epochs=3, limit_val_batches=0, callbacks=[callback]).fit(Small())
    assert callback.calls == 12
    assert strategy.report.ort_runs > 0


class Two(Small):
    """Two layers of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


def tie(module: Any) -> None:
    module.net[2].weight = module.net[0].weight


@pytest.mark.parametrize("step_graph", ["joint", "split"])
def test_weights_tied_later_get_both_gradients(step_graph: str, fit: Fit) -> None:
    _, ours = fit(Two, tie, step_graph=step_graph)
    assert ours.net[2].weight is ours.net[0].weight


class Recurrent(Small):
    """A recurrent layer, and a copy of it that is renewed in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.target = [copy.deepcopy(self.rnn)]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.target[0](x[:, None])[0][:, 0]
        return self.net(self.rnn(x[:, None])[0][:, 0] + target)


class RenewsItsCopy(Recurrent):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.target[0] = copy.deepcopy(self.rnn)
        return super().training_step(batch, batch_idx)


def test_a_copy_of_a_recurrent_layer_is_its_own(fit: Fit) -> None:
    _, ours = fit(RenewsItsCopy)
    assert "forward" not in vars(ours.rnn)
    copied = ours.target[0]
    with torch.no_grad():
        copied.weight_hh_l0.zero_()
        x = torch.ones(1, 2, 8)
        assert not torch.equal(copied(x)[0], ours.rnn(x)[0])


@pytest.mark.parametrize("capture", ["auto", "modules"])
def test_recurrent_layers_stay_outside_of_graphs(capture: str, fit: Fit) -> None:
    fit(Recurrent, capture=capture)


def three_times(module: Any) -> None:
    forward = module.rnn.forward

    def changed(*args: Any) -> Any:
        output, state = forward(*args)
        return output * 3, state

    module.rnn.forward = changed


def test_a_layer_whose_forward_is_replaced_later(fit: Fit) -> None:
    _, ours = fit(Recurrent, three_times)
    assert ours.rnn.forward.__name__ == "changed"


class Copies(Small):
    """Keeps its weights, a metric's copy and a file, in the middle of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.metric = nn.GRU(8, 8), MeanSquaredError()
        self.kept: list[Any] = []
        self.values: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            file = io.BytesIO()
            torch.save(self.rnn, file)
            self.kept += [copy.deepcopy(self.net.state_dict()), copy.copy(self.net.state_dict())]
            self.kept.append(torch.load(io.BytesIO(file.getvalue()), weights_only=False).state_dict())
            one = self.metric.clone()
            one.reset()
        self.metric.update(batch[0], batch[0] + batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.values.append(self.metric.compute().item())


def test_copies_made_in_a_step_are_whole(fit: Fit) -> None:
    stock, ours = fit(Copies)
    assert ours.values == pytest.approx(stock.values)
    assert len(ours.kept) == len(stock.kept)
    for mine, theirs in zip(ours.kept, stock.kept, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-4, atol=1e-5)


def wrap_log(module: Any) -> None:
    log, module.names = module.log, []

    def wrapped(name: str, *args: Any, **kwargs: Any) -> None:
        module.names.append(name)
        log(name, *args, **kwargs)

    module.log = wrapped


def test_log_wrapped_by_a_callback(fit: Fit) -> None:
    stock, ours = fit(Small, wrap_log)
    assert ours.names == stock.names
    assert ours.names.count("loss") == 8
    assert ours.log.__name__ == "wrapped"


class ReadsLogged(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("now", loss.detach())
        return loss / (1 + self.logged())

    def logged(self) -> Any:
        return self.trainer.callback_metrics["now"]


def test_logged_values_may_be_read_in_the_step(fit: Fit) -> None:
    fit(ReadsLogged)


class Part(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return ((x * self.factor).sum(1) - y).square().mean()


class OfParts(Small):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Part(1.0), Part(2.0)
        self.training_step = self.a.training_step


def second_part(module: Any) -> None:
    module.training_step = module.b.training_step


def test_a_step_of_another_object_later(fit: Fit) -> None:
    _, ours = fit(OfParts, second_part)
    assert ours.b.factor != 2


class NaNGradient(Small):
    """Has one in its last step; ``late``: from the third on, somebody looks for what makes it."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.register_buffer("gap", torch.ones(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.late and batch_idx == 2:
            torch.autograd.set_detect_anomaly(True)
        self.gap.fill_(float(batch_idx < 3))

    def loss(self, batch: Any) -> Tensor:
        x = self(batch[0])
        difference = x - x.detach() + self.gap
        return torch.sqrt(difference * difference).sum() + super().loss(batch)


@pytest.mark.parametrize(("late", "operation"), [(False, "(Mul|Sqrt)Backward0"), (True, r"\w+Backward")])
def test_detect_anomaly_names_the_operation(late: bool, operation: str, make_trainer: Callable[..., Any]) -> None:
    strategy, module = ORTStrategy(config={"placement": "always"}), NaNGradient(late)
    trainer = make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0, detect_anomaly=not late)
    with pytest.raises(RuntimeError, match=f"'{operation}' returned nan"):
        trainer.fit(module)
    assert len(module.losses) == 3
    assert strategy.report.graphs


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_torch_compile_switched_off(variable: str, make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    strategy, module = ORTStrategy(config={"start": "now"}), Small()
    make_trainer(strategy=strategy, max_epochs=1).fit(module)
    assert len(module.losses) == 4
    assert [str(note) for note in strategy.report.notes] == [f"module: steps are not captured: {variable}=1 is set"]


class MockedReset(Copies):
    """What a user's own tests do: dynamo follows a mock for ever that is made to stay outside of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.reset = self.metric.reset = Mock(side_effect=self.metric.reset)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.metric.reset()
        return super().training_step(batch, batch_idx)


def test_a_mock_in_the_place_of_a_metrics_method(fit: Fit) -> None:
    stock, ours = fit(MockedReset)
    assert ours.reset.call_count == stock.reset.call_count


PATCHES = {
    "hooks": ([(LightningModule, "on_train_batch_start"), (LightningModule, "transfer_batch_to_device")], False),
    "before backward": ([(LightningModule, "on_before_backward")], False),
    "log": ([(LightningModule, "log")], True),
    "backward": ([(Tensor, "backward")], True),
    "precision": ([(Precision, "clip_gradients"), (Precision, "convert_input")], False),
}


@pytest.mark.parametrize(("methods", "late"), PATCHES.values(), ids=PATCHES)
@pytest.mark.parametrize("config", [{"engine": "torch"}, {"placement": "always"}], ids=["unchanged", "captured"])
def test_methods_of_classes_that_are_replaced(
    methods: list[Any], late: bool, config: Any, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what counts calls, before a run or in it."""
    counts = []
    for strategy in ("auto", ORTStrategy(config={**config, "cache_dir": None})):
        calls: list[str] = []

        def counted(method: Any, calls: list[str] = calls) -> Any:
            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(method.__name__)
                return method(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:

            def replace(_: Any = None, patch: Any = patch, counted: Any = counted) -> None:
                for owner, name in methods:
                    patch.setattr(owner, name, counted(getattr(owner, name)))

            if not late:
                replace()
            callbacks = [From(replace)] if late else []
            make_trainer(strategy=strategy, max_epochs=3, callbacks=callbacks).fit(Small())
        counts.append(calls)
    assert counts[0] == counts[1] != []
    assert (strategy.report.ort_runs > 0) == ("placement" in config)
