"""``ort_zero1``: DeepSpeed's ZeRO stage 1 on CPUs, with real processes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from processes import START, Recorded, fit
from torch import nn

from lightning_ort import ORTDDPStrategy, ORTZeRO1Strategy
from lightning_ort.strategies.deepspeed.states import read_directory

pytest.importorskip("deepspeed")

ALWAYS = {"placement": "always"}
OFF = {"engine": "torch"}


def zero1(config: dict[str, Any] = OFF, **kwargs: Any) -> ORTZeRO1Strategy:
    return ORTZeRO1Strategy(config=config, start_method=START, **kwargs)


class Sgd(Recorded):
    """Shows a wrong scale of the gradients, which Adam hides; two groups, one parameter frozen."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.net[2].bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def assert_states_equal(saved: Path, expected: Path) -> None:
    """Both checkpoints hold the same, but for the last bits."""
    saved, expected = (torch.load(path, weights_only=True) for path in (saved, expected))
    assert saved["state_dict"].keys() == expected["state_dict"].keys()
    torch.testing.assert_close(dict(saved["state_dict"]), dict(expected["state_dict"]), rtol=1e-4, atol=1e-5)
    (ours,), (theirs,) = saved["optimizer_states"], expected["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    for state in (ours["state"], theirs["state"]):  # a frozen parameter has no state; stock has one of nothing
        for number in [number for number, entries in state.items() if not any(v is not None for v in entries.values())]:
            del state[number]
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=1e-3, atol=1e-6)


def test_equals_ddp_and_saves_a_whole_checkpoint(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    stock = fit(Recorded(tmp_path, "stock"), DDPStrategy(start_method=START), make_trainer)
    ours = fit(Recorded(tmp_path, "ours"), zero1(ALWAYS), make_trainer)
    for facts, expected in zip(ours, stock, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert facts["report"]["ort_runs"] > 0
        assert facts["report"]["graph_breaks"] == 0
        assert facts["fused"] is True
        assert facts["state_bytes"] == pytest.approx(expected["state_bytes"] / 2, rel=0.05)
        assert "2 processes" in facts["report"]["optimizers"][0]["reason"]
    assert ours[0]["weight"] == ours[1]["weight"]
    assert_states_equal(tmp_path / "ours.ckpt", tmp_path / "stock.ckpt")


def test_accumulation_clipping_groups_schedule(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 3}
    stock = fit(Sgd(tmp_path, "stock"), DDPStrategy(start_method=START), make_trainer, **arguments)
    ours = fit(Sgd(tmp_path, "ours"), zero1(ALWAYS), make_trainer, **arguments)
    for facts, expected in zip(ours, stock, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert facts["report"]["ort_runs"] > 0
    assert_states_equal(tmp_path / "ours.ckpt", tmp_path / "stock.ckpt")


def same_data(module: Recorded, strategy: Any, make_trainer: Callable[..., Any], **kwargs: Any) -> list[float]:
    """All ranks see the same samples, so that the number of processes makes no difference to the losses."""
    return fit(module, strategy, make_trainer, use_distributed_sampler=False, limit_val_batches=0, **kwargs)[0][
        "losses"
    ]


@pytest.mark.slow
def test_checkpoints_go_everywhere(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    whole = same_data(Recorded(tmp_path, "whole"), "auto", make_trainer, devices=1, max_epochs=4)
    epoch = len(whole) // 4
    # stock, one process -> ZeRO, two -> ZeRO, one -> DeepSpeed's directory, two -> stock DDP, two
    same_data(Recorded(tmp_path, "0"), "auto", make_trainer, devices=1, max_epochs=1)
    losses = same_data(Recorded(tmp_path, "1"), zero1(), make_trainer, max_epochs=2, ckpt_path=tmp_path / "0.ckpt")
    assert losses == pytest.approx(whole[epoch : 2 * epoch], rel=1e-4)
    strategy = zero1(checkpoint="directory")
    losses = same_data(Recorded(tmp_path, "2"), strategy, make_trainer, max_epochs=3, ckpt_path=tmp_path / "1.ckpt")
    assert losses == pytest.approx(whole[2 * epoch : 3 * epoch], rel=1e-4)
    assert (tmp_path / "2.ckpt").is_dir()
    arguments = {"max_epochs": 4, "ckpt_path": tmp_path / "2.ckpt"}
    losses = same_data(Recorded(tmp_path, "3"), zero1(), make_trainer, devices=1, **arguments)
    assert losses == pytest.approx(whole[3 * epoch :], rel=1e-4)
    torch.save(read_directory(tmp_path / "2.ckpt"), tmp_path / "converted.ckpt")
    arguments["ckpt_path"] = tmp_path / "converted.ckpt"
    losses = same_data(Recorded(tmp_path, "4"), DDPStrategy(start_method=START), make_trainer, **arguments)
    assert losses == pytest.approx(whole[3 * epoch :], rel=1e-4)
    assert_states_equal(tmp_path / "3.ckpt", tmp_path / "4.ckpt")


class Bf16(Recorded):
    def on_train_end(self) -> None:
        super().on_train_end()
        saved = torch.load(self.folder / f"{self.name}.ckpt", weights_only=True)
        weight = saved["state_dict"]["net.0.weight"]
        assert weight.dtype == torch.float32
        assert (weight != weight.bfloat16()).any()  # more than what the module holds
        assert self.net[0].weight.dtype == torch.bfloat16


@pytest.mark.slow
def test_bf16_resumes_with_its_float32_weights(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"precision": "bf16-mixed", "num_nodes": 1}
    whole = same_data(Bf16(tmp_path, "whole"), zero1(), make_trainer, max_epochs=3, **arguments)
    first = same_data(Bf16(tmp_path, "first"), zero1(), make_trainer, max_epochs=1, **arguments)
    arguments["ckpt_path"] = tmp_path / "first.ckpt"
    rest = same_data(Bf16(tmp_path, "rest"), zero1(), make_trainer, max_epochs=3, **arguments)
    assert first + rest == whole


class Changed(Recorded):
    """Sets weights after the set-up: each layer in another hook."""

    def on_fit_start(self) -> None:
        self.net[0].weight.data.mul_(2)

    def on_train_start(self) -> None:
        self.net[0].bias.data.mul_(-3)

    def on_train_epoch_start(self) -> None:
        nn.init.constant_(self.net[3].bias, 0.5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.net[3].weight.data.mul_(-2)


def test_weights_that_hooks_set_are_kept(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    stock = fit(Changed(tmp_path, "stock"), DDPStrategy(start_method=START), make_trainer)
    ours = fit(Changed(tmp_path, "ours"), zero1(ALWAYS), make_trainer)
    for facts, expected in zip(ours, stock, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert facts["report"]["ort_runs"] > 0
    assert_states_equal(tmp_path / "ours.ckpt", tmp_path / "stock.ckpt")


class Averaged(Recorded):
    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(self.folder / f"{self.name}.{self.current_epoch}.ckpt")


def test_resumes_with_averaged_weights(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    def losses(name: str, **arguments: Any) -> list[float]:
        callbacks = [EMAWeightAveraging(decay=0.5)]
        return same_data(Averaged(tmp_path, name), zero1(), make_trainer, devices=1, callbacks=callbacks, **arguments)

    whole = losses("whole")
    rest = losses("rest", ckpt_path=tmp_path / "whole.0.ckpt")
    assert rest == pytest.approx(whole[len(whole) // 2 :], rel=1e-6)


class ChangedBf16(Recorded):
    """Saves a checkpoint between a change and the next step; what was not changed keeps its float32 values."""

    def on_train_end(self) -> None:
        before = self.trainer.strategy.lightning_module_state_dict()
        nn.init.constant_(self.net[3].weight, 0.5)
        after = self.trainer.strategy.lightning_module_state_dict()
        assert after["net.3.weight"].unique().tolist() == [0.5]
        assert torch.equal(after["net.0.weight"], before["net.0.weight"])
        assert (after["net.0.weight"] != after["net.0.weight"].bfloat16()).any()
        super().on_train_end()


def test_bf16_checkpoint_has_changed_weights(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    fit(ChangedBf16(tmp_path, "module"), zero1(), make_trainer, devices=1, max_epochs=1, precision="bf16-mixed")
    saved = torch.load(tmp_path / "module.ckpt", weights_only=True)["state_dict"]
    assert saved["net.3.weight"].unique().tolist() == [0.5]


class Evaluated(Recorded):
    """Counts the calls of a layer in a hook."""

    def on_validation_start(self) -> None:
        self.calls = 0
        self.net.register_forward_hook(lambda *_: setattr(self, "calls", self.calls + 1))

    def on_validation_end(self) -> None:
        assert self.calls == 2
        assert self.trainer.strategy.report.ort_runs > 0
        (self.folder / "counted").touch()


def test_validate_keeps_the_users_hooks(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    strategy = zero1({"placement": "always", "debug": {"capture": "modules"}})
    make_trainer(strategy=strategy, devices=1, limit_val_batches=2).validate(Evaluated(tmp_path, ""), verbose=False)
    assert (tmp_path / "counted").exists()


@pytest.mark.slow
def test_offload(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    stock = fit(Recorded(tmp_path, "stock"), DDPStrategy(start_method=START), make_trainer)
    ours = fit(Recorded(tmp_path, "ours"), zero1(ALWAYS, offload_optimizer=True), make_trainer)
    for facts, expected in zip(ours, stock, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert facts["report"]["ort_runs"] > 0
    assert_states_equal(tmp_path / "ours.ckpt", tmp_path / "stock.ckpt")


class Odd(Recorded):
    """Has a temperature without dimensions, other strides, and frozen layers in bfloat16, with a bfloat16 buffer."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.net[0].weight = nn.Parameter(torch.randn(8, 64).t())
        self.base = nn.Linear(8, 8).bfloat16().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.base.weight.dtype == torch.bfloat16
        return self.net(self.base(x.bfloat16()).float()) * self.temperature.exp()


def test_parameters_of_any_shape_and_dtype(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    stock = fit(Odd(tmp_path, "stock"), DDPStrategy(start_method=START), make_trainer)
    ours = fit(Odd(tmp_path, "ours"), zero1(), make_trainer)
    assert ours[0]["losses"] == pytest.approx(stock[0]["losses"], rel=1e-4)
    assert_states_equal(tmp_path / "ours.ckpt", tmp_path / "stock.ckpt")
    rest = fit(Odd(tmp_path, "rest"), zero1(), make_trainer, max_epochs=3, ckpt_path=tmp_path / "stock.ckpt")
    same = fit(
        Odd(tmp_path, "same"),
        DDPStrategy(start_method=START),
        make_trainer,
        max_epochs=3,
        ckpt_path=tmp_path / "ours.ckpt",
    )
    assert rest[0]["losses"] == pytest.approx(same[0]["losses"], rel=1e-4)


class Clips(Sgd):
    """Clips as it is told, with gradients that are large."""

    def __init__(self, folder: Path, name: str, algorithm: str, manual: bool) -> None:
        super().__init__(folder, name)
        self.algorithm, self.automatic_optimization = algorithm, not manual

    def clip(self, optimizer: Any) -> None:
        if self.algorithm == "torch":
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        else:
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm=self.algorithm)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return 3 * loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(3 * loss)
        self.clip(optimizer)
        optimizer.step()
        return None

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.current_epoch:  # not in the first
            self.clip(optimizer)


@pytest.mark.parametrize(
    ("algorithm", "manual"), [("norm", True), ("value", True), ("norm", False), ("value", False), ("torch", False)]
)
def test_clips_as_hooks_say(algorithm: str, manual: bool, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    arguments = (
        {} if manual or algorithm != "norm" else {"gradient_clip_val": 0.01}
    )  # which the hook does not always use
    stock = fit(Clips(tmp_path, "stock", algorithm, manual), DDPStrategy(start_method=START), make_trainer, **arguments)
    ours = fit(Clips(tmp_path, "ours", algorithm, manual), zero1(), make_trainer, **arguments)
    assert ours[0]["losses"] == pytest.approx(stock[0]["losses"], rel=1e-4)
    assert_states_equal(tmp_path / "ours.ckpt", tmp_path / "stock.ckpt")


class Looks(Sgd):
    """Looks at gradients in hooks, and changes them."""

    def __init__(self, folder: Path, name: str, changes: float) -> None:
        super().__init__(folder, name)
        self.changes, self.seen = changes, []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.net[0].weight.grad
        self.seen.append(gradient.norm().item())
        gradient.mul_(self.changes)

    def on_train_end(self) -> None:
        self.losses = [*self.losses, *self.seen]
        super().on_train_end()


@pytest.mark.parametrize(("precision", "offload"), [("32-true", False), ("32-true", True), ("bf16-mixed", False)])
def test_hooks_see_and_change_averaged_gradients(
    precision: Any, offload: bool, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    stock = fit(Looks(tmp_path, "stock", 0.5), DDPStrategy(start_method=START), make_trainer, precision=precision)
    strategy = zero1(offload_optimizer=offload)
    ours = fit(Looks(tmp_path, "ours", 0.5), strategy, make_trainer, precision=precision)
    tolerance = {"rel": 1e-4} if precision == "32-true" else {"abs": 0.02}
    for facts, expected in zip(ours, stock, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], **tolerance)
    steps = len(ours[0]["losses"]) // 2
    assert ours[0]["losses"][steps:] == ours[1]["losses"][steps:]


class Settings:
    """An object of the user's."""


class WithObject(Recorded):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["settings"] = Settings()


def test_weights_only(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    def resume(name: str, **kwargs: Any) -> None:
        trainer = make_trainer(strategy=zero1(), devices=1, limit_val_batches=0, max_epochs=2)
        trainer.fit(Recorded(tmp_path, name), ckpt_path=tmp_path / "saved.ckpt", **kwargs)

    fit(WithObject(tmp_path, "saved"), zero1(), make_trainer, devices=1, max_epochs=1)
    resume("resumed", weights_only=False)
    assert (tmp_path / "resumed.ckpt").exists()
    with pytest.raises(Exception, match="Weights only load failed"):
        resume("refused")


def test_learning_rate_finder(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"LearningRateFinder.*ort_ddp"):
        Tuner(make_trainer(strategy=zero1(), devices=1)).lr_find(Recorded(tmp_path, "module"))


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 2}, "stage=2"),
        ({"deepspeed_config": {"zero_optimization": {"stage": 3}}}, "stage=3"),
        ({"deepspeed_config": {"zero_optimization": {"overlap_comm": True}}}, "overlap_comm"),
        ({"checkpoint": "files"}, "choose one of 'file', 'directory'"),
        ({"exclude_frozen_parameters": True}, "checkpoint='directory'"),
        ({"optim": "adamw_fussed"}, "adamw_torch_fused|did you mean"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ORTZeRO1Strategy(**arguments)


def test_config_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"nowhere\.json"):
        ORTZeRO1Strategy(deepspeed_config=tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("config", "trainer", "messages"),
    [
        ({"gradient_accumulation_steps": 4}, {}, ("gradient_accumulation_steps=4", "accumulate_grad_batches=1")),
        ({"gradient_clipping": 0.5}, {"gradient_clip_val": 1.0}, ("gradient_clipping=0.5", "gradient_clip_val=1.0")),
        ({"bf16": {"enabled": True}}, {}, ("bf16=", "precision='32-true'")),
        ({"train_micro_batch_size_per_gpu": 3}, {}, ("train_micro_batch_size_per_gpu=3", "batches of 8")),
        ({"train_batch_size": 5}, {}, ("train_batch_size=5", "8 samples per batch")),
        ({}, {"precision": "16-mixed"}, ("float16", "bf16-mixed")),
        ({}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, ("by value",)),
    ],
)
def test_contradictions(
    config: dict[str, Any],
    trainer: dict[str, Any],
    messages: tuple[str, ...],
    make_trainer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(Exception, match=messages[0]) as error:
        fit(Recorded(tmp_path, "module"), zero1(deepspeed_config=config), make_trainer, devices=1, **trainer)
    assert all(message in str(error.value) for message in messages)


class Optimizers(Recorded):
    """Configures what the function says."""

    def __init__(self, folder: Path, configure: Callable[[nn.Module], Any]) -> None:
        super().__init__(folder, "module")
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def _two(module: nn.Module) -> Any:
    module.automatic_optimization = False
    return [torch.optim.SGD(layer.parameters()) for layer in (module.net[0], module.net[3])]


def _half(module: nn.Module) -> Any:
    module.net[0].double()
    return torch.optim.SGD(module.parameters())


def _all_double(module: nn.Module) -> Any:
    return torch.optim.SGD(module.double().parameters())


def _frozen(module: nn.Module) -> Any:
    module.net[0].requires_grad_(False)
    groups = [{"params": module.net[0].parameters()}, {"params": module.net[3].parameters()}]
    return torch.optim.SGD(groups)


@pytest.mark.parametrize(
    ("configure", "arguments", "message"),
    [
        (_two, {}, "returned 2"),
        (lambda m: torch.optim.LBFGS(m.parameters()), {}, "whole parameters"),
        (lambda m: torch.optim.Adafactor(m.parameters()), {}, "whole parameters"),
        (lambda m: torch.optim.AdamW(m.parameters()), {"optim": "adamw_bnb_8bit"}, "ort_ddp"),
        (_half, {}, r"float32.* and .*float64|float64.* and .*float32"),
        (_all_double, {}, "parameters of torch.float64.*ort_zero1_native"),
        (_frozen, {}, "Parameter group 0 has no parameter"),
        (
            lambda m: torch.optim.AdamW(m.parameters()),
            {"optim": "adamw_torch_fused", "deepspeed_config": {"optimizer": {"type": "Adam"}}},
            "Choose only one of them",
        ),
    ],
)
def test_refused_optimizers(
    configure: Callable[[nn.Module], Any],
    arguments: dict[str, Any],
    message: str,
    make_trainer: Callable[..., Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(Exception, match=message):
        fit(Optimizers(tmp_path, configure), zero1(**arguments), make_trainer, devices=1)


def test_cpu_adam_without_a_compiler(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    strategy = zero1(optim="adamw_deepspeed", offload_optimizer=True)
    with pytest.raises(Exception, match=r"g\+\+ and ninja is not on the PATH"):
        fit(Recorded(tmp_path, "module"), strategy, make_trainer, devices=1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("ninja") is None, reason="compiles an extension")
@pytest.mark.parametrize("offload", [False, True])
def test_cpu_adam(offload: bool, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    ours = fit(Recorded(tmp_path, "ours"), zero1(optim="adamw_deepspeed", offload_optimizer=offload), make_trainer)
    torch_adam = fit(Recorded(tmp_path, "torch"), zero1(optim="adamw_torch_fused"), make_trainer)
    for facts, expected in zip(ours, torch_adam, strict=True):
        assert facts["losses"] == pytest.approx(expected["losses"], rel=1e-4)


class SavedLater(Recorded):
    """Is saved after the fit, too, by the process that trained it."""

    def teardown(self, stage: str) -> None:
        self.trainer.strategy.teardown()
        self.trainer.save_checkpoint(self.folder / "later.ckpt")


def test_saves_after_the_fit(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    fit(SavedLater(tmp_path, "module"), zero1(), make_trainer, devices=1, max_epochs=1)
    assert_states_equal(tmp_path / "later.ckpt", tmp_path / "module.ckpt")


class ProcessSettings(Recorded):
    """Looks at what DeepSpeed keeps for the whole process: before a run, in it, and after it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "module")
        self.seen: list[Any] = []

    def look(self) -> None:
        import deepspeed
        from deepspeed.accelerator import real_accelerator

        operations = dict(deepspeed.ops.__compatible_ops__)
        self.seen.append([repr(real_accelerator.ds_accelerator), operations, os.environ.get("DS_ACCELERATOR")])

    def on_fit_start(self) -> None:
        self.look()

    def on_fit_end(self) -> None:
        self.look()
        (self.folder / "seen.json").write_text(json.dumps(self.seen))


def test_settings_of_the_process_are_put_back(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    module = ProcessSettings(tmp_path)
    strategy = zero1()
    module.look()
    fit(module, strategy, make_trainer, devices=1, max_epochs=1)
    before, during, after = json.loads((tmp_path / "seen.json").read_text())
    assert during[1]["deepspeed_shm_comm"] is False
    assert during[0] != before[0]
    assert after == before
    assert before[2] is None


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="latest"):
        read_directory(tmp_path)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("weights_only", [None, True, False])
def test_a_hostile_directory_is_not_run(weights_only: bool | None, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("checkpoint")
    (tmp_path / "checkpoint").mkdir()
    file = tmp_path / "checkpoint" / "mp_rank_00_model_states.pt"
    torch.save({"dp_world_size": 1, "a": Hostile(tmp_path / "ran")}, file)
    strategy = ORTZeRO1Strategy()
    message = "states of 0 processes" if weights_only is False else r"exec, which may do anything.*weights_only=False"
    with pytest.raises(ValueError, match=message):
        strategy.load_checkpoint(tmp_path, weights_only=weights_only)
    assert (tmp_path / "ran").exists() is (weights_only is False)


def test_deepspeed_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.strategies.deepspeed._DEEPSPEED_AVAILABLE", False)
    with pytest.raises(MisconfigurationException, match="pip install"):
        ORTZeRO1Strategy()


def test_names() -> None:
    assert type(StrategyRegistry.get("ort_zero1")) is ORTZeRO1Strategy
    offloaded = StrategyRegistry.get("ort_zero1_offload")
    assert offloaded.config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert not issubclass(ORTDDPStrategy, ORTZeRO1Strategy)
