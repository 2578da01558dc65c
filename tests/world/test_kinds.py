"""What once made a compiled or copied step differ from Python: each kind is open, or the list sees the change."""

import abc
import collections
import contextlib
import dataclasses
import functools
import math
import operator
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from world_steps import observed, reasons

X = torch.ones(2)
NUMBER = 0.0
HOOK: list[Callable[[], Any]] = []


class Thing:
    def gain(self) -> float:
        return 2.0


class Derived(Thing):
    pass


@dataclasses.dataclass
class Config:
    first: float = 1.0
    second: float = 2.0


class Step(nn.Module):
    """A module whose training step is a case; the case may keep things on it."""

    def __init__(self, step: Callable[..., Any], **kept: Any) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.factor_of = step
        vars(self).update(kept)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).sum() * self.factor_of(self)


# The world is closed, and the list sees what changes

Change = Callable[[Any], Any]
SEEN: dict[str, Callable[[], tuple[nn.Module, Change]]] = {}
OPEN: dict[str, tuple[Callable[[], nn.Module], str]] = {}


def seen(make: Callable[[], tuple[nn.Module, Change]]) -> Any:
    SEEN[make.__name__] = make
    return make


def is_open(why: str) -> Any:
    def add(make: Callable[[], nn.Module]) -> Any:
        OPEN[make.__name__] = (make, why)
        return make

    return add


def restored() -> Iterator[None]:
    """What the cases change is put back afterwards."""
    kept, names = {name: value for name, value in vars(Thing).items()}, set(globals())
    yield
    while HOOK:
        HOOK.pop()()
    for kind in (Thing, Derived):
        for name in set(vars(kind)) - ({*kept} if kind is Thing else set()) - {"__module__", "__doc__"}:
            delattr(kind, name)
    Thing.gain = kept["gain"]  # type: ignore[method-assign]
    Derived.__bases__ = (Thing,)
    globals()["NUMBER"] = 0.0
    for name in set(globals()) - names:
        del globals()[name]


_restored = pytest.fixture(autouse=True)(restored)


@seen
def another_object() -> Any:
    m = Step(lambda m: 3 if m.one is m.other else 1, one=Thing(), other=Thing())
    return m, lambda m: setattr(m, "other", m.one)


@seen
def other_bases() -> Any:
    other = type("Other", (Thing,), {"gain": lambda self: 5.0})
    return Step(lambda m: m.one.gain(), one=Derived()), lambda m: setattr(Derived, "__bases__", (other,))


@seen
def another_method() -> Any:
    return Step(lambda m: m.one.gain(), one=Thing()), lambda m: setattr(Thing, "gain", lambda self: 5.0)


@seen
def another_method_of_what_is_made() -> Any:
    return Step(lambda m: m.kind().gain(), kind=Thing), lambda m: setattr(Thing, "gain", lambda self: 5.0)


@seen
def a_special_method_of_what_is_made() -> Any:
    Thing.__call__ = lambda self: 2.0  # type: ignore[attr-defined]
    return Step(lambda m: m.kind()(), kind=Derived), lambda m: setattr(Derived, "__call__", lambda self: 5.0)


@seen
def a_property_of_what_is_made() -> Any:
    Thing.more = property(lambda self: 2.0)  # type: ignore[attr-defined]
    return Step(lambda m: m.kind().more, kind=Derived), lambda m: setattr(Derived, "more", property(lambda self: 5.0))


@seen
def an_override() -> Any:
    return Step(lambda m: m.one.gain(), one=Derived()), lambda m: setattr(Derived, "gain", lambda self: 5.0)


@seen
def another_method_of_an_object() -> Any:
    return Step(lambda m: m.one.gain(), one=Derived()), lambda m: setattr(m.one, "gain", lambda: 5.0)


@seen
def a_hidden_builtin() -> Any:
    return Step(lambda m: abs(-2)), lambda m: globals().__setitem__("abs", lambda value: 7)


@seen
def a_replaced_builtin() -> Any:
    def change(m: Any) -> None:
        import builtins

        real = builtins.divmod
        builtins.divmod = lambda a, b: real(a, b)
        HOOK.append(lambda: setattr(builtins, "divmod", real))

    return Step(lambda m: divmod(7, 3)[0]), change


@seen
def another_module() -> Any:
    sys.modules["settings_of_a_test"] = types.ModuleType("settings_of_a_test")
    sys.modules["settings_of_a_test"].factor = 1.0  # type: ignore[attr-defined]

    def factor(m: Any) -> Any:
        import settings_of_a_test  # type: ignore[import-not-found]

        return settings_of_a_test.factor

    def change(m: Any) -> None:
        sys.modules["settings_of_a_test"] = types.ModuleType("settings_of_a_test")

    return Step(factor), change


@seen
def a_number_of_another_module() -> Any:
    another_module()

    def factor(m: Any) -> Any:
        from settings_of_a_test import factor

        return factor

    return Step(factor), lambda m: setattr(sys.modules["settings_of_a_test"], "factor", 2.0)


@seen
def a_registered_class() -> Any:
    kind = abc.ABCMeta("Abstract", (), {})
    m = Step(lambda m: 3 if isinstance(m.one, m.kind) else 1, one=Thing(), kind=kind)
    return m, lambda m: kind.register(Thing)


@seen
def the_sign_of_zero() -> Any:
    return Step(lambda m: math.copysign(2.0, m.zero), zero=0.0), lambda m: setattr(m, "zero", -0.0)


@seen
def the_sign_of_zero_of_an_object() -> Any:
    m = Step(lambda m: math.copysign(2.0, m.settings.zero), settings=SimpleNamespace(zero=0.0))
    return m, lambda m: setattr(m.settings, "zero", -0.0)


@seen
def a_number_of_another_type() -> Any:
    return Step(lambda m: torch.tensor(m.n).sum(), n=1), lambda m: setattr(m, "n", True)


@seen
def a_list_in_a_tuple() -> Any:
    return Step(lambda m: len(m.sizes[0]), sizes=([1, 2],)), lambda m: m.sizes[0].append(3)


@seen
def the_order_of_items() -> Any:
    ordered = collections.OrderedDict([("x", 1.0), ("y", 2.0)])
    return Step(lambda m: next(iter(m.d.values())), d=ordered), lambda m: m.d.move_to_end("x")


@seen
def an_attribute_that_was_not_there() -> Any:
    return Step(lambda m: m.thing.factor if hasattr(m.thing, "factor") else 2, thing=Thing()), lambda m: setattr(
        m.thing, "factor", 3.0
    )


@seen
def a_key_that_was_not_there() -> Any:
    def factor(m: Any) -> Any:
        try:
            return m.values["factor"]
        except KeyError:
            return 2

    return Step(factor, values={}), lambda m: m.values.update(factor=3.0)


@seen
def a_key_of_a_chain() -> Any:
    chain = collections.ChainMap({}, {"factor": 4.0})
    return Step(lambda m: m.values["factor"], values=chain), lambda m: m.values.maps[0].update(factor=3.0)


@seen
def a_global_number() -> Any:
    return Step(lambda m: NUMBER), lambda m: globals().__setitem__("NUMBER", 1.0)


@seen
def bound_methods() -> Any:
    m = Step(lambda m: 3 if m.one.kept == m.one.gain else 1, one=Thing())
    m.one.kept = m.one.gain
    return m, lambda m: setattr(m.one, "kept", Thing().gain)


@seen
def a_class_attribute() -> Any:
    Thing.kind = 1  # type: ignore[attr-defined]
    return Step(lambda m: type(m.one).kind, one=Thing()), lambda m: setattr(Thing, "kind", 2)


@seen
def a_default() -> Any:
    def factor(m: Any, by: float = 2.0) -> Any:
        return by

    return Step(factor), lambda m: setattr(factor, "__defaults__", (3.0,))


@seen
def the_code_of_a_function() -> Any:
    def factor(m: Any) -> Any:
        return 2.0

    return Step(factor), lambda m: setattr(factor, "__code__", (lambda m: 3.0).__code__)


@seen
def a_variable_of_a_closure() -> Any:
    by = 2.0

    def change(m: Any) -> None:
        nonlocal by
        by = 3.0

    return Step(lambda m: by), change


@seen
def an_attribute_of_a_function() -> Any:
    def factor(m: Any) -> Any:
        return factor.by  # type: ignore[attr-defined]

    factor.by = 2.0  # type: ignore[attr-defined]
    return Step(factor), lambda m: setattr(factor, "by", 3.0)


@seen
def an_attribute_with_a_name_that_is_computed() -> Any:
    m = Step(lambda m: getattr(m, "fac" + m.end), end="tor", factor=2.0)
    return m, lambda m: setattr(m, "factor", 3.0)


@seen
def an_item_of_a_nested_dict() -> Any:
    return Step(lambda m: m.config["a"][0]["b"], config={"a": [{"b": 2.0}]}), lambda m: m.config["a"][0].update(b=3.0)


@seen
def an_array_that_changes() -> Any:
    return Step(lambda m: math.sqrt(m.a), a=np.array(1.0)), lambda m: m.a.__setitem__((), 2.0)


@seen
def a_name_that_the_standard_library_reads() -> Any:
    def factor(m: Any) -> Any:
        return sum(dataclasses.asdict(m.config).values())

    return Step(factor, config=Config()), lambda m: setattr(m.config, "second", 3.0)


@seen
def a_name_in_an_argument() -> Any:
    def look(thing: Any, name: str) -> Any:
        return getattr(thing, name)

    thing = Thing()
    thing.first = 2.0  # type: ignore[attr-defined]
    names = ["".join(("fi", "rst"))]
    return Step(lambda m: look(m.thing, m.names[0]), thing=thing, names=names), lambda m: setattr(m.thing, "first", 3.0)


@seen
def a_pattern() -> Any:
    class Point:
        __match_args__ = ("far",)

    point = Point()
    point.far = 2.0  # type: ignore[attr-defined]

    def factor(m: Any) -> Any:
        match m.point:
            case Point(by):
                return by

    return Step(factor, point=point), lambda m: setattr(m.point, "far", 3.0)


@seen
def a_slot() -> Any:
    class Slotted:
        __slots__ = ("by",)

    thing = Slotted()
    thing.by = 2.0
    return Step(lambda m: m.thing.by, thing=thing), lambda m: setattr(m.thing, "by", 3.0)


@seen
def a_view_of_a_mapping() -> Any:
    numbers = {"by": 2.0}
    view = types.MappingProxyType(numbers)
    return Step(lambda m: m.view["by"], view=view), lambda m: numbers.update(by=3.0)


class Compared:
    def __init__(self, by: float) -> None:
        self.by = by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compared) and self.by == other.by

    __hash__ = None  # type: ignore[assignment]


@seen
def an_object_that_is_not_compared() -> Any:
    return Step(lambda m: m.one.by, one=Compared(2.0)), lambda m: setattr(m.one, "by", 3.0)


class Changing(property):
    """Has another function each time that somebody looks."""

    @property
    def fget(self) -> Any:
        return lambda thing: 1.0


@seen
def an_object_with_a_property_that_is_not_read() -> Any:
    Thing.more = Changing(lambda self: 2.0)  # type: ignore[attr-defined]
    return Step(lambda m: m.one.gain() * m.one.by, one=_thing(by=2.0)), lambda m: setattr(m.one, "by", 3.0)


def _thing(**kept: Any) -> Thing:
    thing = Thing()
    vars(thing).update(kept)
    return thing


def _importable() -> Any:
    module: Any = types.ModuleType("lent")
    module.Lent = type("Lent", (), {"by": 2.0, "__module__": "lent"})
    sys.modules["lent"] = module
    HOOK.append(lambda: sys.modules.pop("lent"))
    return module.Lent


def _made_of_what_is_imported(m: Any) -> Any:
    from lent import Lent

    one = Lent()
    one.by = one.by * 2
    return one.by


@seen
def a_class_that_is_imported_in_the_step() -> Any:
    kind = _importable()
    return Step(_made_of_what_is_imported), lambda m: setattr(kind, "by", 3.0)


@seen
def the_class_of_an_object() -> Any:
    return Step(lambda m: m.one.gain(), one=Thing()), lambda m: setattr(m.one, "__class__", Derived)


@seen
def the_forward_of_a_layer() -> Any:
    return Step(lambda m: 1), lambda m: setattr(m.net, "forward", lambda x: x)


@seen
def a_mode_of_training() -> Any:
    return Step(lambda m: 1), lambda m: m.net.eval()


@seen
def another_parameter() -> Any:
    return Step(lambda m: 1), lambda m: setattr(m.net, "weight", nn.Parameter(torch.ones(1, 2)))


@seen
def the_memory_of_a_parameter() -> Any:
    return Step(lambda m: 1), lambda m: setattr(m.net.weight, "data", torch.ones(1, 2))


@seen
def a_frozen_parameter() -> Any:
    return Step(lambda m: 1), lambda m: m.net.weight.requires_grad_(False)


@seen
def a_hook_of_a_parameter() -> Any:
    return Step(lambda m: 1), lambda m: m.net.weight.register_hook(lambda grad: grad * 2)


@seen
def a_hook_of_a_layer() -> Any:
    return Step(lambda m: 1), lambda m: m.net.register_forward_hook(lambda m, x, y: y * 2)


@seen
def a_hook_of_all_layers() -> Any:
    def change(m: Any) -> None:
        HOOK.append(nn.modules.module.register_module_forward_hook(lambda m, x, y: y * 2).remove)

    return Step(lambda m: 1), change


@seen
def deterministic_algorithms() -> Any:
    def change(m: Any) -> None:
        torch.use_deterministic_algorithms(True)
        HOOK.append(lambda: torch.use_deterministic_algorithms(False))

    return Step(lambda m: 1), change


# Open


@is_open("os")
def another_environment() -> Any:
    return Step(lambda m: float(os.getenv("SETTING_OF_A_TEST", "1")))


@is_open("deque")
def full_deque() -> Any:
    def factor(m: Any) -> Any:
        m.window.append(5)
        return sum(m.window)

    return Step(factor, window=collections.deque([1, 2, 3], maxlen=3))


@is_open("set")
def items_of_a_set() -> Any:
    def factor(m: Any) -> Any:
        m.numbers -= {2}
        return len(m.numbers)

    return Step(factor, numbers={1, 2})


@is_open("d")
def the_order_that_is_changed() -> Any:
    def factor(m: Any) -> Any:
        m.d.move_to_end("x")
        return 2

    return Step(factor, d=collections.OrderedDict([("x", 1), ("y", 2)]))


@is_open("cache")
def a_cache() -> Any:
    @functools.cache
    def made(n: int) -> list[int]:
        return []

    def factor(m: Any) -> Any:
        made(1).append(1)
        return len(made(1))

    return Step(factor)


@is_open("param_groups|Optimizer|lr")
def a_rate_that_is_set() -> Any:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])

    def factor(m: Any) -> Any:
        optimizer.param_groups[0]["lr"] += 0.1
        return optimizer.param_groups[0]["lr"]

    return Step(factor)


@is_open("eval")
def local_variables() -> Any:
    def factor(m: Any) -> Any:
        by = 2  # noqa: F841
        return eval("by")

    return Step(factor)


def _root(sign: float) -> Any:
    return torch.linalg.cholesky(torch.eye(2) * sign).sum()


@is_open("catches an error")
def a_caught_error() -> Any:
    def factor(m: Any) -> Any:
        try:
            return _root(m.sign)
        except RuntimeError:
            return 7

    return Step(factor, sign=-1.0)


@is_open("catches an error")
def a_suppressed_error() -> Any:
    def factor(m: Any) -> Any:
        found: Any = 7
        with contextlib.suppress(Exception):
            found = _root(m.sign)
        return found

    return Step(factor, sign=-1.0)


@is_open("kind")
def a_written_class() -> Any:
    Thing.kind = 1  # type: ignore[attr-defined]

    def factor(m: Any) -> Any:
        type(m.one).kind += 1
        return m.one.kind

    return Step(factor, one=Thing())


@is_open("writes")
def a_written_class_that_is_imported_in_the_step() -> Any:
    _importable()

    def factor(m: Any) -> Any:
        from lent import Lent

        Lent.by = Lent.by + 1.0
        return Lent.by

    return Step(factor)


@is_open("view of a mapping")
def a_view_of_somebody_s_mapping() -> Any:
    return Step(lambda m: m.view["by"], view=types.MappingProxyType(collections.UserDict(by=2.0)))


@is_open("__eq__")
def objects_that_are_compared() -> Any:
    return Step(lambda m: 2.0 if m.one == m.other else 1.0, one=Compared(1.0), other=Compared(1.0))


@is_open("not found")
def a_property_that_changes() -> Any:
    Thing.more = Changing(lambda self: 2.0)  # type: ignore[attr-defined]
    return Step(lambda m: m.one.more, one=Thing())


@is_open("list that was there")
def a_dictionary_that_was_there_in_a_list() -> Any:
    return Step(lambda m: m.kept.append(m.one) or 2.0, kept=[], one={"by": 1})


@is_open("list that was there")
def a_number_that_is_set_in_a_list() -> Any:
    return Step(lambda m: m.kept.__setitem__(0, len(m.kept)) or 2.0, kept=[0])


@is_open("Meta")
def functions_of_a_metaclass() -> Any:
    class Meta(type):
        number = 1.0

        def __bool__(cls) -> bool:
            return cls.number > 1

    return Step(lambda m: 3 if m.kind else 1, kind=Meta("Made", (), {}))


@is_open("d")
def order_of_items_that_are_taken() -> Any:
    return Step(lambda m: m.d.popitem()[1], d={"a": 2, "b": 3})


@is_open("set.pop")
def an_item_of_a_set() -> Any:
    return Step(lambda m: set(m.s).pop(), s={8, 16, 0})


@is_open("random")
def a_source_of_random_numbers() -> Any:
    return Step(lambda m: m.source.random(), source=random.Random(3))


@is_open("generator")
def a_generator() -> Any:
    def values() -> Any:
        while True:
            yield 1
            yield 2

    return Step(lambda m: next(m.values), values=values())


@is_open("random")
def a_random_number() -> Any:
    return Step(lambda m: random.uniform(0, 1))


@is_open("random")
def a_random_number_of_numpy() -> Any:
    return Step(lambda m: np.random.rand())


@is_open("random")
def a_generator_of_numpy() -> Any:
    return Step(lambda m: m.source.random(), source=np.random.default_rng(0))


@is_open("__getattr__")
def attributes_of_a_function() -> Any:
    class Fallback:
        def __getattr__(self, name: str) -> float:
            return 1.0

    return Step(lambda m: m.thing.factor, thing=Fallback())


@is_open("NUMBER")
def a_written_module() -> Any:
    def factor(m: Any) -> Any:
        sys.modules[__name__].NUMBER += 1  # type: ignore[attr-defined]
        return NUMBER

    return Step(factor)


@is_open("NUMBER")
def written_globals() -> Any:
    def factor(m: Any) -> Any:
        globals()["NUMBER"] = NUMBER + 1
        return NUMBER

    return Step(factor)


@is_open("NUMBER")
def a_written_global() -> Any:
    def factor(m: Any) -> Any:
        global NUMBER
        NUMBER += 1
        return NUMBER

    return Step(factor)


@is_open("count")
def a_written_variable_of_a_closure() -> Any:
    count = 0

    def factor(m: Any) -> Any:
        nonlocal count
        count += 1
        return count

    return Step(factor)


@is_open("count")
def a_counter() -> Any:
    def factor(m: Any) -> Any:
        m.count += 1
        return m.count % 3

    return Step(factor, count=0)


@is_open("Freed|tmp|__del__")
def a_finalizer() -> Any:
    class Freed:
        def __init__(self, c: list[int]) -> None:
            self.c = c

        def __del__(self) -> None:
            self.c.append(1)

    def factor(m: Any) -> Any:
        m.tmp = Freed(m.c)
        return len(m.c)

    return Step(factor, c=[])


@is_open("numpy")
def values_of_a_tensor() -> Any:
    return Step(lambda m: float(m.net.weight.detach().numpy().sum()))


@is_open("tolist")
def a_list_of_values() -> Any:
    return Step(lambda m: sum(m.net.bias.tolist()))


@is_open("grad")
def a_gradient() -> Any:
    return Step(lambda m: 1 if m.net.bias.grad is None else 2)


@is_open("_version")
def a_version() -> Any:
    return Step(lambda m: m.net.bias._version)


@is_open("id")
def an_identity() -> Any:
    return Step(lambda m: id(m) % 2)


@is_open("print")
def a_line_of_text() -> Any:
    return Step(lambda m: print("") or 1)


@is_open("random")
def a_seed() -> Any:
    return Step(lambda m: torch.manual_seed(3) and 1)


@is_open("backward")
def a_backward_pass_in_the_step() -> Any:
    return Step(lambda m: m.net(X).sum().backward() or 1)


@is_open("generator|Generator")
def a_generator_of_torch() -> Any:
    return Step(lambda m: torch.rand(2, generator=m.source).sum(), source=torch.Generator())


@is_open("class")
def a_tensor_of_another_class() -> Any:
    class Marked(torch.Tensor):
        pass

    return Step(lambda m: m.marked.sum(), marked=torch.ones(2).as_subclass(Marked))


@is_open("thread")
def a_thread() -> Any:
    import threading

    def factor(m: Any) -> Any:
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        return 1

    return Step(factor)


@is_open("time")
def the_time() -> Any:
    import time

    return Step(lambda m: time.time())


@is_open("attrgetter")
def a_getter_of_attributes() -> Any:
    return Step(lambda m: m.get(m), get=operator.attrgetter("factor"), factor=2.0)


@is_open("array")
def an_array_that_is_written() -> Any:
    def factor(m: Any) -> Any:
        m.a[0] += 1
        return float(m.a[0])

    return Step(factor, a=np.ones(2))


@is_open("backends")
def a_setting_of_torch() -> Any:
    def factor(m: Any) -> Any:
        torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
        return 1

    return Step(factor)


@is_open("local")
def a_variable_of_a_thread() -> Any:
    import threading

    local = threading.local()
    local.by = 2.0
    return Step(lambda m: local.by)


@is_open("scripted|ScriptFunction")
def a_scripted_function() -> Any:
    return Step(lambda m: m.made(X).sum(), made=torch.jit.trace(lambda x: x * 2, X))


@pytest.mark.parametrize("name", SEEN)
def test_a_change_is_seen(name: str) -> None:
    module, change = SEEN[name]()
    world = observed(module.training_step, X, 0)
    assert reasons(world) == ""
    assert world.holds(), world.changed()
    change(module)
    assert not world.holds()
    assert world.changed()


@pytest.mark.parametrize("name", OPEN)
def test_is_open(name: str) -> None:
    make, why = OPEN[name]
    world = observed(make().training_step, X, 0)
    assert any(part in reasons(world) for part in why.split("|")), reasons(world)
