"""Every test starts with dynamo, the environment and the random numbers as the process found them."""

import dataclasses
import functools
import gc
import logging
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint  # before onnxruntime's ORTModule, which some tests import, replaces it

from lightning_ort._busy import LIMITS, TimeLimits
from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.machine.openmp import pause_openmp
from lightning_ort.strategies.capture.capture import obstacle

# pytest listens to every logger that does not propagate, and torch renders its whole trace if anybody listens to it
logging.getLogger("torch.__trace").propagate = True
# some tests fork, which a pool of threads does not survive; the others are too small to gain from one
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    # torch's and Lightning's modules hold a million objects that stay: without them a collection takes no time
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    result = yield
    if nextitem is None or nextitem.path != item.path:
        # nor does one with what a file has left, such as caches and modules: each run of a Trainer that compiles ends
        # with a collection, which took 0.8 s at the end of the suite
        gc.collect()
        gc.freeze()
    return result


@functools.cache
def has_gpu() -> bool:
    return torch.cuda.is_available() and kernels.providers_for(torch.device("cuda", 0)) is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not has_gpu():
        pytest.skip("needs a CUDA device and a CUDA build of onnxruntime")
    if item.get_closest_marker("new_torch") is not None and (why := obstacle()):
        pytest.skip(why)


@pytest.fixture(autouse=True)
def clean_state(tmp_path: Path) -> Iterator[None]:
    environment = dict(os.environ)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    logger = logging.getLogger("lightning_ort")  # its records may hold what a test counts
    level = logger.level
    deterministic, default_dtype = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    os.environ["LIGHTNING_ORT_CACHE_DIR"] = str(tmp_path / "cache")  # not the user's, nor another test's
    torch._dynamo.reset()
    with torch.random.fork_rng(devices=[]):
        yield
    torch._dynamo.reset()
    torch.distributions.Distribution.set_default_validate_args(__debug__)  # dynamo switches it off
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(default_dtype)
    pause_openmp()  # of a test that used several threads
    if torch.distributed.is_initialized():  # processes that later tests fork would take it for theirs
        torch.distributed.destroy_process_group()
    logger.setLevel(level)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(autouse=True)
def loggers_reach_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    # both keep their messages from the root logger where the program has not configured logging
    for name in ("lightning_ort", "lightning.pytorch", "lightning.fabric"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)


@pytest.fixture
def torchs_loggers_reach_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "torch._dynamo"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)


@pytest.fixture
def captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured at once by default, as ``start="now"`` does where a test can say it: none is long enough."""
    monkeypatch.setattr("lightning_ort.strategies.race.run_facts.DEFAULT_START", "now")


@pytest.fixture(autouse=True)
def limits() -> Iterator[Callable[..., None]]:
    """Duels are short, no machine is busy, and one thread is not tried.

    The modules of tests take less than a millisecond a step, or none at all by a clock of their own.
    """
    token = LIMITS.set(TimeLimits(slowdown=math.inf, duel=0.0, one_thread=0.0))
    yield lambda **changed: LIMITS.set(dataclasses.replace(LIMITS.get(), **changed))
    LIMITS.reset(token)


@pytest.fixture
def torchs_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Activation checkpointing as torch has it: dynamo knows no other."""
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint)
    return checkpoint


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Any]:
    """A Trainer that shows nothing and writes below ``tmp_path`` only."""
    from lightning.pytorch import Trainer

    def make(**kwargs: Any) -> Trainer:
        quiet = {
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": tmp_path,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return Trainer(**{**quiet, **kwargs})

    return make


@pytest.fixture
def regions_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions go to ONNX Runtime, however small, where it is steps that are timed."""
    from lightning_ort.compiler.placement import timing

    measure = timing.measure

    def favourably(*args: Any) -> Any:
        measured = measure(*args)
        return dataclasses.replace(measured, ms={**measured.ms, "ort": 0.0})

    monkeypatch.setattr(timing, "measure", favourably)


@pytest.fixture
def no_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are tried on what dynamo captures alone."""
    from lightning_ort.compiler import engines
    from lightning_ort.strategies.race.run_facts import RunFacts

    monkeypatch.setattr(RunFacts, "compiles_recordings", False)
    monkeypatch.setattr(engines, "ON_CPU", [name for name in engines.ON_CPU if name != engines.RECORDED])


@pytest.fixture
def recordings_win(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """No clock decides: a replay takes half of what the step takes. Returns the seconds of both."""
    from lightning_ort.strategies.race.turn import Turn

    tell, seconds = Turn.tell, {"recorded": 0.001, "other": 0.002}

    def scripted(self: Turn, *args: Any) -> None:
        self.seconds, self.waited = self.steps * seconds.get(self.way.engine, seconds["other"]), 0.0
        tell(self, *args)

    monkeypatch.setattr(Turn, "tell", scripted)
    return seconds


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch, regions_win: None, no_recordings: None) -> Callable[..., None]:
    """Races go by a script: the seconds of a step on each engine, and of one that compiles."""
    from lightning_ort.compiler import engines
    from lightning_ort.strategies.race.turn import Turn

    tell, seconds = Turn.tell, dict[str, float]()

    def scripted(self: Turn, *args: Any) -> None:
        self.seconds = seconds["compiling"] if self.compiled else self.steps * seconds[self.way.engine]
        self.waited = 0.0
        tell(self, *args)

    monkeypatch.setattr(Turn, "tell", scripted)
    for name in ("COST", "COST_PER_OPERATION", "FIRST_COMPILATION", "INDUCTOR_COST", "INDUCTOR_COST_PER_OPERATION"):
        monkeypatch.setattr(engines, name, 0.0)
    monkeypatch.setattr(engines, "INDUCTOR_TO_ORT", 0.0)

    def script(**engines: float) -> None:
        seconds.update({"compiling": 0.0, **engines})

    return script
