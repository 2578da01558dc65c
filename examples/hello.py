"""A small transformer learns the source code of ``torch/__init__.py`` under ``strategy="ort"``: ``python hello.py``.

It takes about four minutes on two cores; in one minute, nothing would be compiled. ``--steps 100`` is a short try.
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_ort  # noqa: F401  # registers strategy="ort"


class Block(nn.Module):
    def __init__(self, width: int = 256, heads: int = 8, length: int = 64) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(0.1)
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        linear = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = nn.Sequential(nn.LayerNorm(width), *linear, nn.Dropout(0.1))
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(self.future, float("-inf"))
        x = x + self.out((self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Bytes(LightningModule):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Embedding(256, 256), *(Block() for _ in range(4)), nn.Linear(256, 256))

    def training_step(self, text: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.network(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main(steps: int) -> None:
    with open(torch.__file__, "rb") as file:
        source = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    texts = source.unfold(0, 65, 16)
    data: DataLoader = DataLoader(texts, batch_size=1, shuffle=True)  # type: ignore[arg-type]
    trainer = Trainer(strategy="ort", accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False)
    trainer.fit(Bytes(), data)
    print(trainer.strategy.report)  # type: ignore[attr-defined]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8000)
    main(parser.parse_args().steps)
