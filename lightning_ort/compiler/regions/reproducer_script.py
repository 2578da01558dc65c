"""Run one region of a compiled graph in torch and, if it has an ONNX model, in onnxruntime.

This code is also copied into the scripts of :class:`~.reproducer.Reproducer`, so it imports nothing of lightning_ort.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

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


def element_type(kind: str) -> tuple[torch.dtype, Any]:
    """Return the dtype of what onnxruntime writes as ``tensor(float)``, and what it calls that where it binds one."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    dtype = getattr(torch, {"float": "float32", "double": "float64"}.get(name, name))
    # numpy's type, or ONNX's number where numpy has none
    return dtype, 16 if dtype is torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype.type


def bind(session: Any, inputs: Sequence[Any], expected: Sequence[torch.Tensor]) -> tuple[Callable[[], None], list[Any]]:
    """Return a function that runs a session, and the tensors that it writes to."""
    device = expected[0].device
    binding = session.io_binding()
    outputs, kept = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in expected], []
    for value in session.get_inputs():
        dtype, element = element_type(value.type)
        x = torch.as_tensor(inputs[int(value.name[1:])]).to(dtype).contiguous()
        kept.append(x)
        binding.bind_input(value.name, x.device.type, x.device.index or 0, element, tuple(x.shape), x.data_ptr())
    for value, x in zip(session.get_outputs(), outputs, strict=True):
        _, element = element_type(value.type)
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


def largest_difference(got: torch.Tensor, expected: torch.Tensor, least: float = 1.0) -> float:
    """Return how far a result is from the expected one.

    Of floats it is the largest difference, as a share of the largest magnitude, or of ``least`` if that is larger. Of
    integers and booleans it is the share of elements that differ. It is infinite where the shape, the dtype or the
    places of infinities and NaN are not the same.
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        return float((got != expected).double().mean())
    finite = expected.isfinite()
    if not torch.allclose(got[~finite], expected[~finite], equal_nan=True) or not bool(got[finite].isfinite().all()):
        return math.inf
    got, expected = got[finite].double(), expected[finite].double()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=least)) if len(got) else 0.0


def in_float64(forward: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Return the results in float64, ``None`` if that does not run, as where an operation names its dtype."""
    floats = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in inputs]
    try:
        return forward(None, *[x.double() if wide else x for x, wide in zip(inputs, floats, strict=True)])
    except RuntimeError:
        return None


def reproduce(forward: Callable[..., Any], specs: Sequence[Any], model: Path | None, providers: Sequence[Any]) -> None:
    """Print the times in torch and onnxruntime, the largest difference between the two, and torch's own error."""
    generator = torch.Generator().manual_seed(0)
    inputs = [make_input(spec, generator) for spec in specs]
    with torch.no_grad():
        expected = forward(None, *inputs)
        print(f"torch: {median_ms(lambda: forward(None, *inputs)):.3f} ms")
        if model is not None:
            import onnxruntime

            session = onnxruntime.InferenceSession(
                str(model), providers=providers, disabled_optimizers=DISABLED_OPTIMIZERS
            )
            run, outputs = bind(session, inputs, expected)
            print(f"onnxruntime: {median_ms(run):.3f} ms")
            text = f"largest difference: {_largest(outputs, expected):.1e} of the largest value"
            if (exact := in_float64(forward, inputs)) is not None:
                text += f"; of torch to float64: {_largest(expected, exact):.1e}"
            print(text)


def _largest(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    pairs = zip(got, expected, strict=True)
    return max((largest_difference(a.double(), b.double(), 1e-30) for a, b in pairs), default=0.0)
