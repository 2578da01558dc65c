"""The LightningModules whose losses under ``ort`` are compared with the stock strategy: written as any user would."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

STEPS = 50
BATCH = 8
CLASSES = 4
VOCABULARY = 32


class Samples(Dataset):
    """Batches with something to learn: classes with means of their own, or counting sequences."""

    def __init__(self, *shape: int, tokens: bool = False) -> None:
        self._shape, self._tokens = shape, tokens
        self._means = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(0, CLASSES, (), generator=generator)
        if self._tokens:
            start = torch.randint(0, VOCABULARY, (), generator=generator)
            return (start + torch.arange(self._shape[0]) * (label + 1)) % VOCABULARY, label
        return self._means[label] + torch.randn(self._shape, generator=generator), label


class Base(LightningModule):
    shape: tuple[int, ...] = (16,)
    tokens = False
    lr = 1e-2

    def __init__(self) -> None:
        super().__init__()
        seed_everything(7, verbose=False)
        self.losses: list[float] = []
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs is not None:
            self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=self.lr)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Samples(*self.shape, tokens=self.tokens), batch_size=BATCH)


class MLP(Base):
    def build(self) -> None:
        self.net = nn.Sequential(
            nn.Linear(16, 32),
            nn.LayerNorm(32),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(32, 32),
            nn.SiLU(),
            nn.Linear(32, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class CNN(Base):
    shape = (1, 8, 8)

    def build(self) -> None:
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.features(x)).mean((2, 3)))


class LSTM(Base):
    shape = (6, 8)

    def build(self) -> None:
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, -1)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.heads)
        weights = self.dropout(scores.masked_fill(mask, float("-inf")).softmax(-1))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(batch, length, width)))
        return x + self.mlp(self.norm2(x))


class GPT(Base):
    shape = (12,)
    tokens = True
    lr = 3e-3

    def build(self) -> None:
        self.token, self.position = nn.Embedding(VOCABULARY, 32), nn.Embedding(12, 32)
        self.blocks = nn.ModuleList(Block(32, 4, dropout=0.1) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss


class BERT(Base):
    shape = (12,)
    tokens = True
    lr = 1e-3

    def build(self) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            num_labels=CLASSES,
        )
        self.bert = BertForSequenceClassification(config)
        self.bert.train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, label = batch
        loss = self.bert(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=label).loss
        self.log("train_loss", loss)
        return loss


class FrozenBackbone(Base):
    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.backbone.requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class SharedWeight(Base):
    shape = (8,)
    tokens = True

    def build(self) -> None:
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.mixer = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, _ = batch
        logits = self.head(self.mixer(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class GAN(Base):
    shape = (6,)

    def build(self) -> None:
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        real, _ = batch
        opt_g, opt_d = self.optimizers()
        ones, zeros = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)

        self.toggle_optimizer(opt_g)
        fake = self.generator(torch.randn(len(real), 4, device=real.device))
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(fake), ones)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.toggle_optimizer(opt_d)
        d_loss = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(self.discriminator(fake.detach()), zeros)
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)
        return {"g_loss": g_loss, "d_loss": d_loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses += [outputs["g_loss"].item(), outputs["d_loss"].item()]

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-3),
        ]


MODELS = (MLP, CNN, LSTM, GPT, BERT, FrozenBackbone, SharedWeight, GAN)
