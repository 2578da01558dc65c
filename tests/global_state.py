"""What a process has only once, and a run may change: :func:`global_state`."""

import gc
import linecache
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as hooks_of_modules
from torch.optim import optimizer as hooks_of_optimizers
from torch.utils import data

_PLAIN = (bool, int, float, str, bytes, type(None), tuple, frozenset, torch.dtype, torch.device)
_BACKENDS = ("cudnn", "mkldnn", "mha", "opt_einsum", "cuda.matmul", "cpu")
# functions of torch that say how it is set, without arguments
_ASKED = (
    *("torch.get_default_dtype", "torch.get_default_device", "torch.get_num_threads", "torch.get_num_interop_threads"),
    *("torch.is_grad_enabled", "torch.is_inference_mode_enabled", "torch.is_anomaly_enabled"),
    *("torch.is_anomaly_check_nan_enabled", "torch.get_float32_matmul_precision", "torch.is_warn_always_enabled"),
    *("torch.are_deterministic_algorithms_enabled", "torch.is_deterministic_algorithms_warn_only_enabled"),
    *("torch.is_autocast_enabled", "torch.is_autocast_cpu_enabled", "torch.is_autocast_cache_enabled"),
    *("torch.get_autocast_gpu_dtype", "torch.get_rng_state", "torch.initial_seed"),
    *("torch.autograd._profiler_enabled", "torch._C._len_torch_function_stack", "torch._C._len_torch_dispatch_stack"),
    *(
        "torch._C._is_torch_function_enabled",
        "torch._C._get_tracing_state",
        "torch._dynamo.eval_frame.get_eval_frame_callback",
    ),
    "torch._C._autograd._saved_tensors_hooks_is_enabled",
    *("torch.multiprocessing.get_sharing_strategy", "torch.multiprocessing.get_start_method"),
    *("torch.distributed.is_initialized", "torch.utils.data.get_worker_info", "torch.serialization.get_safe_globals"),
    *("torch.serialization.get_default_load_endianness", "torch._C._get_deterministic_fill_uninitialized_memory"),
)


_OF_SYS = (
    *("excepthook", "unraisablehook", "displayhook", "breakpointhook", "stdout", "stderr", "stdin", "flags"),
    *("meta_path", "path_hooks", "path", "argv", "warnoptions"),
)
_ASKED_OF_SYS = (
    *("getrecursionlimit", "getswitchinterval", "gettrace", "getprofile", "get_asyncgen_hooks"),
    *("getdefaultencoding", "get_coroutine_origin_tracking_depth"),
)


def _found(name: str) -> Any:
    package, *names = name.split(".")
    value: Any = sys.modules[package]
    for each in names:
        value = getattr(value, each, None)
    return value


_LIBRARIES = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "numpy"}
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.testing", "torch.onnx", "torch.export")
_OF_PYTHON = {*("sys", "builtins", "os", "gc", "copy", "pickle", "random", "time", "threading", "warnings", "logging")}


def _modules() -> Iterator[tuple[str, ModuleType]]:
    for name, module in sorted(sys.modules.items()):
        is_one = name.partition(".")[0] in _LIBRARIES or name in _OF_PYTHON
        if is_one and not name.startswith(_COMPILERS) and isinstance(module, ModuleType):
            yield name, module


def functions_and_classes() -> dict[str, Any]:
    """Return functions of Python, NumPy, torch and Lightning, with methods and plain attributes of their classes."""
    found: dict[str, Any] = {}
    for name, module in _modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, (FunctionType, BuiltinFunctionType)):
                found[f"{name}.{key}"] = value
            elif isinstance(value, type) and value.__module__ == name:
                for each, item in list(vars(value).items()):
                    if (
                        callable(item)
                        or isinstance(item, (staticmethod, classmethod, property))
                        or type(item) in _PLAIN
                    ):
                        found[f"{name}.{key}.{each}"] = item
    return found


def _torch() -> Iterator[tuple[str, Any]]:
    for name in _ASKED:
        ask = _found(name)
        if callable(ask):
            value = ask()
            yield name, value.tolist() if isinstance(value, torch.Tensor) else value
    for name in _BACKENDS:
        backend = _found(f"torch.backends.{name}")
        for each in dir(backend) if backend is not None else ():
            value = getattr(backend, each, None)
            if not each.startswith("__") and type(value) in _PLAIN:
                yield f"torch.backends.{name}.{each}", value
    for flag in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"):
        yield flag, getattr(torch.backends.cuda, f"{flag}_enabled")()
    for name in ("_dynamo.config", "_inductor.config", "_functorch.config", "fx.config"):
        module = sys.modules.get(f"torch.{name}")
        if module is not None and hasattr(module, "get_config_copy"):
            yield from ((f"torch.{name}.{key}", value) for key, value in module.get_config_copy().items())
    for module in (hooks_of_modules, hooks_of_optimizers):
        hooks = {key: value for key, value in vars(module).items() if key.startswith("_global_")}
        yield from ((key, dict(value)) for key, value in hooks.items() if isinstance(value, dict))
    yield "collate", dict(data._utils.collate.default_collate_fn_map)
    yield "Distribution", torch.distributions.Distribution._validate_args


def _logging() -> Iterator[tuple[str, Any]]:
    yield "logging.disable", logging.root.manager.disable
    yield "logging.class", logging.getLoggerClass()
    for name, logger in [("root", logging.root), *logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger):
            state = (logger.level, logger.disabled, logger.propagate, list(logger.handlers), list(logger.filters))
            yield f"logger {name}", state


def _python() -> Iterator[tuple[str, Any]]:
    yield from ((f"environment {name}", value) for name, value in os.environ.items())
    yield from ((f"signal {number}", signal.getsignal(number)) for number in sorted(signal.valid_signals()))
    yield "signal wakeup", signal.set_wakeup_fd(wakeup := signal.set_wakeup_fd(-1)) and wakeup
    for name in (
        "excepthook",
        "unraisablehook",
        "displayhook",
        "breakpointhook",
        "stdout",
        "stderr",
        "stdin",
        "meta_path",
        "path_hooks",
        "path",
        "argv",
        "flags",
        "warnoptions",
    ):
        value = getattr(sys, name)
        yield f"sys.{name}", list(value) if isinstance(value, list) else value
    for name in (
        "getrecursionlimit",
        "getswitchinterval",
        "gettrace",
        "getprofile",
        "get_asyncgen_hooks",
        "getdefaultencoding",
    ):
        yield f"sys.{name}", getattr(sys, name)()
    yield "threading.excepthook", threading.excepthook
    yield "threads", sorted(thread.name for thread in threading.enumerate())
    yield "warnings", (list(warnings.filters), warnings.showwarning, warnings.formatwarning, warnings._showwarnmsg_impl)  # type: ignore[attr-defined]
    yield "gc", (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks))
    yield "random", random.getstate()
    yield "NumPy's random", str(np.random.get_state())
    yield "NumPy's errors", (np.geterr(), np.geterrcall(), str(np.get_printoptions()))
    yield "linecache", set(linecache.cache)
    yield "directory", os.getcwd()
    yield "umask", os.umask(mask := os.umask(0)) or mask
    if hasattr(os, "sched_getaffinity"):
        yield "processors", os.sched_getaffinity(0)


def global_state() -> dict[str, Any]:
    """Return switches, hooks, handlers and random states of the process, by name."""
    return {**dict(_torch()), **dict(_logging()), **dict(_python())}


def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what is not as it was."""
    missing = object()
    names = dict.fromkeys([*before, *after])
    pairs = {name: (before.get(name, missing), after.get(name, missing)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] is not pair[1] and not _equal(*pair)}


def _equal(one: Any, two: Any) -> bool:
    return type(one) is type(two) and bool(one == two)
