"""The ``torch.compile`` backend: from a captured graph to a callable that runs on ONNX Runtime and torch.

``torch.compile(module, backend="ort")`` finds :func:`ort` through the entry point group ``torch_dynamo_backends``;
:class:`ORTBackend` is the same with a report to read.
"""

import dataclasses
import functools
import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_ort.compiler import autotune as forms
from lightning_ort.compiler import lowering
from lightning_ort.compiler import placer as placement
from lightning_ort.compiler.cache import Cache, Entry
from lightning_ort.compiler.executors.ort import cuda_graphs, kernels, session, support
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.compiler.executors.ort.conversion import CONVERTERS
from lightning_ort.compiler.executors.ort.cuda_graphs import RecordedSession
from lightning_ort.compiler.executors.torch import TorchRegion
from lightning_ort.compiler.fallbacks import GuardedGraph, ORTFallbackError, PassWatch
from lightning_ort.compiler.fingerprint import digest, fingerprint
from lightning_ort.compiler.guarded_region import GuardedRegion
from lightning_ort.compiler.linking import Placed, link
from lightning_ort.compiler.nodes import is_compute
from lightning_ort.compiler.regions import Region, RegionRejected, Timing, Variant, demote, partition
from lightning_ort.compiler.report import (
    CompileReport,
    FallbackReport,
    GraphReport,
    Reason,
    ReasonType,
    RegionReport,
)
from lightning_ort.config import ORTConfig

log = logging.getLogger(__name__)


class ORTBackend:
    """A backend for :func:`torch.compile` with a report.

    Args:
        config: Settings: an :class:`~lightning_ort.config.ORTConfig`, a mapping with its fields, or ``None``.

    Attributes:
        report: What was compiled, in order.
        available: Whether onnxruntime can be used; if not, every graph runs in torch.
        label: Prefix for the names of graphs compiled from now on, such as ``"training_step"``.
        agree: Turns a key and what was measured here into the measurements that all processes of a run go by.
        leave: Asked for each graph whether to leave it to torch.

    Raises:
        ORTFallbackError: Under ``fallback="raise"``, if onnxruntime cannot be used.
        ValueError: If the installed onnxruntime lacks the ``providers`` or ``kernels`` that the config names, or the
            config has an ``engine`` for strategies.

    Example::

        backend = ORTBackend(ORTConfig(placement="always"))
        compiled = torch.compile(module, backend=backend)
        compiled(x).sum().backward()
        print(backend.report.to_text())

    """

    def __init__(self, config: ORTConfig | Mapping[str, Any] | None = None) -> None:
        self.config = ORTConfig.parse(config)
        if self.config.engine != "ort":
            raise ValueError(
                f"engine={self.config.engine!r} times whole training steps, which a Lightning strategy does."
                " Without one, use engine='ort'."
            )
        self.report = CompileReport()
        self.label = ""
        self.agree: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None
        self.leave: Callable[[], bool] | None = None
        self._cache = Cache(self.config)
        self._calls = 0
        self._reported_ops: set[str] = set()
        reason = kernels.unavailable()
        self.available = reason is None
        if reason is not None:
            self.fall_back("onnxruntime", reason)
        else:
            kernels.check_config(self.config)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Compile one graph captured by dynamo, and its backward graph."""
        start = time.perf_counter()
        prefix, number = f"{self.label}/" if self.label else "", self._calls
        self._calls += 1
        compiled = len(self.report.graphs)
        watch = PassWatch(len(example_inputs))

        def compiler(kind: str) -> Callable[..., Any]:
            return lambda gm, inputs: self._compile(gm, inputs, f"{prefix}{kind}_{number}", watch)

        converted = frozenset(CONVERTERS)
        aot = aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            partition_fn=functools.partial(lowering.split_joint, recompute=self.config.recompute, converted=converted),
            decompositions=lowering.decompositions(converted),
        )
        try:
            if not self.available or (self.leave is not None and self.leave()):
                return gm.forward
            # the backward graph now: its regions are part of the decision
            with functorch_config.patch(force_non_lazy_backward_lowering=True), lowering.whole_shrinkages():
                run = aot(gm, example_inputs)
        finally:
            self.report.compile_seconds += time.perf_counter() - start
        graphs = self.report.graphs[compiled:]
        if not any(region.executor == "ort" for graph in graphs for region in graph.regions):
            return gm.forward  # nothing for ONNX Runtime: eager is faster than AOTAutograd's wrapper

        def eager(*args: Any) -> Any:
            assert gm.code  # makes a module that was left for later: else fx would print what the user's data raises
            return gm.forward(*args)

        give_up = functools.partial(self._give_up, f"{prefix}graph_{number}", graphs)
        return GuardedGraph(run, eager, watch, give_up)

    def fall_back(self, where: str, reason: Reason) -> None:
        """Report that something runs in torch because it failed elsewhere: one warning, or an error.

        Raises:
            ORTFallbackError: Under ``fallback="raise"``.

        """
        self.report.fallbacks.append(FallbackReport(where, reason))
        if self.config.fallback == "raise":
            raise ORTFallbackError(f"{where} cannot run on ONNX Runtime: {reason}")
        log.warning("%s runs in torch: %s", where, reason)

    def _give_up(self, where: str, graphs: Sequence[GraphReport], error: Exception) -> None:
        """Report that a captured graph has failed while it ran, and is left to eager."""
        reason = RegionRejected(ReasonType.RUN_FAILED, error).reason
        for region in (region for graph in graphs for region in graph.regions):
            region.executor, region.reason = "torch", reason
        self.fall_back(where, reason)

    def _note(self, where: str, reason: Reason) -> None:
        """Report a choice that the config asked for otherwise, once."""
        if self.report.record_choice(where, reason):
            log.info("%s: %s", where, reason)

    def _compile(
        self, gm: fx.GraphModule, inputs: Sequence[Any], name: str, watch: PassWatch
    ) -> Callable[[list[Any]], Any]:
        """Compile one ATen graph: lower, check support, cut, place, link."""
        start = time.perf_counter()
        _exchange_metadata(watch)
        graph = GraphReport(name)
        self.report.graphs.append(graph)
        # the fake tensors of tracing are left behind: regions are built and timed on real ones
        with unset_fake_temporarily(), torch.no_grad():
            try:
                lowering.lower(gm)
                run = link(self._place(gm, _device_of(inputs), graph))
            except ORTFallbackError:
                raise
            except Exception as error:  # a bug of ours must not lose the run
                log.debug("compiling %s failed", name, exc_info=True)
                reason = RegionRejected(ReasonType.CONVERSION_FAILED, error).reason
                nodes = [node for node in gm.graph.nodes if is_compute(node)]
                graph.regions = [RegionReport("torch_0", "torch", len(nodes), _count(nodes), reason)]
                self.fall_back(name, reason)
                run = make_boxed_func(gm.forward)
        graph.seconds = time.perf_counter() - start
        # the other processes of a run say the same; what falls back is said by each
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        first = not several or torch.distributed.get_rank() == 0
        log.log(
            logging.INFO if first else logging.DEBUG,
            "%s: %d of %d compute nodes on ONNX Runtime in %d of %d regions, compiled in %.2f s",
            name,
            graph.num_ort_nodes,
            graph.num_nodes,
            sum(region.executor == "ort" for region in graph.regions),
            len(graph.regions),
            graph.seconds,
        )
        return watch.watch(run)

    def _place(self, gm: fx.GraphModule, device: torch.device, graph: GraphReport) -> Placed:
        """Cut the graph and build its ORT regions; what fails or loses goes to torch, until every ORT region stands."""
        providers = self.config.providers or kernels.providers_for(device)
        supported = self._support(gm, providers, device, graph.name)
        if providers is not None:
            self._choose_forms(gm, supported, providers, device)
        if self.config.cuda_graphs and (obstacle := cuda_graphs.unsupported_reason(device)) is not None:
            self._note("cuda_graphs", Reason(ReasonType.NOT_RECORDED, obstacle))
        built: dict[tuple[fx.Node, ...], GuardedRegion] = {}
        lost: dict[tuple[fx.Node, ...], Timing] = {}
        parts = None
        while True:
            parts = partition(gm, supported, self.config.min_region_nodes, parts)
            new = [region for region in parts.regions if region.on_ort and tuple(region.nodes) not in built]
            if not new:
                break
            assert providers is not None  # else nothing is supported
            for region in new:
                where = f"{graph.name}/{region.name}"
                try:
                    built[tuple(region.nodes)] = self._build(region, providers, device, where)
                except RegionRejected as failure:
                    demote(region, supported, failure.reason)
                    if failure.timing is not None:
                        lost[tuple(region.nodes)] = failure.timing
                    if failure.reason.type.is_failure:
                        self.fall_back(where, failure.reason)
        executables: list[GuardedRegion | TorchRegion] = []
        for region in parts.regions:
            if region.on_ort:
                run = built[tuple(region.nodes)]
                run.rename(region.name)  # levels move when neighbours are demoted
                executables.append(run)
                graph.regions.append(run.report)
            else:
                executables.append(TorchRegion(region))
                graph.regions.append(_torch_report(region, supported, lost))
        return Placed(parts, executables)

    def _support(
        self, gm: fx.GraphModule, providers: tuple[str, ...] | None, device: torch.device, name: str
    ) -> dict[fx.Node, support.Support]:
        """Ask for every node whether ONNX Runtime can run it; a converter that fails is reported once for its op."""
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        if providers is None:
            reason = Reason(ReasonType.DEVICE, f"no execution provider for {device} in this onnxruntime")
            self.fall_back(name, reason)
            return dict.fromkeys(nodes, support.Support(False, reason))
        keep = frozenset(self.config.torch_ops)

        def ask() -> dict[fx.Node, support.Support]:
            kernel_set = kernels.Kernels(self.config.kernels, providers)
            answers: dict[fx.Node, support.Support] = {}
            for node in nodes:
                if node.target is operator.getitem and node.args[0] in answers:
                    answers[node] = answers[node.args[0]]  # access to a tuple goes where the tuple is made
                else:
                    answers[node] = support.check(node, kernel_set, keep)
            return answers

        answers = self._cache.support(gm, providers, ask)
        refused = {str(n.target): a.reason for n, a in answers.items() if a.reason and is_compute(n)}
        for op, reason in refused.items():
            if reason.type.is_failure and op not in self._reported_ops:
                self._reported_ops.add(op)
                self.fall_back(f"{name}/{op}", reason)
        return answers

    def _choose_forms(
        self,
        gm: fx.GraphModule,
        supported: dict[fx.Node, support.Support],
        providers: tuple[str, ...],
        device: torch.device,
    ) -> None:
        """Time the ops that can be run in several ways, where timing decides at all."""
        if self.config.placement != "measured" or torch.are_deterministic_algorithms_enabled():
            return
        kernel_set = kernels.Kernels(self.config.kernels, providers)
        threads = self.config.intra_op_threads or torch.get_num_threads()
        forms.Forms(kernel_set, device, threads, self._cache, self._agree_on).choose(gm, supported)

    def _agree_on(self, description: str, measured: dict[str, Any]) -> dict[str, Any]:
        return measured if self.agree is None else self.agree(digest(description), measured)

    def _build(self, region: Region, providers: tuple[str, ...], device: torch.device, name: str) -> GuardedRegion:
        """Convert a region, build its session, time it; what the cache has of that is not done again.

        Raises:
            RegionRejected: If any of that fails, or the region is slower than torch.

        """
        description = fingerprint(region.module.graph)
        entry = self._cache.name(description, providers)
        kept = self._cache.load(entry)
        if kept is not None and (refused := session.untrusted_reason(kept.model)) is not None:
            log.debug("cache entry %s is not used: %s", entry, refused)
        elif kept is not None:
            try:
                return self._build_from(kept, entry, description, region, providers, device, name)
            except RegionRejected as failure:
                if not failure.reason.type.is_failure:
                    raise
                log.debug("cache entry %s is not used: %s", entry, failure)
        return self._build_from(None, entry, description, region, providers, device, name)

    def _build_from(
        self,
        kept: Entry | None,
        entry: str,
        description: str,
        region: Region,
        providers: tuple[str, ...],
        device: torch.device,
        name: str,
    ) -> GuardedRegion:
        """Do so with what the cache has, or without."""
        candidates = [Variant(n) for n in placement.thread_candidates(region, self.config.intra_op_threads)]
        if self.config.cuda_graphs and cuda_graphs.can_record(region):
            candidates.append(Variant(candidates[0].threads, cuda_graph=True))
        known = self._timing_at_hand(region, candidates, kept)
        if kept is not None:
            model = kept.model
        else:
            kernel_set = kernels.Kernels(self.config.kernels, providers)
            model = session.convert(region, kernel_set, region.name).SerializeToString()
        if self.config.save_onnx_dir is not None:
            session.save(model, self.config.save_onnx_dir, name)
        bound: dict[Variant, BoundSession | RecordedSession] = {}

        def bind(setup: Variant) -> BoundSession | RecordedSession:
            if setup not in bound:
                stream = cuda_graphs.stream_of(device) if setup.cuda_graph else None
                inference_session = session.build(model, region, providers, setup.threads, device, stream)
                pause_openmp = device.type == "cpu" and placement.worth_resting(region, setup.threads)
                bound[setup] = (
                    RecordedSession(region, inference_session, device)
                    if setup.cuda_graph
                    else BoundSession(region, inference_session, device, pause_openmp=pause_openmp)
                )
            return bound[setup]

        timing = known or self._time(region, candidates, bind, name)
        if "ort" in timing.ms:
            timing = Timing.from_dict(self._agree_on(description, dataclasses.asdict(timing)))
        cached = kept is not None and known is not None
        if not cached:
            self._cache.store(entry, Entry(model, timing))
        if timing.ms.keys() >= {"ort", "torch"} and timing.ms["torch"] < timing.ms["ort"]:
            text = f"{timing.ms['ort']:.3f} ms on ONNX Runtime, {timing.ms['torch']:.3f} ms in torch"
            raise RegionRejected(ReasonType.SLOWER, text, timing)
        compute = region.compute_nodes
        report = RegionReport(
            region.name,
            "ort",
            len(compute),
            _count(compute),
            ms=_ms_of([timing]),
            threads=timing.variant.threads,
            cached=cached,
            cuda_graph=timing.variant.cuda_graph,
        )
        return GuardedRegion(
            region,
            bind(timing.variant),
            report,
            on_failure=functools.partial(self.fall_back, name),
            check=self.config.check_against_eager,
        )

    def _timing_at_hand(self, region: Region, candidates: Sequence[Variant], kept: Entry | None) -> Timing | None:
        """Return the timing of a region where it need not be timed, or was in an earlier run.

        Raises:
            RegionRejected: If the static rule of deterministic mode leaves it to torch.

        """
        measured = self.config.placement == "measured"
        if torch.are_deterministic_algorithms_enabled():
            if measured and placement.loses_by_rule(region):
                raise RegionRejected(ReasonType.STATIC_RULE, "no matrix product or convolution")
            return Timing({}, candidates[0])
        if not measured and len(candidates) == 1:
            return Timing({}, candidates[0])
        if kept is None or "ort" not in kept.timing.ms:
            return None
        if kept.timing.variant not in candidates:
            return None
        if not measured:
            return dataclasses.replace(kept.timing, ms={"ort": kept.timing.ms["ort"]})
        return kept.timing if "torch" in kept.timing.ms else None

    def _time(
        self,
        region: Region,
        candidates: Sequence[Variant],
        bind: Callable[[Variant], BoundSession | RecordedSession],
        name: str,
    ) -> Timing:
        """Time a region.

        Raises:
            RegionRejected: If it does not run.

        """
        args = placement.samples(region)
        try:
            sessions = {setup: bind(setup) for setup in candidates if not setup.cuda_graph}
            for setup in set(candidates) - set(sessions):
                try:
                    bind(setup)(*args)
                    sessions[setup] = bind(setup)
                except Exception as error:  # it goes on without
                    self._note(name, RegionRejected(ReasonType.NOT_RECORDED, error).reason)
            return placement.measure(sessions, self._torch_side(region, args, name), args)
        except RegionRejected:
            raise
        except Exception as error:  # onnxruntime raises classes of its own that derive from Exception alone
            raise RegionRejected(ReasonType.RUN_FAILED, error) from error

    def _torch_side(self, region: Region, args: Sequence[Any], name: str) -> Callable[..., Any] | None:
        """What to time the sessions of a region against: nothing, where torch cannot run it on what is made up."""
        if self.config.placement != "measured":
            return None
        try:
            region.module.forward(*args)
        except Exception as error:
            self._note(name, RegionRejected(ReasonType.RUN_FAILED, f"in torch, not timed there: {error}").reason)
            return None
        return region.module.forward


def _device_of(inputs: Sequence[Any]) -> torch.device:
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    # a scalar on the CPU may take part in a graph on an accelerator
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _exchange_metadata(watch: PassWatch) -> None:
    """Learn from AOTAutograd what the graph does with its inputs, and tell it that no pass writes to saved tensors.

    Else it refuses `retain_graph=True`.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        watch.describe(context.fw_metadata)
        context.fw_metadata.bw_donated_idxs = []


def _count(nodes: Sequence[fx.Node]) -> dict[str, int]:
    return dict(Counter(str(node.target) for node in nodes))


def _torch_report(
    region: Region, supported: Mapping[fx.Node, support.Support], lost: Mapping[tuple[fx.Node, ...], Timing]
) -> RegionReport:
    """Why a region runs in torch: its commonest reason, and one for each op."""
    compute = region.compute_nodes
    reasons = [(node, reason) for node in compute if (reason := supported[node].reason) is not None]
    own = set(region.nodes)
    timings = [timing for nodes, timing in lost.items() if own.issuperset(nodes)]
    return RegionReport(
        region.name,
        "torch",
        len(compute),
        _count(compute),
        Counter(reason for _, reason in reasons).most_common(1)[0][0] if reasons else None,
        {str(node.target): reason for node, reason in reasons},
        ms=_ms_of(timings),
    )


def _ms_of(timings: Sequence[Timing]) -> dict[str, float]:
    """The times of regions, added up by executor."""
    ms: dict[str, float] = {}
    for timing in timings:
        for executor, value in timing.ms.items():
            ms[executor] = ms.get(executor, 0.0) + value
    return ms


@functools.cache
def _backend_for(config: ORTConfig) -> ORTBackend:
    # one object for all graphs of the same options: to dynamo a new callable is a new backend, and it compiles again
    return ORTBackend(config)


def ort(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend behind ``torch.compile(..., backend="ort", options={...})``.

    Args:
        gm: The captured graph.
        example_inputs: Its inputs.
        options: Fields of :class:`~lightning_ort.config.ORTConfig`.

    """
    return _backend_for(ORTConfig.parse(options))(gm, example_inputs)
