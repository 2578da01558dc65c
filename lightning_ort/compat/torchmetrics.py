"""Private names of torchmetrics."""

from typing import Any


def value_of_batch(metric: Any) -> Any:
    """Return what a metric's last call returned, which Lightning logs for the step; a graph may hold this (1.9)."""
    return metric._forward_cache


def set_value_of_batch(metric: Any, value: Any) -> None:
    """Replace what :func:`value_of_batch` returns (1.9)."""
    metric._forward_cache = value


def keywords_of(metric: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return those of a collection's keyword arguments that one of its metrics takes (1.9)."""
    return metric._filter_kwargs(**given)
