"""Which way to run an op that can be run in several: the forms of its converter, or torch's own kernel.

A gradient kernel of onnxruntime may be slower than its expansion into a dozen ONNX ops, and both slower than torch's
kernel, which reads and writes memory once: it depends on the op, its sizes, the build and the machine. So each such op
of a graph is timed by itself, on tensors of its real shapes.
"""

import functools
import logging
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from lightning_ort.compiler import openmp
from lightning_ort.compiler import placer as placement
from lightning_ort.compiler import regions as partitioning
from lightning_ort.compiler.cache import Cache
from lightning_ort.compiler.executors.ort import session
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.compiler.executors.ort.conversion.graph import VARIANT, variants_of
from lightning_ort.compiler.executors.ort.kernels import Kernels
from lightning_ort.compiler.executors.ort.support import Support
from lightning_ort.compiler.fingerprint import fingerprint
from lightning_ort.compiler.layouts import int_hint
from lightning_ort.compiler.nodes import is_view, values_of
from lightning_ort.compiler.placer import TORCH
from lightning_ort.compiler.regions import Region, RegionRejected
from lightning_ort.compiler.report import Reason, ReasonType

log = logging.getLogger(__name__)

# with fewer elements every form is fast
_MIN_ELEMENTS = 2**16
# what two more borders between regions cost: an op in torch has to win more than that
_BORDERS_MS = 0.4


@dataclass(frozen=True)
class Forms:
    """Chooses forms for the ops of graphs.

    Args:
        kernels: What the sessions may use.
        device: Where the tensors are.
        threads: Intra-op threads.
        cache: Where times are kept.
        agree: Turns a key and what was measured here into the measurements that all processes of a run go by.

    """

    kernels: Kernels
    device: torch.device
    threads: int
    cache: Cache
    agree: Callable[[str, dict[str, float]], dict[str, float]]

    def choose(self, gm: fx.GraphModule, support: dict[fx.Node, Support]) -> None:
        """Note on each node the form to write it in, and say no to ONNX Runtime where torch's kernel is faster.

        Args:
            gm: The lowered graph.
            support: The answer for each ``call_function`` node; updated in place.

        """
        views = {node for node in support if is_view(node)}
        for node in [node for node, answer in support.items() if answer.ok and _is_large(node)]:
            forms = variants_of(node, self.kernels)
            if not forms:
                continue
            region = Region(1, [node, *(user for user in node.users if user.target is operator.getitem)])
            partitioning.close(region, gm, views)
            description = fingerprint(region.module.graph)
            time = functools.partial(self._time, region, forms)
            kept = self.cache.times(description, self.kernels.providers, (*forms, TORCH), time)
            times = self.agree(f"op {description}", kept)
            measured = {form: times[form] for form in forms if form in times}
            if not measured:  # none runs: what becomes of it is seen when the region is built
                continue
            best = min(measured, key=measured.__getitem__)
            if times.get(TORCH, math.inf) + _BORDERS_MS < measured[best]:
                text = f"{node.target} alone: {measured[best]:.3f} ms on ONNX Runtime, {times[TORCH]:.3f} ms in torch"
                partitioning.demote(region, support, Reason(ReasonType.SLOWER, text))
            else:
                node.meta[VARIANT] = best

    def _time(self, region: Region, forms: tuple[str, ...]) -> dict[str, float]:
        """Return the median time of each form that runs and is another one, and of torch's kernel, in ms."""
        (node,) = region.module.graph.find_nodes(op="call_function", target=region.nodes[0].target)
        candidates: dict[str, Callable[..., object]] = {}
        models: set[bytes] = set()
        for form in forms:
            node.meta[VARIANT] = form
            try:
                model = session.convert(region, self.kernels, region.name).SerializeToString()
                if model not in models:  # as the kernel of gelu's other form is
                    models.add(model)
                    built = session.build(model, region, self.kernels.providers, self.threads, self.device)
                    candidates[form] = BoundSession(region, built, self.device)
            except RegionRejected as failure:
                log.debug("%s as %s: %s", node.target, form, failure)
        candidates[TORCH] = region.module.forward
        # a region's other ops have sent torch's threads to rest already
        return placement.race(candidates, placement.samples(region), before=openmp.pause_openmp)


def _is_large(node: fx.Node) -> bool:
    values = (value for source in (node, *node.all_input_nodes) for value in values_of(source))
    return any(
        isinstance(value, torch.Tensor) and math.prod(map(int_hint, value.shape)) >= _MIN_ELEMENTS for value in values
    )
