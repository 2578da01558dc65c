"""The autoencoder of Lightning's own README, under stock Lightning and under ``strategy="ort"``: ``python hello.py``.

It takes seconds: after a short fit of each that does not count, both take turns. Random images stand for MNIST, so that
nothing is downloaded.
"""

import argparse
import statistics
import time

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


def fit(strategy: str, steps: int) -> tuple[float, Trainer]:
    """Train anew; return the seconds and the Trainer."""
    seed_everything(0, verbose=False)
    images = TensorDataset(torch.rand(1000, 1, 28, 28), torch.zeros(1000))
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_steps=steps, enable_model_summary=False)
    start = time.perf_counter()
    trainer.fit(LitAutoEncoder(), DataLoader(images))
    return time.perf_counter() - start, trainer


def main(steps: int, rounds: int = 3) -> None:
    seconds: dict[str, list[float]] = {"auto": [], "ort": []}  # "auto" is stock Lightning
    for strategy in seconds:
        fit(strategy, min(steps, 20))  # what a process does once
    for each in range(rounds):
        for strategy in sorted(seconds, reverse=each % 2 == 1):
            took, trainer = fit(strategy, steps)
            seconds[strategy].append(took)
            if strategy == "ort":
                report = trainer.strategy.report  # type: ignore[attr-defined]
            loss = trainer.callback_metrics["train_loss"]
            print(f"{strategy}: {trainer.global_step} steps in {took:.2f} s, loss {loss:.6f}")
    print(report)
    ratio = statistics.median(map(float.__truediv__, seconds["auto"], seconds["ort"]))
    print(f"ort is {ratio:.2f} times as fast as stock Lightning, the median of {rounds} rounds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
