"""What eager does, as a graph: torch's tracer over fake values and the real autograd engine; private in torch 2.13."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks_from_tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functionalize
from torch.fx import proxy, traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_ort.compat.torch import tree_map
from lightning_ort.compat.torch_graphs import OpOverload, TorchDispatchMode

Table = Mapping[OpOverload, Callable[..., Any]]
_running: "list[_Faked]" = []  # of the functions that are recorded, the last is the innermost


def fake_fields(tensors: Mapping[str, Tensor], dims: Mapping[str, Sequence[int]]) -> tuple[Any, list[Any]]:
    """Return a mode for :func:`recorded`, and fakes, in which equal sizes of dimensions change alike (torch 2.13)."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = []
    for name, tensor in tensors.items():
        kinds = [DimDynamic.DUCK if dim in dims.get(name, ()) else DimDynamic.STATIC for dim in range(tensor.dim())]
        fakes.append(mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)))
    return mode, fakes


def recorded(
    function: Callable[..., Any],
    mode: Any,
    fakes: Sequence[Tensor],
    is_kept: Callable[[str], bool],
    number_of: Callable[[Tensor], Any] = lambda _: None,
) -> fx.GraphModule:
    """Run a function with fake arguments, and return the ATen ops that ran, those of backward passes and hooks too.

    Parameters and other tensors stay the objects that they are, so that autograd sees them as in eager; in the graph
    they are attributes. Nothing is written to them. Nodes keep the lines in files of which ``is_kept`` is true, and the
    submodules they come from. ``number_of`` is asked where Python needs the number in a tensor, and may have none
    (torch 2.13).
    """
    # python kernels are those of `python_kernels`, which decompose above autograd
    faked = _Faked(mode, number_of)
    _running.append(faked)
    try:
        with (
            patch("builtins.len", _length),
            mode,
            faked,
            enable_python_dispatcher(),
            traceback.preserve_node_meta(),
            _keeping_frames(is_kept),
        ):
            tracer = make_fx(function, tracing_mode="real", record_stack_traces=True, _allow_non_fake_inputs=True)
            graph = tracer(*fakes)
    finally:
        _running.pop()
    for node in graph.graph.find_nodes(op="get_attr"):
        setattr(graph, str(node.target), faked.real(getattr(graph, str(node.target))))
    lines: dict[Any, str] = {}
    for node in graph.graph.nodes:  # a node of the backward pass has the number of the one that it is of
        own, number = node.meta.get("stack_trace"), node.meta.get("seq_nr")
        if node.meta.get("autograd_backward"):
            node.meta["stack_trace"] = lines.get(number, own)
        elif own:
            lines[number] = own
    return graph


class _Faked(TorchDispatchMode):
    """Within the block ops get fakes of real tensors: torch computes some ops of real ones, and writes to them."""

    def __init__(self, mode: Any, number_of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._mode, self._number_of = mode, number_of
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
        self._stands: dict[int, Tensor] = {}

    def real(self, value: Any) -> Any:
        """The tensor that a fake is of."""
        return next((real for real, fake in self._fakes.values() if fake is value), value)

    def replace(self, tensor: Tensor, value: Tensor) -> None:
        """Have a tensor be a fake one from now on."""
        self._stands[id(tensor)] = value

    def _faked(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) in self._stands:
            return self._stands[id(value)]
        if id(value) not in self._fakes:
            self._fakes[id(value)] = (value, self._mode.from_tensor(value, static_shapes=True))
        return self._fakes[id(value)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and (found := self._number_of(args[0])) is not None:
            return found
        if (kwargs or {}).get("generator") is not None:
            raise NotImplementedError("a generator of its own, which a model has not: leave it out")
        if func in self._mode.lift_fns:
            return func(*args, **(kwargs or {}))
        return func(*tree_map(self._faked, args), **tree_map(self._faked, kwargs or {}))


def functional(graph: fx.GraphModule, mode: Any, inputs: Sequence[Tensor], table: Table) -> fx.GraphModule:
    """Return a graph in which no op writes to a tensor but ``copy_`` to its inputs, at the end (torch 2.13).

    ``graph`` is what :func:`recorded` returned in ``mode``; the values of its inputs are real or fake.
    """

    def run(*values: Any) -> Any:
        return fx.Interpreter(graph).run(*values)

    with mode, enable_python_dispatcher(), torch.no_grad(), traceback.preserve_node_meta():
        fakes = [x if isinstance(x, FakeTensor) else mode.from_tensor(x, static_shapes=True) for x in inputs]
        made = make_fx(functionalize(run), dict(table), tracing_mode="real", _allow_non_fake_inputs=True)
        return made(*[fake.detach() for fake in fakes])


def note_forward(loss: Tensor) -> None:
    """Have the nodes of a backward pass from here know what they are the gradient of (torch 2.13)."""
    setup_stacktrace_preservation_hooks_from_tensors(loss)


def note_module(path: str | None) -> None:
    """Say in which submodule the nodes from now on are made (torch 2.13)."""
    meta = traceback.get_current_meta()
    if path is None:
        meta.pop("nn_module_stack", None)
    else:
        meta["nn_module_stack"] = {path: (path, nn.Module)}


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no values (torch 2.13)."""
    return isinstance(tensor, FakeTensor)


def stand_for(tensor: Tensor, value: Tensor) -> None:
    """While :func:`recorded` runs, have a tensor be another from now on, as assigning to ``data`` does (torch 2.13)."""
    _running[-1].replace(tensor, value)


def tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and the buffers of a module alone, by name: the dicts themselves (torch 2.13)."""
    return module._parameters, module._buffers


def symbols_of(fake: Tensor) -> Mapping[Any, tuple[int, int | None]]:
    """The lowest and highest value that each symbol of a fake tensor's sizes may have (torch 2.13)."""
    found: dict[Any, tuple[int, int | None]] = {}
    for size in fake.shape:
        if isinstance(size, torch.SymInt):
            for symbol in size.node.expr.free_symbols:
                bounds = size.node.shape_env.bound_sympy(symbol)
                upper = int(bounds.upper) if bounds.upper.is_Integer and bounds.upper < 2**31 else None
                found[symbol] = (int(bounds.lower), upper)
    return found


def _length(value: Any, count: Callable[[Any], int] = len) -> Any:
    """In place of ``len``, whose result in C is a number: a fake tensor's may be a symbol."""
    return value.shape[0] if type(value) is FakeTensor and value.dim() else count(value)


class _Frames:
    def __init__(self, is_kept: Callable[[str], bool]) -> None:
        self._is_kept = is_kept

    def __contains__(self, frame: tuple[str, str]) -> bool:
        return self._is_kept(frame[0])


def _keeping_frames(is_kept: Callable[[str], bool]) -> AbstractContextManager[Any]:
    """Within the block torch's tracer notes lines of all functions in such files, not of ``forward`` alone (2.13)."""
    return patch.object(proxy, "_STACK_TRACE_ANCHORS", _Frames(is_kept), create=True)


def layers_with_dropout() -> tuple[Any, str, Callable[..., Any]]:
    """Return what replaces a function of torch that makes recurrent layers of other operations, without their dropout.

    It asks for it where ``num_layers < i - 1``, so that there never is any (torch 2.13).
    """
    from torch._decomp import decompositions

    helper = decompositions._rnn_helper

    def run(
        x: Tensor, hidden: Any, params: Any, biases: bool, layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool, layer: Any,
    ) -> tuple[Tensor, list[Any]]:  # fmt: skip
        x, ends = x.transpose(0, 1) if batch_first else x, []
        for start in range(0, len(params), len(params) // layers):
            own = slice(start, start + len(params) // layers)
            if start and dropout and train:
                x = torch.dropout(x, dropout, True)
            x, end = helper(x, hidden[own], params[own], biases, 1, 0.0, train, bidirectional, False, layer)
            ends += end
        return x.transpose(0, 1) if batch_first else x, ends

    return decompositions, "_rnn_helper", run
