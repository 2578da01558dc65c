"""On a GPU nothing is timed on made-up positions that may be out of bounds: that would end all work on the device."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.regions.region import Timing
from tests.compiler.fake_cuda import CudaBackend, FakeCuda

aten = torch.ops.aten
TABLE = torch.randn(16, 8)


SAFE = {
    "a sum": ("add", lambda x, y: x + y[:, None]),
    "a mask": ("where", lambda x, y: torch.where(y[:, None] > 1, x, 0.0)),
}
UNSAFE = {
    "labels": ("nll_loss_forward", lambda x, y: F.cross_entropy(x, y)),
    "padded labels": ("nll_loss_forward", lambda x, y: F.cross_entropy(x, F.pad(y, (0, 1), value=-100)[1:])),
    "labels from 1": ("nll_loss_forward", lambda x, y: F.cross_entropy(x, y - 1)),
    "tokens from 1": ("embedding", lambda x, y: F.embedding(y - 1, TABLE)),
    "gathered from 1": ("gather", lambda x, y: x.gather(1, (y - 1)[:, None])),
    "written from 1": ("scatter", lambda x, y: x.scatter(1, (y - 1)[:, None], 1.0)),
    "too far": ("index", lambda x, y: x[torch.arange(4), 8 - y]),
    "too far from the end": ("index_put", lambda x, y: x.index_put((y - 5,), x.sum())),
    "numbers": ("embedding", lambda x, y: F.embedding((x[0] * 10).long(), TABLE)),
    "wider choice": ("embedding", lambda x, y: F.embedding((x * 0).flatten().argmax(0), TABLE)),
    "no probabilities": ("binary_cross_entropy", lambda x, y: F.binary_cross_entropy(x * 2, torch.ones_like(x))),
}


@pytest.mark.parametrize(
    ("op", "function", "is_safe"),
    [pytest.param(*case, cases is SAFE, id=name) for cases in (SAFE, UNSAFE) for name, case in cases.items()],
)
def test_what_is_timed_on_a_gpu(op: str, function: Any, is_safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    timed: list[str] = []

    def measure(name: str, calls: Any, torch_forward: Any, *args: Any) -> Timing:
        timed.extend(str(node.target) for node in torch_forward.graph.nodes)
        return Timing({"ort": 1.0, "torch": 2.0}, next(iter(calls)))

    monkeypatch.setattr(timing, "samples", lambda region: [])
    monkeypatch.setattr(timing, "measure", measure)
    backend = CudaBackend(placement="measured", min_region_nodes=1)
    with torch.no_grad():
        torch.compile(function, backend=backend)(torch.rand(4, 8) * 0.1, torch.tensor([1, 2, 3, 1]))
    reasons = {
        name.split(".")[1]: reason
        for graph in backend.report.graphs
        for region in graph.regions
        for name, reason in region.node_reasons.items()
    }
    assert not backend.report.fallbacks
    if is_safe:
        assert not [reason for reason in reasons.values() if reason.type is ReasonType.NOT_TIMED]
        assert any(word.startswith(f"aten.{op}.") for word in timed) or op in reasons  # for another reason
    else:
        assert not any(word.startswith(f"aten.{op}.") for word in timed)
        assert reasons[op].type is ReasonType.NOT_TIMED
