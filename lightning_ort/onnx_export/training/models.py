"""The models of a folder: from a traced step to an ONNX model with named inputs and outputs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx

from lightning_ort.compat.torch_graphs import expression_of
from lightning_ort.compiler.executors.ort.conversion.elementary import where
from lightning_ort.compiler.executors.ort.conversion.graph import Value, live
from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported
from lightning_ort.compiler.graphs.nodes import is_random, values_of
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.onnx_export.failure import ExportFailed, line_in
from lightning_ort.onnx_export.training.batch import Formula, Limits, formula
from lightning_ort.onnx_export.training.graph import IR_VERSION, OPSET, PortableGraph
from lightning_ort.onnx_export.training.optimizers import Clock, Optimizer
from lightning_ort.onnx_export.training.tracing import Trace

# inputs that a runner gives a model with an optimizer
LEARNING_RATE, STEP, UPDATE = "optimizer/learning_rate", "optimizer/step", "optimizer/update"
SUM = "gradient_sum"  # the state of accumulated gradients


@dataclass(frozen=True)
class Port:
    """An input or output of a model."""

    name: str  # its name in the model
    # "field", "parameter", "buffer", "state" (of the optimizer), "setting", "random"; of an output "gradient", "loss",
    # "logged", "result", "check"
    role: str
    # what it is: the name of the parameter, buffer, field, logged value or result, or the kind of random numbers
    key: str
    dtype: torch.dtype
    shape: tuple[Formula, ...]  # its sizes: numbers, names of those that may change, and what is computed from these


@dataclass(frozen=True)
class Settings:
    """How gradients become an update."""

    optimizer: Optimizer | None  # the optimizer, or ``None`` to return the gradients
    clip_value: float | None = None  # clip by norm, or by value
    clip_algorithm: str = "norm"  # ``"norm"`` or ``"value"``
    accumulate: int = 1  # batches whose gradients are added before an update


@dataclass
class Model:
    """A model and what its inputs and outputs are."""

    model: ir.Model
    fields: list[Port]  # of the batch, also what nothing reads
    inputs: list[Port]
    outputs: list[Port]
    limits: Limits


def convert(
    trace: Trace,
    state: Mapping[str, tuple[str, Tensor]],
    tensors: Mapping[str, Tensor],
    settings: Settings | None,
    returns_gradients: bool,
    halved: Collection[str],
    limits: Limits,
) -> Model:
    """Make a model of a traced step.

    ``state`` is what changes from step to step, roles and values by name; other
    ``tensors`` of the module are constants of the model, those that are ``halved`` in float16. ``settings`` are for a
    model that trains, which may return gradients although it has an optimizer. ``limits`` say for which sizes it is
    right.

    Raises :class:`ExportFailed` if an operation cannot be written, with its module and the user's line.
    """
    writer = _Writer(trace)
    writer.declare(state, tensors, halved)
    writer.run()
    if settings is not None:
        writer.update(state, settings, returns_gradients or settings.optimizer is None)
    return writer.finish(limits)


class _Writer:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.symbols = trace, trace.symbols
        self.ctx = PortableGraph()
        self.inputs: list[Port] = []
        self.outputs: list[tuple[Port, Value]] = []

    def declare(
        self, state: Mapping[str, tuple[str, Tensor]], tensors: Mapping[str, Tensor], halved: Collection[str]
    ) -> None:
        for name, node in self.trace.fields.items():
            # a field may be called like a parameter
            self._input(node, f"batch/{name}" if name in tensors or "/" in name else name, "field", name)
        for name, node in self.trace.state.items():
            if name in state:
                self._input(node, name, state[name][0], name)
            elif node.users:
                self.ctx.add_tensor(node, name, tensors[name], torch.float16 if name in halved else None)
        for node, value in self.trace.constants.items():
            if node.users:
                self.ctx.add_tensor(node, f"constant/{node.name}", value)

    def _input(self, node: fx.Node, name: str, role: str, key: str) -> None:
        self.ctx.add_input(node, name)
        value = node.meta["val"]
        self.inputs.append(Port(name, role, key, value.dtype, self._shape(value.shape)))

    def _shape(self, sizes: Sequence[Any]) -> tuple[Formula, ...]:
        return tuple(formula(expression_of(size), self.symbols) for size in sizes)

    def run(self) -> None:
        graph = self.trace.module
        for node in graph.graph.nodes:
            if node.op == "get_attr":  # a constant that the tracer has made
                self.ctx.add_tensor(node, f"constant/{node.name}", getattr(graph, str(node.target)))
            elif node.op == "call_function":
                try:
                    _refuse_narrow(node)
                    self.ctx.convert(node)
                except Unsupported as error:
                    raise ExportFailed(self._explained(node, error)) from error
                except Exception as error:  # a bug of a converter is told with the operation
                    raise ExportFailed(self._explained(node, f"{type(error).__name__}: {error}")) from error
        for index, (kind, sizes) in enumerate(self.ctx.draws):
            self.inputs.append(Port(f"random/{index}", "random", kind, torch.float32, self._shape(sizes)))
        for name, node in self.trace.results.items():
            role = "loss" if name == "loss" else name.partition("/")[0]
            role = role if role in ("loss", "logged", "check") else "result"
            # what a module logs as "loss" need not be its loss
            key = name if name == "logged/loss" and "loss" in self.trace.results else name.removeprefix("logged/")
            self._output(name, role, key, node.meta["val"], self.ctx.value(node))

    def _explained(self, node: fx.Node, reason: Any) -> str:
        modules = list((node.meta.get("nn_module_stack") or {}).values())
        where = f" in {modules[-1][0]}" if modules and modules[-1][0] else ""
        if isinstance(reason, Unsupported) and reason.reason.type is ReasonType.NO_CONVERTER:
            if is_random(node):
                reason = "a distribution that a model cannot draw from; make it of torch.rand or torch.randn"
            elif node.meta.get("unbacked_bindings"):  # a size that the node makes
                reason = (
                    "the size of its result depends on the values of tensors, which a model cannot express: use a mask"
                    " with torch.where, or give a size where the operation takes one (output_size, minlength)"
                )
            else:
                reason = "this operation has no form in standard operators: compute it outside of the step"
        text = f"{self.trace.what} cannot be exported: {node.target}{where}: {reason}"
        line = line_in(node.stack_trace or "")
        return f"{text}\n  at {line}" if line else text

    def _output(self, name: str, role: str, key: str, like: Any, value: Value) -> None:
        self.outputs.append((Port(name, role, key, like.dtype, self._shape(like.shape)), value))

    # what makes it a model that trains

    def update(self, state: Mapping[str, tuple[str, Tensor]], settings: Settings, returns_gradients: bool) -> None:
        trace, ctx, optimizer = self.trace, self.ctx, settings.optimizer
        # what the step itself leaves in a tensor, and what the optimizer goes on from
        left = {name: ctx.value(node) for name, node in trace.written.items()}
        gradients = {name: ctx.value(node) for name, node in trace.gradients.items()}
        for name, value in left.items():
            if optimizer is None or name not in gradients:
                self._output(f"next/{name}", state[name][0], name, state[name][1], value)
        if optimizer is None:
            self._returned(_clipped(ctx, gradients, settings), state)
            return
        groups = len(optimizer.groups)
        clock = Clock(ctx, self._setting(LEARNING_RATE, torch.float32, (groups,)), self._setting(STEP, torch.int64, ()))
        apply = self._setting(UPDATE, torch.bool, ()) if settings.accumulate > 1 else None
        likes = {name: state[name][1] for name in gradients}
        if apply is not None:
            gradients = self._summed(gradients, likes, apply)
        if returns_gradients:
            self._returned(gradients, state)
        gradients = _clipped(ctx, gradients, settings)
        for name, gradient in gradients.items():
            like = likes[name]
            states = {key: self._state(key, name, of[name]) for key, of in optimizer.states.items() if name in of}
            before = left[name] if name in left else ctx.values[trace.state[name]]
            value, new = optimizer.update(ctx, name, before, gradient, states, clock)
            if apply is not None:
                value = where(apply, value, before)
                new = {key: where(apply, made, states[key]) for key, made in new.items()}
            self._output(f"next/{name}", "parameter", name, like, value)
            for key, made in new.items():
                self._output(f"next/{key}/{name}", "state", f"{key}/{name}", optimizer.states[key][name], made)

    def _returned(self, gradients: Mapping[str, Value], state: Mapping[str, tuple[str, Tensor]]) -> None:
        for name, gradient in gradients.items():
            self._output(f"gradient/{name}", "gradient", name, state[name][1], gradient)

    def _summed(self, gradients: dict[str, Value], parameters: Mapping[str, Tensor], apply: Value) -> dict[str, Value]:
        found = {}
        for name, gradient in gradients.items():
            like = parameters[name]
            total = self._state(SUM, name, like) + gradient
            rest = where(apply, self.ctx.const(0.0, like.dtype), total)
            self._output(f"next/{SUM}/{name}", "state", f"{SUM}/{name}", like, rest)
            found[name] = total
        return found

    def _state(self, key: str, name: str, like: Tensor) -> Value:
        self.inputs.append(Port(f"{key}/{name}", "state", f"{key}/{name}", like.dtype, tuple(like.shape)))
        return self.ctx.new_input(f"{key}/{name}", like.dtype, tuple(like.shape))

    def _setting(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Value:
        self.inputs.append(Port(name, "setting", name.rpartition("/")[2], dtype, shape))
        return self.ctx.new_input(name, dtype, shape)

    def finish(self, limits: Limits) -> Model:
        """Make a model of what was written; inputs that nothing reads are left out."""
        results: list[ir.Value] = []
        for port, value in self.outputs:
            made_here = value.ir.producer() is not None and not any(value.ir is other for other in results)
            output = (value if made_here else value.op("Identity")).ir
            output.name, output.type = port.name, ir.TensorType(DTYPES[port.dtype])
            output.shape = onnx_sizes(port.shape)
            results.append(output)
        nodes = live(self.ctx.nodes, results)
        used = {id(value) for node in nodes for value in node.inputs}
        shapes = {port.name: port.shape for port in self.inputs}
        inputs = [value for value in self.ctx.inputs if id(value) in used]
        for each in inputs:
            each.shape = onnx_sizes(shapes[str(each.name)])
        graph = ir.Graph(
            inputs,
            results,
            nodes=nodes,
            initializers=[value for value in self.ctx.constants_used() if id(value) in used],
            opset_imports={"": OPSET},
            name=self.trace.what,
        )
        model = ir.Model(graph, ir_version=IR_VERSION, producer_name="lightning_ort")
        names = {value.name for value in inputs}
        ports = [port for port in self.inputs if port.name in names]
        fields = [port for port in self.inputs if port.role == "field"]
        return Model(model, fields, ports, [port for port, _ in self.outputs], limits)


def onnx_sizes(shape: Sequence[Formula]) -> ir.Shape:
    """A shape as a model has it: what is computed from sizes has no name there."""
    return ir.Shape([size if isinstance(size, (int, str)) else None for size in shape])


def _refuse_narrow(node: fx.Node) -> None:
    values = [value for value in values_of(node) if isinstance(value, Tensor)]
    if narrow := [value.dtype for value in values if value.dtype in (torch.bfloat16, torch.float16)]:
        raise Unsupported(f"{narrow[0]}: a model computes in float32; leave out autocast", ReasonType.DTYPE)


def _clipped(ctx: PortableGraph, gradients: Mapping[str, Value], settings: Settings) -> dict[str, Value]:
    if settings.clip_value is None or not gradients:
        return dict(gradients)
    if settings.clip_algorithm == "value":
        limit = settings.clip_value
        return {name: gradient.min(limit).max(-limit) for name, gradient in gradients.items()}
    # as torch.nn.utils.clip_grad_norm_
    total: Value | None = None
    for gradient in gradients.values():
        square = (gradient * gradient).op("ReduceSum", keepdims=0)
        total = square if total is None else total + square
    assert total is not None
    scale = (settings.clip_value / (total.op("Sqrt") + 1e-6)).min(1.0)
    return {name: gradient * scale for name, gradient in gradients.items()}
