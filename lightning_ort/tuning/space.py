"""What is tried: :func:`dimensions`, in the order of what they usually give for their time."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ort._arguments import check_number, passed
from lightning_ort.compiler.engines import label_of, others_on_cpu
from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.probe import Facts

_EMULATED = 0.5  # times as fast as float32: a processor without instructions for bfloat16
_AHEAD = 8  # batches that a process loads ahead; torch's DataLoader has 2
Option = tuple[dict[str, Any], str]  # settings of a candidate that are changed, and why that is tried


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user insists on; ``ValueError`` or ``TypeError`` for what is not allowed."""

    seconds: float = 300.0  # for everything
    keep_numerics: bool = False  # keep float32 and the algorithm of the optimizer
    tolerance: float = 0.01  # largest relative difference of the loss

    def __post_init__(self) -> None:
        for name, value in (("time", self.seconds), ("tolerance", self.tolerance)):
            check_number(name, value)
            if value <= 0:
                raise ValueError(f"{passed(name, value)}: must be above 0.")


def dimensions(facts: Facts, limits: Limits, plain: bool) -> dict[str, list[Option]]:
    """Return what may be tried, by name, beside leaving it as it is.

    ``plain`` says that the user's own settings are stock Lightning in float32.
    """
    fewer_bits = not limits.keep_numerics and facts.precision == "32-true" and facts.bfloat16 >= _EMULATED
    on_cpu, found = facts.device == "cpu", dict[str, list[Option]]()
    if on_cpu and facts.threads > 1:  # before others: on a busy machine nothing else can be told
        found["threads"] = [({"threads": 1}, "small operations take longer to share than to do")]
    found["engine and precision"] = [*_engines(facts, plain, fewer_bits)]
    if facts.loader_changes:
        found["data loading"] = [*_loading(facts)]
    if facts.batches_change and not (limits.keep_numerics and facts.batch_norm):
        found["batch size"] = [*_batches(facts.batch_size, facts.accumulate)]
    if facts.convolutions:
        found["layout"] = [({"channels_last": True}, "the layout in which convolutions' kernels are fastest")]
    if fewer_bits:
        level = {"precision": "medium" if on_cpu else "high"}
        found["matrix products"] = [(level, "float32 matrix products with fewer bits inside")]
    return {name: options for name, options in found.items() if options}


def at(dimensions: Mapping[str, list[Option]], numbers: Mapping[str, int]) -> tuple[Candidate, str]:
    """Return the candidate of these options, counted from 1, and why it is tried.

    Among the options of all dimensions the first one that changes a setting has it.
    """
    changes: dict[str, Any] = {}
    reasons = []
    for name, options in dimensions.items():
        if number := numbers.get(name, 0):
            changed, reason = options[number - 1]
            if changed.keys() - changes:
                reasons.append(reason)
            changes = {**changed, **changes}
    candidate = Candidate(**changes)
    if candidate.is_ours and candidate.optim == "auto":  # of ort itself
        candidate = candidate.but(optim=None)
    return candidate, "; ".join(reasons)


def _engines(facts: Facts, plain: bool, fewer_bits: bool) -> Iterator[Option]:
    if not plain:
        same = {"engine": "stock", "precision": "32-true"}
        yield same, "Lightning's own strategy in float32: losses are compared with it"
    yield {"engine": "ort"}, "regions of the step on ONNX Runtime where they are faster; fused optimizer"
    optim = {"optim": "auto"} if facts.fusable else {}
    if optim:
        yield {"engine": "stock", **optim}, "torch's fused optimizer: one kernel for all parameters"
    for precision in ("bf16-mixed", "16-mixed")[: fewer_bits * (1 if facts.device == "cpu" else 2)]:
        yield {"engine": "stock", "precision": precision, **optim}, "half the bits in matrix products"
        yield {"engine": "ort", "precision": precision}, "half the bits in matrix products, with ONNX Runtime"
    if others := others_on_cpu():
        yield {"engine": "auto"}, f"{' and '.join(map(label_of, others))} beside ONNX Runtime"


def _loading(facts: Facts) -> Iterator[Option]:
    more = {"num_workers": 1, "persistent_workers": True}
    if facts.num_workers == 0:
        yield more, "a process loads while this one computes"
    else:
        yield {"prefetch_factor": _AHEAD}, f"{_AHEAD} batches of each process ahead even out slow ones"
    wanted = min(os.cpu_count() or 1, 4)
    shared = not facts.stream or facts.num_workers > 1  # or else each process loads all examples
    if shared and wanted > 1 and wanted != facts.num_workers and not facts.made_of_tensors:
        yield {**more, "num_workers": wanted}, f"{wanted} processes load while this one computes"
    if facts.device == "cuda":
        workers = {**more, "num_workers": max(facts.num_workers, 1)}
        yield {**workers, "pin_memory": True}, "copies to the GPU need no staging"


def _batches(size: int, accumulate: int) -> Iterator[Option]:
    whole = size * accumulate
    sizes = [whole // n for n in range(1, accumulate) if whole % n == 0]  # larger ones, the largest first
    sizes += [size // 2] if size % 2 == 0 and size > 1 else []
    for other in sizes[:4]:
        what = "fewer calls" if other > size else "activations that stay in the processor's cache"
        yield {"batch_size": other, "accumulate": whole // other}, f"the same {whole} examples a step; {what}"
