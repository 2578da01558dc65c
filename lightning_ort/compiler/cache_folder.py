"""The folder of the cache: whether it may be trusted, and files in it that are whole or not there.

What is read from it becomes models that run in this process. So a folder that others can write to is not used.
"""

import logging
import os
import re
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

# far above what is written: a model has shapes and scalars in it, no weights
MAX_BYTES = 64 << 20
_NAME = r"(graph|op|region)-[0-9a-f]{64}\.(json|onnx)"
_ENTRY = re.compile(_NAME)
# what a killed writer leaves; the second form is that of earlier versions
_PARTIAL = re.compile(rf"{_NAME}\.[a-z0-9_]+\.tmp|tmp[a-z0-9_]{{8}}\.tmp")
_DAY = 24 * 60 * 60


def entries(folder: Path) -> list[Path]:
    """Return the files of a cache folder; others that are there do not count."""
    return _files(folder, _ENTRY)


def partial_files(folder: Path) -> list[Path]:
    """Return what writers have begun, in this moment or before they were killed."""
    return _files(folder, _PARTIAL)


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as found:
        return sorted(
            folder / item.name for item in found if pattern.fullmatch(item.name) and item.is_file(follow_symlinks=False)
        )


def prepare(folder: Path) -> str | None:
    """Make a folder for oneself alone, or see that it is one, and take away what killed writers have left in it.

    Returns:
        Why it is not used and what to do about it, or ``None``.

    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (obstacle := why_not_trusted(folder)) is not None:
            return obstacle
        for path in partial_files(folder):
            if _is_abandoned(path):
                path.unlink(missing_ok=True)
    except OSError as error:
        return f"{folder} cannot be used ({error})"
    return None


def why_not_trusted(folder: Path) -> str | None:
    """Return who else may have put something into a folder, and what to do about it, or ``None``."""
    if not hasattr(os, "getuid"):  # Windows, where the user's own folders are for the user alone
        return None
    status = folder.stat()
    if status.st_uid != os.getuid():
        return (
            f"{folder} belongs to user {status.st_uid}, and this process runs as user {os.getuid()}. Choose a folder of"
            " your own, by ORTConfig(cache_dir=...) or LIGHTNING_ORT_CACHE_DIR."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"other users can write to {folder} (mode {stat.S_IMODE(status.st_mode):o}), and what is kept there is run."
            f" If nobody else has: `chmod 700 {folder}`, or choose another folder, by ORTConfig(cache_dir=...) or"
            " LIGHTNING_ORT_CACHE_DIR."
        )
    return None


def _is_abandoned(path: Path) -> bool:
    """Whether the process that was writing a file is gone: it held a lock on it, which the system has taken back."""
    try:
        if time.time() - path.stat().st_mtime > _DAY:
            return True
        if fcntl is None:
            return False
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is locked, or has become an entry, or the file system knows no locks
        return False
    return True


def read(path: Path) -> bytes:
    """Return a file's content; nothing if there is none, or more than is ever written."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            return b""
        return path.read_bytes()
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            log.debug("%s cannot be read: %s", path, error)
        return b""


def write(path: Path, content: bytes) -> None:
    """Write a file aside and put it in its place; too large a one is left out.

    Raises:
        OSError: If it cannot be written; nothing is left of it.

    """
    if len(content) > MAX_BYTES:
        return
    partial = ""
    try:
        prefix = f"{path.name}."
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=prefix, suffix=".tmp", delete=False) as file:
            partial = file.name
            if fcntl is not None:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content)
        os.replace(partial, path)
    except BaseException as error:
        if partial:
            with suppress(OSError):
                os.unlink(partial)
        if isinstance(error, FileNotFoundError) and path.parent.is_dir():
            return  # another process has taken it for abandoned, in the moment without a lock: it is kept next time
        if isinstance(error, PermissionError) and os.name == "nt" and path.exists():
            return  # Windows: another process reads what is there
        raise
