"""The ``torch.compile`` backend: from a captured graph to a callable that runs on executors and torch.

``torch.compile(module, backend="ort")`` finds :func:`ort` through the entry point group ``torch_dynamo_backends``;
:class:`ORTBackend` is the same with a report to read.
"""

import functools
import gc
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from lightning_ort.compat.autograd import casts_within, is_recorded_before
from lightning_ort.compat.dynamo import aot_backend, hooks_a_result, is_last_graph, reads_gradients
from lightning_ort.compat.torch import (
    allow_retain_graph,
    backward_at_once,
    boxed,
    without_fake_tensors,
    without_torch_function,
)
from lightning_ort.compiler import lowering
from lightning_ort.compiler.cache import Cache
from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.fallbacks import PASSES, GuardedGraph, ORTFallbackError, PassMonitor
from lightning_ort.compiler.fingerprint import digest
from lightning_ort.compiler.linking import assemble
from lightning_ort.compiler.lowering.one_graph import loss_of
from lightning_ort.compiler.nodes import device_of, has_separate_gradients, is_empty, tensor_class_of
from lightning_ort.compiler.regions import TORCH, Region, RegionRejected
from lightning_ort.compiler.report import CompileReport, FallbackReport, GraphReport, Reason, ReasonType
from lightning_ort.compiler.step_graph import GraphSource, StepGraph
from lightning_ort.compiler.writes import InputWrites
from lightning_ort.config import ORTConfig

if TYPE_CHECKING:
    from lightning_ort.compiler.placer import Placer

log = logging.getLogger(__name__)

_Compilers = Callable[[str], Callable[..., Any]]  # of the kinds of graphs


class ORTBackend:
    """A backend for :func:`torch.compile` with a report.

    Args:
        config: Settings: an :class:`~lightning_ort.config.ORTConfig`, a mapping with its fields, or ``None``.

    Attributes:
        report: What was compiled, in order.
        available: Whether onnxruntime can be used; if not, every graph runs in torch.
        label: Prefix for the names of graphs compiled from now on, such as ``"training_step"``.
        agree: Takes a key and what was measured in this process; returns what all processes of the run use.
        leave: Called for each graph; returns whether to leave it to torch.
        one_graph: Whether a captured graph with a loss is run as one graph under ``step_graph="auto"``.
        writes_gradients: Whether ``loss.backward()`` may write gradients to parameters without the autograd engine.
        drop_gradients: Called before a step as one graph that returns large gradients, to drop those of the last step.
        misfit: Why a step that was run as one graph needs separate passes, once that has happened.
        by_hand: Whether the step calls for backward passes itself (manual optimization), and so maybe for several.
        began_at: The number of autograd's first node of the current step; 0 outside of steps.
        refused: Why something in a step is for eager alone, by the label under which its graphs are compiled.
        cache: What is kept between runs.

    Raises:
        ORTFallbackError: Under ``fallback="raise"``, if onnxruntime cannot be used.
        ValueError: If the installed onnxruntime lacks the ``providers`` or ``kernels`` that the config names, or the
            config has an ``engine`` or ``start`` for strategies.

    Example::

        backend = ORTBackend(ORTConfig(placement="always"))
        compiled = torch.compile(module, backend=backend)
        compiled(x).sum().backward()
        print(backend.report.to_text())

    """

    _num_compiled: ClassVar[int] = 0  # graphs, by all backends of the process

    def __init__(self, config: ORTConfig | Mapping[str, Any] | None = None) -> None:
        self.config = ORTConfig.parse(config)
        if self.config.engine == "auto":
            raise ValueError(
                f"engine={self.config.engine!r} times whole training steps, which a Lightning strategy does."
                " Without one, use engine='ort'."
            )
        if self.config.start == "amortized":
            raise ValueError(
                "start='amortized' waits until a run of the Trainer is long enough, which a Lightning strategy does."
                " Without one, use start='now'."
            )
        self.report = CompileReport()
        self.label = ""
        self.logs_graphs = True  # a line for each; a strategy that announces its steps needs none
        self.agree: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None
        self.leave: Callable[[fx.GraphModule], bool] | None = None
        self.drop_gradients: Callable[[], None] | None = None
        self.one_graph = self.writes_gradients = False
        self.misfit: str | None = None
        self.began_at = 0
        self.by_hand = False
        self.refused: dict[str, Reason] = {}
        self._calls = 0
        self.cache = Cache(self.config)
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
        ORTBackend._num_compiled += 1
        compiled, messages = len(self.report.graphs), len(self.report.fallbacks) + len(self.report.notes)
        monitor = PassMonitor(len(example_inputs))

        def compiler(kind: str) -> Callable[..., Any]:
            return lambda gm, inputs: self._compile(gm, inputs, f"{prefix}{kind}_{number}", monitor)

        collects = gc.isenabled()
        gc.disable()  # tracing makes many objects, which live until it is over
        try:
            if (kind := tensor_class_of(example_inputs)) is not None:
                text = f"an input is a {kind.__qualname__}, a class of tensors with functions of its own"
                self._record_choice(f"{prefix}graph_{number}", Reason(ReasonType.UNSUPPORTED_ARGUMENTS, text))
                return without_torch_function(gm.forward)
            writes = InputWrites(gm)
            if (reason := self._conflict(gm, example_inputs, writes)) is not None:
                # nor for inductor, which differs from eager in the same ways
                self._refuse(f"{prefix}graph_{number}", self.label, reason)
                return gm.forward
            if not self.available or (self.leave is not None and self.leave(gm)):
                return gm.forward
            source = self._step_source(gm, len(example_inputs))
            # processes of a run go by what one of them measures, not by what each has kept
            name = self.cache.graphs_name(gm, example_inputs, source is not None) if self.agree is None else None
            if name is not None and (kept := self.cache.load_graphs(name)) is not None:
                self._report_kept(kept, prefix, number)
                return gm.forward  # as below, without tracing it first, which takes as long as all the rest
            run = self._traced(
                gm, example_inputs, self._aot_autograd(compiler, source, monitor), f"{prefix}graph_{number}"
            )
            if run is None:
                return gm.forward
            run = writes.hide(run)
        finally:
            if collects:
                gc.enable()
            self.report.compile_seconds += time.perf_counter() - start
        graphs = self.report.graphs[compiled:]
        if all(region.executor == TORCH for graph in graphs for region in graph.regions):
            if name is not None and len(self.report.fallbacks) + len(self.report.notes) == messages:
                self.cache.store_graphs(name, graphs)
            return gm.forward  # no executor runs a part of it: eager is faster than AOTAutograd's wrapper

        return self._guarded(gm, run, source, monitor, graphs, f"{prefix}graph_{number}")

    def _conflict(self, gm: fx.GraphModule, example_inputs: Sequence[Any], writes: InputWrites) -> Reason | None:
        """Return in what a compiled graph would differ from eager, apart from roundings."""
        if hooks_a_result(gm):
            return Reason(ReasonType.HOOKED_RESULT, "compiled graphs give it the gradient before the hook")
        if torch.is_grad_enabled() and any(is_recorded_before(one, self.began_at) for one in example_inputs):
            # compiled backward passes go on to it with zeros, where eager has nothing to go on with
            return Reason(ReasonType.EARLIER_STEP, "`detach()` it so that the step can be compiled")
        if casts_within(gm):
            text = "without `torch.backends.mha.set_fastpath_enabled(False)`, autocast is needed within a kernel"
            return Reason(ReasonType.UNSUPPORTED_ARGUMENTS, text)
        # with automatic optimization Lightning differentiates the loss alone; GuardedGraph is prepared for the others
        if self.by_hand and has_separate_gradients(gm):
            return Reason(ReasonType.SEPARATE_GRADIENTS, "a compiled graph has one backward pass")
        return None if writes.conflict is None else Reason(ReasonType.WRITES_TO_INPUT, writes.conflict)

    @staticmethod
    def compiled_in_process() -> bool:
        """Return whether any backend has compiled a graph in this process, so that what is done once has been done."""
        return ORTBackend._num_compiled > 0

    @functools.cached_property
    def _placer(self) -> "Placer":
        # not at the top: it loads onnx and the converters, and short runs compile nothing
        from lightning_ort.compiler.placer import Placer

        return Placer(self.config, self.cache, self.fall_back, self._record_choice, self._agree)

    def _guarded(
        self,
        gm: fx.GraphModule,
        run: Callable[..., Any],
        source: GraphSource | None,
        monitor: PassMonitor,
        graphs: Sequence[GraphReport],
        name: str,
    ) -> GuardedGraph:
        """Return what runs a compiled graph, or eager where it cannot."""

        def eager(*args: Any) -> Any:
            _ = gm.code  # generates the code of a lazy module; otherwise fx would print an error of the user's data
            return gm.forward(*args)

        def misfit(why: str) -> None:
            guard.leave()
            self.misfit = why

        give_up = functools.partial(self._give_up, name, graphs)
        refuse = functools.partial(self._leave_to_eager, name, graphs, self.label)
        if source is None or source.run is None:
            # of a whole step Lightning takes the gradient; of other graphs the user may, in several ways. Recordings
            # read parameters in place, which the guard of these passes hides
            is_last = is_last_graph(gm)
            passes: float = 1 if (self.one_graph and is_last) or self.config.cuda_graphs else PASSES
            separate = self.label != "" and is_last and has_separate_gradients(gm)
            if separate or (monitor.gradients_differ and (is_last or self.by_hand)):
                passes = math.inf
            return GuardedGraph(run, eager, monitor, give_up, refuse, passes, separate)
        drop = None if reads_gradients() else self._drop_gradients
        step = StepGraph(
            source, eager, misfit, lambda: guard.saw_second_gradient(), lambda: self.writes_gradients, drop
        )
        guard = GuardedGraph(step, eager, monitor, give_up, refuse, passes=0)
        return guard

    def _step_source(self, gm: fx.GraphModule, num_inputs: int) -> GraphSource | None:
        """What a step as one graph is made of, if that is wanted and may be possible."""
        wanted = self.config.step_graph == "joint" or (self.config.step_graph == "auto" and self.one_graph)
        # after a graph break another result than the loss is differentiated
        if not wanted or self.config.recompute or not is_last_graph(gm):
            return None
        if has_separate_gradients(gm):  # two graphs can be kept until each result has had its backward pass
            text = "a result beside the loss has gradients of its own; `detach()` it unless they are wanted"
            self.report.record_choice(self.label or "step", Reason(ReasonType.SPLIT, text))
            return None
        if (loss := loss_of(gm)) is None:
            return None
        return GraphSource(loss, num_inputs)

    def _make_step(self, source: GraphSource) -> fx.GraphModule | None:
        try:
            with without_fake_tensors(), torch.no_grad():
                return source.make()
        except Exception as error:  # a bug of ours must not end the run
            log.debug("making one graph of a step failed", exc_info=True)
            self.fall_back(f"{self.label}/step", RegionRejected(ReasonType.CONVERSION_FAILED, error).reason)
            return None

    def _report_kept(self, graphs: list[GraphReport], prefix: str, number: int) -> None:
        for graph in graphs:
            kind = graph.name.rpartition("/")[2].rpartition("_")[0]
            graph.name, graph.seconds = f"{prefix}{kind}_{number}", 0.0
            for region in graph.regions:
                region.cached = True
            _log_compiled(graph, self.logs_graphs)
        self.report.graphs += graphs

    def _aot_autograd(
        self, compiler: _Compilers, source: GraphSource | None, monitor: PassMonitor
    ) -> Callable[..., Any]:
        def compile_forward(forward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if source is not None and (step := self._make_step(source)) is not None:
                source.run = compiler("step")(step, inputs)
                return boxed(forward.forward)
            return compiler("forward")(forward, inputs)

        def compile_backward(backward: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if source is not None and source.run is not None:
                return boxed(backward.forward)
            return compiler("backward")(backward, inputs)

        def see_joint(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
            monitor.see_joint(joint, num_fwd_outputs)
            if source is not None:
                source.keep_joint(joint, num_fwd_outputs)

        whole = self._placer.whole_ops()
        options: dict[str, Any] = {"recompute": self.config.recompute, "converted": whole, "see_joint": see_joint}
        return aot_backend(
            fw_compiler=compile_forward,
            bw_compiler=compile_backward,
            inference_compiler=compiler("inference"),
            partition_fn=functools.partial(lowering.split_joint, **options),
            decompositions=lowering.decompositions(whole),
        )

    def _traced(
        self, gm: fx.GraphModule, inputs: Sequence[Any], trace: Callable[..., Any], name: str
    ) -> Callable[..., Any] | None:
        """Trace a captured graph and compile what that gives; ``None`` if an input is too empty to be traced."""
        compiled = len(self.report.graphs)
        try:
            # the backward graph now: its regions are part of the decision
            with backward_at_once(autocast=self.by_hand), lowering.whole_shrinkages():
                return trace(gm, inputs)
        except Exception as error:
            if isinstance(error, ORTFallbackError) or not any(map(is_empty, inputs)):
                raise
            del self.report.graphs[compiled:]  # torch divides by the size of a mean while it traces (2.13)
            text = f"an input is empty, and tracing it fails: {error}"
            self._record_choice(name, Reason(ReasonType.UNSUPPORTED_ARGUMENTS, text))
            return None

    def _compile(
        self, gm: fx.GraphModule, inputs: Sequence[Any], name: str, monitor: PassMonitor
    ) -> Callable[[list[Any]], Any]:
        """Compile one ATen graph: lower it, place its regions, assemble them."""
        start = time.perf_counter()
        monitor.see_facts()
        allow_retain_graph()
        graph = GraphReport(name)
        self.report.graphs.append(graph)
        # regions are built and timed on real tensors
        with without_fake_tensors(), torch.no_grad():
            try:
                lowering.lower(gm)
                placed = self._placer.place(gm, device_of(inputs), name)
                graph.regions = placed.reports
                run = assemble(placed)
            except ORTFallbackError:
                raise
            except Exception as error:  # a bug of ours must not end the run
                log.debug("compiling %s failed", name, exc_info=True)
                reason = RegionRejected(ReasonType.CONVERSION_FAILED, error).reason
                graph.regions = [Region(TORCH, 0, list(gm.graph.nodes)).report(reason=reason)]
                self.fall_back(name, reason)
                run = boxed(gm.forward)
        graph.seconds = time.perf_counter() - start
        _log_compiled(graph, self.logs_graphs)
        return monitor.watch(run)

    def fall_back(self, where: str, reason: Reason) -> None:
        """Report that something runs in torch because it failed elsewhere: one warning, or an error.

        Raises:
            ORTFallbackError: Under ``fallback="raise"``.

        """
        self.report.fallbacks.append(FallbackReport(where, reason))
        if self.config.fallback == "raise":
            raise ORTFallbackError(f"{where} cannot run on ONNX Runtime: {reason}")
        log.warning("%s runs in torch: %s", where, reason)

    def _drop_gradients(self) -> None:
        # not of a step that reads one: if it hands the old gradient on, it does so after its graph
        if self.drop_gradients is not None:
            self.drop_gradients()

    def _give_up(self, where: str, graphs: Sequence[GraphReport], error: Exception) -> None:
        """Report that a captured graph failed while it ran, and is left to eager."""
        reason = RegionRejected(ReasonType.RUN_FAILED, error).reason
        _mark_left(graphs, reason)
        self.fall_back(where, reason)

    def _leave_to_eager(self, where: str, graphs: Sequence[GraphReport], label: str, reason: Reason) -> None:
        _mark_left(graphs, reason)
        self._refuse(where, label, reason)

    def _refuse(self, where: str, label: str, reason: Reason) -> None:
        self.refused[label] = reason
        if not label:  # what captures a step speaks of the whole step
            self._record_choice(where, reason)

    def _record_choice(self, where: str, reason: Reason) -> None:
        """Report, once, a choice that differs from what the config asks for."""
        if self.report.record_choice(where, reason):
            log.info("%s: %s", where, reason)

    def _agree(self, fingerprint: str, measured: dict[str, Any]) -> dict[str, Any]:
        return measured if self.agree is None else self.agree(digest(fingerprint), measured)


def _mark_left(graphs: Sequence[GraphReport], reason: Reason) -> None:
    for region in (region for graph in graphs for region in graph.regions):
        region.executor, region.reason = TORCH, reason


def _log_compiled(graph: GraphReport, shown: bool) -> None:
    # the other processes of a run would log the same; what falls back is logged by each
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    log.log(
        logging.INFO if shown and (not several or torch.distributed.get_rank() == 0) else logging.DEBUG,
        "%s: %d of %d compute nodes on ONNX Runtime in %d of %d regions, compiled in %.2f s",
        graph.name,
        graph.num_ort_nodes,
        graph.num_nodes,
        sum(region.executor == "ort" for region in graph.regions),
        len(graph.regions),
        graph.seconds,
    )


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
