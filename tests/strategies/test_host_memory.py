"""Pages of freed memory stay in the process from step to step, and for as long as a run lasts."""

import copy
import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_modules import Small

from lightning_ort import ORTDDPStrategy, ORTStrategy
from lightning_ort.compiler.machine import malloc
from lightning_ort.strategies import host_memory
from lightning_ort.strategies.capture.capture import obstacle
from lightning_ort.strategies.host_memory import RetainedMemory
from lightning_ort.strategies.mixin import ORTMixin

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or host_memory.unsupported_reason() is not None,
    reason="needs glibc's malloc, not configured",
)


class Hungry(Small):
    """Finds out in its first step whether pages are kept.

    Args:
        by_default: Page faults of a large block where they are not.
    """

    def __init__(self, by_default: int) -> None:
        super().__init__()
        self.by_default = by_default
        self.keeps: bool | None = None

    def on_train_start(self) -> None:
        self.keeps = keeps_pages(self.by_default)


@pytest.fixture(autouse=True)
def _no_free_block_before() -> Iterator[None]:
    """Hold what an earlier test retained and freed after its run: that is on malloc's heap, and serves large blocks."""
    gc.collect()
    held = []
    while 0 in (faults_of_a_large_block(), faults_of_a_large_block()):
        held.append(torch.empty(12 << 20))
    yield
    held.clear()


def faults_of_a_large_block() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12 << 20)  # more than glibc ever takes from its heap by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def keeps_pages(by_default: int) -> bool:
    """Whether a large block soon comes without page faults."""
    # the first ones may meet pages that nothing has used: glibc cuts splinters off aligned blocks, and then looks for
    # a new place until its bins for splinters are full
    return any(faults_of_a_large_block() < by_default / 10 for _ in range(24))


def test_pages_are_kept_while_a_run_lasts(make_trainer):
    by_default = faults_of_a_large_block()  # a few with transparent huge pages, 12,288 without
    module = Hungry(by_default)
    trainer = make_trainer(strategy=ORTStrategy(config={"placement": "always"}), max_epochs=1)
    trainer.fit(module)
    assert module.keeps is True
    assert trainer.strategy.report.host_memory == "retained"
    assert trainer.strategy.report.ort_runs > 0 or obstacle()
    assert "retained memory" in trainer.strategy.report.to_text()
    assert faults_of_a_large_block() > by_default / 2, "not restored"


def test_malloc_is_left_alone(make_trainer):
    by_default = faults_of_a_large_block()
    module = Hungry(by_default)
    trainer = make_trainer(strategy=ORTStrategy(config={"engine": "torch"}, host_memory="default"), max_epochs=1)
    trainer.fit(module)
    assert module.keeps is False
    assert trainer.strategy.report.host_memory == "default"


@pytest.mark.parametrize(
    ("variable", "value"), [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.top_pad=0")]
)
def test_what_the_user_configured_stays(make_trainer, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    module = Hungry(faults_of_a_large_block())
    trainer = make_trainer(strategy=ORTStrategy(config={"engine": "torch"}), max_epochs=1)
    trainer.fit(module)
    assert module.keeps is False
    assert trainer.strategy.report.host_memory == f"default: malloc is configured by {variable}"


def test_another_malloc(make_trainer, monkeypatch):
    monkeypatch.setattr(malloc, "glibc", lambda: None)
    trainer = make_trainer(strategy=ORTStrategy(config={"engine": "torch"}), max_epochs=1)
    trainer.fit(Small())
    assert trainer.strategy.report.host_memory == "default: the malloc in use is not glibc's"


def test_two_runs_at_once_and_a_copy():
    """The last one to end restores, whichever it is."""
    by_default = faults_of_a_large_block()
    first, second = RetainedMemory("retain"), RetainedMemory("retain")
    for memory in (first, second):
        memory.setup(torch.device("cpu"))
    first.teardown()
    assert keeps_pages(by_default)
    copy.deepcopy(second).teardown()
    assert keeps_pages(by_default)
    second.teardown()
    assert faults_of_a_large_block() > by_default / 2


def test_restored_after_an_error(make_trainer):
    class Fails(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("mine")

    by_default = faults_of_a_large_block()
    with pytest.raises(RuntimeError, match="mine"):
        make_trainer(strategy=ORTStrategy(config={"engine": "torch"}), max_epochs=1).fit(Fails())
    assert faults_of_a_large_block() > by_default / 2


@pytest.mark.parametrize("kind", [ORTStrategy, ORTDDPStrategy])
def test_unknown_choice(kind):
    assert issubclass(kind, ORTMixin)
    with pytest.raises(ValueError, match="host_memory='keep': choose one of 'retain', 'default'"):
        kind(host_memory="keep")


class Elsewhere:
    """A process whose malloc is not the C library's, as with jemalloc."""

    def __init__(self) -> None:
        self.malloc, self.free = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(lambda size: 0), lambda block: None


def test_a_malloc_is_known_by_what_it_counts() -> None:
    """A Python that is not position-independent, as Debian's, has its own address for the function."""
    libc = ctypes.CDLL("libc.so.6")
    assert malloc._counts(libc, ctypes.CDLL("libc.so.6"))
    assert not malloc._counts(libc, Elsewhere())


def test_why_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(malloc, "glibc", object)
    assert host_memory.unsupported_reason() is None
    monkeypatch.setattr(malloc, "glibc", lambda: None)
    assert "not glibc's" in str(host_memory.unsupported_reason())
