"""ATen ops as ONNX: one short function per op, one file per family.

A backward op is converted in the file of its forward op, also where torch decomposes the forward op itself.

In reading order:

1. :mod:`registry`: which overload is converted by which function, and how one refuses.
2. :mod:`metadata`: dtypes and shapes of FX nodes; :mod:`checks`: arguments that are refused or brought into form.
3. :mod:`graph`: the ONNX graph under construction, and its values, which have operators; :mod:`cuda_kernels`: what has
   no kernel on a GPU.
4. :mod:`elementary`: exp, log, sqrt and others, right at the edges too.
5. :mod:`pointwise`: arithmetic, casts; :mod:`logic`: comparison and choice; :mod:`activations`.
6. :mod:`linalg`: matrix products.
7. :mod:`shape`: views, layout, tensors made from sizes.
8. :mod:`reduction`: sums, extrema, variance, norms, sorting.
9. :mod:`indexing`: gather and scatter; :mod:`slices`: slices written to, diagonals, triangles.
10. :mod:`softmax`; :mod:`normalization`; :mod:`nn`: convolution, embedding, dropout; :mod:`pooling`.
11. :mod:`loss`: loss functions.

Importing this package registers all of them.
"""

from lightning_ort.compiler.executors.ort.conversion import (  # noqa: F401  (they register their converters)
    activations,
    indexing,
    linalg,
    logic,
    loss,
    nn,
    normalization,
    pointwise,
    pooling,
    reduction,
    shape,
    slices,
    softmax,
)
from lightning_ort.compiler.executors.ort.conversion.choice import where
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.registry import CONVERTERS, Unsupported, converts

__all__ = ["CONVERTERS", "GraphBuilder", "Unsupported", "Value", "converts", "where"]
