"""``lightning-ort convert``: DeepSpeed's directory becomes a file that any strategy loads."""

import sys
from pathlib import Path

import pytest
import torch

from lightning_ort.cli import main

pytest.importorskip("deepspeed")


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ort", "convert", *map(str, args)])
    main()


def shard(rank: int) -> dict:
    """One of two processes: two groups, of 5 + 2 padding and of 2 elements, and AdamW's states."""
    values = torch.arange(8.0) if rank == 0 else torch.arange(8.0, 16.0)
    pieces = [values[:4], values[4:6]]
    states = {i: {"step": torch.tensor(3.0), "exp_avg": piece * 10} for i, piece in enumerate(pieces)}
    groups = [{"params": [0], "lr": 0.1}, {"params": [1], "lr": 0.2}]
    return {
        "base_optimizer_state": {"state": states, "param_groups": groups},
        "single_partition_of_fp32_groups": pieces,
        "zero_stage": 1,
        "partition_count": [2, 2],
        "group_paddings": [0, 0],
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """What two processes would have saved."""
    folder = tmp_path / "run.ckpt" / "checkpoint"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("checkpoint")
    model = {
        "module": {"a": torch.zeros(2, 3), "b": torch.zeros(1), "frozen": torch.ones(2), "c": torch.zeros(3)},
        "buffer_names": [],
        "param_shapes": [{"a": torch.Size([2, 3]), "b": torch.Size([1])}, {"c": torch.Size([3])}],
        "frozen_param_shapes": {"frozen": torch.Size([2])},
        "frozen_param_fragments": {"frozen": torch.ones(2)},
        "shared_params": {},
        "dp_world_size": 2,
        "ds_version": "0.19.8",
        "global_step": 3,
        "optimizer_parameter_names": [["frozen", "a", "b"], ["c"]],
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(2):
        torch.save({"optimizer_state_dict": shard(rank)}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder.parent


def test_whole(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "plain.ckpt"
    run(monkeypatch, directory, output)
    checkpoint = torch.load(output, weights_only=True)
    assert checkpoint["global_step"] == 3
    weights = checkpoint["state_dict"]
    assert sorted(weights) == ["a", "b", "c", "frozen"]
    assert weights["a"].tolist() == [[0, 1, 2], [3, 8, 9]]
    assert weights["b"].tolist() == [10]
    assert weights["c"].tolist() == [4, 5, 12]
    (states,) = checkpoint["optimizer_states"]
    assert [group["params"] for group in states["param_groups"]] == [[0, 1, 2], [3]]
    assert sorted(states["state"]) == [1, 2, 3]  # 0 is frozen
    assert states["state"][1]["exp_avg"].tolist() == [[0, 10, 20], [30, 80, 90]]
    assert states["state"][3]["exp_avg"].tolist() == [40, 50, 120]
    assert states["state"][3]["step"] == 3


def test_a_part_is_missing(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next(directory.glob("*/zero_pp_rank_1*")).unlink()
    with pytest.raises(SystemExit, match="1 processes, and 2 saved"):
        run(monkeypatch, directory, tmp_path / "plain.ckpt")
    assert not (tmp_path / "plain.ckpt").exists()


def test_nothing_is_overwritten(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain.ckpt").write_text("mine")
    with pytest.raises(SystemExit, match="exists already"):
        run(monkeypatch, directory, tmp_path / "plain.ckpt")
    assert (tmp_path / "plain.ckpt").read_text() == "mine"


def test_not_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no file 'latest'"):
        run(monkeypatch, tmp_path, tmp_path / "plain.ckpt")
