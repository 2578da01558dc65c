"""A step as one graph of ATen ops: what eager does in it, forward and backward, hooks and writes included."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_ort.onnx_export.training.forms  # noqa: F401  (it registers its functions)
from lightning_ort.compat.step_trace import (
    fake_fields,
    functional,
    layers_with_dropout,
    note_module,
    recorded,
    symbols_of,
)
from lightning_ort.compat.torch_graphs import expression_of, python_kernels, without_validation
from lightning_ort.compiler.executors.ort.conversion.registry import PARTS, PARTS_ABOVE_AUTOGRAD
from lightning_ort.compiler.lowering import passes
from lightning_ort.compiler.lowering.decompositions import decompositions
from lightning_ort.compiler.machine.out_of_memory import causes
from lightning_ort.onnx_export.failure import ExportFailed, explain, is_foreign, line_of
from lightning_ort.onnx_export.training.graph import written_whole
from lightning_ort.onnx_export.training.random import drawn
from lightning_ort.onnx_export.training.state import Values
from lightning_ort.world.modes import random_states

aten = torch.ops.aten

# takes the fields of a batch, runs the backward pass, if any, and returns tensors by name
Function = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
Sizes = Mapping[str, Sequence[int]]  # of each field the dimensions that may change
BATCH, LENGTH = "batch", "length"  # what the first and the second of them are called

_PASSES = (
    passes.drop_detach,
    passes.drop_casts,
    passes.cancel_transposes,
    passes.drop_kept_dims,
    passes.stack_selections,
    passes.mark_mixed_gradients,
)
_CHECKS = ("aten._assert_async", "aten._assert_scalar", "aten._assert_tensor_metadata", "aten.sym_constrain_range")


@dataclass
class Trace:
    """What was traced: a graph in which nothing is written to, and what its inputs and outputs are."""

    what: str
    function: Function
    samples: Mapping[str, Tensor]  # the fields that it was traced with
    trains: bool  # whether autograd was on
    module: fx.GraphModule
    fields: dict[str, fx.Node] = field(default_factory=dict)  # its inputs that are fields of the batch, by name
    # its inputs that are parameters and buffers of the module, by name
    state: dict[str, fx.Node] = field(default_factory=dict)
    constants: dict[fx.Node, Tensor] = field(default_factory=dict)  # its other inputs, and their values
    results: dict[str, fx.Node] = field(default_factory=dict)  # what the step returns, by name
    # the new values of parameters and buffers that it writes to
    written: dict[str, fx.Node] = field(default_factory=dict)
    gradients: dict[str, fx.Node] = field(default_factory=dict)  # those of the parameters that get one
    # the symbols of the sizes that may change, with their lowest and highest value
    sizes: dict[Any, tuple[int, int | None]] = field(default_factory=dict)
    guards: Sequence[Any] = ()  # what was asked about them, and answered with yes
    rows: str | None = None  # the line that asks for the number of rows, which cannot change then
    end: Callable[[Mapping[str, Tensor]], None] = lambda _: None  # what a Trainer calls after the update

    @property
    def symbols(self) -> dict[Any, str]:
        """The names of the sizes that may change."""
        found: dict[Any, str] = {}
        for name, node in self.fields.items():
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
        for field_name, node in self.fields.items():
            for dim, size in enumerate(node.meta["val"].shape):
                if not isinstance(size, int) and expression_of(size) == symbol:
                    found.setdefault(field_name, []).append(dim)
        return found


def trace(
    module: nn.Module,
    function: Function,
    fields: Mapping[str, Tensor],
    sizes: Sizes,
    what: str,
    gradients: bool = True,
    means: bool = False,
) -> Trace:
    """Trace a function of a module's and of the fields of a batch, which returns tensors by name.

    The function runs as it would in eager, with the module's own parameters, hooks and autograd functions, and may run
    a backward pass; only values are missing. Nothing of the module is changed. ``sizes`` says which dimensions may
    change; with ``means``, dropout's numbers are replaced by their mean.

    Raises :class:`ExportFailed` if torch cannot trace it, with the line of the user's.
    """
    mode, fakes = fake_fields(fields, sizes)
    values = Values(module)
    names: list[list[str]] = []

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = function(dict(zip(fields, tensors, strict=True)))
        results = {**results, **values.checks}
        parts = [{name: value.detach() for name, value in results.items()}, values.assigned(), values.gradients()]
        names[:] = [list(part) for part in parts]
        return tuple(value for part in parts for value in part.values())

    # torch takes some apart at these keys, whatever the table says (2.13)
    keys = ("CompositeImplicitAutograd", "Autograd")
    in_parts = {(op, key): part for op, part in PARTS_ABOVE_AUTOGRAD.items() for key in keys}
    table = {**decompositions(written_whole(), layouts=False), **PARTS_ABOVE_AUTOGRAD, **PARTS, **drawn(means)}
    try:
        with _quiet(), as_traced(), torch.set_grad_enabled(gradients), _refusing_other_draws(what):
            with values, python_kernels(in_parts), _noting_modules(module), patch.object(*layers_with_dropout()):
                graph = recorded(run, mode, fakes, lambda file: not is_foreign(file), values.number_of)
            inputs = _inputs_instead_of_attributes(graph, values.names)
            graph = functional(graph, mode, [*inputs.values(), *fakes], table)
    except ExportFailed:
        raise
    except Exception as error:  # torch raises what the user's code raised, in several classes
        if (own := next((one for one in causes(error) if isinstance(one, ExportFailed)), None)) is not None:
            raise own from error
        raise ExportFailed(f"{what} cannot be exported: {_explained(error)}") from error
    placeholders = graph.graph.find_nodes(op="placeholder")
    found = Trace(what, function, fields, gradients, graph, guards=list(mode.shape_env.guards))
    for node, value in zip(placeholders, inputs.values(), strict=False):
        if id(value) in values.names:
            found.state[values.names[id(value)]] = node
        else:
            found.constants[node] = value
    found.fields = dict(zip(fields, placeholders[len(inputs) :], strict=True))
    for fake in fakes:
        found.sizes |= symbols_of(fake)
    found.rows = _rows_asked_for(found, sizes)
    _name_outputs(found, names, what)
    values.check(set(found.written))
    return found


def _rows_asked_for(trace: Trace, sizes: Sizes) -> str | None:
    if BATCH in trace.symbols.values() or not any(0 in dims for dims in sizes.values()):
        return None
    return next((line for guard in trace.guards if (line := line_of(guard)) is not None), "")


def _explained(error: BaseException) -> str:
    text = explain(error, branches="torch.where")
    if "HigherOrderOperator" not in text:
        return text
    line = text.partition("\n")[2]
    return f"torch.cond, or another operator that calls functions: use torch.where\n{line}".rstrip()


def _inputs_instead_of_attributes(graph: fx.GraphModule, known: Mapping[int, str]) -> dict[fx.Node, Tensor]:
    """Make inputs of the tensors that a graph has as attributes; each of them is one, before the others."""
    first = next(iter(graph.graph.nodes))
    made: dict[int, fx.Node] = {}
    values: dict[fx.Node, Tensor] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, str(node.target))
        if id(value) not in made:
            with graph.graph.inserting_before(first):
                kind = "state" if id(value) in known else "constant"
                made[id(value)] = placeholder = graph.graph.placeholder(f"{kind}_{len(made)}")
            values[placeholder] = value
        node.replace_all_uses_with(made[id(value)])
        graph.graph.erase_node(node)
    graph.recompile()
    return values


def _name_outputs(trace: Trace, names: Sequence[Sequence[str]], what: str) -> None:
    """Tell the outputs of a graph apart, after the writes to its inputs were made outputs too."""
    graph = trace.module.graph
    output = graph.output_node()
    names_of = {node: name for name, node in trace.state.items()}
    found: Any = list(output.args[0])  # type: ignore[arg-type]
    written = {}
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = node.args[:2]
        if target in trace.constants:
            line = (node.meta.get("stack_trace") or "").strip()
            raise ExportFailed(
                f"{what} writes to a tensor that is neither a parameter nor a buffer, which a model cannot hold:"
                f" register it as a buffer.{line and chr(10) + line}"
            )
        if target in names_of:
            written[names_of[target]] = value
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    count = len(names[0])
    assigned = dict(zip(names[1], found[count : count + len(names[1])], strict=True))
    written |= assigned  # what was written to before it was replaced counts no more
    gradients = found[count + len(names[1]) :]
    output.args = (tuple([*found[:count], *written.values(), *gradients]),)
    _prepare(trace.module)
    nodes = iter(graph.output_node().args[0])  # type: ignore[arg-type]  # passes replace them
    for names_, place in ((names[0], trace.results), (written, trace.written), (names[2], trace.gradients)):
        place.update((name, next(nodes)) for name in names_)


def _prepare(gm: fx.GraphModule) -> None:
    for node in reversed(gm.graph.nodes):
        if str(node.target).startswith(_CHECKS) and not node.users:
            gm.graph.erase_node(node)
    for graph_pass in _PASSES:
        graph_pass(gm)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()


@contextlib.contextmanager
def _noting_modules(module: nn.Module) -> Iterator[None]:
    """Within the block nodes know the submodule in which they are made."""
    paths = {id(child): path for path, child in module.named_modules()}
    stack: list[str] = []

    def before(child: nn.Module, _: Any) -> None:
        stack.append(paths.get(id(child), ""))
        note_module(stack[-1])

    def after(*_: Any) -> None:
        stack.pop()
        note_module(stack[-1] if stack else None)

    handles = [
        nn.modules.module.register_module_forward_pre_hook(before),
        nn.modules.module.register_module_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """Within the block attention and recurrent layers run in parts, since their kernels have no counterpart."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")  # of switching oneDNN off
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@contextlib.contextmanager
def _refusing_other_draws(what: str) -> Iterator[None]:
    """Raise ``ExportFailed`` if the block draws random numbers that are not torch's."""
    before = random_states(), torch.initial_seed()
    yield
    if (random_states(), torch.initial_seed()) != before:
        raise ExportFailed(
            f"{what} uses the random numbers of Python or NumPy, or torch.manual_seed: they would be constants of the"
            " model. Draw them with torch, which a runner does anew in each step."
        )


@contextlib.contextmanager
def _quiet() -> Any:
    with (
        without_validation(),
        torch.random.fork_rng([]),
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch's own calls to torch
        yield
