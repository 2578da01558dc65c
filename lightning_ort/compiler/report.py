"""What ran where, why not, and how fast: objects first, text and JSON from them."""

import enum
from dataclasses import dataclass, field
from typing import Any

from lightning_ort._arguments import check_integer
from lightning_ort._text import PlainTable, rendered


class ReasonType(enum.Enum):
    """Why something runs in torch and not on ONNX Runtime."""

    NO_CONVERTER = "no converter"
    BETTER_IN_TORCH = "better in torch"
    UNSUPPORTED_ARGUMENTS = "unsupported arguments"
    DTYPE = "dtype"
    NO_KERNEL = "no kernel in this onnxruntime"
    DYNAMIC_SHAPE = "dynamic shape"
    RANDOM = "random op stays with torch's generator"
    DEVICE = "device without a provider"
    USER = "listed in torch_ops"
    TOO_SMALL = "region too small"
    SLOWER = "slower than torch"
    STATIC_RULE = "static rule of deterministic mode"
    CONVERSION_FAILED = "conversion failed"
    CHECKER_FAILED = "ONNX checker failed"
    SESSION_FAILED = "session could not be built"
    RUN_FAILED = "run failed"
    MISMATCH = "differs from eager"
    RUNTIME_UNAVAILABLE = "onnxruntime unavailable"
    CAPTURE_FAILED = "capture failed"
    INDUCTOR_FAILED = "torch.compile failed"
    RECOMPILING = "kept recompiling"
    ALREADY_COMPILED = "compiled by the user"
    CAPTURE_OFF = "capture is off"
    SECOND_GRADIENT = "takes gradients itself"
    NOT_RECORDED = "not recorded as a CUDA graph"

    @property
    def is_failure(self) -> bool:
        """Whether this is a failure (counted as a fallback) and not a choice or a known limit."""
        return self in _FAILURES


_FAILURES = {
    ReasonType.CONVERSION_FAILED,
    ReasonType.CHECKER_FAILED,
    ReasonType.SESSION_FAILED,
    ReasonType.RUN_FAILED,
    ReasonType.MISMATCH,
    ReasonType.RUNTIME_UNAVAILABLE,
    ReasonType.CAPTURE_FAILED,
    ReasonType.RECOMPILING,
}


@dataclass(frozen=True)
class Reason:
    """Why a node, a region or a step runs in torch.

    Args:
        type: The kind of reason.
        text: The particulars, for a person.

    """

    type: ReasonType
    text: str = ""

    def __str__(self) -> str:
        return f"{self.type.value}: {self.text}" if self.text else self.type.value


@dataclass
class RegionReport:
    """One region of a graph.

    Args:
        name: Executor and number, such as ``ort_1``, as in the printed graph.
        executor: Which executor runs it, such as ``"ort"`` or ``"torch"``.
        num_nodes: Compute nodes (no views, no tuple access).
        ops: How often each ATen op occurs.
        reason: Why it runs in torch; ``None`` on ORT.
        node_reasons: For a torch region, op -> why that op is not on ORT.
        ms: Median time of one run in ms by executor, where measured.
        threads: Intra-op threads of the session.
        runs: How often ONNX Runtime ran it.
        cached: Whether its model and timing are those of an earlier run.
        cuda_graph: Whether it is recorded as a CUDA graph.

    """

    name: str
    executor: str
    num_nodes: int
    ops: dict[str, int] = field(default_factory=dict)
    reason: Reason | None = None
    node_reasons: dict[str, Reason] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    threads: int | None = None
    runs: int = 0
    cached: bool = False
    cuda_graph: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON."""
        return {
            **{k: v for k, v in vars(self).items() if k not in ("reason", "node_reasons")},
            "reason": _reason_dict(self.reason),
            "node_reasons": {op: _reason_dict(reason) for op, reason in self.node_reasons.items()},
        }


@dataclass
class GraphReport:
    """One compiled graph: a forward, a backward or an inference graph.

    Args:
        name: Such as ``forward_0`` or ``backward_0``.
        regions: In order of execution.
        seconds: What compiling took, in seconds.

    """

    name: str
    regions: list[RegionReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_nodes(self) -> int:
        """Compute nodes in all."""
        return sum(region.num_nodes for region in self.regions)

    @property
    def num_ort_nodes(self) -> int:
        """Compute nodes that ONNX Runtime runs."""
        return sum(region.num_nodes for region in self.regions if region.executor == "ort")

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON."""
        return {"name": self.name, "seconds": self.seconds, "regions": [region.to_dict() for region in self.regions]}


@dataclass(frozen=True)
class FallbackReport:
    """Something that should have been compiled and runs in torch.

    Args:
        where: The graph, region or step.
        reason: Why.

    """

    where: str
    reason: Reason


@dataclass(frozen=True)
class OptimizerReport:
    """What runs one optimizer.

    Args:
        configured: What ``configure_optimizers`` returned, such as ``torch.AdamW``.
        runs_as: What it became, such as ``torch.AdamW (fused)``.
        reason: Why it was left as it is, or what there is to know of the choice; may be empty.

    """

    configured: str
    runs_as: str
    reason: str = ""

    def __str__(self) -> str:
        runs = f"runs as {self.runs_as}" if self.runs_as != self.configured else "is left as it is"
        return f"{self.configured} {runs}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class StepReport:
    """A step that was tried on several engines.

    Args:
        name: Such as ``training_step``.
        ms: Median time of the step with its backward pass, in ms: captured, with the regions that ONNX Runtime runs
            (``"ort"``), as the module has it (``"torch"``), compiled by torch.compile (``"inductor"``).

    """

    name: str
    ms: dict[str, float]

    @property
    def engine(self) -> str:
        """The fastest, with which the step goes on."""
        return min(self.ms, key=self.ms.__getitem__)

    def __str__(self) -> str:
        times = ", ".join(f"{ms:.3g} ms {engine}" for engine, ms in self.ms.items())
        return f"{self.name}: {times}; goes on with {self.engine}"


@dataclass
class CompileReport:
    """All that a backend compiled.

    Args:
        graphs: In order of compilation.
        fallbacks: What failed and went to torch.
        notes: What was left to torch by choice, such as a step under ``capture="off"``.
        graph_breaks: How often capture ended a graph early.
        recompiles: How often a frame was compiled again.
        compile_seconds: Time spent in the backend (AOTAutograd included), in seconds.
        optimizers: What runs each of the Trainer's optimizers.
        steps: Steps of a LightningModule that were tried on several engines.
        host_memory: ``"retained"`` or ``"default"``, and why; empty without a Trainer.

    """

    graphs: list[GraphReport] = field(default_factory=list)
    fallbacks: list[FallbackReport] = field(default_factory=list)
    notes: list[FallbackReport] = field(default_factory=list)
    graph_breaks: int = 0
    recompiles: int = 0
    compile_seconds: float = 0.0
    optimizers: list[OptimizerReport] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    host_memory: str = ""

    def record_choice(self, where: str, reason: Reason) -> bool:
        """Add a choice to the notes; return whether it is new."""
        note = FallbackReport(where, reason)
        if note in self.notes:
            return False
        self.notes.append(note)
        return True

    @property
    def timed_executors(self) -> list[str]:
        """The executors whose times the report shows: ``ort``, ``torch``, and others that were timed."""
        timed = (executor for graph in self.graphs for region in graph.regions for executor in region.ms)
        return list(dict.fromkeys(("ort", "torch", *timed)))

    @property
    def ort_runs(self) -> int:
        """How often ONNX Runtime ran a region."""
        return sum(region.runs for graph in self.graphs for region in graph.regions)

    @property
    def ort_node_fraction(self) -> float:
        """Share of the compute nodes that ONNX Runtime runs, 0 to 1."""
        total = sum(graph.num_nodes for graph in self.graphs)
        return sum(graph.num_ort_nodes for graph in self.graphs) / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain types for JSON."""
        return {
            "ort_runs": self.ort_runs,
            "ort_node_fraction": self.ort_node_fraction,
            "graph_breaks": self.graph_breaks,
            "recompiles": self.recompiles,
            "compile_seconds": self.compile_seconds,
            "graphs": [graph.to_dict() for graph in self.graphs],
            "fallbacks": [{"where": f.where, **(_reason_dict(f.reason) or {})} for f in self.fallbacks],
            "notes": [{"where": f.where, **(_reason_dict(f.reason) or {})} for f in self.notes],
            "optimizers": [vars(optimizer) for optimizer in self.optimizers],
            "steps": [{**vars(step), "engine": step.engine} for step in self.steps],
            "host_memory": self.host_memory,
        }

    @classmethod
    def from_dict(cls, data: Any) -> "CompileReport":
        """Make the report of which :meth:`to_dict` gave the plain types, perhaps by way of JSON.

        Args:
            data: What it gave.

        Raises:
            ValueError: If it is something else, such as what another version of lightning-ort gave.

        """
        try:
            report = cls(
                graphs=[_graph_from_dict(graph) for graph in data["graphs"]],
                fallbacks=[FallbackReport(entry["where"], _reason_from_dict(entry)) for entry in data["fallbacks"]],
                notes=[FallbackReport(entry["where"], _reason_from_dict(entry)) for entry in data["notes"]],
                graph_breaks=int(data["graph_breaks"]),
                recompiles=int(data["recompiles"]),
                compile_seconds=float(data["compile_seconds"]),
                optimizers=[OptimizerReport(**_texts(optimizer)) for optimizer in data["optimizers"]],
                steps=[StepReport(str(step["name"]), _numbers(step["ms"])) for step in data["steps"]],
                host_memory=str(data["host_memory"]),
            )
            same = report.to_dict() == data
        except KeyError as error:
            raise ValueError(
                f"no report of this version of lightning-ort: {error} is not there, or not known"
            ) from None
        except (TypeError, ValueError, AttributeError, OverflowError):
            same = False
        if not same:
            raise ValueError("no report of this version of lightning-ort: it has other entries, or of other types")
        return report

    def to_text(self, width: int = 120) -> str:
        """Return a table of the regions, and the totals.

        Args:
            width: Width of the table in characters.

        Raises:
            TypeError: If the width is no integer.
            ValueError: If it is not positive.

        """
        check_integer("width", width, 1)
        table = PlainTable(title="lightning-ort: what ran where", encoding="utf-8")
        for column in ("graph", "region", "executor", "why / ops"):
            table.add_column(column, overflow="fold")
        for column in ("nodes", "runs", *map(ms_label, self.timed_executors)):
            table.add_column(column, justify="right")
        for graph in self.graphs:
            for region in graph.regions:
                ops = ", ".join(f"{op}x{n}" for op, n in sorted(region.ops.items(), key=lambda kv: -kv[1])[:4])
                why = f"{region.reason} ({ops})" if region.reason else ops
                table.add_row(
                    graph.name,
                    region.name,
                    region.executor,
                    why,
                    str(region.num_nodes),
                    str(region.runs),
                    *(_ms(region.ms.get(executor)) for executor in self.timed_executors),
                )
        lines = [
            f"{self.ort_node_fraction:.0%} of the compute nodes on ONNX Runtime, {self.ort_runs} runs, "
            f"{len(self.graphs)} graphs in {self.compile_seconds:.1f} s, {self.graph_breaks} graph breaks, "
            f"{self.recompiles} recompiles, {len(self.fallbacks)} fallbacks",
            *map(str, self.steps),
            *(f"optimizer {index}: {optimizer}" for index, optimizer in enumerate(self.optimizers)),
        ]
        if self.host_memory:
            lines.append(f"host memory: {self.host_memory}")
        for title, entries in (("fallback", self.fallbacks), ("note", self.notes)):
            lines += [f"{title}: {entry.where}: {entry.reason}" for entry in entries]
        return rendered(*([table] if self.graphs else []), *lines, width=width)


def ms_label(executor: str) -> str:
    """The heading of a column of an executor's times."""
    return f"{'ORT' if executor == 'ort' else executor} ms"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _reason_dict(reason: Reason | None) -> dict[str, str] | None:
    return None if reason is None else {"reason": reason.type.name, "text": reason.text}


def _graph_from_dict(data: dict[str, Any]) -> GraphReport:
    return GraphReport(str(data["name"]), [_region_from_dict(r) for r in data["regions"]], float(data["seconds"]))


def _region_from_dict(data: dict[str, Any]) -> RegionReport:
    return RegionReport(
        name=str(data["name"]),
        executor=str(data["executor"]),
        num_nodes=int(data["num_nodes"]),
        ops={op: int(count) for op, count in data["ops"].items()},
        reason=None if data["reason"] is None else _reason_from_dict(data["reason"]),
        node_reasons={op: _reason_from_dict(reason) for op, reason in data["node_reasons"].items()},
        ms=_numbers(data["ms"]),
        threads=None if data["threads"] is None else int(data["threads"]),
        runs=int(data["runs"]),
        cached=bool(data["cached"]),
        cuda_graph=bool(data["cuda_graph"]),
    )


def _reason_from_dict(data: dict[str, Any]) -> Reason:
    return Reason(ReasonType[data["reason"]], str(data["text"]))


def _numbers(data: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in data.items()}


def _texts(data: dict[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in data.items()}
