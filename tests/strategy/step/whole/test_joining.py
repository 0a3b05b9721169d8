from types import SimpleNamespace

import pytest
import torch

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.strategy.model.tracing.events import New
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.whole.joining import Join, find_blocks, joins_of

SIZES = (3, 2)


def joins(parts, whole):
    """Of one value, by its shapes."""
    programs = [SimpleNamespace(forms={0: torch.empty(shape)}) for shape in parts]
    return joins_of(programs, SimpleNamespace(forms={0: torch.empty(whole)}, received=(0,), varying=()), SIZES)[0]


def test_samples_are_joined_along_the_dimension_that_grows():
    assert joins([(3, 7), (2, 7)], (5, 7)) == Join(0)
    assert joins([(7, 3), (7, 2)], (7, 5)) == Join(1)
    assert joins([(7, 3), (7, 3)], (7, 3)) == Join(None)
    assert joins([(12,), (8,)], (20,)) == Join(0, 4, None)


def varying(whole, parts, varies, events=()):
    """The same of a value of which some dimensions depend on values."""
    forms = [torch.empty(shape) for shape in (whole, *parts)]
    forms[0].varies = frozenset(varies)
    end, *programs = (SimpleNamespace(forms={0: form}, received=(0,), varying={0}, events=events) for form in forms)
    return joins_of(programs, end, SIZES)[0]


def test_other_dimensions_than_that_of_samples_may_depend_on_values():
    join = varying((5, 9), [(3, 9), (2, 9)], {1})
    assert join == Join(0)
    assert join([torch.zeros(3, 7), torch.ones(2, 7)], SIZES).shape == (5, 7)
    with pytest.raises(ConfigurationError, match=r"other sizes in each.*total_length"):
        join([torch.zeros(3, 7), torch.ones(2, 6)], SIZES)
    with pytest.raises(ConfigurationError, match=r"dimension 0 of 2\) depends on values"):
        varying((45, 4), [(27, 4), (18, 4)], {0})


def test_sequences_of_microbatches_have_their_steps_together():
    packed = SimpleNamespace(what=torch._VF._pack_padded_sequence, results=[New(1), New(0)])
    join = varying((9,), [(9,), (9,)], {0}, events=[packed])
    assert join([torch.tensor([3, 2, 2, 1]), torch.tensor([2, 1])], SIZES).tolist() == [5, 3, 2, 1]


@pytest.mark.parametrize("whole", [(5, 5), (5, 3, 1), (4, 3)])
def test_values_of_pairs_of_samples_are_refused(whole):
    with pytest.raises(ConfigurationError, match="an earlier layer compares samples"):
        joins([(3, 3), (2, 2) if whole == (5, 5) else (2, 3)], whole)


@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_samples_are_put_in_the_order_of_the_whole_batch(blocks, dim):
    # whole[b, sample, r]: in `blocks` blocks of all samples, each with the other rows of a sample together
    rows = torch.randn(blocks, sum(SIZES), 6 // blocks, dtype=torch.float64)
    shaped = [part.flatten() for part in (rows, *rows.split(SIZES, 1))]
    whole, *parts = (torch.stack([value, -value], 1 - dim) for value in shaped)
    join = Join(dim, 6, None)
    assert find_blocks({0: join}, [{0: part} for part in parts], {0: whole}, SIZES) == {0: blocks}
    assert torch.equal(Join(dim, 6, blocks)(parts, SIZES), whole)


@pytest.mark.parametrize("values", [torch.zeros(20), torch.zeros(20, dtype=torch.long), torch.arange(20)])
def test_an_order_that_cannot_be_told_is_refused(values):
    parts = [{0: torch.zeros(12, dtype=values.dtype)}, {0: torch.zeros(8, dtype=values.dtype)}]
    with pytest.raises(ConfigurationError, match=r"the 4 rows that each sample has .* cannot be told"):
        find_blocks({0: Join(0, 4, None)}, parts, {0: values}, SIZES)


def test_what_has_no_samples_is_the_mean_or_the_same():
    means = torch.tensor(1.0, requires_grad=True), torch.tensor(6.0)
    joined = Join(None)(means, SIZES)
    joined.backward()
    assert float(joined.detach()) == pytest.approx(3.0)
    assert float(means[0].grad) == pytest.approx(0.6)
    assert Join(None)([torch.tensor(4), torch.tensor(4)], SIZES) == 4
    with pytest.raises(ConfigurationError, match=r"int64 of shape .* differs between them"):
        Join(None)([torch.tensor(4), torch.tensor(5)], SIZES)


def test_a_loss_over_the_batch_needs_a_schedule_that_waits_for_it():
    whole = Batching(loss_over="batch")
    for name in ("gpipe", "looped_bfs"):
        whole.check_schedule(make_schedule(name, 2, 8))
    for name in ("1f1b", "interleaved_1f1b", "zbv"):
        Batching().check_schedule(make_schedule(name, 2, 8))
        with pytest.raises(ConfigurationError, match="Use schedule='gpipe'"):
            whole.check_schedule(make_schedule(name, 2, 8))
    with pytest.raises(ConfigurationError, match="none of microbatches to weigh; got microbatch_weight='tokens'"):
        Batching(loss_over="batch", microbatch_weight="tokens")
    with pytest.raises(ConfigurationError, match="'microbatch' or 'batch'; got 'all'"):
        Batching(loss_over="all")
