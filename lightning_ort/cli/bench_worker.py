"""Trainers for ``lightning-ort bench``: each in a process of its own, which does as many steps as it is told to."""

import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ort._imports import NAMESPACES, LightningNamespace, preferred_namespace
from lightning_ort.cli.load import load
from lightning_ort.compat.dynamo import compile_isolated
from lightning_ort.compiler.report import CompileReport
from lightning_ort.optim.registry import check_name
from lightning_ort.strategies.capture.shims import ModuleShims, callable_children

ENGINES = ("stock", "compile", "ort", "auto")
MATMUL_PRECISIONS = ("high", "medium")
_MANY = 1_000_000  # steps: training ends after the last sample, but a schedule may ask how many there will be


@dataclass(frozen=True)
class Variant:
    """One way to train a module, written ``ENGINE[+OPTIM][@PRECISION]``.

    Args:
        engine: ``"stock"`` (Lightning's own strategy), ``"compile"`` (the same, and ``torch.compile`` for the module's
            children), ``"ort"`` or ``"auto"`` (the same with ``ORTConfig(engine="auto")``).
        optim: An implementation of the optimizer, as in ``ORTStrategy(optim=...)``. Left out, it is ``"auto"`` under
            ``"ort"`` and ``"auto"``, and what the module configures elsewhere.
        precision: A ``Trainer(precision=...)``, or ``"high"`` or ``"medium"`` for float32 with
            :class:`~lightning_ort.ORTMatmulPrecision`. Left out, it is the Trainer's default, or the configuration's.

    """

    engine: str
    optim: str | None = None
    precision: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """Read the written form.

        Raises:
            ValueError: If the engine or the optimizer is unknown.

        """
        rest, _, precision = text.partition("@")
        engine, _, optim = rest.partition("+")
        if engine not in ENGINES:
            raise ValueError(
                f"Variant {text!r}: unknown engine {engine!r}; allowed are {', '.join(ENGINES)}. "
                "Write ENGINE[+OPTIM][@PRECISION], such as ort+adamw_bnb_8bit@bf16-mixed."
            )
        if optim:
            check_name(optim, f"variant {text!r}: optim")
        return cls(engine, optim or None, precision or None)

    @property
    def is_ours(self) -> bool:
        """Whether the strategy is ours."""
        return self.engine in ("ort", "auto")

    def __str__(self) -> str:
        optim = f"+{self.optim}" if self.optim else ""
        return f"{self.engine}{optim}" + (f"@{self.precision}" if self.precision else "")


@dataclass(frozen=True)
class Job:
    """What is trained: the arguments of :func:`~lightning_ort.cli.bench.bench` of the same names."""

    module: str | None
    args: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    data_args: dict[str, Any] = field(default_factory=dict)
    config: Path | None = None
    accelerator: str = "auto"
    seed: int = 0
    ort_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """What a Trainer measured over some steps."""

    step_seconds: float  # mean over the batches, with all that the Trainer does between them except validation
    losses: list[float]  # of each batch; empty if the module returns none
    peak_bytes: int | None  # so far, of the GPU or else of the process; None if the system does not tell


@dataclass(frozen=True)
class Summary:
    """What a finished Trainer's strategy reports, if it is one of ours; see :class:`CompileReport`."""

    ort_node_fraction: float | None = None
    ort_runs: int = 0
    optimizers: list[str] = field(default_factory=list)


_ours: set[Connection] = set()  # this process's ends of the connections to its Trainers


class VariantFailed(RuntimeError):
    """A Trainer that cannot train, with its own error as the message."""


class Worker:
    """A process with a Trainer, which writes into ``folder`` and waits until it is told to do some steps."""

    def __init__(self, job: Job, variant: Variant, folder: Path) -> None:
        # a forked process need not import everything again, but cannot use CUDA where the parent has looked for it
        forks = sys.platform == "linux" and torch.version.cuda is None
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self._connection, theirs = context.Pipe()
        self._log = folder / "log.txt"
        folder.mkdir(parents=True, exist_ok=True)
        _ours.add(self._connection)
        self._process = context.Process(target=_serve, args=(job, variant, folder, self._log, theirs))
        self._process.start()
        theirs.close()

    def sample(self, steps: int) -> Sample:
        """Do this many steps; raise ``VariantFailed`` if the Trainer fails or ends before."""
        answer = self._ask(steps)
        if not isinstance(answer, Sample):
            raise VariantFailed(f"training ended before another {steps} steps were done")
        return answer

    def finish(self) -> Summary:
        """End training."""
        answer = self._ask(0)
        self.stop()
        assert isinstance(answer, Summary)
        return answer

    def stop(self) -> None:
        """End the process, at once."""
        _ours.discard(self._connection)
        self._connection.close()
        self._process.terminate()
        self._process.join()

    def _ask(self, steps: int) -> Sample | Summary:
        try:
            self._connection.send(steps)
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise VariantFailed(f"its process ended with code {self._process.exitcode}; see {self._log}") from None
        if isinstance(answer, VariantFailed):
            raise answer
        return answer


def _serve(job: Job, variant: Variant, folder: Path, log: Path, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    for end in _ours:  # which a forked process has too: while it is open, nobody notices that the parent has gone
        end.close()
    with log.open("w", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        connection.send(_fit(job, variant, connection, folder))
    except (EOFError, ConnectionError):
        pass  # the parent has gone
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")  # of what may be a page; the log has it all
        connection.send(VariantFailed(f"{type(error).__name__}: {first}"))


def _fit(job: Job, variant: Variant, connection: Connection, folder: Path) -> Summary:
    steps = connection.recv()
    make = load(job.module, "module") if job.module else None
    namespace = _namespace_of(make) if isinstance(make, type) else preferred_namespace()
    if job.config is not None:
        sampler = _sampler(namespace, connection, steps)
        trainer = _fit_configured(job, variant, namespace, sampler, folder)
    else:
        assert make is not None
        importlib.import_module(namespace.package).seed_everything(job.seed, workers=True, verbose=False)
        module = make(**job.args)
        namespace = _namespace_of(type(module))
        data = load(job.data, "data")(**job.data_args) if job.data else None
        sampler = _sampler(namespace, connection, steps)
        settings = _settings(job, variant, namespace, folder)
        callbacks = [sampler, *_callbacks(variant, namespace)]
        trainer = importlib.import_module(namespace.package).Trainer(
            accelerator=job.accelerator, logger=False, enable_checkpointing=False, callbacks=callbacks, **settings
        )
        trainer.fit(_compiled(module, variant), data)
    report = getattr(trainer.strategy, "report", None)
    if not isinstance(report, CompileReport):  # Lightning's own strategies have none
        return Summary()
    return Summary(report.ort_node_fraction, report.ort_runs, [str(line) for line in report.optimizers])


def _fit_configured(job: Job, variant: Variant, namespace: LightningNamespace, sampler: Any, folder: Path) -> Any:
    """Do what ``python project.py fit --config`` does, with this variant's settings in place of the file's."""
    cli = importlib.import_module(f"{namespace.package}.cli")

    class Cli(cli.LightningCLI):  # type: ignore[name-defined]
        model: Any

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            return super().instantiate_trainer(**kwargs, **_settings(job, variant, namespace, folder))

        def before_fit(self) -> None:
            self.model = _compiled(self.model, variant)

    return Cli(
        load(job.module, "module") if job.module else None,
        load(job.data, "data") if job.data else None,
        save_config_callback=None,
        trainer_defaults={"callbacks": [sampler, *_callbacks(variant, namespace)]},
        args=["fit", f"--config={job.config}", f"--seed_everything={job.seed}"],
    ).trainer


def _settings(job: Job, variant: Variant, namespace: LightningNamespace, folder: Path) -> dict[str, Any]:
    """Return the Trainer's arguments that a variant decides."""
    ours = importlib.import_module(namespace.module)
    settings: dict[str, Any] = {
        "strategy": "auto",
        "devices": 1,
        "num_nodes": 1,
        "min_epochs": 0,
        "max_epochs": -1,
        "min_steps": None,
        "max_steps": _MANY,
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if variant.is_ours:
        # compiling is what is measured, and the Trainer does not know how many steps it will be asked for
        config = {"start": "now"} | job.ort_config | ({"engine": "auto"} if variant.engine == "auto" else {})
        settings["strategy"] = ours.ORTStrategy(config=config, optim=variant.optim or "auto")
    if variant.precision in MATMUL_PRECISIONS:
        settings.update(precision=None, plugins=[ours.ORTMatmulPrecision(variant.precision)])
    elif variant.precision is not None:
        settings["precision"] = variant.precision
    return settings


def _callbacks(variant: Variant, namespace: LightningNamespace) -> list[Any]:
    if variant.is_ours or variant.optim is None:
        return []
    return [importlib.import_module(namespace.module).ORTOptimizer(variant.optim)]


def _compiled(module: Any, variant: Variant) -> Any:
    if variant.engine == "compile":
        # not torch.compile(module), which captures training_step: in Lightning 2.6 self.log cannot be traced
        # isolated: the frames around children are one function to dynamo, which leaves all after the eighth as they are
        ModuleShims(callable_children(module), compile_isolated).install()
    return module


def _namespace_of(kind: type) -> LightningNamespace:
    for namespace in NAMESPACES:
        if any(base.__module__.startswith(f"{namespace.package}.") for base in kind.__mro__):
            return namespace
    raise TypeError(
        f"{kind.__module__}.{kind.__qualname__} is not a LightningModule: name a class or function that creates one."
    )


def _sampler(namespace: LightningNamespace, connection: Connection, steps: int) -> Any:
    callback = importlib.import_module(f"{namespace.package}.callbacks").Callback
    return type("Sampler", (_Sampler, callback), {})(connection, steps)


class _Sampler:
    """A callback that sends a sample after so many steps, and then waits to be told the next number."""

    def __init__(self, connection: Connection, steps: int) -> None:
        self._connection, self._steps = connection, steps
        self._begin()

    def _begin(self) -> None:
        self._losses: list[Tensor] = []
        self._done = 0
        self._start = time.perf_counter()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock."""
        self._begin()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock."""
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Go on where it was stopped."""
        self._start += time.perf_counter() - self._validation_start

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Keep the loss; after the last step send the sample."""
        self._done += 1
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach().clone())
        if self._done < self._steps:
            return
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - self._start) / self._done
        self._connection.send(Sample(seconds, [loss.item() for loss in self._losses], _peak_bytes(device)))
        self._steps = self._connection.recv()
        trainer.should_stop = self._steps == 0
        self._begin()


def _peak_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
