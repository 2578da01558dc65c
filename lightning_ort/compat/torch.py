"""Private and undocumented names of torch, one small function per use.

Those of ``torch._dynamo`` are in :mod:`.dynamo`. Each function names the torch version that it was read in.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import fx, nn
from torch._decomp import get_decompositions
from torch._decomp.decompositions import upsample_compute_output_size as interpolated_size  # torch 2.13
from torch._ops import OpOverload  # the class of torch.ops.aten.add.Tensor and the like, torch 2.13
from torch._prims_common import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    elementwise_dtypes,
    is_contiguous_or_false,  # `x.is_contiguous()` that is False where symbolic sizes leave it open, torch 2.13
    suggest_memory_format,  # the memory format of an eager result that follows its input, torch 2.13
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as without_fake_tensors  # while tracing, torch 2.13
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_tracing  # of other tensors' ops, torch 2.13
from torch.utils._pytree import tree_leaves, tree_map  # torch 2.13
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.data import default_collate, default_convert, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter
from torch.utils.flop_counter import flop_registry

from lightning_ort.compat.lightning_sources import if_known

__all__ = ["OpOverload", "TorchDispatchMode", "interpolated_size", "is_contiguous_or_false", "suggest_memory_format"]
__all__ += ["tree_leaves", "tree_map", "without_fake_tensors", "without_tracing"]

# Ops


def aten_op_names() -> set[str]:
    """The names of all ATen ops, as ``aten.add.Tensor`` and, for all overloads, ``aten.add`` (torch 2.13)."""
    schemas = [name[6:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    overloads = {f"aten.{name}" if "." in name else f"aten.{name}.default" for name in schemas}
    return overloads | {name.rpartition(".")[0] for name in overloads}


def schema_of(op: OpOverload) -> str | None:
    """The schema of an op; ``None`` in other versions than torch 2.13, where its arguments may be called otherwise."""
    return str(op._schema) if torch.__version__.startswith("2.13.") else None


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node that calls an op, by their names in its schema, with defaults (torch 2.13)."""
    known = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
    names = [argument.name for argument in known]
    return defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def decomposition_of(op: OpOverload) -> Callable[..., Any]:
    """Return torch's own decomposition of an op, which need not be to core ATen ops (torch 2.13)."""
    return get_decompositions([op])[op]


@contextmanager
def python_kernels(kernels: Mapping[tuple[OpOverload, str], Callable[..., Any] | None]) -> Iterator[None]:
    """Within the block, set the Python kernels of ops for dispatch keys; ``None`` removes one (torch 2.13)."""
    wanted = {(op, getattr(torch._C.DispatchKey, key)): kernel for (op, key), kernel in kernels.items()}
    before = {(op, key): op.py_kernels.get(key) for op, key in wanted}
    try:
        _set_python_kernels(wanted)
        yield
    finally:
        _set_python_kernels(before)


def _set_python_kernels(kernels: Mapping[tuple[OpOverload, Any], Callable[..., Any] | None]) -> None:
    for (op, key), kernel in kernels.items():
        op.py_kernels.pop(key, None)
        if kernel is not None:
            op.py_kernels[key] = kernel
        op._dispatch_cache.clear()


def replace_kernel(op: str, key: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace torch's kernel of an op, such as ``aten::add.Tensor``, for a dispatch key; return what undoes it.

    ``make`` takes the replaced kernel and returns the new one (torch 2.11 to 2.15).
    """
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    kernel = torch.library.get_kernel(op, key)
    library = torch.library.Library(op.partition("::")[0], "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a kernel already
        library.impl(op.partition("::")[2], make(functools.partial(kernel.call_boxed, keys)), key)
    return library._destroy


def without_validation() -> AbstractContextManager[Any]:
    """Within the block distributions do not look at their arguments, whose values a graph has not (torch 2.13)."""
    return patch.object(torch.distributions.Distribution, "_validate_args", False)


def without_checkpoints() -> AbstractContextManager[Any]:
    """Within the block ``torch.utils.checkpoint`` calls functions as they are, and keeps what they save (2.13)."""
    from torch.utils import checkpoint

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            has_gradient = any(isinstance(each, torch.Tensor) and each.requires_grad for each in args)
            with torch.set_grad_enabled(has_gradient and torch.is_grad_enabled()):  # else it has none for parameters
                return function(*args)

    def plain(*_: Any, **__: Any) -> Iterator[None]:
        yield

    return patch.multiple(checkpoint, CheckpointFunction=Plain, _checkpoint_without_reentrant_generator=plain)


def promoted_dtype(*operands: Any) -> torch.dtype:
    """The dtype of the result of an elementwise op on tensors and numbers, which half types keep (torch 2.13)."""
    # the first of the two is the dtype in which torch computes: float32 for half types
    return elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]


def flop_formula(op: Any) -> Callable[..., Any] | None:
    """The function from an op's arguments and ``out_val`` to its floating-point operations, if any (torch 2.13)."""
    return flop_registry.get(getattr(op, "overloadpacket", None))


@contextmanager
def without_collectives() -> Iterator[None]:
    """Within the block a collective of the default process group raises, and does not wait for others (torch 2.13)."""
    if not torch.distributed.is_available():
        yield
        return
    before, torch.distributed.GroupMember.WORLD = torch.distributed.GroupMember.WORLD, None
    try:
        yield
    finally:
        torch.distributed.GroupMember.WORLD = before


# Tensors


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


# inductor's allocator, four times as fast as torch.empty_strided: (sizes, strides, dtype) -> tensor; torch 2.13
empty_strided_cpu: Callable[..., torch.Tensor] = getattr(
    getattr(torch._C._dynamo, "guards", None), "_empty_strided_cpu", _empty_strided
)

# how many tensors, and others, refer to a storage, from its address; torch 2.13
storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def storage_address(storage: torch.UntypedStorage) -> int:
    """The address of a storage itself, not of its memory (torch 2.13)."""
    return storage._cdata


# whether a tensor is known to be zero and has no memory, such as a gradient of `torch.sgn` (torch 2.13)
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor


def sizes_of_tensor(tensor: torch.Tensor) -> str:
    """The sizes of a tensor as a text; one that is lazy or nested has none, or raises if it is asked (torch 2.13)."""
    if nn.parameter.is_lazy(tensor):
        return "lazy"
    return "nested" if tensor.is_nested else str(tuple(tensor.shape))


def storage_id(value: Any) -> int | None:
    """A number that is the same for tensors that share memory; ``None`` for what has none (torch 2.13)."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return storage_address(value.untyped_storage())
    except NotImplementedError:  # of functorch's wrappers
        return None


def storage_of(node: Any) -> int | None:
    """The :func:`storage_id` of what a node of dynamo's graph returned; ``None`` for what is no node (torch 2.13)."""
    return storage_id(node.meta.get("example_value")) if isinstance(node, fx.Node) else None


def copies_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copy many tensors, on a GPU with one kernel where they are alike (torch 2.13)."""
    return torch._foreach_mul(list(tensors), 1.0)


def fake_mode_of(value: Any) -> FakeTensorMode | None:
    """The mode in which a fake tensor was made, to compute with it; ``None`` for other values (torch 2.13)."""
    return getattr(value, "fake_mode", None)


# Data


def replace_fetch(make: Callable[[Any, Callable[[Any], Any]], Callable[[Any], Any]]) -> Callable[[], None]:
    """Replace what makes batches, where it is ``default_collate`` without workers; return what undoes it.

    ``make`` takes a map-style data set and torch's function from the indices of a batch to the collated batch, and
    returns the one to use. What iterates already stays as it is (torch 2.13).
    """
    original = vars(_DatasetKind)["create_fetcher"]

    def create_fetcher(kind: int, dataset: Any, auto_collation: bool, collate_fn: Any, drop_last: bool) -> Any:
        fetcher = original.__func__(kind, dataset, auto_collation, collate_fn, drop_last)
        if collate_fn is default_convert:
            fetcher.collate_fn = _convert
        is_usual = type(fetcher) is _MapDatasetFetcher and auto_collation and collate_fn is default_collate
        if is_usual and get_worker_info() is None:
            fetcher.fetch = make(dataset, fetcher.fetch)
        return fetcher

    _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]
    return functools.partial(setattr, _DatasetKind, "create_fetcher", original)


def _convert(data: Any) -> Any:
    """Do what ``default_convert`` does, which takes a batch that is made already."""
    if data.__class__ is tuple or data.__class__ is list:
        for one in data:
            if one.__class__ is not torch.Tensor:
                return default_convert(data)
        return [*data]
    return default_convert(data)


_STOCK_NEXT = if_known(_SingleProcessDataLoaderIter.__next__, "280427495a48")


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


def collates_tensors_as_usual() -> bool:
    """Whether ``default_collate`` stacks tensors and descends into tuples and dictionaries (torch 2.13)."""
    return default_collate_fn_map == _USUAL or _is_usual(default_collate_fn_map)


def _is_usual(known: Mapping[Any, Any]) -> bool:
    return known.get(torch.Tensor) is collate_tensor_fn and not any(
        issubclass(own, key) for own in (tuple, dict) for key in known
    )


_USUAL = dict(default_collate_fn_map) if _is_usual(default_collate_fn_map) else None


# Symbolic sizes


def hint_of(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The value of a symbolic number when it was traced; ``None`` if it depends on data (torch 2.13)."""
    return number.node.hint


def expression_of(number: int | torch.SymInt) -> sympy.Expr:
    """A size as a sympy expression (torch 2.13)."""
    return sympy.Integer(number) if isinstance(number, int) else number.node.expr


def is_positive(number: torch.SymInt) -> bool:
    """Whether a symbolic number is known to be above 0 (torch 2.13)."""
    return bool(number.node.shape_env.bound_sympy(number.node.expr).lower > 0)


def guards_of(number: torch.SymInt) -> Sequence[Any]:
    """The conditions on symbolic sizes so far; each has ``sloc.framework_loc``, where it was asked (torch 2.13)."""
    return number.node.shape_env.guards


class _SizePrinter(PythonPrinter):
    def _print_ToFloat(self, expr: sympy.Expr) -> str:
        return f"float({self._print(expr.args[0])})"  # torch's needs torch, and does the same

    def _print_Where(self, expr: sympy.Expr) -> str:
        condition, first, second = map(self._print, expr.args)
        return f"({first} if {condition} else {second})"


def size_printer() -> PythonPrinter:
    """A sympy printer that writes the expressions of sizes as Python code, which may use ``math`` (torch 2.13)."""
    return _SizePrinter()


# Calls with one list of arguments, which the callee may empty to free them early


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A function of one list of arguments, marked as such for AOTAutograd (torch 2.13)."""
    return mark_boxed(lambda args: function(*args))


def mark_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that a function takes one list of arguments (torch 2.13)."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def generate_boxed_code(graph: fx.Graph) -> None:
    """Have the code of a graph take one list of arguments, and clear it (torch 2.13)."""
    graph.set_codegen(_BoxedCodeGen())


# Processes and processors


def default_store() -> "torch.distributed.Store | None":
    """The key-value store of the default process group; ``None`` if it has none, as with MPI (torch 2.13)."""
    return torch.distributed.distributed_c10d._get_default_store()


def cpu_has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (torch 2.13)."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


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


# the hooks that all modules have, by their ids, in tables that are never replaced (torch 2.13)
HOOKS_OF_ALL_MODULES: tuple[dict[int, Any], ...] = tuple(
    getattr(nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)


def without_torch_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes tensors of any class as plain ones (torch 2.13)."""

    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args)

    return run


def is_double_backward_error(error: BaseException) -> bool:
    """Whether AOTAutograd says that its graphs have no gradient of a gradient (torch 2.13)."""
    return "does not currently support double backward" in str(error)
