"""From ATen nodes to ONNX nodes, one small function an op.

- :mod:`.registry`: which overload is converted by which function
- :mod:`.graph`: what converters write to
- one module an op family, imported here so that its converters register
"""

from lightning_ort.compiler.conversion import linalg, pointwise, shape
from lightning_ort.compiler.conversion.registry import CONVERTERS, Unsupported, converts

__all__ = ["CONVERTERS", "Unsupported", "converts", "linalg", "pointwise", "shape"]
