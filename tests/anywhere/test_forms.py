"""Operations that are written otherwise for training everywhere: results and gradients are eager's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.anywhere.coverage import check_call, examine
from tests.conversion.samples import Sample, ints, normal, values

OPS = """
    _adaptive_avg_pool2d.default avg_pool2d.default avg_pool2d_backward.default upsample_bilinear2d.vec
    upsample_nearest2d.vec grid_sampler_2d.default _cdist_forward.default
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
    "a mask and a number": (lambda x: x.index_put((x > 0,), torch.tensor(2.0)), [normal(3, 4)], {}),
}


@pytest.mark.parametrize("case", CALLS)
def test_call(case: str) -> None:
    function, samples, settings = CALLS[case]
    torch.manual_seed(0)
    inputs = [sample(torch.float32) for sample in samples]
    check_call(case, lambda *tensors: function(*tensors, **settings), inputs)


def test_sums_at_repeated_places_are_whole_with_several_threads() -> None:
    """ScatterND's threads lose parts of large ones (onnxruntime 1.19)."""
    torch.manual_seed(0)
    weight, tokens = torch.randn(20, 64).requires_grad_(), torch.randint(0, 20, (64, 128))
    for _ in range(3):
        check_call("embedding", F.embedding, [tokens, weight])
