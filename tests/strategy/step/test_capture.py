import pytest
import torch
from lightning_pfo.strategy.step.capture import LogRecorder, StepRedirection
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.parallel.patches import Patches


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2))
        self.logged = []

    def log(self, name, value, **kwargs):
        self.logged.append(name)

    def step(self, x, calls=1):
        self.log("before", 1.0)
        try:
            for _ in range(calls):
                y = self.model(x * 2)
        except Exception as error:
            if isinstance(error, ConfigurationError):
                raise
            y = None
        self.log("loss", y.sum(), prog_bar=True)
        return y.sum()


@pytest.fixture
def owner():
    owner = Owner()
    owner.redirection = StepRedirection(owner, owner.model, "model")
    with Patches() as patches:
        owner.redirection.install(patches)
        yield owner
    assert torch.equal(owner.model(torch.ones(1, 2)), owner.model[0](torch.ones(1, 2)))


def test_capture_returns_what_the_step_passes_and_logs_nothing(owner):
    x = torch.ones(3, 2)
    args, kwargs = owner.redirection.capture(lambda: owner.step(x))
    assert torch.equal(args[0], x * 2)
    assert not kwargs
    assert not owner.logged


def test_replay_gives_the_step_its_output_and_records_the_log(owner):
    recorder = LogRecorder(nn.Module())
    for value in (1.0, 3.0):
        result = owner.redirection.replay(lambda: owner.step(torch.ones(1, 2)), torch.full((2,), value), recorder)
    assert float(result) == 6.0
    values = recorder.step_values([torch.tensor(2.0), torch.tensor(6.0)])
    assert [float(number) for number in values.numbers] == [4.0, 1.0, 4.0]
    assert values.structure == ("tensor", (("before", None, {}), ("loss", None, {"prog_bar": True})))
    assert not owner.logged
    owner.log("after", 0.0)
    assert owner.logged == ["after"]


def test_other_uses_are_refused(owner):
    with pytest.raises(ConfigurationError, match="exactly once; this one calls it a second time"):
        owner.redirection.replay(lambda: owner.step(torch.ones(1, 2), calls=2), torch.ones(2), LogRecorder(nn.Module()))
    with pytest.raises(ConfigurationError, match="returned without calling it"):
        owner.redirection.capture(lambda: owner.step(torch.ones(1, 2), calls=0) if False else None)
    with pytest.raises(ConfigurationError, match="can only be called inside training_step"):
        owner.model(torch.ones(1, 2))


def test_values_are_reduced_as_self_log_says():
    recorder = LogRecorder(nn.Module())
    for value in (1, 5):
        recorder.log("mean", value)
        recorder.log("sum", value, reduce_fx="sum")
        recorder.log("largest", torch.tensor([value]), reduce_fx=torch.max)
        recorder.log("by_position", value, True)
        recorder.log("counted", value, batch_size=4)
    values = recorder.step_values([])
    assert [float(number) for number in values.numbers] == [3.0, 6.0, 5.0, 3.0, 3.0]
    assert values.structure[0] is None
    arguments = {name: arguments for name, _, arguments in values.structure[1]}
    assert arguments["by_position"] == {"prog_bar": True}
    assert arguments["counted"] == {"batch_size": 8}
    with pytest.raises(ConfigurationError, match="'metric' is a Linear"):
        recorder.log("metric", nn.Linear(1, 1))
