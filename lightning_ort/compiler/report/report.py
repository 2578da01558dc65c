"""A report as users have it, with its text, its page and its JSON: :class:`CompileReport`."""

import shutil
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_ort._arguments import check_integer
from lightning_ort.compiler.report.data import ReportData
from lightning_ort.compiler.report.plain_types import from_plain, to_plain
from lightning_ort.compiler.report.view import render_text

_NARROWEST = 60  # characters; a terminal that says that it has fewer wraps the lines itself


FORMAT = 1  # of the JSON; a field that is new needs no other, one that goes or has another meaning does


@dataclass
class CompileReport(ReportData):
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
