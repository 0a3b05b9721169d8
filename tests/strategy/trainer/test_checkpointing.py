"""What becomes of checkpoints when training fails; saving and resuming itself is tested in state/test_resuming.py."""

import logging
import threading
from concurrent.futures import Future

import pytest
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.trainer.checkpointing import SafeCheckpointIO


@pytest.mark.parametrize("error", [None, OSError("no space left on device")])
def test_after_an_exception_a_checkpoint_beside_training_is_waited_for(error, caplog):
    strategy = PfoPipelineStrategy()
    strategy.on_exception(RuntimeError("nothing was being written"))
    saving = Future()
    strategy._saving = saving
    finish = (lambda: saving.set_result(None)) if error is None else (lambda: saving.set_exception(error))
    writer = threading.Timer(0.2, finish)
    writer.start()
    with caplog.at_level(logging.WARNING):
        strategy.on_exception(KeyboardInterrupt())
    assert saving.done()
    assert ("no space left on device" in caplog.text) == (error is not None)
    strategy.on_exception(RuntimeError("it is not asked again"))
    writer.join()


def test_wrapped_plugins_write_by_ours_however_deep():
    inner = AsyncCheckpointIO()
    outer = AsyncCheckpointIO(inner)
    strategy = PfoPipelineStrategy(checkpoint_io=outer)
    for _ in range(2):  # asked again, it is the same
        assert strategy.checkpoint_io is outer
        ours = inner.checkpoint_io
        assert isinstance(ours, SafeCheckpointIO)
    assert inner.checkpoint_io is ours
    given = TorchCheckpointIO()
    assert PfoPipelineStrategy(checkpoint_io=AsyncCheckpointIO(given)).checkpoint_io.checkpoint_io is given
