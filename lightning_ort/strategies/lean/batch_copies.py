"""Copy batches to a GPU while it computes: :class:`BatchCopies`."""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_utilities.core.apply_func import apply_to_collection

AHEAD = 3  # steps that the host may be ahead: without a limit, as many batches could take memory


@runtime_checkable
class _Moves(Protocol):
    """What Lightning moves, such as a tensor, or an object that knows how."""

    def to(self, *args: Any, **kwargs: Any) -> Any: ...


class BatchCopies:
    """Moves batches as Lightning does, but copies tensors from pinned memory, on a stream of its own.

    Where nothing waits for a GPU, the host comes to the next batch while the GPU computes, and the copy does not wait
    for that step. The stream of the steps waits for the copy, and the host for nothing but a GPU that is far behind.
    ``move`` is Lightning's function, and ``say`` is told if this is given up.
    """

    def __init__(
        self, move: Callable[[Any, torch.device], Any], device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._move, self._device, self._say = move, device, say
        self._stream: Any = torch.cuda.Stream(device)  # None if given up
        self._behind: deque[Any] = deque()  # events between the last steps

    def __call__(self, batch: Any, device: torch.device) -> Any:
        """Return a batch on the device, in memory of its own."""
        if self._stream is not None:
            now = torch.cuda.current_stream(self._device)
            if len(self._behind) == AHEAD and not (event := self._behind.popleft()).query():
                event.synchronize()
            self._behind.append(now.record_event())
            try:
                with torch.cuda.stream(self._stream):
                    batch = apply_to_collection(batch, _Moves, lambda one: self._copy(one, now))
                now.wait_stream(self._stream)
            except RuntimeError as error:  # not all memory can be pinned
                self._stream = None
                self._say(f"batches are copied as Lightning does it: {type(error).__name__}: {error}")
        return self._move(batch, device)  # which leaves what is there

    def _copy(self, one: Any, reader: Any) -> Any:
        is_plain = type(one) is torch.Tensor and one.layout is torch.strided and one.is_contiguous()
        if not is_plain or one.device.type != "cpu" or one.requires_grad:
            return one
        copied = copy_to_gpu(one if one.is_pinned() else one.pin_memory(), self._device)
        copied.record_stream(reader)  # or its memory could be that of a later batch while a step reads it
        return copied


def copy_to_gpu(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy in a GPU's memory, which is there when the stream has come to it."""
    return pinned.to(device, non_blocking=True)
