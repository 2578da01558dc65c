"""The executors of regions, one line each, in order of preference; torch runs the rest."""

from lightning_ort.compiler.executors.base import Executor
from lightning_ort.compiler.executors.ort.executor import OrtExecutor

EXECUTORS: tuple[type[Executor], ...] = (
    OrtExecutor,
)  # fmt: skip
