"""``lightning-ort convert``: DeepSpeed's directory becomes a file that any strategy loads."""

import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ort.cli import main


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


def test_frozen_parameters_under_stage_1(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = directory / "checkpoint" / "mp_rank_00_model_states.pt"
    torch.save(
        torch.load(file, weights_only=True) | {"frozen_param_shapes": None, "frozen_param_fragments": None}, file
    )
    run(monkeypatch, directory, tmp_path / "plain.ckpt")
    weights = torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"]
    assert sorted(weights) == ["a", "b", "c", "frozen"]
    assert weights["frozen"].tolist() == [1, 1]


def test_a_part_is_missing(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    next(directory.glob("*/zero_pp_rank_1*")).unlink()
    with pytest.raises(SystemExit, match="1 processes, but 2 saved"):
        run(monkeypatch, directory, tmp_path / "plain.ckpt")
    assert not (tmp_path / "plain.ckpt").exists()


def test_nothing_is_overwritten(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain.ckpt").write_text("mine")
    with pytest.raises(SystemExit, match="already exists"):
        run(monkeypatch, directory, tmp_path / "plain.ckpt")
    assert (tmp_path / "plain.ckpt").read_text() == "mine"


def test_not_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no file 'latest'"):
        run(monkeypatch, tmp_path, tmp_path / "plain.ckpt")


class Hostile:
    """Writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_hostile_checkpoint(
    name: str, form: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file, ran = directory / "checkpoint" / name, tmp_path / "ran"
    content = torch.load(file, weights_only=True)
    content["hyper_parameters"] = {"a": Hostile(ran)}
    if form == "pickle":
        file.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(SystemExit, match="_load_from_bytes.*--trust" if form == "pickle" else "exec.*--trust"):
        run(monkeypatch, directory, tmp_path / "plain.ckpt")
    assert not ran.exists()
    assert not (tmp_path / "plain.ckpt").exists()
    if form != "pickle":  # which torch.load refuses in any case
        run(monkeypatch, directory, tmp_path / "plain.ckpt", "--trust")
        assert ran.exists()
        assert "4 tensors" in capsys.readouterr().out


def test_hyperparameters_that_are_objects_need_trust(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = directory / "checkpoint" / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=True)
    torch.save({**content, "hyper_parameters": {"folder": Path("data")}}, file)
    with pytest.raises(SystemExit, match=r"pathlib\.(_local\.)?PosixPath.*--trust"):
        run(monkeypatch, directory, tmp_path / "plain.ckpt")
    run(monkeypatch, directory, tmp_path / "plain.ckpt", "--trust")
    assert torch.load(tmp_path / "plain.ckpt", weights_only=False)["hyper_parameters"] == {"folder": Path("data")}


GARBAGE = {"empty": b"", "text": b"hello\n", "zip": b"PK\x03\x04" + bytes(99), "binary": bytes(range(256)) * 9}


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("name", ["latest", "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_damaged_files(kind: str, name: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = directory.rglob(name)
    file.write_bytes(GARBAGE[kind])
    with pytest.raises(SystemExit, match="is not a"):
        run(monkeypatch, directory, tmp_path / "plain.ckpt")
    assert not (tmp_path / "plain.ckpt").exists()


@pytest.mark.parametrize("content", [1, [], {}, {"optimizer_state_dict": 1}, {"dp_world_size": "two"}])
@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_other_content(
    content: Any, name: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(content, directory / "checkpoint" / name)
    with pytest.raises(SystemExit, match="is not a DeepSpeed checkpoint"):
        run(monkeypatch, directory, tmp_path / "plain.ckpt")


def test_latest_names_no_other_place(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "checkpoint").rename(tmp_path / "elsewhere")
    (directory / "latest").write_text("../elsewhere")
    with pytest.raises(SystemExit, match="which is not in it"):
        run(monkeypatch, directory, tmp_path / "plain.ckpt")


def test_output_that_cannot_be_written(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="file"):
        run(monkeypatch, directory, tmp_path / "file" / "plain.ckpt")


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.filterwarnings("ignore")
def test_as_deepspeed_puts_it_together(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers, frozen, shared and padded parameters, and the objects that DeepSpeed adds."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    file = directory / "checkpoint" / "mp_rank_00_model_states.pt"
    model = torch.load(file, weights_only=True)
    model["module"] |= {"mean": torch.ones(2, dtype=torch.bfloat16), "count": torch.tensor(3)}
    model |= {"buffer_names": ["mean", "count"], "shared_params": {"tied": "a"}}
    torch.save(model, file)
    for rank, path in enumerate(sorted(directory.glob("*/zero_pp*"))):
        states = shard(rank)
        states["param_alignment_paddings"] = [[1, 0], [0]]
        states["loss_scaler"] = LossScaler(scale=1)
        states["zero_stage"] = ZeroStageEnum.optimizer_states
        states["param_slice_mappings"] = [{"a": fragment_address(2, 0)}]
        torch.save({"optimizer_state_dict": states}, path)
    run(monkeypatch, directory, tmp_path / "plain.ckpt")
    weights = torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"]
    expected = get_fp32_state_dict_from_zero_checkpoint(str(directory))
    assert list(weights) == list(expected)
    assert weights["b"].tolist() == [11]  # behind a padding of one
    for name, value in expected.items():
        assert weights[name].dtype == value.dtype
        assert torch.equal(weights[name], value)
