"""For which sizes of a batch a model is right: where what a trace asks about sizes has another answer, it is tried."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_ort.onnx_export.failure import ExportFailed, line_of
from lightning_ort.onnx_export.training.batch import Limits, batch_size, formula, resized
from lightning_ort.onnx_export.training.tracing import BATCH, Trace
from lightning_ort.onnx_export.training.verify import Batch, Task, runs, verify

_TRIED = 64  # sizes up to this are tried, and those that a question names
_LARGEST = 4096  # larger batches are not made to try them
_ROWS = 8  # as many starts are tried: a row whose label is ignored has no loss


def limits_of(folder: Path, task: Task, kind: str, trace: Trace) -> Limits:
    """Return for which sizes a model is right.

    Torch asks about sizes wherever it chooses an algorithm, and so do steps that do something else for some. What is
    asked is no limit if the model is right although the answer is another.

    Raises :class:`ExportFailed` if it is not right for the sample, or the module's loss is NaN there.
    """
    sample = _sample(trace)
    known: dict[tuple[tuple[str, int], ...], bool] = {}
    if math.isnan(verify(folder, task, kind, trace, [_resized(trace, {}, 0)]).loss):
        raise ExportFailed(f"What {trace.what} returns for this batch is NaN: nothing can be compared.")

    def is_right(**changed: int) -> bool:
        sizes = tuple(sorted({**sample, **changed}.items()))
        if any(size > max(_LARGEST, sample[name]) for name, size in sizes):
            return False
        if sizes not in known:
            known[sizes] = _is_right(folder, task, kind, trace, dict(sizes))
        return known[sizes]

    limits = Limits({})
    for symbol, name in trace.symbols.items():
        lowest, highest = trace.sizes[symbol]
        lowest = 1 if is_right(**{name: lowest - 1}) else lowest  # below 2 torch never looks
        highest = None if highest is None or is_right(**{name: highest + 1}) else highest
        limits.sizes[name] = [lowest, highest]
    for guard in trace.guards:
        if not guard.expr.free_symbols <= set(trace.symbols) or _is_bound(guard.expr):
            continue
        others = [sizes for sizes in _others(guard.expr, trace.symbols, sample) if not limits.refused(sizes)]
        if not all(is_right(**sizes) for sizes in others[:2]):
            limits.add(formula(guard.expr, trace.symbols), line_of(guard))
    return limits


def _is_right(folder: Path, task: Task, kind: str, trace: Trace, sizes: Mapping[str, int]) -> bool:
    for start in range(min(batch_size(trace.samples), _ROWS)):
        try:
            difference = verify(folder, task, kind, trace, [_resized(trace, sizes, start)])
        except Exception:  # the module's own too, such as that of a batch norm, which needs two rows
            return False
        if not math.isnan(difference.loss):
            break
    return True


def batches_within(limits: Limits, task: Task, kind: str, trace: Trace) -> list[Batch]:
    """Return batches of some sizes for which a model is right: larger ones where the module takes no smaller one."""
    sample, found = _sample(trace), []
    ways: list[list[dict[str, int]]] = [
        [],
        [{BATCH: 1}, {BATCH: sample.get(BATCH, 1) + 1}],
        [{name: size + step for name, size in sample.items()} for step in (-1, 1)],
    ]
    for start, changes in enumerate(ways):
        chosen = _resized(trace, sample, start)
        for change in changes:
            sizes = {name: change.get(name, size) for name, size in sample.items()}
            batch = _resized(trace, sizes, start)
            if not limits.refused(sizes) and runs(task, kind, trace, batch):
                chosen = batch
                break
        found.append(chosen)
    return found


def _sample(trace: Trace) -> dict[str, int]:
    found = {}
    for name in trace.symbols.values():
        field, dims = next(iter(trace.dims_of(name).items()))
        found[name] = trace.samples[field].shape[dims[0]]
    return found


def _resized(trace: Trace, sizes: Mapping[str, int], start: int) -> Batch:
    fields = trace.samples
    for name, size in sizes.items():
        fields = resized(fields, trace.dims_of(name), size, start)
    return fields


def _is_bound(expression: Any) -> bool:
    """Whether a question is about the lowest or highest value of one size, which torch has noted as such."""
    return (
        expression.is_Relational
        and expression.rel_op in ("<", "<=", ">", ">=")
        and any(
            side.is_Symbol and other.is_Integer
            for side, other in ((expression.lhs, expression.rhs), (expression.rhs, expression.lhs))
        )
    )


def _others(expression: Any, names: Mapping[Any, str], sample: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes for which the answer is no, where one is not that of the sample."""
    numbers = {int(number) + step for number in expression.atoms() if number.is_Integer for step in (-1, 0, 1)}
    for symbol in sorted(expression.free_symbols, key=str):
        rest = {other: sample[names[other]] for other in expression.free_symbols if other != symbol}
        for size in sorted({*range(1, _TRIED + 1), *(number for number in numbers if number > _TRIED)}):
            try:
                holds = expression.subs({**rest, symbol: size}) != False  # noqa: E712  # sympy's
            except ZeroDivisionError:  # the module divides by a size, too
                holds = False
            if not holds:
                yield {names[symbol]: size}
