"""A step as one graph of ATen ops: the forward pass, the loss and all gradients."""

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_ort.compat.joint_export import JointGraph, joint_graph, keeping_frames, symbols_of
from lightning_ort.compat.torch import expression_of, without_validation
from lightning_ort.compiler.lowering import final_passes, joint_passes
from lightning_ort.compiler.lowering.decompositions import decompositions
from lightning_ort.compiler.nodes import results_of
from lightning_ort.onnx_export.failure import ExportFailed, explain, is_foreign
from lightning_ort.onnx_export.training.forms import DECOMPOSED, taken_apart
from lightning_ort.onnx_export.training.graph import written_whole

aten = torch.ops.aten

# what a step returns: its loss, if any, and other tensors by name
Function = Callable[[Mapping[str, Tensor]], tuple[Tensor | None, Mapping[str, Tensor]]]
Sizes = Mapping[str, Sequence[int]]  # of each field the dimensions that may change
BATCH, LENGTH = "batch", "length"  # what the first and the second of them are called

_PASSES = (
    joint_passes.drop_detach,
    joint_passes.drop_casts,
    final_passes.cancel_transposes,
    final_passes.drop_kept_dims,
    final_passes.stack_selections,
    final_passes.mark_mixed_gradients,
)
_CHECKS = ("aten._assert_async", "aten._assert_scalar", "aten._assert_tensor_metadata", "aten.sym_constrain_range")


@dataclass
class Trace:
    """What was traced.

    Args:
        joint: The graph.
        names: What the step returns, in order: ``"loss"`` comes first if there is one.
        fields: The names of the graph's arguments.
        sizes: The symbols of the sizes that may change, with their lowest and highest value.
        constants: Values of the buffers and parameters of the graph that are none of the module's, or are frozen.

    """

    joint: JointGraph
    names: tuple[str, ...]
    fields: tuple[str, ...]
    sizes: Mapping[Any, tuple[int, int | None]]
    constants: dict[str, Tensor] = field(default_factory=dict)

    @property
    def symbols(self) -> dict[Any, str]:
        """The names of the sizes that may change."""
        found: dict[Any, str] = {}
        for name, node in zip(self.fields, self.joint.arguments, strict=True):
            for dim, size in enumerate(node.meta["val"].shape):
                expression = None if isinstance(size, int) else expression_of(size)
                if expression is None or not expression.is_Symbol or expression in found:
                    continue
                usual = {0: BATCH, 1: LENGTH}.get(dim, f"{name}_{dim}")
                found[expression] = f"{name}_{usual}" if usual in found.values() else usual
        return found

    def dims_of(self, name: str) -> dict[str, list[int]]:
        """Return of each field the dimensions whose size has a name."""
        symbol = next(symbol for symbol, found in self.symbols.items() if found == name)
        found: dict[str, list[int]] = {}
        for field_name, node in zip(self.fields, self.joint.arguments, strict=True):
            for dim, size in enumerate(node.meta["val"].shape):
                if not isinstance(size, int) and expression_of(size) == symbol:
                    found.setdefault(field_name, []).append(dim)
        return found

    @property
    def results(self) -> dict[str, fx.Node]:
        """What the step returns, by name."""
        return dict(zip(self.names, self.joint.results, strict=True))


class _Traced(nn.Module):
    """A function of a module's as the ``forward`` of one that torch can export."""

    def __init__(self, module: nn.Module, function: Function, fields: Sequence[str], note: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.fields = module, tuple(fields)
        self._function, self._note = function, note

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        loss, others = self._function(dict(zip(self.fields, tensors, strict=True)))
        found = {} if loss is None else {"loss": loss}
        found |= {name: value.detach().clone() for name, value in others.items()}
        self._note(found)  # not an attribute: torch.export restores those
        return tuple(found.values())


def trace(
    module: nn.Module, function: Function, fields: Mapping[str, Tensor], sizes: Sizes, what: str, gradients: bool = True
) -> Trace:
    """Trace a function of a module's and of the fields of a batch.

    Args:
        module: The module; its parameters that need gradients, and its buffers, are inputs of the graph.
        function: Takes the fields by name; returns a loss and other tensors by name.
        fields: Sample values.
        sizes: Which dimensions may change.
        what: What is traced, for messages.
        gradients: Whether to take the gradients of the loss.

    Raises:
        ExportFailed: If torch cannot trace it, with the line of the user's.

    """
    names: list[str] = []
    traced = _Traced(module, function, tuple(fields), lambda found: names.__setitem__(slice(None), found))
    auto = torch.export.Dim.AUTO
    shapes = tuple(dict.fromkeys(sizes.get(name, ()), auto) for name in fields)
    with _quiet(), torch.set_grad_enabled(gradients), _plain_kernels():
        try:
            with keeping_frames(lambda file: not is_foreign(file)):
                program = torch.export.export(traced, tuple(fields.values()), dynamic_shapes=(shapes,), strict=False)
            graph = program.module(check_guards=False)
            fakes = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")][-len(fields) :]
            table = {**decompositions(written_whole(), layouts=False), **DECOMPOSED}
            with taken_apart():
                joint = joint_graph(graph, fakes, table)
        except ExportFailed:
            raise
        except Exception as error:  # torch raises what the user's code raised, in several classes
            if (own := _own(error)) is not None:
                raise own from error
            raise ExportFailed(f"{what} cannot be exported: {explain(error)}") from error
    _prepare(joint)
    found: dict[Any, tuple[int, int | None]] = {}
    for fake in fakes:
        found |= symbols_of(fake)
    result = Trace(joint, tuple(names), tuple(fields), found)
    _name(result, module, dict(graph.named_parameters(remove_duplicate=False)), dict(graph.named_buffers()))
    return result


@contextlib.contextmanager
def _plain_kernels() -> Any:
    """Within the block attention and recurrent layers are traced in parts: their kernels have no counterpart."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        yield


def _own(error: BaseException | None) -> ExportFailed | None:
    while error is not None:
        if isinstance(error, ExportFailed):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def _quiet() -> Any:
    with (
        without_validation(),
        torch.random.fork_rng([]),
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's own calls to torch
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")  # of switching oneDNN off
        warnings.filterwarnings("ignore", message=r"The tensor attributes self\..*_flat_weights")  # of nn.LSTM
        yield


def _prepare(joint: JointGraph) -> None:
    gm = joint.module
    for node in reversed(gm.graph.nodes):
        if str(node.target).startswith(_CHECKS) and not node.users:
            gm.graph.erase_node(node)
    # the names of results are looked up in the output, where passes replace them
    results, written, gradients = joint.results, list(joint.written), list(joint.gradients)
    for graph_pass in _PASSES:
        graph_pass(gm)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    _look_up_again(joint, results, written, gradients)


def _look_up_again(joint: JointGraph, results: Sequence[Any], written: Sequence[str], gradients: Sequence[str]) -> None:
    found = iter([node for node in results_of(joint.module) if node is not None])
    joint.written = {name: next(found) for name in written}
    joint.results = [next(found) for _ in results]
    joint.gradients = {name: next(found) for name in gradients}


def _name(trace: Trace, module: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Call parameters and buffers as the module does, and make constants of what is not to be an input."""
    joint = trace.joint
    own = {id(tensor): name for name, tensor in module.named_parameters()}
    trained = {id(tensor) for tensor in module.parameters() if tensor.requires_grad}
    kept = {id(tensor): name for name, tensor in module.named_buffers()}

    def rename(nodes: dict[str, Any], values: Mapping[str, Tensor], names: Mapping[int, str]) -> dict[str, Any]:
        return {names.get(id(values[key]), key): node for key, node in nodes.items()}

    for nodes, values, names in ((joint.parameters, parameters, own), (joint.buffers, buffers, kept)):
        for key in nodes:
            if id(values[key]) not in trained and key not in joint.written:
                trace.constants[names.get(id(values[key]), key)] = values[key]
    joint.parameters = rename(joint.parameters, parameters, own)
    joint.gradients = rename(joint.gradients, parameters, own)
    joint.buffers = rename(joint.buffers, buffers, kept)
    joint.written = rename(joint.written, buffers, kept)
