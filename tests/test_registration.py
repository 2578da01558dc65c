"""The name ``ort`` is known in each installed Lightning, whoever is imported first."""

import importlib
import subprocess
import sys

import pytest

from lightning_ort._imports import FLAVORS, Flavor
from lightning_ort._registration import register_strategies


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("flavor", FLAVORS, ids=lambda flavor: flavor.package)
@pytest.mark.parametrize("ours_first", [True, False])
def test_either_order_of_imports(flavor: Flavor, ours_first: bool) -> None:
    if not flavor.available:
        pytest.skip(str(flavor.available))
    imports = ["import lightning_ort", f"import {flavor.package} as pl"]
    code = [
        *(imports if ours_first else reversed(imports)),
        "strategy = pl.Trainer(strategy='ort', accelerator='cpu', logger=False).strategy",
        "print(type(strategy).__module__, isinstance(strategy, pl.strategies.SingleDeviceStrategy))",
        "import sys",
        "other = {'lightning.pytorch', 'pytorch_lightning'} - {pl.__name__}",
        "assert not other & set(sys.modules)",  # it takes seconds
    ]
    assert python("\n".join(code)).endswith(f"{flavor.strategies}.single_device True")


@pytest.mark.parametrize("flavor", FLAVORS, ids=lambda flavor: flavor.package)
def test_each_flavor_has_each_name(flavor: Flavor) -> None:
    if not flavor.available:
        pytest.skip(str(flavor.available))
    theirs = importlib.import_module(f"{flavor.package}.strategies")
    ours = importlib.import_module(flavor.strategies)
    classes = [getattr(ours, name) for name in ours.__all__]
    assert {kind.strategy_name for kind in classes} == {kind.strategy_name for kind in strategies()}
    for kind in classes:
        assert theirs.StrategyRegistry[kind.strategy_name]["strategy"] is kind
        assert issubclass(kind, theirs.Strategy)


def strategies() -> list[type]:
    import lightning_ort.strategies as ours

    return [getattr(ours, name) for name in ours.__all__]


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


def test_top_level_names() -> None:
    import lightning_ort
    from lightning_ort.strategies.single_device import ORTStrategy

    assert lightning_ort.ORTStrategy is lightning_ort.strategies.ORTStrategy is ORTStrategy
    assert set(lightning_ort.__all__) <= set(dir(lightning_ort))
    assert all(hasattr(lightning_ort, name) for name in lightning_ort.__all__)
    assert lightning_ort.__version__[0].isdigit()
    for module in (lightning_ort, lightning_ort.strategies):
        with pytest.raises(AttributeError, match="nothing"):
            _ = module.nothing


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_ort

    monkeypatch.setattr(Flavor, "available", False)
    with pytest.raises(ModuleNotFoundError, match="need Lightning"):
        _ = lightning_ort.ORTStrategy
