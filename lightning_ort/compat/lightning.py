"""Private and undocumented names of Lightning, in ``lightning.pytorch`` and ``pytorch_lightning`` alike."""

from typing import Any

# captured steps


def lightning_optimizers(strategy: Any) -> list[Any]:
    """Return a strategy's wrapped optimizers: a new list whenever the optimizers are replaced (Lightning 2.6)."""
    return strategy._lightning_optimizers


def is_compiled_by_lightning(module: Any) -> bool:
    """Whether a LightningModule was compiled before the Trainer got it; of any other module, no (Lightning 2.6)."""
    return getattr(module, "_compiler_ctx", None) is not None
