"""Run one region of a compiled graph in torch and, if it has an ONNX model, in onnxruntime.

This code is also copied into the scripts of ``save_reproducer``, so it imports nothing of lightning_ort.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

# dtype, and what onnxruntime calls it where a tensor is bound: numpy's type, or ONNX's number where numpy has none
ELEMENT_TYPES: dict[str, tuple[torch.dtype, Any]] = {
    "tensor(float)": (torch.float32, np.float32),
    "tensor(uint8)": (torch.uint8, np.uint8),
    "tensor(int8)": (torch.int8, np.int8),
    "tensor(int16)": (torch.int16, np.int16),
    "tensor(int32)": (torch.int32, np.int32),
    "tensor(int64)": (torch.int64, np.int64),
    "tensor(bool)": (torch.bool, np.bool_),
    "tensor(float16)": (torch.float16, np.float16),
    "tensor(double)": (torch.float64, np.float64),
    "tensor(bfloat16)": (torch.bfloat16, 16),
}


DISABLED_OPTIMIZERS = [
    "Pad_Fusion",  # merges zeros into an average pool that does not count its own padding (1.19): other averages
    "GatherToSliceFusion",  # makes a Slice of a Gather at a Range, where a negative bound counts from the end (1.19)
]


def extent(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a tensor of these sizes and strides spans."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if 0 not in sizes else 0


def make_input(spec: Any, generator: torch.Generator) -> Any:
    """Return a random tensor of (sizes, strides, dtype, device); a number is returned as it is."""
    if not isinstance(spec, tuple):
        return spec
    sizes, strides, dtype, device = spec
    elements = extent(sizes, strides)
    # zeros are valid indices and labels; floats away from zero keep logarithms and roots finite, and up to one they are
    # valid probabilities
    if dtype.is_floating_point:
        flat = torch.rand(elements, generator=generator).mul_(0.9).add_(0.1).to(dtype)
    else:
        flat = torch.zeros(elements, dtype=dtype)
    return flat.to(device).as_strided(sizes, strides)


def bind(model: Path, inputs: Sequence[Any], expected: Sequence[torch.Tensor]) -> tuple[Callable[[], None], list[Any]]:
    """Return a function that runs a model, and the tensors that it writes to."""
    import onnxruntime

    device = expected[0].device
    on_gpu = ("CUDAExecutionProvider", {"device_id": str(device.index or 0)})
    provider = on_gpu if device.type == "cuda" else "CPUExecutionProvider"
    session = onnxruntime.InferenceSession(str(model), providers=[provider], disabled_optimizers=DISABLED_OPTIMIZERS)
    binding = session.io_binding()
    outputs, kept = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in expected], []
    for value in session.get_inputs():
        dtype, element = ELEMENT_TYPES[value.type]
        x = torch.as_tensor(inputs[int(value.name[1:])]).to(dtype).contiguous()
        kept.append(x)
        binding.bind_input(value.name, x.device.type, x.device.index or 0, element, tuple(x.shape), x.data_ptr())
    for value, x in zip(session.get_outputs(), outputs, strict=True):
        _, element = ELEMENT_TYPES[value.type]
        binding.bind_output(value.name, x.device.type, x.device.index or 0, element, tuple(x.shape), x.data_ptr())
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the session has a stream of its own, for which it waits at the end of a run
    return lambda kept=kept: session.run_with_iobinding(binding), outputs


def median_ms(run: Callable[[], Any]) -> float:
    """Return the median time of a function after three warm-up runs."""
    times = []
    for _ in range(23):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:]) * 1e3


def largest_difference(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference, each in units of the largest value of its result.

    Equal infinities and NaN at the same place count as equal.
    """
    largest = 0.0
    for a, b in zip(got, expected, strict=True):
        a, b = a.double(), b.double()
        differences = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
        values = b.abs()[b.isfinite()]
        differences = differences / (float(values.max()) if values.numel() and values.any() else 1.0)
        largest = max([largest, *differences.flatten().tolist()], key=lambda x: (x != x, x))
    return largest


def in_float64(forward: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Return the results in float64, ``None`` if that does not run, as where an operation names its dtype."""
    floats = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in inputs]
    try:
        return forward(None, *[x.double() if wide else x for x, wide in zip(inputs, floats, strict=True)])
    except RuntimeError:
        return None


def reproduce(forward: Callable[..., Any], specs: Sequence[Any], model: Path | None) -> None:
    """Print the times in torch and onnxruntime, the largest difference between the two, and torch's own error."""
    generator = torch.Generator().manual_seed(0)
    inputs = [make_input(spec, generator) for spec in specs]
    with torch.no_grad():
        expected = forward(None, *inputs)
        print(f"torch: {median_ms(lambda: forward(None, *inputs)):.3f} ms")
        if model is not None:
            run, outputs = bind(model, inputs, expected)
            print(f"onnxruntime: {median_ms(run):.3f} ms")
            text = f"largest difference: {largest_difference(outputs, expected):.1e} of the largest value"
            if (exact := in_float64(forward, inputs)) is not None:
                text += f"; of torch to float64: {largest_difference(expected, exact):.1e}"
            print(text)
