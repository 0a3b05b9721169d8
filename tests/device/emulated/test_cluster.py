"""How long transfers and the adding up of gradients take, by hand."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.device import ClusterConfig, known_cluster_configs, load_cluster_config

LINKS = ClusterConfig(
    gpus_per_node=4,
    node_latency_s=0.001,
    node_bandwidth_gb_s=100,
    network_latency_s=0.01,
    network_bandwidth_gb_s=10,
    gradient_mb=400,
)


def test_the_promised_clusters_are_there() -> None:
    assert known_cluster_configs() == ["ideal", "nvlink", "pcie"]
    assert load_cluster_config("nvlink") == ClusterConfig()
    assert load_cluster_config("pcie").gpus_per_node == 4


def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(
        ConfigurationError, match=r"cluster is one of ideal, nvlink, pcie .*got 'nvlnk'\. Did you mean nvlink\?"
    ):
        load_cluster_config("nvlnk")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpus_per_node", 0),
        ("node_latency_s", -1),
        ("node_bandwidth_gb_s", 0),
        ("network_latency_s", -0.1),
        ("network_bandwidth_gb_s", -5),
        ("activation_mb", -1),
        ("gradient_mb", -1),
        ("optimizer_s", -1),
        ("data_s", -1),
        ("node_bandwidth_gb_s", math.nan),
        ("network_latency_s", math.inf),
    ],
)
def test_values_out_of_range_name_the_field_and_the_value(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=rf"cluster\.{field} .*got {value}"):
        replace(LINKS, **{field: value})  # type: ignore[arg-type]


def test_every_field_is_documented() -> None:
    import lightning_pfo.device.emulated.cluster as module

    lines = Path(module.__file__).read_text().splitlines()
    for field in fields(ClusterConfig):
        (number,) = [i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: ")]
        assert lines[number + 1].startswith('    """')


@pytest.mark.parametrize("source", [0, 3])
def test_a_transfer_inside_a_node_and_between_nodes(source: int) -> None:
    assert LINKS.transfer_s(5e9, source, 1) == pytest.approx(0.001 + 0.05)
    assert LINKS.transfer_s(5e9, source, 4) == pytest.approx(0.01 + 0.5)
    assert LINKS.transfer_s(5e9, 4, source) == pytest.approx(0.01 + 0.5)
    assert LINKS.transfer_s(0, source, 2) == 0.001


def test_in_an_ideal_cluster_nothing_takes_time() -> None:
    ideal = load_cluster_config("ideal")
    assert math.isinf(ideal.node_bandwidth_gb_s)
    assert ideal.transfer_s(1e12, 0, 1) == 0
    assert ideal.transfer_s(1e12, 0, 8) == 0
    assert ideal.all_reduce_s([0, 4, 8, 12]) == 0
    assert ideal.optimizer_s + ideal.data_s == 0


def ring_all_reduce_s(processes: list[int]) -> float:
    """Oracle: the ring step by step; each process passes on one part per step, and the slowest link ends the step."""
    size = len(processes)
    part_bytes = 400e6 / size
    has = [[{own} for _ in range(size)] for own in range(size)]  # by process and part: whose gradients are in it
    now_s = 0.0
    for step in range(2 * (size - 1)):
        took_s, passed = [], []
        for own in range(size):
            to, part = (own + 1) % size, (own - step) % size
            is_inside = processes[own] // 4 == processes[to] // 4
            took_s.append(0.001 + part_bytes / 100e9 if is_inside else 0.01 + part_bytes / 10e9)
            passed.append((to, part, set(has[own][part])))
        for to, part, whose in passed:
            has[to][part] |= whose
        now_s += max(took_s)
    assert all(part == set(range(size)) for parts in has for part in parts)  # everybody has all
    return now_s


@given(st.lists(st.integers(0, 15), min_size=2, max_size=6, unique=True))
def test_gradients_are_added_up_around_a_ring(replicas: list[int]) -> None:
    assert LINKS.all_reduce_s(replicas) == pytest.approx(ring_all_reduce_s(replicas))


def test_two_replicas_by_hand_and_one_alone() -> None:
    assert LINKS.all_reduce_s([0, 1]) == pytest.approx(2 * (0.001 + 0.2 / 100))
    assert LINKS.all_reduce_s([0, 4]) == pytest.approx(2 * (0.01 + 0.2 / 10))
    assert LINKS.all_reduce_s([3]) == 0


def test_the_last_link_of_the_ring_counts_too() -> None:
    for ring in ([0, 1, 2, 3, 4], [4, 0, 1, 2, 3]):
        assert sum(one // 4 != other // 4 for one, other in pairwise(ring)) == 1
        assert LINKS.all_reduce_s(ring) == pytest.approx(8 * (0.01 + 0.08 / 10))
