"""Six LightningModules and their batches: what people would train where PyTorch is not."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

Batches = Callable[[int, int], Any]  # rows, seed


class Module(LightningModule):
    """A network and its loss."""

    rate = 1e-3

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.rate)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class DigitsCNN(Module):
    """A CNN with batch norm and max pooling, for images of 8 x 8."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    @staticmethod
    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        images = torch.rand(rows, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        return images, (images.mean((1, 2, 3)) * 80).long() % 10


class TabularMLP(Module):
    """An MLP over numbers and embedded categories, with SGD and groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4)
        self.net = nn.Sequential(nn.Linear(16 + 4, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.SiLU())
        self.head = nn.Linear(64, 1)

    def forward(self, numbers: Tensor, category: Tensor) -> Tensor:
        return self.head(self.net(torch.cat([numbers, self.embedding(category)], 1))).squeeze(1)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self(batch["numbers"], batch["category"]), batch["target"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [
            {"params": self.net.parameters(), "weight_decay": 1e-2},
            {"params": self.head.parameters(), "lr": 1e-2},
        ]
        groups.append({"params": self.embedding.parameters()})
        return torch.optim.SGD(groups, lr=3e-2, momentum=0.9, nesterov=True)

    @staticmethod
    def batch(rows: int, seed: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(seed)
        numbers = torch.randn(rows, 16, generator=random)
        category = torch.randint(0, 12, (rows,), generator=random)
        return {"numbers": numbers, "category": category, "target": numbers.sum(1) + category / 6}


class SmallGPT(Module):
    """A causal language model; its dropout is off."""

    def __init__(
        self, vocabulary: int = 48, context: int = 24, width: int = 32, heads: int = 4, depth: int = 2
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        layer = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layers = [nn.TransformerEncoderLayer(width, heads, 4 * width, **layer) for _ in range(depth)]  # type: ignore[arg-type]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.triu(torch.full((length, length), -torch.inf), 1)
        states = self.tokens(tokens) + self.positions(torch.arange(length))
        for layer in self.layers:
            states = layer(states, src_mask=mask)
        return self.head(states)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # the gradient of the keys' bias is zero but for rounding, of which a smaller eps makes whole steps
        return torch.optim.AdamW(self.parameters(), lr=self.rate, eps=1e-6)

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @staticmethod
    def batch(rows: int, seed: int) -> Tensor:
        start = torch.randint(0, 48, (rows, 1), generator=torch.Generator().manual_seed(seed))
        return (start + torch.arange(17) * 5) % 48


class LSTMTagger(Module):
    """A tag for each word, by an LSTM in both directions; padding is ignored."""

    def __init__(self, words: int = 40, tags: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, tags)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0])

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        words, tags = batch
        return F.cross_entropy(self(words).transpose(1, 2), tags, ignore_index=-100)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3, weight_decay=1e-4)

    @staticmethod
    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(1, 40, (rows, 11), generator=torch.Generator().manual_seed(seed))
        words[0, 8:] = 0
        return words, torch.where(words == 0, -100, words % 6)


class UNet(Module):
    """Two levels: strided and transposed convolutions, group norm, interpolation and skip connections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())

        self.first, self.second, self.middle = block(1, width), block(width, 2 * width), block(2 * width, 2 * width)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.third, self.fourth = block(4 * width, width), block(2 * width, width)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.first(images)
        second = self.second(self.down(first))
        middle = self.middle(F.avg_pool2d(second, 2))
        third = self.third(torch.cat([self.up(middle), second], 1))
        wide = F.interpolate(third, scale_factor=2, mode="bilinear", align_corners=False)
        return self.last(self.fourth(torch.cat([wide, first], 1)))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(batch[0]), batch[1])

    @staticmethod
    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        images = torch.rand(rows, 1, 16, 16, generator=torch.Generator().manual_seed(seed))
        return images, (F.avg_pool2d(images, 3, 1, 1) > 0.5).float()


class LoRA(nn.Module):
    """A linear layer that is frozen, and a trained product of two small matrices beside it."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.down), self.up)


class MiniLM(Module):
    """A frozen BERT with LoRA in its attention, and a trained head over the mean of its states."""

    def __init__(self, path: str | None = None, classes: int = 10) -> None:
        super().__init__()
        from transformers import AutoModel, BertConfig, BertModel

        if path is None:
            sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            body = BertModel(
                BertConfig(**sizes, intermediate_size=64, max_position_embeddings=32), add_pooling_layer=False
            )
        else:
            body = AutoModel.from_pretrained(path, add_pooling_layer=False)
        self.body = body.eval().requires_grad_(False)
        for layer in self.body.encoder.layer:
            attention = layer.attention.self
            attention.query, attention.value = LoRA(attention.query), LoRA(attention.value)
        self.head = nn.Linear(body.config.hidden_size, classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.body(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["tokens"], batch["mask"]), batch["label"])

    @staticmethod
    def batch(rows: int, seed: int) -> dict[str, Tensor]:
        tokens = torch.randint(4, 60, (rows, 12), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(tokens)
        mask[0, 9:] = 0
        return {"tokens": tokens, "mask": mask, "label": tokens[:, 1] % 10}


SIX: tuple[type[Any], ...] = (DigitsCNN, TabularMLP, SmallGPT, LSTMTagger, UNet, MiniLM)
