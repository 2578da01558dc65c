"""Compiled passes that fail while they run, though the graph is right."""

from typing import Any

import pytest

from lightning_ort.compiler.placement import placer, timing

FORWARD, BACKWARD, TRIAL = "forward", "backward", "trial"


def inject(monkeypatch: pytest.MonkeyPatch, where: str, after: int = 0) -> list[str]:
    """Make each compiled forward or backward pass fail at its end, or torch's side of each region's trial.

    Args:
        monkeypatch: What undoes it.
        where: One of the names above.
        after: Runs of passes that succeed before.

    Returns:
        What has failed since.
    """
    failed: list[str] = []
    left = iter(range(after))
    assemble, measure = placer._assemble, timing.measure

    def fail(*args: Any) -> Any:
        failed.append(where)
        raise RuntimeError(f"injected into {where}")

    def failing_assemble(gm: Any, regions: Any) -> Any:
        inputs = gm.graph.find_nodes(op="placeholder")
        tangents = sum("tangents" in node.name for node in inputs)
        # a step as one graph returns a gradient, or None, for each input but its tangent
        is_step = tangents == 1 and len(gm.graph.output_node().args[0]) >= len(inputs)
        is_backward = tangents > 0 and not is_step
        run = assemble(gm, regions)
        if is_backward != (where == BACKWARD):
            return run

        def run_and_fail(args: Any) -> Any:
            results = run(args)
            return results if next(left, None) is not None else fail()

        return run_and_fail

    def failing_measure(executor: str, calls: Any, torch_forward: Any, *args: Any) -> Any:
        return measure(executor, calls, torch_forward and fail, *args)

    if where == TRIAL:
        monkeypatch.setattr(timing, "measure", failing_measure)
    else:
        monkeypatch.setattr(placer, "_assemble", failing_assemble)
    return failed
