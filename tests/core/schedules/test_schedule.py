from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.registry import make_schedule, one_f_one_b
from lightning_pfo.core.schedules.schedule import PipelineSchedule


def text(schedule):
    return [" ".join(str(inst)[1:] for inst in order) for order in schedule.orders]


def parse(name, *rows):
    orders = tuple(tuple(Instruction.parse(word) for word in row.split()) for row in rows)
    num_microbatches = 1 + max(inst.microbatch for order in orders for inst in order)
    return PipelineSchedule(name, len(rows), num_microbatches, orders)


def test_1f1b_of_4_stages_and_8_microbatches():
    # the order as printed in the literature, e.g. Narayanan et al. 2021, figure 4
    assert text(one_f_one_b(4, 8)) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


@given(st.integers(1, 6), st.integers(0, 8))
def test_1f1b_is_complete_live_and_bounds_memory(num_stages, extra):
    schedule = one_f_one_b(num_stages, num_stages + extra)
    schedule.validate()
    graph = nx.DiGraph(schedule.dependencies())
    assert nx.is_directed_acyclic_graph(graph)
    assert graph.number_of_nodes() == 2 * num_stages * (num_stages + extra) or num_stages + extra == 1
    for stage, order in enumerate(schedule.orders):
        in_flight = peak = 0
        for inst in order:
            in_flight += 1 if inst.type.value == "F" else -1
            peak = max(peak, in_flight)
        assert peak == num_stages - stage


def test_dependencies_of_a_tiny_pipeline():
    edges = {f"{a} {b}" for a, b in one_f_one_b(2, 2).dependencies()}
    assert edges == {
        *("0F0 0F1", "0F1 0B0", "0B0 0B1"),  # rank 0
        *("1F0 1B0", "1B0 1F1", "1F1 1B1"),  # rank 1
        *("0F0 1F0", "0F1 1F1"),  # activations
        *("1B0 0B0", "1B1 0B1"),  # gradients
    }


def test_weight_gradients_follow_input_gradients():
    schedule = parse("zb", "0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    schedule.validate()
    edges = {f"{a} {b}" for a, b in schedule.dependencies()}
    assert {"0I0 0W0", "1I0 0I0", "1F0 1I0"} <= edges


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0B0", "1F0"), "lacks one at stage 1, microbatch 0"),
        (("0F0 0B0 0B0", "1F0 1B0"), "repeats 0B0"),
        (("0F0 0B0", "1F0 1B0 3F0"), "contains 3F0"),
        (("0F0 0B0 0W0", "1F0 1B0"), "contains 0W0"),
    ],
)
def test_incomplete_orders_are_refused(rows, message):
    with pytest.raises(ConfigurationError, match=message):
        parse("mine", *rows).validate()


def test_a_deadlock_is_refused_with_the_grid():
    with pytest.raises(ConfigurationError, match="deadlocks: each of 0B0, 1F1") as caught:
        parse("mine", "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1").validate()
    assert "rank 0  0F0 [0B0] 0F1  0B1\nrank 1  1F0 [1F1] 1B0  1B1" in str(caught.value)


def test_too_few_microbatches_are_refused_with_a_number_that_works():
    with pytest.raises(ConfigurationError, match="Use num_microbatches=4 or more"):
        make_schedule("1f1b", 4, 3)
    with pytest.raises(ConfigurationError, match="known schedules: 1f1b"):
        make_schedule("2f2b", 4, 8)
    with pytest.raises(ConfigurationError, match="at least 1; got 0 and 8"):
        make_schedule("1f1b", 0, 8)


def test_grid_marks_a_cell():
    schedule = one_f_one_b(1, 1)
    assert schedule.grid(Instruction.parse("0B0")) == "rank 0  0F0 [0B0]"
    assert schedule == replace(schedule)


def test_long_rows_are_cut_around_the_mark():
    rows = one_f_one_b(2, 40).grid(Instruction.parse("1B20")).splitlines()
    assert [row.startswith(f"rank {rank} ...") and row.endswith(" ...") for rank, row in enumerate(rows)] == [
        True,
        True,
    ]
    assert "[1B20]" in rows[1]
    assert all(len(row.split()) < 30 for row in rows)
    assert len(one_f_one_b(2, 40).grid().splitlines()[0].split()) == 2 + 80


def test_rows_by_rank_are_spans_of_all_instructions():
    schedule = PipelineSchedule("uneven", 3, 1, load_rows("0F0 0B0", "1F0 2F0 2B0 1B0"))
    assert [schedule.instructions[schedule.span(rank)] for rank in range(2)] == list(schedule.orders)
    assert schedule.places == ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3))
    assert schedule.by_rank("abcdef") == (("a", "b"), ("c", "d", "e", "f"))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_ranks": 3}, "num_ranks=3 contradicts the given schedule 'uneven', an order for 1 microbatch on 2 ranks"),
        ({"num_microbatches": 0}, "num_microbatches=0 contradicts"),
        ({"stages_per_rank": 0}, "stages_per_rank=0 contradicts .* of 1 or 2 stage.s. each. Leave it out"),
        ({"stages_per_rank": 2}, "stages_per_rank=2"),
    ],
)
def test_numbers_that_an_order_does_not_have_are_refused(numbers, message):
    schedule = PipelineSchedule("uneven", 3, 1, load_rows("0F0 0B0", "1F0 2F0 2B0 1B0"))
    schedule.check_numbers(num_ranks=2, num_microbatches=1)
    with pytest.raises(ConfigurationError, match=message):
        schedule.check_numbers(**numbers)


def load_rows(*rows):
    return tuple(tuple(map(Instruction.parse, row.split())) for row in rows)
