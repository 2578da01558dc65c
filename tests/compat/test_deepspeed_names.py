"""What is used of DeepSpeed without being documented is still there and means the same."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from lightning_ort.compat import deepspeed as compat
from lightning_ort.compat import lightning
from lightning_ort.optim.shard_files import load

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    script = Path(__file__).with_name("deepspeed_engine.py")  # DeepSpeed keeps much for the whole process
    done = subprocess.run([sys.executable, script, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def facts(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "facts.pt", weights_only=False)


@pytest.fixture
def saved(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    (model,), ((rank, optimizer),) = compat.checkpoint_files(compat.checkpoint_folder(folder / "saved"))
    assert rank == 0
    return load(model), load(optimizer)["optimizer_state_dict"]  # all their classes are in CHECKPOINT_CLASSES


def test_accelerator(facts: dict[str, Any]) -> None:
    assert facts["accelerator"] == (None if torch.cuda.is_available() else "cpu")
    assert facts["accelerator after"] is None
    assert facts["device"] == "cpu"
    assert facts["compiles"] is False
    assert facts["restored"] is True


def test_forward_hooks(facts: dict[str, Any]) -> None:
    assert len(facts["hooks"]) == 2
    assert facts["hooks"] == facts["module's hooks"]
    assert facts["no engine"] == []


def test_flattened_groups(facts: dict[str, Any]) -> None:
    assert [sorted(group) for group in facts["groups"]] == [[0, 3], [1, 2, 4]]
    assert facts["same optimizer"] is True
    assert facts["device of parameters"] == "cpu"


def test_master_weights(facts: dict[str, Any]) -> None:
    assert [facts[f"copied {index}"] for index in (0, 1)] == [2, 3]
    assert [facts[f"written {index}"] for index in (0, 1)] == [9, 9]


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing does not exist"):
        compat.checkpoint_folder(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no file 'latest'"):
        compat.checkpoint_folder(tmp_path)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(ValueError, match="which is not in it"):
        compat.checkpoint_folder(tmp_path)


def test_file_names(tmp_path: Path) -> None:
    for name in ("zero_pp_rank_10_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"):
        (tmp_path / name).touch()
    assert [rank for rank, _ in compat.checkpoint_files(tmp_path)[1]] == [2, 10]


def test_entries(saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert compat.passed_entries(saved[0]) == {"epoch": 3}


def test_saved_weights(saved: tuple[dict[str, Any], dict[str, Any]], facts: dict[str, Any]) -> None:
    model, shard = saved
    weights = compat.unpartitioned_weights(model)
    assert sorted(weights) == ["0.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert weights["1.running_mean"].dtype is torch.float32
    shapes = model["param_shapes"]
    for index, group in enumerate(shapes):
        partition = compat.saved_master_partition(shard, index)
        for (name, shape), offset in zip(group.items(), compat.saved_offsets(shard, shapes, index), strict=True):
            weights[name] = partition[offset : offset + shape.numel()].view(shape)
    assert weights.keys() == facts["weights"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, facts["weights"][name], rtol=0, atol=0)
    assert compat.tied_weights(model) == {}


def test_saved_optimizer(saved: tuple[dict[str, Any], dict[str, Any]], facts: dict[str, Any]) -> None:
    state = compat.saved_optimizer(saved[1])
    assert [group["params"] for group in state["param_groups"]] == [[0], [1]]
    for index in (0, 1):
        size = compat.saved_master_partition(saved[1], index).numel()
        assert torch.equal(state["state"][index]["exp_avg"][:size], facts["state"][index]["exp_avg"][:size])


# Lightning's DeepSpeedStrategy


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_format_config", []),
        ("_format_batch_size_and_grad_accum_config", []),
        ("_auto_select_batch_size", []),
        ("_init_optimizers", []),
        ("_initialize_deepspeed_train", ["model"]),
        ("_initialize_deepspeed_inference", ["model"]),
        ("_set_node_environment_variables", []),
    ],
)
def test_methods_that_the_strategy_overrides(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(DeepSpeedStrategy, name)).parameters) == ["self", *parameters]
    callers = [value for key, value in vars(DeepSpeedStrategy).items() if key != name and callable(value)]
    assert any(name in value.__code__.co_names for value in callers if inspect.isfunction(value))


def test_attributes_that_the_strategy_sets() -> None:
    strategy = DeepSpeedStrategy()
    assert strategy._config_initialized is False
    assert strategy._start_method == DDPStrategy()._start_method == "popen"
    assert issubclass(DeepSpeedStrategy.__mro__[1], DDPStrategy)
    assert hasattr(strategy, "_process_group_backend")


def test_training_data() -> None:
    trainer = Trainer(logger=False, accelerator="cpu")
    for module, expected in ((LightningModule(), False), (BoringModel(), True)):
        trainer.fit_loop._data_source.instance = module
        assert lightning.has_training_data(trainer) is expected


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)])
def test_dtype(precision: Any, dtype: torch.dtype) -> None:
    assert lightning.deepspeed_dtype(DeepSpeedPrecision(precision)) is dtype
