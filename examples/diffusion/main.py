"""Train a small diffusion UNet, from random weights, to take the noise out of handwritten digits."""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # -1 to 1

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.images), self.batch_size, shuffle=True, drop_last=True)


class Diffusion(LightningModule):
    def __init__(self, width: int = 32, steps: int = 1000, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.noising = DDPMScheduler(steps)
        self.unet = UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            block_out_channels=(width, 2 * width),
            layers_per_block=1,
            norm_num_groups=8,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        return self.unet(noisy, times).sample

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (images,) = batch
        noise = torch.randn_like(images)
        times = torch.randint(self.noising.config.num_train_timesteps, (len(images),), device=self.device)
        noisy = self.noising.add_noise(images, noise, times)
        loss = F.mse_loss(self(noisy, times), noise)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    LightningCLI(Diffusion, Digits)
