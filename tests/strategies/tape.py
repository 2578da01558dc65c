"""Stands in for CUDA graphs on a CPU: :class:`Tape` records operations, and runs them again at the same addresses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class _Ops(TorchDispatchMode):
    """Notes each operation, with its tensors and numbers, and what tensors were before they were written to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        named = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for one in tree_iter(named.get(argument.name)):
                    place = one.untyped_storage().data_ptr() if isinstance(one, Tensor) else 0
                    if isinstance(one, Tensor) and place not in self.made and id(one) not in self.before:
                        self.before[id(one)] = one, one.clone()
        results = func(*args, **kwargs)
        self.made |= {one.untyped_storage().data_ptr() for one in tree_iter(results) if isinstance(one, Tensor)} - {
            one.untyped_storage().data_ptr() for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)
        }
        self.calls.append((func, args, kwargs, results))
        return results


class Tape:
    """Has the interface of a recorder."""

    def __init__(self) -> None:
        self.rehearsed = self.recorded = self.replayed = 0
        self.failed = self.fails = False
        self.wrong = 0  # which recording is

    def rehearse(self, run: Callable[[], None]) -> None:
        self.rehearsed += 1
        run()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        spoils, numbers = self.recorded == self.wrong, torch.get_rng_state()
        try:
            with _Ops() as ops:
                run()
                if self.fails:
                    torch.ones(()).item()
        except BaseException:
            self.failed = True
            raise
        finally:
            torch.set_rng_state(numbers)
            with torch.no_grad():
                for one, value in ops.before.values():
                    one.copy_(value)

        @torch.no_grad()
        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, results in ops.calls:
                own = {one.untyped_storage().data_ptr() for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)}
                if spoils and "lr" in kwargs:
                    kwargs = {**kwargs, "lr": 1.1 * kwargs["lr"]}
                for one, new in zip(tree_iter(results), tree_iter(func(*args, **kwargs)), strict=True):
                    if spoils and func is torch.ops.aten.mm.default:
                        new.mul_(1.1)
                    if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in own:
                        one.detach().copy_(new)

        return replay
