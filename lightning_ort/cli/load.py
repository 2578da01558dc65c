"""Find the object that a command line names."""

import importlib
import sys
from pathlib import Path
from typing import Any


def load(path: str, argument: str) -> Any:
    """Import what a path such as ``package.module:name`` or ``path/to/file.py:name`` names.

    Args:
        path: The path.
        argument: The command's argument that it came by, for error messages.

    Raises:
        SystemExit: If it is written in another way, or nothing is there.

    """
    source, _, name = path.rpartition(":")
    if not source:
        sys.exit(f"{argument}={path!r}: write it as package.module:name or path/to/file.py:name.")
    try:
        if source.endswith(".py"):
            sys.path.insert(0, str(Path(source).resolve().parent))
            source = Path(source).stem
        else:
            sys.path.insert(0, "")
        found: Any = importlib.import_module(source)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        sys.exit(f"{argument}={path!r}: {error}")
    return found
