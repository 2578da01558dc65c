"""Message passing over molecules, with chemprop."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
from chemprop import data, models, nn

SMILES = [f"{'C' * chain}{ring}{end}" for chain in range(1, 9) for ring in ("c1ccccc1", "C1CCCC1") for end in "CNOF"]


def mpnn(steps: int, **trainer: Any) -> None:
    """A network that passes messages along bonds, and a regression."""
    rng = np.random.default_rng(0)
    points = [data.MoleculeDatapoint.from_smi(text, rng.standard_normal(1)) for text in SMILES]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=32, seed=0)
    model = models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), nn.RegressionFFN())
    pl.Trainer(max_steps=steps, max_epochs=-1, **trainer).fit(model, loader)
