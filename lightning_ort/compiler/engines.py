"""What a whole step can run on: :data:`ENGINES`, with all that is particular to each.

A new engine is one more entry, its place in :data:`ON_CPU` or :data:`ON_GPU`, and a function that makes its backend of
``torch.compile``, such as :func:`~lightning_ort.compiler.executors.inductor.backend_for`. The race, the report and the
console read this table, and ask for no engine by name but ONNX Runtime and the unchanged step. What a backend raises
ends no fit: the engine is not used then, and the report says why.

A backend is ``GuardedBackend(compile, *told)`` (:mod:`~lightning_ort.compiler.executors.inductor`), which leaves to
eager what is on the list of :mod:`.conflicts`, and graphs that fail. ``compile(gm, inputs)`` gets a graph as dynamo
captured it, with parameters among its inputs, and returns a function of the inputs that returns a sequence of the
results. Gradients are its own matter: a compiler of forward and backward graphs of ATen operations gets both from
``compat.dynamo.aot_backend``. Where the setting ``dropout_masks`` is ``"exact"``, its random numbers
have to be those of eager: it calls torch's own random operations, in the order of the graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

# Working seconds, with those of audits and turns, and for each operation with a gradient that an unchanged step calls.
# With one thread, the first of a process: 0.6 for an MLP (14 operations), 0.9 and 1.2 for deeper ones (35, 37), 0.8 for
# an LSTM (10), 3.0 for a small GPT (197), 7.1 for a BERT (383).
COST, COST_PER_OPERATION = 0.3, 0.015
FIRST_COMPILATION = 0.3  # of a process, more seconds: imports, and what torch prepares once
# Of the cold start-up's seconds, until a warm one has been seen: 0.46 and 0.47 for an MLP, 0.50 and 0.56 for a small
# GPT (processor seconds, one thread, beside other programs).
WARM = 0.6
EVALUATION = 0.5  # of what the training step takes: there is no backward graph
DISPATCH_BOUND = 0.005  # seconds of a step that is mostly Python and launches of small kernels
SAVED_DISPATCH, SAVED = 0.3, 0.1  # shares of a step that capture saves on a GPU
RECORDING_COST, RECORDING_COST_PER_OPERATION = 0.01, 0.0005  # seconds
# Of each operation and its gradient, what Python and autograd take, and the most that was seen of a step; nearly always
# that is saved, so it may cost a half of what it is to save.
RECORDING_SAVED_PER_OPERATION, RECORDING_SAVED, RECORDING_STAKE = 1e-5, 0.5, 0.5
INDUCTOR_SAVED = 0.1  # a share of the step, before anything was tried; it was 0.06 to 0.2 where inductor won
ORT_SAVED = 0.02  # a share of the step, beside a recording: it was nothing in five models, from an MLP to a BERT
INDUCTOR_COST, INDUCTOR_COST_PER_OPERATION = 15.0, 0.01  # seconds
# On a GPU it saved 0.52, 0.47 to 0.60, 0.24 to 0.35 and nothing of the steps of GPT-2, Llama, BERT and a ViT in bf16.
# What is only supposed may cost a quarter of what it may save, so that no more than a tenth of a run is lost where it
# saves nothing, and nothing is lost where it saves a tenth or more; what was measured in an earlier run, a half.
INDUCTOR_SAVED_ON_GPU = 0.4
STAKE, STAKE_IF_KNOWN = 0.25, 0.5
INDUCTOR_WARM = 0.2  # of the cold start-up's seconds: torch keeps what the C++ compiler made
INDUCTOR_TO_ORT = 2.0  # times as long as compiling the same graphs for ONNX Runtime, at least


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What is known of a step that an engine has not compiled yet."""

    on_gpu: bool  # whether it computes on a GPU of CUDA
    trains: bool  # whether it is the training step
    operations: float  # how many operations with a gradient it calls
    usual: float  # the seconds that it takes unchanged; 0 if they are not known
    is_first: bool  # whether nothing was compiled for ONNX Runtime in this process
    on_ort: float  # seconds that compiling it for ONNX Runtime has taken in this run; 0 if it was not tried
    training: float  # the same of the training step, for this engine
    recorded: bool = False  # whether what was recorded of it is compiled
    gained: float = 0.0  # then, the share of the unchanged step that the way in use saves


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What a step can run on.

    Args:
        label: What people read.
        cost: Returns the seconds until a step runs on it for the first time.
        warm: Returns the share of these that an earlier run has not made superfluous.
        saves: Returns the share of a step that it saves at most, before it was tried; 1 if nobody knows.
        stake: The share of what it saves that it may cost, where that is known well enough to need no other limit.
        backend: Takes the setting ``dropout_masks``, a function that gets what a graph failed with, and one that
            returns the :class:`~lightning_ort.compiler.request.CompileRequest`; returns a backend of
            ``torch.compile``. ``None``: the strategy's own, or none.
        obstacle: Takes whether it is for a GPU; returns why it cannot compile here, such as a missing program; nothing
            if it can. It is not tried then. With ``engine=None`` on a CPU one of :data:`ON_CPU` beside ONNX Runtime has
            to be able to.
        package: The distribution of which another version makes what is known of it, and all of the cache, obsolete.
        records: Whether its results are at the same addresses in each run, as those of CUDA graphs. Sizes may not vary
            then, nor may gradients add up to older ones.
        otherwise: The engine that is tried where this one cannot go on; "" for none.
    """

    label: str
    cost: Callable[[StepFacts], float] = lambda step: 0.0
    warm: Callable[[], float] = lambda: 1.0
    saves: Callable[[StepFacts], float] = lambda step: 1.0
    stake: float = 0.0
    backend: Callable[..., Callable[..., Any]] | None = None
    obstacle: Callable[[bool], str] = lambda on_gpu: ""
    package: str = ""
    records: bool = False
    otherwise: str = ""


def ort_fixed_cost(is_first: bool) -> float:
    """Return the seconds that ONNX Runtime needs for a step of no operations."""
    return COST + FIRST_COMPILATION * is_first


def _ort_cost(step: StepFacts) -> float:
    if not step.trains and step.training:
        return EVALUATION * step.training
    return ort_fixed_cost(step.is_first) + COST_PER_OPERATION * step.operations


def _ort_obstacle(on_gpu: bool) -> str:
    if not on_gpu:  # the backend has looked whether there is an onnxruntime
        return ""
    from lightning_ort.compiler.executors.ort import kernels  # not at the top: whoever shows a report needs no torch

    if (reason := kernels.unavailable()) is not None:
        return reason.text
    missing = kernels.providers_for(kernels.ANY_GPU) is None
    return "the installed onnxruntime computes nothing on a GPU" if missing else ""


def _ort_saves(step: StepFacts) -> float:
    if step.recorded:
        return step.gained + ORT_SAVED
    if not step.on_gpu or not step.trains:
        return 1.0
    return SAVED_DISPATCH if step.usual < DISPATCH_BOUND else SAVED


def _inductor() -> ModuleType:
    from lightning_ort.compiler.executors import inductor  # not at the top: whoever shows a report needs no torch

    return inductor


def _recording_cost(step: StepFacts) -> float:
    """Steps that are watched or run twice, and a sixth of a millisecond for each of some three calls an operation."""
    return RECORDING_COST + 5 * step.usual + RECORDING_COST_PER_OPERATION * step.operations


def _recording_saves(step: StepFacts) -> float:
    dispatch = RECORDING_SAVED_PER_OPERATION * step.operations
    return min(RECORDING_SAVED, dispatch / step.usual) if step.usual else RECORDING_SAVED


_INDUCTOR = Engine(
    label="inductor",
    # a step of a hundred graphs has no more operations than one of two
    cost=lambda step: max(INDUCTOR_COST + INDUCTOR_COST_PER_OPERATION * step.operations, INDUCTOR_TO_ORT * step.on_ort),
    warm=lambda: INDUCTOR_WARM if _inductor().has_cache() else 1.0,
    saves=lambda step: INDUCTOR_SAVED_ON_GPU if step.on_gpu else step.gained + INDUCTOR_SAVED,
    backend=lambda masks, *told: _inductor().backend_for(masks, False, *told),
    obstacle=lambda on_gpu: _inductor().obstacle(on_gpu),
)
ORT, TORCH, RECORDED = "ort", "torch", "recorded"
ENGINES: Mapping[str, Engine] = {
    RECORDED: Engine(label="PyTorch, recorded", cost=_recording_cost, saves=_recording_saves, stake=RECORDING_STAKE),
    ORT: Engine(label="ONNX Runtime", cost=_ort_cost, warm=lambda: WARM, saves=_ort_saves, obstacle=_ort_obstacle),
    TORCH: Engine(label="PyTorch"),  # the unchanged step
    "inductor": _INDUCTOR,
    "inductor-graphs": replace(  # torch.compile's mode "reduce-overhead"
        _INDUCTOR,
        label="inductor, CUDA graphs",
        backend=lambda masks, *told: _inductor().backend_for(masks, True, *told),
        records=True,
        otherwise="inductor",
    ),
}
# The order in which they are tried on a CPU and on a GPU. Inductor takes several times as long to compile. On a GPU it
# compiles once: a recording runs the same kernels, and takes 0 to 2 % less time. ONNX Runtime's standard kernels fuse
# few elementwise operations and no gradients, so a training step is several times as many kernels as in eager: only
# steps without a backward pass are tried.
ON_CPU: Sequence[str] = (RECORDED, ORT, "inductor")
ON_GPU: Sequence[str] = ("inductor-graphs", ORT)
SAVES_MEMORY = "inductor"  # where memory is the aim; a recording keeps memory of its own


def order(on_gpu: bool, trains: bool, may_record: bool) -> list[str]:
    """Return the engines that a step, with a backward pass or as a recording, is tried on, in their order."""
    names = [name for name in (ON_GPU if on_gpu else ON_CPU) if not (on_gpu and trains and name == ORT)]
    allowed = (ENGINES[name].otherwise if ENGINES[name].records and not may_record else name for name in names)
    return [name for name in dict.fromkeys(allowed) if name]


def others_on_cpu() -> list[str]:
    """Return the engines beside ONNX Runtime that can compile on a CPU here."""
    return [name for name in ON_CPU if name not in (RECORDED, ORT) and not ENGINES[name].obstacle(False)]


def label_of(name: str) -> str:
    """Return what people read for what runs a step or a region."""
    return ENGINES[name].label if name in ENGINES else name


def step_label(name: str) -> str:
    """Return what people read for the engine of a whole step: PyTorch also runs parts of a compiled one."""
    return "uncompiled PyTorch" if name == TORCH else label_of(name)
