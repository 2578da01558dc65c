"""Each function of dynamo that is replaced is there, and would compute otherwise than Python: or the entry can go.

A case calls a function while something changes, and returns what it found. Dynamo alone finds something else.
"""

import abc
import collections
import contextlib
import functools
import itertools
import math
import os
import random
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from lightning_utilities.core.imports import RequirementCache

from lightning_ort.compat import dynamo, dynamo_left_out, dynamo_repairs
from lightning_ort.compat.dynamo_left_out import LEFT_OUT, Unsound
from lightning_ort.compat.dynamo_repairs import REPAIRS

Case = Callable[[Callable[..., Any]], Any]
CASES: dict[Any, list[Case]] = collections.defaultdict(list)  # what makes a replacement -> what needs it
X = torch.ones(2)


def case(*makers: Any) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        for make in makers:
            CASES[make].append(function)
        return function

    return add


def calls(function: Callable[..., Any], arguments: list[Any], between: Callable[[int], Any] = lambda i: None) -> Any:
    """Results of calls, with what happens before each."""
    found = []
    for i, argument in enumerate(arguments):
        between(i)
        try:
            found.append(function(X, argument))
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {error}")
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in found]


def objects() -> SimpleNamespace:
    class Thing:
        def gain(self) -> float:
            return 2.0

    class Derived(Thing):
        pass

    return SimpleNamespace(Thing=Thing, Derived=Derived, one=Thing(), other=Thing(), derived=Derived())


@case(dynamo_repairs._build)
def another_object(compiled: Callable[..., Any]) -> Any:
    m = objects()
    step = compiled(lambda x, kept: x * (3 if kept[0] is kept[1] else 1))
    return calls(step, [[m.one, m.other], [m.one, m.one], [m.other, m.one]])


@case(dynamo_repairs._build)
def another_dictionary(compiled: Callable[..., Any]) -> Any:
    one, other = ({"a": 1.0} for _ in range(2))
    step = compiled(lambda x, kept: x * (3 if kept[0] is kept[1] else 1) * len([*kept[0].items(), *kept[1].items()]))
    return calls(step, [[one, other], [one, one], [other, one]])


@case(dynamo_repairs._build)
def another_order(compiled: Callable[..., Any]) -> Any:
    ordered = collections.OrderedDict(x=1, y=2, z=3)
    step = compiled(lambda x, o: x * next(iter(o.values())))
    return calls(step, [ordered] * 4, lambda i: ordered.move_to_end("xyz"[i % 3]))


@case(dynamo_repairs._build, dynamo_repairs._copy_deque)
def full_deque(compiled: Callable[..., Any]) -> Any:
    window = collections.deque([1, 2, 3], maxlen=3)

    def step(x: Any, w: Any) -> Any:
        copied = w.copy()
        copied.append(4)
        w.append(5)
        return x * (sum(w) + 10 * len(copied))

    return calls(compiled(step), [window] * 3), list(window), window.maxlen


@case(dynamo_repairs._build)
def other_bases(compiled: Callable[..., Any]) -> Any:
    m = objects()
    other = type("Other", (m.Thing,), {"gain": lambda self: 5.0})
    replace = lambda i: i == 2 and setattr(m.Derived, "__bases__", (other,))  # noqa: E731
    tests = (lambda one: isinstance(one, other), lambda one: issubclass(m.Derived, other), lambda _: m.Derived().gain())
    found = []
    for test in tests:
        m.Derived.__bases__ = (m.Thing,)
        found.append(calls(compiled(lambda x, one, test=test: x * test(one)), [m.derived] * 4, replace))
    return found


@case(dynamo_repairs._bind)
def another_method(compiled: Callable[..., Any]) -> Any:
    m = objects()
    replace = lambda i: i == 2 and setattr(m.Thing, "gain", lambda self: 5.0)  # noqa: E731
    return calls(compiled(lambda x, thing: x * thing.gain()), [m.one] * 4, replace)


@case(dynamo_repairs._make)
def another_method_of_what_is_made(compiled: Callable[..., Any]) -> Any:
    def found(kind_of: str, name: str, before: Any, after: Any, step: Any) -> Any:
        m = objects()
        setattr(m.Thing, name, before)

        def replace(i: int) -> None:
            if i == 2:
                setattr(getattr(m, kind_of), name, after)

        return calls(compiled(step), [getattr(m, kind_of)] * 4, replace)

    two, five = lambda self: 2.0, lambda self: 5.0
    names = [
        ("gain", two, five, lambda x, kind: x * kind().gain()),
        ("__call__", two, five, lambda x, kind: x * kind()()),
        ("more", property(two), property(five), lambda x, kind: x * kind().more),
    ]
    return [found(kind, *row) for kind in ("Thing", "Derived") for row in names]


@case(dynamo_repairs._find_global)
def another_environment(compiled: Callable[..., Any]) -> Any:
    name, found = "SETTING_OF_A_TEST", []
    for before in ({}, {name: "2"}):
        with patch.dict(os.environ, before):
            step = compiled(lambda x, _: x * float(os.getenv(name, "1")))
            found.append(calls(step, [0] * 4, lambda i: i == 2 and os.environ.update({name: "5"})))
    return found


@case(dynamo_repairs._find)
def an_override(compiled: Callable[..., Any]) -> Any:
    m = objects()
    replace = lambda i: i == 2 and setattr(m.Derived, "gain", lambda self: 5.0)  # noqa: E731
    return calls(compiled(lambda x, thing: x * thing.gain()), [m.derived] * 4, replace)


@case(dynamo_repairs._load_builtin)
def a_hidden_builtin(compiled: Callable[..., Any]) -> Any:
    def hide(i: int) -> None:
        globals().pop("abs", None)
        if i == 2:
            globals()["abs"] = lambda value: 7

    try:
        return calls(compiled(lambda x, number: x * abs(number)), [-2] * 4, hide)
    finally:
        globals().pop("abs", None)


@case(dynamo_repairs._import)
def another_module(compiled: Callable[..., Any]) -> Any:
    def replace(i: int) -> None:
        if i in (0, 2):
            sys.modules["settings_of_a_test"] = module = types.ModuleType("settings_of_a_test")
            module.factor = 1.0 + i  # type: ignore[attr-defined]

    def step(x: Any, _: Any) -> Any:
        import settings_of_a_test  # type: ignore[import-not-found]

        return x * settings_of_a_test.factor

    return calls(compiled(step), [0] * 4, replace)


@case(dynamo_repairs._is_of_class)
def a_registered_class(compiled: Callable[..., Any]) -> Any:
    m, kind = objects(), abc.ABCMeta("Abstract", (), {})
    register = lambda i: i == 2 and kind.register(m.Thing)  # noqa: E731
    is_one = calls(compiled(lambda x, thing: x * (3 if isinstance(thing, kind) else 1)), [m.one] * 4, register)
    other, of = objects(), abc.ABCMeta("Other", (), {})
    register = lambda i: i == 2 and of.register(other.Thing)  # noqa: E731
    step = compiled(lambda x, thing: x * (3 if issubclass(type(thing), of) else 1))
    return is_one, calls(step, [other.one] * 4, register)


@case(dynamo_repairs._equals)
def the_sign_of_zero(compiled: Callable[..., Any]) -> Any:
    settings = SimpleNamespace(zero=0.0)
    change = lambda i: setattr(settings, "zero", -0.0 if i > 1 else 0.0)  # noqa: E731
    return calls(compiled(lambda x, s: x * math.copysign(2.0, s.zero)), [settings] * 4, change)


@case(dynamo_repairs._is_literal)
def a_list_in_a_tuple(compiled: Callable[..., Any]) -> Any:
    class Holder(torch.nn.Module):
        sizes: Any = ([1, 2],)

        def forward(self, x: Any, _: Any) -> Any:
            return x * len(self.sizes[0])

    module = Holder()
    module.sizes = ([1, 2],)
    return calls(compiled(module), [0] * 4, lambda i: i > 1 and module.sizes[0].append(i))


@case(dynamo_repairs._write_all)
def the_order_of_items(compiled: Callable[..., Any]) -> Any:
    ordered = collections.OrderedDict([("x", 1), ("y", 2)])

    def step(x: Any, d: Any) -> Any:
        d.move_to_end("x")
        return x * 2

    numbers = {1, 2}

    def other(x: Any, s: Any) -> Any:
        s -= {2}
        return x * len(s)

    return calls(compiled(step), [ordered]), list(ordered), calls(compiled(other), [numbers]), sorted(numbers)


@case(dynamo_repairs._call_numpy)
def a_number_of_numpy(compiled: Callable[..., Any]) -> Any:
    return calls(compiled(lambda x, n: x * np.sqrt(n), fullgraph=True), [64])  # otherwise a graph ends there


@case(dynamo_repairs._is_constant)
def an_array_that_changes(compiled: Callable[..., Any]) -> Any:
    array = np.array(1.0)
    change = lambda i: array.__setitem__((), float(i))  # noqa: E731
    return calls(compiled(lambda x, a: x * math.sqrt(a)), [array] * 4, change)


@case(dynamo_repairs._keep_scalar)
def what_numpy_makes_of_a_number(compiled: Callable[..., Any]) -> Any:
    step = compiled(lambda x, n: (x * 2, 2 / (1 + n) - 1))
    return [type(step(X, np.exp(i / 4))[1]).__name__ for i in range(3)]


@case(dynamo_repairs._keep_groups)
def a_rate_that_is_set(compiled: Callable[..., Any]) -> Any:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])

    def step(x: Any, i: Any) -> Any:
        optimizer.param_groups[0]["lr"] = i
        return x * i

    return calls(compiled(step), [1, 2]), str(optimizer.state_dict()["param_groups"])


@case(dynamo_left_out._call_builtin)
def a_number_from_an_array(compiled: Callable[..., Any]) -> Any:
    array = np.array(1.0)
    change = lambda i: array.__setitem__((), float(i))  # noqa: E731
    return calls(compiled(lambda x, a: x * float(a)), [array] * 4, change)


@case(dynamo_left_out._run)
def local_variables(compiled: Callable[..., Any]) -> Any:
    def step(x: Any, number: Any) -> Any:
        factor = number + 1  # noqa: F841
        torch._dynamo.graph_break()
        return x * eval("factor")

    return calls(compiled(step), [1, 2])


@case(dynamo_left_out._call_cached)
def a_cache(compiled: Callable[..., Any]) -> Any:
    @functools.cache
    def made(n: int) -> list[int]:
        return []

    def step(x: Any, n: Any) -> Any:
        made(n).append(1)
        return x * len(made(n))

    return calls(compiled(step), [3] * 3)


@case(dynamo_left_out._check)
def a_check(compiled: Callable[..., Any]) -> Any:
    def step(x: Any, number: Any) -> Any:
        torch._check_tensor_all(number < 3, lambda: "too large")
        return x

    return calls(compiled(step), [torch.tensor(1), torch.tensor(5)])


def root(x: Any, sign: Any) -> Any:
    return torch.linalg.cholesky(torch.eye(2) * sign + 0 * x).sum()


@case(dynamo_left_out._create_proxy)
def a_caught_error(compiled: Callable[..., Any]) -> Any:
    def step(x: Any, sign: Any) -> Any:
        try:
            return root(x, sign)
        except RuntimeError:
            return x * 7

    return calls(compiled(step), [torch.tensor(1.0), torch.tensor(-1.0)])


@case(dynamo_left_out._enter)
def a_suppressed_error(compiled: Callable[..., Any]) -> Any:
    def step(x: Any, sign: Any) -> Any:
        found = x * 7
        with contextlib.suppress(Exception):
            found = root(x, sign)
        return found

    return calls(compiled(step), [torch.tensor(1.0), torch.tensor(-1.0)])


@case(dynamo_left_out._store)
def a_written_class(compiled: Callable[..., Any]) -> Any:
    m = objects()
    m.Thing.kind = 1

    def step(x: Any, thing: Any) -> Any:
        type(thing).kind += 1
        return x * thing.kind

    return calls(compiled(step), [m.one] * 3)


@case(dynamo_left_out._construct)
def a_size(compiled: Callable[..., Any]) -> Any:
    return calls(compiled(lambda x, y: torch.Tensor(y.size()).numel()), [torch.ones(3, 4)])


@case(dynamo_left_out._wrap)
def functions_of_a_metaclass(compiled: Callable[..., Any]) -> Any:
    class Meta(type):
        number = 1.0

        def __bool__(cls) -> bool:
            return cls.number > 1

        def __instancecheck__(cls, instance: Any) -> bool:
            return cls.number > 1

        def __getitem__(cls, key: str) -> float:
            return cls.number

    Thing: Any = Meta("Thing", (), {})
    steps: list[Any] = [
        lambda x, _: x * (3 if Thing else 1),
        lambda x, one: x * (3 if isinstance(one, Thing) else 1),
        lambda x, _: x * Thing["number"],
        lambda x, _: x * Thing.number,
    ]
    change = lambda i: setattr(Meta, "number", 1.0 + (i > 1))  # noqa: E731
    return [calls(compiled(step), [SimpleNamespace()] * 4, change) for step in steps]


@case(dynamo_left_out._compare)
def bound_methods(compiled: Callable[..., Any]) -> Any:
    m = objects()
    m.one.kept = m.one.gain
    return calls(compiled(lambda x, thing: x * (3 if thing.kept == thing.gain else 1)), [m.one])


@case(dynamo_left_out._methods("popitem"))
def order_of_items_that_are_taken(compiled: Callable[..., Any]) -> Any:
    def step(x: Any, d: Any) -> Any:
        return x * d.popitem()[1]

    return calls(compiled(step), [{"a": 2, "b": 3}, {"b": 3, "a": 2}])


@case(dynamo_left_out._methods("pop"))
def an_item_of_a_set(compiled: Callable[..., Any]) -> Any:
    first, second = {8, 16, 0}, {16, 8, 0}  # equal, with an order of their own
    return calls(compiled(lambda x, s: x * s.pop()), [{8, 0}, {0, 8}]), first.pop(), second.pop()


@case(dynamo_left_out._methods())
def a_source_of_random_numbers(compiled: Callable[..., Any]) -> Any:
    source = random.Random(3)
    return calls(compiled(lambda x, r: x * r.random()), [source] * 3), source.random()


@case(dynamo_left_out._reconstruct_generator)
def a_generator(compiled: Callable[..., Any]) -> Any:
    def values(x: Any) -> Any:
        yield x * 1
        yield x * 2

    def step(x: Any, _: Any) -> Any:
        sequence = values(x)
        next(sequence)
        torch._dynamo.graph_break()
        return isinstance(sequence, types.GeneratorType)

    return calls(compiled(step), [0])


@case(dynamo_left_out._draw)
def a_random_number(compiled: Callable[..., Any]) -> Any:
    step = compiled(lambda x, low: x.sum() * random.uniform(low, 1))
    return str([(random.seed(1), step(X, 0.5))[1].dtype for _ in range(2)])


@case(dynamo_repairs._miss)
def an_attribute_that_was_not_there(compiled: Callable[..., Any]) -> Any:
    class Fallback:
        def __getattr__(self, name: str) -> float:
            return 1.0

    def step(x: Any, thing: Any) -> Any:
        try:
            return x * thing.factor
        except AttributeError:
            return x * 2

    found = []
    for thing in (SimpleNamespace(), Fallback(), torch.nn.Linear(1, 1)):
        found.append(
            calls(compiled(step), [thing] * 4, lambda i, thing=thing: i == 2 and setattr(thing, "factor", 3.0))
        )
    return found


@case(dynamo_repairs._miss_key)
def a_key_that_was_not_there(compiled: Callable[..., Any]) -> Any:
    def step(x: Any, d: Any) -> Any:
        try:
            return x * d["factor"]
        except KeyError:
            return x * 2

    values: dict[str, float] = {}
    chain = collections.ChainMap({}, {"factor": 4.0})
    written = calls(compiled(step), [values] * 4, lambda i: i == 2 and values.update(factor=3.0))
    return written, calls(compiled(step), [chain] * 4, lambda i: i == 2 and chain.update(factor=3.0))


NUMBER = 0.0


def number() -> float:
    return NUMBER


@case(dynamo_left_out._store)
def a_written_module(compiled: Callable[..., Any]) -> Any:
    def step(x: Any, i: Any) -> Any:
        sys.modules[__name__].NUMBER = i + 1  # type: ignore[attr-defined]
        return x * number()

    return calls(compiled(step), [0, 1, 2])


@case(dynamo_left_out._mutate, dynamo_left_out._run)
def written_globals(compiled: Callable[..., Any]) -> Any:
    def by_module(x: Any, i: Any) -> Any:
        vars(sys.modules[__name__])["NUMBER"] = i + 1
        return x * number()

    def by_function(x: Any, i: Any) -> Any:
        globals()["NUMBER"] = i + 1
        return x * number()

    return [calls(compiled(step), [0, 1, 2]) for step in (by_module, by_function)]


# of ours, or not wrong by itself; `tests/strategies/test_gradient_features.py` has checkpoints, and nested tensors,
# with which dynamo alone ends the process
WITHOUT_CASE = {
    dynamo_repairs._match_tensor,
    *(dynamo_left_out._bind, dynamo_left_out._compile_subgraph),
    *(dynamo_left_out._hash, dynamo_left_out._checkpoint),
}


def named(make: Any) -> str:
    """Each that is made by a function is one of its own."""
    return f"{make.__qualname__} {make.__closure__[0].cell_contents}" if "<locals>" in make.__qualname__ else str(make)


ENTRIES = {f"{entry.name} {named(entry.make)}": entry for entry in [*REPAIRS, *LEFT_OUT]}
# what the oldest torch that is captured needs, and a newer one does right
MENDED = {an_override, the_sign_of_zero, a_rate_that_is_set, a_size, a_source_of_random_numbers}
IS_MENDED = bool(RequirementCache("torch>=2.15"))


def test_what_is_replaced_is_there() -> None:
    gone = [entry.name for entry in ENTRIES.values() if not hasattr(entry.owner, entry.name)]
    assert gone == ["modified"] * IS_MENDED


def test_each_replacement_has_a_case() -> None:
    cases = {named(make) for make in [*CASES, *WITHOUT_CASE]}
    assert cases == {named(entry.make) for entry in ENTRIES.values()}


@pytest.mark.parametrize("function", dict.fromkeys(itertools.chain(*CASES.values())), ids=lambda one: one.__name__)
def test_dynamo_alone_computes_otherwise(function: Case) -> None:
    def compiled(step: Callable[..., Any], **kwargs: Any) -> Any:
        return torch.compile(step, backend="eager", dynamic=False, **kwargs)

    def found(repair: bool) -> str:
        torch._dynamo.reset()
        with dynamo.settings_for_steps((), True), dynamo_repairs.repaired() if repair else contextlib.nullcontext():
            try:
                return str(function(compiled))
            except (Unsound, NameError, torch._dynamo.exc.Unsupported) as error:
                return type(error).__name__

    eager = str(function(lambda step, **kwargs: step))
    if function not in MENDED or not IS_MENDED:
        assert found(False) != eager, "PyTorch has mended it: remove what replaces its function"
    assert found(True) in (eager, "Unsound")
