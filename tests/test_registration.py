"""The name ``ort`` is known in each installed Lightning, whoever is imported first."""

import dataclasses
import importlib
import importlib.machinery
import importlib.util
import json
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning_utilities.core.imports import RequirementCache

import lightning_ort
import lightning_ort.lightning
from lightning_ort import _registration
from lightning_ort._imports import LIGHTNING, NAMESPACES, LightningNamespace
from lightning_ort._registration import register_strategies
from lightning_ort._strategies import STRATEGIES

# Runs each piece of code in a fresh interpreter: one that has imported what takes long, but no Lightning, forks.
FRESH = """
import json, os, sys, traceback, warnings
import torch._dynamo, torchmetrics, rich.console, fsspec
warnings.simplefilter("ignore")
assert not any(name.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_ort") for name in sys.modules)
failed = 0
for name, code in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
            os._exit(0)
        except BaseException:
            print(f"--- {name}\\n{code}", file=sys.stderr)
            traceback.print_exc()
            os._exit(1)
    failed |= os.waitpid(pid, 0)[1]
sys.exit(failed != 0)
"""


def run_fresh(codes: dict[str, str]) -> None:
    """Run pieces of code, each as the first thing in its process that imports Lightning or this package."""
    command = [sys.executable, "-c", FRESH, json.dumps(codes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# what a program may do first
FIRST = {
    "nothing": "import lightning_ort",
    "strategy": "import lightning_ort; lightning_ort.ORTStrategy",
    "optimizer": "from lightning_ort import ORTOptimizer",
    "all names": "from lightning_ort import *",
    "probe pytorch_lightning": "import lightning_ort; assert find_spec('pytorch_lightning').loader.is_package",
    "probe lightning.pytorch": "import lightning_ort; find_spec('lightning.pytorch'); find_spec('lightning.pytorch')",
    "classes": "import lightning_ort.lightning; lightning_ort.lightning.ORTZeRO1Strategy",
    "callback": "from lightning_ort.lightning import OnnxExport",
    "pytorch_lightning": "import lightning_ort.pytorch_lightning",
    "reload": "import importlib, lightning_ort; importlib.reload(lightning_ort)",
    "two threads": "\n".join(
        [
            "import threading, lightning_ort",
            "thread = threading.Thread(target=lambda: lightning_ort.ORTStrategy)",
            "thread.start(); lightning_ort.ORTOptimizer; thread.join()",
        ]
    ),
    "lightning": "import lightning.pytorch, lightning_ort",
    "the other lightning": "import pytorch_lightning, lightning_ort",
    "a thread": "\n".join(
        [
            "import threading, lightning_ort",
            "thread = threading.Thread(target=__import__, args=('lightning.pytorch',))",
            "thread.start(); thread.join()",
        ]
    ),
    **{
        f"module {name}": f"import lightning_ort.{name}"
        for name in [
            *("strategies", "strategies.mixin", "strategies.parallel", "strategies.deepspeed.mixin"),
            *("callbacks", "callbacks.export_onnx", "strategies.checkpoints"),
            *("precision.mixed", "onnx_export.predict", "lightning", "pytorch_lightning"),
        ]
    },
    **{f"name {name}": f"from lightning_ort import {name}" for name in lightning_ort.__all__},
}
# what it does then
THEN = """
import sys
from {package} import Trainer
strategy = Trainer(strategy="ort", accelerator="cpu", logger=False).strategy
assert type(strategy).__module__ == "{module}", type(strategy)
assert Trainer(strategy="ort_ddp", accelerator="cpu", logger=False).strategy.strategy_name == "ort_ddp"
assert not any(getattr(finder, "name", "") == "{package}" for finder in sys.meta_path), sys.meta_path
assert type(sys.modules["{package}"].__spec__.loader).__name__ == "SourceFileLoader"
"""
QUICK = ("optimizer", "probe lightning.pytorch")


def orders(namespace: LightningNamespace, firsts: Iterable[str]) -> dict[str, str]:
    then = THEN.format(package=namespace.package, module=namespace.module)
    return {first: f"from importlib.util import find_spec\n{FIRST[first]}\n{then}" for first in firsts}


def test_orders_of_imports() -> None:
    run_fresh(orders(LIGHTNING, QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("namespace", NAMESPACES, ids=lambda namespace: namespace.package)
def test_every_order_of_imports(namespace: LightningNamespace) -> None:
    if not namespace.available:
        pytest.skip(str(namespace.available))
    run_fresh(orders(namespace, FIRST))


OTHER = """
import sys, {first}
import {second}
from {package} import Trainer
assert Trainer(strategy="ort", accelerator="cpu", logger=False).strategy.strategy_name == "ort"
assert not {{"lightning.pytorch", "pytorch_lightning"}} - {{"{package}"}} & set(sys.modules)  # it takes seconds
"""


@pytest.mark.slow
def test_a_lightning_that_is_not_imported_stays_so() -> None:
    packages = [namespace.package for namespace in NAMESPACES if namespace.available]
    codes = {}
    for package in packages:
        for pair in ((package, "lightning_ort"), ("lightning_ort", package)):
            codes[" ".join(pair)] = OTHER.format(first=pair[0], second=pair[1], package=package)
    run_fresh(codes)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LightningNamespace]:
    """A Lightning of another name, which fails to import while its file `fails` exists."""
    package = tmp_path / "fake_lightning"
    package.mkdir()
    (package / "strategies.py").write_text("class Registry(dict): pass\nStrategyRegistry = Registry()")
    failing = "import pathlib\nif (pathlib.Path(__file__).parent / 'fails').exists(): raise RuntimeError('mine')\n"
    (package / "__init__.py").write_text(f"{failing}from fake_lightning import strategies")
    monkeypatch.syspath_prepend(tmp_path)
    namespace = dataclasses.replace(LIGHTNING, package="fake_lightning")
    monkeypatch.setattr(_registration, "NAMESPACES", (namespace,))
    finders = list(sys.meta_path)
    yield namespace
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith("fake_lightning")]:
        del sys.modules[name]


def hooks(namespace: LightningNamespace) -> list[Any]:
    return [finder for finder in sys.meta_path if getattr(finder, "name", None) == namespace.package]


def test_the_hook_goes_with_a_real_import_alone(fake: LightningNamespace, tmp_path: Path) -> None:
    register_strategies()
    register_strategies()
    assert len(hooks(fake)) == 1
    for _ in range(2):
        spec = importlib.util.find_spec(fake.package)
        assert spec.loader.get_filename(fake.package) == spec.origin
        assert importlib.util.find_spec("nothing_of_this_name") is None
    marker = tmp_path / "fake_lightning" / "fails"
    marker.touch()
    with pytest.raises(RuntimeError, match="mine"):
        importlib.import_module(fake.package)
    assert len(hooks(fake)) == 1
    marker.unlink()
    module = importlib.import_module(fake.package)
    assert hooks(fake) == []
    assert isinstance(module.__loader__, importlib.machinery.SourceFileLoader)
    assert module.__spec__.loader is module.__loader__
    assert "ort" in module.strategies.StrategyRegistry
    importlib.reload(module)


class Raises:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith("fake_lightning"):
            raise ImportError("a finder of the user's")


def test_the_hook_beside_other_finders(fake: LightningNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    register_strategies()
    again = importlib.reload(importlib.import_module("lightning_ort._registration"))  # its class is another one
    monkeypatch.setattr(again, "NAMESPACES", (fake,))
    again.register_strategies()
    assert len(hooks(fake)) == 2
    sys.meta_path.insert(0, Raises())
    with pytest.raises(ImportError, match="a finder of the user's"):
        importlib.import_module(fake.package)
    sys.meta_path[0] = object()  # type: ignore[assignment]  # of no use to Python either
    del sys.meta_path[0]
    assert "ort" in importlib.import_module(fake.package).strategies.StrategyRegistry


@pytest.mark.parametrize("registry", ["None", "object()", "1 / 0", "__import__('absent')"])
def test_an_error_of_the_hook_stays_with_it(fake: LightningNamespace, tmp_path: Path, registry: str) -> None:
    package = tmp_path / "fake_lightning"
    (package / "__init__.py").write_text("value = 1")
    (package / "strategies.py").write_text(f"StrategyRegistry = {registry}")
    register_strategies()
    assert importlib.import_module(fake.package).value == 1
    assert hooks(fake) == []
    register_strategies()  # as when the package is imported later


def test_lightning_that_is_forbidden(fake: LightningNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, fake.package, None)
    register_strategies()
    assert hooks(fake) == []


def test_names_are_those_that_the_classes_register() -> None:
    from lightning.fabric.strategies.registry import _StrategyRegistry

    assert set(STRATEGIES) == {name for name in lightning_ort.__all__ if name.endswith("Strategy")}
    for kind, of_kind in STRATEGIES.items():
        names = list(of_kind.arguments)
        registry = _StrategyRegistry()
        getattr(lightning_ort.lightning, kind).register_strategies(registry)
        assert list(registry) == names
        for name in names:
            assert dict(_registration.RegistryEntry(name, LIGHTNING, kind, _StrategyRegistry)) != registry[name]
            entry = _registration.RegistryEntry(name, LIGHTNING, kind, _StrategyRegistry)
            assert entry["strategy"] is registry[name]["strategy"]
            assert entry == registry[name]
            with pytest.raises(KeyError, match="nothing"):
                entry["nothing"]


@pytest.mark.parametrize("namespace", NAMESPACES, ids=lambda namespace: namespace.package)
def test_each_namespace_has_each_name(namespace: LightningNamespace) -> None:
    if not namespace.available:
        pytest.skip(str(namespace.available))
    theirs = importlib.import_module(f"{namespace.package}.strategies")
    ours = importlib.import_module(namespace.module)
    classes = [getattr(ours, name) for name in STRATEGIES]
    assert {kind.strategy_name for kind in classes} == {kind.strategy_name for kind in strategies()}
    for kind in classes:
        assert theirs.StrategyRegistry[kind.strategy_name]["strategy"] is kind
        assert issubclass(kind, theirs.Strategy)
        assert kind.namespace is namespace
        # of a user's class, whatever it is called
        own = type(kind.__name__, (kind,), {"strategy_name": "own"})
        assert (own.strategy_name, kind.strategy_name) == ("own", STRATEGIES[kind.__name__].name)
    for name in lightning_ort.__all__:
        if name.startswith(("ORT", "Onnx")) and name != "ORTConfig":
            kind = getattr(ours, name)
            assert kind.__module__ == namespace.module
            assert pickle.loads(pickle.dumps(kind)) is kind


def strategies() -> list[type]:
    return [getattr(lightning_ort, name) for name in STRATEGIES]


def test_registering_twice_changes_nothing() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    register_strategies()
    entry = StrategyRegistry["ort"]
    finders = list(sys.meta_path)
    register_strategies()
    assert StrategyRegistry["ort"] is entry
    assert sys.meta_path == finders


def test_stock_strategies_are_untouched() -> None:
    import lightning.pytorch as pl

    import lightning_ort  # noqa: F401

    strategies = pl.strategies.StrategyRegistry.available_strategies()
    assert {"ddp", "deepspeed", "fsdp", "ort"} <= set(strategies)
    assert type(pl.Trainer(accelerator="cpu", logger=False).strategy) is pl.strategies.SingleDeviceStrategy


@pytest.mark.new_torch
def test_top_level_names() -> None:
    from lightning_ort.lightning import ORTStrategy

    assert lightning_ort.ORTStrategy is lightning_ort.lightning.ORTStrategy is ORTStrategy
    assert set(lightning_ort.__all__) <= set(dir(lightning_ort))
    assert all(hasattr(lightning_ort, name) for name in lightning_ort.__all__)
    assert lightning_ort.__version__[0].isdigit()
    for module in (lightning_ort, lightning_ort.lightning):
        with pytest.raises(AttributeError, match="nothing"):
            _ = module.nothing


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_ort

    monkeypatch.setattr(LightningNamespace, "available", False)
    with pytest.raises(ModuleNotFoundError, match="need Lightning"):
        _ = lightning_ort.ORTStrategy


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("orrt", "ort"),
        ("ort_dp", "ort_ddp"),
        ("ort-ddp", "ort_ddp"),
        ("ort_zero2", "ort_zero1"),
        ("onnxruntime", "ort"),
        ("OrtStrategy", "ort"),
        ("ORTDDPStrategy", "ort_ddp"),
    ],
)
@pytest.mark.parametrize("namespace", NAMESPACES, ids=lambda namespace: namespace.package)
def test_a_misspelt_name_gets_a_question(namespace: LightningNamespace, name: str, meant: str) -> None:
    if not namespace.available:
        pytest.skip(str(namespace.available))
    trainer = importlib.import_module(namespace.package).Trainer
    with pytest.raises(ValueError, match=f"{name.lower()}.*did you mean {meant!r}.*ort_zero1_native"):
        trainer(strategy=name, accelerator="cpu", logger=False)


@pytest.mark.parametrize("name", ["nothing_like_it", "fdsp", "deepsped", "dpd"])
def test_names_that_are_not_like_ours_are_lightnings(name: str) -> None:
    from lightning.pytorch import Trainer

    with pytest.raises(ValueError, match="invalid strategy name") as caught:
        Trainer(strategy=name, accelerator="cpu", logger=False)
    assert "did you mean" not in str(caught.value)


def test_a_class_in_place_of_an_object() -> None:
    from lightning.pytorch import Trainer

    from lightning_ort import ORTStrategy

    with pytest.raises(ValueError, match=r"class; pass an object, ORTStrategy\(\)"):
        Trainer(strategy=ORTStrategy, accelerator="cpu", logger=False)  # type: ignore[arg-type]


def test_a_misspelt_class_gets_a_question() -> None:
    import lightning_ort

    with pytest.raises(AttributeError, match="'ORTStrategy'"):
        _ = lightning_ort.OrtStrategy


def test_zero1_without_deepspeed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import Trainer

    from lightning_ort.strategies.deepspeed import mixin

    monkeypatch.setattr(mixin, "_DEEPSPEED", RequirementCache("deepspeed>=99"))
    with pytest.raises(Exception, match=r"pip install 'lightning-ort\[zero\]'"):
        Trainer(strategy="ort_zero1", accelerator="cpu", logger=False)


@pytest.mark.parametrize("ours", NAMESPACES, ids=lambda namespace: namespace.package)
def test_a_strategy_for_the_other_trainer(ours: LightningNamespace) -> None:
    other = next(namespace for namespace in NAMESPACES if namespace is not ours)
    if not (ours.available and other.available):
        pytest.skip("needs both packages")

    class Own(ours.classes.ORTStrategy):  # type: ignore[name-defined]
        pass

    message = f"ORTStrategy.*Trainer of {ours.package}, .*import ORTStrategy from {other.module}"
    with pytest.raises(ValueError, match=message):
        other.load().Trainer(strategy=Own(), accelerator="cpu", logger=False)
    assert isinstance(ours.load().Trainer(strategy=Own(), accelerator="cpu", logger=False).strategy, Own)
