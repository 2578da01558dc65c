"""Audits of the graphs of a step where no copy of the process can repeat it, as on a GPU: :class:`GraphAudit`.

Each compiled graph is compared with eager in its first runs (:mod:`.graph_check`). That finds
what a compiler computes wrong, not what dynamo has captured otherwise than Python does.
"""

from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.request import weakly
from lightning_ort.compiler.running.graph_check import GraphCheck
from lightning_ort.strategies.audit.step_audit import AuditBudget, may_copy_process
from lightning_ort.strategies.race.run_facts import RunFacts


class GraphAudit:
    """Audits the graphs of one kind of step."""

    def __init__(self, run: RunFacts, name: str, budget: AuditBudget) -> None:
        self._run, self._name, self._budget = run, name, budget

    def check(self, draws: bool) -> GraphCheck | None:
        """Return what compares a graph, which may draw random numbers of its own, if it is to be compared."""
        config = self._run.config
        if config.audit == "off" or may_copy_process(self._run.device):
            return None
        if draws and config.dropout_masks == "fast":
            self._skipped("dropout_masks='fast' draws other masks than eager")
            return None
        return GraphCheck(weakly(self._count), weakly(self._skipped))

    def _count(self, seconds: float, largest: float) -> None:
        self._budget.add(self._name, seconds)
        run = self._run.backend.report.run
        run.audits += 1
        run.audit_difference = max(run.audit_difference, largest)

    def _skipped(self, why: str) -> None:
        self._run.record_choice(self._name, ReasonType.NOT_AUDITED, why)

    def recorded(self, text: str) -> None:
        """Report what has become of a recording."""
        self._run.record_choice(self._name, ReasonType.RECORDED, text)

    def leave_recording(self, text: str) -> None:
        """Report that a replay has computed something else."""
        self._run.backend.fall_back(self._name, Reason(ReasonType.MISMATCH, f"a CUDA graph: {text}"))
