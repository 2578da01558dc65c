"""What is tried: :func:`stages`, in the order of what they usually give for their time.

Each stage changes a few settings of the best so far, and the fastest goes on: a greedy search. Settings of one stage
depend on each other (the precision on the engine); those of different stages hardly do, and each trial costs the start
of a Trainer, so that ten to twenty are all that minutes allow. A sampler such as Optuna's learns from more than that.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_ort._arguments import check_integer, check_number, passed
from lightning_ort.compiler.engines import label_of, others_on_cpu
from lightning_ort.tuning.candidate import Candidate, TuneError
from lightning_ort.tuning.probe import Facts

_EMULATED = 0.5  # times as fast as float32: a processor without instructions for bfloat16
_HALVINGS = 3  # of the batch, at most
_AHEAD = 8  # batches that a process loads ahead; torch's DataLoader has 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user insists on; ``ValueError`` or ``TypeError`` for what is not allowed."""

    seconds: float = 300.0  # for everything
    memory: int | None = None  # bytes of the process, or of the GPU's memory
    effective_batch: int | None = None  # examples between two steps of the optimizer; ``None`` keeps the user's
    keep_numerics: bool = False  # keep float32 and the algorithm of the optimizer
    devices: int = 1  # processes
    tolerance: float = 0.01  # largest relative difference of the loss

    def __post_init__(self) -> None:
        for name, value in (("time", self.seconds), ("tolerance", self.tolerance)):
            check_number(name, value)
            if value <= 0:
                raise ValueError(f"{passed(name, value)}: must be above 0.")
        for name in ("memory", "effective_batch", "devices"):
            if (count := getattr(self, name)) is not None:
                check_integer(name, count, 1)


@dataclass(frozen=True)
class Option:
    """A candidate and why it is tried."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Stage:
    """Candidates that are tried against each other."""

    name: str
    options: Callable[[Candidate], list[Option]]  # for the best so far


def base(facts: Facts, limits: Limits) -> Candidate:
    """Return the user's own settings with the effective batch asked for; ``TuneError`` if that cannot be."""
    wanted = limits.effective_batch
    if wanted is None or wanted == facts.batch_size * facts.accumulate:
        return Candidate()
    reason = _no_other_batches(facts)
    if reason is not None:
        raise TuneError(
            f"--effective-batch={wanted}: the data cannot be batched differently: {reason}. It has batches of"
            f" {facts.batch_size}. Leave the option out, or return a DataLoader(dataset, batch_size)."
        )
    size = max(size for size in range(1, min(wanted, facts.batch_size) + 1) if wanted % size == 0)
    return Candidate(batch_size=size, accumulate=wanted // size)


def stages(facts: Facts, limits: Limits, plain: bool) -> list[Stage]:
    """Return the stages, in their order; ``plain`` says that the user's own settings are stock Lightning in float32."""
    return [
        # first: on a busy machine nothing else can be told before
        Stage("threads", lambda best: list(_threads(best, facts))),
        Stage("engine and precision", lambda best: list(_engines(best, facts, limits, plain))),
        Stage("data loading", lambda best: list(_loading(best, facts))),
        Stage("batch size", lambda best: list(_batches(best, facts, limits))),
        Stage("kernels", lambda best: list(_kernels(best, facts))),
        Stage("processes", lambda best: list(_processes(best, facts, limits))),
        Stage("compilers", lambda best: list(_compilers(best, facts, limits))),
    ]


def memory_stage(facts: Facts, limits: Limits) -> Stage:
    """Return the stage for settings that do not fit: candidates that need less memory, the cheap ones first."""
    return Stage("memory", lambda best: list(_savings(best, facts, limits)))


def reference(best: Candidate) -> Candidate:
    """Return what losses are compared with: Lightning's own strategy in float32, with the same batches."""
    return Candidate(engine="stock", precision="32-true", batch_size=best.batch_size, accumulate=best.accumulate)


def _threads(best: Candidate, facts: Facts) -> Iterator[Option]:
    if facts.device == "cpu" and facts.threads > 1:
        yield Option(best.but(threads=1), "small operations take longer to share than to do")


def _engines(best: Candidate, facts: Facts, limits: Limits, plain: bool) -> Iterator[Option]:
    if not plain:
        yield Option(reference(best), "Lightning's own strategy in float32: losses are compared with it")
    yield Option(best.but(engine="ort"), "regions of the step on ONNX Runtime where they are faster; fused optimizer")
    if facts.fusable:
        yield Option(best.but(engine="stock", optim="auto"), "torch's fused optimizer: one kernel for all parameters")
    if limits.keep_numerics or facts.precision != "32-true" or facts.bfloat16 < _EMULATED:
        return
    low = ["bf16-mixed"] if facts.device == "cpu" else ["bf16-mixed", "16-mixed"]
    optim = "auto" if facts.fusable else None
    for precision in low:
        yield Option(best.but(engine="stock", precision=precision, optim=optim), "half the bits in matrix products")
        yield Option(best.but(engine="ort", precision=precision), "half the bits in matrix products, with ONNX Runtime")


def _processes(best: Candidate, facts: Facts, limits: Limits) -> Iterator[Option]:
    size = best.batch_size or facts.batch_size
    if limits.devices == 1 or size % limits.devices or _no_other_batches(facts) is not None or facts.stream:
        return
    if limits.keep_numerics and facts.batch_norm:
        return
    # each with its share of the batch, so that a step sees as many examples as before
    each = best.but(batch_size=size // limits.devices, activation_memory_budget=None, host_memory=None)
    yield Option(each.but(engine="ddp"), f"{limits.devices} processes that average their gradients")
    each = each.but(optim=None)
    yield Option(each.but(engine="ort_ddp"), f"{limits.devices} processes that average their gradients, each on ort")
    yield Option(each.but(engine="ort_zero1_native"), "the same, each with a share of the optimizer states")
    if importlib.util.find_spec("deepspeed") is not None and not limits.keep_numerics:
        yield Option(each.but(engine="ort_zero1"), "the same, by DeepSpeed")


def _loading(best: Candidate, facts: Facts) -> Iterator[Option]:
    more = best.but(num_workers=1, persistent_workers=True)
    cores = os.cpu_count() or 1
    if facts.num_workers == 0:
        yield Option(more, "a process loads while this one computes")
    else:
        yield Option(best.but(prefetch_factor=_AHEAD), f"{_AHEAD} batches of each process ahead even out slow ones")
    wanted = min(cores, 4)
    shared = not facts.stream or facts.num_workers > 1  # or else each process loads all examples
    if shared and wanted > 1 and wanted != facts.num_workers and not facts.made_of_tensors:
        yield Option(more.but(num_workers=wanted), f"{wanted} processes load while this one computes")
    if facts.device == "cuda":
        workers = max(facts.num_workers, 1)
        yield Option(more.but(num_workers=workers, pin_memory=True), "copies to the GPU need no staging")


def _batches(best: Candidate, facts: Facts, limits: Limits) -> Iterator[Option]:
    if _no_other_batches(facts) is not None or (limits.keep_numerics and facts.batch_norm):
        return
    size, accumulate = best.batch_size or facts.batch_size, best.accumulate or facts.accumulate
    whole = size * accumulate
    sizes = [whole // n for n in range(1, accumulate) if whole % n == 0]  # larger ones, the largest first
    sizes += [size // 2] if size % 2 == 0 and size > 1 else []
    for other in sizes[:4]:
        what = "fewer calls" if other > size else "activations that stay in the processor's cache"
        yield Option(best.but(batch_size=other, accumulate=whole // other), f"the same {whole} examples a step; {what}")


def _kernels(best: Candidate, facts: Facts) -> Iterator[Option]:
    if facts.convolutions:
        yield Option(best.but(channels_last=True), "the layout in which convolutions' kernels are fastest")
    if best.is_ours and facts.device == "cpu":
        yield Option(best.but(host_memory="default"), "freed memory goes back to the system")


def _compilers(best: Candidate, facts: Facts, limits: Limits) -> Iterator[Option]:
    if best.engine in (None, "stock", "ort") and (others := others_on_cpu()):
        optim = None if best.optim == "auto" else best.optim  # of ort itself
        yield Option(best.but(engine="auto", optim=optim), f"{' and '.join(map(label_of, others))} beside ONNX Runtime")
    has_fewer_bits = facts.bfloat16 >= _EMULATED and facts.precision == "32-true"
    if has_fewer_bits and not limits.keep_numerics and best.precision is None:
        level = "medium" if facts.device == "cpu" else "high"
        yield Option(best.but(precision=level), "float32 matrix products with fewer bits inside")


def _savings(best: Candidate, facts: Facts, limits: Limits) -> Iterator[Option]:
    size, accumulate = best.batch_size or facts.batch_size, best.accumulate or facts.accumulate
    smaller = [best]
    if _no_other_batches(facts) is None and not (limits.keep_numerics and facts.batch_norm):
        for _ in range(_HALVINGS):
            if size % 2:
                break
            size, accumulate = size // 2, accumulate * 2
            smaller.append(best.but(batch_size=size, accumulate=accumulate))
            yield Option(smaller[-1], "smaller batches, accumulated: fewer activations at once")
    if facts.blocks:
        yield Option(best.but(checkpoint_blocks=True), "repeated blocks are computed again in the backward pass")
        if len(smaller) > 1:
            yield Option(smaller[-1].but(checkpoint_blocks=True), "both")
    for budget in (0.5, 0.1):
        yield Option(best.but(engine="ort", activation_memory_budget=budget), "cheap operations are computed again")
    if not limits.keep_numerics and "AdamW" in facts.optimizers:
        for name in ("adamw_anyprecision", "adamw_bnb_8bit"):
            yield Option(smaller[-1].but(optim=name), "smaller states of the optimizer")


def _no_other_batches(facts: Facts) -> str | None:
    if not facts.automatic_optimization:
        return "the module optimizes manually, so that Lightning cannot accumulate gradients"
    return facts.fixed_batches
