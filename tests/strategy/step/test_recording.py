import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.effects.left import place_of_log, place_of_size
from lightning_pfo.strategy.step.recording import LogRecorder


def recorded(values, **options):
    """What is logged for two microbatches of 3 samples that log one of the values each."""
    recorder = LogRecorder(nn.Module(), sizes=(3, 3))
    for index, value in enumerate(values):
        recorder.index = index
        recorder.log("value", value, **options)
    (logged,) = recorder.logged()
    return float(logged.value)


def test_losses_are_means_over_microbatches():
    recorder = LogRecorder(nn.Module(), (0.25, 0.75))
    assert float(recorder.mean_loss([torch.tensor(2.0), torch.tensor(6.0)])) == 5.0


@pytest.mark.parametrize(
    ("values", "reduce_fx", "expected"),
    [
        ((2.0, 6.0), "mean", 4.0),
        ((2.0, 6.0), "sum", 4.0),
        ((torch.tensor([2.0]), torch.tensor([6.0])), torch.max, 4.0),
        ((1, 5), "sum", 6.0),
        ((torch.tensor(1), torch.tensor(5)), torch.max, 5.0),
        ((torch.tensor(2), torch.tensor(2)), sum, 4.0),
        ((7, 7), "sum", 7.0),
        ((3, 3), "sum", 6.0),
    ],
)
def test_only_counts_are_reduced_over_microbatches_as_over_batches(values, reduce_fx, expected):
    """Equal integers of Python are settings, unless they are the numbers of samples."""
    assert recorded(values, reduce_fx=reduce_fx) == expected


def test_what_is_logged_twice_is_logged_twice():
    recorder = LogRecorder(nn.Module())
    for recorder.index in (0, 1):
        recorder.log("loss", 1.0, True)
        recorder.log("loss", 3.0 + recorder.index, batch_size=4)
    first, second = recorder.logged()
    assert (first.name, first.arguments, float(first.value)) == ("loss", {"prog_bar": True}, 1.0)
    assert (second.name, second.arguments, float(second.value)) == ("loss", {"batch_size": 8}, 3.5)
    with pytest.raises(ConfigurationError, match="this is a Linear"):
        recorder.log("metric", nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("sizes", "said", "expected"),
    [((3, 2), (8, 8), 8), ((3, 3), (8, 8), 16), ((3, 2), (3, 2), 5), ((3, 3), (5, 7), 12), ((3, 3), (3, 3), 6)],
)
def test_batch_sizes_add_up_unless_they_are_alike_for_microbatches_that_are_not(sizes, said, expected):
    """Where nothing has been learnt of them."""
    recorder = LogRecorder(nn.Module(), sizes=sizes)
    for recorder.index, size in enumerate(said):
        recorder.log("loss", 1.0, batch_size=size)
    (logged,) = recorder.logged()
    assert logged.arguments["batch_size"] == expected


def test_what_a_plain_module_cannot_log_is_said_in_our_words():
    owner = nn.Module()
    recorder = LogRecorder(owner)
    vars(owner)["log"] = recorder.log  # as while its step runs
    with pytest.raises(ConfigurationError, match="this is a Linear"):
        owner.log("metric", nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("said", "rule", "expected"),
    [
        ((1, 3), None, 2.5),  # of what it is the mean
        ((4, 4), None, 2.0),
        ((0, 5), None, 3.0),  # a mask that selects none in a microbatch, whose mean is NaN
        ((1, 3), "samples", 2.0),
        ((1, None), None, 2.0),
    ],
)
def test_a_value_counts_as_much_as_its_batch_size_says(said, rule, expected):
    recorder, rules = LogRecorder(nn.Module(), (0.5, 0.5), (4, 4)), Rules()
    if rule is not None:
        rules.set({place_of_log("value", 0): rule}, 0)
    for recorder.index, size in enumerate(said):
        recorder.log("value", float("nan") if size == 0 else 1.0 + 2 * recorder.index, batch_size=size)
    (logged,) = recorder.logged(rules)
    assert float(logged.value) == expected


@pytest.mark.parametrize(("rule", "expected"), [(None, 7 / 3), ("first", 7 / 3), ("sum", 2.0)])
def test_a_batch_size_that_is_counted_counts_also_where_all_have_as_many(rule, expected):
    recorder, rules = LogRecorder(nn.Module(), (0.5, 0.25, 0.25), (2, 1, 1)), Rules()
    if rule is not None:
        rules.set({place_of_size("value", 0): rule}, 0)
    for recorder.index in (0, 2):  # in the other there is none of what it is the mean
        recorder.log("value", 3.0 - recorder.index, batch_size=1)
    (logged,) = recorder.logged(rules)
    assert float(logged.value) == pytest.approx(expected)


def test_weights_hold_where_the_batch_size_is_that_of_samples():
    recorder = LogRecorder(nn.Module(), (0.9, 0.1), (6, 4))  # by tokens
    for recorder.index, size in enumerate((6, 4)):
        recorder.log("loss", float(recorder.index), batch_size=size)
    (logged,) = recorder.logged()
    assert float(logged.value) == pytest.approx(0.1)
