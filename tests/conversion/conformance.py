"""Write docs/test_reports/supported_ops.md: who runs each core ATen op, found out by running it.

Every overload that torch tags as core is compiled through the backend with ``placement="always"``, called forward and
backward, and compared with eager; the report then tells who ran it. An op that lowering takes apart counts by who ran
what it became. Run as ``make conformance``.
"""

import importlib.metadata
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree

from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.report import GraphReport
from tests.conversion import harness
from tests.conversion.core_op_samples import SAMPLES, Call
from tests.conversion.samples import Sample, build

PAGE = Path(__file__).resolve().parents[2] / "docs" / "test_reports" / "supported_ops.md"
HALVES = (torch.float16, torch.bfloat16)
OTHER_DTYPES = (torch.float64, torch.int64, torch.int32, torch.bool, *HALVES)
TOLERANCES = {**harness.TOLERANCES, torch.float16: (2e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2)}

DATA_DEPENDENT = "the size or value depends on the data: capture ends the graph here"
RANDOM = "random: torch's generator draws"
ALLOCATION = "allocates memory: nothing to compute"

HEAD = """\
# Supported operations

Made by `make conformance` with {versions} on a CPU; do not edit.

Each row is one operation of the
[core ATen opset](https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_ir.html). The table has
every overload that torch itself tags as core. Each operation was compiled with `placement="always"` on a few small
inputs, run forward and backward, and compared with eager. No result differs. If an operation is decomposed into simpler
ones, the table shows who ran those.

**{some} of {total} ({percent} %) run on ONNX Runtime**, {whole} of them with every sample and their gradients.
{standard} run there with the `standard` kernels. An operation that stays in torch gives correct results and trains as
well, but it splits the graph into more regions.

- *forward*, *backward*: who ran the samples in float32 with the `training` kernels. `2 of 3` means that 2 of 3 samples
  ran on ONNX Runtime. A dash means that the operation is not differentiable, or that its gradient needs no computation.
- *standard kernels*: the same with any build of onnxruntime, if it differs.
- *also with*: other dtypes in which ONNX Runtime runs all samples. On a CPU, float16 and bfloat16 stay in torch, which
  has native kernels for them. ONNX Runtime would cast to float32 and back.

[torch's test database](opinfo.md) has thousands of other samples of these and more operations, with special values and
other memory layouts.

Notes on single operations:

- NaN and infinity are tested in every elementwise operation, reduction and sort. `gelu` of infinity is infinity,
  whereas torch's float32 kernel returns NaN. In float64, `sort` and `topk` treat infinity as equal to the largest
  finite number.
- At a NaN, the gradient is the same as in eager. Where torch's CPU kernels give one gradient in their vectorized loops
  and another one for the remaining elements, all elements have the gradient of the vectorized loop.
- torch has a faster kernel for `grid_sampler_2d`, which is also correct if a grid contains NaN or huge values.
- torch does not define in which order `topk` lists equal values, so this order may differ.
- Division of integers by a tensor stays in torch, which raises an error for a zero.

| operation | forward | backward | standard kernels | also with | in torch |
|---|---|---|---|---|---|
"""


@dataclass
class Found:
    """Who ran the samples of one op.

    Args:
        ort: How many graphs ONNX Runtime ran alone, ``"forward"`` and ``"backward"``.
        total: Of how many.
        reasons: What stayed in torch, and why.
    """

    ort: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    total: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, left: dict[str, str]) -> None:
        """Count one graph, with what it left to torch."""
        self.total[kind] += 1
        self.ort[kind] += not left
        self.reasons.update(left)

    @property
    def is_whole(self) -> bool:
        """Whether nothing was left to torch."""
        return self.ort == self.total

    def cell(self, kind: str) -> str:
        """A cell of the table."""
        ort, total = self.ort[kind], self.total[kind]
        if total == 0:
            return "–"
        return "yes" if ort == total else "in torch" if ort == 0 else f"{ort} of {total}"


@dataclass(frozen=True)
class Row:
    """One op: who ran it with either kernel set in float32, and the other dtypes that ONNX Runtime runs."""

    name: str
    training: Found
    standard: Found
    dtypes: list[str]

    def line(self) -> str:
        """The row of the table."""
        cells = [self.training.cell(kind) for kind in ("forward", "backward")]
        standard = [self.standard.cell(kind) for kind in ("forward", "backward")]
        reasons = [f"`{op.removeprefix('aten.')}`: {_short(op, text)}" for op, text in self.training.reasons.items()]
        parts = [f"`{self.name}`", *cells, "" if standard == cells else ", ".join(standard)]
        return " | ".join(["", *parts, ", ".join(self.dtypes), "; ".join(reasons), ""]).strip()


def _short(op: str, text: str) -> str:
    """A reason without the op's name, which stands before it."""
    return text.replace(f": {op}", "").replace(f"{op} ", "")


def core_ops() -> list[OpOverload]:
    """Every overload of torch.ops.aten that is tagged as core, in order of name."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    ops = []
    for name in names:
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)  # some of TorchScript's own cannot be called from Python
        if packet is not None and torch.Tag.core in (op := getattr(packet, overload or "default")).tags:
            ops.append(op)
    return sorted(ops, key=str)


def name_of(op: OpOverload) -> str:
    """The name without the namespace: ``add.Tensor``."""
    return str(op).removeprefix("aten.")


def function_of(op: OpOverload, call: Call, dtype: torch.dtype) -> tuple[Callable[..., Any], list[Any]]:
    """A function of tensors that makes a call, and the tensors."""
    leaves, spec = pytree.tree_flatten(call)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Sample)]
    # a view alone is no reason to run anything: let something read it
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in op._schema.returns)

    def fn(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        result = op(*args, **kwargs)
        if isinstance(result, (int, float, torch.SymInt)):
            return tensors[0] * result
        return pytree.tree_map(lambda x: x * 1, result) if is_view else result

    return fn, build([leaves[place] for place in places], dtype)


def examine(op: OpOverload, dtype: torch.dtype, kernel_set: str = "auto") -> Found | None:
    """Run the samples of an op.

    Args:
        op: The op.
        dtype: Of the floating inputs of the samples.
        kernel_set: ``kernels`` of :class:`~lightning_ort.config.ORTConfig`.

    Returns:
        Who ran them; ``None`` where torch itself has no kernel for the dtype.

    Raises:
        AssertionError: If a result differs from eager's, or a region failed.
        KeyError: If the op has no sample.
    """
    found = Found()
    for call in SAMPLES[name_of(op)]:
        fn, inputs = function_of(op, call, dtype)
        if not _runs(fn, inputs):
            return None
        coarsest = max(
            (TOLERANCES[x.dtype] for x in inputs if x.dtype in TOLERANCES), default=TOLERANCES[torch.float32]
        )
        try:
            report = harness.compare(fn, inputs, tolerance=coarsest, reference=None, kernels=kernel_set)
        except (DataDependentOutputException, DynamicOutputShapeException):
            found.add("forward", {str(op): DATA_DEPENDENT})
            continue
        failures = [entry for entry in report.fallbacks if entry.reason.type.is_failure]
        assert not failures, failures
        for graph in report.graphs:
            _count(op, graph, found)
    return found


def _runs(fn: Callable[..., Any], inputs: list[Any]) -> bool:
    try:
        fn(*[x.detach().clone() for x in inputs])
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _count(op: OpOverload, graph: GraphReport, found: Found) -> None:
    left = {
        name: str(region.node_reasons.get(name, region.reason))
        for region in graph.regions
        if region.executor == "torch"
        for name in region.ops
    }
    if "backward" in graph.name:
        if graph.num_nodes:  # else the gradient is handed through
            found.add("backward", left)
    elif graph.num_nodes:
        found.add("forward", left)
    else:
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        found.add("forward", {str(op): RANDOM if is_random else ALLOCATION})


def row(op: OpOverload) -> Row:
    """Examine an op in every dtype and with both kernel sets.

    Raises:
        AssertionError: If a result differs from eager's, or a region failed.
    """
    training, standard = examine(op, torch.float32), examine(op, torch.float32, "standard")
    assert training is not None, "eager has no float32 kernel for a sample"
    assert standard is not None
    others = {dtype: examine(op, dtype) for dtype in OTHER_DTYPES}
    on_ort = [str(dtype).removeprefix("torch.") for dtype, found in others.items() if found and found.is_whole]
    return Row(name_of(op), training, standard, on_ort)


def page(rows: list[Row]) -> str:
    """The page as Markdown."""
    installed = next(name for name in kernels.DISTRIBUTIONS if kernels.installed(name))
    some = sum(row.training.ort["forward"] > 0 for row in rows)
    head = HEAD.format(
        versions=" and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", installed)),
        total=len(rows),
        some=some,
        percent=round(100 * some / len(rows)),
        whole=sum(row.training.is_whole for row in rows),
        standard=sum(row.standard.ort["forward"] > 0 for row in rows),
    )
    return head + "".join(f"{row.line()}\n" for row in rows)


def main() -> None:
    """Examine every op and write the page, or exit with an error if a result is wrong."""
    torch.set_num_threads(1)
    logging.getLogger("lightning_ort").setLevel(logging.ERROR)  # what stays in torch is the page's matter
    rows, wrong = [], []
    for op in core_ops():
        try:
            rows.append(row(op))
        except Exception as error:  # whatever it is, it belongs to this op
            wrong.append(f"{name_of(op)}: {type(error).__name__}: {error}")
    if wrong:
        sys.exit("\n".join(wrong))
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
