import pytest

from lightning_pfo.strategy.step.batches.notices import warn_once


@pytest.fixture(autouse=True)
def said_anew():
    """What is said once for each process is said once for each test."""
    warn_once.cache_clear()
