"""Captured steps are repeated in eager, and one that does something else goes back to PyTorch."""

import collections
import functools
import itertools
import logging
import math
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTConfig, ORTStrategy
from lightning_ort._busy import LIMITS
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.running.fallbacks import ORTFallbackError
from lightning_ort.strategies.audit import schedule, step_audit
from lightning_ort.strategies.audit import snapshot as snapshots
from lightning_ort.strategies.audit.snapshot import differences, gradients, left_behind, snapshot
from lightning_ort.strategies.audit.step_audit import unexplained
from lightning_ort.strategies.capture.module import CapturedModule
from tests.running import NEEDS_COPIES
from tests.strategies.small_modules import Small, batches, loader

pytestmark = NEEDS_COPIES


@pytest.fixture(autouse=True)
def audits_may_take_long(limits: Callable[..., None]) -> None:
    limits(audits=60.0, patience=20.0)


ALWAYS = ORTConfig(placement="always")


def fit(make_trainer: Callable[..., Any], module: Any, config: ORTConfig = ALWAYS, **kwargs: Any) -> Any:
    trainer = make_trainer(**{"strategy": ORTStrategy(config=config), "max_epochs": 2, **kwargs})
    trainer.fit(module)
    return trainer.strategy.report


class Faulty(Small):
    """Does something else when it is captured: ``captured`` stands for what dynamo makes of ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.kept, self.table = 0, [1.0, 2.0], {"a": 1, "b": 2}
        self.window: collections.deque[float] = collections.deque(maxlen=3)
        self.state = collections.namedtuple("State", "heads")(["one", "two"])
        self.plain, self.slots, self.scale = Plain(), Slots(), Scale()
        self.head = self.net[2]
        self.register_buffer("bank", torch.zeros(4, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        Counter.count = self.counted()
        return self.loss(batch)

    def counted(self) -> int:
        return len(COUNTS)


COUNTS: list[int] = []


class Counter:
    """A class that a step names."""

    count = 0


class Scale(nn.Module):
    """A module whose class has an attribute."""

    factor = 1.0


class Slots:
    """An object without a dictionary."""

    __slots__ = ("__third", "first", "second")

    def __init__(self) -> None:
        self.first, self.second, self.__third = 0.0, 0.0, 0.0

    def change(self) -> None:
        self.__third = 1.0


class Plain:
    """An object that a module holds."""

    def __init__(self) -> None:
        self.total, self.inner = 0.0, [torch.zeros(3)]


def scaled_gradient(factor: float) -> Callable[[Tensor], Tensor]:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return factor * gradients[0]

    return Scale.apply  # type: ignore[return-value]


def attribute(**values: Any) -> Callable[[Any, Any], None]:
    return lambda module, batch: vars(module).update(values)


def call(path: str, *args: Any) -> Callable[[Any, Any], None]:
    def do(module: Any, batch: Any) -> None:
        *names, method = path.split(".")
        target = module
        for name in names:
            target = getattr(target, name)
        with torch.no_grad():
            getattr(target, method)(*args)

    return do


# what the captured step does beside, or instead
FAULTS: dict[str, Any] = {
    "a result of 1 % more": lambda m, b, loss: 1.01 * loss,
    "a gradient of 1 % more": lambda m, b, loss: scaled_gradient(1.01)(loss),
    "the gradient of one layer of 2 % less": lambda m, b, loss: F.mse_loss(
        m.net[2](scaled_gradient(0.98)(m.net[:2](b[0]))), F.one_hot(b[1], 3).float()
    ),
    "a gradient with another sign": lambda m, b, loss: scaled_gradient(-1.0)(loss),
    "a branch of earlier": lambda m, b, loss: F.mse_loss(2 * m(b[0]), F.one_hot(b[1], 3).float()),
    "infinity": lambda m, b, loss: loss + math.inf,
    "not a number": lambda m, b, loss: scaled_gradient(math.nan)(loss),
    "no gradient of one layer": lambda m, b, loss: F.mse_loss(
        m.net[2](m.net[:2](b[0]).detach()), F.one_hot(b[1], 3).float()
    ),
    "another value logged": lambda m, b, loss: (m.log("other", loss.detach() + 1), loss)[1],
    "a counter that stays": attribute(count=0),
    "one append too much": call("kept.append", 3.0),
    "items in another order": call("kept.reverse"),
    "one item less": call("kept.pop"),
    "another key": call("table.update", {"c": 3}),
    "keys in another order": lambda m, b, loss: (m.table.update(a=m.table.pop("a")), loss)[1],
    "a longer window": call("window.append", 1.0),
    "another word in a tuple": lambda m, b, loss: (m.state.heads.__setitem__(0, "two"), loss)[1],
    "an attribute of a plain object": lambda m, b, loss: (setattr(m.plain, "total", 1.0), loss)[1],
    "a tensor in a list of a plain object": lambda m, b, loss: (m.plain.inner[0].add_(1), loss)[1],
    "another module under a name": lambda m, b, loss: (object.__setattr__(m, "head", m.net[0]), loss)[1],
    "a buffer written twice": call("bank.add_", 1),
    "a weight that is written to": call("net.0.weight.data.mul_", 1.01),
    "an attribute of a child's class": lambda m, b, loss: (setattr(Scale, "factor", 2.0), loss)[1],
    "an attribute of a class that the step names": lambda m, b, loss: (setattr(Counter, "count", -1), loss)[1],
    "a global variable that a method names": lambda m, b, loss: (COUNTS.append(1), loss)[1],
    "a slot": lambda m, b, loss: (setattr(m.slots, "second", 1.0), loss)[1],
    "a private slot": lambda m, b, loss: (m.slots.change(), loss)[1],
    "a hook of the backward pass": lambda m, b, loss: (loss.register_hook(lambda _: m.kept.append(1.0)), loss)[1],
    "a random number too much": lambda m, b, loss: (torch.rand(()), loss)[1],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_the_step_goes_back_to_pytorch(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    def wrong(module: Faulty, batch: Any, batch_idx: int) -> Tensor:
        loss = Faulty.training_step(module, batch, batch_idx)
        found = FAULTS[fault](*(module, batch, loss)[: FAULTS[fault].__code__.co_argcount])
        return loss if found is None else found

    calls = []

    def compiled(self: CapturedModule, function: Any, engine: str = "ort") -> Any:
        if function.__name__ != "training_step":
            return function
        return lambda *args: (calls.append(1), wrong(self.module, *args))[1]  # type: ignore[arg-type]

    monkeypatch.setattr(CapturedModule, "compile", compiled)
    monkeypatch.setattr("lightning_ort.strategies.capture.step.dynamo.region_of", lambda compiled: 0)
    report = fit(make_trainer, Faulty(), max_epochs=1, limit_val_batches=0)
    assert len(calls) <= 2
    assert [(each.where, each.reason.type) for each in report.fallbacks] == [("training_step", ReasonType.MISMATCH)]
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len([text for text in warnings if "training_step" in text]) == 1


def test_a_fault_is_found_where_exact_operations_cannot_be_waited_for(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Any:
        raise TimeoutError

    monkeypatch.setattr(step_audit, "InDouble", fails)
    report = fit(make_trainer, Differs(), max_epochs=1, limit_val_batches=0)
    assert [(entry.where, entry.reason.type) for entry in report.fallbacks] == [("training_step", ReasonType.MISMATCH)]


class Usual(Small):
    """What steps do: dropout, recurrent layers, convolutions, statistics, counters, clocks, lists, several threads.

    One of its attributes leads back to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(1, 4, 3, padding=1), nn.LSTM(4, 4, batch_first=True)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.seconds, self.steps, self.seen = 0.0, 0, collections.deque[Tensor]()
        self.predicts = functools.partial(self.forward)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        start = time.perf_counter()
        x, y = batch
        h, _ = self.rnn(self.conv(x[:, None]).transpose(1, 2))
        loss = self.loss((self.drop(self.norm(x + h.mean(2))), y))
        self.log("loss", loss)
        self.log_dict({"noise": torch.rand(())})
        self.steps += 1
        self.seconds = time.perf_counter() - start
        return loss


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.slow),
        pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("step_graph", ["joint", pytest.param("split", marks=pytest.mark.slow)])
def test_a_step_that_does_the_same_stays_captured(
    make_trainer: Callable[..., Any], settings: dict[str, Any], step_graph: Any
) -> None:
    config = ORTConfig(placement="always", debug={"step_graph": step_graph})
    report = fit(make_trainer, Usual(), config, max_epochs=4, **settings)
    assert report.fallbacks == []
    assert report.run.audits >= 4
    assert report.ort_runs > 16
    assert report.run.audit_difference < (1e-5 if "precision" not in settings else 0.1)
    assert not [note for note in report.notes if note.reason.type is ReasonType.NOT_AUDITED]
    assert 0 < report.run.audit_seconds < 60


class Learned(Small):
    """Its loss is 1e-7, the rounding of what it is a difference of; logs what Lightning refuses, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.refused = nn.Linear(8, 3), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        classes = logits.argmax(1)
        if self.refuses:
            try:
                self.log("loss/dataloader_idx_0", 0.0)
            except Exception:
                self.refused += 1
        return F.cross_entropy(logits + 14 * F.one_hot(classes, 3), classes)

    refuses = False

    def train_dataloader(self) -> Any:
        return batches(*[(3, 8)] * 12)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-6)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_small_difference_of_large_numbers_and_a_refused_log_are_no_faults(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    monkeypatch.setattr(schedule.Schedule, "is_due", lambda *args: True)
    module = type("Learned", (Learned,), {"refuses": refuses})()
    report = fit(make_trainer, module, max_epochs=1, limit_val_batches=0)
    assert report.fallbacks == []
    assert report.run.audits > 1
    assert module.refused == 12 * refuses
    assert refuses or report.run.audit_difference > step_audit.TOLERANCE[torch.float32]


def test_manual_optimization_is_audited(make_trainer: Callable[..., Any]) -> None:
    class Manual(Small):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    report = fit(make_trainer, Manual(), max_epochs=4, limit_val_batches=0)
    assert report.fallbacks == []
    assert report.run.audits >= 2
    assert report.ort_runs > 0


def test_no_copy_is_left(make_trainer: Callable[..., Any]) -> None:
    def children() -> list[str]:
        return [child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()]

    before = children()
    assert fit(make_trainer, Small(), max_epochs=4).run.audits > 0
    assert {*children()} <= {*before}


class Differs(Small):
    """Computes something else while dynamo traces it."""

    @property
    def factor(self) -> float:
        return 2.0 if torch.compiler.is_dynamo_compiling() else 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * self.factor

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) * self.factor)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]) * self.factor


def test_each_kind_of_step_is_audited(make_trainer: Callable[..., Any]) -> None:
    module, trainer = Differs(), make_trainer(strategy=ORTStrategy(config=ALWAYS), max_epochs=1)
    trainer.fit(module)
    trainer.test(module)
    trainer.predict(module)
    fallbacks = {each.where: each.reason.type for each in trainer.strategy.report.fallbacks}
    steps = ("training_step", "validation_step", "test_step", "predict_step")
    assert fallbacks == dict.fromkeys(steps, ReasonType.MISMATCH)


def test_what_is_timed_is_not_disturbed(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Callable[..., None]
) -> None:
    """A copy of the process slows down what is timed beside it: regions as they compile, and ways that take turns."""
    paces(torch=1.0, ort=0.5)
    trainer = make_trainer(strategy=ORTStrategy(config={"start": "now"}), max_epochs=8, limit_val_batches=0)
    found: list[tuple[bool, bool]] = []

    class Noted(step_audit.ForkedCopy):
        def __init__(self, *args: Any) -> None:
            report = trainer.strategy.report
            found.append((bool(report.graphs), bool(report.steps)))
            super().__init__(*args)

    monkeypatch.setattr(step_audit, "ForkedCopy", Noted)
    trainer.fit(Small())
    assert trainer.strategy.report.ort_runs > 0
    assert [is_settled for _, is_settled in found].count(False) == 1
    assert all(is_compiled for is_compiled, _ in found)
    assert trainer.strategy.report.run.audits == len(found) > 1


def test_an_audit_counts_with_the_step_that_it_slows_down(make_trainer: Callable[..., Any]) -> None:
    class Slow(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            wait()
            return self.loss(batch)

    @torch.compiler.disable
    def wait() -> None:
        time.sleep(0.2)

    run = fit(make_trainer, Slow(), max_epochs=1, limit_val_batches=0).run
    assert run.audit_seconds > 0.2 * (run.audits - 1) > 0  # but for the step that compiles


def test_no_audit_begins_that_would_take_too_long(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "expected_seconds", lambda *_: 1e6)
    assert fit(make_trainer, Small()).run.audits == 0


def script(monkeypatch: pytest.MonkeyPatch, *found: Any) -> list[Any]:
    """Have audits of each step find what is listed, again and again: by how much the result differs, if anything."""
    findings, answers, told = step_audit._Audit.findings, itertools.cycle(found), list[Any]()

    def scripted(self: Any) -> Any:
        findings(self)
        told.append(answer := next(answers))
        names = [name for name in self._own if name.startswith("output")]
        return None if answer is None else snapshots.Findings({names[0]: answer} if answer else {})

    monkeypatch.setattr(step_audit._Audit, "findings", scripted)
    monkeypatch.setattr(schedule.Schedule, "is_due", lambda *_: True)
    return told


@pytest.mark.parametrize("known", [False, True])
def test_audits_end_where_several_in_a_row_find_nothing_out(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    told = script(monkeypatch, *[None] * (step_audit.MAX_UNKNOWN - 1), 0.0 if known else None)
    report = fit(make_trainer, Small(), max_epochs=4, limit_val_batches=0)
    notes = [note.where for note in report.notes if note.reason.type is ReasonType.NOT_AUDITED]
    assert (notes == ["training_step"]) == (not known)
    assert (report.run.audits > 1) == known
    assert (len(told) > step_audit.MAX_UNKNOWN) == known
    assert report.fallbacks == []


def test_what_is_suspected_is_audited_whatever_may_be_spent(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference that is small counts if the next step has it too."""
    script(monkeypatch, 0.02)
    expected = itertools.chain([0.0], itertools.repeat(1e3))
    monkeypatch.setattr(schedule, "expected_seconds", lambda *_: next(expected))
    report = fit(make_trainer, Small(), max_epochs=1, limit_val_batches=0)
    assert report.run.audits == 2
    assert [entry.reason.type for entry in report.fallbacks] == [ReasonType.MISMATCH]


def test_it_is_an_error_if_fallbacks_are(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ORTFallbackError, match="differs from eager"):
        fit(make_trainer, Differs(), ORTConfig(placement="always", fallback="raise"))
    report = fit(make_trainer, Differs(), ORTConfig(placement="always", audit="off"))
    assert report.run.audits == 0
    assert report.fallbacks == []


def test_inductor_is_audited(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = CapturedModule.compile
    monkeypatch.setattr(CapturedModule, "compile", lambda self, call, engine: compiled(self, call, "ort"))
    report = fit(make_trainer, Differs(), ORTConfig(engine="auto", start="now"))
    assert {each.where for each in report.fallbacks} == {"training_step", "validation_step"}


@pytest.mark.slow
def test_five_hundred_copies_beside_workers_threads_bars_and_loggers(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]
) -> None:
    monkeypatch.setattr(schedule, "LONGEST_GAP", 1)
    limits(audits=10_000.0)
    stop, lock = threading.Event(), threading.Lock()

    def work() -> None:
        x = torch.randn(64, 64)
        while not stop.wait(0.001):
            with lock:
                x = (x @ x).tanh()
            logging.getLogger("anybody").info("something")

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()

    class Loaded(Usual):
        def train_dataloader(self) -> Any:
            rows = 8 * 501  # the first step runs unchanged
            data = TensorDataset(torch.randn(rows, 8), torch.randint(3, (rows,)))
            return DataLoader(data, batch_size=8, num_workers=2, persistent_workers=True, shuffle=True)

    settings = {"enable_progress_bar": True, "logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    torch.set_num_threads(2)
    try:
        report = fit(make_trainer, Loaded(), max_epochs=1, limit_val_batches=0, **settings)
    finally:
        torch.set_num_threads(1)
        stop.set()
    assert report.run.audits == 500
    assert report.fallbacks == []
    assert not [note for note in report.notes if note.reason.type is ReasonType.NOT_AUDITED]
    assert report.run.audit_difference < 1e-3


def test_what_a_step_does_beside_computing_is_done_once(
    make_trainer: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.txt"

    class Writes(Small):
        @torch.compiler.disable
        def write(self, batch_idx: int) -> None:
            with path.open("a") as file:
                file.write(f"{batch_idx}\n")
            print(f"step {batch_idx}")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.write(batch_idx)
            return self.loss(batch)

    report = fit(make_trainer, Writes())
    assert path.read_text().split() == [str(number) for number in (*range(4), *range(4))]
    assert capfd.readouterr().out.count("step") == 8
    assert report.fallbacks == []
    assert [note.where for note in report.notes if note.reason.type is ReasonType.NOT_AUDITED] == ["training_step"]


def test_a_step_that_fails_leaves_nothing_behind(make_trainer: Callable[..., Any]) -> None:
    class Fails(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise ValueError("of the user")
            return self.loss(batch)

    with pytest.raises(ValueError, match="of the user"):
        fit(make_trainer, Fails())


def test_an_audit_of_a_step_without_a_backward_pass_ends_with_it(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Skips(Small):
        skips = False

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.skips = batch_idx % 2 == 1

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = self.loss(batch)
            return None if self.skips else loss

    module = Skips()
    monkeypatch.setattr(schedule.Schedule, "is_due", lambda *args: module.skips)
    report = fit(make_trainer, module, limit_val_batches=0)
    assert report.fallbacks == [], "the next step is not compared with it"
    assert report.run.audits == 0
    assert report.ort_runs >= 5


def test_audits_become_rare(make_trainer: Callable[..., Any]) -> None:
    class Long(Small):
        def train_dataloader(self) -> Any:
            return loader(8 * 200)

    report = fit(make_trainer, Long(), max_epochs=1, limit_val_batches=0)
    assert 8 <= report.run.audits <= 40


def test_audits_take_a_share_of_the_time(make_trainer: Callable[..., Any], limits: Callable[..., None]) -> None:
    limits(audits=0.0)
    start = time.perf_counter()
    report = fit(make_trainer, Small(), max_epochs=2)
    seconds = time.perf_counter() - start
    assert report.run.audits <= 1 + 0.2 * seconds / 0.02


# When, by plain calls


def due(seed: str, steps: int) -> list[int]:
    """The steps of one epoch that are audited."""
    plan, found = schedule.Schedule(seed), []
    for step in range(steps):
        if plan.is_due(step, 0):
            plan.passed(step, 0)
            found.append(step)
    return found


def test_which_steps_are_audited_falls_into_no_pattern() -> None:
    steps, others = due("a", 20_000), due("b", 20_000)
    assert steps == due("a", 20_000)
    assert steps[:4] == [0, 1, 2, 3]
    gaps = [later - step for step, later in itertools.pairwise(steps)]
    assert all(1 <= gap <= max(1, min(step // 2, schedule.LONGEST_GAP)) for step, gap in zip(steps, gaps, strict=False))
    assert max(gap for step, gap in zip(steps, gaps, strict=False) if step < 64) < 32
    assert len(steps) < 100
    assert steps[5:] != others[5:]
    # steps that do something else every 20th time are met in most runs
    assert sum(any(step % 20 == 17 for step in due(str(seed), 400)) for seed in range(20)) >= 12


def test_audits_begin_anew_with_what_compiles_and_with_each_epoch() -> None:
    plan = schedule.Schedule("")
    plan.passed(100, 0)
    plan.passed(100, 0, again=True)
    assert plan.is_due(101, 0)
    plan.passed(101, 0)
    plan.passed(200, 0)
    assert plan.is_due(201, 1)
    plan.restart()
    assert plan.is_due(0, 0)


def test_what_an_audit_takes_is_expected_from_the_machine_as_it_is() -> None:
    first = schedule.expected_seconds(usual=1.0, threads=2, processor=0.0, slowdown=1.0)
    assert first == pytest.approx(2.0 + schedule.COPYING)
    assert schedule.expected_seconds(1.0, 2, 0.0, 3.0) == pytest.approx(3 * first)
    assert schedule.expected_seconds(1.0, 2, 5.0, 1.0) == 5.0
    assert schedule.expected_seconds(1.0, 2, 0.5, 1.0) == first
    assert schedule.limit_seconds(first) > first
    assert schedule.limit_seconds(0.0) == LIMITS.get().patience
    assert schedule.allowed_seconds(0.0, 0.0) == LIMITS.get().audits
    assert schedule.allowed_seconds(1000.0, 100.0) == pytest.approx(LIMITS.get().audits + 3.0 + 3.0)


# What counts as a difference


def numbers(**values: Any) -> dict[str, Any]:
    return snapshot(values)


def deep(value: Any) -> Any:
    """A value that is so deep that its items are not looked at."""
    for _ in range(snapshots._MAX_DEPTH):
        value = [value]
    return value


class MoreSlots(Slots):
    """Slots of its own, and those of a base."""

    __slots__ = ("fourth",)


def slots(**values: float) -> MoreSlots:
    made = MoreSlots()
    for name, value in {"fourth": 0.0, **values}.items():
        setattr(made, name, value)
    return made


def linear(value: float) -> nn.Module:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, value)
    nn.init.zeros_(module.bias)
    return module


def statistics(value: float) -> nn.Module:
    module = nn.BatchNorm1d(2)
    module.running_mean = torch.full((2,), value)
    return module


def test_equal_snapshots_have_no_differences() -> None:
    module = Small()
    loss = torch.tensor([1.0, math.nan, math.inf])
    values = {"self": module, "output": {"loss": loss}, "text": ("a", b"b", None, 2**80)}
    assert differences(snapshot(values), snapshot(values), 0.0).names == set()
    one, other = {0, 8}, {8, 0}
    assert [*one] != [*other]
    assert differences(snapshot({"x": one}), snapshot({"x": other}), 0.0).names == set(), "sets have no order"


def test_a_snapshot_has_a_limit() -> None:
    many, nested = [0] * (2 * snapshots.MAX_VALUES), list[Any]()
    for _ in range(100):
        nested = [nested]
    assert len(snapshot({"x": many})) == snapshots.MAX_VALUES
    assert len(snapshot({"x": nested})) < 20, "names of what is deep are long"


def test_what_is_made_for_a_snapshot_is_met_once() -> None:
    """A new object may be where one was that is gone, as the states of iterators."""
    nested = list[Any]()
    for number in range(5):
        nested = [nested, itertools.count(number)]
    found = snapshot({"x": nested}).values()
    assert {value.total for value in found if isinstance(value, snapshots.Numbers)} == {*range(5)}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint64, torch.int8, torch.bfloat16, torch.complex64])
def test_a_tensor_of_any_dtype_is_compared(dtype: torch.dtype) -> None:
    one, other = (snapshot({"x": torch.tensor(values).to(dtype)}) for values in ([1, 0, 1], [1, 1, 1]))
    assert differences(one, one, 0.0).names == set()
    assert differences(one, other, 1e-3).names == {"x"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2), (True, False), ("a", "b"), (None, 0), ([1, 2], [2, 1]), ([1], [1, 1]), ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}), (torch.zeros(3), torch.zeros(4)), (torch.zeros(3), torch.zeros(3).double()),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])), (torch.tensor(1.0), torch.tensor(math.nan)),
        (torch.tensor([True, False]), torch.tensor([True, True])), (torch.tensor(1 + 1j), torch.tensor(1 + 2j)),
        (collections.deque([1], 2), collections.deque([1, 2], 2)), (nn.ReLU().train(), nn.ReLU().eval()),
        (torch.nn.functional.relu, torch.nn.functional.gelu), ([Plain()], [Plain(), Plain()]),
        (torch.tensor([1.0, -1.0]), torch.tensor([2.0, -2.0])), ([1, 2, 3], [1, 2, 4]), (deep([1]), deep([1, 1])),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}), ({"a": 1, "b": 1}, {"b": 1, "a": 1}), (slots(), slots(first=1.0)),
        (slots(), slots(fourth=1.0)), (linear(1.0), linear(2.0)), (statistics(1.0), statistics(2.0)),
    ],
)  # fmt: skip
def test_different_values_are_different(one: Any, other: Any) -> None:
    assert differences(numbers(x=one), numbers(x=other), 1e-3).names
    assert not differences(numbers(x=one), numbers(x=one), 1e-3).names


class Touchy(dict[str, float]):
    """A mapping all of whose methods and attributes are the user's code, which fails."""

    def fail(self, *args: Any) -> Any:
        raise RuntimeError("not to be called")

    items = keys = values = fail
    __iter__ = __len__ = __getitem__ = __getattribute__ = __repr__ = __eq__ = __hash__ = __bool__ = fail


class TouchyText(str):
    """A text that cannot be shown."""

    __repr__ = __str__ = Touchy.fail


def test_no_code_of_the_user_runs_for_a_snapshot() -> None:
    one, same, other = (snapshot({"x": [Touchy(a=value), TouchyText("b")]}) for value in (1.0, 1.0, 2.0))
    assert differences(one, same, 0.0).names == set()
    assert differences(one, other, 0.0).names == {"x[0]['a']"}


def test_what_cannot_be_read_ends_the_audit_and_not_the_run(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise ValueError("cannot be read\nat all")

    monkeypatch.setattr(step_audit, "left_behind", fail)
    report = fit(make_trainer, Faulty(), max_epochs=4)
    assert report.ort_runs
    assert not report.fallbacks
    assert not report.run.audits
    notes = [note.reason.text for note in report.notes if note.reason.type is ReasonType.NOT_AUDITED]
    assert len(notes) == 1
    assert "ValueError: cannot be read" in notes[0]
    assert "at all" not in notes[0]


def test_what_is_missing_on_either_side_is_a_difference() -> None:
    less, more = numbers(x=1), numbers(x=1, y=2)
    assert differences(less, more, 1e-3).names == differences(more, less, 1e-3).names == {"y"}


def test_which_object_an_attribute_refers_to_is_compared() -> None:
    one, other = Plain(), Plain()
    first, second = numbers(a=one, b=other, active=one), numbers(a=one, b=other, active=other)
    assert differences(first, second, 1e-3).names >= {"active"}


def test_gradients_that_are_roundings_are_compared_with_those_of_others() -> None:
    def with_gradients(small: float) -> Any:
        module = nn.Linear(1000, 2)
        module.weight.grad, module.bias.grad = torch.ones(2, 1000), torch.full((2,), small)
        return gradients(module)

    assert not differences(with_gradients(1e-9), with_gradients(-1e-9), 1e-3).names

    def alone(value: float, loss: float) -> Any:
        module = nn.Linear(2, 2)
        module.bias.grad = torch.full((2,), value)
        return numbers(output={"loss": torch.tensor(loss)}) | gradients(module)

    assert not differences(alone(6e-8, 1.1), alone(-6e-8, 1.1), 1e-3).names
    assert differences(alone(6e-8, 1e-5), alone(-6e-8, 1e-5), 1e-3).names == {"gradient of bias"}
    assert differences(alone(6e-6, 1.1), alone(-6e-6, 1.1), 1e-3).names == {"gradient of bias"}
    for size in (1e-2, 5e-4):
        assert differences(with_gradients(size), with_gradients(-size), 1e-3).names == {"gradient of bias"}
    one, other = (numbers(small=value) | with_gradients(1.0) for value in (1e-9, -1e-9))
    assert differences(one, other, 1e-3).names == {"small"}, "other values are not"

    def many(value: float) -> Any:
        module = nn.Linear(2, 1000)
        module.bias.grad = torch.full((1000,), value)
        return numbers(output={"loss": torch.tensor(1.1)}) | gradients(module)

    assert not differences(many(6e-8), many(-6e-8), 1e-3).names


class Scripted:
    """Answers as a copy of the process would."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.commands: list[int] = []

    def __call__(self, command: int) -> Any:
        self.commands.append(command)
        return self.answers.pop(0)


def test_no_difference_takes_one_answer() -> None:
    copy = Scripted(numbers(x=1.0))
    found = unexplained(numbers(x=1.0 + 1e-5), copy, 1e-3)
    assert found is not None
    assert found.names == set()
    assert copy.commands == [0]


def test_what_eager_does_not_repeat_is_asked_no_further() -> None:
    copy = Scripted(numbers(x=1.0), numbers(x=1.3))
    found = unexplained(numbers(x=1.1), copy, 1e-3)
    assert found is not None
    assert found.names == set()
    assert copy.commands == [0, 0]


def test_what_eager_does_not_repeat_hides_nothing_else() -> None:
    found = unexplained(numbers(x=1.1, y=2.2), Scripted(numbers(x=1.0, y=2.0), *[numbers(x=1.3, y=2.0)] * 4), 1e-3)
    assert found is not None
    assert found.names == {"y"}


def test_a_difference_is_one_if_eager_repeats_itself_and_roundings_do_not_matter() -> None:
    for exact in (numbers(x=1.0001), None):  # which takes long
        copy = Scripted(*[numbers(x=1.0)] * 2, *[numbers(x=1.0001)] * 2, exact)
        found = unexplained(numbers(x=1.1), copy, 1e-3)
        assert found is not None
        assert found.relative == {"x": pytest.approx(0.1 / 1.1)}
        assert copy.commands == [0, 0, 1, 2, 3]
    found = unexplained(numbers(x="one"), Scripted(*[numbers(x="another")] * 4), 1e-3)
    assert found is not None
    assert found.other.keys() == {"x"}


@pytest.mark.parametrize(
    "answers",
    [(1.0, 1.3, 1.0, 1.0), (1.0, 1.0, 1.05, 1.0001), (1.0, 1.0, 1.0, "text"), (1.0, 1.0, 1.0, 1.0, 1.05)],
    ids=["eager varies", "roundings make as much", "roundings change what it is", "exact operations differ as much"],
)
def test_a_difference_may_have_another_reason(answers: Any) -> None:
    found = unexplained(numbers(x=1.1), Scripted(*[numbers(x=value) for value in answers]), 1e-3)
    assert found is not None
    assert found.names == set()


@pytest.mark.parametrize("answered", range(4))
def test_without_an_answer_nothing_is_known(answered: int) -> None:
    answers = [numbers(x=1.0)] * answered + [None]
    assert unexplained(numbers(x=2.0), Scripted(*answers), 1e-3) is None


settings = types.ModuleType("settings_of_a_user")
settings.seen = 0


class Nested(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def count() -> None:
            settings.seen += 1

        count()
        return super().training_step(batch, batch_idx)


def test_variables_of_other_modules_are_looked_at_where_nested_code_names_them() -> None:
    before, module = settings.seen, Nested()
    own = snapshot(left_behind(module, module.training_step))
    module.training_step(next(iter(loader(8))), 0)
    eager = snapshot(left_behind(module, module.training_step))
    assert settings.seen == before + 1
    assert any("settings.seen" in name for name in differences(own, eager, 0.0).names)
