"""ATen ops as ONNX: one short function per op, one file per family.

In reading order:

1. :mod:`registry`: which overload is converted by which function, and how one refuses.
2. :mod:`graph`: the ONNX graph under construction, what converters write to.
3. :mod:`elementary`: exp, log, sqrt and their kin, right at the edges too.
4. :mod:`pointwise`: arithmetic, casts; :mod:`logic`: comparison and choice; :mod:`activations`.
5. :mod:`linalg`: matrix products.
6. :mod:`shape`: views, layout, tensors made from sizes.
7. :mod:`reduction`: sums, extrema, variance, norms, sorting.
8. :mod:`indexing`: gather and scatter; :mod:`slices`: slices written to, diagonals, triangles.
9. :mod:`nn`: normalization, convolution, embedding; :mod:`pooling`: pooling and its gradient.
10. :mod:`loss`: negative log likelihood and its gradient.
11. :mod:`gradients`: backward ops of activations and layers; :mod:`piecewise`: of those that are made of pieces.

Importing this package registers all of them.
"""

from lightning_ort.compiler.executors.ort.conversion import (  # noqa: F401  (they register their converters)
    activations,
    gradients,
    indexing,
    linalg,
    logic,
    loss,
    nn,
    piecewise,
    pointwise,
    pooling,
    reduction,
    shape,
    slices,
)
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder
from lightning_ort.compiler.executors.ort.conversion.registry import CONVERTERS, Unsupported, converts

__all__ = ["CONVERTERS", "GraphBuilder", "Unsupported", "converts"]
