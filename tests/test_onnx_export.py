"""Export to ONNX: the file gives the module's results, or there is no file; and a Trainer predicts with it."""

import json
import logging
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import OnnxExport, ORTPredictor, ORTStrategy, export_onnx
from lightning_ort.compiler.regions.reproducer_script import largest_difference
from lightning_ort.onnx_export import export as export_module
from lightning_ort.onnx_export.failure import ExportFailed

pytest.importorskip("onnxscript")
import onnx
import onnx_ir
import onnxruntime

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples" / folder) for folder in ("digits", "language_model")]


class MLP(LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader:
        return loader()

    def val_dataloader(self) -> DataLoader:
        return loader()


class Computes(LightningModule):
    """Its ``forward`` is a function of itself and the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def loader(rows: int = 20) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))), batch_size=8)


def x(rows: int = 4) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(2))


def run(path: Path, **inputs: Tensor) -> list[Tensor]:
    """What onnxruntime alone makes of a file."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(output) for output in session.run(None, {k: v.numpy() for k, v in inputs.items()})]


def evaluated(module: nn.Module, *args: Any) -> Any:
    training = module.training
    with torch.no_grad():
        outputs = module.eval()(*args)
    module.train(training)
    return outputs


def cnn() -> tuple[LightningModule, Callable[[int], Tensor]]:
    from digits import CNN

    return CNN(width=8), lambda rows: torch.rand(rows, 1, 8, 8)


def gpt() -> tuple[LightningModule, Callable[[int], Tensor]]:
    from model import GPT

    module = GPT(vocabulary_size=32, context=16, width=32, depth=2, heads=2)
    return module, lambda rows: torch.randint(0, 32, (rows, 16))


def mlp() -> tuple[LightningModule, Callable[[int], Tensor]]:
    return MLP(), x


@pytest.mark.parametrize(
    ("make", "quantize"),
    [
        *((cnn, quantize) for quantize in (None, "fp16", "int8")),
        *(pytest.param(make, each, marks=pytest.mark.slow) for make in (mlp, gpt) for each in (None, "fp16", "int8")),
    ],
)
def test_the_file_gives_the_modules_results(make: Callable[[], Any], quantize: Any, tmp_path: Path) -> None:
    module, sample = make()
    path = tmp_path / "model.onnx"
    exported = export_onnx(module, path, sample(3), quantize=quantize)
    assert exported.error <= 1e-4
    model = onnx.load(path)
    assert [size.dim_param for size in model.graph.input[0].type.tensor_type.shape.dim][0] == "batch"
    assert path.stat().st_size == exported.bytes
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]
    for rows in (1, 3, 7):
        inputs = sample(rows)
        (output,) = run(path, **{model.graph.input[0].name: inputs})
        expected = evaluated(module, inputs)
        assert output.dtype is expected.dtype
        difference = largest_difference(output, expected)
        if quantize is None:
            assert difference <= 1e-4
            continue
        # as far off as reported for other inputs, and not the float model under another name
        assert exported.quantized_error is not None
        assert exported.error < difference < 10 * exported.quantized_error
    types = {node.op_type for node in model.graph.node}
    assert ({"MatMulInteger", "ConvInteger"} & types != set()) == (quantize == "int8")
    halves = [tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT16]
    assert bool(halves) == (quantize == "fp16")


def test_metadata_and_names(tmp_path: Path) -> None:
    export_onnx(MLP(width=5), tmp_path / "model.onnx", {"x": x()}, quantize="int8")
    properties = {entry.key: entry.value for entry in onnx.load(tmp_path / "model.onnx").metadata_props}
    metadata = {key.removeprefix("lightning_ort."): json.loads(properties[key]) for key in properties if "_ort." in key}
    assert metadata["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 8]}]
    assert metadata["outputs"] == [{"name": "output", "dtype": "float32", "shape": ["batch", 3]}]
    assert metadata["hparams"] == {"width": 5}
    assert metadata["module"] == f"{__name__}.MLP"
    assert metadata["quantize"] == "int8"
    assert metadata["versions"]["torch"] == torch.__version__
    assert metadata["versions"]["onnxruntime"] == onnxruntime.__version__
    assert __file__.encode() not in (tmp_path / "model.onnx").read_bytes()  # the file may be given away


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    class Several(Computes):
        def forward(self, linear: Tensor, *, scale: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
            hidden = torch.relu(self.linear(linear))
            assert mask is not None
            return {"relu": hidden * scale, "linear": linear, "rest": (hidden.argmax(-1), [mask & (hidden > 0)])}

    module = Several(lambda: None)
    # in another order than the parameters', and with the names of nodes and of each other
    sample = {"mask": x() > 0, "scale": torch.tensor(2.0), "linear": x()}
    export_onnx(module, tmp_path / "model.onnx", sample)
    predictor = ORTPredictor(tmp_path / "model.onnx")
    assert [value.name for value in predictor.session.inputs] == ["linear", "scale", "mask"]
    inputs = {"linear": x(6) + 1, "scale": torch.tensor(3.0), "mask": x(6) > 0.5}
    with torch.no_grad():
        expected = module(**inputs)
    for outputs in (predictor(inputs), predictor(**inputs), predictor(*inputs.values())):
        assert list(outputs) == ["relu", "linear", "rest"]
        torch.testing.assert_close(outputs["relu"], expected["relu"])
        assert torch.equal(outputs["linear"], inputs["linear"])
        assert torch.equal(outputs["rest"][0], expected["rest"][0])
        assert torch.equal(outputs["rest"][1][0], expected["rest"][1][0])


def test_the_module_is_left_as_it_was(tmp_path: Path) -> None:
    def count(module: Any, x: Tensor) -> Tensor:
        module.calls += 1
        return module.linear(x)

    module = Computes(count)
    module.register_buffer("calls", torch.zeros(()))
    module.dropout = nn.Dropout().eval()
    module.linear.compile(backend="eager")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    export_onnx(module, tmp_path / "model.onnx", x())
    assert module.training
    assert module.linear.training
    assert not module.dropout.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def branch(module: Any, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return module.linear(x)
    return x


def large(module: Any, x: Tensor) -> Tensor:
    if len(x) > 2:
        return module.linear(x)
    return x


class Igamma(Computes):
    def forward(self, x: Tensor) -> Tensor:
        return torch.igamma(x.abs(), x.abs())


MERGED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a range of indices": lambda m, x: F.embedding(torch.arange(len(x) - 1, -1, -1), m.linear.weight * 2) + x,
    "zeros before an average": lambda m, x: F.avg_pool1d(F.pad(m.linear(x)[:, None], (1, 1)), 3, 1, 0, False, False),
    "zeros before a maximum": lambda m, x: F.max_pool1d(F.pad(-x[:, None].abs(), (1, 1)), 3, 1),
}


@pytest.mark.parametrize("name", MERGED)
def test_what_onnxruntime_merges_into_something_else(name: str, tmp_path: Path) -> None:
    module, path = Computes(MERGED[name]), tmp_path / "model.onnx"
    export_onnx(module, path, x())
    for rows in (1, 5):
        (output,) = run(path, x=x(rows))
        torch.testing.assert_close(output, evaluated(module, x(rows)), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not onnxruntime.__version__.startswith("1.19."), reason="needs a fault that 1.32 has not")
def test_it_is_verified_as_other_programs_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "_keep_apart", lambda model: None)
    with pytest.raises(ExportFailed, match="differs from the module's"):
        export_onnx(Computes(MERGED["zeros before an average"]), tmp_path / "model.onnx", x())


class Squeeze(Computes):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze()


class Half(Computes):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).bfloat16().erf().float()


HERE = r".*\n  at .*test_onnx_export.py:\d+ in "
REFUSED = {
    "a branch on values": (Computes(branch), rf"the values of tensors{HERE}branch: if x.sum\(\) > 0:"),
    "an op": (Igamma(branch), rf"the op prims.igamma.default was not{HERE}forward: return torch.igamma"),
    "a branch on the size": (
        Computes(large),
        rf"only for .* at least 3.*dynamic_batch=False{HERE}large: if len\(x\) > 2:",
    ),
    "a fixed size": (Computes(lambda m, x: m.linear(x.view(4, -1))), "static shape of 4"),
    "one size alone": (Computes(lambda m, x: x[torch.arange(4)]), r"forward\(x \[1, 8\]\) fails: IndexError"),
    "another shape for 1": (Squeeze(branch), rf"forward\(x \[1, 8\]\){HERE}forward: .*squeeze\(\)"),
    "random numbers": (Computes(lambda m, x: x + torch.rand_like(x)), "differs from the module's .* random numbers"),
    "a missing kernel": (Half(branch), rf"model is not valid: .* Erf.*{HERE}forward: .*erf\(\).*\n.*call \.float\(\)"),
    "an error": (
        Computes(lambda m, x: m.linear(x[:, 1:])),
        rf"fails: RuntimeError: (addmm: )?mat1 and mat2{HERE}.*x\[:, 1:\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported(name: str, tmp_path: Path) -> None:
    module, message = REFUSED[name]
    with pytest.raises(ExportFailed, match=message):
        export_onnx(module, tmp_path / "model.onnx", x())
    assert list(tmp_path.iterdir()) == []
    assert module.training


def test_a_mismatch_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = MLP()
    export = torch.onnx.export

    def wrong(*args: Any, **kwargs: Any) -> Any:
        program = export(*args, **kwargs)
        bias = next(v for v in program.model.graph.initializers.values() if v.name == "net.3.bias")
        bias.const_value = onnx_ir.tensor(bias.const_value.numpy() + np.float32(0.01))
        return program

    monkeypatch.setattr(torch.onnx, "export", wrong)
    (tmp_path / "kept.onnx").write_text("older")
    for name in ("model.onnx", "kept.onnx"):
        with pytest.raises(ExportFailed, match="'output'.*differs from the module's.*by 0.01; allowed is 0.0001"):
            export_onnx(module, tmp_path / name, x())
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.onnx"]
    assert (tmp_path / "kept.onnx").read_text() == "older"
    assert 0.005 < export_onnx(module, tmp_path / "model.onnx", x(), tolerance=0.02).error < 0.02


def test_fixed_batch(tmp_path: Path) -> None:
    module = Computes(lambda m, x: m.linear(x) if len(x) > 2 else x)
    export_onnx(module, tmp_path / "model.onnx", x(4), dynamic_batch=False)
    predictor = ORTPredictor(tmp_path / "model.onnx")
    torch.testing.assert_close(predictor(x(4)), evaluated(module, x(4)))
    with pytest.raises(ValueError, match=r"shape \(3, 8\), but model.onnx expects x: float32\[4, 8\]"):
        predictor(x(3))


@pytest.mark.parametrize(
    ("sample", "settings", "error", "message"),
    [
        (None, {}, ValueError, "MLP has no sample inputs.*example_input_array"),
        ((x(), x()), {}, TypeError, "do not fit MLP.forward.*too many positional"),
        ({"y": x()}, {}, TypeError, "do not fit MLP.forward.*'x'"),
        ((3,), {}, TypeError, "'x' of MLP is a int"),
        (torch.tensor(1.0), {}, ValueError, "no batch dimension.*dynamic_batch=False"),
        (x(0), {}, ValueError, "batch of the sample inputs is empty"),
        (x(), {"quantize": "int4"}, ValueError, "quantize='int4': choose one of 'fp16', 'int8'"),
        (x(), {"tolerance": -1.0}, ValueError, "tolerance=-1.0"),
    ],
)
def test_bad_arguments(sample: Any, settings: Any, error: type, message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        export_onnx(MLP(), tmp_path / "model.onnx", sample, **settings)
    assert list(tmp_path.iterdir()) == []


def test_no_forward_and_no_tensor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="LightningModule has no `forward`"):
        export_onnx(LightningModule(), tmp_path / "model.onnx", x())
    with pytest.raises(TypeError, match=r"returned a NoneType \(output_1\)"):
        export_onnx(Computes(lambda m, x: (x, None)), tmp_path / "model.onnx", x())


def test_too_large_to_quantize(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = nn.Linear(2**15, 2**15)
    with pytest.raises(ValueError, match="larger than 2 GB"):
        export_onnx(module, tmp_path / "model.onnx", torch.zeros(1, 2**15), quantize="int8")


def test_onnxscript_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "ONNXSCRIPT", RequirementCache("onnxscript>=1000"))
    with pytest.raises(ModuleNotFoundError, match=r"lightning-ort\[export\].*onnxscript>=1000"):
        export_onnx(MLP(), tmp_path / "model.onnx", x())
    with pytest.raises(ModuleNotFoundError, match=r"lightning-ort\[export\]"):
        OnnxExport(tmp_path / "model.onnx")


def test_callback(make_trainer: Callable[..., Trainer], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best = ModelCheckpoint(tmp_path / "checkpoints", monitor="val_loss", save_top_k=2)
    export = OnnxExport(tmp_path / "model.onnx", x(), best=True)
    module = MLP()
    averaging = getattr(callbacks, "EMAWeightAveraging", None)  # since Lightning 2.6
    average = [] if averaging is None else [averaging(decay=0.5)]  # the checkpoints have averaged weights
    trainer = make_trainer(max_epochs=3, callbacks=[*average, best, export], enable_checkpointing=True)
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "lightning_ort"):
        warnings.simplefilter("ignore")
        trainer.fit(module)
    assert len(best.best_k_models) == 2
    (last,) = run(tmp_path / "model.onnx", x=x(5))
    torch.testing.assert_close(last, evaluated(module, x(5)), rtol=1e-4, atol=1e-5)
    loaded = MLP.load_from_checkpoint(best.best_model_path)
    (found,) = run(tmp_path / "model-best.onnx", x=x(5))
    torch.testing.assert_close(found, evaluated(loaded, x(5)), rtol=1e-4, atol=1e-5)
    written = [record.getMessage() for record in caplog.records if "differs from torch" in record.getMessage()]
    assert [line.partition(":")[0] for line in written].count(str(tmp_path / "model.onnx")) == 1
    improvements = {line for line in written if "model-best.onnx" in line}
    assert improvements
    # the optimizer's states are in the checkpoint as ever: the export is no part of it
    assert "OnnxExport" not in str(torch.load(best.best_model_path, weights_only=True)["callbacks"])


def test_callback_after_ort_training(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    strategy = ORTStrategy(config={"placement": "always", "debug": {"capture": "modules"}})
    module = MLP()
    make_trainer(max_epochs=1, strategy=strategy, callbacks=OnnxExport(tmp_path / "model.onnx", x())).fit(module)
    assert strategy.report.ort_runs > 0
    (output,) = run(tmp_path / "model.onnx", x=x())
    torch.testing.assert_close(output, evaluated(module, x()), rtol=1e-4, atol=1e-5)


def test_callback_is_checked_when_the_fit_starts(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match="no sample inputs"):
        make_trainer(max_epochs=1, callbacks=OnnxExport(path)).fit(MLP())
    with pytest.raises(ValueError, match="ModelCheckpoint"):
        make_trainer(max_epochs=1, callbacks=OnnxExport(path, x(), best=True)).fit(MLP())
    with pytest.raises(ValueError, match="quantize"):
        OnnxExport(path, quantize="int2")  # type: ignore[arg-type]
    make_trainer(fast_dev_run=True, callbacks=OnnxExport(path, x(), best=True)).fit(MLP())
    assert not path.exists()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[MLP, Path]:
    path = tmp_path_factory.mktemp("served") / "model.onnx"
    module = MLP()
    export_onnx(module, path, x())
    return module, path


@pytest.mark.parametrize("strategy", ["auto", "ort"])
def test_trainer_predicts(served: Any, strategy: str, make_trainer: Callable[..., Trainer]) -> None:
    module, path = served
    expected = make_trainer().predict(module, loader())
    predictor = ORTPredictor(path)
    runs: list[str] = []
    session = predictor.session._session
    run_session = session.run_with_iobinding
    session.run_with_iobinding = lambda binding: (runs.append(session.get_providers()[0]), run_session(binding))
    got = make_trainer(strategy=strategy).predict(predictor, loader())
    assert [len(batch) for batch in got] == [8, 8, 4]
    for batch, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(batch, reference, rtol=1e-4, atol=1e-5)
    assert runs == ["CPUExecutionProvider"] * 3


def test_predictor_copies_nothing(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = ORTPredictor(served[1])
    bound: dict[str, int] = {}
    make = predictor.session._session.io_binding

    def binding() -> Any:
        made = make()
        bind_input, bind_output = made.bind_input, made.bind_output
        made.bind_input = lambda *args: (bound.update({args[0]: args[-1]}), bind_input(*args))
        made.bind_output = lambda *args: (bound.update({args[0]: args[-1]}), bind_output(*args))
        return made

    monkeypatch.setattr(predictor.session._session, "io_binding", binding)
    inputs = x()
    output = predictor(inputs)
    assert bound == {"x": inputs.data_ptr(), "output": output.data_ptr()}
    torch.testing.assert_close(predictor(x(8)[::2]), evaluated(served[0], x(8)[::2]))  # not contiguous


def test_predictor_of_a_shape_known_after_the_run(tmp_path: Path) -> None:
    module = Computes(lambda m, x: (x[x > 0], m.linear(x)))
    export_onnx(module, tmp_path / "model.onnx", x())
    positive, linear = ORTPredictor(tmp_path / "model.onnx")(x(7))
    assert torch.equal(positive, x(7)[x(7) > 0])
    torch.testing.assert_close(linear, evaluated(module.linear, x(7)))


def test_an_input_that_no_node_reads(tmp_path: Path) -> None:
    class Ignores(Computes):
        def forward(self, x: Tensor, ignored: Tensor) -> Tensor:  # type: ignore[override]
            return self.linear(x)

    module = Ignores(branch)
    export_onnx(module, tmp_path / "model.onnx", (x(), x()))
    predictor = ORTPredictor(tmp_path / "model.onnx")
    torch.testing.assert_close(predictor(x(3), x(3)), evaluated(module, x(3), x(3)))
    with pytest.raises(ValueError, match="'ignored' has shape .* with {'batch': 3}"):
        predictor(x(3), x(2))


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((), TypeError, r"expects the inputs x: float32\[batch, 8\]; got: none"),
        ((x(), x()), TypeError, "got: 2 by position.*override `predict_step`"),
        (({"y": x()},), TypeError, "got: y"),
        ((x().double(),), TypeError, "torch.float64, but model.onnx expects x: float32"),
        ((x().numpy(),), TypeError, "'x' is a ndarray; pass a torch.Tensor"),
        ((x()[:, :3],), ValueError, r"shape \(4, 3\), but model.onnx expects x: float32\[batch, 8\]"),
        ((x()[0],), ValueError, r"shape \(8,\)"),
        ((x(0),), ValueError, "'x' is empty"),
    ],
)
def test_predictor_refuses(served: Any, args: tuple[Any, ...], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ORTPredictor(served[1])(*args)


def test_predictor_arguments(served: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"lightning-ort export"):
        ORTPredictor(tmp_path / "nothing.onnx")
    with pytest.raises(ValueError, match="no Nonsense; it has .*CPUExecutionProvider"):
        ORTPredictor(served[1], providers=["Nonsense"])


def test_predictor_is_pickled_and_reads_other_files(served: Any, tmp_path: Path) -> None:
    model = onnx.load(served[1])
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    expected = evaluated(served[0], x())
    for predictor in (pickle.loads(pickle.dumps(ORTPredictor(served[1]))), ORTPredictor(tmp_path / "other.onnx")):
        torch.testing.assert_close(predictor(x()), expected, rtol=1e-4, atol=1e-5)


def test_pytorch_lightning(served: Any, tmp_path: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    from lightning_ort.pytorch_lightning import OnnxExport as Export
    from lightning_ort.pytorch_lightning import ORTPredictor as Predictor

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

        training_step = MLP.training_step
        configure_optimizers = MLP.configure_optimizers

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    quiet |= {"enable_model_summary": False, "max_epochs": 1}
    module = Small()
    pl.Trainer(**quiet, callbacks=Export(tmp_path / "model.onnx", x())).fit(module, loader())
    got = pl.Trainer(**quiet).predict(Predictor(tmp_path / "model.onnx"), loader())
    expected = torch.cat([evaluated(module, batch) for (batch,) in loader()])
    torch.testing.assert_close(torch.cat(got), expected, rtol=1e-4, atol=1e-5)
