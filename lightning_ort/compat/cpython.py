"""What is called in processes that are forked."""

import os
from collections.abc import Callable
from typing import Any


def in_forked_children(function: Callable[[], Any]) -> Callable[[], Any]:
    """Call a function in each process that is forked from this one, where there are such."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=function)
    return function
