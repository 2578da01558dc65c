"""Text of users as it is: what the commands and the reports print goes through here.

To rich ``[batch, 3]`` is markup, which is not shown, ``[/red]`` an error, and a word between colons a picture. What the
terminal cannot show, or would obey, is written as an escape: half of a surrogate pair (as in a file name that is not
UTF-8), a control character, a letter that the terminal's encoding lacks.
"""

import io
import sys
import unicodedata
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def plain(text: object, encoding: str | None = None) -> str:
    """Return a text without what a terminal cannot show or would obey.

    Args:
        text: Anything; its string.
        encoding: Of the terminal or file; ``None`` for standard output's.

    """
    shown = "".join(
        _escaped(letter) if unicodedata.category(letter) in ("Cc", "Cs") else letter for letter in str(text)
    )
    encoding = encoding or getattr(sys.stdout, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _escaped(letter: str) -> str:
    if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cs"):
        return letter
    return letter.encode("unicode_escape").decode()


def say(text: object) -> None:
    """Print a line."""
    print(plain(text))


def console(**settings: Any) -> Console:
    """Return a console that takes no text for markup.

    Args:
        **settings: Of rich's.

    """
    return Console(markup=False, emoji=False, highlight=False, **settings)


class PlainTable(Table):
    """A table whose title, headers and cells are shown as they are.

    Args:
        *headers: Of the first columns.
        title: Above the table.
        encoding: Of where it is shown; ``None`` for standard output's.

    """

    def __init__(self, *headers: str, title: str = "", encoding: str | None = None) -> None:
        self._encoding = encoding
        super().__init__(title=self._text(title, "table.title") if title else None)
        for header in headers:
            self.add_column(header)

    def add_column(self, header: Any = "", *args: Any, **kwargs: Any) -> None:
        """Add a column, as to rich's."""
        super().add_column(self._text(header), *args, **kwargs)

    def add_row(self, *cells: Any, **kwargs: Any) -> None:
        """Add a row, as to rich's."""
        super().add_row(*map(self._text, cells), **kwargs)

    def _text(self, text: object, style: str = "") -> Text:
        return Text(plain(text, self._encoding), style=style)


def rendered(*parts: Any, width: int) -> str:
    """Return tables and lines as a console of a width would show them."""
    out = console(width=width, file=io.StringIO(), record=True)
    for part in parts:
        out.print(plain(part, "utf-8") if isinstance(part, str) else part)
    return out.export_text()
