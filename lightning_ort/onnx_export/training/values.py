"""A module's tensors while a step runs: what is read of them outside of a graph, what is assigned, what was before."""

import ast
import inspect
import linecache
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_ort.compat.step_trace import is_fake, stand_for, tables_of
from lightning_ort.compat.torch import without_tracing
from lightning_ort.onnx_export.failure import ExportFailed, is_foreign

_READS = (
    *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__deepcopy__, Tensor.__reduce_ex__),
    *(Tensor.data_ptr, Tensor.untyped_storage),
)
# through which torch asks for a number
_PASSED = (
    *(__name__, "lightning_ort.compat.step_trace", "torch._compile", "torch._dynamo.eval_frame", "torch._tensor"),
    *("torch.fx.experimental.proxy_tensor", "torch.overrides", "torch.utils._python_dispatch"),
)
_GET_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


class Restored(AbstractContextManager["Restored"]):
    """After the block a module has the parameters, buffers and gradients of before.

    ``values`` and ``gradients``: whether something may be written to them; otherwise they are replaced at most.
    """

    def __init__(self, module: nn.Module, values: bool = True, gradients: bool = False) -> None:
        self.module = module
        self.tables: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [
            (child, dict(tables_of(child)[0]), dict(tables_of(child)[1])) for child in module.modules()
        ]
        tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())} if values else {}
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        grads = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._gradients = [(p, grad.clone() if gradients and grad is not None else grad) for p, grad in grads]

    def replaced(self) -> Iterator[tuple[nn.Module, dict[str, Any], str, Any, Any]]:
        """What is another object than before: the submodule, its table, the name there, then and now."""
        for child, *tables in self.tables:
            for table, before in zip(tables_of(child), tables, strict=True):
                for key in {*table, *before}:
                    if table.get(key) is not before.get(key):
                        yield child, table, key, before.get(key), table.get(key)

    @override
    def __exit__(self, *_: object) -> None:
        for child, *tables in self.tables:
            for table, before in zip(tables_of(child), tables, strict=True):
                table.clear()
                table.update(before)
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


class Values(TorchFunctionMode):
    """Within the block, a module's parameters have no gradients at first, and what happens to its tensors is noted."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # the same tensor may have several names, of which the first counts
        self._tensors = {name: tensor for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self.names: Mapping[int, str] = {id(tensor): name for name, tensor in self._tensors.items()}
        self._read: set[str] = set()
        self._replaced: dict[str, Tensor] = {}  # whose ``data`` was assigned
        self.checks: dict[str, Tensor] = {}  # what has to be true, or the step raises, by what it is called

    @override
    def __enter__(self) -> "Values":
        self._before = Restored(self.module, values=False)
        for parameter in self.module.parameters():
            parameter.grad = None
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._before.__exit__()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args else None
        if isinstance(tensor, Tensor) and not is_fake(tensor):
            if func in _READS:
                self._note_read(tensor)
                with without_tracing():
                    return func(*args, **(kwargs or {}))
            if func == _GET_DATA:
                return tensor.detach().data  # autograd does not see what is written to it
            if func == _SET_DATA:
                return self._replace(tensor, args[1])
        elif func == _SET_DATA:
            raise ExportFailed("assigning to `data` of a tensor that is no parameter cannot be traced: use copy_")
        return func(*args, **(kwargs or {}))

    def number_of(self, tensor: Tensor) -> Any:
        """The number in a tensor of one that has values, or what a condition is if the step is not to fail there."""
        if not is_fake(tensor):
            self._note_read(tensor)
            with without_tracing():
                return tensor.item()
        if (check := check_at(inspect.currentframe())) is None:
            return None
        wanted, line = check
        holds = tensor.detach() != 0
        self._check(holds if wanted else ~holds, line)
        return wanted

    def check_info(self, info: Tensor, name: str, *, is_matrix: bool) -> None:
        """What torch's linear algebra calls before it raises an error: for a singular matrix, for example."""
        frame = inspect.currentframe()
        while frame is not None and is_foreign(frame.f_code.co_filename):
            frame = frame.f_back
        line = name if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self._check((info.detach() == 0).all(), line)

    def _check(self, holds: Tensor, line: str) -> None:
        self.checks[f"check/{len(self.checks)}: {line}"] = holds

    def _note_read(self, tensor: Tensor) -> None:
        if id(tensor) in self.names:
            self._read.add(self.names[id(tensor)])

    def _replace(self, tensor: Tensor, value: Tensor) -> None:
        name = self.names.get(id(tensor), "a tensor")
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise ExportFailed(
                f"{name} is given data of {value.dtype}{list(value.shape)}; it is {tensor.dtype}{list(tensor.shape)}."
            )
        stand_for(tensor, value.detach())
        self._replaced[name] = tensor

    def assigned(self) -> dict[str, Tensor]:
        """The new values of buffers that were assigned, and of tensors that got other data."""
        found = {name: tensor.detach() for name, tensor in self._replaced.items()}
        paths = {id(child): path for path, child in self.module.named_modules()}
        for child, table, key, old, now in self._before.replaced():
            name = f"{paths[id(child)]}.{key}".lstrip(".")
            found[self.names.get(id(old), name)] = _checked(name, old, now, table is tables_of(child)[1])
        return found

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of parameters that have one."""
        return {
            name: tensor.grad.detach()
            for name, tensor in self._tensors.items()
            if tensor.is_leaf and tensor.grad is not None
        }

    def check(self, written: set[str]) -> None:
        """Raise ``ExportFailed`` if something changes from step to step of which a value was read."""
        trained = {name for name, tensor in self._tensors.items() if tensor.requires_grad}
        if found := sorted(self._read & (written | trained)):
            raise ExportFailed(
                f"The step reads the values of {', '.join(found)}, which change from step to step: they would be"
                " constants of the model."
            )


def check_at(frame: FrameType | None) -> tuple[bool, str] | None:
    """What a condition has to be for a frame to go on, and its line, if it raises an error otherwise."""
    while frame is not None and frame.f_globals.get("__name__") in _PASSED:
        frame = frame.f_back
    if frame is None:
        return None
    file, number = frame.f_code.co_filename, frame.f_lineno
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # of a notebook's cell, for example
        return None
    for node in ast.walk(tree):
        if not isinstance(node, (ast.If, ast.Assert)) or not node.lineno <= number <= (node.test.end_lineno or 0):
            continue
        negated, test = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not), node.test
        raises = isinstance(node, ast.Assert) or (isinstance(node.body[0], ast.Raise) and not node.orelse)
        if raises and not isinstance(test.operand if negated else test, ast.BoolOp):  # type: ignore[attr-defined]
            return isinstance(node, ast.Assert) is not negated, f"{Path(file).name}:{number}"
    return None


def _checked(name: str, old: Any, now: Any, is_buffer: bool) -> Tensor:
    if not is_buffer:
        raise ExportFailed(f"The step assigns the parameter {name}, which its optimizer would not know: write to it.")
    if not isinstance(old, Tensor) or not isinstance(now, Tensor):
        raise ExportFailed(f"The step registers or removes the buffer {name}: register it in `__init__`.")
    if old.shape != now.shape or old.dtype != now.dtype:
        raise ExportFailed(
            f"The step assigns {now.dtype}{list(now.shape)} to the buffer {name}, which is {old.dtype}"
            f"{list(old.shape)}: a model's buffers keep their dtype and shape."
        )
    return now.detach()
