"""Train a small CNN on scikit-learn's digits with Lightning, and let it learn on in a browser: ``python main.py``.

The folder ``site`` is then the whole page: any web server can serve it. ``--serve`` does so on this machine, at
http://127.0.0.1:8000. onnxruntime-web comes from npm: run ``make node``, or name its folder with ``--onnxruntime-web``.
"""

import argparse
import functools
import http.server
import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ort

HERE = Path(__file__).resolve().parent
RUNTIME = HERE.parents[1] / "tests" / "anywhere" / "node" / "node_modules" / "onnxruntime-web" / "dist"
RUNTIME_FILES = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
PRACTICE = 200  # images that the page trains on beside the user's, so that it forgets none


class Digits(LightningModule):
    """Tells digits of 8 x 8 pixels apart."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(32 * width, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images).softmax(1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch["images"])
        self.log("accuracy", (logits.argmax(1) == batch["labels"]).float().mean(), prog_bar=True)
        return F.cross_entropy(logits, batch["labels"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.net(batch["images"])
        self.log("accuracy", (logits.argmax(1) == batch["labels"]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def as_batch(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Stack rows of a dataset as the fields of a batch."""
    images, labels = zip(*rows, strict=True)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


def train(epochs: int) -> tuple[Trainer, Digits, TensorDataset]:
    """Train as one does with Lightning."""
    seed_everything(0, verbose=False)
    digits = load_digits()
    dataset = TensorDataset(
        torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    )
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False)
    module = Digits()
    trainer.fit(module, DataLoader(dataset, 64, shuffle=True, collate_fn=as_batch))
    return trainer, module, dataset


def write_site(site: Path, runtime: Path, epochs: int) -> None:
    """Export the training and put everything that the page loads into one folder."""
    trainer, module, dataset = train(epochs)
    site.mkdir(exist_ok=True)
    sample = as_batch([dataset[index] for index in range(8)])
    print(lightning_ort.export_training(module, sample, site / "model", optimizer=trainer.optimizers[0]))
    images, labels = dataset[:PRACTICE]
    practice = {"images": images.flatten(1).mul(16).int().tolist(), "labels": labels.tolist()}
    (site / "practice.json").write_text(json.dumps(practice))
    for name in ("index.html", "app.mjs"):
        shutil.copy(HERE / name, site)
    (site / "onnxruntime").mkdir(exist_ok=True)
    for name in RUNTIME_FILES:
        shutil.copy(runtime / name, site / "onnxruntime")


def main() -> None:
    """Train, export and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--site", type=Path, default=HERE / "site")
    parser.add_argument("--onnxruntime-web", type=Path, default=RUNTIME)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    write_site(options.site, options.onnxruntime_web, options.epochs)
    if options.serve:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(options.site))
        with http.server.ThreadingHTTPServer(("127.0.0.1", options.port), handler) as server:
            print(f"http://127.0.0.1:{server.server_port}")
            server.serve_forever()


if __name__ == "__main__":
    main()
