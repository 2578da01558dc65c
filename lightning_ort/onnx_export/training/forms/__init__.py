"""Operations as standard operators, for models that run everywhere.

- :mod:`.decomposed`: backward operations as functions of others, which torch traces instead
- :mod:`.contributed`: matrix contributed; :mod:`.random`: dropout; :mod:`.sums`: sums at repeated places
"""

from lightning_ort.onnx_export.training.forms import contributed, random, sums
from lightning_ort.onnx_export.training.forms.decomposed import DECOMPOSED

__all__ = ["DECOMPOSED", "contributed", "random", "sums"]
