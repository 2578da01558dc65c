"""ATen ops as ONNX: one short function per op, one file per family.

A converter is called as ``converter(ctx, node, *args, **kwargs)`` with the arguments of the FX node as they are: FX
nodes for tensors and symbolic integers, plain Python values for the rest. It returns a :class:`Value`, or a tuple of
them for an op with several results. Its docstring is the ATen schema, or one of them if it converts several overloads:
``@converts`` compares the names in it with the op's. A backward op is in the file of its forward op, also where torch
decomposes the forward op itself.

- ``ctx.value(x)`` is the value of an argument, of a number too; ``ctx.value(x, dtype)`` casts it. Values compute as
  tensors do, ``(1 - y * y) < 0``, with numbers or with values of their own dtype, and have ``cast``, ``reshape``,
  ``expand``, ``squeeze``, ``unsqueeze``, ``transpose``, ``min``, ``max`` and ``is_nan``.
- ``x.op("Erf")`` or ``ctx.op("Gemm", a, b, c, transB=1)`` emits any operator of opset 18 with its attributes, and takes
  lists of integers for inputs such as axes; ``outputs=2`` returns a tuple, ``dtype=`` is that of the result where it is
  not that of the first input. ``ctx.const(value, dtype)``, ``ctx.ints([0, 1])`` and ``ctx.sizes(sizes)`` are constants,
  the last also with symbolic sizes; ``ctx.shape_tensor(x)`` is a shape when the model runs.
- :mod:`.metadata` says what was traced: ``dtype_of(x)``, ``shape_of(x)``, ``rank_of(x)``, and ``static(sizes)`` whether
  no size is symbolic; it also brings dimensions into form, as ``axis_of(dim, rank)``, and refuses symbolic ones.
- ``raise Unsupported("why")`` for what it cannot express, or for what onnxruntime's kernel does wrong or slowly: the
  node stays in torch, with that reason in the report. Quirks get a comment with the version.
- ``where`` and the functions of :mod:`.elementary` (``exp``, ``log``, ``sqrt``, ...) in place of onnxruntime's own,
  which are slow, or wrong for infinities, NaN and denormals. ``ctx.on_cpu`` says whether the CPU's kernels may run the
  op: what is for these alone, such as sums in float64, is asked for behind it.
- Where a file writes several ops alike, one more is a line there, such as ``unary("exp2", lambda x: 2**x)`` of
  :mod:`.pointwise` for a function of one tensor.
- ``ctx.kernels.has_training("SoftmaxGrad_13")`` asks for a kernel of the training builds; others need it expanded.
  ``@converts(..., timed=True)`` for an op that torch may run much faster, and ``takes_empty=True`` where operands may
  have no elements.
- A model for everywhere (``export --training``) has the same converters, as far as they write standard operators. Where
  one does not, ``@form(...)`` beside it says how the op is written there, or ``@in_parts(...)`` what is traced instead.

That is all for most ops: what has a converter is left whole while the step is traced, is looked for in the installed
onnxruntime, and is timed. ``python -m tests.conversion.opinfo --ops NAME`` says if results are laid out in memory
otherwise than eager's; then the op belongs to ``LAYOUTS`` (:mod:`~lightning_ort.compiler.lowering.decompositions`).

Importing this package registers all of them.
"""

from lightning_ort.compiler.executors.ort.conversion import (  # noqa: F401  (they register their converters)
    activations,
    indexing,
    loss,
    nn,
    normalization,
    pointwise,
    reduction,
    shape,
)
from lightning_ort.compiler.executors.ort.conversion.elementary import where
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.registry import CONVERTERS, Unsupported, converts

__all__ = ["CONVERTERS", "GraphBuilder", "Unsupported", "Value", "converts", "where"]
