"""Decides which executor runs which part of a graph, and builds it.

A graph is cut into regions by what the executors support. Each region is built, and timed against torch on tensors of
its real shapes, dtypes and strides. What fails or is slower goes to the next executor, the last of which is torch, and
the graph is cut again, until every region stands. Under ``torch.use_deterministic_algorithms``
(``Trainer(deterministic=True)``) nothing is timed: a fixed rule on the region's matrix products decides.
"""

import dataclasses
import functools
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_ort._busy import Stopwatch, is_busy
from lightning_ort._memory import resident_bytes
from lightning_ort.compat.torch_graphs import OpOverload, generate_boxed_code
from lightning_ort.compiler.cache.cache import Cache, Entry
from lightning_ort.compiler.cache.fingerprint import fingerprint, node_fingerprint
from lightning_ort.compiler.executors import registry
from lightning_ort.compiler.executors.base import Executor
from lightning_ort.compiler.graphs.nodes import int_hint, is_compute, is_known, is_random, is_view, values_of
from lightning_ort.compiler.machine import openmp
from lightning_ort.compiler.machine.out_of_memory import free_memory_of, is_out_of_memory
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.placement.timing import may_go_out_of_bounds
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.region import (
    TORCH,
    Candidates,
    Region,
    RegionRejected,
    Timing,
    copy_with_views,
    count_flops,
    finalize_region,
    partition,
)
from lightning_ort.compiler.regions.reproducer import Reproducer
from lightning_ort.compiler.report.data import RegionReport
from lightning_ort.compiler.report.plain_types import from_plain
from lightning_ort.compiler.running.guarded_region import GuardedRegion
from lightning_ort.config import ORTConfig

log = logging.getLogger(__name__)

GROWTH = 1.05  # times the process's memory, and what timed regions have freed is given back before the next one
_LARGE = 2**16  # elements: whoever runs a smaller op alone, it is fast
_BORDERS_MS = 0.4  # what two more borders between regions cost: torch has to win by more than that
_OUT_OF_BOUNDS = Reason(ReasonType.NOT_TIMED, "it reads or writes at positions that made-up inputs do not show")


@dataclass(frozen=True)
class Placer:
    """Places the graphs of one backend."""

    config: ORTConfig
    cache: Cache  # where answers, times and artifacts are kept
    fall_back: Callable[[str, Reason], None]  # reports a failure; may raise to refuse the fallback
    record_choice: Callable[[str, Reason], None]  # reports a choice
    # takes a key and what was measured in this process; returns what all processes of the run use
    agree: Callable[[str, dict[str, Any]], dict[str, Any]]
    _reported_ops: set[str] = field(default_factory=set)
    # a transformer's layers have the same nodes
    _answers: dict[tuple[str, ...], Reason | None] = field(default_factory=dict)
    _op_times: dict[str, Mapping[str, float]] = field(default_factory=dict)

    @staticmethod
    def whole_ops() -> frozenset[OpOverload]:
        """Return the ops that executors run whole, so that they are not decomposed."""
        return frozenset(op for executor in registry.EXECUTORS for op in executor.whole_ops())

    def place(
        self, gm: fx.GraphModule, device: torch.device, name: str, check_budget: Callable[[], None] = lambda: None
    ) -> tuple[Callable[[list[Any]], Any], list[RegionReport]]:
        """Cut a lowered graph and build its regions; ``check_budget`` is called between them, and may raise.

        Returns what runs the graph, a boxed function, and the reports of its regions.
        """
        before = resident_bytes() or 0
        executors = {kind.name: kind(self.config, device) for kind in registry.EXECUTORS}
        candidates = self._candidates(gm, list(executors.values()), name)
        timed = self.config.placement == "measured" and not torch.are_deterministic_algorithms_enabled()
        timed_on_gpu = timed and device.type != "cpu"
        if timed:
            for executor in executors.values():
                self._leave_slow_ops(executor, gm, candidates, name, check_budget)
        built: dict[Any, GuardedRegion] = {}
        lost: dict[Any, Timing] = {}
        regions: list[Region] = []
        ran: set[str] = set()  # executors that were timed
        while True:
            regions = partition(gm, candidates, self.config.debug.min_region_nodes, regions)
            new = [region for region in regions if region.executor != TORCH and region.key not in built]
            if not new:
                break
            for region in new:
                if timed_on_gpu and (nodes := may_go_out_of_bounds(region)):
                    candidates.demote(region, _OUT_OF_BOUNDS, nodes)
                    continue
                where = f"{name}/{region.name}"
                builder = RegionBuilder(self, executors[region.executor], region, where, check_budget)
                try:
                    built[region.key] = builder.build()
                except RegionRejected as rejection:
                    reason = builder.reason_of(rejection)
                    candidates.demote(region, reason, rejection.nodes)
                    if rejection.timing is not None:
                        lost[region.key] = rejection.timing
                    if reason.type.is_failure:
                        self.fall_back(where, reason)
                if builder.timed:
                    ran.add(region.executor)
                    if (resident_bytes() or 0) > GROWTH * before:  # or each region adds the holes that its runs leave
                        executors[region.executor].release_memory()
        for used in ran:
            executors[used].release_memory()
        return _assembled(gm, regions, built, candidates, lost)

    def _leave_slow_ops(
        self,
        executor: Executor,
        gm: fx.GraphModule,
        candidates: Candidates,
        name: str,
        check_budget: Callable[[], None],
    ) -> None:
        """Demote large ops that torch runs much faster: its kernels read and write memory once."""
        own = [node for node, names in candidates.executors.items() if names[0] == executor.name]
        large = [node for node in own if _is_large(node)]
        ops = executor.timed_ops() if large else frozenset()  # only what is large need load onnx
        views = {node for node in candidates.executors if is_view(node)}
        for node in [node for node in large if node.target in ops]:
            region = Region(executor.name, 1, [node, *(user for user in node.users if user.target is operator.getitem)])
            finalize_region(region, gm, views, candidates)
            builder = RegionBuilder(self, executor, region, f"{name}/{node.target}", check_budget, alone=True)
            if builder.entry_name not in self._op_times:  # the same op occurs in several layers
                self._op_times[builder.entry_name] = builder.times()
            times = self._op_times[builder.entry_name]
            own_ms, torch_ms = (times.get(which, math.nan) for which in (executor.name, TORCH))
            if torch_ms + _BORDERS_MS < own_ms:
                text = f"{node.target} alone: {own_ms:.3f} ms on {executor.title}, {torch_ms:.3f} ms in torch"
                candidates.demote(region, Reason(ReasonType.SLOWER, text))

    def _candidates(self, gm: fx.GraphModule, executors: Sequence[Executor], name: str) -> Candidates:
        """Ask the executors what they support; a failure while they answer is reported once for each op."""
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        if len(accelerators := _accelerators(gm)) > 1:
            refused = Reason(ReasonType.DEVICE, f"one graph on {' and '.join(sorted(accelerators))}")
            return Candidates.of({executor.name: dict.fromkeys(nodes, refused) for executor in executors})
        refusals: dict[str, dict[fx.Node, Reason | None]] = {}
        unsupported: list[Reason] = []
        untimed = _untimed(nodes) if self.config.placement == "measured" else {}
        for executor in executors:
            if (reason := executor.unsupported_reason()) is not None:
                unsupported.append(reason)
                refusals[executor.name] = dict.fromkeys(nodes, reason)
                continue
            ask = functools.partial(self._ask, executor, nodes)
            refusals[executor.name] = self.cache.refusals(gm, executor.cache_key, ask) | untimed
        if len(unsupported) == len(executors):
            self.fall_back(name, unsupported[0])
        for node, refusal in (pair for own in refusals.values() for pair in own.items()):
            if refusal is None or not refusal.type.is_failure or not is_compute(node):
                continue
            if (op := str(node.target)) not in self._reported_ops:
                self._reported_ops.add(op)
                self.fall_back(f"{name}/{op}", refusal)
        return Candidates.of(refusals)

    def _ask(self, executor: Executor, nodes: Sequence[fx.Node]) -> dict[fx.Node, Reason | None]:
        answers: dict[fx.Node, Reason | None] = {}
        for node in nodes:
            made_by = node.args[0] if node.target is operator.getitem else None
            if isinstance(made_by, fx.Node) and made_by in answers:
                answers[node] = answers[made_by]  # access to a tuple goes where the tuple is made
            elif (reason := self._kept_in_torch_reason(node)) is not None:
                answers[node] = reason
            else:
                key = (*executor.cache_key, node_fingerprint(node))
                if key not in self._answers:
                    self._answers[key] = executor.refusal(node)
                answers[node] = self._answers[key]
        return answers

    def _kept_in_torch_reason(self, node: fx.Node) -> Reason | None:
        name = str(node.target)
        spellings = (name, name.rpartition(".")[0])  # with its overload, and for all overloads
        if isinstance(node.target, OpOverload) and any(each in self.config.debug.torch_ops for each in spellings):
            return Reason(ReasonType.USER, name)
        return Reason(ReasonType.RANDOM, name) if is_random(node) else None


def _assembled(
    gm: fx.GraphModule,
    regions: list[Region],
    built: Mapping[Any, GuardedRegion],
    candidates: Candidates,
    lost: Mapping[Any, Timing],
) -> tuple[Callable[[list[Any]], Any], list[RegionReport]]:
    calls, reports = list[Callable[..., Any]](), list[RegionReport]()
    for region in regions:
        if region.executor == TORCH:
            region.module.__name__ = region.name  # levels change when neighbours are demoted
            calls.append(region.module)
            reports.append(_torch_report(region, candidates.reasons, lost))
        else:
            guarded = built[region.key]
            guarded.rename(region.name)
            calls.append(guarded)
            reports.append(guarded.report)
    return _assemble(gm, zip(regions, calls, strict=True)), reports


def _accelerators(gm: fx.GraphModule) -> set[str]:
    """Return the devices besides the CPU that a graph's tensors are on: a session is on one."""
    tensors = (value for node in gm.graph.nodes for value in values_of(node) if isinstance(value, torch.Tensor))
    return {str(tensor.device) for tensor in tensors if tensor.device.type not in ("cpu", "meta")}


def _untimed(nodes: Sequence[fx.Node]) -> dict[fx.Node, Reason | None]:
    """Leave to torch what no clock can decide about: nodes on numbers or sizes that depend on data."""
    answers: dict[fx.Node, Reason | None] = {}
    for node in nodes:
        if not all(map(is_known, (node, *node.all_input_nodes))):
            text = f"{node.target} with a number that depends on data, which cannot be timed"
            answers[node] = Reason(ReasonType.DYNAMIC_SHAPE, text)
    return answers


def _is_large(node: fx.Node) -> bool:
    values = (value for source in (node, *node.all_input_nodes) for value in values_of(source))
    return any(isinstance(one, torch.Tensor) and math.prod(map(int_hint, one.shape)) >= _LARGE for one in values)


class RegionBuilder:
    """Builds and times one region, without what is in the cache; ``timed`` tells whether anything was run for that.

    ``alone``: the region is one op of a larger region, which runs on as many threads.
    """

    def __init__(
        self,
        placer: Placer,
        executor: Executor,
        region: Region,
        where: str,
        check_budget: Callable[[], None],
        alone: bool = False,
    ) -> None:
        self._placer, self._config, self._check_budget = placer, placer.config, check_budget
        self._executor, self._region, self._where = executor, region, where
        counts = executor.thread_counts(region)
        self._thread_counts = [max(counts)] if alone else counts
        # in a whole region, other ops have ended torch's threads already
        self._before: Callable[[], None] = openmp.pause_openmp if alone else lambda: None
        self.timed = False
        self._fingerprint = fingerprint(region.module.graph)
        self.entry_name = placer.cache.name(self._fingerprint, executor.cache_key)

    def build(self) -> GuardedRegion:
        """Build the region, or reject it if that fails or it is slower than torch."""
        entry = self._placer.cache.load(self.entry_name)
        if entry is not None:
            try:
                if (reason := self._executor.untrusted_reason(entry.model)) is None:
                    return self._build(entry)
            except RegionRejected as rejection:
                if not rejection.reason.type.is_failure:
                    raise
                reason = str(rejection)
            log.debug("cache entry %s is not used: %s", self.entry_name, reason)
        return self._build(None)

    def reason_of(self, rejection: RegionRejected) -> Reason:
        """Return why a region is rejected: what timing takes too much memory for has lost it, and has not failed."""
        if not is_out_of_memory(rejection):
            return rejection.reason
        free_memory_of(rejection)
        if not self.timed:
            return rejection.reason
        return Reason(ReasonType.NOT_TIMED, f"out of memory: {rejection.reason.text}")

    def times(self) -> Mapping[str, float]:
        """Return the times in ms by executor, nothing if there are none: the region's own build will report why."""
        try:
            known = self._known_timing(self._placer.cache.load(self.entry_name))
            return self._agreed(known).ms if known else self._timed(None, None)[1].ms
        except RegionRejected as rejection:
            self.reason_of(rejection)
            return {}

    def _timed(self, entry: Entry | None, known: Timing | None) -> tuple[bytes, Timing, Callable[[int], Any]]:
        """Return the artifact, the timing that all processes use, and what builds it on a number of threads."""
        artifact = self._executor.convert(self._region) if entry is None else entry.model
        build = functools.cache(functools.partial(self._executor.build, self._region, artifact))
        watch = Stopwatch()
        times = known or self._time(build)
        keeps = known is not None or not is_busy(watch.slowdown)  # or it is timed again in the next run
        times = self._agreed(times)
        if entry is None or known is None:
            kept = times if keeps else Timing({}, times.threads)
            self._placer.cache.store(self.entry_name, Entry(artifact, kept))
        return artifact, times, build

    def _agreed(self, times: Timing) -> Timing:
        if not times.ms:
            return times
        return from_plain(Timing, self._placer.agree(self._fingerprint, dataclasses.asdict(times)))

    def _build(self, entry: Entry | None) -> GuardedRegion:
        known = self._known_timing(entry)
        artifact, times, build = self._timed(entry, known)
        self._executor.save(artifact, self._where)
        cached = entry is not None and known is not None
        own, in_torch = times.ms.get(self._executor.name), times.ms.get(TORCH)
        if own is not None and in_torch is not None and in_torch < own:
            text = (
                f"{own:.3f} ms on {self._executor.title}, {in_torch:.3f} ms in torch" + ", in an earlier run" * cached
            )
            raise RegionRejected(ReasonType.SLOWER, text, times)
        providers = self._executor.onnx_providers(self._region)
        report = RegionReport.of(
            self._region,
            ms=dict(times.ms),
            cached=cached,
            reproducer=Reproducer.of(self._region.module.graph, artifact if providers else None, providers),
            threads=times.threads,
        )
        on_failure = functools.partial(self._placer.fall_back, self._where)
        return GuardedRegion(
            self._region, build(times.threads), report, on_failure, self._config.debug.check_against_eager
        )

    def _known_timing(self, entry: Entry | None) -> Timing | None:
        """Return the timing of a region that need not be timed, or was timed in an earlier run."""
        measured = self._config.placement == "measured"
        if torch.are_deterministic_algorithms_enabled():
            if measured and count_flops(self._region) == 0:
                raise RegionRejected(ReasonType.STATIC_RULE, "no matrix product or convolution")
            return Timing({}, self._thread_counts[0])
        if not measured and (len(self._thread_counts) == 1 or not all(map(is_known, self._region.inputs))):
            return Timing({}, self._thread_counts[0])
        if entry is None or entry.timing.threads not in self._thread_counts:
            return None
        wanted = (self._executor.name, TORCH) if measured else (self._executor.name,)
        if not entry.timing.ms.keys() >= set(wanted):
            return None
        return Timing({name: entry.timing.ms[name] for name in wanted}, entry.timing.threads)

    def _time(self, build: Callable[[int], Callable[..., Any]]) -> Timing:
        self.timed = True
        calls: dict[int, Callable[..., Any]] = {}
        measured = self._config.placement == "measured"
        torch_forward = self._region.module if measured else None
        try:
            for threads in self._thread_counts:
                self._check_budget()
                calls[threads] = build(threads)
            self._check_budget()
            args = timing.samples(self._region)
            on_failure = functools.partial(self._leave_out, args=args)
            return timing.measure(
                self._executor.name, calls, torch_forward, args, on_failure, self._check_budget, self._before
            )
        except RegionRejected as rejection:
            if measured or rejection.reason.type is not ReasonType.NOT_TIMED:
                raise
            return Timing({}, self._thread_counts[0])
        except Exception as error:  # onnxruntime's own exceptions derive from Exception directly
            if not measured and is_out_of_memory(error):
                free_memory_of(error)
                return Timing({}, self._thread_counts[0])
            raise RegionRejected(ReasonType.RUN_FAILED, error) from error

    def _leave_out(self, candidate: int | str, error: Exception, args: Sequence[Any] | None = None) -> None:
        """Go on without torch if that fails; raise what any other candidate fails with.

        ``args`` are the made-up inputs that it fails on, if it could be built.
        """
        if is_out_of_memory(error):
            raise error
        if candidate == TORCH:
            rejection = RegionRejected(ReasonType.RUN_FAILED, f"in torch, not timed there: {error}")
        elif args is not None and timing.is_due_to_samples(error, self._region.module, args):
            raise RegionRejected(ReasonType.NOT_TIMED, error) from error
        else:
            raise error
        self._placer.record_choice(self._where, rejection.reason)


def _torch_report(region: Region, reasons: Mapping[fx.Node, Reason], lost: Mapping[Any, Timing]) -> RegionReport:
    """Report why a region runs in torch: the commonest reason, and one for each op."""
    own_reasons = [(node, reasons[node]) for node in region.compute_nodes if node in reasons]
    ms: Counter[str] = Counter()
    for (_, *nodes), times in lost.items():
        if set(region.nodes).issuperset(nodes):
            ms.update(times.ms)
    return RegionReport.of(
        region,
        reason=Counter(reason for _, reason in own_reasons).most_common(1)[0][0] if own_reasons else None,
        node_reasons={str(node.target): reason for node, reason in own_reasons},
        ms=dict(ms),
        reproducer=Reproducer.of(region.module.graph),
    )


def _assemble(gm: fx.GraphModule, regions: Iterable[tuple[Region, Callable[..., Any]]]) -> Callable[[list[Any]], Any]:
    """Return a boxed function that calls the regions in order, by name, and frees what is no longer needed."""
    graph = fx.Graph()
    generate_boxed_code(graph)
    outer: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            outer[node] = graph.node_copy(node)
    for region, run in regions:
        inputs = tuple(copy_with_views(source, graph, outer) for source in region.inputs)
        call = graph.call_function(run, inputs)
        for index, node in enumerate(region.outputs):
            outer[node] = graph.call_function(operator.getitem, (call, index))
    output = gm.graph.output_node()
    for node in output.all_input_nodes:
        copy_with_views(node, graph, outer)
    graph.output(fx.map_arg(output.args[0], outer.__getitem__))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", str(graph))  # the text: whoever keeps the record would keep the sessions too
    return fx.GraphModule(gm, graph).forward
