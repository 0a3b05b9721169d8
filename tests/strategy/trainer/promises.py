"""Runs of what Lightning promises: by a plain Trainer, and by the pipeline on one and two ranks."""

import json
from pathlib import Path

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "promises.py"
RANKS = ("one_0", "two_0", "two_1")


def run_promises(folder, which):
    """What each rank has seen of the `first` or of the `further` promises."""
    run_script(SCRIPT, folder, which)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("plain_0", *RANKS)}
