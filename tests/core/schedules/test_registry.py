"""What holds for every generated schedule, and the peaks and lengths known from the papers."""

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.in_flight import check_in_flight, peak_in_flight
from lightning_pfo.core.schedules.p2p import find_deadlock, p2p_program
from lightning_pfo.core.schedules.registry import SCHEDULES, check_schedule_name, make_schedule, num_ranks_for

V_SHAPED = ("zbv", "dualpipev")


@st.composite
def generated(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    num_ranks = draw(st.integers(1, 5))
    stages_per_rank = SCHEDULES[name].stages_per_rank if SCHEDULES[name].fixed else draw(st.integers(1, 3))
    least = {"1f1b": num_ranks, "dualpipev": 2 * num_ranks}.get(name, 1)
    num_microbatches = draw(st.integers(least, least + 12))
    if name.startswith("interleaved") and num_microbatches > num_ranks:
        num_microbatches -= num_microbatches % num_ranks
    if name == "envpipe":
        name = draw(st.sampled_from(["envpipe", "envpipe:ratio=0.7", "envpipe:ratio=3,max_in_flight=6"]))
    return make_schedule(name, num_ranks, num_microbatches, stages_per_rank)


@given(generated())
def test_every_schedule_is_complete_acyclic_and_live(schedule):
    computed = {(inst.stage, inst.type.value, inst.microbatch) for inst in schedule.instructions}
    assert len(computed) == len(schedule.instructions)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = {kind for kind in "FBIW" if (stage, kind, microbatch) in computed}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
            computed -= {(stage, kind, microbatch) for kind in kinds}
    assert not computed

    graph = nx.DiGraph(schedule.dependencies())
    assert nx.is_directed_acyclic_graph(graph)
    longest = nx.dag_longest_path_length(graph) + 1
    assert longest == len(list(schedule.rounds()))  # lock-step at unit times is as fast as the dependencies allow

    assert not find_deadlock(p2p_program(schedule), blocking_sends=True)
    assert not find_deadlock(p2p_program(schedule), blocking_sends=False)


@given(generated())
def test_placement(schedule):
    ranks = schedule.num_ranks
    for stage in range(schedule.num_stages):
        loop, hop = divmod(stage, ranks)
        v_shaped = schedule.name in V_SHAPED and loop == 1
        assert schedule.rank_of(stage) == (ranks - 1 - hop if v_shaped else hop)
        assert stage in schedule.stages_of(schedule.rank_of(stage))
    assert sum(len(schedule.stages_of(rank)) for rank in range(ranks)) == schedule.num_stages
    base = schedule.name.partition(":")[0]
    assert num_ranks_for(base, schedule.num_stages, schedule.num_stages // ranks) == ranks


@given(ranks=st.integers(1, 6), rounds=st.integers(2, 4), per_rank=st.integers(1, 3))
def test_peaks_of_microbatches_in_flight(ranks, rounds, per_rank):
    microbatches = rounds * ranks
    by_rank = range(ranks)

    def peaks(name, stages_per_rank=None):
        return list(peak_in_flight(make_schedule(name, ranks, microbatches, stages_per_rank)))

    assert peaks("1f1b") == [ranks - rank for rank in by_rank]  # Narayanan et al. 2019
    assert peaks("gpipe") == [microbatches] * ranks
    assert peaks("looped_bfs", per_rank) == [microbatches * per_rank] * ranks
    # warm-up of Narayanan et al. 2021, section 2.2, and the forward of the first pair
    warm_up = [(per_rank - 1) * ranks + 2 * (ranks - 1 - rank) for rank in by_rank]
    assert peaks("interleaved_1f1b", per_rank) == [min(n + 1, microbatches * per_rank) for n in warm_up]
    # ZB-H1 and ZB-V have the memory of 1F1B's first stage: `ranks` microbatches of a whole rank (Qi et al. 2024)
    assert peaks("interleaved_zero_bubble", per_rank) == [ranks * per_rank] * ranks
    assert peaks("zbv") == [2 * ranks] * ranks
    # DualPipe: one more chunk than `2 x ranks` (DeepSeek-V3, table 2)
    assert peaks("dualpipev") == [2 * ranks + 1] * ranks
    clamped = [min(2 * (ranks - 1 - rank), microbatches - (ranks - rank)) for rank in by_rank]
    extra = [min(clamped[: rank + 1]) for rank in by_rank]
    assert peaks("envpipe") == [ranks - rank + extra[rank] for rank in by_rank]


@given(ranks=st.integers(1, 6), rounds=st.integers(2, 4))
def test_lengths_at_unit_times(ranks, rounds):
    microbatches = rounds * ranks

    def length(name):
        return len(list(make_schedule(name, ranks, microbatches).rounds()))

    assert length("1f1b") == length("gpipe") == length("envpipe") == 2 * (microbatches + ranks - 1)
    assert length("interleaved_1f1b") == 2 * (2 * microbatches + ranks - 1)  # bubble of the same few, shorter, slots
    assert length("zbv") == 6 * microbatches + ranks - 1  # F, I, W of two chunks, and the way to the last rank: no more


def test_a_memory_limit_is_checked_and_the_cell_is_marked():
    schedule = make_schedule("envpipe", 4, 8)
    check_in_flight(schedule, 8)
    with pytest.raises(ConfigurationError, match=r"At most 6 .* 0F6 is number 7 on rank 0 .* needs 8") as caught:
        check_in_flight(schedule, 6)
    assert "[0F6]" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 4, 8, 2), "1 stage.* got stages_per_rank=2"),
        (("zbv", 4, 8, 3), "2 stage.* got stages_per_rank=3. Leave it out, or use interleaved_1f1b, "),
        (("looped_bfs", 4, 8, 0), "got stages_per_rank=0"),
        (("interleaved_1f1b", 4, 9), "does not divide by 2. Use num_microbatches=8"),
        (("interleaved_zero_bubble", 4, 9), "does not divide by 2. Use num_microbatches=8"),
        (("dualpipev", 4, 7), "Use num_microbatches=8 or more"),
        (("gpipe", 0, 8), "at least 1; got 0 and 8"),
        (("1f1b:3", 4, 8), "Unknown schedule '1f1b:3'"),
    ],
)
def test_numbers_that_do_not_suit_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        make_schedule(*arguments)


def test_names_can_be_checked_before_numbers_are_known():
    for name in (*SCHEDULES, "envpipe:1,0", "file:mine.txt", "orders/mine"):
        check_schedule_name(name)
    with pytest.raises(ConfigurationError, match="file:PATH"):
        check_schedule_name("zvb")
    assert num_ranks_for("zbv", 8) == 4
    with pytest.raises(ConfigurationError, match=r"7 stages do not divide by 2\. Use 6"):
        num_ranks_for("zbv", 7)
