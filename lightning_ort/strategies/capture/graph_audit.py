"""Audits of the graphs of a step: :class:`GraphAudit`.

Each compiled graph is compared with eager in its first runs (:mod:`.graph_check`). That finds
what a compiler computes wrong, not what dynamo has captured otherwise than Python does.
"""

from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.request import weakly
from lightning_ort.compiler.running.graph_check import GraphCheck
from lightning_ort.strategies.race.run_facts import RunFacts


class GraphAudit:
    """Audits the graphs of one kind of step."""

    def __init__(self, run: RunFacts, name: str) -> None:
        self._run, self._name = run, name

    def check(self, draws: bool) -> GraphCheck | None:
        """Return what compares a graph, which may draw random numbers of its own, if it is to be compared."""
        config = self._run.config
        if config.audit == "off":
            return None
        if draws and config.dropout_masks == "fast":
            self._skipped("dropout_masks='fast' draws other masks than eager")
            return None
        return GraphCheck(weakly(self._count), weakly(self._skipped))

    def _count(self, seconds: float, largest: float) -> None:
        self._run.races[self._name].spend(seconds)
        run = self._run.backend.report.run
        run.audit_seconds += seconds
        run.audits += 1
        run.audit_difference = max(run.audit_difference, largest)

    def _skipped(self, why: str) -> None:
        self._run.record_choice(self._name, ReasonType.NOT_AUDITED, why)
