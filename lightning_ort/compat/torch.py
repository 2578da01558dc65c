"""Private and undocumented names of torch, one small function per use.

What is here every torch from 2.6 on has: nothing of dynamo, AOTAutograd or inductor, nor of graphs
(:mod:`.torch_graphs`, :mod:`.dynamo`). Each function names the torch version that it was read in.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map  # torch 2.13
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data._utils import collate as _collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from lightning_ort.compat.lightning_sources import if_known

__all__ = ["tree_leaves", "tree_map"]

# Ops


def aten_op_names() -> set[str]:
    """The names of all ATen ops, as ``aten.add.Tensor`` and, for all overloads, ``aten.add`` (torch 2.13)."""
    schemas = [name[6:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    overloads = {f"aten.{name}" if "." in name else f"aten.{name}.default" for name in schemas}
    return overloads | {name.rpartition(".")[0] for name in overloads}


CAN_REPLACE_KERNELS = hasattr(torch.library, "get_kernel")  # newer than torch 2.6


def replace_kernel(op: str, key: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace torch's kernel of an op, such as ``aten::add.Tensor``, for a dispatch key; return what undoes it.

    ``make`` takes the replaced kernel and returns the new one (torch 2.13 to 2.15).
    """
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    kernel = torch.library.get_kernel(op, key)
    library = torch.library.Library(op.partition("::")[0], "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a kernel already
        library.impl(op.partition("::")[2], make(functools.partial(kernel.call_boxed, keys)), key)
    return library._destroy


# Tensors


# whether a tensor is known to be zero and has no memory, such as a gradient of `torch.sgn` (torch 2.13)
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor


def sizes_of_tensor(tensor: torch.Tensor) -> str:
    """The sizes of a tensor as a text; one that is lazy or nested has none, or raises if it is asked (torch 2.13)."""
    if nn.parameter.is_lazy(tensor):
        return "lazy"
    return "nested" if tensor.is_nested else str(tuple(tensor.shape))


def storage_address(storage: torch.UntypedStorage) -> int:
    """The address of a storage itself, not of its memory (torch 2.13)."""
    return storage._cdata


def storage_id(value: Any) -> int | None:
    """A number that is the same for tensors that share memory; ``None`` for what has none (torch 2.13)."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return storage_address(value.untyped_storage())
    except NotImplementedError:  # of functorch's wrappers
        return None


def copies_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copy many tensors, on a GPU with one kernel where they are alike (torch 2.13)."""
    return torch._foreach_mul(list(tensors), 1.0)


# Data


def replace_fetch(
    make: Callable[[Any, Callable[[Any], Any]], Callable[[Any], Any]], collate: Callable[[], Callable[[Any], Any]]
) -> Callable[[], None]:
    """Replace what makes batches, where it is ``default_collate`` without workers; return what undoes it.

    ``make`` takes a map-style data set and torch's function from the indices of a batch to the collated batch, and
    returns the one to use. ``collate`` returns what is called instead of ``default_collate``. What iterates already
    stays as it is (torch 2.13).
    """
    original, is_over = vars(_DatasetKind)["create_fetcher"], False

    def create_fetcher(kind: int, dataset: Any, auto_collation: bool, collate_fn: Any, drop_last: bool) -> Any:
        fetcher = original.__func__(kind, dataset, auto_collation, collate_fn, drop_last)
        if is_over:  # and somebody has it still
            return fetcher
        if collate_fn is default_convert:
            fetcher.collate_fn = _convert
        is_usual = auto_collation and collate_fn is default_collate and get_worker_info() is None
        if is_usual and type(fetcher) in (_MapDatasetFetcher, _IterableDatasetFetcher):
            fetcher.collate_fn = collate()
            if kind == _DatasetKind.Map:
                fetcher.fetch = make(dataset, lambda indices: type(fetcher).fetch(fetcher, indices))
        return fetcher

    def undo() -> None:
        nonlocal is_over
        is_over = True
        if vars(_DatasetKind)["create_fetcher"] is ours:
            _DatasetKind.create_fetcher = original  # type: ignore[method-assign]

    ours = staticmethod(create_fetcher)
    _DatasetKind.create_fetcher = ours  # type: ignore[method-assign]
    return undo


def _convert(data: Any) -> Any:
    """Do what ``default_convert`` does, which takes a batch that is made already."""
    if data.__class__ is tuple or data.__class__ is list:
        for one in data:
            if one.__class__ is not torch.Tensor:
                return default_convert(data)
        return [*data]
    return default_convert(data)


_STOCK_FETCH = if_known(_MapDatasetFetcher.fetch, "869f7ef94de8")
_STOCK_NEXT = if_known(_SingleProcessDataLoaderIter.__next__, "280427495a48")


_OF_PYTHON: tuple[type, ...] = (type(iter([])), type(iter(())))
_OWN_SAMPLERS = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def made_by_torch(iterator: Any, reads_only: Callable[[Any], bool]) -> bool:
    """Return whether only code of torch and Python makes the next batches in this process (torch 2.13).

    ``reads_only`` tells that of a data set.
    """
    kind = type(iterator)
    if kind in _OF_PYTHON:
        return True
    if kind not in (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter):
        return False
    batches = iterator._index_sampler
    if type(batches) not in _OWN_SAMPLERS or type(getattr(batches, "sampler", batches)) not in _OWN_SAMPLERS:
        return False
    if kind is _MultiProcessingDataLoaderIter:
        return True
    return iterator._collate_fn is default_collate and reads_only(iterator._dataset_fetcher.dataset)


def next_batch(iterator: Any) -> Any:
    """Do what ``next`` does, without a loader's entry for torch's profiler where that does not run (torch 2.13)."""
    if (
        iterator.__class__ is not _SingleProcessDataLoaderIter
        or _SingleProcessDataLoaderIter.__next__ is not _STOCK_NEXT
        or (iterator._dataset_kind != _DatasetKind.Map and iterator._IterableDataset_len_called is not None)
        or iterator._sampler_iter is None
        or torch.autograd._profiler_enabled()
    ):
        return next(iterator)
    batch = iterator._next_data()
    iterator._num_yielded += 1
    return batch


def fetches_tensors_as_usual() -> bool:
    """Whether a batch is fetched as torch does, stacking tensors and descending into tuples and dictionaries (2.13)."""
    is_usual = default_collate_fn_map == _USUAL or _is_usual(default_collate_fn_map)
    return is_usual and _MapDatasetFetcher.fetch is _STOCK_FETCH


def _is_usual(known: Mapping[Any, Any]) -> bool:
    return known.get(torch.Tensor) is collate_tensor_fn and not any(
        issubclass(own, key) for own in (tuple, dict) for key in known
    )


_USUAL = dict(default_collate_fn_map) if _is_usual(default_collate_fn_map) else None


def collates_as_usual() -> bool:
    """Whether ``default_collate`` does what it did when this was imported, which was known (torch 2.13 to 2.15)."""
    return _STOCK_COLLATE is not None and _collate.collate is _STOCK_COLLATE and default_collate_fn_map == _USUAL


_COLLATES = (  # what it calls for the examples that torch knows
    if_known(_collate.collate, "8141f9e21a0d"),
    if_known(collate_tensor_fn, "8d6d7b9ffed0"),
    if_known(_collate.collate_numpy_array_fn, "c20140608cfc"),
    if_known(_collate.collate_numpy_scalar_fn, "e2af77487a36"),
    if_known(_collate.collate_float_fn, "5c56eb73166b"),
    if_known(_collate.collate_int_fn, "ca6bba264d92"),
    if_known(_collate.collate_str_fn, "2fc291f0e106"),
)
_ARE_KNOWN = None not in _COLLATES and {*default_collate_fn_map.values()} <= {*_COLLATES}
_STOCK_COLLATE = _collate.collate if _ARE_KNOWN else None


# Processes and processors


def default_store() -> "torch.distributed.Store | None":
    """The key-value store of the default process group; ``None`` if it has none, as with MPI (torch 2.13)."""
    return torch.distributed.distributed_c10d._get_default_store()


def cpu_has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (torch 2.13)."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def uses_tf32() -> bool:
    """Whether products of float32 matrices use TF32 on a GPU; torch before 2.9 has the second name only."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def float32_matmul_precision() -> str:
    """Return ``torch.get_float32_matmul_precision()``, or the backends' own settings, with which it raises (2.13)."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        mkldnn = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        return f"{torch.backends.cuda.matmul.fp32_precision}/{mkldnn}"


def set_float32_matmul_precision(precision: str) -> None:
    """Set what :func:`float32_matmul_precision` returned (torch 2.13)."""
    cuda, _, mkldnn = precision.partition("/")
    torch.set_float32_matmul_precision("highest" if mkldnn else precision)
    if mkldnn:
        torch.backends.cuda.matmul.fp32_precision = cuda
        torch.backends.mkldnn.matmul.fp32_precision = mkldnn  # type: ignore[attr-defined]


# nn.Module, for captured steps

COMPILED_CALL = "_compiled_call_impl"
"""The attribute with the call that ``nn.Module`` uses if it is not ``None``; pickling drops it (torch 2.13)."""


def has_compiled_call(module: nn.Module) -> bool:
    """Whether ``nn.Module.compile`` was called on this module (torch 2.13)."""
    return getattr(module, COMPILED_CALL) is not None


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """Return a module's call, hooks included, without its compiled one (torch 2.13)."""
    return module._call_impl


def forward_hooks_without(module: nn.Module, ids: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield name and value without these hooks of the attributes that hold any of them (torch 2.13)."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = vars(module)[name]
        if ids & hooks.keys():
            yield name, type(hooks)((key, hook) for key, hook in hooks.items() if key not in ids)


def is_wrapped(function: Callable[..., Any]) -> bool:
    """Return whether ``torch.compile`` or ``torch.compiler.disable`` made this function (torch 2.13)."""
    return hasattr(function, "_torchdynamo_orig_callable")


# the hooks that all modules have, by their ids, in tables that are never replaced (torch 2.13)
HOOKS_OF_ALL_MODULES: tuple[dict[int, Any], ...] = tuple(
    getattr(nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


def mode_stacks() -> tuple[Any, ...]:
    """The modes of ``__torch_function__``, how many ``__torch_dispatch__`` has, hooks of saved tensors (torch 2.13)."""
    functions = torch._C._len_torch_function_stack()
    saved = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (torch._C._len_torch_dispatch_stack(), saved, *map(torch._C._get_function_stack_at, range(functions)))


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function in C: whether tensors have the flags, shapes, strides, dtypes of these (torch 2.13)."""
    guards = torch._C._dynamo.guards.TensorGuards  # which is a part of torch's own library
    return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


# the module of functions that read and write what is set for the process (torch 2.13)
SETTINGS: Any = torch._C

# what decides which operations attention and recurrent layers call, below Python (torch 2.13)
KERNEL_SETTINGS: tuple[Callable[[], Any], ...] = tuple(
    getattr(torch._C, name)
    for name in (*(f"_get_{kind}_sdp_enabled" for kind in ("flash", "math", "mem_efficient")), "_get_mkldnn_enabled")
)
