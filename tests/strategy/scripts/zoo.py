"""Trains cases of the zoo on one device and on stages; usage: zoo.py OUTPUT.json CASE,CASE,..."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import torch.distributed as dist

from lightning_pfo.core.errors import ConfigurationError
from tests.strategy.zoo import CASES, Settings, measure
from tests.strategy.zoo.processes import run_together

ON_FOUR = ("layers_called_repeatedly", "head_given_the_embedding")
"""Stages share its layers in overlapping sets, or some hold neither of two that others share."""


def fail(how):
    """Rank 1 fails while rank 0 waits for it."""
    if how == "refuse" and dist.get_rank() == 1:
        raise ConfigurationError("Do something else.")
    if how == "crash" and dist.get_rank() == 1:
        raise KeyError("key")
    if how == "hang" and dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()
    return how


def main(output, names):
    results = {}
    for name in names.split(","):
        stages = 4 if name in ON_FOUR else 2
        (outcome,) = measure(CASES[name], [stages], Settings(steps=3, check_loss=False))
        results[name] = dataclasses.asdict(dataclasses.replace(outcome, case=None))
    failures = {how: run_together(fail, 2, 2.0 if how == "hang" else 30.0, how) for how in ("refuse", "crash", "hang")}
    results["failures"] = {how: [failure.kind, failure.message] for how, failure in failures.items()}
    results["failures"]["none"] = run_together(fail, 2, 30.0, "none")
    Path(output).write_text(json.dumps(results))


main(*sys.argv[1:])
