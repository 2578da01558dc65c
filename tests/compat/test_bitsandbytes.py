"""The states of bitsandbytes' and torchao's optimizers still have the form that is converted."""

import pytest
import torch
from torch import nn

from lightning_ort.compat import bitsandbytes, torchao

SIZES = (64 * 70, 10)  # with 8-bit states, the last block incomplete, and with 32-bit states


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    bnb = pytest.importorskip("bitsandbytes")
    parameters = [nn.Parameter(torch.ones(size)) for size in SIZES]
    optimizer = bnb.optim.AdamW8bit(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.linspace(-1, 1, parameter.numel())
    optimizer.step()
    return optimizer


def test_flatten_state(optimizer: torch.optim.Optimizer) -> None:
    saved = optimizer.state_dict()["state"]
    assert any(isinstance(value, dict) for value in saved[0].values())
    for number, state in enumerate(optimizer.state.values()):
        assert bitsandbytes.flatten_state(saved[number]).keys() == state.keys()
    plain = {"step": 1, "exp_avg": torch.ones(1)}
    assert bitsandbytes.flatten_state(plain) == plain


def test_is_state(optimizer: torch.optim.Optimizer) -> None:
    assert all(map(bitsandbytes.is_state, optimizer.state.values()))
    assert not bitsandbytes.is_state({"step": 1, "exp_avg": torch.ones(1)})


def test_to_torch(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        assert (state["state1"].dtype is torch.uint8) is (parameter.numel() == SIZES[0])
        plain = bitsandbytes.to_torch(state)
        assert plain["step"] == 1
        torch.testing.assert_close(plain["exp_avg"], 0.1 * parameter.grad, rtol=0, atol=2e-3)
        torch.testing.assert_close(plain["exp_avg_sq"], 0.001 * parameter.grad**2, rtol=0, atol=2e-5)


def test_block_size(optimizer: torch.optim.Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    assert len(state["absmax1"]) == -(-SIZES[0] // bitsandbytes.BLOCK_SIZE)


def test_load_torch_state(optimizer: torch.optim.Optimizer) -> None:
    parameters = optimizer.param_groups[0]["params"]
    for index, parameter in enumerate(parameters):
        saved = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.linspace(-3, 3, parameter.numel()),
            "exp_avg_sq": torch.linspace(0, 2, parameter.numel()),
        }
        bitsandbytes.load_torch_state(optimizer, 0, index, saved)
        loaded = bitsandbytes.to_torch(optimizer.state[parameter])
        assert loaded["step"] == 7
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(loaded[key], saved[key], rtol=0, atol=0.05)
    optimizer.step()


def test_get_config_decides_on_the_states() -> None:
    bnb = pytest.importorskip("bitsandbytes")

    class Mine(bnb.optim.AdamW8bit):
        def get_config(self, gindex: int, pindex: int, group: dict) -> dict:
            return {**super().get_config(gindex, pindex, group), "optim_bits": 32}

    parameter = nn.Parameter(torch.ones(SIZES[0]))
    parameter.grad = torch.ones_like(parameter)
    optimizer = Mine([parameter], lr=0.1)
    optimizer.step()
    assert optimizer.state[parameter]["state1"].dtype is torch.float32


def test_torchao() -> None:
    ao = pytest.importorskip("torchao.optim")
    parameter = nn.Parameter(torch.ones(SIZES[0]))
    optimizer = ao.AdamW8bit([parameter])
    value = torch.linspace(-1, 1, parameter.numel())
    quantized = torchao.quantize(optimizer, parameter, "exp_avg", value)
    assert torchao.is_quantized(quantized)
    torch.testing.assert_close(quantized.dequantize(), value, rtol=0, atol=0.02)
    unsigned = torchao.quantize(optimizer, parameter, "exp_avg_sq", value.abs())
    torch.testing.assert_close(unsigned.dequantize(), value.abs(), rtol=0, atol=0.02)


def test_plain_tensors_are_not_quantized() -> None:
    assert not torchao.is_quantized(torch.ones(2))
    assert not torchao.is_quantized(nn.Parameter(torch.ones(2)))
    assert not torchao.is_quantized(2)
