import random
import re
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.planner import InstructionProfile, Profile, check_selection, plan_frontier, select_plan


def test_words_and_numbers(frontier):
    assert select_plan(frontier, "fastest") is frontier.plans[0]
    assert select_plan(frontier, "least_energy") is frontier.plans[-1]
    assert select_plan(frontier, "0") is frontier.plans[-1]
    assert select_plan(frontier, 1) is frontier.plans[-2]
    assert all(select_plan(frontier, frontier.number_of(plan)) is plan for plan in frontier.plans)


def test_no_slowdown_is_the_cheapest_plan_as_fast_as_the_top_clocks(frontier):
    chosen = select_plan(frontier, "no_slowdown")
    assert chosen is select_plan(frontier, "1.0x")
    assert chosen.iteration_time_s <= frontier.baseline.iteration_time_s * (1 + 1e-9)
    slower = [plan for plan in frontier.plans if plan.iteration_energy_j < chosen.iteration_energy_j]
    assert all(plan.iteration_time_s > frontier.baseline.iteration_time_s for plan in slower)


def test_a_slowdown_and_a_time_choose_the_cheapest_plan_within(frontier):
    for plan in frontier.plans:
        assert select_plan(frontier, f"{plan.iteration_time_s!r}s") is plan
        assert select_plan(frontier, f"{plan.iteration_time_s / frontier.baseline.iteration_time_s + 1e-9}x") is plan
    assert select_plan(frontier, "1000 s") is frontier.least_energy
    assert select_plan(frontier, "2e3x") is frontier.least_energy


def test_least_energy_delay_product(frontier):
    chosen = select_plan(frontier, "least_edp")
    products = [plan.iteration_energy_j * plan.iteration_time_s for plan in frontier.plans]
    assert chosen.iteration_energy_j * chosen.iteration_time_s == min(products)


def test_a_power_cap_chooses_the_fastest_plan_below_it(frontier):
    for plan in frontier.plans:
        power = plan.iteration_energy_j / plan.iteration_time_s / 4
        assert select_plan(frontier, f"{power:.9f}W") is plan
    assert select_plan(frontier, "1e6 W") is frontier.fastest
    with pytest.raises(PlanError, match="average powers range from"):
        select_plan(frontier, "1W")


def test_beside_a_straggler_the_slowest_plan_that_is_not_slower_needs_least_energy(frontier):
    powers_w = sum(frontier.p2p_blocking_powers_w)
    for plan in frontier.plans:
        straggler_s = plan.iteration_time_s + 1e-4
        chosen = select_plan(frontier, f"T'={straggler_s!r}s")
        assert chosen is plan

        def with_waiting(other, until_s=straggler_s):
            return other.iteration_energy_j + powers_w * (until_s - other.iteration_time_s)

        in_time = [other for other in frontier.plans if other.iteration_time_s <= straggler_s]
        assert with_waiting(chosen) == min(map(with_waiting, in_time))
    for same in ("T'=1.1x", "T' = 1.1 x", "T\u2019=1.1x", "T\u2032=1.1x", "straggler=1.1x"):
        assert select_plan(frontier, same) is select_plan(frontier, "1.1x")
    with pytest.raises(PlanError, match=r"No plan meets 0\.5x: iteration times range from"):
        select_plan(frontier, "T'=0.5x")


def test_impossible_wishes_name_the_range(frontier):
    with pytest.raises(PlanError, match=rf"0 \(slowest\) to {len(frontier.plans) - 1}"):
        select_plan(frontier, "99")
    slowest = frontier.least_energy.iteration_time_s
    for wish in ("0.5x", "0.001s"):
        with pytest.raises(PlanError, match=rf"range from .* to {slowest:.6f} s"):
            select_plan(frontier, wish)


@pytest.mark.parametrize("stretch", [1.0, 1.0000004, 1.0000041])
def test_the_ends_of_the_range_in_a_message_can_be_had(frontier, stretch):
    plans = tuple(
        replace(
            plan, iteration_time_s=plan.iteration_time_s * stretch, iteration_energy_j=plan.iteration_energy_j * 1.1
        )
        for plan in frontier.plans
    )
    stretched = replace(frontier, plans=plans)
    with pytest.raises(PlanError) as error:
        select_plan(stretched, "0.001s")
    time, slowdown = re.search(r"from ([0-9.]+ s) \(([0-9.]+x)\) to", str(error.value)).groups()
    assert select_plan(stretched, time) is select_plan(stretched, slowdown) is plans[0]
    with pytest.raises(PlanError) as error:
        select_plan(stretched, "1W")
    assert select_plan(stretched, re.search(r"Ask for ([0-9.]+ W)", str(error.value))[1]) is plans[-1]


@pytest.mark.parametrize(
    "wish", ["", "cheap", "-1", "1.02", "x", "1.0y", "nanx", "1.0.0x", "٣", "T'=350W", "T'=3", "T'=fastest", "T'"]
)
def test_what_is_not_understood_lists_the_forms(frontier, wish):
    with pytest.raises(PlanError, match="Cannot select"):
        select_plan(frontier, wish)


LONG = 100_000


@pytest.mark.parametrize(
    "wish",
    ["9" * LONG, "9" * LONG + "x", "1." + "9" * LONG + "z", "T'" + " " * LONG, "T'=" * LONG, "T'=" + " " * LONG + "1s",
     None, True, 1.5, -1, 10**5000, b"3", [3], float("nan")],
    ids=lambda wish: f"{type(wish).__name__}",
)  # fmt: skip
def test_what_is_long_or_no_text_is_refused_at_once(frontier, wish):
    for choose in (check_selection, lambda wish: select_plan(frontier, wish)):
        with pytest.raises(PlanError, match="Cannot select") as error:
            choose(wish)
        assert len(str(error.value)) < 1000


@pytest.mark.parametrize("seed", range(12))
def test_there_is_no_slowdown_where_times_are_a_billionth_apart(seed):
    draw = random.Random(seed)
    clocks, instructions = (1400, 1300, 1200, 1100), {}
    for stage in range(draw.randint(2, 4)):
        for kind in (InstructionType.FORWARD, InstructionType.BACKWARD):
            first_s = draw.uniform(0.001, 0.01)
            times = sorted(first_s * (1 + draw.uniform(0, 3e-9)) for _ in clocks)
            energies = sorted((draw.uniform(1, 3) for _ in clocks), reverse=True)
            instructions[stage, kind] = InstructionProfile(clocks, times, energies)
    near = plan_frontier(
        Profile(instructions), num_microbatches=draw.randint(4, 8), p2p_blocking_power_w=50, num_plans=10
    )
    assert select_plan(near, "no_slowdown").iteration_time_s <= near.baseline.iteration_time_s * (1 + 1e-8)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 0.99, 1, 7e3])
def test_what_a_message_prints_can_be_had_at_any_scale(frontier, scale):
    scaled = replace(
        frontier,
        baseline=replace(frontier.baseline, iteration_time_s=frontier.baseline.iteration_time_s * scale),
        plans=tuple(replace(plan, iteration_time_s=plan.iteration_time_s * scale) for plan in frontier.plans),
    )
    for plans in (scaled.plans, scaled.plans[:1]):
        with pytest.raises(PlanError) as error:
            select_plan(replace(scaled, plans=plans), "0.1x")
        first, last = re.search(r"from ([0-9.]+) s .* to ([0-9.]+) s", str(error.value)).groups()
        assert float(first) <= float(last)
        assert select_plan(scaled, f"{first}s") is scaled.plans[0]


def test_of_equal_energy_delay_products_the_fastest_is_taken(frontier):
    plans = tuple(
        replace(frontier.fastest, iteration_time_s=time_s, iteration_energy_j=8 / time_s) for time_s in (0.5, 1.0, 2.0)
    )
    assert select_plan(replace(frontier, plans=plans), "least_edp") is plans[0]


@given(st.text(alphabet="0123456789.exsWT'= -+fastel_nory", max_size=12))
def test_any_text_selects_a_plan_or_is_refused(frontier, wish):
    with suppress(PlanError):
        assert select_plan(frontier, wish) in frontier.plans
