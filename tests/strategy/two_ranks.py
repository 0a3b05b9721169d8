"""The same run by a plain Trainer and by the pipeline on two ranks, for scripts that write what each has found."""

import logging

import lightning as L

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET

WHERE = {"plain": 1, "two": 2}
"""On how many ranks each is."""


def make_trainer(where, folder, **options):
    """One for two epochs."""
    return L.Trainer(
        accelerator="cpu",
        devices=WHERE[where],
        strategy="auto" if where == "plain" else PfoPipelineStrategy(num_microbatches=4),
        max_epochs=2,
        default_root_dir=folder,
        **(QUIET | options),
    )


def listen():
    """A list to which all that the package says from now on is added."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lightning_pfo").addHandler(handler)
    return said
