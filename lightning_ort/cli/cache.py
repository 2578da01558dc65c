"""``lightning-ort cache``: what is kept between runs."""

import sys
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.filesize import decimal

from lightning_ort.compiler.cache import default_folder, files


def cache(action: Literal["info", "clear"], folder: Path | None = None) -> None:
    """Show or delete the ONNX models and placement decisions that are kept between runs.

    Args:
        action: info says how many there are and how much room they take; clear deletes them.
        folder: The cache_dir of the runs, if they have one of their own.

    """
    folder = folder or default_folder()
    found = files(folder)
    room = decimal(sum(path.stat().st_size for path in found))
    if action == "clear":
        for path in found:
            path.unlink(missing_ok=True)
        Console().print(f"{folder}: {len(found)} files deleted, {room}", soft_wrap=True)
        return
    if not found:
        sys.exit(f"{folder}: nothing is kept here.")
    graphs = sum(path.name.startswith("graph-") for path in found)
    models = sum(path.suffix == ".onnx" for path in found)
    Console().print(f"{folder}: {graphs} graphs and {models} regions, {room}", soft_wrap=True)
