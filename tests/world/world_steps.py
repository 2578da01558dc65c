"""A step, observed as a recording observes it."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_ort.world import World


def observed(step: Callable[..., Any], *arguments: Any) -> World:
    """The world of a step and its backward pass."""
    world = World(step, arguments)
    with world.watched():
        loss = step(*arguments)
    loss = loss["loss"] if isinstance(loss, dict) else loss
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        with world.watched():
            loss.backward()
    world.close()
    return world


def reasons(world: World) -> str:
    """Why it is open."""
    return "; ".join(map(str, world.openings))
