"""What ran where, why not elsewhere, and how fast, as dataclasses; text, page and JSON are made from them."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.run_part import RunReport

if TYPE_CHECKING:
    from lightning_ort.compiler.regions.region import Region
    from lightning_ort.compiler.regions.reproducer import Reproducer

_STAYS = (ReasonType.CAPTURE_OFF, ReasonType.STATIC_RULE)


def figure(value: Any) -> str:
    """Return a number without an exponent; nothing for none."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.3f}" if value < 100 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def in_column(
    heading: str,
    of_equal: Callable[[Sequence[Any]], Any] = lambda values: values[0],
    text: Callable[[Any], str] = figure,
) -> dict[str, Any]:
    """Return the metadata of a field of ``RegionReport`` that text and page show, as a column of figures.

    Args:
        heading: Of the column.
        of_equal: Makes one figure of those of regions with equal operations, which share a row; their sizes may differ.
            By default the first one's; ``sum`` for what adds up, if each has one.
        text: Returns what a cell says; by default a number, or nothing for ``None``.
    """
    return {"column": (heading, of_equal, text)}


@dataclass
class RegionReport:
    """One region of a graph.

    A field with :func:`in_column` is a column of the report, in text and page.

    Args:
        name: Executor and number, such as ``ort_1``, as in the printed graph.
        executor: Which executor runs it, such as ``"ort"`` or ``"torch"``.
        num_nodes: Number of compute nodes (no views, no tuple access).
        ops: How often each ATen op occurs.
        reason: Why it runs in torch; ``None`` on another executor.
        node_reasons: For a torch region, why each of its ops is not on another executor.
        ms: Median time of one run in ms by executor, where measured.
        threads: Intra-op threads of the session.
        runs: How often the executor ran it; torch's own runs are not counted.
        cached: Whether its model and timing come from an earlier run.
    """

    name: str
    executor: str
    num_nodes: int = field(metadata=in_column("nodes"))
    ops: dict[str, int] = field(default_factory=dict)
    reason: Reason | None = None
    node_reasons: dict[str, Reason] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    threads: int | None = None
    runs: int = field(default=0, metadata=in_column("runs", sum))
    cached: bool = False
    reproducer: "Reproducer | None" = field(default=None, repr=False, compare=False, metadata={"json": False})

    @classmethod
    def of(cls, region: "Region", **fields: Any) -> "RegionReport":
        """Return the report of a region: what is known from its nodes, and these fields.

        ``nodes.values_of`` has the tensors of a node, such as one of ``region.outputs``; a graph that could not be
        compiled is one region without outputs. Sizes may be symbolic, and those that depend on data are not known; so
        bytes are::

            if region.outputs and all(map(is_known, region.outputs)):
                values = [value for node in region.outputs for value in values_of(node)]
                total = sum(int_hint(x.numel()) * x.itemsize for x in values if isinstance(x, torch.Tensor))

        with ``is_known``, ``values_of`` and ``int_hint`` of ``nodes``. Import these here, since whoever shows a report
        needs no torch.
        """
        ops = Counter(str(node.target) for node in region.compute_nodes)
        return cls(region.name, region.executor, ops.total(), dict(ops), **fields)

    def save_reproducer(self, folder: str | PathLike[str]) -> Path:
        """Write a Python script that runs this region alone, and its ONNX model if it has one.

        The script makes random inputs of the traced shapes, strides and dtypes. It prints the time in torch and, for an
        ONNX model, the time in onnxruntime and the largest difference between the two.

        Args:
            folder: Where to write; created if it does not exist.

        Returns:
            The path of the script, ``reproduce.py``.

        Raises:
            RuntimeError: If the report was loaded from JSON, or the graph was not compiled in that run.
        """
        if self.reproducer is None:
            raise RuntimeError(
                f"{self.name} has no code here: a report that was loaded from JSON has none, nor has a graph that could"
                " not be compiled, or that an earlier run has left to torch as a whole. Call save_reproducer on the"
                " report of the run, such as trainer.strategy.report; for the last case with ORTConfig(cache_dir=None)."
            )
        return self.reproducer.save(Path(folder))


@dataclass
class GraphReport:
    """One compiled graph: a forward, a backward or an inference graph.

    Args:
        name: Such as ``forward_0`` or ``backward_0``.
        regions: In order of execution.
        seconds: How long it took to compile.
    """

    name: str
    regions: list[RegionReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_nodes(self) -> int:
        """Number of compute nodes."""
        return sum(region.num_nodes for region in self.regions)

    @property
    def num_ort_nodes(self) -> int:
        """Number of compute nodes that ONNX Runtime runs."""
        return sum(region.num_nodes for region in self.regions if region.executor == "ort")


@dataclass(frozen=True)
class FallbackReport:
    """Something that runs in torch because it failed elsewhere, or by choice.

    Args:
        where: The graph, region or step.
        reason: Why.
    """

    where: str
    reason: Reason

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def _of_run(name: str) -> Any:
    return property(lambda self: getattr(self.run, name), lambda self, value: setattr(self.run, name, value))


@dataclass
class ReportData:
    """What a :class:`~lightning_ort.compiler.report.report.CompileReport` says."""

    graphs: list[GraphReport] = field(default_factory=list)
    fallbacks: list[FallbackReport] = field(default_factory=list)
    notes: list[FallbackReport] = field(default_factory=list)
    graph_breaks: int = 0
    recompiles: int = 0
    compile_seconds: float = 0.0
    run: RunReport = field(default_factory=RunReport)

    optimizers = _of_run("optimizers")
    steps = _of_run("steps")
    host_memory = _of_run("host_memory")
    dropout_masks = _of_run("dropout_masks")

    def record_choice(self, where: str, reason: Reason) -> bool:
        """Add a choice to the notes; return whether it is new."""
        note = FallbackReport(where, reason)
        if note in self.notes:
            return False
        self.notes.append(note)
        return True

    @property
    def ort_runs(self) -> int:
        """How often ONNX Runtime ran a region."""
        regions = [region for graph in self.graphs for region in graph.regions]
        # a region in torch ran on ONNX Runtime before it failed there
        return sum(region.runs for region in regions if region.executor in ("ort", "torch"))

    @property
    def ort_node_fraction(self) -> float:
        """Share of the compute nodes of all compiled graphs that ONNX Runtime runs, 0 to 1."""
        return share(self.graphs)

    @property
    def ort_node_fraction_in_use(self) -> float:
        """The same share of the graphs that stay in use: those of a step that goes on in PyTorch do not count."""
        return share(in_use(self))

    @property
    def verdict(self) -> str:
        """Whether compiling was worth it, or that nothing has run; empty without a Trainer."""
        if not self.graphs and self.run == RunReport():
            return "nothing has run yet"
        stays = [note.reason for note in self.notes if note.reason.type in _STAYS] if not self.graphs else []
        return self.run.verdict or (f"nothing is compiled: {stays[0]}" if stays else "")


def engines(report: ReportData) -> dict[str, str]:
    """Return the engine that each step continues with; for a step that was tried again, the last one."""
    return {step.name: step.engine for step in report.steps}


def in_use(report: ReportData) -> list[GraphReport]:
    """Return the graphs of steps that continue on ONNX Runtime, or that were not tried on anything else."""
    chosen = engines(report)
    return [graph for graph in report.graphs if chosen.get(graph.name.partition("/")[0], "ort") == "ort"]


def share(graphs: Iterable[GraphReport]) -> float:
    """Return the share of the graphs' compute nodes that ONNX Runtime runs, 0 to 1."""
    counts = [(graph.num_ort_nodes, graph.num_nodes) for graph in graphs]
    total = sum(nodes for _, nodes in counts)
    return sum(ort for ort, _ in counts) / total if total else 0.0
