"""Write some of the plans of a frontier: each `every`-th, or num_plans of them.

The fastest plan and the one of least energy always stay; plans are numbered anew. Example:

  lightning-pfo sample frontier=plans output_dir=few num_plans=10
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from lightning_pfo.cli.console import plain_console
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.files import check_can_write
from lightning_pfo.core.wording import counted
from lightning_pfo.planner.frontier.frontier_files import load_frontier, save_frontier
from lightning_pfo.planner.frontier.thin import thin_frontier


@dataclass
class Settings:
    """What `lightning-pfo sample` can be told."""

    frontier: str = field(metadata={"help": "frontier.json to read, or its directory", "is_path": True})
    output_dir: str = field(metadata={"help": "directory to write to", "is_path": True})
    every: int = field(default=1, metadata={"help": "keep each n-th plan, counted from the fastest"})
    num_plans: Optional[int] = field(  # noqa: UP045 (OmegaConf reads the annotation)
        default=None, metadata={"help": "keep about so many, evenly spread over iteration times"}
    )


def run(settings: Settings) -> None:
    """Read, thin, write.

    Raises:
        PlanError: If the frontier cannot be read.
        ConfigurationError: If a number is out of range, `output_dir` cannot be written, or is where the frontier is;
            nothing is written then.
    """
    check_can_write("output_dir", settings.output_dir, is_folder=True)
    source = Path(settings.frontier)
    if Path(settings.output_dir).resolve() == (source if source.is_dir() else source.parent).resolve():
        raise ConfigurationError(
            f"Some plans of a frontier are written into another folder, where they replace none; got "
            f"output_dir={settings.output_dir}, where the frontier is. Use output_dir={settings.output_dir}/few."
        )
    frontier = load_frontier(settings.frontier)
    thinned = thin_frontier(frontier, every=settings.every, num_plans=settings.num_plans)
    save_frontier(thinned, settings.output_dir)
    plain_console().print(
        f"{len(thinned.plans)} of {counted(len(frontier.plans), 'plan')} written to {settings.output_dir}"
    )
