"""What is captured, and what happens where capture fails: a message, a line in the report, and the run goes on."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ort_settings import config_of
from small_modules import Appends, Small, loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from lightning_ort import ORTStrategy
from lightning_ort.compiler.backend import ORTFallbackError
from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.report import CompileReport, FallbackReport


def always(**config: Any) -> ORTStrategy:
    return ORTStrategy(config=config_of(**{"placement": "always", **config}))


def fit(module: Small, strategy: Any, make_trainer: Callable[..., Any], **kwargs: Any) -> CompileReport:
    trainer = make_trainer(strategy=strategy, **{"max_epochs": 1, "limit_val_batches": 0, **kwargs})
    trainer.fit(module)
    return getattr(trainer.strategy, "report", CompileReport())


def capture_entries(entries: list[FallbackReport]) -> list[FallbackReport]:
    kinds = (ReasonType.CAPTURE_FAILED, ReasonType.RECOMPILING, ReasonType.ALREADY_COMPILED, ReasonType.CAPTURE_OFF)
    return [entry for entry in entries if entry.reason.type in kinds]


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and text in r.getMessage()]


class Opaque:
    """Dynamo fails on it with an error of its own kind, and Python does not."""

    def __getattribute__(self, name: str) -> Any:
        if torch.compiler.is_compiling():
            raise RuntimeError("not for tracing")
        return object.__getattribute__(self, name)

    scale = 2.0


OPAQUE = Opaque()


class Untraceable(Small):
    """Its step makes dynamo fail; it counts how often each part of it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("start")
        loss = self.loss(batch)
        loss = loss * OPAQUE.scale
        self.note("end")
        return loss

    @torch.compiler.disable
    def note(self, text: str) -> None:
        self.ran.append(text)


class Skipped(Untraceable):
    """Dynamo cannot resume in a loop, and leaves the step in Python."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.zeros(())
        for part in ("start", "end"):
            loss = loss + self.loss(batch)
            self.note(part)
        return loss


def test_step_is_one_graph(make_trainer: Callable[..., Any]) -> None:
    report = fit(Small(), always(), make_trainer)
    assert [graph.name for graph in report.graphs] == ["training_step/step_0"]
    assert report.graph_breaks == report.recompiles == 0
    assert not capture_entries(report.notes + report.fallbacks)
    # the loss is in the graph
    assert any("mse_loss" in op or "pow" in op for region in report.graphs[0].regions for op in region.ops)
    trainer = make_trainer(strategy=always())
    trainer.validate(Small(), loader(), verbose=False)
    assert trainer.strategy.report.ort_runs > 0
    assert trainer.strategy.report.graph_breaks == 0


class Measured(Small):
    """Has a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.metric(batch[0], batch[0] + 1)
        return super().training_step(batch, batch_idx)


def test_modules_mode_leaves_the_step_alone(make_trainer: Callable[..., Any]) -> None:
    plain, module = Measured(), Measured()
    fit(plain, "auto", make_trainer)
    report = fit(module, always(capture="modules"), make_trainer)
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)
    assert report.ort_runs > 0
    assert report.graph_breaks == report.recompiles == 0  # metrics stay as they are, too
    assert not any("mse_loss" in op or "pow" in op for region in report.graphs[0].regions for op in region.ops)


def test_capture_off(make_trainer: Callable[..., Any]) -> None:
    report = fit(Small(), always(engine="torch"), make_trainer)
    assert report.graphs == []
    assert [note.reason.type for note in report.notes] == [ReasonType.CAPTURE_OFF]
    assert "engine='torch'" in str(report).splitlines()[0]


@pytest.mark.parametrize("module_class", [Untraceable, Skipped])
@pytest.mark.parametrize("capture", ["auto", "step"])
def test_untraceable_step(
    module_class: type[Untraceable], capture: str, make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    plain, module = module_class(), module_class()
    fit(plain, "auto", make_trainer)
    report = fit(module, always(capture=capture), make_trainer)
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)
    assert module.ran == plain.ran  # nothing ran twice
    entries = capture_entries(report.fallbacks)
    assert [entry.where for entry in entries] == ["training_step"]
    assert entries[0].reason.type is ReasonType.CAPTURE_FAILED
    assert ("child modules" in entries[0].reason.text) == (capture == "auto")
    assert len(warnings_of(caplog, "training_step")) == 1
    if capture == "auto":
        assert report.ort_runs > 0


@pytest.mark.parametrize("module_class", [Untraceable, Skipped])
def test_untraceable_step_under_raise(module_class: type[Untraceable], make_trainer: Callable[..., Any]) -> None:
    module = module_class()
    with pytest.raises(ORTFallbackError, match="training_step cannot run on ONNX Runtime: capture failed"):
        fit(module, always(fallback="raise"), make_trainer)
    assert module.ran == 2 * ["start", "end"]  # the first step runs unchanged


def test_untraceable_child_in_modules_mode(make_trainer: Callable[..., Any]) -> None:
    class Child(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * OPAQUE.scale

    class WithChild(Small):
        def __init__(self) -> None:
            super().__init__()
            self.other = Child(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.other(x))

    plain, module = WithChild(), WithChild()
    fit(plain, "auto", make_trainer)
    report = fit(module, always(capture="modules"), make_trainer)
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)
    assert [entry.reason.type for entry in capture_entries(report.fallbacks)] == [ReasonType.CAPTURE_FAILED]
    assert report.ort_runs > 0  # the other child


class UserError(Exception):
    pass


class Raises(Small):
    kind = "own"

    def on_train_start(self) -> None:
        def refuse(gradient: Tensor) -> None:
            if self.global_step > 1:  # once it is captured
                raise RuntimeError("mine too")

        if self.kind == "gradient":
            self.net[0].weight.register_hook(refuse)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("before", 1.0)
        loss = self.loss(batch)
        if self.kind == "own":
            raise UserError("mine", 3)
        if self.kind == "shape":
            return self.net(torch.ones(2, 5)).sum()
        if self.kind == "index":
            return self.net[0].weight[torch.tensor([99])].sum() + loss
        if self.kind == "log":
            self.log("text", "not a number")
        if self.kind == "attribute":
            return loss * self.missing
        return loss


@pytest.mark.parametrize("kind", ["own", "shape", "index", "log", "attribute", "gradient"])
@pytest.mark.parametrize("capture", ["auto", "modules"])
def test_user_errors_arrive_as_in_eager(kind: str, capture: str, make_trainer: Callable[..., Any]) -> None:
    caught = []
    for strategy in ("auto", always(capture=capture)):
        module = Raises()
        module.kind = kind
        with pytest.raises(Exception) as error:  # noqa: PT011
            fit(module, strategy, make_trainer)
        caught.append(error.value)
    stock, ours = caught
    assert type(ours) is type(stock)
    assert str(ours) == str(stock)
    assert ours.args == stock.args


def test_user_error_is_no_fallback(make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    strategy = always(fallback="raise")
    with pytest.raises(UserError, match="mine"):
        fit(Raises(), strategy, make_trainer)
    assert not capture_entries(strategy.report.fallbacks)
    assert not warnings_of(caplog, "training_step")


def test_recompiling_step_becomes_modules(make_trainer: Callable[..., Any]) -> None:
    report = fit(Appends(), always(), make_trainer, max_epochs=4)
    assert report.recompiles <= 4
    notes = capture_entries(report.notes)
    assert [(note.where, note.reason.type) for note in notes] == [("training_step", ReasonType.RECOMPILING)]
    assert "child modules" in notes[0].reason.text
    assert not capture_entries(report.fallbacks)


def test_recompiling_step_under_step(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_ort.compat.dynamo.RECOMPILE_LIMIT", 5)
    plain, module = Appends(), Appends()
    fit(plain, "auto", make_trainer, max_epochs=2)
    report = fit(module, always(capture="step"), make_trainer, max_epochs=2)
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)
    assert len(module.kept) == len(plain.kept)
    entries = capture_entries(report.fallbacks)
    assert [entry.reason.type for entry in entries] == [ReasonType.RECOMPILING]
    assert "5 times" in entries[0].reason.text
    assert len(warnings_of(caplog, "recompil")) == 1  # dynamo's own message is part of ours


@pytest.mark.parametrize("lengths", [[4, 5, 6, 7, 8, 9, 10, 11], [9, 3, 7, 5, 8, 4, 6, 10]])
def test_varying_length_compiles_twice(lengths: list[int], make_trainer: Callable[..., Any]) -> None:
    class Lengths(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

        def train_dataloader(self) -> Any:
            return DataLoader([torch.randn(n, 8) for n in lengths], batch_size=None)

    report = fit(Lengths(), always(), make_trainer)
    assert sum("training_step/step" in graph.name for graph in report.graphs) <= 2
    assert report.ort_runs >= len(lengths) - 1  # the first step runs unchanged
    assert not capture_entries(report.notes + report.fallbacks)


@pytest.mark.parametrize("how", ["module.compile", "torch.compile", "child.compile", "child", "decorated"])
def test_what_the_user_compiled_is_left_alone(how: str, make_trainer: Callable[..., Any]) -> None:
    graphs = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    class Two(Small):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.other(x))

    plain, module = Two(), Two()
    fit(plain, "auto", make_trainer)
    given: Any = module
    if how == "module.compile":
        module.compile(backend=backend)
    elif how == "torch.compile":
        given = torch.compile(module, backend=backend)
    elif how == "child.compile":
        module.net = torch.compile(module.net, backend=backend)
    elif how == "child":
        module.net._compiled_call_impl = torch.compile(lambda x: module.net._call_impl(x), backend=backend)
    else:
        module.training_step = torch.compile(module.training_step, backend=backend)
    before = module.net._compiled_call_impl
    report = fit(given, always(), make_trainer)
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)
    logged, expected = module.trainer.callback_metrics, plain.trainer.callback_metrics
    torch.testing.assert_close(logged, expected, rtol=1e-3, atol=0)
    assert [note.reason.type for note in report.notes] == [ReasonType.ALREADY_COMPILED]
    assert report.notes[0].where == {"child.compile": "net", "child": "net", "decorated": "training_step"}.get(
        how, "module"
    )
    assert graphs
    assert module.net._compiled_call_impl is before
    assert (report.ort_runs > 0) == how.startswith("child")  # the other child is ours


def test_without_onnxruntime(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = Reason(ReasonType.RUNTIME_UNAVAILABLE, "onnxruntime is not installed")
    monkeypatch.setattr(kernels, "unavailable", lambda loads=True: reason)
    plain, module = Small(), Small()
    fit(plain, "auto", make_trainer)
    report = fit(module, always(), make_trainer)
    assert module.losses == plain.losses  # eager, to the bit
    assert [entry.reason for entry in report.fallbacks] == [reason]
    assert len(warnings_of(caplog, "not installed")) == 1
    with pytest.raises(ORTFallbackError, match="not installed"):
        fit(Small(), always(fallback="raise"), make_trainer)


def test_reset_of_dynamo_during_a_run(make_trainer: Callable[..., Any]) -> None:
    class Resets(Small):
        def on_train_epoch_start(self) -> None:
            torch._dynamo.reset()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) / (1 + self.global_step)

    plain, module = Resets(), Resets()
    fit(plain, "auto", make_trainer, max_epochs=2)
    report = fit(module, always(), make_trainer, max_epochs=2)
    assert module.losses == pytest.approx(plain.losses, rel=1e-3)
    assert report.ort_runs > 0
    assert not capture_entries(report.notes + report.fallbacks)


def test_dynamo_is_left_as_it_was(make_trainer: Callable[..., Any]) -> None:
    config = torch._dynamo.config
    names = ("suppress_errors", "allow_unspec_int_on_nn_module", "ignore_logging_functions")
    before = [getattr(config, name) for name in names]
    seen = []

    class Looks(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append([getattr(config, name) for name in names])

    fit(Looks(), always(), make_trainer)
    log = logging.getLogger("torch._dynamo.convert_frame")
    assert all(settings == before for settings in seen)
    assert not log.filters
    assert not torch._dynamo.callback_handler.start_callbacks


def test_errors_of_code_that_is_not_ours_pass(make_trainer: Callable[..., Any]) -> None:
    class CompilesItself(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError):
                torch.compile(lambda x: x * OPAQUE.scale, backend="eager")(batch[0])

    report = fit(CompilesItself(), always(), make_trainer)
    assert not capture_entries(report.fallbacks)


def test_loaders_of_other_sizes_share_the_graphs(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(strategy=always())
    for batch_size in (8, 4, 2, 7):
        trainer.predict(Small() if batch_size == 8 else trainer.lightning_module, loader(24, batch_size))
    assert sum("inference" in graph.name for graph in trainer.strategy.report.graphs) <= 2


class Writes(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.write(*batch).square().mean()

    def write(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.net(x)
        out[y > 0] = out.sum()  # whose gradient has a size that depends on data
        return out


class WritesInStep(Writes):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        out[y > 0] = out[y > 0] + 1
        return out.square().mean()


@pytest.mark.parametrize("module_class", [Writes, WritesInStep])
@pytest.mark.usefixtures("torchs_loggers_reach_caplog")
def test_operation_that_no_graph_holds(
    module_class: type[Small], make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    stock, ours = module_class(), module_class()
    fit(stock, "auto", make_trainer)
    report = fit(ours, always(), make_trainer)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-3)
    assert report.ort_runs > 0
    assert report.graph_breaks > 0
    notes = [*report.notes, *report.fallbacks]
    # torch 2.15 names the places too
    (note,) = [note for note in notes if note.reason.type is not ReasonType.GRAPH_BREAK]
    assert note.where == "training_step"
    assert "no graph can hold `aten.nonzero.default`" in str(note.reason)
    assert not [record for record in caplog.records if record.name.startswith("torch._dynamo")]


class ByKeyword(ORTStrategy):
    """Calls the step as others may."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(args[0], batch_idx=args[1])


def test_a_settled_step_takes_keywords(make_trainer: Callable[..., Any]) -> None:
    class Weighted(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * (1 + batch_idx)

    modules, strategy = [Weighted(), Weighted()], ByKeyword(config={"placement": "always"})
    for module, chosen in zip(modules, ("auto", strategy), strict=True):
        make_trainer(strategy=chosen, max_epochs=4, limit_val_batches=0).fit(module)
    assert modules[1].losses == pytest.approx(modules[0].losses, rel=1e-5)
    assert strategy.report.ort_runs > 8
