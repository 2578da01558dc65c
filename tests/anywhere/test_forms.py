"""Operations that are written otherwise for training everywhere: results and gradients are eager's."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.anywhere.coverage import check_call, examine
from tests.conversion.samples import Sample, ints, normal, values

OPS = """
    _adaptive_avg_pool2d.default avg_pool2d.default avg_pool2d_backward.default upsample_bilinear2d.vec
    upsample_nearest2d.vec grid_sampler_2d.default _cdist_forward.default _pdist_forward.default prod.dim_int
    replication_pad2d.default masked_scatter.default empty.memory_format convolution_backward.default
    embedding_dense_backward.default index_put.default gelu.default bmm.default native_dropout.default
"""


@pytest.mark.parametrize("name", OPS.split())
def test_op(name: str) -> None:
    packet, _, overload = name.partition(".")
    assert examine(getattr(getattr(torch.ops.aten, packet), overload)) is None


def convolution(x: Tensor, weight: Tensor, bias: Tensor, **settings: Any) -> Tensor:
    return (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3](x, weight, bias, **settings)


def transposed(x: Tensor, weight: Tensor, bias: Tensor, **settings: Any) -> Tensor:
    return (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[x.dim() - 3](x, weight, bias, **settings)


CALLS: dict[str, tuple[Any, list[Sample], dict[str, Any]]] = {
    "conv1d, stride": (convolution, [normal(3, 2, 9), normal(4, 2, 3), normal(4)], {"stride": 2, "padding": 1}),
    "conv2d, groups": (
        convolution,
        [normal(2, 4, 7, 6), normal(6, 2, 3, 2), normal(6)],
        {"groups": 2, "stride": (2, 1)},
    ),
    "conv2d, depthwise, dilation": (
        convolution,
        [normal(2, 3, 9, 8), normal(3, 1, 3, 3), normal(3)],
        {"groups": 3, "dilation": (2, 1), "padding": (2, 1)},
    ),
    "conv3d": (convolution, [normal(2, 2, 5, 4, 6), normal(3, 2, 2, 3, 2), normal(3)], {"padding": 1, "stride": 2}),
    "transposed conv2d": (
        transposed,
        [normal(2, 4, 5, 4), normal(4, 3, 3, 2), normal(6)],
        {"stride": 2, "padding": 1, "output_padding": (1, 0), "groups": 2},
    ),
    "embedding, repeated": (F.embedding, [ints(40, high=3), normal(3, 4)], {"padding_idx": 1}),
    "index_add": (lambda x, i, y: x.index_add(1, i, y, alpha=2), [normal(3, 4), ints(7, high=4), normal(3, 7)], {}),
    "two indices": (
        lambda x, i, j: x[i, :, j],
        [normal(4, 3, 5), ints(9, high=4), values([0, 1, 4] * 3, torch.int64)],
        {},
    ),
    "overlapping windows": (lambda x: x.unfold(1, 3, 1), [normal(2, 8)], {}),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"), [normal(1, 2, 5, 4)], {}),
    "nearest": (lambda x: F.interpolate(x, scale_factor=(2.3, 1.0), mode="nearest"), [normal(1, 2, 3, 6)], {}),
    "uneven pooling": (lambda x: F.avg_pool2d(x, (3, 2), 2, 1, True, False), [normal(1, 2, 6, 5)], {}),
    "a mask and a number": (lambda x: x.index_put((x > 0,), torch.tensor(2.0)), [normal(3, 4)], {}),
    "bags of an embedding": (
        lambda i, w, s: (
            F.embedding_bag(i, w, torch.tensor([0, 2, 2, 7]), mode="mean", include_last_offset=True)
            + F.embedding_bag(i, w, torch.tensor([1, 1, 7]) - 1, mode="sum", per_sample_weights=s, padding_idx=2)
        ),
        [ints(7, high=5), normal(5, 3), normal(7)],
        {},
    ),
    "bilinear": (F.bilinear, [normal(2, 3, 4), normal(2, 3, 5), normal(6, 4, 5), normal(6)], {}),
    "cummax, cummin": (
        lambda x: x.cummax(1)[0] * x.cummax(1)[1] + x.cummin(0)[0] * x.cummin(0)[1],
        [values([[1.0, 3.0, 3.0, math.nan, 2.0], [2.0, 1.0, 1.0, 4.0, 4.0], [-1.0, 3.0, 0.0, 0.0, 5.0]])],
        {},
    ),
    "medians": (
        lambda x, y: (x.median(1)[0], *y.median(0, True), x.median(), y.median(), y.kthvalue(3, 1)[0]),
        [normal(4, 6), values([[1.0, math.nan, 2.0], [4.0, 3.0, 0.5], [0.0, 7.0, 8.0]])],
        {},
    ),
    "determinants": (lambda x: (torch.linalg.det(x), torch.linalg.slogdet(x)[1]), [normal(2, 3, 3)], {}),
    "special functions": (
        lambda x, p: (
            *(torch.special.i0(x), torch.special.i1e(x), torch.erfc(x), torch.special.log_ndtr(x)),
            *(torch.special.ndtri(p), torch.erfinv(p), torch.mvlgamma(p + 2, 2), torch.copysign(p, x)),
            *(torch.hypot(x, p), torch.dist(x, p)),
        ),
        [values([-9.0, -3.0, -0.5, 0.2, 3.8, 7.0]), values([1e-6, 0.05, 0.3, 0.5, 0.9, 0.9999])],
        {},
    ),
    "shifts": (
        lambda x, n: (x << n, x >> n, x << 2, x.int() >> 31, x.bitwise_right_shift(n)),
        [values([-(2**62), -7, -1, 5, 2**62 + 1], torch.int64), values([1, 2, 63, 40, 3], torch.int64)],
        {},
    ),
    "counts": (
        lambda x, i, y: (
            *(x.histc(4, -1, 1), x.histc(3), i.bincount(x.detach(), minlength=6)[i], i.bincount(minlength=5) * x),
            *(x.repeat_interleave(i, output_size=9), x.index_reduce(0, i, y, "prod")),
        ),
        [normal(5), values([2, 0, 3, 1, 3], torch.int64), normal(5)],
        {},
    ),
    "covariances": (
        lambda x, w: (torch.cov(x), torch.corrcoef(x), torch.cov(x, correction=0, aweights=w)),
        [normal(3, 6), values([0.5, 1.0, 2.0, 0.1, 0.3, 1.0])],
        {},
    ),
    "linear systems": (
        lambda x, y: (
            *(torch.linalg.solve(x, y), torch.linalg.inv(x[0]), torch.linalg.solve(x, y.mT, left=False)),
            *(torch.cholesky_solve(y, torch.linalg.cholesky(x @ x.mT + torch.eye(4))),),
            torch.linalg.solve_triangular(x.triu() + 3 * torch.eye(4), y, upper=True),
        ),
        [normal(2, 4, 4), normal(2, 4, 3)],
        {},
    ),
    "product with a zero": (lambda x: x.prod(1), [values([[1.0, 0.0, 3.0], [2.0, 4.0, 5.0]])], {}),
}


@pytest.mark.parametrize("case", CALLS)
def test_call(case: str) -> None:
    function, samples, settings = CALLS[case]
    inputs = [sample(torch.float32) for sample in samples]
    check_call(case, lambda *tensors: function(*tensors, **settings), inputs)


def test_sums_at_repeated_places_are_whole_with_several_threads() -> None:
    """ScatterND's threads lose parts of large ones (onnxruntime 1.19)."""
    torch.manual_seed(0)
    weight, tokens = torch.randn(20, 64).requires_grad_(), torch.randint(0, 20, (64, 128))
    for _ in range(3):
        check_call("embedding", F.embedding, [tokens, weight])
