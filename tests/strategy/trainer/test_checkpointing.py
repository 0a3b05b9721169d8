"""What becomes of checkpoints when training fails; saving and resuming itself is tested in state/test_resuming.py."""

import logging
import threading
from concurrent.futures import Future

import pytest

from lightning_pfo.strategy import PfoPipelineStrategy


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
