"""Passes that fail in the middle of a fit: it goes on in eager, and ends as stock's does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import START, Recorded, fit

from lightning_ort import ORTDDPStrategy, ORTNativeZeRO1Strategy, ORTStrategy, ORTZeRO1Strategy
from tests.compiler.failures import BACKWARD, FORWARD, TRIAL, inject

STRATEGIES = {
    "ort": lambda config: ORTStrategy(config=config),
    "ort_ddp": lambda config: ORTDDPStrategy(config=config, start_method=START),
    "ort_zero1_native": lambda config: ORTNativeZeRO1Strategy(config=config, start_method=START),
    "ort_zero1": lambda config: ORTZeRO1Strategy(config=config, start_method=START),
}


def cases() -> list[Any]:
    quick = {("ort", FORWARD), ("ort", BACKWARD), ("ort", TRIAL), ("ort_ddp", BACKWARD)}
    return [
        pytest.param(name, where, id=f"{name}-{where}", marks=() if (name, where) in quick else pytest.mark.slow)
        for name in STRATEGIES
        for where in (FORWARD, BACKWARD, TRIAL)
    ]


@pytest.mark.parametrize(("name", "where"), cases())
@pytest.mark.usefixtures("captured_at_once")
def test_a_failing_pass_ends_no_fit(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    devices = 1 if name == "ort" else 2
    arguments = {"devices": devices, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1}
    if name == "ort_zero1":
        pytest.importorskip("deepspeed")
    stock = fit(Recorded(tmp_path, "stock"), "auto" if devices == 1 else "ddp_fork", make_trainer, **arguments)
    inject(monkeypatch, where)
    config: dict[str, Any] = {"placement": "measured" if where == TRIAL else "always"}
    if where == BACKWARD:
        config["debug"] = {"step_graph": "split"}  # one graph has no backward pass of its own
    ours = fit(Recorded(tmp_path, "ours"), STRATEGIES[name](config), make_trainer, **arguments)
    for facts, expected in zip(ours, stock, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        report = facts["report"]
        assert report["ort_runs"] > 0
        failed = [entry for entry in report["fallbacks"] if "injected" in entry["reason"]["text"]]
        noted = [entry for entry in report["notes"] if "injected" in entry["reason"]["text"]]
        if where == TRIAL:
            assert not failed
            assert noted
        else:
            graphs = [entry["where"] for entry in failed]
            assert sorted(graphs) == sorted(set(graphs))  # each is given up once
            assert any(graph.startswith("training_step/graph_") for graph in graphs)
    assert ours[0]["weight"] == ours[-1]["weight"]
