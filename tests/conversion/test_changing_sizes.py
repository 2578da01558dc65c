"""Every row of the op table with a size that changes from call to call, as the last batch of an epoch is smaller."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort.conversion.metadata import axis_of
from lightning_ort.config import ORTConfig
from tests.conversion.changing_sizes import Sizes, changes, check_sizes
from tests.conversion.harness import TOLERANCES, compare, torch_reasons
from tests.conversion.op_table import TABLE, Op
from tests.conversion.samples import build

# whose functions name all sizes, or whose inputs have none
FIXED = {"eye", "view", "view_of_strided", "sizes_to_tensors", "arange_step"}
FIXED |= {f"{name}_zero_dim" for name in ["add", "exp", "softmax", "sum", "mean", "amax", "amin", "argmax", "cumsum"]}
FIXED |= {"flip_scalar", "repeat_scalar"}
# eager's kernel divides by the size, which ends the process (torch 2.13)
NEVER_EMPTY = {"weight_norm", "weight_norm_last"}


# the table begins with what is done to each element, whatever sizes there are: enough if that is tried now and then
NAMES = [op.name for op in TABLE]
WITH_SIZES = TABLE[NAMES.index("softmax") :]


def calls(op: Op, dtype: torch.dtype, few: bool) -> list[Sizes]:
    return list(changes(op.fn, build(op.inputs, dtype), few, op.name not in NEVER_EMPTY))


def check(op: Op, dtype: torch.dtype, chosen: Sequence[Sizes], **config: object) -> None:
    for sizes in chosen:
        torch._dynamo.reset()
        check_sizes(op.fn, sizes, tolerance=op.tolerance.get(dtype, TOLERANCES[dtype]), **config)


@pytest.mark.parametrize("op", WITH_SIZES, ids=lambda op: op.name)
def test_first_size(op: Op) -> None:
    chosen = calls(op, op.dtypes[0], few=False)[:1]
    assert bool(chosen) == (op.name not in FIXED)
    check(op, op.dtypes[0], chosen)


@pytest.mark.slow
@pytest.mark.parametrize("op", TABLE, ids=lambda op: op.name)
def test_every_size_down_to_none(op: Op) -> None:
    for dtype in op.dtypes:
        chosen = calls(op, dtype, few=True)
        for kernels in ("auto", "standard") if op.gradient_kernels else ("auto",):
            check(op, dtype, chosen, kernels=kernels)


@pytest.mark.parametrize(
    ("shape", "groups", "rows"),
    [
        ((8,), 2, (6, 5, 4)),
        ((8,), 1, (6, 5, 1)),
        ((8, 3), 2, (6, 5, 4)),
        ((8, 2, 2), 2, (6, 5, 4)),
        ((8,), 1, (32768,)),  # longer than what one sum takes
        ((8,), 2, (32768,)),
    ],
)
@pytest.mark.parametrize("kernels", ["auto", "standard"])
def test_group_norm(shape: tuple[int, ...], groups: int, rows: Sequence[int], kernels: str) -> None:
    """Its sums are over another shape than its input has."""

    def fn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, groups, weight, bias).sin()

    torch.manual_seed(0)
    weights = [torch.randn(shape[0], requires_grad=True) for _ in range(2)]
    calls = [[torch.randn(size, *shape, requires_grad=True), *weights] for size in rows]
    tolerance = 1e-3 if rows[0] > 1000 else 1e-5  # of sums of so many
    report = check_sizes(fn, Sizes(rows[0], calls), tolerance=(tolerance, tolerance), kernels=kernels)
    assert report.ort_runs == 2 * len(rows)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_out_of_range_is_an_error(dim: int) -> None:
    with pytest.raises(IndexError, match=f"dimension {dim} of a tensor with 2"):
        axis_of(dim, 2)


EMPTY: list[tuple[str, Callable[..., torch.Tensor]]] = [
    ("topk", lambda x: x.topk(3).values),  # these kernels of onnxruntime 1.19 end the process
    ("softmax", lambda x: x.softmax(-1)),
    ("sort", lambda x: x.sort(-1).values),
    ("amax", lambda x: x.amax(-1)),
    ("mean", lambda x: x.mean(0)),
    ("matmul", lambda x: x.t() @ x),
]


@pytest.mark.parametrize(("name", "fn"), EMPTY, ids=[name for name, _ in EMPTY])
def test_an_empty_batch_stays_in_torch(name: str, fn: Callable[..., torch.Tensor]) -> None:
    report = compare(fn, [torch.randn(0, 6)], tolerance=TOLERANCES[torch.float32], fallback="raise")
    assert report.ort_runs == 0
    assert any("an empty tensor" in str(reason) for reason in torch_reasons(report).values())


def test_an_empty_batch_that_torch_cannot_trace() -> None:
    """Its formula for the gradient of a mean divides by the number of elements (2.13)."""
    inputs = [torch.randn(0, 6, requires_grad=True), torch.randn(0, 6)]
    backend = ORTBackend(ORTConfig(placement="always", fallback="raise"))
    compiled = torch.compile(F.mse_loss, backend=backend)
    loss = compiled(*inputs)
    loss.backward()
    assert loss.isnan()
    assert any("an input is empty" in note for note in map(str, backend.report.notes))
