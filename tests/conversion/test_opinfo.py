"""torch's test database: a sample of each op that reaches ONNX Runtime, and, marked as slow, the rest."""

import math
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import CONVERTERS, GraphBuilder
from tests.conversion import opinfo, opinfo_check, opinfo_run
from tests.conversion.opinfo_cases import OPS, case_of, samples
from tests.conversion.opinfo_check import Outcome, Status, check
from tests.conversion.opinfo_judge import Leeway, judge
from tests.conversion.opinfo_known import explained
from tests.conversion.opinfo_run import Key, Worker


def listed() -> list[tuple[str, str]]:
    """The ops of the page's last section, each with where ONNX Runtime ran its first sample."""
    section = opinfo.PAGE.read_text(encoding="utf-8").split(opinfo.REACHED_HEAD)[1]
    lines = (line.split(":", 1) for line in section.splitlines() if ":" in line)
    return [(name, where.lower()) for where, names in lines for name in re.findall("`(.+?)`", names)]


@pytest.mark.parametrize(("name", "where"), listed())
def test_first_sample(name: str, where: str) -> None:
    if name not in OPS:
        pytest.skip(f"torch {torch.__version__} has no samples of it")
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
    worker = Worker((None, None), die_in_turn, "fork")
    try:
        found = [(key.sample, outcome.status) for key, outcome in worker.run("add")]
    finally:
        worker.end()
    assert found == [(0, Status.OK), (1, Status.CRASH), (2, Status.EAGER_CRASH), (3, Status.OK)]


ORDINARY = Leeway(ordinary=True, gradient=False, overflow=False)
EXTREME = Leeway(ordinary=False, gradient=False, overflow=False)


@pytest.mark.parametrize(
    ("got", "eager", "wide", "leeway", "differs"),
    [
        (1.0000002, 1.0, 1.0, ORDINARY, False),  # a few units in the last place
        (1.0001, 1.0, 1.0, ORDINARY, True),
        (1.0001, 1.0, 1.0001, ORDINARY, False),  # nearer to the truth than eager
        (-1e-8, -1e-8, -1e-8, EXTREME, False),
        (0.0, -1e-8, -1e-8, EXTREME, True),  # a small result is a result
        (9.0, 10.0, 10.0, ORDINARY, True),
        (math.nan, math.inf, math.inf, EXTREME, True),
        (math.inf, math.nan, math.nan, EXTREME, True),
        (math.nan, math.nan, math.nan, EXTREME, False),
        (math.inf, 1e30, 1e30, EXTREME, True),
        (math.inf, 1e30, 1e30, replace(EXTREME, overflow=True), False),
        (2.0, math.inf, 2.0, EXTREME, False),  # eager overflows on the way
    ],
)
def test_what_counts_as_rounding(got: float, eager: float, wide: float, leeway: Leeway, differs: bool) -> None:
    results = torch.tensor([got]), torch.tensor([eager]), [torch.tensor([wide], dtype=torch.float64)]
    assert (judge(*results, leeway) is not None) == differs


def test_a_jump_is_no_rounding() -> None:
    # moved by one unit in the last place, 1 // 0.1 is 10 instead of 9
    moved = [torch.tensor([value], dtype=torch.float64) for value in (9.0, 10.0, 9.0)]
    assert judge(torch.tensor([10.0]), torch.tensor([9.0]), moved, ORDINARY) is not None


def test_a_graph_that_fails_where_torchs_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch captures singular values as a decomposition with vectors, which does not converge beside an infinity
    case = case_of(OPS["linalg_matrix_rank"], next(samples(OPS["linalg_matrix_rank"], torch.float32, False)))
    assert case is not None
    first, inf, tiny = check(case, values=("inf", "tiny"))
    assert (first.status, inf.status, tiny.status) == (Status.OK, Status.TORCH, Status.OK)
    assert "LinAlgError" in inf.detail
    assert tiny.forward  # compiled again, the failed graph is not run any more
    monkeypatch.setattr(opinfo_check, "aot_eager", lambda graph, inputs: graph)
    assert check(case, values=("inf",))[1].status is Status.MISMATCH
