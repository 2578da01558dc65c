"""Optimizers by another implementation, without Lightning: the same values, in the user's own object."""

import copy
import gc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Literal
from unittest import mock

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.imports import RequirementCache
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ort.optim import fused, registry
from lightning_ort.optim.anyprecision import AnyPrecisionAdamW
from lightning_ort.optim.replacement import replace_in_place
from lightning_ort.optim.swap import OptimizerSwap

CPU = torch.device("cpu")
bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


class Net(nn.Module):
    """Has tensors above and below the size from which bitsandbytes quantizes, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(100, 64)
        self.large, self.small = nn.Linear(64, 128), nn.Linear(128, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.small(torch.tanh(self.large(self.embedding(tokens))))


def swap(name: str, module: nn.Module, optimizer: optim.Optimizer, **settings: Any) -> Any:
    return OptimizerSwap(name, **settings).apply(module, [optimizer], CPU)[0]


def train(module: nn.Module, optimizer: optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 100, (16,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(tokens), tokens % 8)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parameters_equal(a: nn.Module, b: nn.Module, atol: float = 0.0) -> None:
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def adamw(module: nn.Module, **kwargs: Any) -> optim.AdamW:
    return optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, **kwargs)


@pytest.mark.parametrize("name", ["auto", "adamw_torch_fused", "adamw_torch_foreach", "adamw_ort_fused"])
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
def test_flags_give_the_same_values(name: str, cls: type[optim.Optimizer]) -> None:
    plain, module = Net(), Net()
    reference = cls(plain.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer = cls(module.parameters(), lr=1e-2, weight_decay=0.1)
    report = swap(name, module, optimizer)
    flag = "foreach" if name == "adamw_torch_foreach" else "fused"
    assert report.runs_as == f"torch.{cls.__name__} ({flag})"
    assert all(group[flag] is True for group in optimizer.param_groups)
    train(plain, reference, 50)
    train(module, optimizer, 50)
    parameters_equal(module, plain, atol=1e-5)


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adagrad])
def test_auto_fuses_other_classes(cls: type[optim.Optimizer]) -> None:
    plain, module = Net(), Net()
    reference, optimizer = cls(plain.parameters(), lr=0.1), cls(module.parameters(), lr=0.1)
    assert swap("auto", module, optimizer).runs_as.endswith("(fused)")
    train(plain, reference, 20)
    train(module, optimizer, 20)
    parameters_equal(module, plain, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda m: optim.AdamW(m.parameters(), foreach=False), "foreach set"),
        (lambda m: optim.AdamW(m.parameters(), fused=True), "fused set"),
        (lambda m: optim.RMSprop(m.parameters()), "no fused implementation"),
        (lambda m: optim.AdamW(m.parameters(), differentiable=True), "differentiable"),
        (lambda m: type("Mine", (optim.AdamW,), {})(m.parameters()), "no fused implementation"),
    ],
)
def test_auto_leaves_the_rest(make: Callable[[nn.Module], optim.Optimizer], reason: str) -> None:
    module = Net()
    optimizer = make(module)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    report = swap("auto", module, optimizer)
    assert report.runs_as == report.configured
    assert reason in report.reason
    assert groups == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def after_sparse_steps(name: str, cls: type[optim.Optimizer], with_closure: bool) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Embedding(4, 2)
    optimizer = cls(module.parameters(), lr=0.1)
    swap(name, module, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.embedding(torch.tensor([1, 2]), module.weight, sparse=True).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        if with_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return module, optimizer


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("cls", [optim.SGD, optim.Adagrad])
def test_auto_gives_up_at_a_sparse_gradient(
    cls: type[optim.Optimizer], with_closure: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = after_sparse_steps("keep", cls, with_closure)
    module, optimizer = after_sparse_steps("auto", cls, with_closure)
    parameters_equal(module, expected)
    assert not optimizer.param_groups[0]["fused"]
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.param_groups[0]["fused"]


def test_auto_leaves_sparse_and_complex() -> None:
    module = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    assert "sparse" in swap("auto", module, optim.SGD(module.parameters(), lr=0.1)).reason
    odd = nn.Module()
    odd.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert "complex64" in swap("auto", odd, optim.Adam(odd.parameters())).reason


def test_keep_changes_nothing() -> None:
    module = Net()
    optimizer = adamw(module)
    report = swap("keep", module, optimizer)
    assert report.runs_as == report.configured == "torch.AdamW"
    assert optimizer.param_groups[0]["fused"] is None


def test_fused_stays_fused_after_loading_a_plain_checkpoint_and_saves_a_plain_one() -> None:
    plain, module = Net(), Net()
    reference, optimizer = adamw(plain), adamw(module)
    train(plain, reference, 3)
    swap("auto", module, optimizer)
    module.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))  # torch does not copy what it need not cast
    assert optimizer.param_groups[0]["fused"] is True
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    train(plain, reference, 5, first=3)
    train(module, optimizer, 5, first=3)
    parameters_equal(module, plain, atol=1e-6)
    saved = optimizer.state_dict()
    assert saved["param_groups"] == reference.state_dict()["param_groups"]
    assert saved["state"].keys() == reference.state_dict()["state"].keys()
    assert optimizer.param_groups[0]["fused"] is True  # what was saved is a copy


REPLACEMENTS = [
    pytest.param("adamw_bnb_8bit", marks=bitsandbytes),
    pytest.param("lion_8bit", marks=bitsandbytes),
    "adafactor",
    "adamw_anyprecision",
]


@pytest.mark.parametrize("name", ["auto", *REPLACEMENTS])
def test_the_object_its_groups_and_what_hangs_on_it_stay(name: str) -> None:
    module = Net()
    groups = [
        {"params": module.embedding.parameters(), "lr": 3e-3, "weight_decay": 0.0, "mine": "kept"},
        {"params": [*module.large.parameters(), *module.small.parameters()]},
    ]
    optimizer = optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    first_group, order = optimizer.param_groups[0], [id(p) for g in optimizer.param_groups for p in g["params"]]
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *args: calls.append("hook"))
    optimizer.note = "mine"
    exponential = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    swap(name, module, optimizer)
    assert isinstance(optimizer, optim.Optimizer)
    assert optimizer.param_groups[0] is first_group
    assert order == [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert first_group["mine"] == "kept"
    assert (first_group["lr"], first_group["weight_decay"]) == (3e-3, 0.0)
    assert optimizer.param_groups[1]["weight_decay"] == 0.1
    assert optimizer.note == "mine"
    losses = train(module, optimizer, 3)
    assert calls == ["hook"] * 3
    assert all(torch.isfinite(torch.tensor(losses)))
    exponential.step()  # warns if it thinks that the optimizer has not stepped
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1.5e-3, 5e-3])
    extra = nn.Linear(4, 4)
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.1})
    extra(torch.ones(1, 4)).sum().backward()
    before = extra.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(extra.weight, before)


@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
@pytest.mark.parametrize("name", ["auto", *REPLACEMENTS])
def test_schedulers_drive_what_runs(name: str) -> None:
    module = Net()
    optimizer = adamw(module)
    warmup = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    chained = optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
    plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    swap(name, module, optimizer)
    rates = []
    for _ in range(4):
        train(module, optimizer, 1)
        chained.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(set(rates)) > 2
    plateau.step(1.0)
    plateau.step(2.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rates[-1] / 2)
    # a rate of zero is obeyed
    optimizer.param_groups[0].update(lr=0.0)
    before = copy.deepcopy(module)
    train(module, optimizer, 1)
    parameters_equal(module, before)


# 8-bit


@bitsandbytes
def test_8bit_states_and_their_exceptions() -> None:
    module = Net()
    optimizer = adamw(module)
    report = swap("adamw_bnb_8bit", module, optimizer)
    assert "8bit" in report.runs_as
    assert "GPU" in report.reason
    train(module, optimizer, 2)
    dtypes = {name: optimizer.state[p]["state1"].dtype for name, p in module.named_parameters()}
    assert dtypes.pop("large.weight") is torch.uint8
    assert set(dtypes.values()) == {torch.float32}  # the embedding, and what is small


@bitsandbytes
def test_8bit_per_module() -> None:
    module = Net()
    optimizer = adamw(module)
    swap("adamw_bnb_8bit", module, optimizer, bits={"large": 32, "embedding": 8, "small": 8})
    train(module, optimizer, 2)
    dtypes = {name: optimizer.state[p]["state1"].dtype for name, p in module.named_parameters()}
    assert dtypes["large.weight"] is dtypes["large.bias"] is torch.float32
    assert dtypes["embedding.weight"] is dtypes["small.weight"] is torch.uint8
    other = Net()
    with pytest.raises(ValueError, match="no module 'larg'"):
        swap("adamw_bnb_8bit", other, adamw(other), bits={"larg": 8})


@bitsandbytes
def test_8bit_follows_adamw() -> None:
    plain, module = Net(), Net()
    reference, optimizer = adamw(plain), adamw(module)
    swap("adamw_bnb_8bit", module, optimizer)
    expected, got = train(plain, reference, 100), train(module, optimizer, 100)
    assert expected[-1] < 0.1 * expected[0]
    assert got[-1] < 0.1 * got[0]
    assert got[:5] == pytest.approx(expected[:5], rel=0.02)


@bitsandbytes
@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "adamw_anyprecision", "adafactor", "auto"])
def test_resume_equals_the_uninterrupted_run(name: str, tmp_path: Any) -> None:
    whole, first, second = Net(), Net(), Net()
    optimizers = [adamw(module) for module in (whole, first, second)]
    for module, optimizer in zip((whole, first, second), optimizers, strict=True):
        swap(name, module, optimizer)
    train(whole, optimizers[0], 10)
    train(first, optimizers[1], 5)
    torch.save({"model": first.state_dict(), "optimizer": optimizers[1].state_dict()}, tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    second.load_state_dict(saved["model"])
    optimizers[2].load_state_dict(saved["optimizer"])
    train(second, optimizers[2], 5, first=5)
    parameters_equal(second, whole)


CONVERTIBLE = [
    pytest.param("adamw_bnb_8bit", 0.02, marks=bitsandbytes),
    ("adamw_anyprecision", 1e-2),
    pytest.param("adamw_torchao_8bit", 0.02, marks=[torchao, pytest.mark.slow]),
    pytest.param("adamw_torchao_4bit", 0.15, marks=[torchao, pytest.mark.slow]),
]


@pytest.mark.parametrize(("name", "tolerance"), CONVERTIBLE)
def test_states_of_adamw_are_converted_both_ways(name: str, tolerance: float) -> None:
    plain, module = Net(), Net()
    reference, optimizer = adamw(plain), adamw(module)
    swap(name, module, optimizer)
    train(plain, reference, 20)
    module.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    back = adamw(module)
    swap("keep", module, back)
    saved = optimizer.state_dict()
    assert type(saved["param_groups"][0]["lr"]) is float  # as it was configured, and as every implementation takes it
    back.load_state_dict(saved)
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        got, expected = back.state[parameter], reference.state[other]
        assert float(got["step"]) == float(expected["step"]) == 20
        for key in ("exp_avg", "exp_avg_sq"):
            assert got[key].dtype is torch.float32
            largest = expected[key].abs().max().item()
            torch.testing.assert_close(got[key], expected[key], rtol=0, atol=tolerance * largest)
    # and both go on
    expected_loss, got_loss = train(plain, reference, 1, first=20), train(module, optimizer, 1, first=20)
    assert got_loss == pytest.approx(expected_loss, rel=1e-5)
    train(module, back, 1, first=21)


@pytest.mark.slow
@torchao
@pytest.mark.parametrize("name", ["adamw_torchao_8bit", "adamw_torchao_4bit"])
def test_torchao(name: str) -> None:
    plain, module = Net(), Net()
    reference, optimizer = adamw(plain), adamw(module)
    assert "torchao" in swap(name, module, optimizer).runs_as
    expected, got = train(plain, reference, 60), train(module, optimizer, 60)
    assert got[-1] < 0.3 * got[0]
    assert got[:3] == pytest.approx(expected[:3], rel=0.02)
    assert type(optimizer.state[module.large.weight]["exp_avg"]) is not torch.Tensor


# anyprecision


def test_anyprecision_follows_adamw() -> None:
    plain, module = Net(), Net()
    reference, optimizer = adamw(plain), adamw(module)
    swap("adamw_anyprecision", module, optimizer)
    assert train(module, optimizer, 50) == pytest.approx(train(plain, reference, 50), rel=0.03, abs=1e-3)
    state = optimizer.state[module.large.weight]
    assert {value.dtype for key, value in state.items() if key != "step"} == {torch.bfloat16}


def test_anyprecision_keeps_small_updates_of_bfloat16_parameters() -> None:
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    lost = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    ours, plain = AnyPrecisionAdamW([parameter], lr=1e-4, weight_decay=0), optim.AdamW([lost], lr=1e-4, weight_decay=0)
    for _ in range(100):
        for p, optimizer in ((parameter, ours), (lost, plain)):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert torch.equal(lost, torch.ones_like(lost))
    torch.testing.assert_close(parameter.float(), torch.full((8,), 0.99), rtol=0, atol=0.004)


def test_anyprecision_second_moment_decays() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = AnyPrecisionAdamW([parameter], lr=1e-3)
    for step in range(400):
        parameter.grad = torch.full((4,), 1.0 if step == 0 else 0.0)
        optimizer.step()
    # bfloat16 alone would round 0.999 of a number back to the number
    torch.testing.assert_close(
        optimizer.state[parameter]["exp_avg_sq"].float(), torch.full((4,), 0.001 * 0.999**399), rtol=0.01, atol=0
    )


def test_what_rounding_took_from_the_second_moment_is_converted_both_ways() -> None:
    """A bfloat16 has 8 bits; with what is kept beside it, a second moment has 16, also in another optimizer."""
    torch.manual_seed(0)
    moment = torch.rand(64) + 1e-3
    plain = optim.AdamW([nn.Parameter(torch.zeros(64))], lr=1e-3)
    plain.param_groups[0]["params"][0].grad = torch.ones(64)
    plain.step()
    plain.state_dict()["state"][0]["exp_avg_sq"].copy_(moment)
    ours, back = (optim.AdamW([nn.Parameter(torch.zeros(64))], lr=1e-3) for _ in range(2))
    swap("adamw_anyprecision", nn.ParameterList(ours.param_groups[0]["params"]), ours)
    swap("keep", nn.ParameterList(back.param_groups[0]["params"]), back)
    ours.load_state_dict(plain.state_dict())
    assert not torch.allclose(moment.bfloat16().float(), moment, rtol=1e-3)
    back.load_state_dict(ours.state_dict())
    (state,) = back.state.values()
    torch.testing.assert_close(state["exp_avg_sq"], moment, rtol=2**-15, atol=0)
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert (state["step"].item(), state["exp_avg_sq"].dtype) == (1, torch.float32)


# bad input


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'adamw_bnb_8bit'"):
        OptimizerSwap("adam_bnb_8bit")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("auto", {"options": {"lr": 1}}),
        ("adamw_torch_fused", {"bits": {"x": 8}}),
        ("adafactor", {"min_8bit_size": 1}),
        ("adamw_bnb_8bit", {"bits": {"x": 4}}),
    ],
)
def test_settings_without_effect(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no effect|bitsandbytes|8 or 32"):
        OptimizerSwap(name, **settings)


def refused(
    name: str, make: Callable[[nn.Module], optim.Optimizer], match: str, module: nn.Module | None = None
) -> None:
    module = module or Net()
    optimizer = make(module)
    cls, contents = type(optimizer), dict(vars(optimizer))
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises((ValueError, ModuleNotFoundError), match=match):
        swap(name, module, optimizer)
    assert type(optimizer) is cls
    assert vars(optimizer) == contents
    assert optimizer.state_dict()["param_groups"] == groups


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adafactor", "adamw_anyprecision"])
def test_class_without_counterpart(name: str) -> None:
    refused(name, lambda m: optim.SGD(m.parameters(), lr=0.1), "torch.SGD, which it cannot replace")
    refused(name, lambda m: type("Mine", (optim.AdamW,), {})(m.parameters()), "cannot replace")


def test_one_of_several_refused_leaves_all() -> None:
    module = Net()
    good = optim.AdamW(module.large.parameters())
    bad = optim.SGD(module.small.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="cannot replace"):
        OptimizerSwap("adamw_anyprecision").apply(module, [good, bad], CPU)
    assert type(good) is optim.AdamW


@pytest.mark.parametrize("name", ["adafactor", "adamw_anyprecision"])
def test_hyperparameters_that_the_target_lacks(name: str) -> None:
    refused(name, lambda m: adamw(m, amsgrad=True), "amsgrad=True")
    refused(name, lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(0.1)), "number as lr")
    refused(name, lambda m: optim.Adam(m.parameters(), weight_decay=0.1), "a different algorithm")
    swap(name, module := Net(), optim.Adam(module.parameters()))  # no decay: the same algorithm
    if name == "adafactor":
        refused(name, lambda m: adamw(m, betas=(0.8, 0.9)), "betas=")


class Momentum(optim.SGD):
    """Stands for another implementation."""


def test_an_entry_of_the_table_is_all_that_another_algorithm_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.Implementation(
        path=f"{__name__}:Momentum",
        algorithm="sgd",
        replaces=(optim.SGD,),
        hyperparameters=frozenset({"lr", "momentum", "weight_decay"}),
        decouples=False,
    )
    monkeypatch.setitem(registry.REPLACEMENTS, "sgd_new", entry)  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "OptimName", Literal["sgd_new", "keep"])
    module, plain = Net(), Net()
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    optimizer, reference = (optim.SGD(each.parameters(), **settings) for each in (module, plain))
    report = swap("sgd_new", module, optimizer)
    assert (report.runs_as, report.reason) == (f"{__name__.partition('.')[0]}.Momentum", "")
    assert train(module, optimizer, 3) == train(plain, reference, 3)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(module, optimizer, 3, first=3) == train(plain, reference, 3, first=3)
    with pytest.raises(ValueError, match="states are those of adam"):
        optimizer.load_state_dict(trained_adamw())
    refused("sgd_new", adamw, "replaces torch.optim.SGD, but .* returned torch.AdamW")
    refused("sgd_new", lambda m: optim.SGD(m.parameters(), momentum=0.9, nesterov=True), "nesterov of torch's SGD")


def trained_adamw() -> dict[str, Any]:
    optimizer = adamw(module := Net())
    train(module, optimizer, 1)
    return optimizer.state_dict()


def test_weight_decay_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.Implementation(path=f"{__name__}:Momentum", decouples=False)
    monkeypatch.setitem(registry.REPLACEMENTS, "adamw_anyprecision", entry)  # type: ignore[arg-type]
    refused("adamw_anyprecision", adamw, "torch.optim.AdamW with weight_decay=0.1 decouples weight decay, a different")


def test_parameters_that_the_target_does_not_take() -> None:
    refused("adamw_anyprecision", adamw, "large.weight is torch.float64", mixed())
    sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    refused("adamw_torch_fused", adamw, "sparse", sparse)
    refused("adamw_anyprecision", adamw, "sparse", sparse)
    odd = nn.Module()
    odd.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    refused("adamw_torch_fused", adamw, "complex64", odd)
    refused("adafactor", adamw, "complex64", odd)


def mixed() -> Net:
    module = Net()
    module.large.double()
    return module


def test_mixed_float_dtypes_are_fused() -> None:
    module = Net()
    module.large.double()
    optimizer = adamw(module)
    assert swap("auto", module, optimizer).runs_as.endswith("(fused)")
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@bitsandbytes
def test_frozen_groups() -> None:
    for name in ("auto", "adamw_bnb_8bit", "adamw_anyprecision", "adafactor"):
        module = Net()
        module.embedding.requires_grad_(False)
        frozen = module.embedding.weight.detach().clone()
        optimizer = adamw(module)
        swap(name, module, optimizer)
        train(module, optimizer, 2)
        assert torch.equal(module.embedding.weight, frozen)


def test_cuda_only_and_missing() -> None:
    refused("adamw_apex_fused", adamw, "supports cuda, but the module is on cpu")


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RequirementCache", lambda name: RequirementCache(f"no-such-{name}"))
    once = r"^((?!pip install).)*pip install 'lightning-ort\[bnb\]'((?!pip install).)*$"
    refused("adamw_bnb_8bit", adamw, once)


@pytest.mark.parametrize("name", ["auto", "keep", *REPLACEMENTS])
def test_checkpoint_of_another_family(name: str) -> None:
    other = Net()
    saved_by = optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    train(other, saved_by, 1)
    module = Net()
    optimizer = adamw(module)
    swap(name, module, optimizer)
    train(module, optimizer, 1)
    before, saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(saved_by.state_dict())
    with pytest.raises(ValueError, match="states are those of sgd"):
        optimizer.load_state_dict(saved)
    assert repr(optimizer.state_dict()) == repr(before)
    assert repr(saved) == repr(saved_by.state_dict())


@pytest.mark.new_torch
def test_adam_with_decoupled_weight_decay_is_adamw() -> None:
    module = Net()
    optimizer = optim.Adam(module.parameters(), weight_decay=0.1, decoupled_weight_decay=True)
    assert "AnyPrecision" in swap("adamw_anyprecision", module, optimizer).runs_as


def test_an_optimizer_that_lightning_made_is_left_alone() -> None:
    from lightning.pytorch.core.optimizer import _MockOptimizer

    report = swap("adamw_anyprecision", Net(), _MockOptimizer())
    assert report.runs_as == report.configured


class FreesMemory(optim.AdamW):
    """Frees what its steps need when it goes, as DeepSpeedCPUAdam does."""

    freed: ClassVar[list[str]] = []

    def __del__(self) -> None:
        self.freed.append(type(self).__name__)


def test_a_wrapper_that_goes_frees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreesMemory, "freed", [])
    module = nn.Linear(2, 2)
    optimizer = optim.AdamW(module.parameters())
    replace_in_place(optimizer, FreesMemory(module.parameters()))
    gc.collect()
    LightningOptimizer(optimizer)
    gc.collect()
    assert not FreesMemory.freed
    del optimizer
    gc.collect()
    assert FreesMemory.freed == ["AdamW"]


def test_what_torchs_kernels_can_do_is_not_asked_of_a_mock(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The answer holds for the process: a step that does nothing would make a fused kernel right that is not."""
    steps = []
    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "_fused_sgd", lambda *args, **kwargs: None)
    request.addfinalizer(fused._has_fused_kernel.cache_clear)
    fused._has_fused_kernel.cache_clear()
    with mock.patch.object(optim.SGD, "step") as step:
        hook = register_optimizer_step_pre_hook(lambda *args: steps.append(args))
        module = nn.Linear(3, 3, dtype=torch.bfloat16)
        swap("auto", module, optim.SGD(module.parameters(), lr=0.1))
        hook.remove()
    assert not step.called
    assert not steps
    report = swap("auto", module, optim.SGD(module.parameters(), lr=0.1))
    assert "no working fused SGD for torch.bfloat16" in report.reason
