"""A training step as an ONNX model: it trains as the module does, or there is no folder; and back into PyTorch."""

import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_ort import OnnxExport, export_training, load_training_state
from lightning_ort.cli import main
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.training import runner
from tests.anywhere.modules import SIX, DigitsCNN, Module, SmallGPT, TabularMLP

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "accelerator": "cpu"}


class Small(LightningModule):
    """What a test needs: a layer, and a loss that may do something else."""

    def __init__(self, work: Callable[[Any, Tensor], Tensor] | None = None, make: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.work, self.make = work, make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.layer(batch["x"])
        return (hidden if self.work is None else self.work(self, hidden)).square().mean()

    def configure_optimizers(self) -> Any:
        return (self.make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1)))(self.parameters())


def small_batch(rows: int = 5, seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))}


def as_arrays(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: value.numpy() for name, value in batch.items()}
    return tuple(value.numpy() for value in batch) if isinstance(batch, tuple) else batch.numpy()


def batches_of(kind: Any, first: int, last: int, rows: int = 8) -> list[Any]:
    return [kind.batch(rows, seed) for seed in range(first, last)]


def fit(module: LightningModule, batches: list[Any], **settings: Any) -> Trainer:
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = Trainer(max_epochs=1, **{**QUIET, **settings})
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def assert_same(module: nn.Module, state: dict[str, np.ndarray], tolerance: float = 1e-4) -> None:
    known = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert set(state) & set(known)
    for name, value in known.items():
        if name in state:
            np.testing.assert_allclose(
                state[name], value.detach().numpy(), rtol=tolerance, atol=tolerance, err_msg=name
            )


def steps_of(folder: Path, batches: list[Any], **settings: Any) -> tuple[runner.Training, list[dict[str, float]]]:
    training = runner.Training.load(folder)
    return training, [training.step(as_arrays(batch), **settings) for batch in batches]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k is not TabularMLP)) for k in SIX])
def test_it_trains_as_a_trainer_does(kind: type[Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = kind()
    exported = export_training(module, kind.batch(8, 0), tmp_path / "exported")
    batches = [kind.batch(8 - seed % 3, seed) for seed in range(12)]
    training, results = steps_of(tmp_path / "exported", batches)
    losses: list[float] = []
    module.on_train_batch_end = lambda outputs, *_: losses.append(outputs["loss"].item())
    fit(module, batches)
    np.testing.assert_allclose([result["loss"] for result in results], losses, rtol=1e-4)
    assert_same(module, training.state)
    assert results[0]["train_loss"] == results[0]["loss"]
    nodes = onnx.load(exported.path / "training.onnx").graph.node
    assert {node.domain for node in nodes} <= {"", "ai.onnx"}
    assert "DequantizeLinear" not in {node.op_type for node in nodes}  # wrong on WebGPU (onnxruntime-web 1.30)
    # the two others on what has been trained
    module.eval()
    batch = batches[0]
    with torch.no_grad():
        expected = module.loss(batch).item()
    assert training.evaluate(as_arrays(batch))["val_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("digits") / "exported"
    export_training(DigitsCNN(4), DigitsCNN.batch(6, 0), folder)
    return folder


def copied(folder: Path, tmp_path: Path) -> Path:
    import shutil

    return shutil.copytree(folder, tmp_path / "copy")


def test_round_trip(digits: Path, tmp_path: Path) -> None:
    """From PyTorch, through onnxruntime, and on in a Trainer: as if it had never left."""
    torch.manual_seed(1)
    module, folder = DigitsCNN(4), tmp_path / "exported"
    never_left = copy.deepcopy(module)
    fit(never_left, batches_of(DigitsCNN, 0, 9))
    optimizer = fit(module, batches_of(DigitsCNN, 0, 3)).optimizers[0]
    export_training(module, DigitsCNN.batch(8, 0), folder, optimizer=optimizer)
    training, _ = steps_of(folder, batches_of(DigitsCNN, 3, 6))
    training.save()
    assert training.updates == 6
    back = DigitsCNN(4)
    path = load_training_state(back, folder).checkpoint(tmp_path / "back.ckpt")
    assert_same(back, training.state, 0)
    again = DigitsCNN(4)
    trainer = fit(again, batches_of(DigitsCNN, 6, 9), ckpt_path=str(path))
    assert trainer.global_step == 9
    assert_same(never_left, {name: value.numpy() for name, value in again.state_dict().items()})


@pytest.mark.parametrize("young", [0, 2])
@pytest.mark.parametrize(
    "make", [partial(torch.optim.Adam, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)], ids=["adam", "sgd"]
)
def test_parameters_of_different_ages_keep_them(make: Any, young: int, tmp_path: Path) -> None:
    """As BaseFinetuning makes them: Adam corrects by age."""
    module, folder = Small(), tmp_path / "exported"
    optimizer = make([module.layer.bias])
    module.layer.weight.requires_grad_(False)
    batches = [small_batch(seed=seed) for seed in range(12)]

    def train(module: Any, optimizer: Any, part: list[Any]) -> None:
        for batch in part:
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()

    train(module, optimizer, batches[:4])
    optimizer.add_param_group({"params": [module.layer.weight.requires_grad_()]})
    train(module, optimizer, batches[4 : 4 + young])
    export_training(module, batches[0], folder, optimizer=optimizer)
    made = []
    for part in ([], batches[6:9]):
        training, _ = steps_of(folder, part, lr=0.1)
        training.save()
        back = Small()
        made.append(make([{"params": [back.layer.bias]}, {"params": [back.layer.weight]}]))
        load_training_state(back, folder).load_into(made[-1])
        train(module, optimizer, part)
        assert_same(module, training.state)
        rest = batches[9:]
        stays = copy.deepcopy(module)
        going_on = make([{"params": [stays.layer.bias]}, {"params": [stays.layer.weight]}])
        going_on.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(back, made[-1], rest)
        train(stays, going_on, rest)
        assert_same(back, {name: value.numpy() for name, value in stays.state_dict().items()})


def test_state_of_another_module_is_refused(digits: Path) -> None:
    other = DigitsCNN(8)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"of another module: 'net\.0\.weight' has shape \[4, 1, 3, 3\]"):
        load_training_state(other, digits)
    with pytest.raises(ValueError, match=r"of another module: Small has no 'net\.0\.weight'"):
        load_training_state(Small(), digits)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_clipping_accumulation_and_rates(tmp_path: Path) -> None:
    module = Small(make=lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    settings: dict[str, Any] = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    export_training(module, small_batch(), tmp_path / "exported", **settings)
    batches = [small_batch(seed=seed) for seed in range(8)]
    training, _ = steps_of(tmp_path / "exported", batches)
    assert training.updates == 4
    fit(module, batches, **settings)
    assert_same(module, training.state)
    before = training.state
    training.step(as_arrays(batches[0]), lr=0.0, update=True)
    assert training.updates == 5
    np.testing.assert_array_equal(training.state["layer.weight"], before["layer.weight"])


def test_gradients_that_the_step_makes_itself_do_not_count(tmp_path: Path) -> None:
    """The Trainer sets them to zero between the step and the backward pass of its loss."""

    def work(module: Small, hidden: Tensor) -> Tensor:
        hidden.exp().mean().backward(retain_graph=True)
        return hidden

    module, batch = Small(work), small_batch()
    export_training(module, batch, tmp_path / "exported")
    training, _ = steps_of(tmp_path / "exported", [batch])
    fit(module, [batch])
    assert_same(module, training.state)
    with pytest.raises(ExportFailed, match=r"training_step calls backward itself.*Pass accumulate_grad_batches=1"):
        export_training(module, batch, tmp_path / "accumulated", accumulate_grad_batches=2)


def test_without_an_optimizer_it_returns_gradients(tmp_path: Path) -> None:
    module, batch = Small(), small_batch()
    export_training(module, batch, tmp_path / "exported", optimizer=None)
    training, (results,) = steps_of(tmp_path / "exported", [batch])
    loss = module.training_step(batch, 0)
    loss.backward()
    assert results["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert set(training.gradients) == {"layer.weight", "layer.bias"}
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(training.gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)
    training.set_state({name: value - 0.1 * training.gradients[name] for name, value in training.state.items()})
    assert training.step(as_arrays(batch))["loss"] < results["loss"]
    with pytest.raises(ValueError, match="has no optimizer"):
        training.step(as_arrays(batch), lr=0.1)


def test_dropout_draws_in_the_model(tmp_path: Path) -> None:
    module = Small(lambda self, hidden: F.dropout(hidden + 10, 0.25, self.training))
    batch = small_batch(200)
    export_training(module, batch, tmp_path / "drops")
    _, results = steps_of(tmp_path / "drops", [batch] * 20, lr=0.0)
    losses = [result["loss"] for result in results]
    assert len(set(losses)) == 20
    # of mean 100 / 0.75; single losses differ by 2.4 %
    expected = np.mean([module.training_step(batch, 0).item() for _ in range(20)])
    assert np.mean(losses) == pytest.approx(expected, rel=0.05)
    export_training(module, batch, tmp_path / "off", dropout=False)
    _, results = steps_of(tmp_path / "off", [batch] * 2, lr=0.0)
    assert results[0] == results[1]
    assert results[0]["loss"] == pytest.approx(float(module.eval().training_step(batch, 0)), rel=1e-5)


class DropPath(nn.Module):
    """Leaves out the whole of some rows, as in many vision models."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(x.shape[0], 1).bernoulli_(0.8) / 0.8 if self.training else x


class DropsPaths(Small):
    """Has it, and is called like it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), DropPath()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.drop(self.norm(self.layer(batch["x"]))).square().mean()


def test_what_drops_paths_draws_or_is_left_out(tmp_path: Path) -> None:
    module = DropsPaths()
    export_training(module, small_batch(40), tmp_path / "drops")
    _, results = steps_of(tmp_path / "drops", [small_batch(40)] * 20, lr=0.0)
    assert len({result["loss"] for result in results}) == 20
    # rows of mean 1, in which a fifth are left out and the others count 1.25 times
    assert np.mean([result["loss"] for result in results]) == pytest.approx(1.25, rel=0.1)
    export_training(module, small_batch(), tmp_path / "off", dropout=False)
    assert (module.training, module.drop.training) == (True, True)
    training, _ = steps_of(tmp_path / "off", [small_batch(seed=seed) for seed in range(3)])
    module.drop.eval()
    module.train = lambda mode=True: module  # type: ignore[method-assign]  # the Trainer would switch it on
    fit(module, [small_batch(seed=seed) for seed in range(3)])
    assert_same(module, training.state)
    assert np.abs(training.state["norm.running_mean"]).max() > 0  # the norm itself trains


class Tuned(Small):
    """A trained layer on a frozen body, a part of which is large."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.body = nn.Linear(4, 4).requires_grad_(False)
        self.wide = nn.Linear(4, 10_000).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["x"]).square().mean() + self.wide(batch["x"]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


def test_frozen_parameters_are_constants(tmp_path: Path) -> None:
    exported = export_training(Tuned(), small_batch(), tmp_path / "exported")
    training, _ = steps_of(exported.path, [small_batch()])
    assert set(training.state) == {"layer.weight", "layer.bias"}
    assert (exported.trained, exported.frozen) == (15, 20 + 50_000)
    assert (exported.path / "frozen.data").stat().st_size >= 160_000
    about = json.loads((exported.path / "training.json").read_text())
    assert about["frozen"] == ["body.weight", "body.bias", "wide.weight", "wide.bias"]
    assert (about["float16"], exported.rounding) == (None, None)


def test_frozen_parameters_in_float16(tmp_path: Path) -> None:
    """The models compute with what float16 holds, in float32; how far that is from float32 is told."""
    module, batch = Tuned(), small_batch()
    exact = copy.deepcopy(module)
    plain = export_training(module, batch, tmp_path / "plain")
    exported = export_training(module, batch, tmp_path / "halved", float16=True)
    assert all(torch.equal(value, exact.state_dict()[name]) for name, value in module.state_dict().items())
    sizes = [(each.path / "frozen.data").stat().st_size for each in (plain, exported)]
    assert sizes == [160_000, 80_000]
    half = {"body.weight", "body.bias", "wide.weight", "wide.bias"}
    for path in exported.path.glob("*.onnx"):
        graph = onnx.load(path).graph
        of_half = {each.name for each in graph.initializer if each.data_type == onnx.TensorProto.FLOAT16}
        assert of_half == (half if path.stem != "prediction" else half - {"wide.weight", "wide.bias"})
        assert all(
            each.type.tensor_type.elem_type != onnx.TensorProto.FLOAT16 for each in [*graph.input, *graph.output]
        )

    batches = [small_batch(5 + seed % 3, seed) for seed in range(4)]
    rounded = copy.deepcopy(exact)
    for parameter in rounded.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.half().float()
    training, results = steps_of(exported.path, batches)
    losses: dict[str, list[float]] = {"exact": [], "rounded": []}
    for name, each in (("exact", exact), ("rounded", rounded)):
        each.on_train_batch_end = lambda outputs, *_, kept=losses[name]: kept.append(outputs["loss"].item())
        fit(each, batches)
    np.testing.assert_allclose([result["loss"] for result in results], losses["rounded"], rtol=1e-5)
    assert_same(rounded, training.state, 1e-6)
    change = abs(losses["exact"][0] - losses["rounded"][0])
    assert 1e-6 < change < 1e-3
    assert exported.rounding is not None
    assert change / 2 < exported.rounding.loss < 10 * change  # over steps with other batches
    assert exported.rounding.state > 1e-7
    about = json.loads((exported.path / "training.json").read_text())
    assert about["float16"] == {"loss": exported.rounding.loss, "state": exported.rounding.state}
    assert f"float16 saves 100.0 kB, and changes the loss by {exported.rounding.loss:.2g}" in str(exported)
    with torch.no_grad():
        expected = rounded(batch["x"]).numpy()
    np.testing.assert_allclose(training.predict({"x": batch["x"].numpy()})["output"], expected, rtol=1e-5, atol=1e-6)


def test_float16_without_anything_to_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"float16=True: Small has no frozen parameters \(requires_grad=False\)"):
        export_training(Small(), small_batch(), tmp_path / "out", float16=True)
    module = Tuned()
    module.wide.weight.data[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"wide\.weight has values up to 1e\+06, float16 up to 65504"):
        export_training(module, small_batch(), tmp_path / "out", float16=True)
    with pytest.raises(ValueError, match="float16='yes'"):
        export_training(module, small_batch(), tmp_path / "out", float16="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs training=True"):
        OnnxExport(tmp_path / "out.onnx", float16=True)
    seen: list[int] = []
    untrained = Small()
    untrained.on_train_start = lambda: seen.append(1)
    with pytest.raises(ValueError, match="Small has no frozen parameters"):
        fit(untrained, [small_batch()], callbacks=[OnnxExport(tmp_path / "out", training=True, float16=True)])
    assert (seen, list(tmp_path.iterdir())) == ([], [])


def test_callback_stores_float16(tmp_path: Path) -> None:
    fit(Tuned(), [small_batch()], callbacks=[OnnxExport(tmp_path / "exported", training=True, float16=True)])
    assert runner.Training.load(tmp_path / "exported").about["float16"]["loss"] > 0


@pytest.mark.slow
def test_sizes_vary(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = SmallGPT(depth=1)
    batch = SmallGPT.batch(4, 0)
    exported = export_training(module, batch, tmp_path / "exported")
    about = json.loads((exported.path / "training.json").read_text())
    assert about["fields"][0]["shape"] == ["batch", "length"]
    training = runner.Training.load(exported.path)
    for rows, length in ((1, 9), (6, 17), (3, 4)):
        got = training.step(SmallGPT.batch(rows, 1)[:, :length].numpy(), lr=0.0)["loss"]
        assert got == pytest.approx(module.loss(SmallGPT.batch(rows, 1)[:, :length]).item(), rel=1e-4)


def test_slices_of_sizes_that_vary(tmp_path: Path) -> None:
    """A language model's shifted labels, its last states, and what is written to a part of a tensor."""

    class Shifted(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            states = self.layer(F.one_hot(batch["tokens"], 4).float())
            written = torch.zeros_like(states)
            written[:, 1:] = states[:, :-1]
            written[:, 0] = states[:, -1] * 2
            return written.square().mean() + states[:, ::2].mean() + states[:, -3:].square().sum()

    module = Shifted()
    tokens = torch.randint(0, 4, (6, 9), generator=torch.Generator().manual_seed(0))
    exported = export_training(module, {"tokens": tokens[:4, :7]}, tmp_path / "exported", optimizer=None)
    assert json.loads((exported.path / "training.json").read_text())["fields"][0]["shape"] == ["batch", "length"]
    training, _ = steps_of(exported.path, [{"tokens": tokens[:3]}])
    module.training_step({"tokens": tokens[:3]}, 0).backward()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(training.gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_pooling_of_transposed_rows(tmp_path: Path) -> None:
    """Its result has strides of its own, along dimensions of one element (Swin, ConvNeXt)."""
    module = Small(lambda self, hidden: nn.AdaptiveAvgPool1d(1)(hidden.transpose(1, 2)).flatten(1))
    batch = {"x": torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))}
    export_training(module, batch, tmp_path / "exported")
    training, _ = steps_of(tmp_path / "exported", [{"x": batch["x"][:rows]} for rows in (4, 6)])
    fit(module, [{"x": batch["x"][:rows]} for rows in (4, 6)])
    assert_same(module, training.state, 1e-6)


NORMAL = torch.distributions.Normal


def checkpointed(self: Any, hidden: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: torch.tanh(self.layer(x)), torch.tanh(hidden @ self.layer.weight), use_reentrant=False)


def attending(self: Any, hidden: Tensor) -> Tensor:
    weight = self.layer.weight[:, :3].repeat(3, 1)
    rest = (None, None, None, False, 0.5, torch.eye(3), None)  # half of the attention is dropped
    return F.multi_head_attention_forward(hidden, hidden, hidden, 3, 1, weight, *rest)[0]


WRITTEN: dict[str, Any] = {
    "attention dropped": attending,
    "channels dropped": lambda self, hidden: F.dropout2d(hidden[:, :, None, None], 0.4, self.training),
    "all of it": lambda self, hidden: F.dropout(hidden, 1.0, self.training) + hidden,
    "alpha dropout": lambda self, hidden: F.feature_alpha_dropout(F.alpha_dropout(hidden, 0.3, True), 0.2, True),
    "random mask": lambda self, hidden: hidden * torch.bernoulli(hidden.sigmoid().detach()),
    "distribution": lambda self, hidden: NORMAL(hidden[:, 0], hidden[:, 1].exp()).log_prob(hidden[:, 2]),
    "checkpoint": checkpointed,
    "at most so many rows": lambda self, hidden: hidden + torch.arange(5.0)[: len(hidden), None],
}


@pytest.mark.parametrize("case", WRITTEN)
def test_what_can_be_exported(case: str, tmp_path: Path) -> None:
    """The export compares with the module, in which what is drawn has its mean, and fails otherwise."""
    module = Small(WRITTEN[case], make=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    exported = export_training(module, small_batch(), tmp_path / "exported")
    assert exported.difference.state < 1e-6
    _, results = steps_of(exported.path, [small_batch()] * 2, lr=0.0)
    assert (results[0] == results[1]) is ("drop" not in case and "random" not in case)


def test_a_batch_of_one_is_refused_where_the_module_refuses_it(digits: Path, tmp_path: Path) -> None:
    # a loss over one image has statistics of several numbers, and batch norm takes it
    models = json.loads((digits / "training.json").read_text())["models"]
    assert models["training"]["sizes"] == {"batch": [1, None]}

    class Normed(Small):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.norm(self.layer(batch["x"])).square().mean() + self.layer.weight.square().sum()

    exported = export_training(Normed(), small_batch(), tmp_path / "exported")
    training = runner.Training.load(exported.path)
    with pytest.raises(ValueError, match="has batch 1; it must be at least 2"):
        training.step(as_arrays(small_batch(1)))


# what cannot be exported


def inverted(self: Any, hidden: Tensor) -> Tensor:
    return torch.linalg.pinv(hidden.T @ hidden + torch.eye(3))


def counted(self: Any, hidden: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return hidden * self.calls


def branching(self: Any, hidden: Tensor) -> Tensor:
    return hidden if hidden.sum() > 0 else hidden * 2


def narrow(self: Any, hidden: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.layer(hidden @ torch.ones(3, 4)).float()


REFUSED: dict[str, tuple[Any, str]] = {
    "operation": (inverted, r"aten\.linalg_pinv[\s\S]*in inverted: return torch\.linalg\.pinv"),
    "counter": (
        counted,
        r"changes self\.calls, which a model cannot hold: keep it in a tensor that is registered as a buffer",
    ),
    "branch": (branching, r"depends on the values[\s\S]*in branching: return hidden if"),
    "global step": (lambda self, hidden: hidden * self.global_step, r"reads trainer\.global_step"),
    "epoch": (lambda self, hidden: hidden * self.current_epoch, r"reads trainer\.current_epoch"),
    "optimizers": (lambda self, hidden: hidden * len(self.optimizers()), r"calls self\.optimizers\(\)"),
    "autocast": (narrow, r"aten\.\S+: torch\.bfloat16: a model computes in float32; leave out autocast"),
    "print": (lambda self, hidden: self.print(hidden) or hidden, r"calls self\.print\(\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_named(case: str, tmp_path: Path) -> None:
    work, message = REFUSED[case]
    folder = tmp_path / "exported"
    with pytest.raises(ExportFailed, match=message):
        export_training(Small(work), small_batch(), folder)
    assert list(tmp_path.iterdir()) == []


class Numbered(Small):
    """Its loss depends on the number of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 100 == 0:
            self.log("norm", self.layer.weight.norm())  # which does not
        return super().training_step(batch, batch_idx) * (2 if batch_idx > self.last else 1)

    last = 500


class Listing(Small):
    """Keeps what it has seen, and does something else when that has become much."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = SimpleNamespace(losses=[], sizes={})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.losses.append(loss.detach())
        return loss * (2 if min(len(self.seen.losses), len(self.seen.sizes)) > 500 else 1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.sizes[len(self.seen.sizes)] = len(batch)


class Ended(Small):
    """Counts after the update."""

    count = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1


def test_what_changes_from_step_to_step_is_refused(tmp_path: Path) -> None:
    def clamping(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *args: [p.data.clamp_(-0.1, 0.1) for p in module.parameters()])
        return optimizer

    module = Small(make=clamping)
    listing = Listing()
    cases = [
        (Numbered(), "the number of the batch"),
        (Ended(), r"changes self\.count"),
        (listing, "on state that is in no buffer"),
        (module, "hooks"),
    ]
    for one, message in cases:
        with pytest.raises(ExportFailed, match=message):
            export_training(one, small_batch(), tmp_path / "exported")
    assert (listing.seen.losses, listing.seen.sizes) == ([], {})
    logging = Numbered()
    logging.last = 10**9
    export_training(logging, small_batch(), tmp_path / "exported")


def test_an_older_export_stays_where_a_new_one_fails(digits: Path, tmp_path: Path) -> None:
    folder = copied(digits, tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(ExportFailed):
        export_training(Small(inverted), small_batch(), folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]
    export_training(Small(), small_batch(), folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"]
    assert set(runner.Training.load(folder).state) == {"layer.weight", "layer.bias"}


def test_what_is_passed_is_checked_first(tmp_path: Path) -> None:
    module, batch = Small(), small_batch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="is not empty, and no export"):
        export_training(module, batch, tmp_path / "mine")
    with pytest.raises(TypeError, match="has no `training_step`"):
        export_training(nn.Linear(2, 2), batch, tmp_path / "out")
    with pytest.raises(TypeError, match="'name' is of type str"):
        export_training(module, {**batch, "name": "a"}, tmp_path / "out")
    with pytest.raises(ValueError, match="gradient_clip_algorithm='both'"):
        export_training(module, batch, tmp_path / "out", gradient_clip_algorithm="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no field 'y'"):
        export_training(module, batch, tmp_path / "out", sizes={"y": [0]})
    for make, message in (
        (torch.optim.RMSprop, r"RMSprop cannot be part of a model\. Use one of SGD, Adam, AdamW"),
        (lambda parameters: [torch.optim.SGD([p], lr=1) for p in parameters], "returned 2 optimizers"),
        (lambda parameters: torch.optim.SGD(parameters, lr=1, maximize=True), "SGD has maximize"),
    ):
        with pytest.raises(ExportFailed, match=message):
            export_training(Small(make=make), batch, tmp_path / "out")
    module.automatic_optimization = False
    with pytest.raises(ExportFailed, match="manual optimization"):
        export_training(module, batch, tmp_path / "out")
    with pytest.raises(ExportFailed, match=r"bfloat16; models train in float32"):
        export_training(Small().bfloat16(), batch, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_module_is_left_as_it_was(tmp_path: Path) -> None:
    module = DigitsCNN(4).eval()
    module.net[0].train()
    before = copy.deepcopy(module.state_dict())
    modes = [child.training for child in module.modules()]
    state = torch.get_rng_state()
    export_training(module, DigitsCNN.batch(4, 0), tmp_path / "exported")
    assert [child.training for child in module.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# ways to it


def test_callback(tmp_path: Path) -> None:
    module = Small(make=lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    callback = OnnxExport(tmp_path / "exported", training=True)
    batches = [small_batch(seed=seed) for seed in range(6)]
    fit(module, batches, callbacks=[callback], gradient_clip_val=0.5)
    training = runner.Training.load(tmp_path / "exported")
    assert training.updates == 6
    assert training.about["clip"] == ["norm", 0.5]
    assert_same(module, training.state, 0)
    assert np.abs(training.state["exp_avg/layer.weight"]).max() > 0
    with pytest.raises(ValueError, match="takes neither dynamic_batch nor quantize"):
        OnnxExport(tmp_path / "x", training=True, quantize="int8")


class Watched(Small):
    """Notes that it has been trained on a batch."""

    seen = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = True


@pytest.mark.parametrize("strategy", ["auto", "ort"])
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: Watched(make=torch.optim.RMSprop), "RMSprop cannot be part of a model. Use one of SGD, Adam, AdamW"),
        (lambda: Watched(make=lambda p: Averaging(p, lr=0.1)), "Averaging cannot be part of a model. Use one of SGD"),
        (lambda: Watched().double(), "layer.weight is of torch.float64"),
        (lambda: Inverting(), r"linalg_pinv.*\n  at .*test_training_export.py"),
    ],
)
def test_callback_tells_before_training(module: Any, message: str, strategy: str, tmp_path: Path) -> None:
    trained, callback = module(), OnnxExport(tmp_path / "exported", training=True)
    with pytest.raises(ExportFailed, match=message):
        fit(trained, [small_batch()], callbacks=[callback], strategy=strategy)
    assert not trained.seen
    assert not list(tmp_path.iterdir())


class Averaging(torch.optim.SGD):
    """An optimizer of the user's."""


class Inverting(Watched):
    """What no standard operator does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.linalg.pinv(self.layer.weight[:, :3]).sum()


def test_callback_tells_of_a_schedule_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def schedules(kind: Any, **settings: Any) -> Any:
        def make(parameters: Any) -> Any:
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
            return [optimizer], [kind(optimizer, **settings)]

        return make

    schedule = torch.optim.lr_scheduler
    callbacks = [OnnxExport(tmp_path / "exported", training=True)]
    with caplog.at_level("INFO", "lightning_ort"):
        fit(Small(make=schedules(schedule.StepLR, step_size=1)), [small_batch()], callbacks=callbacks)
    first, last = [r.getMessage() for r in caplog.records if "pass the learning rate to each step" in r.getMessage()]
    assert str(tmp_path) in last
    assert str(tmp_path) not in first
    with pytest.warns(UserWarning, match="the momentum, which a schedule sets too, stays as it is"):
        fit(Small(make=schedules(schedule.OneCycleLR, max_lr=0.1, total_steps=5)), [small_batch()], callbacks=callbacks)


class Breaking(Callback):
    """After the first batch the module cannot be exported."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.work = lambda self, hidden: hidden if hidden.sum() > 100 else hidden * 2


class Monitored(Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.work(self, self.layer(x)) if self.work is not None else self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch["x"]).square().mean()
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("training", [True, False])
def test_an_export_that_fails_leaves_the_fit(training: bool, tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "checkpoints", monitor="loss", save_top_k=-1, every_n_train_steps=1)
    sample = None if training else small_batch()["x"]
    callback = OnnxExport(tmp_path / "exported", sample=sample, training=training, best=True)
    settings: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [Breaking(), best, callback]}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer = fit(Monitored(), [small_batch(seed=seed) for seed in range(3)], **settings)
    told = [str(each.message) for each in found]
    for name in ("exported", "exported-best"):
        assert any(each.startswith(f"OnnxExport has not written {tmp_path / name}") for each in told)
    assert (trainer.state.finished, trainer.global_step) == (True, 3)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    project = tmp_path / "project.py"
    project.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "from tests.anywhere.modules import TabularMLP\n"
        "def batches():\n"
        "    return DataLoader([TabularMLP.batch(6, 0)], batch_size=None)\n"
    )
    command = [sys.executable, "-m", "lightning_ort", "export", "--training", f"{project}:TabularMLP"]
    command += ["--data", f"{project}:batches", "-o", str(tmp_path / "exported")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "training.onnx, evaluation.onnx, prediction.onnx" in done.stdout
    assert runner.Training.load(tmp_path / "exported").updates == 0
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, "already exists" in again.stderr) == (1, True)


def test_command_refuses_what_only_training_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["lightning-ort", "export", "x.ckpt", "--module", "a:B", "-o", str(tmp_path / "out"), "--float16"]
    monkeypatch.setattr("sys.argv", [*command, "--gradient-clip-val", "1"])
    with pytest.raises(SystemExit, match=r"^--gradient-clip-val, --float16: pass --training too"):
        main()


def test_logged_metrics(tmp_path: Path) -> None:
    class Measured(Small):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(3, average="micro")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.layer(batch["x"])
            self.accuracy(logits, batch["y"])
            self.log("accuracy", self.accuracy)
            self.log_dict({"largest": logits.max(), "two": 2})
            return F.cross_entropy(logits, batch["y"])

    batch = {**small_batch(), "y": torch.tensor([0, 1, 2, 0, 1])}
    module = Measured()
    export_training(module, batch, tmp_path / "exported")
    _, (result,) = steps_of(tmp_path / "exported", [batch])
    logits = module.layer(batch["x"])
    assert result["accuracy"] == pytest.approx((logits.argmax(1) == batch["y"]).float().mean().item())
    assert (result["largest"], result["two"]) == (pytest.approx(logits.max().item()), 2)
    assert int(module.accuracy.tp.sum() if hasattr(module.accuracy, "tp") else 0) == 0  # nothing is left of the trace


@pytest.mark.parametrize("is_grouped", [False, True])
def test_logged_collection_of_metrics(is_grouped: bool, tmp_path: Path) -> None:
    class Measured(Small):
        def __init__(self) -> None:
            super().__init__()
            self.training_metrics = MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3)])
            self.metrics = self.training_metrics.clone(prefix="val_")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.layer(batch["x"])
            self.log_dict(self.training_metrics(logits, batch["y"]))
            return F.cross_entropy(logits, batch["y"])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metrics.update(self.layer(batch["x"]), target=batch["y"])
            self.log_dict(self.metrics)

    batch = {**small_batch(), "y": torch.tensor([0, 1, 2, 0, 1])}
    module = Measured()
    if is_grouped:
        module.metrics.update(module.layer(batch["x"]), batch["y"])
    groups = copy.deepcopy(module.metrics.compute_groups)
    export_training(module, batch, tmp_path / "exported")
    assert module.metrics.compute_groups == groups
    results = runner.Training.load(tmp_path / "exported").evaluate(as_arrays(batch))
    expected = Measured().metrics(module.layer(batch["x"]), batch["y"])
    assert results == pytest.approx({key: value.item() for key, value in expected.items()})


def test_an_optimizer_that_needs_the_trainer(tmp_path: Path) -> None:
    class Scheduled(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.max_steps)

    module = Scheduled()
    with pytest.raises(ExportFailed, match=r"configure_optimizers raised RuntimeError: .*module\.trainer"):
        export_training(module, small_batch(), tmp_path / "exported")
    module.trainer = Trainer(max_steps=10, **QUIET)
    exported = export_training(module, small_batch(), tmp_path / "exported")
    assert json.loads((exported.path / "training.json").read_text())["optimizer"]["groups"][0]["learning_rate"] == 0.1
