"""CUDA without a GPU: what every region becomes, how its session is built, and how its runs are ordered with torch's.

On a GPU: ``tests/strategies/test_gpu.py``.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ort.compiler.report import ReasonType
from tests.compiler.fake_cuda import CudaBackend, FakeCuda, autocast
from tests.strategies.parity_models import BERT, CLASSES, CNN, GPT, MLP, Block


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.zeros(1, 17, 32))
        self.blocks = nn.ModuleList(Block(32, 4, dropout=0.1) for _ in range(2))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1) + self.places
        mask = torch.zeros(17, 17, dtype=torch.bool, device=x.device)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x[:, 0])


def step_of(kind: Any) -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    """A module, its loss, and a batch."""
    module, labels = kind(), torch.zeros(2, dtype=torch.long)
    if kind is GPT:
        tokens = torch.zeros(2, 12, dtype=torch.long)
        return module, lambda x: F.cross_entropy(module(x).flatten(0, 1), x.flatten()), (tokens,)
    if kind is BERT:
        return module, lambda x, y: module.bert(input_ids=x, labels=y).loss, (torch.zeros(2, 8, dtype=torch.long), labels)
    shape = (3, 16, 16) if kind is ViT else kind.shape
    return module, lambda x, y: F.cross_entropy(module(x), y), (torch.randn(2, *shape), labels)


@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("kind", [GPT, BERT, ViT, CNN, MLP], ids=lambda kind: kind.__name__)
def test_every_region_converts(kind: Any, precision: str, cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    if kind is BERT:
        pytest.importorskip("transformers")
    dtype = {"16": torch.float16, "bf": torch.bfloat16}.get(precision[:2])
    is_true = precision.endswith("true")
    module, loss_of, batch = step_of(kind)
    if dtype is not None and is_true:
        module.to(dtype)
        batch = tuple(x.to(dtype) if x.is_floating_point() else x for x in batch)
    backend = CudaBackend()
    with autocast(None if is_true else dtype):
        loss = torch.compile(loss_of, backend=backend)(*batch)
    loss.backward()
    report = backend.report
    assert not report.fallbacks
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    regions = [region for graph in report.graphs for region in graph.regions if region.executor == "ort"]
    assert len(cuda.sessions) == len(regions) >= 2  # forward and backward; each model went through the checker
    reasons = [reason for graph in report.graphs for region in graph.regions for reason in region.node_reasons.values()]
    allowed = {ReasonType.BETTER_IN_TORCH, ReasonType.RANDOM, ReasonType.NO_KERNEL, ReasonType.NO_CONVERTER}
    assert {reason.type for reason in reasons} <= allowed | {ReasonType.TOO_SMALL, ReasonType.UNSUPPORTED_ARGUMENTS}
    assert report.ort_node_fraction > 0.6
