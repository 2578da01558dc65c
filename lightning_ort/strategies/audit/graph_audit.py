"""Audits of the graphs of a step where no copy of the process can repeat it, as on a GPU: :class:`GraphAudit`.

Each compiled graph is compared with eager in its first runs (:mod:`.graph_check`). That finds
what a compiler computes wrong, not what dynamo has captured otherwise than Python does.
"""

from typing import TYPE_CHECKING

from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.request import weakly
from lightning_ort.compiler.running.graph_check import GraphCheck

if TYPE_CHECKING:
    from lightning_ort.strategies.capture.module import CapturedModule


class GraphAudit:
    """Audits the graphs of one kind of step.

    Args:
        module: The module whose step it is.
        name: The name of the step.

    Attributes:
        compared: Whether something was compared since it was last set to ``False``.

    """

    def __init__(self, module: "CapturedModule", name: str) -> None:
        self._module, self._name = module, name
        self.compared = False

    def check(self, draws: bool) -> GraphCheck | None:
        """Return what compares a graph, if it is to be compared.

        Args:
            draws: Whether it draws random numbers of its own.

        """
        module = self._module
        if module.config.audit == "off" or module.may_copy_process:
            return None
        if draws and module.config.dropout_masks == "fast":
            self._skipped("dropout_masks='fast' draws other masks than eager")
            return None
        return GraphCheck(weakly(self._count), weakly(self._skipped))

    def _count(self, seconds: float, largest: float) -> None:
        self.compared = True
        self._module.audits.add(self._name, seconds)
        run = self._module.backend.report.run
        run.audits += 1
        run.audit_difference = max(run.audit_difference, largest)

    def _skipped(self, why: str) -> None:
        self._module.record_choice(self._name, ReasonType.NOT_AUDITED, why)
