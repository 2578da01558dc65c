"""``lightning-ort memory``: what is predicted is what is allocated."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ort.cli import main
from lightning_ort.optim.memory import STATES, measure, predict

ROOT = Path(__file__).parents[2]


def network() -> nn.Module:
    linear = (nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 128), nn.Linear(128, 2))
    return nn.Sequential(nn.Embedding(100, 64), *linear)


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "memory", *args])
    monkeypatch.setenv("COLUMNS", "200")
    main()


MEASURED = (
    "adamw_torch_fused",
    "adamw_torch_foreach",
    "adamw_bnb_8bit",
    "lion_8bit",
    "adafactor",
    "adamw_anyprecision",
)


@pytest.mark.parametrize("name", MEASURED)
def test_predicted_equals_measured(name: str) -> None:
    if "bit" in name:
        pytest.importorskip("bitsandbytes")
    module = network()
    before = [p.detach().clone() for p in module.parameters()]
    predicted, measured = predict(module, name), measure(module, name)
    # beyond theory: a step count for each tensor, and bitsandbytes' two tables of codes
    overhead = 4 * len(before) + (2 * 256 * 4 if "bit" in name else 0)
    assert predicted.states <= measured.states <= predicted.states + overhead
    assert (predicted.parameters, predicted.gradients) == (measured.parameters, measured.gradients)
    assert all(torch.equal(x, y) for x, y in zip(before, module.parameters(), strict=True))


def test_theory() -> None:
    module = nn.Linear(1024, 1024, bias=False)
    assert predict(module, "adamw_torch_fused").states_per_element == 8
    assert predict(module, "adamw_bnb_8bit").states_per_element == pytest.approx(2 + 8 / 256)
    assert predict(module, "adamw_torchao_4bit").states_per_element == pytest.approx(1 + 8 / 128)
    assert predict(module, "adafactor").states == 4 * 2048
    half = predict(module, "adamw_torch_fused").per_rank(2)
    assert half == module.weight.nbytes * 2 + module.weight.numel() * 4


def test_t5_3b_on_the_meta_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The classical table of a T5 with 3 billion parameters: 24 GB of states for AdamW, 6 GB with 8 bits."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(ROOT / "examples" / "memory"))
    from t5_3b import t5_3b

    with torch.device("meta"):
        module = t5_3b()
    billions = sum(p.numel() for p in module.parameters()) / 1e9
    assert round(billions) == 3
    assert predict(module, "adamw_torch_fused").states / 1e9 == pytest.approx(8 * billions)
    # embeddings keep 32 bits
    assert 2 * billions < predict(module, "adamw_bnb_8bit").states / 1e9 < 2.2 * billions
    options = ("--optim", "adamw_torch_fused", "adamw_bnb_8bit", "--ranks", "4")
    run(monkeypatch, f"{ROOT}/examples/memory/t5_3b.py:t5_3b", *options)
    out = capsys.readouterr().out
    assert "22.8 GB" in out
    assert "each of 4 ranks" in out


def test_measure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    options = ("--measure", "true", "--optim", "adamw_torch_fused")
    run(monkeypatch, "torch.nn:Linear", "--args", '{"in_features": 64, "out_features": 64}', *options)
    assert "33.3 kB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["torch.nn"], "write it as"),
        (["torch.nn:Linea"], "Linea"),
        (["no_such_package:x"], "no_such_package"),
        (["builtins:dict"], "torch.nn.Module"),
        (["torch.nn:ReLU"], "no parameter"),
        (["torch.nn:Linear", "--args", '{"in_features": 4, "out_features": 4}', "--optim", "adam"], "choose one of"),
    ],
)
def test_bad_input(args: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, *args)


def test_every_prediction_is_of_a_known_name() -> None:
    from typing import get_args

    from lightning_ort.optim.registry import OptimName

    assert set(STATES) <= set(get_args(OptimName))


def test_auto_and_keep_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "memory", "torch.nn:Linear", "--ranks", "2", "8", "--measure"])
    sys.argv += ["--args", '{"in_features": 64, "out_features": 64}', "--optim", "auto", "keep", "adamw_torch_foreach"]
    monkeypatch.setenv("COLUMNS", "80")
    main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [index for index, line in enumerate(lines) if "33.3 kB" in line]
    assert [lines[index].split()[0] for index in rows] == ["auto", "keep", "adamw_torch_foreach"]
    assert len(rows) == 3
    assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
    assert all(lines[index].count("33.3 kB") == 2 and lines[index].count(" kB") == 5 for index in rows)  # whole rows
    assert "torch's AdamW" in lines[-2]
