"""What stands in the way of an export, and at which line of the user's: :class:`ExportFailed`."""

import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from lightning_ort.compat.torch_graphs import guards_of

# whose lines are not the user's; those of other packages, such as transformers, count as theirs
_FOREIGN = sys.stdlib_module_names | {
    *("torch", "onnxscript", "onnx_ir", "lightning", "pytorch_lightning", "lightning_ort")
}
_BRANCH = "GuardOnDataDependentSymNode"
_DATA_DEPENDENT = ("DataDependentOutputException", "DynamicOutputShapeException")
_ROOTS = (Path(torch.__file__).parent, Path(__file__).parents[1])


class ExportFailed(Exception):
    """A module cannot be exported, or the exported model does not give the module's results."""


def explain(error: BaseException, branches: str = "torch.where or torch.cond") -> str:
    """Return what an exception of an export is about: the op or construct, the user's line, and advice.

    ``branches`` are the functions that can express branches there.
    """
    chain = list(_chain(error))
    first, _, rest = str(chain[-1]).strip().partition("\n")
    is_internal = isinstance(chain[-1], NotImplementedError) or type(chain[-1]).__name__ == _BRANCH
    summary = first if first and is_internal else f"{type(chain[-1]).__name__}: {first}"
    if first.endswith(":"):
        summary += f" {rest.strip().partition(chr(10))[0]}"
    if type(chain[-1]).__name__ == _BRANCH:
        advice = f"a branch or size depends on the values of tensors, which {branches} can express"
        summary = f"{advice} ({summary})"
    elif type(chain[-1]).__name__ in _DATA_DEPENDENT:
        summary = f"the op {first} depends on the values of tensors: compute it outside of the step"
    line = None
    for link in reversed(chain):
        if (node := _translated(link)) is not None:
            summary = f"the op {node.target} was not converted ({summary})"
            line = line_in(node.stack_trace or "")
        if line := line or _line_of_frame(link):
            break
    return f"{summary}\n  at {line}" if line else summary


def line_in(stack_trace: str) -> str | None:
    """Return the innermost line of the user's in a stack trace of torch.fx's: ``file:line in function: code``."""
    found = re.findall(r'File "(.+?)", line (\d+), in (\S+)', stack_trace)
    own = [entry for entry in found if Path(entry[0]).is_absolute() and not is_foreign(entry[0])]
    return _written(own[-1][0], int(own[-1][1]), own[-1][2]) if own else None


def branch_on_size(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: dict[str, Any]
) -> str | None:
    """Return the line at which a module does something else for other sizes, where torch can tell."""
    try:  # once more, since torch.onnx.export keeps the limits alone
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception:  # torch.onnx.export has tried in more ways than one
        return None
    sizes = [
        size
        for node in program.graph.find_nodes(op="placeholder")
        for size in getattr(node.meta["val"], "shape", ())
        if isinstance(size, torch.SymInt)
    ]
    for size in sizes:
        for guard in guards_of(size):
            if (frame := frame_of(guard)) is not None:
                return _written(frame.filename, frame.lineno or 0, frame.name)
    return None


def frame_of(guard: Any) -> traceback.FrameSummary | None:
    """Return where the user's code asks about a size, if it does that and not torch."""
    frame = guard.sloc.framework_loc
    return frame if isinstance(frame, traceback.FrameSummary) and not is_foreign(frame.filename) else None


def line_of(guard: Any) -> str | None:
    """Return ``file:line`` of where the user's code asks about a size."""
    frame = frame_of(guard)
    return None if frame is None else f"{Path(frame.filename).name}:{frame.lineno}"


def is_foreign(file: str) -> bool:
    """Whether a file is torch's or this package's."""
    return any(Path(root) in Path(file).parents for root in _ROOTS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and what it was raised from, innermost last."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _translated(error: BaseException) -> fx.Node | None:
    """Return the node that torch was translating, which only a frame of torch's knows."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        node = frame.f_locals.get("node")
        if isinstance(node, fx.Node) and node.op == "call_function":
            return node
    return None


def _line_of_frame(error: BaseException) -> str | None:
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _FOREIGN
    ]
    # what is in a file, not what torch has generated
    frames = [(code, line) for code, line in frames if Path(code.co_filename).is_file()]
    # the user's own line, rather than one in a package that it calls
    frames = [entry for entry in frames if "site-packages" not in Path(entry[0].co_filename).parts] or frames
    return _written(frames[-1][0].co_filename, frames[-1][1], frames[-1][0].co_name) if frames else None


def _written(file: str, line: int, function: str) -> str:
    return f"{file}:{line} in {function}: {linecache.getline(file, line).strip()}"
