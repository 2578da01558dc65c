"""Inductor, torch's own compiler, as an executor of whole graphs: under ``engine="auto"`` whole steps are timed with it."""

from typing import Any, Final

NAME: Final = "inductor"

# arguments of torch.compile; dropout masks are the same as in eager
COMPILE_ARGUMENTS: dict[str, Any] = {"backend": NAME, "options": {"fallback_random": True}}
