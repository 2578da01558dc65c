"""A variational autoencoder of gene counts, with scvi-tools, which builds the Trainer from keyword arguments."""

from typing import Any

import anndata
import numpy as np
import scvi as package
from scvi.model import SCVI


def scvi(steps: int, **trainer: Any) -> None:
    """The variational autoencoder."""
    package.settings.seed = 0  # or the order of the cells is another in each run
    rng = np.random.default_rng(0)
    cells = anndata.AnnData(rng.negative_binomial(5, 0.5, size=(1280, 500)).astype(np.float32))
    cells.obs["batch"] = [f"b{index % 2}" for index in range(len(cells))]
    SCVI.setup_anndata(cells, batch_key="batch")
    trainer["early_stopping"] = False
    SCVI(cells).train(max_epochs=-(-steps // 10), train_size=1.0, batch_size=128, **trainer)
