"""Train a small Whisper, from random weights, to write down the digits in made-up spectrograms."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import WhisperConfig, WhisperForConditionalGeneration

MELS, FRAMES, SPOKEN = 40, 96, 6  # a spectrogram has SPOKEN digits, each as long as the others
START, END, VOCABULARY = 10, 11, 12  # beside the ten digits


class SpokenDigits(LightningDataModule):
    """Each digit is a chord of three frequencies, with noise."""

    def __init__(self, samples: int = 2048, noise: float = 0.5, batch_size: int = 16) -> None:
        super().__init__()
        self.samples = samples
        self.noise = noise
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        draw = torch.Generator().manual_seed(0)
        chords = torch.zeros(10, MELS).scatter_(1, torch.rand(10, MELS, generator=draw).argsort(1)[:, :3], 1.0)
        digits = torch.randint(10, (self.samples, SPOKEN), generator=draw)
        spectrograms = chords[digits].transpose(1, 2).repeat_interleave(FRAMES // SPOKEN, dim=2)
        spectrograms += self.noise * torch.randn(spectrograms.shape, generator=draw)
        self.train_set = TensorDataset(spectrograms, torch.nn.functional.pad(digits, (0, 1), value=END))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)


class Whisper(LightningModule):
    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.whisper = WhisperForConditionalGeneration(
            WhisperConfig(
                vocab_size=VOCABULARY,
                num_mel_bins=MELS,
                d_model=width,
                encoder_layers=layers,
                decoder_layers=layers,
                encoder_attention_heads=heads,
                decoder_attention_heads=heads,
                encoder_ffn_dim=4 * width,
                decoder_ffn_dim=4 * width,
                max_source_positions=FRAMES // 2,
                max_target_positions=SPOKEN + 1,
                decoder_start_token_id=START,
                bos_token_id=START,
                pad_token_id=END,
                eos_token_id=END,
                suppress_tokens=None,
                begin_suppress_tokens=None,
                use_cache=False,
            )
        )

    def forward(self, spectrograms: Tensor, text: Tensor) -> Tensor:
        """Judge what comes after each token of the text, which begins with START."""
        return self.whisper(input_features=spectrograms, decoder_input_ids=text).logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        spectrograms, text = batch
        loss = self.whisper(input_features=spectrograms, labels=text).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    LightningCLI(Whisper, SpokenDigits)
