"""The private names of torch that recordings of inductor's need still exist and mean the same."""

import math

import pytest
import torch

from lightning_ort.compat import torch as compat


def test_storage_id() -> None:
    x = torch.zeros(2, 3)
    assert compat.storage_id(x) == compat.storage_id(x.t()[1:]) != compat.storage_id(x.clone())
    assert compat.storage_id(3) is None
    assert compat.storage_id(x.to_sparse()) is None


def test_copies_of() -> None:
    tensors = [torch.tensor([-0.0, math.inf, 1e-45]), torch.ones(2, 3).t(), torch.ones(2, dtype=torch.bfloat16)]
    for copy, tensor in zip(compat.copies_of(tensors), tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert torch.equal(copy.signbit(), tensor.signbit())
        assert (copy.dtype, copy.stride()) == (tensor.dtype, tensor.stride())
        assert copy.data_ptr() != tensor.data_ptr()


def test_inductor_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx

    compile_fx = lambda gm, inputs, config_patches, **kwargs: (gm, inputs, config_patches)  # noqa: E731
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    assert compat.inductor_backend({"fallback_random": True})("gm", "inputs") == (  # type: ignore[arg-type,comparison-overlap]
        "gm",
        "inputs",
        {"fallback_random": True},
    )
