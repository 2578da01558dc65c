"""Stand-ins on a CPU: :class:`Tape` for CUDA graphs, :class:`Streams` for CUDA's streams, events and pinned memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_ort.strategies.lean import batch_copies


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


class _Stream:
    """What is launched on it runs as late as possible: where another stream waits for it."""

    def __init__(self, gpu: "Streams") -> None:
        self.gpu, self.queue = gpu, list[Callable[[], Any]]()

    def wait_stream(self, other: "_Stream") -> None:
        for launch in other.queue:
            launch()
        other.queue.clear()

    def record_event(self) -> "_Stream":
        return self

    def query(self) -> bool:
        return not self.gpu.is_behind

    def synchronize(self) -> None:
        self.gpu.waits += 1


class Streams:
    """A GPU that is called CPU: copies to it from pinned memory are launched, and what is read too soon is garbage."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.main = _Stream(self)
        self.pinned, self.copied, self.recorded = list[Tensor](), list[Tensor](), list[Tensor]()
        self.is_behind, self.waits, self.pins = False, 0, True
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(Tensor, "is_pinned", lambda one: any(one is other for other in self.pinned))
        monkeypatch.setattr(Tensor, "pin_memory", lambda one: self.pin(one))
        monkeypatch.setattr(Tensor, "record_stream", lambda one, stream: self.recorded.append(one))
        monkeypatch.setattr(batch_copies, "copy_to_gpu", self.copy)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def pin(self, one: Tensor) -> Tensor:
        if not self.pins:
            raise RuntimeError("this memory cannot be pinned")
        self.pinned.append(one.clone())
        return self.pinned[-1]

    def copy(self, pinned: Tensor, device: torch.device) -> Tensor:
        assert pinned.is_pinned()
        self.copied.append(new := torch.full_like(pinned, 77))
        self.current.queue.append(lambda: new.copy_(pinned))
        return new


class Tape:
    """Has the interface of a recorder."""

    def __init__(self) -> None:
        self.rehearsed = self.recorded = self.replayed = 0
        self.failed = self.fails = False
        self.wrong = 0  # which recording is
        self.streams: Any = None

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
