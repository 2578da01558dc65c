"""Placement decisions kept between runs.

One JSON file a region in ``cache_dir``, named by the SHA-256 of: the region's ONNX model, the versions of onnxruntime,
torch and this package, the execution providers, the CPU's name, torch's thread count, and ``intra_op_threads``. A file
that cannot be read counts as absent. Files appear whole (written aside, then renamed), so several processes may share a
folder.
"""

import hashlib
import json
import logging
import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timing:
    """What a region took, in ms, and the threads of its fastest session.

    Args:
        ort_ms: Median on ONNX Runtime; ``None`` if not timed.
        torch_ms: Median in torch; ``None`` if not timed.
        threads: Intra-op threads.

    """

    ort_ms: float | None
    torch_ms: float | None
    threads: int


def key(model: bytes, providers: tuple[str, ...], intra_op_threads: int | None) -> str:
    """The name under which a region's timing is kept."""
    import onnxruntime

    from lightning_ort import __version__

    parts = (
        onnxruntime.__version__,
        torch.__version__,
        __version__,
        *providers,
        _cpu_name(),
        str(torch.get_num_threads()),
        str(intra_op_threads),
    )
    return hashlib.sha256(model + "\0".join(parts).encode()).hexdigest()


def load(folder: str, name: str) -> Timing | None:
    """The timing kept under ``name``, or ``None``."""
    try:
        return Timing(**json.loads((Path(folder) / f"{name}.json").read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.debug("cache entry %s is unreadable: %s", name, error)
        return None


def store(folder: str, name: str, timing: Timing) -> None:
    """Keep a timing under ``name``."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path, suffix=".tmp", delete=False) as file:
        json.dump(asdict(timing), file)
    os.replace(file.name, path / f"{name}.json")


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
