"""How results are shown: names stand as they are, and a narrow terminal loses nothing."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_UNBOUNDED = 10_000  # columns
READER_LEFT = 141
"""Exit status that shells report for a program whose output nobody reads any more."""


class _PlainConsole(Console):
    def on_broken_pipe(self) -> None:
        """End as other programs do; rich ends with 1, as after an error."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(READER_LEFT) from None


def plain_console(*, stderr: bool = False) -> Console:
    """A console for which brackets and colons mean nothing: a GPU may be named `GPU [/x]`, and so may a folder."""
    return _PlainConsole(markup=False, emoji=False, highlight=False, soft_wrap=True, stderr=stderr)


def show_table(table: Table, console: Console | None = None) -> None:
    """Print a table at its full width: a narrower terminal wraps its lines, while rich would leave figures out."""
    console = console or plain_console()
    needed = Measurement.get(console, console.options.update(width=_UNBOUNDED), table).maximum
    console.width = max(console.width, needed)
    console.print(table, soft_wrap=False)
