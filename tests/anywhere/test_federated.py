"""The example of federated averaging: what clients with other digits have learned comes together."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

MAIN = Path(__file__).parents[2] / "examples" / "federated" / "main.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("federated", MAIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_learns_what_no_client_has(example: ModuleType, tmp_path: Path) -> None:
    assert example.federated(clients=3, rounds=4, folder=tmp_path) > 0.6  # a client alone knows a third of the digits


def test_states_are_averaged_by_weight(example: ModuleType) -> None:
    states = [
        {"w": np.array([0.0, 4.0], np.float32), "count": np.array(3)},
        {"w": np.array([4.0, 0.0], np.float32), "count": np.array(5)},
    ]
    mean = example.average(states, [3, 1])
    np.testing.assert_array_equal(mean["w"], np.array([1.0, 3.0], np.float32))
    assert (mean["w"].dtype, int(mean["count"])) == (np.float32, 5)
