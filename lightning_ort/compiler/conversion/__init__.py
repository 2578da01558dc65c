"""ATen ops as ONNX: one short function per op, one file per family.

In reading order:

1. :mod:`registry`: which overload is converted by which function, and how one refuses.
2. :mod:`graph`: the ONNX graph under construction, what converters write to.
3. :mod:`pointwise`: arithmetic, comparison, logic, casts; :mod:`activations`.
4. :mod:`linalg`: matrix products.
5. :mod:`shape`: views, layout, tensors made from sizes.
6. :mod:`reduction`: sums, extrema, variance, norms, sorting.
7. :mod:`indexing`: gather, scatter, slices written to, triangles.
8. :mod:`nn`: normalization, convolution, embedding; :mod:`pooling`: pooling and its gradient.
9. :mod:`loss`: negative log likelihood and its gradient.
10. :mod:`gradients`: backward ops of activations and layers.

Importing this package registers all of them.
"""

from lightning_ort.compiler.conversion import (  # noqa: F401  (they register their converters)
    activations,
    gradients,
    indexing,
    linalg,
    loss,
    nn,
    pointwise,
    pooling,
    reduction,
    shape,
)
from lightning_ort.compiler.conversion.graph import GraphBuilder
from lightning_ort.compiler.conversion.registry import CONVERTERS, Unsupported, converts

__all__ = ["CONVERTERS", "GraphBuilder", "Unsupported", "converts"]
