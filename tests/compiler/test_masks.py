"""Masks of captured graphs are eager's, and leave the generator where eager would."""

import torch
import torch.nn.functional as F

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.config import ORTConfig


def test_dropout_of_a_compiled_function() -> None:
    w = torch.randn(64, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x @ w, 0.1).relu() @ w, 0.5) + torch.rand(64)

    x = torch.randn(100, 64)
    torch.manual_seed(3)
    expected = function(x), torch.rand(5)
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None))
    compiled = torch.compile(function, backend=backend)
    for _ in range(2):
        torch.manual_seed(3)
        torch.testing.assert_close((compiled(x), torch.rand(5)), expected)
    assert backend.report.ort_runs > 0


def test_masks_among_other_random_numbers_are_drawn_in_their_order() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1) @ torch.rand(512, 512) @ F.dropout(x, 0.3).t()

    x = torch.randn(512, 512)
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None))
    compiled = torch.compile(function, backend=backend)
    for _ in range(3):
        torch.manual_seed(5)
        expected = function(x), torch.rand(3)
        torch.manual_seed(5)
        torch.testing.assert_close((compiled(x), torch.rand(3)), expected, rtol=1e-4, atol=1e-3)
    assert backend.report.ort_runs > 0
