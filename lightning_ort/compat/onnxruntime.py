"""The private and undocumented parts of onnxruntime that the package uses, one function for each."""

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import onnx
    import onnxruntime


def import_onnxruntime() -> ModuleType:
    """Import onnxruntime without ORTModule, which the training build imports by itself (onnxruntime 1.19).

    ORTModule does not import with current versions of torch. The attempt takes seconds and 40 MB, imports DeepSpeed if
    it is installed, and leaves ``torch.utils.checkpoint.checkpoint`` replaced. A later ``import onnxruntime.training``
    works as usual.
    """
    name = "onnxruntime.training"
    if "onnxruntime" not in sys.modules:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None makes the import fail
    try:
        return importlib.import_module("onnxruntime")
    finally:
        if sys.modules.get(name, sys) is None:
            del sys.modules[name]


def new_binding(session: "onnxruntime.InferenceSession") -> Any:
    """Return an IO binding of the session without its Python wrapper, whose checks take time (onnxruntime 1.19)."""
    return session.io_binding()._iobinding


def run_function(session: "onnxruntime.InferenceSession") -> Callable[[Any, "onnxruntime.RunOptions"], None]:
    """Return the native function that runs the session on a :func:`new_binding` of it (onnxruntime 1.19)."""
    return session._sess.run_with_iobinding


def memory_of(device: torch.device) -> Any:
    """Return the native name of a device's memory, as a :func:`new_binding` takes it (onnxruntime 1.19)."""
    from onnxruntime.capi.onnxruntime_pybind11_state import OrtDevice

    kind = OrtDevice.cuda() if device.type == "cuda" else OrtDevice.cpu()
    return OrtDevice(kind, OrtDevice.default_memory(), device.index or 0)


def share_cpu_memory(*, in_arena: bool) -> bool:
    """Register where the CPU sessions that set ``session.use_env_allocators`` take memory (onnxruntime 1.19).

    Otherwise each session has its own arena, which grows by powers of two: a GPT's two sessions took 1,179 MB, with a
    shared arena 950 MB, and eager 855 MB. Sessions run one after the other, so they can reuse each other's memory.

    Args:
        in_arena: From an arena, which keeps what it once took; otherwise from malloc, where torch takes it too.

    Returns:
        Whether it is registered; not if the program has registered something itself, which will do, and which
        onnxruntime 1.32 replaces.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as ort

    kind = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR if in_arena else ort.OrtAllocatorType.ORT_DEVICE_ALLOCATOR
    memory = ort.OrtMemoryInfo("Cpu", kind, 0, ort.OrtMemType.DEFAULT)
    same_as_requested = ort.OrtArenaCfg(
        {"max_mem": 0, "arena_extend_strategy": 1, "initial_chunk_size_bytes": -1, "max_dead_bytes_per_chunk": -1}
    )
    try:
        ort.create_and_register_allocator(memory, same_as_requested if in_arena else None)
    except RuntimeError:
        return False
    return True


def binds_bfloat16() -> bool:
    """Return whether a binding takes ONNX's number of a dtype, for bfloat16, which numpy lacks (onnxruntime 1.20)."""
    from onnxruntime.capi.onnxruntime_pybind11_state import SessionIOBinding

    # 1.19 has one overload with an address, and its dtype is a numpy one ("object")
    return SessionIOBinding.bind_input.__doc__.count("OrtDevice") > 1


def ep_devices() -> dict[str, list[Any]]:
    """Return the devices of each provider that a program can add as a plug-in, by its name (onnxruntime 1.23)."""
    import onnxruntime

    found: dict[str, list[Any]] = {}
    for device in getattr(onnxruntime, "get_ep_devices", list)():
        found.setdefault(device.ep_name, []).append(device)
    return found


@contextmanager
def without_device_warning() -> Iterator[None]:
    """Within the block onnxruntime does not warn that the number of a GPU names no plug-in (onnxruntime 1.31).

    Only its default logger has a severity for that, which cannot be read: afterwards it is onnxruntime's own default.
    """
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(2)


def cuda_provider_error() -> str | None:
    """Return why the CUDA provider's library does not load, such as a missing dependency (onnxruntime 1.19)."""
    import onnxruntime

    folder = Path(onnxruntime.__file__).parent / "capi"
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return None


def import_fused_ops() -> None:
    """Import the CUDA extension of ``onnxruntime.training.optim.FusedAdam`` (onnxruntime-training 1.19)."""
    importlib.import_module("onnxruntime.training.ortmodule.torch_cpp_extensions.cuda.fused_ops")


def mark_preprocessed(model: "onnx.ModelProto") -> None:
    """Mark a model as prepared for quantization; the quantizer warns about other models (onnxruntime 1.19)."""
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    add_pre_process_metadata(model)
