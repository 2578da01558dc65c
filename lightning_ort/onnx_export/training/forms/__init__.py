"""Operations as standard operators, for models that run everywhere.

- :mod:`.decomposed`: backward operations as functions of others, which torch traces instead
- :mod:`.resampled`: average pooling and interpolation
- :mod:`.contributed`: gelu and matrix products; :mod:`.made`: tensors from sizes
- :mod:`.slices`: what is written to; :mod:`.random`: random numbers; :mod:`.sums`: sums at repeated places
- :mod:`.sequences`: CTC and packed sequences
"""

from lightning_ort.onnx_export.training.forms import contributed, made, random, resampled, sequences, slices, sums
from lightning_ort.onnx_export.training.forms.decomposed import DECOMPOSED, taken_apart

__all__ = ["DECOMPOSED", "contributed", "made", "random", "resampled", "sequences", "slices", "sums", "taken_apart"]
