"""Files written by ``torch.save``, read without running code that is in them: :func:`load`.

Reading a pickle calls any function that the pickle names. ``torch.load(weights_only=True)`` calls only those that make
tensors and plain values.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from lightning_ort.compat.deepspeed import CHECKPOINT_CLASSES
from lightning_ort.compat.torch_optimizers import refused_global, unpickling_reason


class NotTrusted(ValueError):
    """A file names functions or classes that reading it would call."""

    def __init__(self, file: Path, names: list[str]) -> None:
        super().__init__(
            f"{file} was not loaded: loading it would call {', '.join(names)}, which may do anything on this machine."
        )


class _Unread:
    """Stands for an object of DeepSpeed, which need not be installed."""

    def __new__(cls, *args: Any) -> "_Unread":
        return super().__new__(cls)


_HARMLESS: list[Any] = [(_Unread, name) for name in CHECKPOINT_CLASSES]


def load(file: Path, trust: bool = False, device: str = "cpu") -> Any:
    """Read a file written by ``torch.save``; on the device ``"meta"`` without the elements of its tensors.

    ``NotTrusted`` if it names what is not known to be harmless, without ``trust``; ``ValueError`` if it cannot be read.
    """
    try:
        with safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(file, map_location=device, weights_only=not trust)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # other files and damaged ones raise errors of many types
        if not trust and (names := _refused(file, error)):
            raise NotTrusted(file, names) from None
        reason = unpickling_reason(error) or "it has no content"
        raise ValueError(f"{file} is not a file that torch.save has written, or is damaged: {reason}") from None


def _refused(file: Path, error: Exception) -> list[str]:
    """Return what a file names that is not known to be harmless."""
    try:
        with safe_globals(_HARMLESS):
            return sorted(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # a file in torch's older format: the error names the first of them
        return refused_global(error)
