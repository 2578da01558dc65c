"""What the report advises on a GPU, told of modules, loaders and optimizers as they would be there."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_ort import ORTConfig
from lightning_ort.strategies.advice import advice_for

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: True)


def trainer(**changes: Any) -> Any:
    loader = DataLoader([0], pin_memory=True)
    return SimpleNamespace(**{"precision": "bf16-mixed", "optimizers": [], "train_dataloader": loader, **changes})


def advice(module: nn.Module | None = None, config: Any = None, **changes: Any) -> str:
    return "\n".join(advice_for(trainer(**changes), module or nn.Linear(64, 128), CUDA, ORTConfig(**(config or {}))))


def test_nothing_to_advise() -> None:
    assert advice() == ""
    assert advice_for(trainer(precision="32-true"), nn.Linear(65, 7), torch.device("cpu"), ORTConfig()) == []


def test_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "bf16-mixed" in advice(precision="32-true")
    assert "TF32" not in advice(precision="32-true")
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="ieee"))
    assert "TF32" in advice(precision="32-true")
    assert advice() == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert advice(precision="32-true") == ""


def test_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(64, 64)
    module.config = SimpleNamespace(_attn_implementation="eager")
    assert "attn_implementation" in advice(module)
    module.config._attn_implementation = "sdpa"
    assert advice(module) == ""
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert "enable_flash_sdp" in advice(module)


def test_optimizers() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    assert "AdamW is not fused" in advice(optimizers=[torch.optim.AdamW(parameters)])
    assert advice(optimizers=[torch.optim.AdamW(parameters, fused=True)]) == ""
    assert advice(optimizers=[torch.optim.Rprop(parameters)]) == ""  # has no fused form


def test_channels_last() -> None:
    module = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 1))
    assert "channels_last" in advice(module)
    assert advice(module.to(memory_format=torch.channels_last)) == ""


def test_sizes() -> None:
    assert "0 (50257, 64)" in advice(nn.Sequential(nn.Embedding(50257, 64)))
    assert advice(nn.Sequential(nn.Embedding(50304, 64), nn.Linear(64, 10))) == ""  # few classes are no matter
    assert "and 2 more" in advice(nn.Sequential(*[nn.Linear(100, 64) for _ in range(5)]))


def test_data_and_recordings() -> None:
    assert "pin_memory" in advice(train_dataloader=DataLoader([0]))
    assert "pin_memory" in advice(train_dataloader={"a": [DataLoader([0])]})
    assert "CUDA graphs" in advice(config={"dynamic": True})
