"""Whatever a step does and whatever changes between two steps: it is open, with a line, or its replays are right.

Nothing but the gate stands between these steps and a wrong fit: replays are not checked here (:mod:`gated_fits`).
"""

import argparse
import collections
import contextlib
import contextvars
import copy
import datetime
import decimal
import enum
import functools
import itertools
import math
import operator
import os
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import test_kinds
import torch
import torchmetrics
from gated_fits import CHANGED, Case, Step, batches, compared
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("recordings_win")]

CLOSED: dict[str, Callable[[], Case]] = {}
OPEN: dict[str, tuple[Callable[[], Case], str]] = {}
Factor = Callable[..., Any]


def closed(make: Callable[[], Case]) -> Callable[[], Case]:
    """Recorded, and right."""
    CLOSED[make.__name__] = make
    return make


def is_open(why: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        OPEN[make.__name__] = (make, why)
        return make

    return add


def case(factor: Factor, change: Callable[[Any], Any] = lambda m: None, **kept: Any) -> Case:
    return Case(Step(factor, **kept), change)


def replaced(owner: Any, name: str, by: Any, factor: Factor = lambda m, x, loss: 2.0) -> Case:
    """Somebody replaces a function of a package, or another attribute, until the fit ends."""
    before = vars(owner).get(name)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        yield
        delattr(owner, name) if before is None else setattr(owner, name, before)

    return Case(Step(factor), lambda m: setattr(owner, name, by), around)


def switched(switch: Callable[[Any], Any], to: Any, back: Any, factor: Factor) -> Case:
    """Somebody switches a setting of the process."""

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        yield
        switch(back)

    return Case(Step(factor), lambda m: switch(to), around)


def of_batches(factor: Factor, made: Callable[[int, Tensor], Any], **kept: Any) -> Case:
    """Batches that differ in something."""
    return Case(Step(factor, **kept), batches=[made(i, x) for i, x in enumerate(batches())])


class Thing:
    by = 2.0


# Tensors that were there before


@closed
def a_tensor_of_another_size() -> Case:
    return case(lambda m, x, loss: m.t.sum() * m.t.numel(), lambda m: m.t.resize_(2), t=torch.ones(4))


@closed
def a_tensor_with_one_more_dimension() -> Case:
    return case(lambda m, x, loss: m.t.sum() * m.t.dim(), lambda m: m.t.unsqueeze_(0), t=torch.ones(4))


@closed
def a_transposed_tensor() -> Case:
    return case(lambda m, x, loss: m.t.sum() * m.t.shape[0], lambda m: m.t.t_(), t=torch.ones(2, 3))


@closed
def a_tensor_with_other_memory() -> Case:
    return case(lambda m, x, loss: m.t.sum(), lambda m: m.t.set_(torch.full((3,), 3.0)), t=torch.ones(2))


@closed
def a_parameter_of_another_layout() -> Case:
    def change(m: Any) -> None:
        m.net[0].weight.data = m.net[0].weight.data.t().contiguous().t()

    return case(lambda m, x, loss: 1.0, change)


@closed
def values_that_somebody_writes() -> Case:
    return case(lambda m, x, loss: m.t.sum(), lambda m: m.t.fill_(3.0), t=torch.ones(2))


@closed
def a_buffer_that_is_written_and_replaced() -> Case:
    class Moving(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean.mul_(0.9).add_(batch.mean(0), alpha=0.1)
            return super().training_step(batch, batch_idx) * self.mean.sum()

    module = Moving()
    module.register_buffer("mean", torch.ones(2))
    return Case(module, lambda m: setattr(m, "mean", torch.full((2,), 7.0)))


@closed
def tied_parameters() -> Case:
    case = Case(Step(lambda m, x, loss: m.one(x).mean() + m.other(x).mean() + 5))
    case.module.one, case.module.other = nn.Linear(2, 2), nn.Linear(2, 2)
    case.change = lambda m: setattr(m.other, "weight", m.one.weight)
    return case


@closed
def averaged_weights() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        with torch.no_grad():
            for one, other in zip(m.average[0].parameters(), m.net.parameters(), strict=True):
                one.mul_(0.9).add_(other, alpha=0.1)
        return (m.net(x) - m.average[0](x)).square().mean() + 1

    module = Step(factor)
    module.average = [copy.deepcopy(module.net).requires_grad_(False)]
    return Case(module)


@closed
def a_hook_of_a_gradient_that_comes_again() -> Case:
    def double(grad: Tensor) -> Tensor:
        return grad * 2

    module = Step(lambda m, x, loss: 1.0 if double is None else 2.0)
    module.net[0].weight.register_hook(double).remove()
    return Case(module, lambda m: m.net[0].weight.register_hook(double))


@is_open("hook|not found")
def a_hook_of_a_gradient() -> Case:
    module = Step()
    module.net[0].weight.register_hook(lambda grad: grad * 2)
    return Case(module, lambda m: m.net[0].weight.register_hook(lambda grad: grad * 3))


@closed
def which_of_two_kept_tensors_is_which() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        same = m.one is m.other
        m.one = m.other = x.mean(0)
        return 3.0 if same else 1.0

    t = torch.ones(2)
    return case(factor, lambda m: setattr(m, "other", m.other.clone()), one=t, other=t)


@is_open("alias")
def a_kept_view_of_a_parameter() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        m.kept = m.net[0].weight.detach()
        return 2.0

    return case(factor, kept=torch.ones(4, 2))


# Batches


@closed
def a_batch_that_is_given_twice() -> Case:
    return of_batches(lambda m, b, loss: 2.0 if b[0] is b[1] else 1.0, lambda i, x: (x, x if i % 2 else x[:]))


@closed
def parts_of_a_batch_that_overlap() -> Case:
    def factor(m: Any, b: Any, loss: Any) -> Any:
        b[1].mul_(1.1)
        return b[1][2:].sum() + b[2].sum() + 9

    copied = [x.clone() for x in batches()]
    return of_batches(factor, lambda i, x: (x, copied[i], copied[i][2:] if i % 2 else x[2:].clone()))


@is_open("a part of what it reads")
def a_batch_that_is_a_parameter() -> Case:
    p = nn.Parameter(torch.ones(2))
    factor = lambda m, b, loss: (2.0 if b[1] is m.p else 1.0) + b[1].sum()  # noqa: E731
    return of_batches(factor, lambda i, x: (x, p.data), p=p)


@closed
def a_batch_that_is_kept() -> Case:
    kept = batches()
    factor = lambda m, x, loss: 2.0 if any(x is one for one in m.kept) else 1.0  # noqa: E731
    return of_batches(factor, lambda i, x: kept[i], kept=kept[CHANGED : CHANGED + 3])


@closed
def a_memory_that_a_batch_is_in_now_and_then() -> Case:
    t = torch.ones(4, 2)

    def factor(m: Any, b: Any, loss: Any) -> Any:
        b[1].mul_(0.5)
        return m.t.sum() + b[1].sum() + 1

    return of_batches(factor, lambda i, x: (x, t[1:] if i > CHANGED and i % 2 else x[1:].clone()), t=t)


@closed
def the_sign_of_an_imaginary_zero() -> Case:
    factor = lambda m, b, loss: 2 + math.copysign(1, b[1].imag)  # noqa: E731
    return of_batches(factor, lambda i, x: (x, complex(0.0, -0.0 if i % 2 else 0.0)))


@closed
def tensors_of_inference() -> Case:
    def made(i: int, x: Tensor) -> Any:
        with torch.inference_mode(i % 2 == 0):
            return x, x.clone()

    return of_batches(lambda m, b, loss: 2.0 if b[1].is_inference() else 1.0, made)


@closed
def strings_and_numbers() -> Case:
    factor = lambda m, b, loss: b[1] * (2 if b[2] == "a" else 1)  # noqa: E731
    return of_batches(factor, lambda i, x: (x, 1.0 + i % 2, "ab"[i % 2]))


@closed
def a_type_of_numbers() -> Case:
    return of_batches(lambda m, x, loss: 1.0 + x.element_size(), lambda i, x: x.double() if i % 2 else x)


@is_open("attributes of its own")
def a_tensor_with_an_attribute() -> Case:
    def made(i: int, x: Tensor) -> Tensor:
        x.gain = 1.0 + i  # type: ignore[attr-defined]
        return x

    return of_batches(lambda m, x, loss: getattr(x, "gain", 1.0), made)


@is_open("gets gradients")
def a_batch_with_gradients() -> Case:
    class Looks(Step):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch.grad.sum())

    return Case(Looks(seen=[]), batches=[x.requires_grad_() for x in batches()])


for name, read in {
    "storage_offset": lambda x: 1.0 + x.storage_offset(),
    "is_view": lambda x: 1.0 + x._is_view(),
    "is_leaf": lambda x: 1.0 + x.is_leaf,
    "is_pinned": lambda x: 1.0 + x.is_pinned(),
    "version": lambda x: 1.0 + x._version,
}.items():
    factor = functools.partial(lambda m, x, loss, read: read(x), read=read)
    OPEN[f"the_{name}_of_a_batch"] = (functools.partial(of_batches, factor, lambda i, x: x[1:] if i % 2 else x[:3]), "")


# PyTorch


TORCH: dict[str, tuple[Any, str, Any, Factor]] = {
    "a_function": (torch, "square", torch.abs, lambda m, x, loss: torch.square(x).sum()),
    "a_function_of_a_layer": (torch, "tanh", torch.sin, lambda m, x, loss: 1.0),
    "a_function_of_nn": (F, "linear", lambda x, w, b=None: x @ w.t() * 2, lambda m, x, loss: 1.0),
    "a_layer": (nn.Linear, "forward", lambda self, x: x @ self.weight.t(), lambda m, x, loss: 1.0),
    "a_call_of_a_layer": (nn.Tanh, "__call__", lambda self, x: x, lambda m, x, loss: 1.0),
    "a_function_within": (nn._reduction, "get_enum", lambda reduction: 2, lambda m, x, loss: F.mse_loss(x, x + 1)),
    "a_method_of_tensors": (Tensor, "square", lambda self: self.abs(), lambda m, x, loss: 1.0),
    "an_operator": (Tensor, "__mul__", lambda self, other: self + 5.0, lambda m, x, loss: 2.0),
    "by_a_name_that_is_computed": (F, "relu", F.silu, lambda m, x, loss: getattr(F, "re" + "lu" * 1)(x).sum() + 9),
}
for name, row in TORCH.items():
    CLOSED[f"{name}_is_replaced"] = functools.partial(replaced, *row)

torch_settings: dict[str, tuple[Callable[[Any], Any], Any, Any, Factor]] = {
    "default_dtype": (
        *(torch.set_default_dtype, torch.float64, torch.float32),
        lambda m, x, loss: (torch.ones(2) / 3).double().sum().float(),
    ),
    "precision": (
        *(torch.set_float32_matmul_precision, "medium", "highest"),
        lambda m, x, loss: 1.0 + len(torch.get_float32_matmul_precision()),
    ),
    "mkldnn": (
        *(lambda on: setattr(torch.backends.mkldnn, "enabled", on), False, True),
        lambda m, x, loss: 1.0 + torch.backends.mkldnn.enabled,
    ),
    "attention": (
        *(torch.backends.cuda.enable_flash_sdp, False, True),
        lambda m, x, loss: F.scaled_dot_product_attention(*[x.reshape(1, 1, 4, 2)] * 3).mean() + 2,
    ),
    "fast_path": (
        *(torch.backends.mha.set_fastpath_enabled, False, True),
        lambda m, x, loss: 1.0 + torch.backends.mha.get_fastpath_enabled(),
    ),
    "filling_of_memory": (
        *(lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", on), False, True),
        lambda m, x, loss: 1.0 + torch.utils.deterministic.fill_uninitialized_memory,
    ),
}
for name, setting in torch_settings.items():
    CLOSED[f"setting_{name}"] = functools.partial(switched, *setting)


@is_open("num_threads")
def the_number_of_threads() -> Case:
    return case(lambda m, x, loss: float(torch.get_num_threads()))


@is_open("num_threads")
def a_number_of_threads_that_is_set() -> Case:
    return case(lambda m, x, loss: torch.set_num_threads(torch.get_num_threads()) or 1.0)


@closed
def random_numbers_that_nobody_gets() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        F.dropout(x, 0.5)
        torch.empty(3).normal_()
        return F.dropout(x, 0.5).sum() + 9

    return case(factor)


@closed
def an_error_that_is_caught_now_and_then() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        try:
            return torch.linalg.cholesky(torch.eye(2) * (x.sum() + 3)).sum() + 2
        except RuntimeError:
            return 2.0

    return case(factor)


@closed
def an_error_of_an_index_that_is_caught() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        try:
            return F.embedding((x[:, 0].abs() * 2).long(), m.t).sum() + 2
        except IndexError:
            return 2.0

    return case(factor, t=torch.ones(4, 2))


@closed
def a_branch_that_values_decide() -> Case:
    return case(lambda m, x, loss: 2.0 if x.sum() > -3 else 1.0)


@closed
def an_uninitialized_tensor() -> Case:
    return case(lambda m, x, loss: torch.mul(x, 2, out=torch.empty(4, 2)).sum() + 9)


@is_open("tensors of layout|nested")
def nested_tensors() -> Case:
    return case(lambda m, x, loss: torch.nested.nested_tensor([x[0], x[1, :1]]).to_padded_tensor(0.0).sum() + 9)


@is_open("")
def recomputed_activations() -> Case:
    return case(lambda m, x, loss: checkpoint(m.net, x, use_reentrant=False).square().mean())


@is_open("")
def gradients_that_are_read() -> Case:
    factor = lambda m, x, loss: 2.0 if operator.attrgetter("gr" + "ad")(m.net[0].bias) is None else 1.0  # noqa: E731
    return case(factor)


@is_open("by names")
def an_attribute_of_a_tensor_by_a_name() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        bias = m.net[0].bias
        return 2.0 if getattr(bias, m.name) is None else 1.0

    return case(factor, name="_post_accumulate_grad_hooks")


@closed
def a_layer_by_a_name_that_is_computed() -> Case:
    case = Case(Step(lambda m, x, loss: sum(getattr(m, f"layer{i}")(x).mean() for i in range(2)) + 5))
    case.module.layer0, case.module.layer1 = nn.Linear(2, 2), nn.Linear(2, 2)
    case.change = lambda m: setattr(m, "layer1", nn.Identity())
    return case


# Python


@closed
def an_attribute_of_a_member_of_an_enumeration() -> Case:
    class Kind(enum.Enum):
        ONE = 1.0

    Kind.ONE.gain = 1.0  # type: ignore[attr-defined]
    return case(lambda m, x, loss: m.kind.value * m.kind.gain, lambda m: setattr(m.kind, "gain", 3.0), kind=Kind.ONE)


@closed
def the_value_of_a_member_of_an_enumeration() -> Case:
    class Kind(enum.Enum):
        ONE = 1.0

    return case(lambda m, x, loss: m.kind.value, lambda m: setattr(m.kind, "_value_", 3.0), kind=Kind.ONE)


@closed
def what_is_said_of_a_class() -> Case:
    class Noted:
        """Short."""

    factor = lambda m, x, loss: 1.0 * len(m.kind.__doc__) + len(m.kind.__name__) + len(m.function.__name__)  # noqa: E731

    def change(m: Any) -> None:
        Noted.__name__ = "Longer"

    return case(factor, change, kind=Noted, function=lambda: None)


@closed
def a_module_as_an_object() -> Case:
    result = replaced(math, "tau", 5.0, lambda m, x, loss: m.kept.tau)
    result.module.kept = math
    return result


@closed
def a_filter_of_warnings() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        try:
            warnings.warn("a gate", stacklevel=1)
        except UserWarning:
            return 3.0
        return 1.0

    def around() -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return stack

    return Case(Step(factor), lambda m: warnings.simplefilter("error", UserWarning), around)


@closed
def an_attribute_that_a_thread_changes() -> Case:
    def change(m: Any) -> None:
        thread = threading.Thread(target=lambda: setattr(m, "by", 3.0))
        thread.start()
        thread.join()

    return case(lambda m, x, loss: m.by, change, by=2.0)


@closed
def a_descriptor() -> Case:
    class Reads:
        value = 2.0

        def __get__(self, owner: Any, kind: Any = None) -> float:
            return self.value

    owner = type("Owner", (), {"by": Reads()})()
    return case(lambda m, x, loss: m.owner.by, lambda m: setattr(Reads, "value", 3.0), owner=owner)


@closed
def an_array_and_a_view_of_it() -> Case:
    array = np.ones(4, np.float32)
    return case(lambda m, x, loss: torch.from_numpy(m.a).sum(), lambda m: array.fill(3.0), a=array[:2])


@closed
def all_attributes_of_an_object() -> Case:
    thing = Thing()
    thing.by = 2.0
    return case(lambda m, x, loss: m.thing.by, lambda m: setattr(m.thing, "__dict__", {"by": 3.0}), thing=thing)


@closed
def an_attribute_that_a_parameter_gets() -> Case:
    factor = lambda m, x, loss: getattr(m.net[0].weight, "gain", 1.0)  # noqa: E731
    return case(factor, lambda m: setattr(m.net[0].weight, "gain", 3.0))


@closed
def an_attribute_that_a_function_gets() -> Case:
    def double(x: float) -> float:
        return x * getattr(double, "gain", 2.0)

    return case(lambda m, x, loss: double(1.0), lambda m: setattr(double, "gain", 3.0))


@closed
def settings_of_a_command_line() -> Case:
    settings = argparse.Namespace(by=2.0)
    return case(lambda m, x, loss: m.settings.by, lambda m: setattr(settings, "by", 3.0), settings=settings)


@closed
def an_attribute_that_a_package_gets() -> Case:
    return replaced(torch, "gain_of_a_test", 3.0, lambda m, x, loss: 3.0 if hasattr(torch, "gain_of_a_test") else 1.0)


@closed
def hooks_of_saved_tensors_that_somebody_sets() -> Case:
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5, lambda t: t)
    leaves = contextlib.ExitStack()
    return Case(Step(), lambda m: leaves.enter_context(hooks), lambda: leaves)


@closed
def a_mutable_default() -> Case:
    box = [2.0]
    return case(lambda m, x, loss, b=box: b[0], lambda m: box.__setitem__(0, 3.0))


@closed
def lists_that_are_only_appended_to() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        m.kept["all"].append(loss.detach())
        m.count.append(x.sum())
        return 1.0

    return case(factor, lambda m: m.count.clear(), kept=collections.defaultdict(list), count=[])


VARIABLE = contextvars.ContextVar("VARIABLE", default=2.0)
OPEN_FACTORS: dict[str, tuple[Callable[[], Case], str]] = {
    "a_number_of_the_decimal_system": (lambda: case(lambda m, x, loss: float(decimal.Decimal(1) / 3)), "decimal"),
    "the_time": (lambda: case(lambda m, x, loss: datetime.datetime.now().year / 1000), "datetime.now"),
    "settings_of_numpy": (lambda: case(lambda m, x, loss: 1.0 + len(np.geterr())), "geterr"),
    "classes_derived_from_one": (lambda: case(lambda m, x, loss: 1.0 + len(Thing.__subclasses__())), "__subclasses__"),
    "a_context_variable": (lambda: case(lambda m, x, loss: VARIABLE.get()), "ContextVar"),
    "a_weak_reference": (lambda: case(lambda m, x, loss: m.ref().by, ref=weakref.ref(Thing)), "weakref"),
    "a_function_that_only_c_calls": (
        lambda: case(lambda m, x, loss: next(iter(m.draw, 2.0)), draw=random.Random(3).random),
        "random.Random",
    ),
    "an_iterator": (lambda: case(lambda m, x, loss: next(m.i), i=itertools.cycle([1.0, 2.0])), "cycle"),
    "an_environment": (lambda: case(lambda m, x, loss: float(os.environ.get("NO_SUCH", "1"))), "calls"),
}
OPEN |= OPEN_FACTORS


@is_open("__del__")
def a_finalizer() -> Case:
    class Freed:
        def __init__(self, count: list[int]) -> None:
            self.count = count

        def __del__(self) -> None:
            self.count.append(1)

    def factor(m: Any, x: Any, loss: Any) -> Any:
        m.kept = Freed(m.count)
        return 1.0 + len(m.count) % 3

    module = Step(factor, count=[])
    module.kept = Freed(module.count)
    return Case(module)


@is_open("Lightning|optimizers")
def the_rate_of_the_optimizer() -> Case:
    return case(lambda m, x, loss: 1.0 + m.optimizers().param_groups[0]["lr"])


# Steps that were wrong once they were captured


class Caught(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name, value in {"loss": loss, "note": "text"}.items():
            try:
                self.log(name, value)
            except ValueError:
                self.caught += 1
        return loss


class TakesApart(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch["x"]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("n", float(len(batch["x"])), on_step=False, on_epoch=True)
        if self.empties:
            batch.clear()
        else:
            batch["x"] = batch["x"].reshape(-1)[:2]
        return loss


class BesideLoss(Step):
    def __init__(self, kind: str) -> None:
        super().__init__(kind=kind, seen=[])
        self.positive = torchmetrics.MeanMetric(nan_strategy="ignore")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.net(batch[0])
        loss = scores.square().mean()
        positive = (scores * batch[1]).sum() / batch[1].sum()
        if self.kind == "metric":
            self.positive.update(positive)
        if self.kind == "kept":
            self.seen.append(positive.detach())
        if self.kind == "logged":
            self.log("positive", positive)
        return {"loss": loss, "positive": positive.detach()} if self.kind == "returned" else loss


class TinyGradients(Step):
    def __init__(self, kind: str) -> None:
        super().__init__(kind=kind)
        self.norm = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        self.attention, self.head = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(2, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = torch.tensor([0, 1, 2, 0])
        if self.kind == "expanded":
            return F.cross_entropy(self.net(batch).expand(-1, 3), y)
        if self.kind == "norm":
            return F.cross_entropy(self.norm(batch), y)
        query = batch[:, None] + batch[None]
        return F.cross_entropy(self.head(self.attention(query, query, query)[0].mean(1)), y)


class SkipsBatches(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, matrix = batch
        try:
            root = torch.linalg.cholesky(matrix)
        except torch.linalg.LinAlgError:
            self.skipped += 1
            return None
        return self.net(x @ root).square().mean()


def checked(how: str) -> Factor:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        if how == "assert":
            assert torch.isfinite(loss), "not finite"
        else:
            torch._check(bool(torch.isfinite(loss)), lambda: "not finite")
        return 1.0

    return factor


def projected() -> Case:
    projection = functools.lru_cache(lambda n: torch.randn(n, n))
    return case(lambda m, x, loss: (x @ projection(2)).sum() + 9, lambda m: projection.cache_clear())


def generated() -> Case:
    def values(x: Any) -> Any:
        factor = yield x * 1
        yield x * (factor or 2)

    def factor(m: Any, x: Any, loss: Any) -> Any:
        sequence = values(x.sum())
        return next(sequence) + sequence.send(3) + 20

    return case(factor)


def hooked() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (m.seen.append(1), t)[1], lambda t: t):
            return m.net(x).square().mean()

    return case(factor, seen=[])


def best_of_permutations() -> Case:
    def factor(m: Any, x: Any, loss: Any) -> Any:
        permutations = x.new_tensor([[0, 1], [1, 0]], dtype=torch.long)
        order = torch.stack([permutations[index] for index in x.min(dim=1)[1]], dim=0)
        return torch.gather(x, 1, order)[:, 0].sum() + 9

    return case(factor)


def rare(i: int) -> bool:
    return i in (2, CHANGED, CHANGED + 5)


def nan_batches() -> list[Any]:
    return [x * (float("nan") if i == CHANGED else 1.0) for i, x in enumerate(batches())]


REPROS: dict[str, Callable[[], Case]] = {
    **{
        how: functools.partial(lambda how: Case(Step(checked(how)), batches=nan_batches()), how)
        for how in ["assert", "check"]
    },
    "target": lambda: of_batches(
        lambda m, b, loss: F.binary_cross_entropy(torch.sigmoid(m.net(b[0])), b[1]),
        lambda i, x: (x, torch.full((4, 1), 2.0 if i == CHANGED else 1.0)),
    ),
    "size": lambda: case(lambda m, x, loss: 1 + 0.01 * torch.Tensor(x.size()).zero_().numel()),
    "generator": generated,
    "saved tensors": hooked,
    "caught log": lambda: Case(Caught(caught=0)),
    "reshaped batch": lambda: Case(TakesApart(empties=False), batches=[{"x": x} for x in batches()]),
    "emptied batch": lambda: Case(TakesApart(empties=True), batches=[{"x": x} for x in batches()]),
    "cache": projected,
    "permutations": best_of_permutations,
    "skipped batches": lambda: Case(
        SkipsBatches(skipped=0), batches=[(x, torch.eye(2) * (-1 if rare(i) else 1)) for i, x in enumerate(batches())]
    ),
}
for kind in ("metric", "kept", "returned", "logged"):
    REPROS[f"nan {kind}"] = lambda kind=kind: Case(
        BesideLoss(kind), batches=[(x, torch.full((4, 1), float(not rare(i)))) for i, x in enumerate(batches())]
    )
for kind in ("expanded", "norm", "attention"):
    REPROS[f"tiny gradients {kind}"] = lambda kind=kind: Case(TinyGradients(kind))


@pytest.mark.parametrize("name", CLOSED)
def test_what_is_closed_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compared(CLOSED[name], monkeypatch)
    assert outcome.replayed > 0, outcome.notes


@pytest.mark.parametrize("name", OPEN)
def test_what_is_open_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, why = OPEN[name]
    outcome = compared(make, monkeypatch)
    assert outcome.replayed == 0
    assert "not recorded" in outcome.notes
    assert any(part in outcome.notes for part in why.split("|")), outcome.notes


@pytest.mark.parametrize("name", REPROS)
def test_steps_that_were_wrong_once_they_were_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compared(REPROS[name], monkeypatch)
    assert outcome.replayed > 0 or "not recorded" in outcome.notes


@pytest.mark.parametrize("name", [*test_kinds.SEEN, *test_kinds.OPEN])
def test_kinds_in_a_fit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds of :mod:`test_kinds`, and so those that dynamo gets wrong."""

    def make() -> Case:
        kinds = test_kinds.restored()
        next(kinds)
        with patch.object(test_kinds, "Step", OfKind):
            if name in test_kinds.OPEN:
                module, change = test_kinds.OPEN[name][0](), lambda m: None
            else:
                module, change = test_kinds.SEEN[name]()
        return Case(module, change, lambda: contextlib.closing(_Ends(kinds)))

    outcome = compared(make, monkeypatch)
    is_over = outcome.values["error"] != repr("")  # before it was told twice
    assert outcome.replayed > 0 or "not recorded" in outcome.notes or is_over


class OfKind(Step):
    def __init__(self, step: Any, **kept: Any) -> None:
        super().__init__(lambda m, x, loss: step(m), **kept)
        self.net = nn.Linear(2, 1)


class _Ends:
    """Runs the rest of a generator when it is closed."""

    def __init__(self, rest: Iterator[None]) -> None:
        self.rest = rest

    def close(self) -> None:
        for _ in self.rest:
            pass
