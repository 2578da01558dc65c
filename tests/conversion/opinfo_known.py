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
        "singular vectors of a random projection: the float64 reference draws other random numbers, so the size of"
        " rounding is unknown; for nearly equal singular values, any vectors that span the same space are correct",
    ),
    Known(
        ("linalg_pinv", "linalg_pinv_hermitian", "pinverse"),
        "the gradient of the inverse of a matrix with singular values near 0: no digit of it is correct in eager's"
        " float64 either",
        detail="gradient",
        values=("tiny",),
        dtypes=("float64",),
    ),
    Known(
        ("native_layer_norm", "native_group_norm"),
        "the mean of a row with an infinity is infinity; eager's running mean gives NaN. Only code that calls the"
        " native op sees it",
        detail="output 1",
        values=("nan", "inf"),
    ),
    Known(
        ("native_group_norm",),
        "when the native op is called, eager reads a non-contiguous weight as if it were contiguous",
        variants=("transposed", "stride 0"),
    ),
    Known(
        ("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"),
        "torch's own decomposition counts an index from the end, where eager takes the first element; public ops never"
        " pass an index out of range",
        values=("limits",),
    ),
    Known(
        ("nn_functional_multi_margin_loss",),
        "of no rows eager's kernel writes nothing: the result is what its memory held",
        detail="(0, 5), (0,)",
    ),
    Known(
        ("nn_functional_normalize",),
        "the gradient of a vector of one number is the difference of two equal terms, 1e8 for a vector of length 1e-8;"
        " what rounding leaves of them, 0 or 16, lies in other elements than in eager",
        detail="gradient",
        values=("tiny",),
        dtypes=("float32",),
    ),
    Known(
        ("logit",),
        "the gradient at -0.0 is an infinity whose sign differs between torch's vectorized loop and its loop over the"
        " remaining elements; here it has the sign of the vectorized loop everywhere",
        detail="gradient",
        values=("nan", "tiny"),
    ),
    Known(
        ("nn_functional_celu", "nn_functional_elu", "nn_functional_hardswish"),
        "the gradient at a NaN differs between torch's vectorized loop and its loop over the remaining elements; here"
        " it is that of the vectorized loop everywhere",
        detail="gradient",
        values=("nan",),
    ),
    Known(
        ("normal",),
        "torch traces the result with the layout of the mean, where its kernel's is contiguous",
        detail="strides",
        variants=("transposed",),
    ),
    Known(
        ("resize_as_",),
        "when torch captures a resize of memory, the layout is lost",
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
