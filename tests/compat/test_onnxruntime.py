"""onnxruntime's private names exist and mean what ``lightning_ort.compat.onnxruntime`` takes them to mean."""

import functools
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as native
from packaging.version import Version

from lightning_ort.compat import onnxruntime as compat


def negation() -> bytes:
    """A model of one input and one output, of 2 x 3 elements."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "negation", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()


def session_of(options: onnxruntime.SessionOptions | None = None) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(negation(), options, providers=["CPUExecutionProvider"])


def test_import_onnxruntime() -> None:
    """That ORTModule stays out is seen in a new process: ``tests/test_import_is_lean.py``."""
    assert compat.import_onnxruntime() is onnxruntime
    assert sys.modules.get("onnxruntime.training", sys) is not None


def test_binding_and_run() -> None:
    session = session_of()
    memory, binding = compat.memory_of(torch.device("cpu")), compat.new_binding(session)
    x, y = torch.randn(2, 3), torch.empty(2, 3)
    for bind, name, tensor in ((binding.bind_input, "x", x), (binding.bind_output, "y", y)):
        bind(name, memory, np.float32, (2, 3), tensor.data_ptr())
    compat.run_function(session)(binding, onnxruntime.RunOptions())
    assert torch.equal(y, -x)
    x.zero_()  # read where it is, in each run
    compat.run_function(session)(binding, onnxruntime.RunOptions())
    assert torch.equal(y, -x)


@pytest.mark.parametrize(("device", "kind", "index"), [("cpu", 0, 0), ("cuda", 1, 0), ("cuda:2", 1, 2)])
def test_memory_of(device: str, kind: int, index: int) -> None:
    memory = compat.memory_of(torch.device(device))
    assert (memory.device_type(), memory.device_id()) == (kind, index)
    assert (native.OrtDevice.cpu(), native.OrtDevice.cuda()) == (0, 1)


def test_share_cpu_memory() -> None:
    compat.share_cpu_memory(in_arena=True)
    # there is one, as if the program had registered it: refused by onnxruntime 1.19, replaced by 1.32
    replaced = Version(onnxruntime.__version__) >= Version("1.32")
    assert compat.share_cpu_memory(in_arena=True) == replaced
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.use_env_allocators", "1")
    session = session_of(options)
    x = torch.randn(2, 3)
    assert torch.equal(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), -x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_cuda_provider_error() -> None:
    error = compat.cuda_provider_error()
    assert error is not None
    assert ".so" in error
    assert "providers_shared" not in error  # that one is in every build


def test_fused_ops() -> None:
    """Importing it would import ORTModule, which does not import with this torch and leaves torch changed."""
    folder = Path(onnxruntime.__file__).parent / "training"
    if not folder.is_dir():
        pytest.skip("for the training build")
    assert (folder / "ortmodule" / "torch_cpp_extensions" / "cuda" / "fused_ops").is_dir()


def test_mark_preprocessed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from onnxruntime.quantization import quantize_dynamic

    marked = onnx.ModelProto.FromString(negation())
    compat.mark_preprocessed(marked)
    for model, warnings in ((marked, 0), (onnx.ModelProto.FromString(negation()), 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            quantize_dynamic(model, tmp_path / "quantized.onnx")
        assert len([record for record in caplog.records if "pre-processing" in record.getMessage()]) == warnings


def test_binds_bfloat16() -> None:
    """It is what a binding does with ONNX's number for the dtype."""
    session = session_of()
    memory, x = compat.memory_of(torch.device("cpu")), torch.zeros(2, 3)
    bind = functools.partial(compat.new_binding(session).bind_input, "x", memory)
    if compat.binds_bfloat16():
        bind(TensorProto.FLOAT, (2, 3), x.data_ptr())
    else:
        with pytest.raises(Exception, match="(?i)incompatible|type"):
            bind(TensorProto.BFLOAT16, (2, 3), x.data_ptr())


def test_ep_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(compat.ep_devices()) <= set(onnxruntime.get_available_providers())  # without any plug-in
    device = SimpleNamespace(ep_name="PlugIn")
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [device, device], raising=False)
    assert compat.ep_devices() == {"PlugIn": [device, device]}
