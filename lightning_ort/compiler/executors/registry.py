"""The executors: one line each."""

from lightning_ort.compiler.executors.base import Executor, GraphExecutor
from lightning_ort.compiler.executors.inductor import INDUCTOR
from lightning_ort.compiler.executors.ort.executor import OrtExecutor

# of regions, in order of preference; torch runs the rest
EXECUTORS: tuple[type[Executor], ...] = (OrtExecutor,)

# of whole graphs, which a step is timed with under engine="auto"
GRAPH_EXECUTORS: dict[str, GraphExecutor] = {executor.name: executor for executor in (INDUCTOR,)}
