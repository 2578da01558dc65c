"""``lightning-ort cache``: shows or deletes what is kept between runs."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.filesize import decimal

from lightning_ort._text import say
from lightning_ort.compiler.cache import cache_folder
from lightning_ort.compiler.cache.cache_folder import default_folder


def add_arguments(parser: ArgumentParser) -> None:
    """Add what :func:`cache` takes."""
    text = "info shows number and size; clear deletes the files"
    parser.add_argument("action", choices=("info", "clear"), metavar="info|clear", help=text)
    parser.add_argument("--folder", type=Path, help="the cache_dir of the runs, if it is not the default one")


def cache(given: Namespace) -> None:
    """Show or delete the ONNX models and placement decisions that are kept between runs."""
    folder = given.folder or default_folder()
    try:
        kept, partial = cache_folder.entries(folder), cache_folder.partial_files(folder)
        if given.action == "clear":
            room = sum(_delete(path) for path in (*kept, *partial))
            say(f"{folder}: {len(kept) + len(partial)} files deleted, {decimal(room)}")
            return
        obstacle = cache_folder.untrusted_reason(folder) if kept else None
        room = sum(map(_size, kept))
    except OSError as error:
        sys.exit(f"{folder}: {error}")
    if not kept:
        sys.exit(f"{folder}: the cache is empty.")
    graphs = sum(path.name.startswith("graph-") for path in kept)
    models = sum(path.suffix == ".onnx" for path in kept)
    say(f"{folder}: {graphs} graphs and {models} regions, {decimal(room)}")
    if obstacle is not None:
        say(f"This cache is not used: {obstacle}")


def _delete(path: Path) -> int:
    size = _size(path)
    path.unlink(missing_ok=True)
    return size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a writer has finished, or another process has cleared the folder
        return 0
