import re

import pytest
from rich.table import Table

from lightning_pfo.cli.console import plain_console, show_table


@pytest.mark.parametrize("columns", [1, 20, 80])
def test_a_narrow_terminal_leaves_nothing_of_a_table_out(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    table = Table("plan", "iteration time (s)", "iteration energy (J)", title="9 plans")
    table.add_row("no_slowdown", "2.8456", "12345.6")
    show_table(table)
    printed = capsys.readouterr().out
    for text in ("9 plans", "iteration time (s)", "iteration energy (J)", "no_slowdown", "2.8456", "12345.6"):
        assert text in printed
    assert len({len(line) for line in printed.splitlines()[1:]}) == 1


def test_brackets_and_colons_mean_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = Table("name", "GPU [/x] :smile:", title="[bold]GPU [/x]")
    table.add_row("[/a]", "[red]1")
    show_table(table)
    plain_console().print("written to out[/a]")
    printed = capsys.readouterr().out
    for text in ("[bold]GPU [/x]", "GPU [/x] :smile:", "[/a]", "[red]1", "written to out[/a]"):
        assert text in re.sub(r"\s+", " ", printed)
