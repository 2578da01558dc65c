import gc

import pytest
import torch
from torch._decomp import core_aten_decompositions

from lightning_ort.compat import first_compilation as compat


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
