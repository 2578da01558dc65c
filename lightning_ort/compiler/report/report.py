"""What ran where, why not, and how fast: dataclasses first; text and JSON are made from them."""

import shutil
from collections import Counter
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ort._arguments import check_integer
from lightning_ort.compiler.reason import Reason
from lightning_ort.compiler.report.plain_types import from_plain, to_plain
from lightning_ort.compiler.report.text import render_text
from lightning_ort.compiler.report.view import in_column, in_use, share
from lightning_ort.compiler.run_part import OptimizerReport, RunReport, StepReport, StepTimeReport

__all__ = [
    "CompileReport",
    "FallbackReport",
    "GraphReport",
    "OptimizerReport",
    "RegionReport",
    "RunReport",
    "StepReport",
    "StepTimeReport",
]

if TYPE_CHECKING:
    from lightning_ort.compiler.regions.region import Region
    from lightning_ort.compiler.regions.reproducer import Reproducer


_NARROWEST = 60  # characters; a terminal that says that it has fewer wraps the lines itself


@dataclass
class RegionReport:
    """One region of a graph.

    A field with :func:`~lightning_ort.compiler.report.view.in_column` is a column of the report, in text and page.

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

        with ``is_known`` and ``values_of`` of ``nodes`` and ``int_hint`` of ``layouts``. Import these here, since
        whoever shows a report needs no torch.
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
    """A field of the run part as an attribute of the whole report."""
    return property(lambda self: getattr(self.run, name), lambda self, value: setattr(self.run, name, value))


FORMAT = 1  # of the JSON; a field that is new needs no other, one that goes or has another meaning does


@dataclass
class CompileReport:
    """Everything that a backend compiled, and what the run did around it.

    Args:
        graphs: In order of compilation.
        fallbacks: What failed and runs in torch.
        notes: What runs in torch by choice, such as a step under ``engine="torch"``.
        graph_breaks: How often capture ended a graph early.
        recompiles: How often a frame was compiled again.
        compile_seconds: Time spent in the backend (AOTAutograd included), in seconds.
        run: What a Trainer run adds; its lists are also at ``report.optimizers`` and ``report.steps``, and its lines
            about memory and masks at ``report.host_memory`` and ``report.dropout_masks``.

    """

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
        return self.run.verdict if self.graphs or self.run != RunReport() else "nothing has run yet"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain types for JSON."""
        data = to_plain(self)
        data |= data.pop("run")  # one flat table, which is easier to query
        for step, entry in zip(self.steps, data["steps"], strict=True):
            entry["engine"] = step.engine
        derived = {"verdict": self.verdict, "ort_runs": self.ort_runs, "ort_node_fraction": self.ort_node_fraction}
        return {"format": FORMAT, **derived, **data}

    @classmethod
    def from_dict(cls, data: Any) -> "CompileReport":
        """Return the report that :meth:`to_dict` made the plain types from, perhaps by way of JSON.

        Args:
            data: What :meth:`to_dict` returned, in this version or an older one: what is missing has its default.

        Raises:
            ValueError: If it is something else, or of a later version with another format.

        """
        if not isinstance(data, dict) or "graphs" not in data:
            raise ValueError("not a report of lightning-ort")
        if isinstance(given := data.get("format"), int) and given > FORMAT:
            raise ValueError(
                f"a later version of lightning-ort wrote this report: format {given}, this one reads {FORMAT}"
            )
        try:
            report: CompileReport = from_plain(cls, {**data, "run": data})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            missing = isinstance(error, KeyError)
            text = f"{error} is missing or unknown" if missing else str(error)
            raise ValueError(f"not a report of this version of lightning-ort, or damaged: {text}") from None
        return report

    def to_text(self, width: int = 120) -> str:
        """Return the verdict, the steps, the totals and a table of the regions; ``str(report)`` fits the terminal.

        Args:
            width: Width of the text in characters.

        Raises:
            TypeError: If the width is not an integer.
            ValueError: If it is not positive.

        """
        check_integer("width", width, 1)
        return render_text(self, width)

    def __str__(self) -> str:
        return self.to_text(max(_NARROWEST, shutil.get_terminal_size((120, 24)).columns))

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write the report as one HTML page, as ``lightning-ort report`` does.

        Args:
            path: The file to write; its folder is made where it is missing.

        Returns:
            The path.

        """
        from lightning_ort.compiler.report.page import render

        output = Path(path)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(render(self, output.name), encoding="utf-8", errors="xmlcharrefreplace")
        return output

    def _repr_html_(self) -> str:
        """Show the page in a notebook, in a frame of its own, so that neither changes the other's style."""
        from lightning_ort.compiler.report.page import in_frame

        return in_frame(self)
