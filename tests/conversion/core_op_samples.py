"""What to call each core ATen op with; every overload by its own schema."""

import math
from typing import Any

import torch

from tests.conversion.samples import bools, distinct, ints, normal, uniform, values

# overload -> calls, each (args, kwargs) with descriptions of tensors in them
Call = tuple[tuple[Any, ...], dict[str, Any]]
SAMPLES: dict[str, list[Call]] = {}


def sample(names: str, *args: Any, **kwargs: Any) -> None:
    """Add a call for each of the overloads, which are separated by spaces."""
    for name in names.split():
        SAMPLES.setdefault(name, []).append((args, kwargs))


# numbers beyond 1, so that they are not all 0 as integers
X, Y, ROW = normal(4, 6, scale=3), normal(4, 6, scale=3), normal(6, scale=3)
POSITIVE = uniform(4, 6, low=1, high=4)
UNIT = uniform(4, 6, low=-0.9, high=0.9)
CUBE = normal(2, 3, 4, scale=3)
IMAGE = normal(2, 3, 6, 6)
VOLUME = normal(1, 2, 4, 4, 4)
MASK = bools(4, 6)

# what elementwise ops are likely to get wrong; with an infinity or a NaN as input gradients are nobody's promise
WEIRD = [-math.inf, -1e30, -20.0, -3.5, -1.0, -1e-6, -0.0, 0.0, 1e-6, 0.5, 1.0, 20.0, 1e30, math.inf, math.nan]
ODD_PAIRS = [
    (values([[x] for x in WEIRD], torch.float32).fixed(), values(WEIRD, torch.float32).fixed()),
    (normal().fixed(), normal().fixed()),
    (normal(0, 3).fixed(), normal(3).fixed()),
]
NAN_ROWS = values([[1.0, math.nan, math.inf], [3.0, -math.inf, 2.0], [math.inf, 1.0, math.nan]], torch.float32).fixed()

# pointwise

UNARY = """
    abs neg relu sigmoid sign tanh trunc ceil cos cosh erf exp expm1 floor round sin sinh tan gelu isinf isnan asinh
    atan log log10 log1p log2 sqrt rsqrt reciprocal acos asin atanh acosh elu leaky_relu hardtanh logical_not
"""
BINARY = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default atan2.default fmod.Tensor
    remainder.Tensor pow.Tensor_Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
    logical_and.default logical_or.default logical_xor.default
"""
# what is left out is described on the page
LEFT_OUT = {"gelu": [math.inf], "rsqrt": [-0.0]}
for _name in UNARY.split():
    _weird = [x for x in WEIRD if str(x) not in map(str, LEFT_OUT.get(_name, []))]
    for _odd in (values(_weird, torch.float32), normal(), normal(0, 3)):
        sample(f"{_name}.default", _odd.fixed())
for _name in BINARY.split():
    for _pair in ODD_PAIRS:
        sample(_name, *_pair)
sample("abs.default neg.default relu.default sigmoid.default sign.default tanh.default trunc.default", X)
sample("ceil.default cos.default cosh.default erf.default exp.default expm1.default floor.default round.default", X)
sample("sin.default sinh.default tan.default gelu.default isinf.default isnan.default asinh.default atan.default", X)
sample("log.default log10.default log1p.default log2.default sqrt.default rsqrt.default reciprocal.default", POSITIVE)
sample("acos.default asin.default atanh.default", UNIT)
sample("acosh.default", POSITIVE)
sample("elu.default leaky_relu.default hardtanh.default alias.default clone.default logical_not.default", X)
sample("gelu.default", X, approximate="tanh")
sample("add.Tensor sub.Tensor mul.Tensor maximum.default minimum.default atan2.default", X, ROW)
sample("add.Tensor sub.Tensor", X, normal(4, 1, scale=3), alpha=2)
sample("atan2.out", X.fixed(), Y.fixed(), out=normal(4, 6).fixed())
sample("add.Scalar sub.Scalar mul.Scalar div.Scalar", X, 2)
sample("div.Tensor fmod.Tensor remainder.Tensor", X, POSITIVE)
sample("div.Tensor_mode", X.fixed(), POSITIVE.fixed(), rounding_mode="floor")
sample("div.Tensor_mode", X.fixed(), POSITIVE.fixed(), rounding_mode="trunc")
sample("div.Scalar_mode", X.fixed(), 2, rounding_mode="floor")
sample("div.Scalar_mode", X.fixed(), -2, rounding_mode="trunc")
sample("fmod.Scalar remainder.Scalar", X, 2)
sample("remainder.Scalar", X, -3)
sample("pow.Tensor_Scalar", POSITIVE, 3)
sample("pow.Tensor_Scalar", POSITIVE, 5)
sample("pow.Tensor_Tensor", POSITIVE, uniform(6, low=1, high=3))
sample("pow.Scalar", 2, POSITIVE)
sample("clamp.default", X, -1, 2)
sample("clamp.default", X, None, 2)
sample("clamp.Tensor", X, values(-1.0), values(2.0))
sample("eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor", X, ROW)
sample("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", X, 1)
sample("logical_and.default logical_or.default logical_xor.default", X, ROW)
sample("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", MASK, bools(6))
sample("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", ints(4, 6, low=-9, high=9), ints(6, high=9))
sample("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar", MASK, True)
sample("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar", ints(4, 6, low=-9, high=9), 5)
sample("bitwise_not.default", MASK)
sample("bitwise_not.default", ints(4, 6, low=-9, high=9))
sample("where.self", MASK, X, ROW)
sample("fill.Scalar", X, 3)
sample("copy.default", X.fixed(), ROW.fixed())
sample("_to_copy.default", X, dtype=torch.float64)
sample("_to_copy.default", X, dtype=torch.int64)

# made from sizes, views, layout

sample("arange.start_step", 1, 9, 2)
sample("full.default", (2, 3), 1.5)
sample("full_like.default", X, 2)
sample("scalar_tensor.default", 2.5)
sample("empty.memory_format", (0, 3))  # what is not there has no value to compare
sample("empty_strided.default", (0, 3), (3, 1))
sample("rand.default randn.default", (2, 3))
sample("randperm.default", 5)
sample("sym_size.int", X, 0)
sample("sym_stride.int", X, 0)
sample("sym_is_contiguous.default", X)
sample("resize_.default", normal(6).fixed(), (2, 3))
sample("sym_numel.default sym_storage_offset.default", X)
sample("view.default", CUBE, (6, 4))
sample("permute.default", CUBE, (2, 0, 1))
sample("unsqueeze.default", CUBE, 1)
sample("squeeze.dim", normal(3, 1, 2, scale=3), 1)
sample("squeeze.dims", normal(3, 1, 2, 1, scale=3), (1, 3))
sample("expand.default", normal(3, 1, scale=3), (5, -1, 4))
sample("repeat.default", normal(3, 1, scale=3), (2, 1, 3))
sample("slice.Tensor", CUBE, 1, 0, 3, 2)
sample("select.int", CUBE, 1, -1)
sample("diagonal.default", X)
sample("diagonal.default", CUBE, -1, 1, 2)
sample("as_strided.default", X, (3, 2), (6, 1), 2)
sample("split_with_sizes.default", X, (1, 3), 0)
sample("cat.default", [X, normal(4, 1, scale=3)], -1)
sample("flip.default", CUBE, (0, -1))
sample("constant_pad_nd.default", CUBE, (1, 2, 0, 1), 3)
sample("reflection_pad1d.default", CUBE, (1, 2))
sample("reflection_pad2d.default", IMAGE, (1, 2, 0, 1))
sample("reflection_pad3d.default", VOLUME, (1, 2, 0, 1, 1, 1))
sample("replication_pad2d.default", IMAGE, (1, 2, 0, 1))
sample("replication_pad3d.default", VOLUME, (1, 2, 0, 1, 1, 1))

# reductions and sorting

for _call in ({}, {"keepdim": True}):
    sample("amax.default amin.default sum.dim_IntList mean.dim any.dims", distinct(2, 3, 4), (0, -1), **_call)
    sample("max.dim min.dim argmax.default argmin.default any.dim prod.dim_int", distinct(2, 3, 4), 1, **_call)
    sample("var.correction", CUBE, (0, 1), correction=1, **_call)
    sample("var.dim", CUBE, (0, 1), True, **_call)
sample("amax.default amin.default", NAN_ROWS, (1,))
sample("max.dim min.dim argmax.default argmin.default", NAN_ROWS, 1)
sample("any.default mean.default prod.default", distinct(2, 3))
sample("cumsum.default", CUBE, 1)
sample("topk.default", distinct(4, 6), 3)
sample("topk.default", distinct(4, 6), 2, 0, False)
sample("topk.default", NAN_ROWS, 2)
sample("topk.default", NAN_ROWS, 2, 0, False)
sample("sort.default", distinct(4, 6), 1, True)
sample("sort.default", NAN_ROWS)
sample("sort.default", NAN_ROWS, 0, True)

# reading and writing by index

_ROWS = ints(3, high=4)
sample("index.Tensor", X, [_ROWS, ints(3, high=6)])
sample("index.Tensor", X, [None, ints(2, 3, high=6)])
sample("index_select.default", X, 1, ints(4, high=6))
sample("gather.default", X, 1, ints(4, 3, high=6))
sample("index_put.default", X, [values([0, 2, 3], torch.int64)], normal(3, 6, scale=3))
sample("index_put.default", X, [_ROWS], normal(3, 6, scale=3), True)
sample("scatter.src", X, 1, values([[0, 2], [1, 3], [4, 5], [0, 1]], torch.int64), normal(4, 2, scale=3))
sample("scatter.value", X, 1, values([[0, 2], [1, 3], [4, 5], [0, 1]], torch.int64), 2)
sample("scatter_add.default", X, 1, ints(4, 3, high=6), normal(4, 3, scale=3))
for _reduction in ("sum", "amax", "amin", "prod", "mean"):
    sample("scatter_reduce.two", X.fixed(), 1, ints(4, 3, high=6), normal(4, 3, scale=3).fixed(), _reduction)
    sample("scatter_reduce.two", X.fixed(), 1, ints(4, 3, high=6), normal(4, 3).fixed(), _reduction, include_self=False)
sample("scatter_reduce.two", NAN_ROWS, 1, ints(3, 3, high=3), normal(3, 3).fixed(), "amax")
sample("scatter_reduce.two", X, 1, ints(4, 3, high=6), normal(4, 3, scale=3), "sum")
sample("masked_scatter.default", X, MASK, normal(24, scale=3))
sample("select_scatter.default", X, ROW, 0, 2)
sample("slice_scatter.default", X, normal(2, 6, scale=3), 0, 1, 3)
sample("slice_scatter.default", X, normal(2, 6, scale=3), 0, 0, 4, 2)
sample("nonzero.default", MASK)
sample("_local_scalar_dense.default", values(3.0).fixed())

# matrix products, layers

sample("mm.default", normal(4, 6), normal(6, 3))
sample("bmm.default", normal(2, 4, 6), normal(2, 6, 3))
sample("addmm.default", normal(3), normal(4, 6), normal(6, 3))
sample("_softmax.default _log_softmax.default", X, -1, False)
sample("native_layer_norm.default", CUBE, (4,), normal(4), normal(4), 1e-5)
_STATISTICS = normal(2, 3).fixed(), uniform(2, 3, low=0.5, high=2).fixed()
sample(
    "native_layer_norm_backward.default",
    *(normal(2, 3, 4).fixed(), normal(2, 3, 4).fixed(), (4,)),
    *(normal(2, 3, 1).fixed(), uniform(2, 3, 1, low=0.5, high=2).fixed()),
    *(normal(4).fixed(), normal(4).fixed(), [True, True, True]),
)
sample("native_group_norm.default", normal(2, 6, 5), normal(6), normal(6), 2, 6, 5, 3, 1e-5)
sample(
    "native_group_norm_backward.default",
    *(normal(2, 6, 5).fixed(), normal(2, 6, 5).fixed(), *_STATISTICS, normal(6).fixed(), 2, 6, 5, 3, [True] * 3),
)
_RUNNING = normal(3).fixed(), uniform(3, low=0.5, high=2).fixed()
sample("_native_batch_norm_legit.default", IMAGE, normal(3), normal(3), *_RUNNING, True, 0.1, 1e-5)
sample("_native_batch_norm_legit.no_stats", IMAGE.fixed(), normal(3).fixed(), normal(3).fixed(), True, 0.1, 1e-5)
sample("_native_batch_norm_legit_no_training.default", IMAGE, normal(3), normal(3), *_RUNNING, 0.1, 1e-5)
sample("native_dropout.default", X, 0.3, True)
_CONV = (1, 1), (1, 1), (1, 1), False, (0, 0), 1
sample("convolution.default", IMAGE, normal(4, 3, 3, 3), normal(4), *_CONV)
sample("convolution.default", IMAGE, normal(3, 4, 3, 3), normal(4), (2, 2), (1, 1), (1, 1), True, (1, 1), 1)
sample(
    "convolution_backward.default",
    *(normal(2, 4, 6, 6).fixed(), IMAGE.fixed(), normal(4, 3, 3, 3).fixed(), [4], *_CONV, [True, True, True]),
)
sample("embedding.default", normal(7, 4), ints(2, 5, high=7), 1)
sample("embedding_dense_backward.default", normal(2, 5, 4).fixed(), ints(2, 5, high=7), 7, -1, False)
sample("_embedding_bag.default", normal(7, 4), ints(5, high=7), values([0, 2], torch.int64))
sample("_cdist_forward.default", normal(4, 3), normal(5, 3), 2.0, None)
sample("_pdist_forward.default", normal(4, 3), 2.0)
sample("grid_sampler_2d.default", IMAGE, uniform(2, 4, 4, 2, low=-1.2, high=1.2), 0, 0, False)
sample("grid_sampler_2d.default", IMAGE, uniform(2, 4, 4, 2, low=-1.2, high=1.2), 0, 1, True)
sample("upsample_bilinear2d.vec", IMAGE, None, False, [2.0, 2.0])
sample("upsample_nearest2d.vec", IMAGE, None, [2.0, 2.0])
sample("col2im.default", normal(2, 12, 9), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1))
sample("_fft_r2c.default", normal(4, 6), [1], 0, True)
sample("_fft_c2r.default", values([[1 + 2j, 3 - 1j, 2 + 0j]], torch.complex64).fixed(), [1], 0, 4)

# pooling

sample("avg_pool1d.default", normal(2, 3, 6), (2,))
sample("adaptive_avg_pool1d.default", normal(2, 3, 6), (3,))
sample("avg_pool2d.default", IMAGE, (2, 2))
sample("avg_pool2d.default", IMAGE, (3, 3), (2, 2), (1, 1))
sample("avg_pool3d.default", VOLUME, (2, 2, 2))
sample(
    "avg_pool2d_backward.default", normal(2, 3, 3, 3).fixed(), IMAGE.fixed(), (2, 2), (2, 2), (0, 0), False, True, None
)
sample(
    "avg_pool2d_backward.default", normal(2, 3, 4, 4).fixed(), IMAGE.fixed(), (3, 3), (1, 1), (0, 0), False, True, None
)
sample("_adaptive_avg_pool2d.default", IMAGE, (3, 2))
sample("_adaptive_avg_pool2d.default", IMAGE, (4, 4))
sample("_adaptive_avg_pool2d_backward.default", normal(2, 3, 3, 2).fixed(), IMAGE.fixed())
sample("_adaptive_avg_pool3d.default", VOLUME, (2, 2, 2))
sample("max_pool2d_with_indices.default", IMAGE, (2, 2))
sample("max_pool2d_with_indices.default", IMAGE, (3, 3), (2, 2), (1, 1), (1, 1), True)
sample("max_pool3d_with_indices.default", VOLUME, (2, 2, 2))
sample(
    "max_pool2d_with_indices_backward.default",
    *(normal(2, 3, 3, 3).fixed(), IMAGE.fixed(), (2, 2), (2, 2), (0, 0), (1, 1), False, ints(2, 3, 3, 3, high=36)),
)
