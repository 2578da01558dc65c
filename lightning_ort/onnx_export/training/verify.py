"""Some steps of an exported folder in onnxruntime, compared with the module's, and for which sizes that holds."""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ort.compat.onnxruntime import import_onnxruntime
from lightning_ort.onnx_export.export import modes_kept
from lightning_ort.onnx_export.failure import ExportFailed, line_of
from lightning_ort.onnx_export.training import runner
from lightning_ort.onnx_export.training.batch import Limits, batch_size, formula, resized
from lightning_ort.onnx_export.training.models import Settings
from lightning_ort.onnx_export.training.random import Recorded
from lightning_ort.onnx_export.training.state import Restored, many_steps, python_kept
from lightning_ort.onnx_export.training.tracing import BATCH, Trace, as_traced

RATE = 0.1  # an update that is wrong is seen with it; parameters start anew after each
ROUNDING = 1e-6  # parameters are moved by so much to see what rounding may do
Batch = Mapping[str, Tensor]  # the fields by name
Numbers = Mapping[str, Tensor]
_TRIED = 64  # sizes up to this are tried, and those that a question names
_LARGEST = 4096  # larger batches are not made to try them
_ROWS = 8  # as many starts are tried: a row whose label is ignored has no loss


@dataclass(frozen=True)
class Difference:
    """How far onnxruntime's numbers are from PyTorch's after some steps, as shares of the largest."""

    loss: float
    state: float


class Reference:
    """The module itself in PyTorch, with its own hooks; :class:`Restored` undoes what it trains."""

    def __init__(self, task: "Task", trace: Trace) -> None:
        self.module, self.settings, self.means, self.trace = task.module, task.settings, task.means, trace
        self.parameters = dict(task.module.named_parameters())
        self.optimizer = None if task.optimizer is None else _copied(task.optimizer)
        self.pending = 0
        for parameter in self.parameters.values():
            parameter.grad = None

    def run(self, batch: Batch) -> tuple[dict[str, Tensor], list[np.ndarray]]:
        """Run the step with its backward pass; return its numbers by what they are, and what it drew."""
        with Recorded(self.means) as drawn:
            found = {repr(name): value for name, value in self.trace.function(batch).items()}
        found |= {
            f"gradient of {name}": value.grad for name, value in self.parameters.items() if value.grad is not None
        }
        trained = {name for name, value in self.parameters.items() if value.requires_grad}
        found |= {name: value for name, value in self.state().items() if name not in trained and "/" not in name}
        return {name: value.detach().clone() for name, value in found.items()}, drawn

    def rounding(self, batch: Batch) -> dict[str, Tensor]:
        """By how much the numbers of a step change if parameters do so by the last bits."""
        state = torch.get_rng_state()
        found = []
        for share in (0.0, ROUNDING):
            with Restored(self.module, gradients=True), python_kept(self.module), torch.no_grad():
                torch.set_rng_state(state)
                generator = torch.Generator().manual_seed(0)
                for parameter in self.parameters.values():
                    sign = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
                    parameter.mul_(1 + share * sign)
                with torch.set_grad_enabled(self.trace.trains):
                    found.append(self.run(batch)[0])
        torch.set_rng_state(state)
        return {name: (found[1][name] - value).abs() for name, value in found[0].items() if value.is_floating_point()}

    def update(self, gradients: Numbers) -> None:
        """Make the optimizer's step with these gradients, if one is due."""
        self.pending += 1
        if self.pending < self.settings.accumulate and self.optimizer is not None:
            return
        trained = [value for value in self.parameters.values() if value.requires_grad]
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient.to(self.parameters[name].device)
        limit = self.settings.clip_value
        if limit is not None and self.settings.clip_algorithm == "norm":
            nn.utils.clip_grad_norm_(trained, limit)
        elif limit is not None:
            nn.utils.clip_grad_value_(trained, limit)
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = RATE
            self.optimizer.step()
        for value in trained:
            value.grad = None
        self.pending = 0

    def end(self, batch: Batch) -> None:
        """Call what a Trainer calls after the update, which may write to no tensor."""
        before = {name: value.clone() for name, value in self.state().items()}
        self.trace.end(batch)
        pairs = [(name, value, before.get(name, value)) for name, value in self.state().items()]
        if written := [name for name, now, then in pairs if not torch.equal(now.nan_to_num(), then.nan_to_num())]:
            raise ExportFailed(
                f"{type(self.module).__name__}.on_train_batch_end writes to {', '.join(written)} after the update,"
                " which a model does not: do it in `training_step` or `on_before_zero_grad`."
            )

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers and states, called as in a folder."""
        found = {**self.parameters, **dict(self.module.named_buffers())}
        for name, value in self.parameters.items() if self.optimizer is not None else ():
            for key, state in self.optimizer.state.get(value, {}).items():  # type: ignore[union-attr]
                if isinstance(state, Tensor) and state.shape == value.shape:
                    found[f"{key}/{name}"] = state
        return {name: value.detach() for name, value in found.items()}


def _copied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same parameters with the same states."""
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    for group in groups:
        group.update(dict.fromkeys(("fused", "foreach"), None) | {"lr": float(group["lr"])})
    kind: Any = type(optimizer)
    made = kind(groups)
    for parameter, state in optimizer.state.items():
        made.state[parameter] = copy.deepcopy(state)
    return made


@dataclass(frozen=True)
class Task:
    """What is compared."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None  # its optimizer, which is not changed
    settings: Settings  # what the folder was exported with
    # the largest difference, as a share of the largest value. What rounding alone may do is allowed too
    tolerance: float
    # the frozen parameters that it has in float16; they are compared with a module that has them so too
    halved: Collection[str] = ()
    means: bool = False  # whether what dropout draws is replaced by its mean


def verify(folder: Path, task: Task, kind: str, trace: Trace, batches: Sequence[Batch]) -> Difference:
    """Compare some runs of a folder's model with the module's, with the same random numbers.

    Of a training step these are its results, its gradients, which its model then also returns, what it writes to, and
    the update. Each is compared from the same state, and the update from the same gradients, so that no difference
    grows from step to step. What the module keeps elsewhere, it keeps over all of the steps.

    Raises :class:`ExportFailed` if there is a larger difference than allowed.
    """
    import_onnxruntime()
    try:
        training = runner.Training.load(folder)
    except runner.TrainingError as error:
        raise ExportFailed(f"The exported model is not valid: {error}") from error
    with _at_work(task, kind):
        reference = Reference(task, trace)
        start = {name: value.detach().clone() for name, value in reference.parameters.items() if value.requires_grad}
        found = []
        for batch in batches:
            sizes = ", ".join(f"{field} {list(value.shape)}" for field, value in batch.items())
            compare = _Comparison(f"{trace.what}({sizes})", task.tolerance)
            if kind == "training":
                with many_steps(task.module):
                    found.append(_step(training, reference, batch, compare))
                training.set_state({name: value.cpu().numpy() for name, value in start.items()})
                state = training.state
                for name, value in reference.state().items():
                    if name in state:
                        value.copy_(torch.from_numpy(state[name]))
            else:
                rounding = reference.rounding(batch)
                expected, training.draws = reference.run(batch)
                arrays = _arrays(batch)
                got = compare.run(lambda: training.run(kind, arrays))  # noqa: B023
                found.append(Difference(compare.results(_named(training, kind, got), expected, rounding), 0.0))
    return Difference(_worst(each.loss for each in found), _worst(each.state for each in found))


def runs(task: Task, kind: str, trace: Trace, batch: Batch) -> bool:
    """Whether the module itself takes a batch, whose indices another number of rows may have made wrong."""
    with _at_work(task, kind):
        try:
            Reference(task, trace).run(batch)
        except Exception:  # the user's code
            return False
    return True


def _worst(numbers: Iterable[float]) -> float:
    return float(np.max([0.0, *numbers]))  # NaN if one is


def _step(training: runner.Training, reference: Reference, batch: Batch, compare: "_Comparison") -> Difference:
    rounding = reference.rounding(batch)
    expected, training.draws = reference.run(batch)
    before = {name: value.clone() for name, value in reference.state().items()}
    rate = None if reference.optimizer is None else RATE
    arrays = _arrays(batch)
    got = compare.run(lambda: training.step(arrays, lr=rate))
    gradients = {name: torch.from_numpy(value.copy()) for name, value in training.gradients.items()}
    found = {name: torch.from_numpy(value) for name, value in training.state.items()}
    found |= {f"gradient of {name}": value for name, value in gradients.items()}
    found |= _named(training, "training", got)
    loss = compare.results(found, expected, rounding)
    reference.update(gradients)
    state = compare.state(found, reference.state(), before)
    reference.end(batch)
    return Difference(loss, state)


def _named(training: runner.Training, kind: str, results: Mapping[str, Any]) -> dict[str, Tensor]:
    """The results of a model by the names of its trace."""
    outputs = training.about["models"][kind]["outputs"]
    names = {each["key"]: repr(each["name"]) for each in outputs if each["role"] in ("loss", "logged", "result")}
    return {
        names[key]: torch.tensor(value) if isinstance(value, float) else torch.from_numpy(value)
        for key, value in results.items()
    }


def _arrays(batch: Batch) -> dict[str, np.ndarray]:
    return {field: value.detach().cpu().numpy() for field, value in batch.items()}


class _Comparison:
    def __init__(self, step: str, tolerance: float) -> None:
        self.step, self.tolerance = step, tolerance

    def run(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # onnxruntime's own classes
            raise ExportFailed(f"{self.step} fails as a model: {error}") from error

    def results(self, got: Numbers, expected: Numbers, rounding: Numbers) -> float:
        """Compare what a step returns, its gradients, and what it writes to."""
        scale = max((_largest(v) for name, v in expected.items() if name.startswith("gradient of ")), default=0.0)
        largest = 0.0
        for name, value in expected.items():
            if name not in got:
                if name.startswith("gradient of "):
                    self._fail(name, "missing", value)
                continue  # what no step writes to
            allowed = self.tolerance * _largest(value)
            if name in rounding:  # which may not hide what is wrong
                share = scale if name.startswith("gradient of ") else max(_largest(value), 1e-2)
                allowed += min(20 * _largest(rounding[name]), 1e-3 * share) + 1e-6 * share
            largest = max(largest, self._compare(name, got[name], value, allowed))
        if missing := [name for name in got if name.startswith("gradient of ") and name not in expected]:
            self._fail(missing[0], got[missing[0]], torch.tensor(0.0))
        return largest

    def state(self, got: Numbers, expected: Numbers, before: Numbers) -> float:
        largest = 0.0
        for name, value in expected.items():
            if name in got and value.is_floating_point():
                scale = max(_largest(value), _largest(before[name]) if name in before else 0.0)
                largest = max(largest, self._compare(name, got[name], value, min(self.tolerance, 1e-5) * scale + 1e-12))
        return largest

    def _compare(self, name: str, got: Tensor, expected: Tensor, allowed: float) -> float:
        expected = expected.detach().cpu()
        if got.shape != expected.shape or got.dtype != expected.dtype:
            self._fail(name, f"{got.dtype}{list(got.shape)}", expected)
        difference = (got.double() - expected.double()).abs()
        same = (got == expected) | (got.isnan() & expected.isnan()) if got.is_floating_point() else got == expected
        difference = torch.where(same, 0.0, difference)
        if not bool((difference <= allowed).all()):
            self._fail(name, got, expected)
        return _largest(difference) / max(_largest(expected), 1.0)

    def _fail(self, name: str, got: Any, expected: Tensor) -> None:
        if isinstance(got, Tensor):
            index = int((got.double() - expected.double()).abs().nan_to_num(torch.inf).argmax()) if got.numel() else 0
            got, expected = (f"{float(x.flatten()[min(index, x.numel() - 1)]):.7g}" for x in (got, expected))  # type: ignore[assignment]
        raise ExportFailed(
            f"{self.step}: the exported model's {name} is {got}, the module's {expected}; allowed is a difference of"
            f" {self.tolerance:.3g}. The step must not depend on the number of the batch, on random numbers of other"
            " packages, or on state that is in no buffer."
        )


def _largest(value: Tensor) -> float:
    value = value.detach()
    value = value[value.isfinite()] if value.is_floating_point() else value
    return float(value.abs().max()) if value.numel() and value.dtype is not torch.bool else 0.0


def rounding(task: Task, trace: Trace, batches: Sequence[Batch]) -> Difference:
    """How far steps of the module are from its own if the halved parameters are rounded to float16."""
    runs: list[tuple[list[Tensor], dict[str, Tensor]]] = []
    for each in (replace(task, halved=()), task):
        with _at_work(each, "training"):
            reference, losses = Reference(each, trace), []
            for batch in batches:
                numbers, _ = reference.run(batch)
                losses.append(numbers["'loss'"])
                reference.update({name: v.grad for name, v in reference.parameters.items() if v.grad is not None})
            state = {name: value.clone() for name, value in reference.state().items() if name not in task.halved}
            runs.append((losses, state))
    (own, before), (rounded, after) = runs
    loss = max(_share(x, y) for x, y in zip(own, rounded, strict=True))
    return Difference(loss, max(_share(value, after[name]) for name, value in before.items()))


def _share(x: Tensor, y: Tensor) -> float:
    return _largest(x.double() - y.double()) / max(_largest(x), 1.0)


@contextmanager
def _at_work(task: Task, kind: str) -> Iterator[None]:
    """Within the block a module trains or is evaluated, with some parameters rounded to float16."""
    module = task.module
    with (
        Restored(module),
        python_kept(module),
        modes_kept(module),
        as_traced(),
        torch.random.fork_rng([]),
        torch.set_grad_enabled(kind == "training"),
    ):
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in task.halved:
                    parameter.copy_(parameter.half())
        if kind != "training":
            module.eval()
        yield


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
            limits.conditions.append({"formula": formula(guard.expr, trace.symbols), "line": line_of(guard)})
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
