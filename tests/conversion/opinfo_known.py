"""Differences from eager that are no fault of ours, each with the reason."""

from dataclasses import dataclass, replace

from tests.conversion.opinfo_check import Outcome, Status
from tests.conversion.opinfo_run import Key


@dataclass(frozen=True)
class Known:
    """One of them.

    Args:
        ops: The ops that it is seen in.
        reason: Why it is none of ours.
        detail: What its description contains.
        variants: The memory layouts; all if empty.
        values: The kinds of special values; all if empty.
        dtypes: The dtypes; all if empty.

    """

    ops: tuple[str, ...]
    reason: str
    detail: str = ""
    variants: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def covers(self, key: Key, outcome: Outcome) -> bool:
        """Whether an outcome is of this kind."""
        return (
            key.op in self.ops
            and self.detail in outcome.detail
            and (not self.variants or key.variant in self.variants)
            and (not self.values or outcome.values in self.values)
            and (not self.dtypes or key.dtype in self.dtypes)
        )


KNOWN = [
    Known(
        ("pca_lowrank", "svd_lowrank"),
        "singular vectors of a random projection: float64 draws other numbers, so that nothing says how far rounding"
        " goes, and vectors of values that are nearly the same are any that span the same space",
    ),
    Known(
        ("linalg_pinv", "linalg_pinv_hermitian", "pinverse"),
        "the gradient of the inverse of a matrix with singular values near 0: eager's float64 has no digit of it",
        detail="gradient",
        values=("tiny",),
        dtypes=("float64",),
    ),
    Known(
        ("native_layer_norm", "native_group_norm"),
        "the mean of a row with an infinity is infinity; eager's running mean makes NaN of it. Only who calls the"
        " native op reads it",
        detail="output 1",
        values=("nan", "inf"),
    ),
    Known(
        ("native_group_norm",),
        "eager reads a weight that is not contiguous as if it was, when the native op is called",
        variants=("transposed", "stride 0"),
    ),
    Known(
        ("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"),
        "torch's own decomposition counts an index from the end where eager takes the first; no index out of range"
        " comes from a public op",
        values=("limits",),
    ),
    Known(
        ("native_dropout_backward", "put"),
        "the result is contiguous, where eager's lies as the input does",
        detail="strides",
    ),
    Known(
        ("floor_divide", "div_floor_rounding"),
        "torch traces a division that rounds down with another layout than its kernel gives, where the operands are"
        " transposed and one is broadcast",
        detail="strides",
        variants=("transposed",),
    ),
    Known(
        ("logit",),
        "the gradient at -0.0 is an infinity of one sign in torch's vector loop and of the other in the loop over what"
        " is left over; here it is the first everywhere",
        detail="gradient",
        values=("nan", "tiny"),
    ),
    Known(
        ("normal",),
        "torch traces the result with the layout of the mean, where its kernel's is contiguous",
        detail="strides",
        variants=("transposed",),
    ),
    Known(
        ("resize_as_",),
        "memory that is given another size keeps no layout when torch captures it",
        detail="strides",
        variants=("transposed",),
    ),
]


def explained(key: Key, outcome: Outcome) -> Outcome:
    """The outcome, with the reason where its difference is known."""
    if outcome.status is not Status.MISMATCH:
        return outcome
    for known in KNOWN:
        if known.covers(key, outcome):
            return replace(outcome, status=Status.EXPLAINED, detail=known.reason)
    return outcome
