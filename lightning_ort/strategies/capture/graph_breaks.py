"""Where graphs end early, as notes of the report: :class:`GraphBreakNotes`."""

from collections import Counter
from collections.abc import Iterable

from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.report.data import FallbackReport
from lightning_ort.compiler.report.report import CompileReport


class GraphBreakNotes:
    """Counts the graph breaks of one step by place and reason, and keeps a note for each."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._counts: Counter[tuple[str, str]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, report: CompileReport, breaks: Iterable[tuple[str, str]]) -> None:
        """Enter graph breaks, each a place (file and line, may be empty) and a reason."""
        found = list(breaks)
        if not found:
            return
        old = self._notes()
        self._counts.update(found)
        report.notes = [note for note in report.notes if note not in old] + self._notes()

    def _notes(self) -> list[FallbackReport]:
        texts = [
            (f"{place}: " if place else "") + why + (f" ({count} times)" if count > 1 else "")
            for (place, why), count in self._counts.items()
        ]
        return [FallbackReport(self._step, Reason(ReasonType.GRAPH_BREAK, text)) for text in texts]
