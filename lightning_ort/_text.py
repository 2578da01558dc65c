"""Text from users, shown as it is in the output of commands and reports.

Rich reads ``[batch, 3]`` as markup and drops it, fails at ``[/red]``, and replaces words between colons by pictures.
What a terminal cannot show, or would obey, is escaped: half of a surrogate pair (as in file names that are not UTF-8),
control characters, and letters that its encoding lacks.
"""

import io
import sys
import unicodedata
from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


def plain(text: object, encoding: str | None = None) -> str:
    """Return a text without what a terminal of this encoding (default: that of stdout) cannot show or would obey."""
    shown = "".join(
        letter
        if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cs")
        else letter.encode("unicode_escape").decode()
        for letter in str(text)
    )
    encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def duration(ms: float) -> str:
    """Return milliseconds for a message, in seconds where there are a thousand or more."""
    return f"{ms:.3g} ms" if ms < 999.5 else f"{ms / 1000:,.3g} s" if ms < 999_500 else f"{ms / 1000:,.0f} s"


def digits(number: float) -> str:
    """Return three digits or all before the point, where ``.3g`` has an exponent for 1,000."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def say(text: object) -> None:
    """Print a line."""
    print(plain(text))


def console(**settings: Any) -> Console:
    """Return a rich console that does not interpret markup."""
    return Console(markup=False, emoji=False, highlight=False, **settings)


def show(table: RenderableType, *lines: str) -> None:
    """Print a table and lines; a narrow terminal wraps the table's lines, where rich would cut off numbers."""
    out = console()
    out.width = max(out.width, Measurement.get(out, out.options.update(width=1000), table).maximum)
    out.print(table, *map(plain, lines), sep="\n")


class PlainTable(Table):
    """A table whose title, headers and cells are shown as they are, for output in an encoding."""

    def __init__(self, *headers: str, title: str = "", encoding: str | None = None) -> None:
        self._encoding = encoding
        super().__init__(title=self._text(title, "table.title") if title else None)
        for header in headers:
            self.add_column(header)

    def add_column(self, header: Any = "", *args: Any, **kwargs: Any) -> None:
        """Add a column, as in rich."""
        super().add_column(self._text(header), *args, **kwargs)

    def add_row(self, *cells: Any, **kwargs: Any) -> None:
        """Add a row, as in rich."""
        super().add_row(*map(self._text, cells), **kwargs)

    def _text(self, text: object, style: str = "") -> Text:
        return Text(plain(text, self._encoding), style=style)


def rendered(*parts: Any, width: int) -> str:
    """Return tables and lines as a console of this width shows them."""
    out = console(width=width, file=io.StringIO(), record=True)
    for part in parts:
        out.print(plain(part, "utf-8") if isinstance(part, str) else part)
    return "".join(f"{line.rstrip()}\n" for line in out.export_text().splitlines())
