"""Whether a GPU's kernel of LayerNormalization is as exact as torch's: :func:`is_exact`, which tries it."""

import functools
import logging

import torch
from onnx import TensorProto, helper

from lightning_ort.compat.onnxruntime import memory_of, new_binding, run_function
from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES, element_type
from lightning_ort.compiler.executors.ort.kernels import Kernels, new_session, session_options
from lightning_ort.compiler.executors.ort.providers import CUDA

log = logging.getLogger(__name__)

_ROWS, _COLUMNS, _EPSILON = 32, 256, 1e-5
# relative to the largest result, of which a few hundred numbers are summed and rounded once
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def may_use(kernels: Kernels, dtype: torch.dtype) -> bool:
    """Return whether a layer normalization may be that kernel, which a GPU has to show."""
    return kernels.providers[0] == CUDA and is_exact(dtype, kernels.device)


@functools.cache
def is_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether it is right where a mean is up to 1000 standard deviations; that of onnxruntime's CPU is not."""
    try:
        with torch.no_grad():
            return all(_is_exact_for(mean, dtype, device) for mean in (0.0, 100.0, 1000.0))
    except Exception:  # onnxruntime's own exceptions derive from Exception directly
        log.debug("LayerNormalization could not be tried", exc_info=True)
        return False


def _is_exact_for(mean: float, dtype: torch.dtype, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(_ROWS, _COLUMNS, generator=generator) + mean).to(dtype)
    weight, bias = (torch.randn(_COLUMNS, generator=generator).to(dtype) for _ in range(2))
    expected = torch.native_layer_norm(x.double(), [_COLUMNS], weight.double(), bias.double(), _EPSILON)
    results = _run(*(each.to(device) for each in (x, weight, bias)))
    tolerances = (_TOLERANCE[dtype], *[_TOLERANCE[torch.float32]] * 2)
    return all(
        float((got.cpu().double() - want).abs().max()) <= tolerance * float(want.abs().max())
        for got, want, tolerance in zip(results, expected, tolerances, strict=True)
    )


def _run(*inputs: torch.Tensor) -> list[torch.Tensor]:
    x, device = inputs[0], inputs[0].device
    shapes = (x.shape, (_ROWS, 1), (_ROWS, 1))
    outputs = [
        torch.empty(shape, dtype=dtype, device=device)
        for shape, dtype in zip(shapes, (x.dtype, torch.float32, torch.float32), strict=True)
    ]
    built = new_session(_model(x.dtype), session_options(1), (CUDA,), device)
    binding, memory = new_binding(built), memory_of(device)
    for names, tensors, bind in (("xwb", inputs, binding.bind_input), ("ymr", outputs, binding.bind_output)):
        for name, tensor in zip(names, tensors, strict=True):
            bind(name, memory, element_type(tensor.dtype), tuple(tensor.shape), tensor.data_ptr())
    torch.cuda.synchronize(device)
    run_function(built)(binding, None)  # it waits for its own stream
    return outputs


def _model(dtype: torch.dtype) -> bytes:
    kind, info = int(DTYPES[dtype]), helper.make_tensor_value_info
    node = helper.make_node("LayerNormalization", [*"xwb"], [*"ymr"], axis=-1, epsilon=_EPSILON, stash_type=1)
    shapes = {"x": [_ROWS, _COLUMNS], "w": [_COLUMNS], "b": [_COLUMNS], "y": [_ROWS, _COLUMNS]}
    inputs = [info(name, kind, shapes[name]) for name in "xwb"]
    outputs = [info("y", kind, shapes["y"]), *(info(name, TensorProto.FLOAT, [_ROWS, 1]) for name in "mr")]
    graph = helper.make_graph([node], "layer_norm", inputs, outputs)
    opsets = [helper.make_opsetid("", 18)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
