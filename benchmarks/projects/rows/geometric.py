"""Graph networks with torch-geometric."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCN, global_mean_pool


class GraphClassifier(pl.LightningModule):
    """A graph convolutional network over batches of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = GCN(16, 64, num_layers=3, out_channels=4, dropout=0.1)

    def training_step(self, batch: Batch, _index: int) -> Tensor:
        """Return the cross entropy."""
        logits = global_mean_pool(self.network(batch.x, batch.edge_index), batch.batch)
        loss = functional.cross_entropy(logits, batch.y)
        self.log("loss", loss, batch_size=batch.num_graphs)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def gcn(steps: int, **trainer: Any) -> None:
    """A graph convolutional network that classifies graphs of 20 to 29 nodes."""
    random = torch.Generator().manual_seed(0)
    graphs = [
        Data(
            x=torch.randn(20 + k % 10, 16, generator=random),
            edge_index=torch.randint(20 + k % 10, (2, 80), generator=random),
            y=torch.tensor([k % 4]),
        )
        for k in range(256)
    ]
    pl.Trainer(max_steps=steps, max_epochs=-1, **trainer).fit(
        GraphClassifier(), DataLoader(graphs, batch_size=32, shuffle=True)
    )
