"""Modes of PyTorch and Python that decide what calls a step makes."""

import abc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_ort.compat.torch import KERNEL_SETTINGS, mode_stacks

# modes that a step may set for a while, and what tells them
BALANCED = {"grad_enabled", "autocast_enabled", "autocast_dtype", "autocast_cache_enabled", "default_dtype"}
BALANCED |= {"inference_mode_enabled", "anomaly_enabled"}


def modes() -> tuple[Any, ...]:
    """All that is switched for a thread or process."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.is_anomaly_enabled(),
        *[read() for read in KERNEL_SETTINGS],
        mode_stacks(),
        _num_registered() - _registered,  # each ``ABCMeta.register`` makes another
    )


def _num_registered() -> int:
    token: Any = abc.get_cache_token()
    return int(token)


_registered = 0


@contextmanager
def loading_compiler() -> Iterator[None]:
    """Within the block, a compiler is loaded: classes that its modules register are none that a step has met."""
    global _registered
    before = _num_registered()
    try:
        yield
    finally:
        _registered += _num_registered() - before


def random_states() -> tuple[Any, ...]:
    """Where the generators of Python and NumPy are."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ("", b"", 0)
    return (random.getstate(), bytes(state[1]), state[2:])
