"""Buffers that layers change by what they see, repeated on the whole batch; `test_zoo` trains with such layers."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pfo.strategy.model.tracing.forms.remembered import buffers_kept
from lightning_pfo.strategy.step.effects.layers import once, repeating
from lightning_pfo.strategy.step.effects.layers.joining import as_one

SIZES = (2, 2, 1)


class Average(nn.Module):
    """Follows what it sees."""

    def __init__(self, change="in place"):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.change, self.calls, self.total = change, 0, torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.total += len(x)
        result = self.linear(x - self.mean)
        mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.change == "in place":
            with torch.no_grad():
                self.mean.copy_(mean)
        elif self.change == "in data":
            self.mean.data.copy_(mean)
        elif self.change == "data":
            self.mean.data = mean
        else:
            self.mean = mean
        return result


class Root(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer


@pytest.fixture(autouse=True)
def said(monkeypatch):
    texts = []
    for module in (once, repeating):
        monkeypatch.setattr(module, "warn_once", texts.append)
    return texts


def buffers_once(root, **options):
    return once.BuffersOnce(root, {}, (), **{"of_weights": (), "repeats": True, "batch_dim": 0, **options})


@contextmanager
def again():
    torch.manual_seed(1)
    yield


def run(buffers, call, batch, kind="train", sizes=SIZES, stays=True, of_step=()):
    """Run a layer on microbatches; returns what it has computed."""
    outputs = []
    with buffers.of_run(kind, sizes, again, of_step=of_step, stays=stays):
        for index, microbatch in enumerate(batch.split(2)):
            context = buffers.of_microbatch(0, index)
            with context if context is not None else torch.enable_grad():
                outputs.append(call(microbatch))
    buffers.tell(())
    return torch.cat(outputs)


@pytest.mark.parametrize("change", ["in place", "in data", "data", "assigned"])
def test_buffers_are_those_of_one_device(change, said):
    root = Root(Average(change))
    alone, buffers = copy.deepcopy(root), buffers_once(root)
    buffer = root.layer.mean
    for number in range(5):  # of which the first three are looked at
        batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        output = run(buffers, root.layer, batch)
        torch.testing.assert_close(output, alone.layer(batch))
        torch.testing.assert_close(root.layer.mean, alone.layer.mean)
        assert root.layer.mean is buffer  # others may have it
        output.sum().backward()
        assert buffers.repeated == {"layer"}
    assert "forward" not in vars(root.layer)
    assert (root.layer.calls, root.layer.total) == (5, 5 * 5)  # tensors in attributes go on; repetitions do not count
    assert said == []


class Cached(nn.Module):
    """Computes angles once for all, and knows by an attribute how many are there, as rotary-embedding-torch does."""

    def __init__(self, way):
        super().__init__()
        self.register_buffer("angles", torch.zeros(16, 4))
        self.way, self.known = way, 0
        if way == "new":
            del self.known

    def forward(self, positions, length=None):
        if getattr(self, "known", 0) < len(positions):
            if length is not None:
                positions = positions.expand(length)
            self.angles[: len(positions)] = positions[:, None] * torch.linspace(0.1, 1, 4)
            self.known = len(positions)
        return self.angles[: len(positions)].clone()


class Turned(Average):
    def __init__(self, way):
        super().__init__()
        self.cache, self.way = Cached(way), way

    def forward(self, x):
        positions = torch.arange(4.0) if self.way != "as many" else torch.arange(2.0)
        length = 4 if self.way == "of a length" else None
        if self.way == "not repeated":
            return x.sum() * self.cache(positions, length=None if len(x) > 1 else 4)
        return x.sum(1)[:, None, None] * self.cache(positions, length=length)


@pytest.mark.parametrize("way", ["", "of a length", "as many", "new", "not repeated"])
@pytest.mark.parametrize("kind", ["train", "compare"])
def test_flags_that_tell_of_buffers_go_with_them(way, kind, said):
    root = Root(Turned(way))
    alone = copy.deepcopy(root)
    buffers = buffers_once(root)
    for stays in (kind == "train", True, True):
        batch = torch.randn(4, 3)
        output = run(buffers, lambda x: root.layer(x)[None].flatten(), batch, kind, (2, 2), stays)
        wanted = torch.cat([alone.layer(microbatch)[None].flatten() for microbatch in batch.split(2)])
        torch.testing.assert_close(output, wanted)
        if stays:
            torch.testing.assert_close(root.layer.cache.angles, alone.layer.cache.angles)
            assert root.layer.cache.known == alone.layer.cache.known
    assert said == []


def test_attributes_of_a_repeated_layer_are_those_of_one_device():
    class Keeps(Average):
        def forward(self, x):
            self.seen = self.__dict__.get("seen", torch.zeros(())) + x.sum()
            self.latest = None if hasattr(self, "latest") else len(x)
            return super().forward(x)

    root = Root(Keeps())
    alone, buffers = copy.deepcopy(root), buffers_once(root)
    for _ in range(3):
        batch = torch.randn(5, 3)
        run(buffers, root.layer, batch)
        alone.layer(batch)
        assert (root.layer.calls, root.layer.latest) == (alone.layer.calls, alone.layer.latest)
        torch.testing.assert_close(root.layer.seen, alone.layer.seen)
    assert buffers.ever_repeated == {"layer"}


def test_what_is_called_once_for_the_batch_changes_so():
    """As the end of a step on the whole batch is; in one of its microbatches."""
    root = Root(Average())
    alone, buffers = copy.deepcopy(root), buffers_once(root)
    for _ in range(2):
        batch = torch.randn(5, 3)
        run(buffers, lambda x, whole=batch: root.layer(whole) if len(x) == 1 else x, batch)
        alone.layer(batch)
        torch.testing.assert_close(root.layer.mean, alone.layer.mean)


def test_what_does_not_count_leaves_nothing():
    root = Root(Average())
    run(buffers_once(root), root.layer, torch.randn(5, 3), "compare", stays=False)
    assert root.layer.mean.tolist() == [0, 0, 0]


def test_a_run_that_fails_leaves_nothing():
    root = Root(Average())

    def fail(microbatch):
        root.layer(microbatch)
        if len(microbatch) == 1:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(buffers_once(root), fail, torch.randn(5, 3))
    assert root.layer.mean.tolist() == [0, 0, 0]


def test_layers_within_and_batch_norms_change_once():
    class Outer(Average):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = Average(), nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(self.inner(super().forward(x)))

    root = Root(Outer())
    alone, buffers = copy.deepcopy(root), buffers_once(root)
    for number in range(1, 3):
        batch = torch.randn(6, 3)
        run(buffers, root.layer, batch, sizes=(2, 2, 2))
        alone.layer(batch)
        torch.testing.assert_close(root.layer.mean, alone.layer.mean)
        torch.testing.assert_close(root.layer.inner.mean, alone.layer.inner.mean)
        assert root.layer.norm.num_batches_tracked == 3 * number  # as many microbatches, and no repetition


def test_layers_that_run_again_in_backward_find_the_buffers_of_the_begin():
    root = Root(Average())
    alone, buffers = copy.deepcopy(root), buffers_once(root)
    batch = torch.randn(5, 3)
    root.layer.mean.fill_(1)
    alone.layer.mean.fill_(1)
    with buffers.of_run("train", SIZES, again, stays=True):
        losses = []
        for index, microbatch in enumerate(batch.split(2)):
            with buffers.of_microbatch(0, index):
                losses.append(checkpoint(root.layer, microbatch, use_reentrant=False).square().sum())
        for loss in losses:
            loss.backward()
    alone.layer(batch).square().sum().backward()
    torch.testing.assert_close(root.layer.linear.weight.grad, alone.layer.linear.weight.grad)
    torch.testing.assert_close(root.layer.mean, alone.layer.mean)


def test_a_later_phase_of_a_step_changes_nothing(said):
    """It does not call the layer, or repeats its call with other buffers, see `buffers_kept`."""
    root = Root(Average())
    buffers = buffers_once(root)
    run(buffers, root.layer, torch.randn(5, 3))
    before = root.layer.mean.clone()

    def repeated(x):
        with buffers_kept([SimpleNamespace(module=root.layer)]):
            return root.layer(x)

    for call in (repeated, lambda x: x):
        run(buffers, call, torch.randn(5, 3))
        assert root.layer.mean.equal(before)
    assert said == []


def test_layers_that_draw_are_repeated_with_the_same_numbers(said):
    class Drops(Average):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5))

    root = Root(Drops())
    run(buffers_once(root), root.layer, torch.randn(5, 3))
    assert root.layer.mean.abs().sum() > 0
    assert said == []  # what they compute differs by what they draw


def test_layers_that_compute_from_other_samples_are_named(said):
    class Normalises(Average):
        def forward(self, x):
            super().forward(x)
            return x - self.mean

    root = Root(Normalises())
    run(buffers_once(root), root.layer, torch.randn(5, 3))
    (text,) = said
    assert "self.layer computes for a sample depends on others" in text
    assert "microbatches of 1 or 2 samples, not the batch of 5" in text


class Depends(Average):
    """Leaves something else when it is repeated."""

    def forward(self, x):
        self.mean.add_(len(self.__dict__.setdefault("seen", [])))
        self.seen.append(1)
        return super().forward(x)


def others_change_it(root, x):
    root.layer.mean.add_(x.mean(0))
    return x


def gives_other_arguments(root, x):
    return root.layer(x + torch.zeros(1, 3)) if len(x) > 1 else root.layer(x.expand(3, 3)[:, :])[:1]


@pytest.mark.parametrize(
    ("make", "call", "options"),
    [
        (Average, others_change_it, {}),
        (Average, lambda root, x: root.layer(x) if len(x) > 1 else x, {}),  # not in each microbatch
        (Average, gives_other_arguments, {}),
        (Average, lambda root, x: root.layer(x), {"repeats": False}),
        (Depends, lambda root, x: root.layer(x), {}),
    ],
    ids=["changed outside", "called sometimes", "unequal arguments", "not repeated", "by what it has counted"],
)
def test_what_cannot_be_repeated_changes_with_each_microbatch_and_is_named(make, call, options, said):
    root = Root(make())
    buffers = buffers_once(root, **options)
    for _ in range(2):
        run(buffers, lambda x: call(root, x), torch.ones(5, 3))
        assert buffers.repeated == set()
    assert "self.layer.mean: once for each microbatch" in said[0]
    assert (root.layer.mean > 0.2).all()  # more than two changes


@pytest.mark.parametrize("how", ["wrapped", "around"])
def test_layers_inside_of_what_is_compiled_go_on(how, said):
    root = Root(nn.Sequential(Average()))
    if how == "wrapped":
        root.layer[0] = torch.compile(root.layer[0], backend="eager", fullgraph=True)
    else:
        root.layer.compile(backend="eager", fullgraph=True)
    buffers = buffers_once(root)
    for _ in range(2):
        run(buffers, root.layer, torch.ones(5, 3))
    assert "mean: once for each microbatch" in said[0]
    (mean,) = root.buffers()
    torch.testing.assert_close(mean, torch.full((3,), 1 - 0.9**6))


def test_buffers_of_several_layers_go_on(said):
    root = Root(Average())
    root.other = Average()
    root.other.mean = root.layer.mean
    run(buffers_once(root), lambda x: root.other(root.layer(x)), torch.ones(5, 3))
    assert "self.layer.mean: once for each microbatch" in said[0]
    assert root.other.mean is root.layer.mean


def test_buffers_of_the_step_and_of_weights_are_left_alone(said):
    root = Root(Average())
    run(buffers_once(root), root.layer, torch.ones(5, 3), of_step=["layer.mean"])
    run(buffers_once(root, of_weights=["layer.mean"]), root.layer, torch.ones(5, 3))
    torch.testing.assert_close(root.layer.mean, torch.full((3,), 1 - 0.9**6))
    assert said == []


def test_later_batches_cost_nothing_where_nothing_changes():
    root = Root(nn.BatchNorm1d(3))
    root.masked = nn.Module()
    root.masked.register_buffer("mask", torch.ones(3))
    buffers = buffers_once(root)
    for number in range(5):
        with buffers.of_run("train", SIZES, again, stays=True):
            assert (buffers.of_microbatch(0, 0) is None) == (number >= 3)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            [torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(1, 3)],
            torch.tensor([0.0, 0, 0, 0, 1])[:, None].expand(5, 3),
        ),
        ([torch.zeros(7, 2), torch.ones(7, 2), torch.ones(7, 1)], torch.tensor([0.0, 0, 1, 1, 1]).expand(7, 5)),
        (
            [torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(2, 3)],
            torch.zeros(10, 3).index_fill(0, torch.tensor([8, 9]), 1),
        ),
        ([torch.arange(3)] * 3, torch.arange(3)),  # the same for all
        (["cls"] * 3, "cls"),
    ],
    ids=["rows", "time first", "two rows for each", "no samples", "a text"],
)
def test_what_microbatches_were_given_is_put_together(parts, expected):
    found = as_one(parts, SIZES, 0)
    assert found.equal(expected) if isinstance(found, torch.Tensor) else found == expected


@pytest.mark.parametrize(
    "parts",
    [
        [torch.zeros(3), torch.ones(3), torch.ones(3)],
        [1, 2, 3],
        [torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(1, 4)],
    ],
)
def test_what_cannot_be_put_together(parts):
    with pytest.raises(ValueError, match="differ"):
        as_one(parts, SIZES, 0)
