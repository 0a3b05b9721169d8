from dataclasses import replace

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.pipeline.problem import schedule_network
from lightning_pfo.planner.search import solver
from lightning_pfo.planner.search.effort import EFFORTS, find_effort
from lightning_pfo.planner.search.solver import trace_tradeoff


def uneven_pipeline(num_microbatches):
    """Stages whose times hardly ever agree, so that gaps stay open and every round is gone through."""
    schedule = make_schedule("1f1b", 4, num_microbatches)
    kinds = {
        (stage, kind): make_option_set(
            [work * (1 + 0.17 * k) for k in range(4)], [20 * work / (1 + 0.5 * k) for k in range(4)], range(4, 0, -1)
        )
        for stage, speed in enumerate((1.0, 1.13, 0.91, 1.07))
        for kind, work in (("F", speed), ("B", 2.1 * speed))
    }
    return schedule_network(schedule), [kinds[inst.stage, inst.type.value] for inst in schedule.instructions]


def test_an_unknown_effort_is_an_error_that_names_those_there_are():
    assert find_effort("best") is EFFORTS["best"]
    assert find_effort(EFFORTS["fast"]) is EFFORTS["fast"]
    with pytest.raises(ConfigurationError, match=r"one of fast, default, best; got 'fats'\. Did you mean fast\?"):
        find_effort("fats")
    dag, options = uneven_pipeline(8)
    with pytest.raises(ConfigurationError, match="effort is one of"):
        trace_tradeoff(dag, options, effort="much")


@pytest.mark.parametrize("num_microbatches", [8, 16])
def test_work_at_a_node_does_not_grow_with_the_network_and_is_bounded(monkeypatch, num_microbatches):
    rows = []
    search_beam = solver.search_beam

    def counting(table, solutions, guides, order, width, options_per_node):
        rows.append(len(guides) * width)
        return search_beam(table, solutions, guides, order, width, options_per_node)

    monkeypatch.setattr(solver, "search_beam", counting)
    dag, options = uneven_pipeline(num_microbatches)
    for name, effort in EFFORTS.items():
        rows.clear()
        num_points = 20
        trace_tradeoff(dag, options, rate=1.0, num_points=num_points, effort=name)
        beyond = 8 * effort.rounds[0].width
        most = sum((work.guides_per_target * num_points + 1) * work.width for work in effort.rounds) + beyond
        assert rows
        assert sum(rows) <= most


def test_more_effort_finds_no_less():
    dag, options = uneven_pipeline(8)
    costs = {}
    for name in EFFORTS:
        deadline = 1.05 * dag.longest_path([opts.times[0] for opts in options])
        points = trace_tradeoff(dag, options, rate=1.0, num_points=20, deadlines=[deadline], effort=name)
        costs[name] = min(point.cost for point in points if point.time <= deadline * (1 + 1e-9))
        assert all(point.bound <= point.cost for point in points)
    assert costs["best"] <= costs["default"] * (1 + 1e-12)
    assert costs["default"] <= costs["fast"] * (1 + 1e-12)


def test_the_same_problem_gets_the_same_assignments():
    dag, options = uneven_pipeline(8)
    first, second = (trace_tradeoff(dag, options, rate=1.0, num_points=20) for _ in range(2))
    assert first == second


def test_a_short_network_gets_the_short_variant_and_fewer_rounds_where_its_relaxations_are_dear(monkeypatch):
    effort = EFFORTS["default"]
    assert find_effort("default", 320) is find_effort(effort, 320) is effort.short
    assert find_effort("default", 321) is effort
    assert find_effort("best", 320) is EFFORTS["best"]
    widths = []
    search_beam = solver.search_beam

    def noting(table, solutions, guides, order, width, options_per_node):
        widths.append(width)
        return search_beam(table, solutions, guides, order, width, options_per_node)

    monkeypatch.setattr(solver, "search_beam", noting)
    dag, options = uneven_pipeline(16)
    for limit, is_wide in ((0.0, False), (1e9, True)):
        widths.clear()
        trace_tradeoff(
            dag,
            options,
            rate=1.0,
            num_points=20,
            effort=replace(effort.short, iterations_per_node=limit, largest_gap=0.0),
        )
        assert (effort.short.rounds[-1].width in widths) is is_wide
