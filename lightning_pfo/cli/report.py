"""Make the page of a run that optimised itself anew: report.html, of what is in its folder.

Example:
  lightning-pfo report outputs/demo
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lightning_pfo.cli.console import plain_console

FIRST = "run_dir"
"""The setting that is given without its name."""


@dataclass
class Settings:
    """What `lightning-pfo report` can be told."""

    run_dir: str = field(metadata={"help": "folder of the run, such as outputs/demo", "is_path": True})


def run(settings: Settings) -> None:
    """Write the page.

    Raises:
        PfoError: If the folder has no report.
    """
    from lightning_pfo.pictures.report_page import write_page  # reads plans, which is slow to import

    plain_console().print(f"written: {write_page(Path(settings.run_dir))}")
