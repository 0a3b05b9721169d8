import pytest

from lightning_pfo.strategy.step.batches import notices


@pytest.fixture(autouse=True)
def said_anew(monkeypatch):
    """What is said once for each process is said once for each test."""
    monkeypatch.setattr(notices, "_said", set())
