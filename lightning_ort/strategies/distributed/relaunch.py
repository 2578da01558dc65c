"""Start the other processes of a run as this one was started: :class:`RelaunchMixin`.

Lightning starts them by the command that ``__main__`` and ``sys.argv`` tell of. Under ``lightning-ort run`` these are
the script's, as it expects, and the command would be ``python script.py``: without our strategy names.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object

_command: list[str] | None = None


def started_by(*command: str) -> None:
    """Remember how this program was started.

    Args:
        *command: What stands between ``python -m lightning_ort`` and the script's own arguments.

    """
    global _command
    _command = list(command)


@contextmanager
def _as_started(command: list[str]) -> Iterator[None]:
    """Have ``__main__`` and ``sys.argv`` tell of a command of ours."""
    main: Any = sys.modules["__main__"]
    spec, arguments = main.__spec__, sys.argv
    main.__spec__ = importlib.util.find_spec("lightning_ort.__main__")
    sys.argv = [arguments[0], *command, *arguments[1:]]
    try:
        yield
    finally:
        main.__spec__, sys.argv = spec, arguments


class RelaunchMixin(_DDPStrategy):
    """Has the launcher that runs the script once per device run it by ``lightning-ort run``, if that is how it runs."""

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        start = getattr(self._launcher, "_call_children_scripts", None)  # one that forks or spawns has none
        if start is not None and _command is not None:
            self._launcher._call_children_scripts = _as_started(_command)(start)  # type: ignore[union-attr]
