"""Private and undocumented names of Lightning, in both of its namespaces."""

# DeepSpeed

from typing import Any

import torch


def has_training_data(trainer: Any) -> bool:
    """Return whether the Trainer has a training dataloader, or a module or datamodule with one (Lightning 2.6)."""
    return trainer.fit_loop._data_source.is_defined()


def deepspeed_dtype(plugin: Any) -> torch.dtype:
    """Return the dtype in which DeepSpeed trains under a ``DeepSpeedPrecision`` (Lightning 2.6)."""
    return plugin._desired_dtype
