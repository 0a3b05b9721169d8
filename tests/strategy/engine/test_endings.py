"""What ends a step at the end of its batch, and what ends a run where it is."""

import pytest
import torch

from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.strategy.engine.endings import InterruptedAtOnce, StepEndedError
from lightning_pfo.strategy.engine.stage import Stage
from lightning_pfo.strategy.model.tracing.dividing.program import programs_of
from tests.strategy.model.stages import CPU, SEED, Followed
from tests.strategy.model.tracing.cases import CASES


@pytest.fixture
def stage_that_ends_by():
    """Makes a stage whose step raises something, and runs its forward."""
    owner, step = CASES["chain"].make()
    followed = Followed(owner, step, 1)
    program = programs_of(followed.trace(), [])

    def run(ending):
        def loss(output, microbatch):
            raise ending

        stage = Stage(0, CPU, emitter=None, compute_loss=loss, train=False)
        stage.programs, stage.seed, stage.step = program, SEED, lambda index, microbatch: followed.step()
        with torch.no_grad():
            stage.run(Instruction(0, InstructionType.FORWARD, 0), ())
        return stage

    yield run
    followed.close()


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(3)])
def test_a_batch_goes_on_to_its_end_whatever_a_step_raises(stage_that_ends_by, ending):
    failure = stage_that_ends_by(ending).failure
    assert isinstance(failure, StepEndedError)
    assert failure.ending is ending


def test_a_second_ctrl_c_does_not_wait_for_the_end_of_the_batch(stage_that_ends_by):
    with pytest.raises(InterruptedAtOnce):
        stage_that_ends_by(InterruptedAtOnce())
