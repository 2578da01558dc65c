"""A Trainer in a process of its own, which does as many steps as it is told to."""

import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ort._busy import Stopwatch
from lightning_ort._imports import LightningNamespace, namespace_of
from lightning_ort._memory import peak_bytes
from lightning_ort.compat.torch import tree_leaves
from lightning_ort.compiler.machine.openmp import pause_openmp
from lightning_ort.compiler.report import CompileReport
from lightning_ort.tuning.candidate import TuneError

_SECONDS_TO_END = 2.0  # at most, of a process that does nothing else
_NOT_STARTED = (
    "it could not import your program. In a script, put what runs under if __name__ == '__main__':, and what is trained"
    " in a notebook into a file"
)
_KILLED = -9  # code of a process that SIGKILL has ended
_MOST_LETTERS = 600  # of what LightningCLI's parser says
_SETTLING_STEPS = 48  # after these a step has been tried in each engine


@dataclass(frozen=True)
class Sample:
    """What a Trainer measured over some steps."""

    step_seconds: float  # mean over the timed batches, with all that the Trainer does between them except validation
    losses: list[float]  # of each batch, the untimed ones first; empty if the module returns none
    peak_bytes: int | None  # so far, of the GPU or else of the process; None if the system does not tell
    examples: int = 0  # in the timed batches; 0 if nobody can tell
    settled: bool = True  # whether the strategy has done all the compiling and trying that it does at the start
    untimed: int = 0  # batches before the clock was started: what processes had loaded while this one waited
    slowdown: float = 1.0  # how many times as long other programs made it take


_MANY = 1_000_000  # training ends after the last sample, but a schedule may ask how many epochs or steps there will be
# the Trainer's arguments for that, whatever a configuration says
ENDLESS: dict[str, Any] = {
    "num_nodes": 1,
    "min_epochs": 0,
    "max_epochs": _MANY,
    "min_steps": None,
    "max_steps": _MANY,
    "max_time": None,
    "fast_dev_run": False,
    "barebones": False,
    "profiler": None,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 1,
}
_ours: set[Connection] = set()  # this process's ends of the connections to its Trainers


class VariantFailed(RuntimeError):
    """A Trainer that cannot train, with its own error as the message."""


class TimeIsUp(RuntimeError):
    """A Trainer that has not answered in time; it is still at work, and has to be stopped."""


class TrainerProcess:
    """A process that waits until it is told to do some steps; what it prints goes to ``log.txt`` in its folder.

    ``fit`` is called in the process with its end of the connection; it trains with the callback that
    :func:`make_sampler` makes, and returns what :meth:`finish` shall return. It must be picklable where processes
    cannot be forked.
    """

    def __init__(self, fit: Callable[[Connection, Path], Any], folder: Path) -> None:
        context: Any = multiprocessing.get_context(start_method())
        self._connection, theirs = context.Pipe()
        self._log = folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        _ours.add(self._connection)
        self._process = context.Process(target=_serve, args=(_WithCopies(fit), folder, self._log, theirs))
        pause_openmp()  # a pool of threads is not there after a fork, and waited for all the same
        self._process.start()
        theirs.close()

    def sample(self, steps: int, timeout: float | None = None) -> Sample:
        """Do so many steps; ``VariantFailed`` if the Trainer fails or ends, ``TimeIsUp`` after ``timeout`` seconds."""
        answer = self._ask(steps, timeout)
        if not isinstance(answer, Sample):
            raise VariantFailed(
                f"training ended before another {steps} steps were done: are there batches, and does something stop it?"
            )
        return answer

    def finish(self, timeout: float | None = None) -> Any:
        """End training, and return what ``fit`` returned."""
        answer = self._ask(0, timeout)
        self.stop()
        return answer

    def stop(self) -> None:
        """End the process at once, and those that it has started."""
        _ours.discard(self._connection)
        self._connection.close()
        if self._process.exitcode is None:
            try:  # Lightning ends at SIGTERM, but only when the batch does
                os.killpg(self._process.pid, signal.SIGKILL)
            except (AttributeError, OSError):  # Windows, or it has just been started
                self._process.kill()
        self._process.join(_SECONDS_TO_END)

    def _ask(self, steps: int, timeout: float | None = None) -> Any:
        try:
            self._connection.send(steps)
            if timeout is not None and not self._connection.poll(max(0.0, timeout)):
                raise TimeIsUp(f"{steps} steps were not done within {timeout:.1f} seconds")
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(_SECONDS_TO_END)
            code = self._process.exitcode
            said = _last_error(self._log) if self._log.exists() else _NOT_STARTED if code == 1 else ""
            why = f"its process ended with code {code}{said and f': {said}'}"
            if code == _KILLED:
                why = f"the system ended its process, most likely for its memory ({why})"
            raise VariantFailed(why) from None
        if isinstance(answer, VariantFailed):
            raise answer
        return answer


def start_method() -> str:
    """Return how processes are started, ``"fork"`` or ``"spawn"``."""
    # a forked process need not import everything again, but cannot use a GPU where the parent has looked for it
    on_cpu = torch.version.cuda is None and torch.version.hip is None
    return "fork" if sys.platform == "linux" and on_cpu else "spawn"


class _WithCopies:
    """A function that is pickled with copies of its tensors.

    Torch has processes that are started by pickling share them: all would train the weights of one module.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __reduce__(self) -> Any:
        try:
            return pickle.loads, (pickle.dumps(self._function),)
        except Exception as error:  # pickle's own, AttributeError, TypeError, or what an object raises
            raise TuneError(
                "Processes are started anew here, so module and data have to be pickled, which fails:"
                f" {error}. Define their classes and functions at the top level of a file."
            ) from error

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


def _serve(fit: Callable[[Connection, Path], Any], folder: Path, log: Path, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # with those that it starts, so that all of them end at once
    for end in _ours:  # which a forked process has too: while it is open, nobody notices that the parent has gone
        end.close()
    with log.open("w", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 which may be something else
    try:
        connection.send(fit(connection, folder))
    except (EOFError, ConnectionError):
        pass  # the parent has gone
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")  # of what may be a page; the log has it all
        if isinstance(error, SystemExit) and isinstance(error.code, int):  # what LightningCLI's parser says is there
            connection.send(VariantFailed(_last_error(log)))
        else:
            connection.send(VariantFailed(f"{type(error).__name__}: {first.rstrip('.')}"))


def _last_error(log: Path) -> str:
    """Return what LightningCLI's parser says is wrong, or else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    told = [number for number, line in enumerate(lines) if line.startswith("error:")] or [-1]
    return " ".join(lines[told[-1] :])[:_MOST_LETTERS]


def namespace_of_class(kind: type) -> LightningNamespace:
    """Return the namespace of a LightningModule's class; raise ``TypeError`` if it is none."""
    if (namespace := namespace_of(kind)) is not None:
        return namespace
    raise TypeError(
        f"only a LightningModule can be trained, not {kind.__qualname__}: name a class or function that creates one."
    )


def make_sampler(namespace: LightningNamespace, connection: Connection, steps: int) -> Any:
    """Return a callback that sends a sample after so many steps, and then waits to be told the next number."""
    return type("Sampler", (_Sampler, namespace.submodule("callbacks").Callback), {})(connection, steps, namespace)


class _Sampler:
    def __init__(self, connection: Connection, steps: int, namespace: LightningNamespace) -> None:
        self._connection, self._steps, self._namespace = connection, steps, namespace
        self._all = 0
        self._begin()

    def __reduce__(self) -> Any:
        # a class that is made here cannot be pickled, as a strategy that spawns processes has to
        return make_sampler, (self._namespace, self._connection, self._steps)

    def _begin(self, untimed: int = 0) -> None:
        self._losses: list[Tensor] = []
        self._untimed, self._done = untimed, -untimed
        self._start_clock()

    def _start_clock(self) -> None:
        self._examples = 0
        self._start, self._stopwatch = time.perf_counter(), Stopwatch()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End if there are no batches."""
        trainer.should_stop |= self._all == 0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._start += time.perf_counter() - self._validation_start

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        self._done += 1
        self._all += 1
        self._examples += size_of(self._namespace, batch)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # Lightning divides it by the number of batches whose gradients it accumulates
            self._losses.append(loss.detach() * trainer.accumulate_grad_batches)
        device = trainer.strategy.root_device
        if device.type == "cuda" and self._done in (0, self._steps):
            torch.cuda.synchronize(device)
        if self._done == 0:  # the untimed ones are done
            self._start_clock()
        if self._done < self._steps:
            return
        seconds = (time.perf_counter() - self._start) / self._done
        losses = [loss.item() for loss in self._losses]
        settled = self._all >= _SETTLING_STEPS or _is_settled(trainer.strategy)
        counts, slowed = (self._examples, settled, self._untimed), self._stopwatch.slowdown
        self._connection.send(Sample(seconds, losses, peak_bytes(device), *counts, slowed))
        self._steps = self._connection.recv()
        trainer.should_stop = self._steps == 0
        self._begin(waiting_batches(trainer))


def waiting_batches(trainer: Any) -> int:
    """Return how many batches the processes of the loaders may have ready, and what completes an optimizer's step."""
    each = [(getattr(one, "num_workers", 0), one) for one in tree_leaves(trainer.train_dataloader)]
    ready = sum(workers * (getattr(one, "prefetch_factor", None) or 2) for workers, one in each)
    return math.ceil(ready / trainer.accumulate_grad_batches) * trainer.accumulate_grad_batches


def size_of(namespace: LightningNamespace, batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch; 0 if there is none."""
    try:
        return namespace.submodule("utilities.data").extract_batch_size(batch)
    except Exception:  # Lightning's MisconfigurationException, of either namespace: no tensor in the batch
        return 0


def _is_settled(strategy: Any) -> bool:
    report = getattr(strategy, "report", None)
    if not isinstance(report, CompileReport) or strategy.ort_config.engine == "torch":
        return True
    return any(step.name == "training_step" for step in report.steps)
