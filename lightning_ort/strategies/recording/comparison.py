"""Compares a replay with what the step itself does: :func:`difference`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ort.compat.torchscript import below_autograd
from lightning_ort.recording.replay import flatten, rebuilt
from lightning_ort.strategies.recording.recording import Recording

# kinds of what is compared
_RESULT, _LOGGED, _KEPT, _GRADIENT, _WRITTEN = "a result", "a logged value", "what it keeps", "a gradient", "a buffer"
Found = list[tuple[str, Tensor]]  # tensors, with their kinds


def of_replay(recording: Recording, results: Sequence[Tensor], written: Sequence[Tensor], gradients: bool) -> Found:
    """Return what a replay has found: its results, and what it has left in what it writes to."""
    places = recording.places
    parts: list[tuple[str, Sequence[Tensor]]] = [(_RESULT, _tensors_of(recording.output_of(results)))]
    parts.append((_LOGGED, recording.logged(results)))
    # of what was appended, nobody knows what was appended since
    for write, values, _ in recording.writes:
        if write.kind == "item":
            parts.append((_KEPT, _tensors_of(rebuilt(values, lambda value: results[places[value]]))))
    if gradients:
        parts.append((_GRADIENT, results[len(results) - len(recording.parameters) :]))
    return _listed(*parts, (_WRITTEN, written))


def of_step(
    recording: Recording, output: Any, logged: Sequence[Tensor], written: Sequence[Tensor], gradients: bool
) -> Found:
    """Return the same of the step itself."""
    parts: list[tuple[str, Sequence[Tensor]]] = [(_RESULT, _tensors_of(output)), (_LOGGED, logged)]
    for write, _, _ in recording.writes:
        if write.kind == "item":
            owner = dict(enumerate(write.owner)) if type(write.owner) is list else write.owner
            parts.append((_KEPT, _tensors_of(owner.get(write.key))))
    if gradients:
        parts.append((_GRADIENT, [one.grad for one in recording.parameters if one.grad is not None]))
    return _listed(*parts, (_WRITTEN, written))


def _tensors_of(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    flatten(tree, found)
    return found


def _listed(*parts: tuple[str, Sequence[Tensor]]) -> Found:
    return [(kind, one) for kind, found in parts for one in found]


def difference(replay: Found, step: Found, exact: bool) -> str:
    """Return the first kind of tensors that differ, if any; without ``exact`` eager does not repeat its bits."""
    same = are_same if exact else _are_close
    return _first_kind(replay, step, lambda kind, one, other: same(one, other))


def _first_kind(one: Found, other: Found, same: Callable[[str, Tensor, Tensor], bool]) -> str:
    """Return the first kind of tensors that are not the same, or not there in both."""
    for mine, own in itertools.zip_longest(one, other):
        if mine is None or own is None or mine[0] != own[0] or not same(own[0], mine[1], own[1]):
            return str((own or mine)[0])
    return ""


def beyond_roundings(
    engine: Found,
    step: Found,
    rounded: Callable[[Callable[[list[Any]], list[Any]]], Found],
    casts: Sequence[torch.dtype],
) -> str:
    """Return the first kind of tensors of an engine that differ by more than roundings explain, if any.

    Args:
        engine: What it has found.
        step: What the step itself has found.
        rounded: Returns what a replay finds for other inputs, which a function makes of them.
        casts: To which autocast casts.

    """
    from lightning_ort.compiler.running import graph_check  # which nobody needs who compiles nothing

    # roundings decide, for example, which of two classes comes first, but no random state and no counter
    if unlike := _first_kind(engine, step, _are_alike):
        return unlike
    dtype = graph_check.least_exact([one for _, one in (*engine, *step)], casts)
    for kind in dict.fromkeys(kind for kind, _ in step):
        small = graph_check.SMALL if kind == _GRADIENT else 0.0

        def again(seed: int, kind: str = kind) -> dict[str, Tensor]:
            if seed == graph_check.PLAIN:
                return _of_kind(step, kind)
            return _of_kind(rounded(lambda inputs: graph_check.rounded(inputs, seed, dtype)), kind)

        if graph_check.unexplained(_of_kind(engine, kind), again, graph_check.TOLERANCE[dtype], small)[0]:
            return kind
    return ""


def _of_kind(found: Found, kind: str) -> dict[str, Tensor]:
    return {str(n): one for n, (of, one) in enumerate(found) if of == kind and one.is_floating_point()}


def _are_alike(kind: str, one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return kind != _WRITTEN or one.is_floating_point() or are_same(one, other)


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, but for those of NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with torch.no_grad():
        return torch.equal(one, other) or torch.allclose(one, other, 0.0, 0.0, equal_nan=True)


def _are_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    with torch.no_grad(), below_autograd():
        scale = float(other.abs().max()) if other.numel() and other.is_floating_point() else 0.0
        return torch.allclose(one, other, rtol=1e-5, atol=1e-6 * scale, equal_nan=True)
