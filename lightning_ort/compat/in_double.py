"""Operations that compute as exactly as they can: :class:`InDouble`."""

from typing import Any

import torch
from torch.utils import _pytree

from lightning_ort.compat.torch import OpOverload, TorchDispatchMode

_LESS_EXACT = (torch.float32, torch.float16, torch.bfloat16)


class InDouble(TorchDispatchMode):
    """In its block each operation is computed in float64, and its results are rounded to the dtypes that they have.

    What draws random numbers or writes to its inputs runs as it is (torch 2.13).
    """

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operation."""
        result = func(*args, **(kwargs or {}))
        has_views = any(one.alias_info is not None for one in (*func._schema.arguments, *func._schema.returns))
        if has_views or torch.Tag.nondeterministic_seeded in func.tags:
            return result
        try:
            exact = func(*_pytree.tree_map(_in_double, args), **_pytree.tree_map(_in_double, kwargs or {}))
        except Exception:  # one that has no float64
            return result
        results, form = _pytree.tree_flatten(result)
        return _pytree.tree_unflatten(
            [_rounded(*pair) for pair in zip(results, _pytree.tree_leaves(exact), strict=True)], form
        )


def _in_double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype in _LESS_EXACT else value


def _rounded(result: Any, exact: Any) -> Any:
    if isinstance(result, torch.Tensor) and result.dtype in _LESS_EXACT and exact.shape == result.shape:
        return exact.to(result.dtype)
    return result
