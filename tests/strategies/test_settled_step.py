"""What a settled step costs: so many calls of ours, whatever their number of lines."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from settled_step import watch


@pytest.mark.parametrize(("unchanged", "most"), [(False, 56), (True, 25)])
def test_a_settled_step_makes_few_calls(unchanged: bool, most: int) -> None:
    # without loop and loader, which replace more calls of Lightning's and torch's (tests/strategies/test_lean.py)
    around = (os.path.join("strategies", "lean"), "lightning_loops.py", "drop_gradients", "whole_batch", "next_batch")
    names = [code.co_name for _, code in watch(unchanged).calls if not any(each in str(code) for each in around)]
    assert ("_bind_input" in names or "allocate" in names) == (not unchanged), "which onnxruntime runs"
    assert len(names) <= most, names
