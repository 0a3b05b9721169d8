"""The main job: profile, plan, train at the top clocks and under the plan, report what was saved.

Read `config` (what can be set), `command_line` (where a script meets Hydra), `run` (the phases), then `checks`,
`training`, `report` and `pictures`. `gpu_loads` has jobs of its own: what a GPU draws while it waits for
another, and how its energy counter looks at power.

Composing a configuration imports neither torch nor Lightning; running an experiment does. Scripts import something of
this package first, so that Ctrl-C during the seconds that the rest takes ends them with one line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_pfo.experiment.processes import explain_interrupts

if TYPE_CHECKING:
    from lightning_pfo.experiment.run import run_experiment

__all__ = ["run_experiment"]

explain_interrupts()


def __getattr__(name: str) -> Any:
    if name != "run_experiment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_pfo.experiment.run import run_experiment

    return run_experiment
