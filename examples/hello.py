"""The autoencoder of Lightning's own README, under stock Lightning and under ``strategy="ort"``: ``python hello.py``.

It takes seconds. Random images stand for MNIST, so that nothing is downloaded.
"""

import argparse
import time
from datetime import timedelta

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ort  # noqa: F401  # registers strategy="ort"


class LitAutoEncoder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 28 * 28))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(steps: int) -> None:
    seed_everything(0, verbose=False)
    images = TensorDataset(torch.rand(1000, 1, 28, 28), torch.zeros(1000))
    for strategy in ("auto", "ort"):  # "auto" is stock Lightning
        seed_everything(0, verbose=False)
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            max_steps=steps,
            max_time=timedelta(seconds=5),  # for a busy machine
            enable_model_summary=False,
        )
        start = time.perf_counter()
        trainer.fit(LitAutoEncoder(), DataLoader(images))
        seconds, loss = time.perf_counter() - start, trainer.callback_metrics["train_loss"]
        print(f"{strategy}: {trainer.global_step} steps in {seconds:.1f} s, loss {loss:.6f}")
    print(trainer.strategy.report)  # type: ignore[attr-defined]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
