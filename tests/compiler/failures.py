"""Compiled passes that fail while they run, though the graph is right."""

from typing import Any

import pytest

from lightning_ort.compiler import backend

FORWARD, BACKWARD, TRIAL = "forward", "backward", "trial"


def inject(monkeypatch: pytest.MonkeyPatch, where: str) -> list[str]:
    """Make each compiled forward or backward pass fail at its end, or torch's side of each region's trial.

    Returns:
        What has failed since.

    """
    failed: list[str] = []
    link, torch_side = backend.link, backend.ORTBackend._torch_side

    def fail(*args: Any) -> None:
        failed.append(where)
        raise RuntimeError(f"injected into {where}")

    def failing_link(placed: Any) -> Any:
        names = {node.name for node in placed.parts.gm.graph.find_nodes(op="placeholder")}
        is_backward = any("tangents" in name for name in names)
        run = link(placed)
        if is_backward != (where == BACKWARD):
            return run

        def run_and_fail(args: Any) -> Any:
            run(args)
            fail()

        return run_and_fail

    def failing_side(self: backend.ORTBackend, region: Any, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(region.module, "forward", fail)
            return torch_side(self, region, *args)

    if where == TRIAL:
        monkeypatch.setattr(backend.ORTBackend, "_torch_side", failing_side)
    else:
        monkeypatch.setattr(backend, "link", failing_link)
    return failed
