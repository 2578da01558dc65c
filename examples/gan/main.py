"""A GAN of handwritten digits: two optimizers, stepped by hand."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1  # -1 to 1

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.images), self.batch_size, shuffle=True, drop_last=True)


class GAN(LightningModule):
    def __init__(self, latent: int = 32, width: int = 256, learning_rate: float = 2e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.latent = latent
        self.learning_rate = learning_rate
        self.generator = nn.Sequential(
            nn.Linear(latent, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
            nn.Linear(width, 64), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (images,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()  # type: ignore[attr-defined]
        fakes = self(torch.randn(len(images), self.latent, device=self.device))

        self.toggle_optimizer(discriminator_optimizer)
        real, fake = self.discriminator(images), self.discriminator(fakes.detach())
        discriminator_loss = (
            F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
            + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
        ) / 2
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.toggle_optimizer(generator_optimizer)
        judged = self.discriminator(fakes)
        generator_loss = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.log_dict({"train_loss": generator_loss, "discriminator_loss": discriminator_loss}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(net.parameters(), lr=self.learning_rate, betas=(0.5, 0.999)) for net in networks]


if __name__ == "__main__":
    LightningCLI(GAN, Digits)
