"""Each private name of torch's optimizers and files is still there and means the same."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_ort.compat import torch_optimizers as compat


def make(cls: type[optim.Optimizer] = optim.AdamW, **kwargs: Any) -> optim.Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return cls([parameter], lr=0.1, **kwargs)


def test_load_state_dict_hooks() -> None:
    optimizer, calls = make(), []

    def before(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "seen": state_dict.get("seen", 0) + 1}

    def changes_nothing(optimizer: Any, state_dict: dict[str, Any]) -> None:
        pass

    for hook in (before, changes_nothing, before):
        optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.register_load_state_dict_post_hook(calls.append)
    assert compat.load_state_dict_pre_hooks(optimizer) == [before, changes_nothing, before]
    assert compat.run_load_state_dict_pre_hooks(optimizer, {}) == {"seen": 2}
    compat.run_load_state_dict_post_hooks(optimizer)
    assert calls == [optimizer]
    optimizer.load_state_dict(optimizer.state_dict())  # torch calls the same hooks
    assert calls == [optimizer] * 2


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_are_unscaled_by_the_scaler(inside: bool) -> None:
    optimizer = make(fused=True)
    gradient = optimizer.param_groups[0]["params"][0].grad
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    gradient.mul_(4)
    if inside:
        with compat.unscaled_by_scaler(optimizer):
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    # a fused optimizer with the mark gets the scale, and unscales the gradients itself
    assert hasattr(optimizer, "grad_scale") is False
    assert compat.pop_amp_scaling_mark(optimizer) is True
    assert compat.pop_amp_scaling_mark(optimizer) is None


def test_the_mark_makes_the_scaler_pass_the_scale_on() -> None:
    seen = []
    for unmark in (False, True):
        optimizer = make(fused=True)
        if unmark:
            compat.pop_amp_scaling_mark(optimizer)
        optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(getattr(optimizer, "grad_scale", None)))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
    assert seen == [4.0, None]


def test_attributes_that_do_not_depend_on_the_class() -> None:
    optimizer = make(fused=True)
    optimizer.note = "the user's"
    optim.lr_scheduler.StepLR(optimizer, 1)
    kept = compat.attributes_without_class(optimizer)
    assert kept["note"] == "the user's"
    assert "_optimizer_step_pre_hooks" in kept
    assert not {"state", "defaults", "param_groups", "step"} & kept.keys()
    # those of the class have its name in them, or depend on its arguments
    other = compat.attributes_without_class(make(optim.SGD))
    assert {key for key in vars(optimizer).keys() - kept.keys() if key.startswith("_")} == {
        "_zero_grad_profile_name",
        "_step_supports_amp_scaling",
    }
    assert "AdamW" not in repr(kept)
    assert "SGD" not in repr(other)


def test_schedulers_see_counted_steps() -> None:
    optimizer = make()
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    del optimizer.step  # what the scheduler has put there
    compat.count_steps_for_schedulers(optimizer)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if it finds no wrapper, and if it was not called
        scheduler.step()
    unaware = make()
    scheduler = optim.lr_scheduler.StepLR(unaware, 1)
    del unaware.step
    unaware.step()
    with pytest.warns(UserWarning, match="overridden"):
        scheduler.step()


def test_shard_of() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = ZeroRedundancyOptimizer([parameter], optim.AdamW, lr=0.1)
        parameter.grad = torch.ones(3)
        optimizer.step()
        assert type(compat.shard_of(optimizer)) is optim.AdamW
        assert "exp_avg" in compat.shard_of(optimizer).state[parameter]
    finally:
        torch.distributed.destroy_process_group()


def test_inner_tensors() -> None:
    plain = torch.ones(2)
    assert compat.inner_tensors(plain) == [plain]
    nested = torch.nested.nested_tensor([plain, torch.ones(3)], layout=torch.jagged)
    values, offsets = compat.inner_tensors(nested)[:2]
    assert values.tolist() == [1] * 5
    assert offsets.tolist() == [0, 2, 5]


class Unknown:
    pass


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_load_says(zipped: bool, tmp_path: Path) -> None:
    torch.save({"a": Unknown()}, tmp_path / "file", _use_new_zipfile_serialization=zipped)
    with pytest.raises(Exception, match="Unsupported global") as error:
        torch.load(tmp_path / "file", weights_only=True)
    assert compat.refused_global(error.value) == [f"{__name__}.Unknown"]
    assert compat.unpickling_reason(error.value).startswith("Unsupported global: GLOBAL")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(Exception, match=".") as error:
        torch.load(tmp_path / "text", weights_only=True)
    assert compat.refused_global(error.value) == []
    assert "trust" not in compat.unpickling_reason(error.value)
