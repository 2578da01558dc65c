"""Two Trainers in one process: in two threads at once, and one after the other."""

import logging
import signal
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import pytest
import torch
from small_modules import Small, loader
from torch._dynamo import config as dynamo_config
from torch._dynamo.callback import callback_handler

from lightning_ort import ORTStrategy
from lightning_ort.compiler.machine import malloc
from lightning_ort.compiler.reason import ReasonType


class Twin(Small):
    """Begins each step together with another one.

    Args:
        together: Where they wait for each other.
    """

    def __init__(self, together: threading.Barrier | None = None) -> None:
        super().__init__()
        self.together = together

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.together is not None:
            self.together.wait(60)

    def train_dataloader(self) -> Any:
        return loader(8 * 12)


class Breaks(Twin):
    """Computes something else, in two graphs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        torch._dynamo.graph_break()
        return 2 * loss


def process_state() -> dict[str, Any]:
    """What both Trainers share."""
    names = ("allow_unspec_int_on_nn_module", "suppress_errors", "use_numpy_random_stream", "allow_rnn")
    return {
        "settings": {name: getattr(dynamo_config, name) for name in names},
        "callbacks": len(callback_handler.start_callbacks) + len(callback_handler.end_callbacks),
        "filters": [len(logging.getLogger(f"torch._dynamo.{name}").filters) for name in ("convert_frame", "exc")],
        "memory": len(malloc.retained.runs),
        "threads": {thread.name for thread in threading.enumerate()} - {"tqdm_monitor"},  # torch's, and it stays
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.mark.parametrize("kinds", [(Twin, Breaks), (Twin, Twin)], ids=["two classes", "one class"])
def test_two_trainers_in_two_threads(kinds: tuple[type[Twin], type[Twin]], make_trainer: Callable[..., Any]) -> None:
    expected = []
    for kind in kinds:
        module = kind()
        make_trainer(max_epochs=3, strategy="auto", limit_val_batches=0).fit(module)
        expected.append(module.losses)
    before = process_state()
    together = threading.Barrier(2)
    modules = [kind(together) for kind in kinds]
    strategies = [ORTStrategy(config={"placement": "always", "fallback": "raise", "audit": "off"}) for _ in kinds]
    trainers = [make_trainer(max_epochs=3, strategy=strategy, limit_val_batches=0) for strategy in strategies]
    threads = [
        threading.Thread(target=copy_context().run, args=(trainer.fit, module))
        for trainer, module in zip(trainers, modules, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert process_state() == before
    for kind, module, strategy, losses in zip(kinds, modules, strategies, expected, strict=True):
        report = strategy.report
        assert module.losses == pytest.approx(losses, rel=1e-4)
        assert report.ort_runs >= len(losses) - 1  # the first step runs unchanged
        assert [note for note in report.notes if note.reason.type is not ReasonType.OPEN] == report.fallbacks == []
        assert report.recompiles == 0
        assert report.graph_breaks == (kind is Breaks)


def test_one_after_the_other_leaves_the_process_as_it_was(make_trainer: Callable[..., Any]) -> None:
    before = process_state()
    for kind in (Twin, Breaks, Twin):
        strategy = ORTStrategy(config={"placement": "always"})
        make_trainer(max_epochs=1, strategy=strategy, limit_val_batches=1).fit(kind())
        assert strategy.report.ort_runs > 0
        assert process_state() == before
