"""Operations as standard operators, for models that run everywhere, where what runs in training will not do.

:mod:`~lightning_ort.compiler.executors.ort.conversion.registry`, the table that they are in, says which one holds.

- :mod:`.decomposed`: backward operations as functions of others, which torch traces instead
- :mod:`.resampled`: average pooling and interpolation
- :mod:`.random`: random numbers; :mod:`.left_to_torch`: what runs leave to PyTorch
- :mod:`.sequences`: CTC and packed sequences
"""

from lightning_ort.onnx_export.training.forms import decomposed, left_to_torch, random, resampled, sequences  # noqa: F401  (they register their functions)
