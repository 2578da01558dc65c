"""Which engines a step is tried on, in which order, by the clock of a script."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from small_modules import Small
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from lightning_ort import ORTConfig, ORTStrategy
from lightning_ort.compiler.cache import Startup
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.report import ReasonType
from lightning_ort.strategies.capture import autotuner
from lightning_ort.strategies.capture import module as capture_module
from lightning_ort.strategies.capture.autotuner import StepAutotuner
from lightning_ort.strategies.capture.budget import expected_cost, inductor_cost
from lightning_ort.strategies.capture.engines import Candidates, engines_for, setting_for, stages_for
from lightning_ort.strategies.capture.gate import History
from lightning_ort.strategies.capture.module import CapturedModule
from lightning_ort.strategies.environment import read_environment

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({}, CPU, "ort"),
        ({}, CUDA, "auto"),
        ({"placement": "always"}, CUDA, "ort"),
        ({"engine": "ort"}, CUDA, "ort"),
        ({"engine": "auto"}, CPU, "auto"),
    ],
)
def test_a_gpu_tries_inductor_by_default(settings: Any, device: torch.device, expected: str) -> None:
    assert setting_for(ORTConfig(**settings), device) == expected


def test_on_a_cpu_onnxruntime_comes_first() -> None:
    for step in ("training_step", "predict_step"):
        assert engines_for(ORTConfig(), CPU, step, True).engines == ["ort", "torch"]
        assert engines_for(ORTConfig(engine="auto"), CPU, step, True).engines == ["ort", "torch", "inductor"]


def test_on_a_gpu_it_comes_last() -> None:
    training = engines_for(ORTConfig(), CUDA, "training_step", True)
    assert training.engines == ["torch", "inductor", "inductor-graphs"]
    assert training.last == "ort"
    prediction = engines_for(ORTConfig(), CUDA, "predict_step", True)
    assert prediction.engines == ["torch", "inductor", "inductor-graphs", "ort"]
    assert prediction.last is None


def test_no_recording_of_sizes_that_vary_or_gradients_that_stay() -> None:
    assert engines_for(ORTConfig(dynamic=True), CUDA, "training_step", True).engines == ["torch", "inductor"]
    assert engines_for(ORTConfig(), CUDA, "training_step", False).engines == ["torch", "inductor"]


def test_a_start_on_a_gpu_is_priced_with_inductor() -> None:
    module = SimpleNamespace(
        leaf_modules=20,
        startup_seconds={},
        count_inductors=lambda step: 2,
        backend=SimpleNamespace(compiled_in_process=lambda: True),
    )
    (stage,) = stages_for(ORTConfig(), CUDA)
    cost = History("training_step", stage, "name", None).cost(module)  # type: ignore[arg-type]
    assert cost == expected_cost(20) + 2 * inductor_cost(20, 0.0) > 30
    known = History("training_step", stage, "name", Startup(40.0, 8.0, {}, True))
    assert known.cost(module) == 8.0  # type: ignore[arg-type]
    assert History("training_step", "ort", "name", None).cost(module) == expected_cost(20)  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "processes", "joins"), [(CPU, 2, True), (CUDA, 1, True), (CUDA, 2, False)])
def test_gradients_that_gpus_exchange_come_from_a_backward_pass(
    device: torch.device, processes: int, joins: bool
) -> None:
    strategy = SimpleNamespace(root_device=device)
    module = SimpleNamespace(trainer=SimpleNamespace(world_size=processes), automatic_optimization=True)
    may_join: Any = CapturedModule.may_join
    assert may_join.fget(SimpleNamespace(_strategy=strategy, module=module)) is joins


def trial(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], fails: tuple[str, ...] = ()) -> Any:
    """Each engine as it was tried, in order, and the medians."""
    now, order = 0.0, []
    monkeypatch.setattr(autotuner.time, "perf_counter", lambda: now)
    found = engines_for(ORTConfig(), CUDA, "training_step", True)
    tuner = StepAutotuner(found.engines, lambda: None, found.last, found.worth_trying)
    while True:
        engine = tuner.next_engine()
        if tuner.done:
            return list(dict.fromkeys(order)), tuner.milliseconds
        order.append(engine)
        if engine in fails:
            tuner.drop(engine)
            continue
        with tuner.timed():
            now += seconds[engine]


def test_onnxruntime_is_tried_where_its_projected_time_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    # inductor saves more than capture is expected to: nothing is compiled for ONNX Runtime
    order, ms = trial(monkeypatch, {"torch": 0.100, "inductor": 0.080, "inductor-graphs": 0.070, "ort": 0.001})
    assert order == ["torch", "inductor", "inductor-graphs"]
    assert min(ms, key=ms.__getitem__) == "inductor-graphs"
    # it saves less
    order, ms = trial(monkeypatch, {"torch": 0.100, "inductor": 0.097, "inductor-graphs": 0.120, "ort": 0.050})
    assert order == ["torch", "inductor", "inductor-graphs", "ort"]
    assert min(ms, key=ms.__getitem__) == "ort"
    # it fails
    order, ms = trial(monkeypatch, {"torch": 0.1, "ort": 0.2}, fails=("inductor", "inductor-graphs"))
    assert order == ["torch", "inductor", "inductor-graphs", "ort"]
    assert ms == {"torch": pytest.approx(100), "ort": pytest.approx(200)}


def test_what_inductor_is_told() -> None:
    exact, fast = (inductor.backend_for("inductor", masks).compile.config for masks in ("exact", "fast"))
    assert exact == {"fallback_random": True}
    assert fast == {"fallback_random": False}
    recorded = inductor.backend_for("inductor-graphs", "exact").compile.options
    # these are options of the installed torch, and those of its mode
    mode = torch._inductor.list_mode_options("reduce-overhead")
    assert recorded == {"fallback_random": True, **mode}
    assert set(recorded) <= set(torch._inductor.list_options())


# recordings, by a stand-in: what inductor's stand-in computes is at the same addresses in each run


class Recorder:
    """Stands in for inductor: each graph's results are in the same memory in each run, and gradients in another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._memory: dict[Any, Tensor] = {}
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: self.events.append("begin"))
        monkeypatch.setattr(inductor, "inductor_backend", lambda options: self.compile)

    def compile(self, gm: Any, inputs: Any) -> Callable[..., Any]:
        return aot_autograd(fw_compiler=self._record, bw_compiler=self._record)(gm, inputs)

    def _record(self, gm: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> list[Any]:
            self.events.append("run")
            return [self._placed((gm, index), result) for index, result in enumerate(gm(*args))]

        return make_boxed_func(run)

    def _placed(self, key: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._memory.setdefault(key, torch.empty_like(value)).copy_(value).detach()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def test_results_of_a_recording_outlive_the_next_run(recorder: Recorder) -> None:
    kept: list[Tensor] = []

    def step(x: Tensor) -> Any:
        kept.append(x * 2)
        return {"y": x + 1, "view": x[0], "name": "x"}

    compiled = torch.compile(step, backend=inductor.backend_for("inductor-graphs", "exact"), fullgraph=True)
    inputs = [torch.full((2, 2), number) for number in (1.0, 2.0)]
    first, second = map(compiled, inputs)
    assert recorder.events == ["run", "run"]
    assert [tensor[0, 0] for tensor in (first["y"], second["y"], *kept)] == [2, 3, 2, 4]
    assert first["name"] == "x"
    assert first["view"].data_ptr() == inputs[0].data_ptr()  # as in eager


class Keeping(Small):
    """Keeps results of its steps, looks at gradients when they are about to be zeroed, and zeroes them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.detach() * 2
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.kept.append(self.last)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen += [p.grad.clone() for p in self.parameters() if p.grad is not None]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class InParts(Keeping):
    """Two modules, captured one by one; the second reads what the first has made."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


@pytest.mark.parametrize(("kind", "capture", "runs"), [(Keeping, "step", 2), (InParts, "modules", 4)])
def test_fits_of_recordings(
    kind: type[Keeping],
    capture: Any,
    runs: int,
    recorder: Recorder,
    make_trainer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, module = kind(), kind()
    make_trainer(max_epochs=2, limit_val_batches=0).fit(stock)
    monkeypatch.setattr(capture_module, "engines_for", lambda *args: Candidates(["inductor-graphs", "torch"]))
    # it wins
    times = property(lambda self: {engine: 1.0 + (engine == "torch") for engine in self._samples})
    monkeypatch.setattr(StepAutotuner, "milliseconds", times)
    strategy = ORTStrategy(config={"engine": "auto", "capture": capture}, optim="keep")
    make_trainer(strategy=strategy, max_epochs=12, limit_val_batches=0).fit(module)
    assert strategy.report.steps[0].engine == "inductor-graphs", strategy.report.to_text()
    assert not strategy.report.fallbacks
    assert recorder.events[-runs - 1 :] == ["begin"] + ["run"] * runs  # one step, whatever it consists of
    count = len(stock.losses)
    assert module.losses[:count] == pytest.approx(stock.losses, rel=1e-5)
    torch.testing.assert_close(module.kept[:count], stock.kept, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(module.seen[: len(stock.seen)], stock.seen, rtol=1e-5, atol=1e-6)
    late = module.kept[-8:]
    assert len({float(value) for value in late}) == len(late)  # no two of them are one


@pytest.mark.parametrize("settings", [{"engine": "ort"}, {"placement": "always"}])
def test_fast_masks_need_inductor(settings: Any) -> None:
    with pytest.raises(ValueError, match="dropout_masks='fast'.* engine='auto'"):
        ORTConfig(dropout_masks="fast", **settings)
    assert ORTConfig(dropout_masks="fast", engine="auto").dropout_masks == "fast"


def test_fast_masks_from_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ORT_CONFIG", "dropout_masks: fast")
    assert read_environment().complete(None).dropout_masks == "fast"
    monkeypatch.setenv("LIGHTNING_ORT_CONFIG", "dropout_masks: quick")
    with pytest.raises(ValueError, match="dropout_masks"):
        read_environment()


def test_the_report_says_where_fast_masks_have_no_effect(make_trainer: Callable[..., Any]) -> None:
    strategy = ORTStrategy(config={"dropout_masks": "fast", "placement": "measured"})
    make_trainer(strategy=strategy, max_steps=2).fit(Small())
    assert any(
        note.where == "dropout_masks" and note.reason.type is ReasonType.NO_EFFECT for note in strategy.report.notes
    )


def test_the_report_has_the_advice(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ort.strategies.mixin.advice_for", lambda *args: [f"advice of {len(args)} facts"])
    strategy = ORTStrategy(config={"placement": "always"})
    make_trainer(strategy=strategy, max_steps=2).fit(Small())
    (note,) = (note for note in strategy.report.notes if note.where == "advice")
    assert (note.reason.type, note.reason.text) == (ReasonType.ADVICE, "advice of 4 facts")
    assert strategy.report.ort_runs > 0
    assert "advice of 4 facts" in strategy.report.to_text(width=200)
