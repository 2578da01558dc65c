"""Inductor as an executor of whole graphs: under ``engine="auto"`` it is timed against the others on whole steps."""

from typing import Any, Final

NAME: Final = "inductor"

# arguments of torch.compile; dropout masks are the same as in eager
COMPILE_ARGUMENTS: dict[str, Any] = {"backend": NAME, "options": {"fallback_random": True}}
