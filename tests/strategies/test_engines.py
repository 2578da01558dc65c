"""Which engines a step is tried on, in which order, by the clock of a script."""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from functorch.compile import make_boxed_func
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from small_modules import Small
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from lightning_ort import ORTConfig, ORTStrategy
from lightning_ort.compat.inductor import inductor_repairs
from lightning_ort.compiler import engines
from lightning_ort.compiler.cache.cache import Startup
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.strategies.capture import step as captured_step
from lightning_ort.strategies.capture.module import CapturedModule
from lightning_ort.strategies.environment import read_environment
from lightning_ort.strategies.race import failures
from lightning_ort.strategies.race.race import Race
from lightning_ort.strategies.race.run_facts import is_amortized, setting_for
from lightning_ort.strategies.race.terms import UNCHANGED, Event, Expected, Now, Took, Verdict, Way
from lightning_ort.strategies.race.ways import Ways, challengers

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
@pytest.mark.usefixtures("captured_at_once")
def test_a_gpu_tries_inductor_by_default(settings: Any, device: torch.device, expected: str) -> None:
    assert setting_for(ORTConfig(**settings), device) == expected


ORT = Way("ort", "step", 1)


class Cache:
    """What earlier runs found."""

    def __init__(self) -> None:
        self.kept: dict[str, Startup] = {}

    def name(self, *parts: Any) -> str:
        return str(parts[0].partition("\n")[0])

    def read(self, name: str, kind: type) -> Startup | None:
        return self.kept.get(name)

    def write(self, name: str, found: Startup) -> None:
        self.kept[name] = found


def module_on(device: torch.device = CPU, operations: int = 100, records: bool = True, **settings: Any) -> Any:
    config = ORTConfig(**settings)
    module = nn.Linear(2, 2)
    module.hparams = {}  # type: ignore[assignment]
    return SimpleNamespace(
        config=config,
        device=device,
        module=module,
        setting=setting_for(config, device),
        settings=lambda engine: (),
        is_measured=config.placement == "measured",
        is_amortized=is_amortized(config),
        may_record=lambda step: records,
        may_replay_calls=device.type == "cpu",
        compiles_recordings=device.type == "cpu" and is_amortized(config) and setting_for(config, device) == "auto",
        stays_unchanged=lambda step: False,
        saves_memory=lambda step: step == "training_step" and config.activation_memory_budget is not None,
        operations={"training_step": operations},
        races={"training_step": Race([ORT], 0.05, lambda way: None)},  # type: ignore[arg-type,return-value]
        backend=SimpleNamespace(cache=Cache(), compiled_in_process=lambda: True, available=True),
    )


def tried_on(device: torch.device, step: str = "training_step", records: bool = True, **settings: Any) -> list[str]:
    return [way.engine for way in challengers(module_on(device, records=records, **settings), step, ORT)]


def test_on_a_cpu_recordings_come_first_and_onnxruntime_next() -> None:
    for step in ("training_step", "predict_step"):
        assert tried_on(CPU, step, start="now") == ["ort"]
        assert tried_on(CPU, step, engine="auto") == ["recorded", "ort", "inductor"]
        assert {way.part for way in challengers(module_on(CPU), step, ORT)} == {"recording"}
        assert challengers(module_on(CPU), step, Way("ort", "modules")) == []
        assert tried_on(CPU, step, engine="recorded") == ["recorded"]


def test_what_an_engine_is_expected_to_save_is_beside_a_recording() -> None:
    module = module_on(CPU)
    expected = {
        engine: Ways(module, "training_step", None).expect(Way(engine, "recording")) for engine in ("ort", "inductor")
    }
    assert 0 < expected["ort"].saves < expected["inductor"].saves
    module.races["training_step"] = SimpleNamespace(usual=0.01, gained=0.5, of_run=[], at_stake=math.inf)
    for engine, before in expected.items():
        assert Ways(module, "training_step", None).expect(Way(engine, "recording")).saves == before.saves + 0.5


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_where_memory_is_the_aim_one_way_trains(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "cpp_compiler", lambda: "/usr/bin/g++")
    assert tried_on(device, activation_memory_budget=0.5) == ["inductor"]
    assert tried_on(device, activation_memory_budget=0.5, engine="ort") == ["ort"]
    assert tried_on(device, "predict_step", activation_memory_budget=0.5) == tried_on(
        device, "predict_step", engine="auto"
    )


def test_on_a_gpu_inductor_compiles_once_and_onnxruntime_trains_if_asked_for() -> None:
    assert tried_on(CUDA) == ["inductor-graphs"]
    assert tried_on(CUDA, "predict_step") == ["inductor-graphs", "ort"]
    assert tried_on(CUDA, engine="ort") == tried_on(CUDA, placement="always") == ["ort"]


def test_no_recording_of_sizes_that_vary_or_gradients_that_stay() -> None:
    assert tried_on(CUDA, dynamic=True) == ["inductor"]
    assert tried_on(CUDA, records=False) == ["inductor"]


def test_nothing_runs_on_an_onnxruntime_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_on(CUDA, engine="auto")
    module.backend.available = False
    assert [way.engine for way in challengers(module, "predict_step", ORT)] == ["inductor-graphs"]
    monkeypatch.setattr(kernels, "providers_for", lambda device: None)  # a build for CPUs
    assert "GPU" in Ways(module_on(CUDA), "predict_step", None).expect(ORT).why
    assert Ways(module_on(CPU), "predict_step", None).expect(ORT).why == ""


def test_what_cannot_compile_for_a_gpu_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way("inductor-graphs")
    for has_it in (True, False):
        monkeypatch.setattr(inductor, "has_triton", lambda: has_it)  # noqa: B023
        expected = Ways(module_on(CUDA), "training_step", None).expect(way)
        assert (expected.saves > 0) is has_it
        assert ("Triton" in expected.why) is not has_it


def test_what_ways_are_expected_to_cost() -> None:
    known = Ways(module_on(), "training_step", None)
    assert not known.expect(ORT).earlier
    assert known.expect(ORT).cost == engines.COST + 100 * engines.COST_PER_OPERATION
    assert known.expect(Way("inductor")).cost == engines.INDUCTOR_COST + 100 * engines.INDUCTOR_COST_PER_OPERATION
    # a hundred graphs: what ONNX Runtime took says more
    module = module_on()
    module.races["training_step"].events.append(Event(ORT, "compiles", 3, seconds={ORT: 30.0}))
    assert Ways(module, "training_step", None).expect(Way("inductor")).cost == 30 * engines.INDUCTOR_TO_ORT
    assert Ways(module, "validation_step", None).expect(ORT).cost == 30 * engines.EVALUATION


def test_the_first_graphs_tell_what_the_others_will_take() -> None:
    known = Ways(module_on(operations=1000), "training_step", None)
    assert known.projected_cost(0.1, 10) == 0.1  # what is done once
    assert known.projected_cost(engines.COST + 0.2, 100) == pytest.approx(engines.COST + 2.0)
    assert known.projected_cost(3.0, 2000) == 3.0


@pytest.mark.parametrize(
    ("kept", "cost", "saves", "says"),
    [
        (Startup(10.0, None, {"ort": 1.0, "torch": 2.0}, True), 6.0, 0.5, ""),
        (Startup(10.0, 3.0, {"ort": 1.0, "torch": 2.0}, True), 3.0, 0.5, ""),
        (
            Startup(10.0, None, {"ort": 3.0, "torch": 2.0}, True),
            10 * engines.WARM,
            0.0,
            "the unchanged step was the fastest",
        ),
        (Startup(10.0, None, {}, False), 20.0, None, ""),  # it takes more than that
        (
            Startup(10.0, None, {}, False, "it prints", "other program"),
            engines.COST + 100 * engines.COST_PER_OPERATION,
            None,
            "",
        ),
    ],
)
def test_what_earlier_runs_found(kept: Startup, cost: float, saves: float | None, says: str) -> None:
    module = module_on(start="amortized")
    module.backend.cache.kept["ort"] = kept
    expected = Ways(module, "training_step", None).expect(ORT)
    assert expected.cost == pytest.approx(cost)
    assert saves is None or expected.saves == saves
    assert says in expected.why
    # whoever starts now wants to try again
    module.is_amortized = False
    assert Ways(module, "training_step", None).expect(ORT).why == ""


def test_a_run_tells_later_ones_what_it_found() -> None:
    module = module_on(start="amortized")
    inductor_way = Way("inductor")
    events = [
        Event(ORT, "starts", 3),
        Event(ORT, "compiles", 4, seconds={ORT: 2.0}),
        Event(ORT, "compiles", 5, seconds={ORT: 1.0}),
        Event(ORT, "wins", 20, Verdict(), seconds={ORT: 0.25, UNCHANGED: 0.5}),
        Event(inductor_way, "starts", 50),
        Event(inductor_way, "compiles", 51, seconds={inductor_way: 20.0}),
        Event(inductor_way, "fails", 52),
    ]
    Ways(module, "training_step", None).store(events)
    kept = module.backend.cache.kept
    assert dataclasses.replace(kept["ort"], program="") == Startup(3.0, None, {"ort": 250.0, "torch": 500.0}, True)
    assert dataclasses.replace(kept["inductor"], program="") == Startup(20.0, None, {}, False)
    # what the same program has measured may cost a half of that, unless the user says how much
    module.races["training_step"] = Race([], 0.05, lambda way: Expected(0.0))
    expected = Ways(module, "training_step", None).expect(ORT)
    assert expected.earlier
    assert expected.measured
    assert (expected.saves, expected.stake) == (0.5, engines.STAKE_IF_KNOWN)
    kept["ort"], own = dataclasses.replace(kept["ort"], program="another"), kept["ort"]
    assert not Ways(module, "training_step", None).expect(ORT).measured
    kept["ort"] = own
    module.config = dataclasses.replace(module.config, compile_budget=0.05)
    assert not Ways(module, "training_step", None).expect(ORT).measured
    Ways(module, "training_step", None).store([*events[:1], Event(ORT, "compiles", 4, seconds={ORT: 0.5}), events[3]])
    assert (kept["ort"].cold, kept["ort"].warm) == (3.0, 0.5)


@pytest.mark.parametrize(("device", "processes", "joins"), [(CPU, 2, True), (CUDA, 1, True), (CUDA, 2, False)])
def test_gradients_that_gpus_exchange_come_from_a_backward_pass(
    device: torch.device, processes: int, joins: bool
) -> None:
    module = SimpleNamespace(trainer=SimpleNamespace(world_size=processes), automatic_optimization=True)
    may_join: Any = CapturedModule.may_join
    assert may_join.fget(SimpleNamespace(device=device, module=module)) is joins


def test_on_a_gpu_a_training_step_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "has_triton", lambda: True)
    for inductor_seconds in (0.080, 0.120):
        module = module_on(CUDA, start="now")
        known = Ways(module, "training_step", None)
        race = Race(challengers(module, "training_step", ORT), float("inf"), known.expect)
        module.races["training_step"] = race
        ran = set()
        for _ in range(200):
            way = race.next(Now(1000))
            ran.add(way.engine)
            race.done(Took({"torch": 0.1, "ort": 0.05}.get(way.engine, inductor_seconds)))
        assert ran == {"torch", "inductor-graphs"}
        # such as by a scheduler that accumulates gradients from here on
        way = Way("inductor-graphs")
        race.fail(way, failures.of_torch_compile(way, "gradients are accumulated"))
        inductor_way = Way("inductor")
        assert (inductor_way in {race.next(Now(1000)) for _ in range(3)}) is (inductor_seconds < 0.1)


def test_what_inductor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def compile_fx(gm: Any, inputs: Any, inner_compile: Any, config_patches: Any) -> Any:
        told.append(config_patches)
        return gm.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    for settings in (("exact",), ("fast",), ("exact", True)):
        torch.compile(lambda x: x + 1, backend=inductor.backend_for(*settings))(torch.ones(2))
        torch._dynamo.reset()
    assert all(options.pop("joint_custom_pre_pass") is not None for options in told)
    exact, fast, recorded = told
    assert exact == {"fallback_random": True, **inductor_repairs(True)}
    assert fast == {"fallback_random": False, **inductor_repairs(False)}
    # these are options of the installed torch, and those of its mode
    mode = torch._inductor.list_mode_options("reduce-overhead")
    assert recorded == {**exact, **mode}
    assert set(recorded) <= set(torch._inductor.list_options())


# recordings, by a stand-in: what inductor's stand-in computes is at the same addresses in each run


class Recorder:
    """Stands in for inductor: each graph's results are in the same memory in each run, and gradients in another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._memory: dict[Any, Tensor] = {}
        monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: self.events.append("begin"))
        monkeypatch.setattr(inductor, "inductor_backend", lambda *told: self.compile)

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

    compiled = torch.compile(step, backend=inductor.backend_for("exact", records=True), fullgraph=True)
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


class Plain(Small):
    """Looks at no gradient but those of the last step, while it is validated, which is recorded too."""

    on_train_batch_end = LightningModule.on_train_batch_end

    def on_validation_model_zero_grad(self) -> None:
        """Keep them."""

    def on_validation_end(self) -> None:
        self.last = [p.grad.clone() for p in self.parameters() if p.grad is not None]


class Curious(Plain):
    """Keeps the gradients of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def on_after_backward(self) -> None:
        self.kept += [p.grad for p in self.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", [Plain, Curious])
def test_gradients_of_recordings_are_copied_where_somebody_sees_them(
    kind: type[Plain],
    recorder: Recorder,
    make_trainer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    paces: Callable[..., None],
) -> None:
    copied, owned = list[int](), inductor.copies_of
    monkeypatch.setattr(inductor, "copies_of", lambda tensors: copied.append(len(tensors)) or owned(tensors))
    recorded = lambda module, name, first: [Way("inductor-graphs", first.part)]  # noqa: E731
    monkeypatch.setattr(captured_step, "challengers", recorded)
    paces(**{"torch": 2.0, "inductor-graphs": 1.0})
    stock, module = kind(), kind()
    settings: Any = {"max_epochs": 12, "check_val_every_n_epoch": 12, "num_sanity_val_steps": 0}
    make_trainer(**settings).fit(stock)
    strategy = ORTStrategy(config={"engine": "auto", "start": "now"}, optim="keep")
    make_trainer(strategy=strategy, **settings).fit(module)
    assert {step.engine for step in strategy.report.steps} == {"inductor-graphs"}
    steps = recorder.events.count("begin")
    assert steps > 20
    assert len(copied) == 1 if kind is Plain else len(copied) > 20  # before the recorded validation
    torch.testing.assert_close(module.state_dict(), stock.state_dict(), rtol=1e-5, atol=1e-6)
    assert stock.last
    torch.testing.assert_close(module.last, stock.last, rtol=1e-5, atol=1e-6)
    if isinstance(module, Curious) and isinstance(stock, Curious):
        torch.testing.assert_close(module.kept, stock.kept, rtol=1e-5, atol=1e-6)


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
    paces: Callable[..., None],
) -> None:
    stock, module = kind(), kind()
    make_trainer(max_epochs=2, limit_val_batches=0).fit(stock)
    recorded = lambda module, name, first: [Way("inductor-graphs", first.part)]  # noqa: E731
    monkeypatch.setattr(captured_step, "challengers", recorded)
    paces(**{"torch": 2.0, "inductor-graphs": 1.0})  # it wins
    strategy = ORTStrategy(config={"engine": "auto", "debug": {"capture": capture}}, optim="keep")
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


def test_a_recording_whose_gradients_are_accumulated_from_an_epoch_on_goes_on_unrecorded(
    recorder: Recorder, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Callable[..., None]
) -> None:
    stock, module = Keeping(), Keeping()
    accumulates = {"callbacks": [GradientAccumulationScheduler({8: 2})], "max_epochs": 24, "limit_val_batches": 0}
    make_trainer(**accumulates).fit(stock)
    recorded = lambda module, name, first: [Way("inductor-graphs", first.part)]  # noqa: E731
    monkeypatch.setattr(captured_step, "challengers", recorded)
    monkeypatch.setattr(inductor, "cpp_compiler", lambda: "/usr/bin/g++")
    paces(**{"torch": 2.0, "inductor-graphs": 1.0, "inductor": 1.1})
    strategy = ORTStrategy(config={"engine": "auto", "start": "now"}, optim="keep")
    make_trainer(strategy=strategy, **accumulates).fit(module)
    (step,) = strategy.report.steps
    assert step.engine == "inductor", strategy.report.to_text()
    assert set(step.ms) == {"torch", "inductor-graphs", "inductor"}
    (note,) = [note for note in strategy.report.notes if note.reason.type is ReasonType.INDUCTOR_FAILED]
    assert note.reason.text == "gradients are accumulated now; inductor is tried instead"
    assert recorder.events[-2:] == ["run", "run"]  # of which none begins a recording
    assert module.losses == pytest.approx(stock.losses, rel=1e-5)


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


@pytest.mark.usefixtures("captured_at_once")
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
