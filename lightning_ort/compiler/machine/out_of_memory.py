"""What to do when something that is timed runs out of memory: tell that it did, and free what it took."""

import gc
import re
import traceback
from collections.abc import Iterator

import torch

from lightning_ort.compiler.machine import malloc

# the words of torch's allocators (2.13), of onnxruntime's (1.19 to 1.31), of CUDA's libraries, of C++
_WORDS = re.compile(
    r"can't allocate memory|not enough memory|failed to allocate memory|out of memory|std::bad_alloc|bad allocation"
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it comes from, is about memory that could not be had."""
    return any(
        isinstance(each, (MemoryError, torch.OutOfMemoryError)) or _WORDS.search(str(each)) for each in causes(error)
    )


def free_memory_of(error: BaseException) -> None:
    """Free what the calls that ended with an error still hold, and give free memory back to whoever may want it."""
    for each in causes(error):
        traceback.clear_frames(each.__traceback__)
    gc.collect()
    give_back_memory()


def give_back_memory() -> None:
    """Give memory that is kept for reuse back to whoever may want it."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    malloc.trim()


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it comes from, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
