"""The P2P model: its simulator against a graph, its programs against what a transfer must obey."""

from collections import defaultdict
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.p2p import (
    Receive,
    Send,
    Transfer,
    find_deadlock,
    p2p_program,
    transfers,
)
from lightning_pfo.core.schedules.registry import SCHEDULES, make_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule


def text(program):
    return [" | ".join(map(str, row)) for row in program]


def test_the_program_of_a_tiny_pipeline():
    schedule = make_schedule("1f1b", 2, 2)
    assert text(p2p_program(schedule)) == [
        "0F0 | send 0F0->1F0 | 0F1 | send 0F1->1F1 | receive 1B0->0B0 | 0B0 | receive 1B1->0B1 | 0B1",
        "receive 0F0->1F0 | 1F0 | receive 0F1->1F1 | 1B0 | send 1B0->0B0 | 1F1 | 1B1 | send 1B1->0B1",
    ]


def test_stages_of_one_rank_hand_over_without_a_transfer():
    assert not transfers(make_schedule("zbv", 1, 4))
    crossing = {(t.producer.stage, t.consumer.stage) for t in transfers(make_schedule("zbv", 2, 4))}
    assert crossing == {(0, 1), (2, 3), (3, 2), (1, 0)}  # but not between 1 and 2, both on rank 1


def test_a_withheld_activation_is_found():
    # EnvPipe's hang: rank 0 waits for the first gradient before it sends the last activation, which rank 1 needs first
    def transfer(before, after, source, destination):
        return Transfer(Instruction.parse(before), Instruction.parse(after), source, destination)

    a0, a1, g0 = transfer("0F0", "1F0", 0, 1), transfer("0F1", "1F1", 0, 1), transfer("1B0", "0B0", 1, 0)
    program = (
        (a0.producer, Send(a0), a1.producer, Receive(g0), Send(a1), g0.consumer),
        (Receive(a0), a0.consumer, Receive(a1), a1.consumer, g0.producer, Send(g0)),
    )
    stuck = ((0, Receive(g0)), (1, Receive(a1)))
    assert find_deadlock(program, blocking_sends=False) == stuck
    assert find_deadlock(program, blocking_sends=True) == stuck


def test_a_computation_without_its_input_is_stuck():
    transfer = Transfer(Instruction.parse("0F0"), Instruction.parse("1F0"), 0, 1)
    program = ((transfer.producer, Send(transfer)), (transfer.consumer, Receive(transfer)))
    assert find_deadlock(program, blocking_sends=False) == ((1, transfer.consumer),)


def test_a_channel_delivers_in_the_order_of_its_sends():
    first, second = (Transfer(Instruction(0, "F", m), Instruction(1, "F", m), 0, 1) for m in range(2))
    program = ((Send(first), Send(second)), (Receive(second), Receive(first)))
    assert find_deadlock(program, blocking_sends=False) == ((1, Receive(second)),)


@given(st.data())
def test_the_simulator_agrees_with_a_graph(data):
    # random programs: transfers between 3 ranks, each rank's sends and receives in any order
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(lambda p: p[0] != p[1]), min_size=1, max_size=6)
    )
    rows = defaultdict(list)
    for number, (source, destination) in enumerate(pairs):
        transfer = Transfer(
            Instruction.parse(f"{source}F{number}"), Instruction.parse(f"{destination}F{number}"), source, destination
        )
        rows[source].append(Send(transfer))
        rows[destination].append(Receive(transfer))
    program = tuple(tuple(data.draw(st.permutations(rows[rank]))) for rank in range(3))

    rendezvous, buffered = nx.DiGraph(), nx.DiGraph()
    for row in program:
        for before, after in pairwise(row):
            rendezvous.add_edge(before.transfer, after.transfer)  # a send and its receive are one event
            buffered.add_edge(before, after)
        for step in row:
            if isinstance(step, Send):
                buffered.add_edge(step, Receive(step.transfer))
    assert bool(find_deadlock(program, blocking_sends=True)) != nx.is_directed_acyclic_graph(rendezvous)

    def channel(kind, ends):
        return [
            step.transfer
            for row in program
            for step in row
            if isinstance(step, kind) and (step.transfer.source, step.transfer.destination) == ends
        ]

    assume(all(channel(Send, ends) == channel(Receive, ends) for ends in set(pairs)))
    assert bool(find_deadlock(program, blocking_sends=False)) != nx.is_directed_acyclic_graph(buffered)


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 4),
    st.integers(2, 4),
)
def test_programs_keep_the_order_and_both_ends_agree(name, num_ranks, rounds):
    schedule = make_schedule(name, num_ranks, rounds * num_ranks)
    program = p2p_program(schedule)
    sends, receives = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(program):
        assert tuple(step for step in row if isinstance(step, Instruction)) == schedule.orders[rank]
        for position, step in enumerate(row):
            if isinstance(step, Send):
                assert step.transfer.producer in row[:position]
                sends[step.transfer.source, step.transfer.destination].append(step.transfer)
            elif isinstance(step, Receive):
                assert step.transfer.consumer not in row[:position]
                receives[step.transfer.source, step.transfer.destination].append(step.transfer)
    assert sends == receives
    assert sum(map(len, sends.values())) == len(transfers(schedule))
    for a in range(num_ranks):  # both directions of a pair of ranks may share one queue
        for b in range(a):
            seen = [
                [s.transfer for s in program[me] if not isinstance(s, Instruction) and ends(s) == {a, b}]
                for me in (a, b)
            ]
            assert seen[0] == seen[1]


def ends(step):
    return {step.transfer.source, step.transfer.destination}


@st.composite
def any_order(draw):
    """A complete order of 2 ranks, often impossible."""
    rows = [[f"{stage}{kind}{m}" for kind in "FB" for m in range(2)] for stage in range(2)]
    orders = tuple(tuple(map(Instruction.parse, draw(st.permutations(row)))) for row in rows)
    return PipelineSchedule("any", 2, 2, orders)


@given(any_order())
def test_an_order_is_refused_exactly_when_its_dependencies_form_a_circle(schedule):
    if nx.is_directed_acyclic_graph(nx.DiGraph(schedule.dependencies())):
        schedule.validate()
        assert not find_deadlock(p2p_program(schedule), blocking_sends=True)
    else:
        with pytest.raises(ValueError, match="deadlocks"):
            schedule.validate()
