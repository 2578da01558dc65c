"""Choose between the variants of an op, and torch's own kernel.

A gradient kernel of onnxruntime may be slower than its expansion into a dozen ONNX ops, and both slower than torch's
kernel, which reads and writes memory once. That depends on the op, its sizes, the build and the machine, so each op
that has variants is timed alone, on tensors of its real shapes.
"""

import functools
import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.cache.cache import Cache
from lightning_ort.compiler.cache.fingerprint import fingerprint
from lightning_ort.compiler.executors.base import Executor
from lightning_ort.compiler.graphs.nodes import VARIANT, int_hint, is_view, values_of
from lightning_ort.compiler.machine import openmp
from lightning_ort.compiler.machine.out_of_memory import free_memory_of, is_out_of_memory
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.region import TORCH, Candidates, Region, RegionRejected, finalize_region

log = logging.getLogger(__name__)

# for fewer elements every variant is fast
_MIN_ELEMENTS = 2**16
# what two more borders between regions cost: torch has to win by more than that
_BORDERS_MS = 0.4


@dataclass(frozen=True)
class OpAutotuner:
    """Chooses variants for the ops that an executor runs; the arguments are those of :class:`~.placer.Placer`."""

    executor: Executor
    cache: Cache
    agree: Callable[[str, dict[str, float]], dict[str, float]]
    check_budget: Callable[[], None] = lambda: None

    def choose(self, gm: fx.GraphModule, candidates: Candidates) -> None:
        """Write the fastest variant to the metadata of each node, and demote a node if torch's kernel is faster."""
        name = self.executor.name
        views = {node for node in candidates.executors if is_view(node)}
        for node in [node for node, names in candidates.executors.items() if names[0] == name and _is_large(node)]:
            variants = self.executor.op_variants(node)
            if not variants:
                continue
            self.check_budget()
            region = Region(name, 1, [node, *(user for user in node.users if user.target is operator.getitem)])
            finalize_region(region, gm, views, candidates)
            text = fingerprint(region.module.graph)
            time = functools.partial(self._time, region, variants)
            cached = self.cache.times(text, self.executor.cache_key, time)
            times = self.agree(f"op {text}", cached)
            own_times = {variant: times[variant] for variant in variants if variant in times}
            if not own_times:  # no variant works, or memory is too scarce: the region's build will report why
                continue
            best = min(own_times, key=own_times.__getitem__)
            if times.get(TORCH, math.inf) + _BORDERS_MS < own_times[best]:
                in_torch = f"{times[TORCH]:.3f} ms in torch"
                why = f"{node.target} alone: {own_times[best]:.3f} ms on {self.executor.title}, {in_torch}"
                candidates.demote(region, Reason(ReasonType.SLOWER, why))
            else:
                node.meta[VARIANT] = best

    def _time(self, region: Region, variants: Sequence[str]) -> dict[str, float]:
        """Return the times in ms of torch's kernel and of each variant that works and differs from the others."""
        (node,) = region.module.graph.find_nodes(op="call_function", target=region.nodes[0].target)
        calls: dict[str, Callable[..., Any]] = {}
        artifacts: set[bytes] = set()

        def leave_out(variant: str, error: Exception) -> None:
            log.debug("%s as %s: %s", node.target, variant, error)

        threads = max(self.executor.thread_counts(region))
        for variant in variants:
            node.meta[VARIANT] = variant
            try:
                artifact = self.executor.convert(region)
                if artifact not in artifacts:  # such as the kernel of gelu's other approximation
                    artifacts.add(artifact)
                    calls[variant] = self.executor.build(region, artifact, threads)
            except RegionRejected as rejection:
                leave_out(variant, rejection)
        calls[TORCH] = region.module
        try:
            args = timing.samples(region)
            calls = timing.warm_up(calls, args, leave_out)
            # in a whole region, other ops have ended torch's threads already
            return timing.race(calls, args, before=openmp.pause_openmp, check_budget=self.check_budget)
        except Exception as error:  # onnxruntime's own exceptions derive from Exception directly
            if not is_out_of_memory(error):
                raise
            log.debug("%s could not be timed", node.target, exc_info=True)
            free_memory_of(error)
            return {}


def _is_large(node: fx.Node) -> bool:
    values = (value for source in (node, *node.all_input_nodes) for value in values_of(source))
    return any(
        isinstance(value, torch.Tensor) and math.prod(map(int_hint, value.shape)) >= _MIN_ELEMENTS for value in values
    )
