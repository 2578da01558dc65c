"""The cache folder: whether it can be trusted, and files in it that are either complete or absent.

The files become models and functions that run in this process, so a folder to which other users can write is not used.
"""

import hashlib
import logging
import os
import re
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "LIGHTNING_ORT_CACHE_DIR"

# far more than is ever written: a model contains shapes and scalars, no weights
MAX_BYTES = 64 << 20
_NAME = r"(graphs?|masks|region|start|step)-[0-9a-f]{64}\.(json|onnx|so)"
_ENTRY = re.compile(_NAME)
# what killed writers leave; a living one takes much less than a second
_PARTIAL = re.compile(rf"{_NAME}\.[a-z0-9_]+\.tmp")
_ABANDONED_SECONDS = 60 * 60


def default_folder() -> Path:
    """Return the folder of ``cache_dir="auto"``: ``$LIGHTNING_ORT_CACHE_DIR``, or the user's cache folder."""
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    import platformdirs  # not at the top: many runs look nothing up

    return Path(platformdirs.user_cache_dir("lightning-ort", appauthor=False))


def folder_of(cache_dir: str | None) -> Path | None:
    """Return the folder of a setting if it exists or can be created, and no other user can write to it."""
    if cache_dir is None:
        return None
    folder = default_folder() if cache_dir == "auto" else Path(cache_dir)
    if (reason := prepare(folder)) is None:
        return folder
    log.warning("Nothing is kept between runs: %s", reason)
    return None


def entries(folder: Path, pattern: re.Pattern[str] = _ENTRY) -> list[Path]:
    """Return the cache's own files in a folder."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as found:
        files = [item.name for item in found if pattern.fullmatch(item.name) and item.is_file(follow_symlinks=False)]
    return [folder / name for name in sorted(files)]


def partial_files(folder: Path) -> list[Path]:
    """Return incomplete files: of writers that are at work, or were killed."""
    return entries(folder, _PARTIAL)


def prepare(folder: Path) -> str | None:
    """Create a folder for this user alone, or check an existing one, and delete the files of killed writers.

    Returns why the folder is not used and what to do about it, or ``None``.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (reason := untrusted_reason(folder)) is not None:
            return reason
        for path in partial_files(folder):
            with suppress(FileNotFoundError):  # it has become an entry
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
    except OSError as error:
        return f"{folder} cannot be used ({error})"
    return None


def untrusted_reason(folder: Path) -> str | None:
    """Return which other users may have written to a folder and what to do about it, or ``None``."""
    if not hasattr(os, "getuid"):  # Windows, where users' folders are private
        return None
    status = folder.stat()
    if status.st_uid != os.getuid():
        return (
            f"{folder} belongs to user {status.st_uid}, and this process runs as user {os.getuid()}. Choose a folder of"
            " your own with ORTConfig(cache_dir=...) or LIGHTNING_ORT_CACHE_DIR."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"other users can write to {folder} (mode {stat.S_IMODE(status.st_mode):o}), and what is in it is run."
            f" If nobody else has written to it: `chmod 700 {folder}`. Otherwise choose another folder with"
            " ORTConfig(cache_dir=...) or LIGHTNING_ORT_CACHE_DIR."
        )
    return None


def read(path: Path) -> bytes:
    """Return the content of a file; nothing if it does not exist or is larger than any entry."""
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
    """Write a file, if it is not too large, under another name and rename it; ``OSError`` if that leaves nothing."""
    if len(content) > MAX_BYTES:
        return
    partial = ""
    try:
        prefix = f"{path.name}."
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=prefix, suffix=".tmp", delete=False) as file:
            partial = file.name
            file.write(content)
        os.replace(partial, path)
    except BaseException as error:
        if partial:
            with suppress(OSError):
                os.unlink(partial)
        if isinstance(error, FileNotFoundError) and path.parent.is_dir():
            return  # another process has deleted the file; a later run writes it
        if isinstance(error, PermissionError) and os.name == "nt" and path.exists():
            return  # Windows: another process is reading the existing file
        raise


def read_sealed(path: Path) -> bytes:
    """Return what was written with :func:`write_sealed` under this name; nothing if it is damaged or of another."""
    content = read(path)
    return content[:-_SEAL_BYTES] if content == _sealed(path, content[:-_SEAL_BYTES]) else b""


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file with a checksum of its name and its content."""
    write(path, _sealed(path, content))


def _sealed(path: Path, content: bytes) -> bytes:
    return content + hashlib.sha256(path.name.encode() + b"\0" + content).digest()


_SEAL_BYTES = hashlib.sha256().digest_size
