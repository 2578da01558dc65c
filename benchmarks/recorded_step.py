"""A training step replayed as CUDA graphs (`record_step`), beside today's ways, on one GPU.

    python benchmarks/recorded_step.py [--precision bf16-mixed] [--steps 300] [--models mlp gpt]

Each variant trains the same model for as many steps; a row has the median milliseconds of the last half, without
waiting for each step, as a ratio of stock Lightning with a fused optimizer, and the memory that torch has reserved.
It has not run on a real GPU yet.
"""

import argparse
import gc
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ort import ORTStrategy

CONFIGS: dict[str, Any] = {
    "stock, fused": None,
    "torch.compile": None,
    "inductor": {"dynamic": True},  # which is not recorded
    "two recordings": {},
    "record_step": {"debug": {"record_step": True}},
}


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.1, F.gelu, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of ``x``, of shape (batch, length, width)."""
        return self.attention(x)


class Model(LightningModule):
    """Many small layers, or twelve large ones."""

    def __init__(self, name: str, steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps, width = steps, 64 if name == "mlp" else 768
        layers = [(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(16)]
        blocks = [one for layer in layers for one in layer] if name == "mlp" else [Block(width) for _ in range(12)]
        self.net = nn.Sequential(*blocks, nn.Linear(width, 10))
        self.batch = (32, width) if name == "mlp" else (16, 256, width)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = F.cross_entropy(self.net(batch[0]).flatten(0, -2), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return a fused optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def train_dataloader(self) -> Any:
        """Return one batch, many times."""
        x = torch.randn(self.batch).pin_memory()
        return DataLoader([(x, torch.zeros(x[..., 0].numel(), dtype=torch.long))] * self.steps, batch_size=None)


class Times(Callback):
    """When steps began."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Note the time."""
        if len(self.starts) % 20 == 0:  # the time of 20 steps, so that the host may run ahead
            torch.cuda.synchronize()
        self.starts.append(time.perf_counter())

    @property
    def ms(self) -> float:
        """Milliseconds of a step."""
        ends = self.starts[len(self.starts) // 2 // 20 * 20 :: 20]
        return statistics.median(50 * (end - start) for start, end in zip(ends, ends[1:], strict=False))


def run(name: str, variant: str, given: argparse.Namespace) -> tuple[float, int, str]:
    """Return milliseconds of a step, megabytes, and what became of recordings."""
    torch._dynamo.reset()
    model, times = Model(name, given.steps), Times()
    if variant == "torch.compile":
        model.net = torch.compile(model.net)
    config = CONFIGS[variant]
    strategy: Any = "auto" if config is None else ORTStrategy(config={"start": "now", **config})
    off: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings: Any = {"accelerator": "gpu", "devices": 1, "precision": given.precision, "max_epochs": 1, **off}
    Trainer(strategy=strategy, callbacks=[times], **settings).fit(model)
    notes = [] if config is None else [str(one) for one in strategy.report.notes if "recording" in str(one)]
    reserved = torch.cuda.memory_reserved() >> 20
    del model, strategy
    gc.collect()
    torch.cuda.empty_cache()
    return times.ms, reserved, "; ".join(notes)


def main() -> None:
    """Run all variants of all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--models", nargs="*", default=["mlp", "gpt"])
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, given.precision)
    for name in given.models:
        stock = 0.0
        for variant in CONFIGS:
            ms, reserved, notes = run(name, variant, given)
            stock = stock or ms
            print(f"{name:6}{variant:16}{ms:9.3f} ms{stock / ms:8.2f}x{reserved:8} MB  {notes}", flush=True)


if __name__ == "__main__":
    main()
