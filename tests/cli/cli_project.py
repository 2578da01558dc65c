"""A LightningCLI project that knows nothing of this package; it is only run, as its users run it."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

# one source for both names of Lightning
pl = importlib.import_module(os.environ.get("PROJECT_USES", "lightning.pytorch"))
cli = importlib.import_module(f"{pl.__name__}.cli")
torch = importlib.import_module("torch")


class Mlp(pl.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8)

    test_dataloader = train_dataloader


class Facts(pl.Callback):  # type: ignore[misc,name-defined]
    """Writes down what this process was and did."""

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        report = getattr(trainer.strategy, "report", None)
        facts = {
            "strategy": type(trainer.strategy).__name__,
            "step": trainer.global_step,
            "report": report and report.to_dict(),
            "weight": next(pl_module.parameters()).tolist(),
            "argv": sys.argv,
            "name": __name__,
        }
        path = Path(trainer.default_root_dir) / f"{trainer.state.fn.value}.{trainer.global_rank}.json"
        path.write_text(json.dumps(facts))


if __name__ == "__main__":
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "callbacks": Facts()}
    cli.LightningCLI(Mlp, trainer_defaults=quiet, seed_everything_default=1, save_config_callback=None)
