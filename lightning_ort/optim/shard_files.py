"""Files that ``torch.save`` has written, read without running what is in them: :func:`load`.

A pickle can name any function of the machine to be called when it is read. ``torch.load(weights_only=True)`` calls none
but those that make tensors and plain values.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# what DeepSpeed puts into a checkpoint besides tensors and plain values, and nobody here reads
_DEEPSPEEDS = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class NotTrusted(ValueError):
    """A file names functions or classes that reading it would call.

    Args:
        file: The file.
        names: What it names.

    """

    def __init__(self, file: Path, names: list[str]) -> None:
        self.names = names
        super().__init__(
            f"{file} is not read: to read it is to call {', '.join(names)}, which may do anything on this machine."
        )


class _Unread:
    """Stands for an object of DeepSpeed's, whose class need not be there."""

    def __new__(cls, *args: Any) -> "_Unread":
        return super().__new__(cls)


def load(file: Path, trust: bool = False, device: str = "cpu") -> Any:
    """Read a file.

    Args:
        file: Written by ``torch.save``.
        trust: Call whatever it names, too.
        device: Where its tensors go; ``"meta"`` reads none of their elements.

    Raises:
        NotTrusted: If it names something to call that is not known to be harmless.
        ValueError: If it cannot be read.

    """
    try:
        with _deepspeeds_classes(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(file, map_location=device, weights_only=not trust)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # there are as many as ways to be no such file
        if not trust and (names := _refused(file, str(error))):
            raise NotTrusted(file, names) from None
        # torch's own advice in front of it, to trust the file, is not ours
        text = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0] or "it has no content"
        raise ValueError(f"{file} is not a file that torch.save has written, or is damaged: {text}") from None


@contextmanager
def _deepspeeds_classes() -> Iterator[None]:
    with torch.serialization.safe_globals([(_Unread, name) for name in _DEEPSPEEDS]):
        yield


def _refused(file: Path, error: str) -> list[str]:
    """Return what a file names that is not known to be harmless."""
    try:
        with _deepspeeds_classes():
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # of a file in an older form torch says only what it met first
        return re.findall(r"GLOBAL (\S+)", error)[:1]
