"""Start the other processes of a run with the command that started this one.

Lightning builds that command from ``__main__`` and ``sys.argv``. ``lightning-ort run`` sets both to what the script
expects, so the command would be ``python script.py``, which does not know our strategy names.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_command: list[str] | None = None


def started_by(*command: str) -> None:
    """Remember what stands between ``python -m lightning_ort`` and the script's own arguments."""
    global _command
    _command = list(command)


@contextmanager
def as_started() -> Iterator[None]:
    """Within this context ``__main__`` and ``sys.argv`` show our command, if this program was started by it."""
    if _command is None:
        yield
        return
    main: Any = sys.modules["__main__"]
    spec, arguments = main.__spec__, sys.argv
    main.__spec__ = importlib.util.find_spec("lightning_ort.__main__")
    sys.argv = [arguments[0], *_command, *arguments[1:]]
    try:
        yield
    finally:
        main.__spec__, sys.argv = spec, arguments
