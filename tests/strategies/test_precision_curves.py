"""Mixed precision: 100 steps lose what they lose under the stock strategy with the same precision."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from parity_models import CNN, GPT, Base

from lightning_ort import ORTMixedPrecision, ORTStrategy

pytestmark = pytest.mark.slow
STEPS = 100
LAST = 20
# of a step's loss, which differs by what rounding at another place makes of the weights, and of the last steps' mean
TOLERANCES = (0.05, 0.02)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("model", [GPT, CNN])
def test_curves_agree(model: type[Base], precision: Any, make_trainer: Callable[..., Any]) -> None:
    stock = model()  # each seeds torch's generator, which its fit goes on with
    settings: dict[str, Any] = {"max_steps": STEPS, "limit_val_batches": 0}
    # by name float16 is for GPUs alone
    scaler = torch.amp.GradScaler("cpu") if precision == "16-mixed" else None
    plugin = MixedPrecision(precision, "cpu", scaler)
    make_trainer(strategy="auto", plugins=[plugin], **settings).fit(stock)
    # single float32 nodes between the half precision ones, too: else there is little left for ONNX Runtime
    strategy = ORTStrategy(
        config={"placement": "always", "debug": {"min_region_nodes": 1}}, optim="keep"
    )  # fused ones round elsewhere
    ours = model()
    make_trainer(strategy=strategy, plugins=[ORTMixedPrecision(precision)], **settings).fit(ours)
    theirs, mine = np.array(stock.losses), np.array(ours.losses)
    assert len(theirs) == len(mine) == STEPS
    assert mine == pytest.approx(theirs, rel=TOLERANCES[0])
    assert mine[0] == pytest.approx(theirs[0], rel=1e-3)
    assert mine[-LAST:].mean() == pytest.approx(theirs[-LAST:].mean(), rel=TOLERANCES[1])
    assert theirs[-LAST:].mean() < 0.8 * theirs[:LAST].mean(), "nothing was learned"
    assert strategy.report.ort_runs >= STEPS - 1  # float16 shows its scale in the first step
    assert not strategy.report.fallbacks
