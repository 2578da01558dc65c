"""Trainers for ``lightning-ort bench``: each in a process of its own, which does as many steps as it is told to."""

import importlib
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning_ort._imports import LightningNamespace, preferred_namespace
from lightning_ort.cli.load import load
from lightning_ort.compat.dynamo import compile_isolated
from lightning_ort.optim.registry import check_name
from lightning_ort.strategies.capture.shims import ModuleShims, callable_children
from lightning_ort.tuning.candidate import MATMUL_PRECISIONS
from lightning_ort.tuning.trainer_process import (
    ENDLESS,
    Summary,
    TrainerProcess,
    make_sampler,
    namespace_of_class,
    summary_of,
)

ENGINES = ("stock", "compile", "ort", "auto", "off")


@dataclass(frozen=True)
class Variant:
    """One way to train a module, written ``ENGINE[+OPTIM][@PRECISION]``.

    Args:
        engine: ``"stock"`` (Lightning's own strategy), ``"compile"`` (the same, and ``torch.compile`` for the module's
            children), ``"ort"``, ``"auto"`` (the same with ``ORTConfig(engine="auto")``) or ``"off"`` (the same with
            ``ORTConfig(engine="torch")``: its optimizer and the memory that it keeps, without ONNX Runtime).
        optim: An implementation of the optimizer, as in ``ORTStrategy(optim=...)``. Left out, it is ``"auto"`` under
            ``"ort"``, ``"auto"`` and ``"off"``, and what the module configures elsewhere.
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
        return self.engine in ("ort", "auto", "off")

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


class Worker(TrainerProcess):
    """A process with the Trainer of a variant."""

    def __init__(self, job: Job, variant: Variant, folder: Path) -> None:
        super().__init__(partial(_fit, job, variant), folder)


def _fit(job: Job, variant: Variant, connection: Connection, folder: Path) -> Summary:
    steps = connection.recv()
    make = load(job.module, "module") if job.module else None
    namespace = namespace_of_class(make) if isinstance(make, type) else preferred_namespace()
    if job.config is not None:
        sampler = make_sampler(namespace, connection, steps)
        trainer = _fit_configured(job, variant, namespace, sampler, folder)
    else:
        assert make is not None
        importlib.import_module(namespace.package).seed_everything(job.seed, workers=True, verbose=False)
        module = make(**job.args)
        namespace = namespace_of_class(type(module))
        data = load(job.data, "data")(**job.data_args) if job.data else None
        sampler = make_sampler(namespace, connection, steps)
        settings = _settings(job, variant, namespace, folder)
        callbacks = [sampler, *_callbacks(variant, namespace)]
        trainer = importlib.import_module(namespace.package).Trainer(
            accelerator=job.accelerator, logger=False, enable_checkpointing=False, callbacks=callbacks, **settings
        )
        trainer.fit(_compiled(module, variant), data)
    return summary_of(trainer.strategy)


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
        **ENDLESS,
        "strategy": "auto",
        "devices": 1,
        "default_root_dir": folder,
    }
    if variant.is_ours:
        # compiling is what is measured, and the Trainer does not know how many steps it will be asked for
        chosen = {"auto": {"engine": "auto"}, "off": {"engine": "torch"}}.get(variant.engine, {})
        config = {"start": "now", "engine": "ort"} | job.ort_config | chosen
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
