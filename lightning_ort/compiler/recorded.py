"""A recorded step on another engine than PyTorch's interpreter: :func:`on_engine`.

What was recorded are calls with views and writes as they were. An engine gets a graph in which each call only returns
something: the results of the step, its gradients among them, and what it leaves in the tensors that it writes to.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_ort.compat.aot_autograd import without_autocast
from lightning_ort.compat.torch_graphs import OpOverload, functional_graph
from lightning_ort.compat.torchscript import call_with, functional_batch_norm, hides_writes
from lightning_ort.compiler import lowering
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.engines import ENGINES, ORT
from lightning_ort.compiler.regions.region import TORCH
from lightning_ort.compiler.request import CompileRequest
from lightning_ort.recording.calls import Refused, Value
from lightning_ort.recording.program import Program, given


def on_engine(
    engine: str, backend: ORTBackend, masks: str, request: CompileRequest, program: Program, inputs: Sequence[Tensor]
) -> Callable[..., Sequence[Tensor]]:
    """Return what runs a recorded program on an engine.

    Args:
        engine: One of :data:`~lightning_ort.compiler.engines.ENGINES` that compiles.
        backend: What compiles for ONNX Runtime.
        masks: The setting ``dropout_masks``.
        request: What it is compiled for.
        program: What was recorded.
        inputs: Tensors as those of its inputs.

    Returns:
        A function of the inputs that writes to them as the program does and returns its results.

    Raises:
        Refused: If the program is no graph, or the engine runs no part of it.
        Stopped: If no more may be spent.

    """
    try:
        with without_autocast(), torch.no_grad():
            if engine == ORT:
                run = _on_ort(backend, request, program, inputs)
            else:
                gm = graph_of(program, inputs, {})
                made: Any = ENGINES[engine].backend
                run = made(masks, lambda error: None, lambda: request).compile(gm, inputs)
    except Refused:
        raise
    except Exception as error:  # of tracing or compiling: nothing is lost
        raise Refused(f"{ENGINES[engine].label} cannot compile it: {type(error).__name__}: {error}") from error
    written, number = [program.inputs.index(value) for value in program.written], len(program.results)

    def step(*given: Tensor) -> Sequence[Tensor]:
        results = run(*given)
        for place, new in zip(written, results[number:], strict=False):
            given[place].copy_(new)
        return list(results[:number])

    return step


def _on_ort(
    backend: ORTBackend, request: CompileRequest, program: Program, inputs: Sequence[Tensor]
) -> Callable[..., Sequence[Tensor]]:
    if not backend.load():
        raise Refused("onnxruntime cannot be used")
    gm = graph_of(program, inputs, lowering.decompositions(backend.placer.whole_ops()))
    for joint_pass in lowering.JOINT_PASSES:
        joint_pass(gm)
    run, report = backend.compile_graph(gm, inputs, request)
    if all(region.executor == TORCH for region in report.regions):
        raise Refused("no part of it is faster on ONNX Runtime")
    return lambda *given: run([*given])


def graph_of(
    program: Program, inputs: Sequence[Tensor], decompositions: dict[OpOverload, Callable[..., Any]]
) -> fx.GraphModule:
    """Return a program as a graph of ATen operations without writes.

    It takes the inputs of the program and returns its results, then what it leaves in what it writes to, and random
    numbers that nobody gets.

    Raises:
        Refused: If Python reads values in it, or memory is shared in a way that such a graph has not.

    """
    if program.reads:
        raise Refused("Python reads values of its tensors")
    if program.shares_memory:
        raise Refused("its results or what it writes to share memory")

    def run(*given_inputs: Tensor) -> list[Tensor]:
        values: dict[Value, Any] = dict(zip(program.inputs, given_inputs, strict=True))
        values |= {value: values[value].clone() for value in program.written}
        for call in program.calls:
            op, arguments = functional_batch_norm(call.op, given(call.arguments, values))
            if hides_writes(op):
                raise Refused(f"{op.name()} writes to tensors that its schema does not mark")
            found = call_with(op, arguments)
            for result, one in zip(call.results, found if isinstance(found, tuple) else (found,), strict=True):
                if isinstance(result, list):
                    values.update(zip(result, one, strict=True))
                elif result is not None:
                    values[result] = one
        return [values[value] for value in (*program.results, *program.written, *program.unused)]

    with lowering.traced_as_eager():
        return functional_graph(run, inputs, decompositions)
