"""The private names of torch that recordings of inductor's need still exist and mean the same."""

import math

import pytest
import torch

from lightning_ort.compat import inductor
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


def test_what_is_wrong_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    assert inductor.inductor_repairs(exact_masks=True) == {"triton.mix_order_reduction": False}
    masks = {"align_random_eager": True}
    assert inductor.inductor_repairs(exact_masks=False) == {"triton.mix_order_reduction": False, **masks}
    monkeypatch.setattr(torch, "__version__", "2.15.0.dev20261101+cu130")
    assert inductor.inductor_repairs(exact_masks=True) == {}
    inductor.inductor_backend(inductor.inductor_repairs(exact_masks=False))  # torch knows each


def test_random_numbers_are_drawn_in_the_order_of_eager() -> None:
    """Two branches, of which inductor would begin with the smaller one."""

    def branches(large: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
        first = torch.nn.functional.dropout(large).square().mean(0)
        return (first + torch.nn.functional.dropout(small).mean(0)).sum()

    options = {"fallback_random": True, **inductor.inductor_repairs(exact_masks=True)}
    compiled = torch.compile(branches, options=options)
    inputs = [torch.ones(size, 64, requires_grad=True) for size in (4096, 4)]
    found = []
    for function in (branches, compiled):
        torch.manual_seed(0)
        found.append(torch.autograd.grad(function(*inputs), inputs))
    torch.testing.assert_close(found[1], found[0])


def test_inductor_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx

    compile_fx = lambda gm, inputs, config_patches, **kwargs: (gm, inputs, config_patches)  # noqa: E731
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    assert inductor.inductor_backend({"fallback_random": True})("gm", "inputs") == (  # type: ignore[arg-type,comparison-overlap]
        "gm",
        "inputs",
        {"fallback_random": True},
    )


def test_each_pass_may_be_stopped_before_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx

    compiled: list[int] = []
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", lambda gm, *args, **kwargs: compiled.append(1))

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        torch.compile(lambda x: x.exp(), backend=inductor.inductor_backend({}, stop))(torch.ones(2, requires_grad=True))
    assert compiled == []


def _edit(gm: torch.fx.GraphModule) -> None:
    gm.meta["edited"] = True


def test_joint_pass() -> None:
    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    inductor.joint_pass([_edit])(gm.graph)
    assert gm.meta["edited"] is True
    assert inductor.joint_pass([_edit]).uuid() is not None


def test_has_triton() -> None:
    assert isinstance(inductor.has_triton(), bool)
