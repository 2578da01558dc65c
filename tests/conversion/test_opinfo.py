"""torch's test database: a sample of each op that reaches ONNX Runtime, and, marked as slow, the rest."""

import os
import re
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from torch import fx

from lightning_ort.compiler.conversion import CONVERTERS, GraphBuilder
from tests.conversion import opinfo, opinfo_run
from tests.conversion.opinfo_cases import OPS, case_of, samples
from tests.conversion.opinfo_check import Outcome, Status, check
from tests.conversion.opinfo_known import explained
from tests.conversion.opinfo_run import Key, Worker


def listed() -> list[tuple[str, str]]:
    """The ops of the page's last section, each with where ONNX Runtime ran its first sample."""
    section = opinfo.PAGE.read_text(encoding="utf-8").split(opinfo.REACHED_HEAD)[1]
    lines = (line.split(":", 1) for line in section.splitlines() if ":" in line)
    return [(name, where.lower()) for where, names in lines for name in re.findall("`(.+?)`", names)]


@pytest.mark.parametrize(("name", "where"), listed())
def test_first_sample(name: str, where: str) -> None:
    op = OPS[name]
    case = case_of(op, next(samples(op, torch.float32, requires_grad=True)))
    assert case is not None
    (outcome,) = check(case)
    assert explained(Key(name, "float32", "plain", "auto", 0), outcome).status not in opinfo.FAILURES, outcome.detail
    assert " and ".join(kind for kind in ("forward", "backward") if getattr(outcome, kind)) == where


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker((2, None))
    yield worker
    worker.end()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_all_samples(name: str, worker: Worker) -> None:
    results = [(key, explained(key, outcome)) for key, outcome in worker.run(name)]
    failed = [
        f"{key} {outcome.values}: {outcome.detail}" for key, outcome in results if outcome.status in opinfo.FAILURES
    ]
    assert not failed, "\n".join(failed)
    if name in dict(listed()):
        assert any(outcome.forward or outcome.backward for _, outcome in results)


def test_a_wrong_result_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> object:
        return ctx.op("Mul", ctx.op("Exp", ctx.value(x)), ctx.const(1 + 1e-5, torch.float32))

    case = case_of(OPS["exp"], next(samples(OPS["exp"], torch.float32, requires_grad=True)))
    assert case is not None
    assert check(case)[0].status is Status.OK
    monkeypatch.setitem(CONVERTERS, torch.ops.aten.exp.default, nearly)
    wrong = check(case)[0]
    assert (wrong.status, wrong.forward) == (Status.MISMATCH, True)
    assert "output 0" in wrong.detail


def die_in_turn(connection: Connection, limits: opinfo_run.Limits) -> None:
    """Does as a worker does with an op of four samples, of which two end it."""
    while (task := connection.recv()) is not None:
        name, start = task
        for number in range(start, 4):
            key = Key(name, "float32", "plain", "auto", number)
            connection.send(("at", number, key, "eager on plain" if number == 2 else "run on plain"))
            if number in (1, 2):
                os.kill(os.getpid(), signal.SIGFPE)
            connection.send(("outcome", key, Outcome(Status.OK)))
        connection.send(("done",))


def test_an_input_that_ends_the_process_is_counted_and_the_rest_is_run() -> None:
    worker = Worker((None, None), die_in_turn)
    try:
        found = [(key.sample, outcome.status) for key, outcome in worker.run("add")]
    finally:
        worker.end()
    assert found == [(0, Status.OK), (1, Status.CRASH), (2, Status.EAGER_CRASH), (3, Status.OK)]
