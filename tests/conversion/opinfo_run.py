"""Run torch's test database in processes of its own, each of which an input may end without ending the run."""

import contextlib
import functools
import logging
import multiprocessing
import os
import queue
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.conversion.opinfo_cases import LAYOUTS, OPS, Case, case_of, samples
from tests.conversion.opinfo_check import Outcome, Status, check, check_sizes

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
}
SECONDS = 120  # for one step of one call, on a busy machine
CHANGING_SIZES = "changing sizes"
Limits = tuple[int | None, int | None]
MEMORY = 8 * 2**30  # eager refuses what special values ask beyond it


@dataclass(frozen=True)
class Key:
    """Which call.

    Args:
        op: Its name in the database.
        dtype: Of the sample.
        variant: ``"plain"``, ``"in place"``, ``"changing sizes"`` or a memory layout.
        kernels: Of the config.
        sample: Its number.
    """

    op: str
    dtype: str
    variant: str
    kernels: str
    sample: int

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.variant} {self.kernels} #{self.sample}"


def sampling(name: str) -> Key:
    """Making the samples of an op, which is no call yet."""
    return Key(name, "", "sampling", "", 0)


def calls(
    name: str, limit: int | None, plain: int | None = None
) -> Iterator[tuple[Key, Callable[[], Case | None], Sequence[str]]]:
    """What is run of an op: every sample in float32, and up to ``limit`` of them in each other way.

    Args:
        name: The op.
        limit: ``None`` for all.
        plain: How many samples in float32; ``None`` for all.

    Yields:
        Which call, a function that makes it, and the special values to try on it.
    """
    op = OPS[name]
    supported = op.supported_dtypes("cpu")
    for dtype_name, dtype in DTYPES.items():
        if dtype not in supported:
            continue
        given = list(samples(op, dtype, requires_grad=dtype.is_floating_point))
        whole = dtype is torch.float32
        few = set(spread(len(given), limit))
        many = few | set(spread(len(given), plain)) if whole else few
        values = (
            ["nan", "inf", "tiny", "huge"]
            if whole
            else ["nan", "inf", "tiny"]
            if dtype.is_floating_point
            else ["limits"]
        )

        def key(variant: str, sample: int, kernels: str = "auto", dtype: str = dtype_name) -> Key:
            return Key(name, dtype, variant, kernels, sample)

        for index, sample in enumerate(given):
            if index in many:
                yield key("plain", index), lambda s=sample: case_of(op, s), values if index in few else ()
            if index not in few or not whole:
                continue
            yield key(CHANGING_SIZES, index), lambda s=sample: case_of(op, s), ()
            yield key("plain", index, "standard"), lambda s=sample: case_of(op, s), values
            for layout, change in LAYOUTS.items():
                yield key(layout, index), lambda s=sample, change=change: _changed(case_of(op, s), change), ()
            if op.inplace_variant is not None and isinstance(sample.input, torch.Tensor):
                yield key("in place", index), lambda s=sample: _without_gradients(case_of(op, s, in_place=True)), ()


def spread(total: int, limit: int | None) -> list[int]:
    """Up to ``limit`` numbers below ``total``, evenly spread, the first among them."""
    if limit is None or total <= limit:
        return list(range(total))
    return sorted({index * total // limit for index in range(limit)})


def _changed(case: Case | None, change: Callable[[Case], Case | None]) -> Case | None:
    return None if case is None else change(case)


def _without_gradients(case: Case | None) -> Case | None:
    return None if case is None else replace(case, inputs=[x.detach() for x in case.inputs])


def run_op(name: str, limits: Limits, start: int, tell: Callable[[Any], None]) -> None:
    """Run an op's calls, and tell of each step before it is taken and of each outcome."""
    try:
        planned = list(calls(name, *limits))
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        tell(("outcome", sampling(name), Outcome(Status.EAGER_FAILS, detail=f"sampling: {error}")))
        return
    for number, (key, make, values) in enumerate(planned):
        if number < start or (case := make()) is None:
            continue
        try:
            at = functools.partial(_tell_stage, tell, number, key)
            if key.variant == CHANGING_SIZES:
                torch._dynamo.reset()
                outcomes = check_sizes(case, key.kernels, at)
            else:
                outcomes = check(case, key.kernels, values, at)
        except Exception as error:  # of the check itself; it must not pass for a call that went well
            outcomes = [Outcome(Status.CRASH, detail=f"check: {type(error).__name__}: {error}")]
        for outcome in outcomes:
            tell(("outcome", key, outcome))


def _tell_stage(tell: Callable[[Any], None], number: int, key: Key, stage: str) -> None:
    tell(("at", number, key, stage))


def _work(connection: Connection, limits: Limits) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning_ort").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    while (task := connection.recv()) is not None:
        run_op(task[0], limits, task[1], connection.send)
        connection.send(("done",))


class Worker:
    """A process that runs ops, started again where one ended it.

    Args:
        limits: Of :func:`calls`.
        work: What the process does; see :func:`_work`.
        start_method: How it starts, one of those of :mod:`multiprocessing`.
    """

    def __init__(
        self, limits: Limits, work: Callable[[Connection, Limits], None] | None = None, start_method: str = "spawn"
    ) -> None:
        self._limits, self._work = limits, work or _work
        self._context: Any = multiprocessing.get_context(start_method)
        self._process: Any = None

    def run(self, name: str) -> Iterator[tuple[Key, Outcome]]:
        """Run an op to its end, whatever becomes of the process."""
        start = 0
        while True:
            if self._process is None:
                self._begin()
            number, key, stage = start, sampling(name), "sampling"
            self._connection.send((name, start))
            try:
                while self._connection.poll(SECONDS):
                    message = self._connection.recv()
                    if message[0] == "done":
                        return
                    if message[0] == "at":
                        number, key, stage = message[1:]
                    else:
                        yield message[1], message[2]
                ended = Status.TIMEOUT
            except (EOFError, ConnectionError):
                ended = Status.CRASH
            self.end()
            detail = f"{stage}: exit code {self._code}"
            if stage.startswith(("eager", "sampling")) and ended is Status.CRASH:
                ended = Status.EAGER_CRASH
            yield key, Outcome(ended, detail=detail)
            if stage == "sampling":
                return
            start = number + 1

    def _begin(self) -> None:
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=self._work, args=(theirs, self._limits), daemon=True)
        self._process.start()
        theirs.close()

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            with contextlib.suppress(ConnectionError):
                self._connection.close()
            self._process.join(5)
            self._process.kill()
            self._process.join()
            self._code = self._process.exitcode
            self._process = None


def run_all(names: Sequence[str], limits: Limits, workers: int) -> Iterator[tuple[Key, Outcome]]:
    """Run ops in several processes.

    Args:
        names: The ops.
        limits: Of :func:`calls`.
        workers: How many processes.

    Yields:
        Which call, and an outcome of it.
    """
    todo: queue.Queue[str] = queue.Queue()
    for name in names:
        todo.put(name)
    found: queue.Queue[Any] = queue.Queue()

    def serve() -> None:
        worker = Worker(limits)
        try:
            while True:
                name = todo.get_nowait()
                for result in worker.run(name):
                    found.put(result)
                print(f"{name} ({todo.qsize()} left)", file=sys.stderr, flush=True)
        except queue.Empty:
            worker.end()
        finally:
            found.put(None)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    open_workers = workers
    while open_workers:
        result = found.get()
        if result is None:
            open_workers -= 1
        else:
            yield result
