"""Which layers are told of, and numbers of theirs that grow."""

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.step.effects.layers import looks
from lightning_pfo.strategy.step.effects.layers import watch as layer_watch
from lightning_pfo.strategy.step.effects.layers.once import BuffersOnce


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Module()
        self.layer.register_buffer("center", torch.zeros(2))


@pytest.fixture
def said(monkeypatch):
    texts = []
    monkeypatch.setattr(looks, "warn_once", texts.append)
    return texts


def watch_of(root, modules):
    return layer_watch.LayerWatch(root, modules, BuffersOnce(root, {}, (), (), repeats=False, batch_dim=0))


def test_evaluation_and_later_batches_cost_no_looks():
    root = Root()
    watch = watch_of(root, {"layer": root.layer})
    watch.begin((2, 2), looks=False)
    assert not watch.counts
    for _ in range(3):
        watch.begin((2, 2), looks=True)
        assert watch.counts
        watch.look()
    watch.begin((2, 2), looks=True)
    assert not watch.counts


@pytest.mark.parametrize("of_step", [False, True])
@pytest.mark.parametrize(
    "change", [lambda p: p.copy_(p + 1), lambda p: setattr(p, "data", p + 1), lambda p: p.data.copy_(p + 1)]
)
def test_parameters_that_layers_change_in_forward_are_named(change, of_step, said):
    root = Root()
    root.layer.scale, root.rows = nn.Parameter(torch.zeros(2)), nn.Embedding(2, 2, max_norm=1.0)
    watch = watch_of(root, {"layer": root.layer, "rows": root.rows})
    watch.looks.of_step = ["layer.scale"] if of_step else []
    for batch in range(2):  # the first one alone may limit it, as it does in each batch
        watch.begin((2, 2), looks=True)
        for index in range(2):
            with watch.of_microbatch(index), torch.no_grad():
                root.rows(torch.tensor([0, 1]))
                if batch == index == 0:
                    change(root.layer.scale)
        watch.look()
        assert len(said) == (batch == 1 and not of_step)
    assert all("parameter self.layer.scale in its forward" in text and "on_train_start" in text for text in said)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_weight_that_is_limited_anew_in_each_batch_is_not_named(is_told, said):
    root = Root()
    root.layer.scale = nn.Parameter(torch.ones(2))
    watch = watch_of(root, {"layer": root.layer})
    for batch in range(2):
        watch.begin((2, 2), looks=True)
        for index in range(2):
            with watch.of_microbatch(index):
                root.layer.scale.data.clamp_(max=0.5 - 1e-6 * index)
                if batch == 1 and is_told:
                    root.layer.scale.data.mul_(0.9)  # which each microbatch does once more
        watch.look()
        root.layer.scale.data.mul_(3)
    assert bool(said) == is_told


def test_what_optimizers_write_between_batches_and_values_that_are_no_numbers_name_no_layer(said):
    root = Root()
    root.layer.scale, root.layer.odd = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.tensor([torch.nan, 1j]))
    watch = watch_of(root, {"layer": root.layer})
    for _ in range(2):
        watch.begin((2, 2), looks=True)
        for index in range(2):
            with watch.of_microbatch(index):
                pass
        root.layer.scale.data.add_(1)
        watch.look()
    assert not said


def test_what_no_rule_gives_of_the_first_batch_is_what_one_microbatch_says(said):
    root = Root()
    root.layer.size, root.layer.total, root.layer.late = 0, 1, None
    watch = watch_of(root, {"layer": root.layer})
    watch.begin((2, 2), looks=True, learns=True)
    for index in range(2):
        with watch.of_microbatch(index):
            assert (root.layer.size, root.layer.total, root.layer.late) == (0, 1, None)
            root.layer.size, root.layer.total, root.layer.late = 4, 2 + index, 5
            root.layer.new = getattr(root.layer, "new", 0) + 1 + index
    asked = []
    watch.end(lambda value: pytest.fail("nothing is shared"), asked.append)
    assert asked == [{"layer"}]
    assert (root.layer.size, root.layer.total, root.layer.late, root.layer.new) == (4, 3, 5, 2)


@pytest.mark.parametrize(
    ("also", "counts_own"),
    [
        (lambda root: None, True),
        (lambda root: root.layer.center.add_(1), False),  # a flag that goes with first values
        (lambda root: root.other.register_buffer("steps", root.layer.steps), False),  # others see it
    ],
)
def test_counters_in_buffers_begin_anew_in_each_microbatch(also, counts_own, said):
    root = Root()
    root.other = nn.Module()
    root.layer.register_buffer("steps", torch.tensor(3))
    steps = root.layer.steps
    watch = watch_of(root, {"layer": root.layer, "other": root.other})
    also(root)
    watch.begin((2, 2), looks=True, learns=True)
    seen = []
    for index in range(2):
        with watch.of_microbatch(index):
            seen.append(root.layer.steps.item())
            root.layer.steps += 1
            also(root)
    watch.end(lambda value: pytest.fail("nothing is shared"), lambda names: None)
    assert seen == ([3, 3] if counts_own else [3, 4])
    assert root.layer.steps is steps
    assert steps.item() == (4 if counts_own else 5)
