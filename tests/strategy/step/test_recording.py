import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.step.recording import LogRecorder


def test_results_and_logs_are_means_over_microbatches():
    recorder = LogRecorder(nn.Module())
    for value in (2.0, 6.0):
        recorder.log("before", 1.0)
        recorder.log("loss", torch.tensor(value), prog_bar=True)
    values = recorder.step_values([torch.tensor(2.0), torch.tensor(6.0)])
    assert [float(number) for number in values.numbers] == [4.0, 1.0, 4.0]
    assert values.structure == ("tensor", (("before", None, {}), ("loss", None, {"prog_bar": True})))
    of_dicts = LogRecorder(nn.Module()).step_values([{"loss": torch.tensor(2.0)}, {"loss": torch.tensor(4.0)}])
    assert [float(number) for number in of_dicts.numbers] == [3.0]
    assert of_dicts.structure == ("dict", ())


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
