"""Operations as standard operators, for models that run everywhere, where what runs in training will not do.

:mod:`~lightning_ort.compiler.executors.ort.conversion.registry`, the table that they are in, says which one holds.
"""

from lightning_ort.onnx_export.training.forms import (  # noqa: F401  (they register their functions)
    decomposed,
    left_to_torch,
    mathematics,
    random,
    resampled,
    sequences,
)
