"""Hooks that a module is given after dynamo compiled it: :class:`HookWatch`."""

from torch import nn

from lightning_ort.compat.torch import hooks_made, hooks_of


class HookWatch:
    """Tells when a module or one of its children has new hooks.

    Dynamo traces the hooks that are there when it compiles, and looks for no others: to look at each module in each
    step would cost more than a small step. So each step only compares how many hooks there have ever been.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: tuple[int, set[int]] = (-1, set())  # how many there had ever been, and which the module had

    def found_new(self) -> bool:
        """Return whether there are hooks that were not there at the last call."""
        before, known = self._seen
        if (made := hooks_made()) == before:
            return False
        self._seen = made, hooks_of(self._module)
        return not self._seen[1] <= known
