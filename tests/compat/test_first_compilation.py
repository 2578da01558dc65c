import gc
import logging
from typing import Any

import pytest
import torch
from torch._decomp import core_aten_decompositions
from torch._logging._internal import trace_log

from lightning_ort.compat import first_compilation as compat
from lightning_ort.compiler.backend import ORTBackend


def test_core_decompositions() -> None:
    assert compat.core_decompositions().keys() == core_aten_decompositions().keys()
    silu = torch.ops.aten.silu_backward.default
    grad, x = torch.randn(2, 5)
    torch.testing.assert_close(compat.core_decompositions()[silu](grad, x), silu(grad, x))


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_as_before_afterwards(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        with compat.without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        gc.enable()


@pytest.mark.parametrize("is_read", [False, True])
def test_graphs_are_written_as_texts_only_for_readers(monkeypatch: pytest.MonkeyPatch, is_read: bool) -> None:
    written = []
    method = torch.fx.GraphModule.print_readable

    def write(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> str:
        written.append(gm)
        return method(gm, *args, **kwargs)

    monkeypatch.setattr(torch.fx.GraphModule, "print_readable", write)
    monkeypatch.setattr(trace_log, "handlers", [logging.NullHandler()] if is_read else [])
    torch._dynamo.reset()
    backend = ORTBackend({"placement": "always"})
    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda: (x * x).sum(), backend=backend)().backward()
    torch.testing.assert_close(x.grad, 2 * x)
    assert any(region.executor == "ort" for graph in backend.report.graphs for region in graph.regions)
    assert bool(written) == is_read
