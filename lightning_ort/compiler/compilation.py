"""From one captured graph to a callable that runs on executors and torch: :class:`Compilation`."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import fx

from lightning_ort._busy import Stopwatch, is_busy
from lightning_ort.compat.aot_autograd import GraphFacts, allow_retain_graph, backward_at_once
from lightning_ort.compat.dynamo import aot_backend, is_last_graph, reads_gradients
from lightning_ort.compat.torch_graphs import boxed, without_fake_tensors
from lightning_ort.compiler import lowering
from lightning_ort.compiler.cache.kept_step import is_plain
from lightning_ort.compiler.graphs.conflicts import Captured, InputWrites, conflict_of, in_eager
from lightning_ort.compiler.graphs.nodes import calls_torch, device_of, has_separate_gradients, is_empty, is_random
from lightning_ort.compiler.lowering.one_graph import loss_of
from lightning_ort.compiler.placement.placer import Placer
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.region import TORCH, Region, RegionRejected
from lightning_ort.compiler.report.data import GraphReport, RegionReport
from lightning_ort.compiler.report.report import CompileReport
from lightning_ort.compiler.request import CompileRequest, Stopped
from lightning_ort.compiler.running.fallbacks import PASSES, Aftermath, GuardedGraph, ORTFallbackError, PassMonitor
from lightning_ort.compiler.running.graph_check import GraphCheck
from lightning_ort.compiler.running.step_graph import GraphSource, StepGraph

log = logging.getLogger(__name__)


class Compilation:
    """Compiles one captured graph; its ``monitor`` tells which errors come from compiled passes.

    ``placer``, ``report`` and ``load`` are those of the :class:`~lightning_ort.compiler.backend.ORTBackend`.
    """

    def __init__(
        self,
        placer: Placer,
        report: CompileReport,
        load: Callable[[], bool],
        request: CompileRequest,
        number: int,
        gm: fx.GraphModule,
        num_inputs: int,
    ) -> None:
        self._placer, self._request, self._gm, self._num_inputs = placer, request, gm, num_inputs
        self._config, self._report, self._cache, self._load = placer.config, report, placer.cache, load
        self._prefix, self._number = f"{request.label}/" if request.label else "", number
        self._where = self._named("graph")
        self.monitor = PassMonitor(num_inputs)
        self._graphs: list[GraphReport] = []
        self._aftermath = Aftermath(
            self._where,
            self._graphs,
            placer.fall_back,
            request.refuse or functools.partial(placer.record_choice, self._where),
        )

    def _named(self, kind: str) -> str:
        return f"{self._prefix}{kind}_{self._number}"

    def run(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs the graph; that keeps this object, but not the examples of inputs."""
        gm, report = self._gm, self._report
        captured = Captured(gm, inputs, self._request, InputWrites(gm))
        if (reason := conflict_of(captured)) is not None:
            self._aftermath.refuse(reason)
            return in_eager(captured)
        if not self._load() or not self._request.may_compile(gm):
            return gm.forward
        source = self._step_source()
        # processes of a run go by what one of them measures, not by what each has kept
        alone = self._request.agree is None
        facts = source is not None, self._request.by_hand
        name = self._cache.graphs_name(gm, inputs, *facts) if alone else None
        if name is not None and (kept := self._cache.read(name, list[GraphReport])) is not None:
            self._report_kept(kept)
            return gm.forward  # as below, without tracing it first, which takes as long as all the rest
        watch = Stopwatch()
        messages, compiled = len(report.fallbacks) + len(report.notes), len(report.graphs)
        try:
            run = self._kept(source, name, inputs) or self._traced(source, inputs)
        except Stopped:
            del report.graphs[compiled:]
            return gm.forward
        if run is None:
            return gm.forward
        if all(region.executor == TORCH for graph in self._graphs for region in graph.regions):
            told = len(report.fallbacks) + len(report.notes) > messages
            if name is not None and not told and not is_busy(watch.slowdown):
                self._cache.write(name, self._graphs)
            return gm.forward  # no executor runs a part of it: eager is faster than AOTAutograd's wrapper
        self._keep(source, name, inputs)
        return self._guarded(captured.writes.hide(run), source)

    def _step_source(self) -> GraphSource | None:
        """What a step as one graph is made of, if that is wanted and may be possible."""
        config, gm = self._config, self._gm
        wanted = config.debug.step_graph == "joint" or (config.debug.step_graph == "auto" and self._request.one_graph)
        # after a graph break another result than the loss is differentiated
        if not wanted or config.activation_memory_budget not in (None, 1) or not is_last_graph(gm):
            return None
        # torch's own gradients are linear in that of the loss; what others write may clip it
        if not all(map(calls_torch, gm.graph.nodes)):
            return None
        if has_separate_gradients(gm):  # two graphs can be kept until each result has had its backward pass
            text = "a result beside the loss has gradients of its own; `detach()` it unless they are wanted"
            self._report.record_choice(self._request.label or "step", Reason(ReasonType.SPLIT, text))
            return None
        if (loss := loss_of(gm)) is None:
            return None
        return GraphSource(loss, self._num_inputs)

    def _kept(self, source: GraphSource | None, name: str | None, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """Compile a step that an earlier run has traced; return what runs in place of AOTAutograd's passes, if any."""
        if source is None or name is None or not is_plain(self._gm, inputs):
            return None
        if not self._cache.load_step(name, source.restore):
            return None
        assert source.gm is not None
        assert source.facts is not None
        self.monitor.facts = GraphFacts(self._num_inputs, source.facts.written, True)
        source.run = self.compile_graph("step", source.gm, inputs, lowered=True)
        return self._gm.forward

    def _keep(self, source: GraphSource | None, name: str | None, inputs: Sequence[Any]) -> None:
        """Keep a step for later runs, if all that there is to know of it can be kept."""
        if name is None or source is None or source.run is None or source.facts is None or source.is_kept:
            return
        as_kept = GraphFacts(self._num_inputs, source.facts.written, True)
        if self.monitor.facts == as_kept and is_plain(self._gm, inputs) and (plain := source.to_plain()) is not None:
            self._cache.store_step(name, plain)

    def _traced(self, source: GraphSource | None, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """Trace the graph and compile what that gives; ``None`` if an input is too empty to be traced."""
        compiled = len(self._report.graphs)
        try:
            # the backward graph now: its regions are part of the decision
            with backward_at_once(autocast=self._request.by_hand), lowering.traced_as_eager():
                return self._aot_autograd(source)(self._gm, inputs)
        except Exception as error:
            if isinstance(error, ORTFallbackError) or not any(map(is_empty, inputs)):
                raise
            del self._report.graphs[compiled:]  # torch divides by the size of a mean while it traces (2.13)
            text = f"an input is empty, and tracing it fails: {error}"
            self._placer.record_choice(self._where, Reason(ReasonType.UNSUPPORTED_ARGUMENTS, text))
            return None

    def _aot_autograd(self, source: GraphSource | None) -> Callable[..., Any]:
        def compile_forward(forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if source is not None and (step := self._make_step(source)) is not None:
                source.run = self.compile_graph("step", step, inputs)
                return boxed(forward.forward)
            return self.compile_graph("forward", forward, inputs)

        def compile_backward(backward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if source is not None and source.run is not None:
                return boxed(backward.forward)
            return self.compile_graph("backward", backward, inputs)

        def see_joint(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
            self.monitor.see_joint(joint, num_fwd_outputs)
            if source is not None:
                source.keep_joint(joint, num_fwd_outputs)

        whole = self._placer.whole_ops()
        options: dict[str, Any] = {
            "budget": self._config.activation_memory_budget,
            "converted": whole,
            "see_joint": see_joint,
        }
        return aot_backend(
            fw_compiler=compile_forward,
            bw_compiler=compile_backward,
            inference_compiler=functools.partial(self.compile_graph, "inference"),
            partition_fn=functools.partial(lowering.split_joint, **options),
            decompositions=lowering.decompositions(whole),
        )

    def _make_step(self, source: GraphSource) -> fx.GraphModule | None:
        try:
            with without_fake_tensors(), torch.no_grad():
                return source.make()
        except Exception as error:  # a bug of ours must not end the run
            log.debug("making one graph of a step failed", exc_info=True)
            reason = RegionRejected(ReasonType.CONVERSION_FAILED, error).reason
            self._placer.fall_back(f"{self._request.label}/step", reason)
            return None

    def compile_graph(
        self, kind: str, gm: fx.GraphModule, inputs: Sequence[Any], lowered: bool = False
    ) -> Callable[[list[Any]], Any]:
        """Compile one ATen graph: lower it if it is not, place its regions, assemble them."""
        start = perf_counter()
        self._request.check_budget()
        self.monitor.see_facts()
        self.monitor.draws |= any(map(is_random, gm.graph.nodes))
        allow_retain_graph()
        graph = GraphReport(self._named(kind))
        self._graphs.append(graph)
        self._report.graphs.append(graph)
        # regions are built and timed on real tensors
        with without_fake_tensors(), torch.no_grad():
            try:
                if not lowered:
                    lowering.lower(gm)
                budget = self._request.check_budget
                run, graph.regions = self._placer.place(gm, device_of(inputs), graph.name, budget)
            except ORTFallbackError:
                raise
            except Exception as error:  # a bug of ours must not end the run
                log.debug("compiling %s failed", graph.name, exc_info=True)
                reason = RegionRejected(ReasonType.CONVERSION_FAILED, error).reason
                graph.regions = [RegionReport.of(Region(TORCH, 0, list(gm.graph.nodes)), reason=reason)]
                self._placer.fall_back(graph.name, reason)
                run = boxed(gm.forward)
        graph.seconds = perf_counter() - start
        _log_compiled(graph, self._request.logs_graphs)
        return self.monitor.watch(run)

    def _guarded(self, run: Callable[..., Any], source: GraphSource | None) -> GuardedGraph:
        gm, monitor, request, aftermath = self._gm, self.monitor, self._request, self._aftermath

        def eager(*args: Any) -> Any:
            _ = gm.code  # generates the code of a lazy module; otherwise fx would print an error of the user's data
            return gm.forward(*args)

        def misfit(why: str) -> None:
            guard.leave()
            request.split(why)

        if source is None or source.run is None:
            # of a whole step Lightning takes the gradient; of other graphs the user may, in several ways
            is_last = is_last_graph(gm)
            passes: float = 1 if request.one_graph and is_last else PASSES
            separate = request.label != "" and is_last and has_separate_gradients(gm)
            if separate or monitor.gradients_differ:
                passes = math.inf
            told = aftermath.failed, aftermath.for_eager
            check = GraphCheck.of(request.check(False), gm)  # random numbers are those of eager
            guard = GuardedGraph(run, eager, monitor, *told, passes, separate, check=check)
            request.keep(guard)
            return guard
        check = GraphCheck.of(request.check(False), gm)
        step = StepGraph(source, eager, misfit, lambda: guard.saw_second_gradient(), request, reads_gradients(), check)
        guard = GuardedGraph(step, eager, monitor, aftermath.failed, aftermath.for_eager, passes=0)
        request.keep(guard)
        return guard

    def _report_kept(self, graphs: list[GraphReport]) -> None:
        for graph in graphs:
            graph.name, graph.seconds = self._named(graph.name.rpartition("/")[2].rpartition("_")[0]), 0.0
            for region in graph.regions:
                region.cached = True
            _log_compiled(graph, self._request.logs_graphs)
        self._report.graphs += graphs


def _log_compiled(graph: GraphReport, shown: bool) -> None:
    # the other processes of a run would log the same; what falls back is logged by each
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    log.log(
        logging.INFO if shown and (not several or torch.distributed.get_rank() == 0) else logging.DEBUG,
        "lightning-ort: %s: %d of %d compute nodes on ONNX Runtime in %d of %d regions, compiled in %.2f s",
        graph.name,
        graph.num_ort_nodes,
        graph.num_nodes,
        sum(region.executor == "ort" for region in graph.regions),
        len(graph.regions),
        graph.seconds,
    )
