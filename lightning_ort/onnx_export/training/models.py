"""The models of a folder: from a traced step to an ONNX model with named inputs and outputs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch import Tensor, fx

from lightning_ort.compiler.executors.ort.conversion.graph import Value, live
from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported
from lightning_ort.compiler.nodes import is_random, values_of
from lightning_ort.compiler.report import ReasonType
from lightning_ort.onnx_export.failure import ExportFailed, line_in
from lightning_ort.onnx_export.training.graph import IR_VERSION, OPSET, PortableGraph
from lightning_ort.onnx_export.training.optimizers import Clock, Optimizer
from lightning_ort.onnx_export.training.tracing import Trace

LEARNING_RATE, STEP, UPDATE = "optimizer/learning_rate", "optimizer/step", "optimizer/update"
SUM = "gradient_sum"  # the state of accumulated gradients


@dataclass(frozen=True)
class Port:
    """An input or output of a model.

    Args:
        name: Its name in the model.
        role: ``field``, ``parameter``, ``buffer``, ``state``, ``setting``, ``loss``, ``logged``, ``gradient`` or
            ``result``.
        key: What it is: the name of the parameter, buffer, field, logged value or result.
        dtype: Its dtype.
        shape: Its sizes: numbers, and names or expressions of those that may change.

    """

    name: str
    role: str
    key: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Settings:
    """How gradients become an update.

    Args:
        optimizer: The optimizer, or ``None`` to return the gradients.
        clip_value: Clip by norm, or by value.
        clip_algorithm: ``"norm"`` or ``"value"``.
        accumulate: Batches whose gradients are added before an update.

    """

    optimizer: Optimizer | None
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    accumulate: int = 1


@dataclass
class Model:
    """A model and what its inputs and outputs are."""

    model: ir.Model
    fields: list[Port] = field(default_factory=list)  # of the batch, also what nothing reads
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)


def convert(
    trace: Trace,
    what: str,
    parameters: Mapping[str, Tensor],
    settings: Settings | None = None,
    drops: bool = True,
    halved: Collection[str] = (),
) -> Model:
    """Make a model of a traced step.

    Args:
        trace: The step.
        what: What it is, for messages.
        parameters: All that are trained, in their order.
        settings: For a model that trains.
        drops: Whether dropout draws numbers.
        halved: The frozen parameters that are stored in float16.

    Raises:
        ExportFailed: If an operation cannot be written, with its module and the user's line.

    """
    writer = _Writer(trace, what, drops)
    writer.declare(halved)
    writer.run()
    if settings is not None:
        writer.update(parameters, settings)
    return writer.finish()


class _Writer:
    def __init__(self, trace: Trace, what: str, drops: bool) -> None:
        self.trace, self.what, self.symbols = trace, what, trace.symbols
        self.ctx = PortableGraph(drops)
        self.inputs: list[Port] = []
        self.outputs: list[tuple[Port, Value]] = []

    def declare(self, halved: Collection[str]) -> None:
        """Make the graph's inputs inputs of the model, or constants."""
        joint, constants = self.trace.joint, self.trace.constants
        for name, node in zip(self.trace.fields, joint.arguments, strict=True):
            self._input(node, name, "field")
        for role, nodes in (("parameter", joint.parameters), ("buffer", joint.buffers)):
            for name, node in nodes.items():
                if name in constants:
                    if node.users:
                        stored = torch.float16 if name in halved else None
                        self.ctx.add_tensor(node, name, constants[name], stored)
                else:
                    self._input(node, name, role)
        for node in joint.tangents:
            self.ctx.values[node] = self.ctx.const(1.0, node.meta["val"].dtype)

    def _input(self, node: fx.Node, name: str, role: str) -> None:
        self.ctx.add_input(node, name)
        value = node.meta["val"]
        self.inputs.append(Port(name, role, name, value.dtype, self._shape(value.shape)))

    def _shape(self, sizes: Sequence[Any]) -> tuple[int | str, ...]:
        found: list[int | str] = []
        for size in sizes:
            if isinstance(size, int):
                found.append(size)
            else:
                expression = size.node.expr
                found.append(int(expression) if expression.is_Integer else self._named(expression))
        return tuple(found)

    def _named(self, expression: Any) -> str:
        return str(expression.subs({symbol: sympy.Symbol(name) for symbol, name in self.symbols.items()}))

    def run(self) -> None:
        """Write the nodes of the graph."""
        graph = self.trace.joint.module
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                self.ctx.add_tensor(node, f"constant/{node.name}", _attribute(graph, str(node.target)))
            elif node.op == "call_function":
                try:
                    _refuse_narrow(node)
                    self.ctx.convert(node)
                except Unsupported as error:
                    raise ExportFailed(self._explained(node, error)) from error
                except Exception as error:  # a bug of a converter is told with the operation
                    raise ExportFailed(self._explained(node, f"{type(error).__name__}: {error}")) from error
        for name, node in self.trace.results.items():
            role = "loss" if name == "loss" else "logged" if name.startswith("logged/") else "result"
            self._output(name, role, name.removeprefix("logged/"), node.meta["val"], self.ctx.value(node))

    def _explained(self, node: fx.Node, reason: Any) -> str:
        modules = list((node.meta.get("nn_module_stack") or {}).values())
        where = f" in {modules[-1][0].removeprefix('module.')}" if modules and modules[-1][0] else ""
        if isinstance(reason, Unsupported) and reason.reason.type is ReasonType.NO_CONVERTER:
            reason = "this operation has no form in standard operators"
            if is_random(node):
                reason = "a model draws random numbers for dropout alone; dropout=False leaves out what drops paths"
        text = f"{self.what} cannot be exported: {node.target}{where}: {reason}"
        line = line_in(node.stack_trace or "")
        return f"{text}\n  at {line}" if line else text

    def _output(self, name: str, role: str, key: str, like: Any, value: Value) -> None:
        self.outputs.append((Port(name, role, key, like.dtype, self._shape(like.shape)), value))

    # what makes it a model that trains

    def update(self, parameters: Mapping[str, Tensor], settings: Settings) -> None:
        """Add the new values of parameters, buffers and states."""
        joint, ctx, optimizer = self.trace.joint, self.ctx, settings.optimizer
        for name, node in joint.written.items():
            self._output(f"next/{name}", "buffer", name, node.meta["val"], ctx.value(node))
        gradients = {name: ctx.value(node) for name, node in joint.gradients.items()}
        values = {name: ctx.values[joint.parameters[name]] for name in gradients}
        if optimizer is None:
            for name, gradient in _clipped(ctx, gradients, settings).items():
                self._output(f"gradient/{name}", "gradient", name, parameters[name], gradient)
            return
        groups = len(optimizer.groups)
        clock = Clock(ctx, self._setting(LEARNING_RATE, torch.float32, (groups,)), self._setting(STEP, torch.int64, ()))
        apply = self._setting(UPDATE, torch.bool, ()) if settings.accumulate > 1 else None
        if apply is not None:
            gradients = self._summed(gradients, parameters, settings.accumulate, apply)
        gradients = _clipped(ctx, gradients, settings)
        for name, gradient in gradients.items():
            like = parameters[name]
            states = {key: self._state(key, name, like) for key, of in optimizer.states.items() if name in of}
            value, new = optimizer.update(ctx, name, values[name], gradient, states, clock)
            if apply is not None:
                value = _chosen(apply, value, values[name])
                new = {key: _chosen(apply, state, states[key]) for key, state in new.items()}
            self._output(f"next/{name}", "parameter", name, like, value)
            for key, state in new.items():
                self._output(f"next/{key}/{name}", "state", f"{key}/{name}", like, state)

    def _summed(
        self, gradients: dict[str, Value], parameters: Mapping[str, Tensor], count: int, apply: Value
    ) -> dict[str, Value]:
        found = {}
        for name, gradient in gradients.items():
            like = parameters[name]
            total = self._state(SUM, name, like) + gradient * (1 / count)
            rest = _chosen(apply, self.ctx.const(0.0, like.dtype), total)
            self._output(f"next/{SUM}/{name}", "state", f"{SUM}/{name}", like, rest)
            found[name] = total
        return found

    def _state(self, key: str, name: str, like: Tensor) -> Value:
        self.inputs.append(Port(f"{key}/{name}", "state", f"{key}/{name}", like.dtype, tuple(like.shape)))
        return self.ctx.new_input(f"{key}/{name}", like.dtype, tuple(like.shape))

    def _setting(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Value:
        self.inputs.append(Port(name, "setting", name.rpartition("/")[2], dtype, shape))
        return self.ctx.new_input(name, dtype, shape)

    def finish(self) -> Model:
        """Make a model of what was written; inputs that nothing reads are left out."""
        results: list[ir.Value] = []
        for port, value in self.outputs:
            made_here = value.ir.producer() is not None and not any(value.ir is other for other in results)
            output = (value if made_here else value.op("Identity")).ir
            output.name, output.type = port.name, ir.TensorType(DTYPES[port.dtype])
            output.shape = ir.Shape(port.shape)
            results.append(output)
        nodes = live(self.ctx.nodes, results)
        used = {id(value) for node in nodes for value in node.inputs}
        shapes = {port.name: port.shape for port in self.inputs}
        inputs = [value for value in self.ctx.inputs if id(value) in used]
        for each in inputs:
            each.shape = ir.Shape(shapes[str(each.name)])
        graph = ir.Graph(
            inputs,
            results,
            nodes=nodes,
            initializers=[value for value in self.ctx.constants_used() if id(value) in used],
            opset_imports={"": OPSET},
            name=self.what,
        )
        model = ir.Model(graph, ir_version=IR_VERSION, producer_name="lightning_ort")
        names = {value.name for value in inputs}
        ports = [port for port in self.inputs if port.name in names]
        fields = [port for port in self.inputs if port.role == "field"]
        return Model(model, fields, ports, [port for port, _ in self.outputs])


def _refuse_narrow(node: fx.Node) -> None:
    values = [value for value in values_of(node) if isinstance(value, Tensor)]
    if narrow := [value.dtype for value in values if value.dtype in (torch.bfloat16, torch.float16)]:
        raise Unsupported(f"{narrow[0]}: a model computes in float32; leave out autocast", ReasonType.DTYPE)


def _chosen(condition: Value, x: Value, y: Value) -> Value:
    return condition.op("Where", x, y)


def _attribute(module: Any, path: str) -> Tensor:
    for part in path.split("."):
        module = getattr(module, part)
    return module


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
