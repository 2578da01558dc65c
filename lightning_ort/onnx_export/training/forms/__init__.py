"""Operations as standard operators, for models that run everywhere, where what runs in training will not do.

:mod:`~lightning_ort.compiler.executors.ort.conversion.registry`, the table that they are in, says which one holds.

- :mod:`.decomposed`: backward operations as functions of others, which torch traces instead
- :mod:`.resampled`: average pooling and interpolation
- :mod:`.contributed`: gelu, matrix products and empty tensors
- :mod:`.random`: random numbers; :mod:`.sums`: sums at repeated places
- :mod:`.sequences`: CTC and packed sequences
"""

from lightning_ort.onnx_export.training.forms import contributed, decomposed, random, resampled, sequences, sums  # noqa: F401  (they register their functions)
