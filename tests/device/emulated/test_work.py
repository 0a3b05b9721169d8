from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.events import InstructionWork
from lightning_pfo.device import GpuConfig, fit_work_scale


def test_longest_forward_takes_forward_s_with_its_memory_share() -> None:
    forwards = [InstructionWork(100, 10), InstructionWork(400, 40), InstructionWork(200, 20)]
    scale = fit_work_scale(forwards, GpuConfig(forward_s=0.03, memory_share=0.2))
    assert scale.seconds(forwards[1]) == pytest.approx((0.024, 0.006))
    assert scale.seconds(forwards[0]) == pytest.approx((0.006, 0.0015))


works = st.builds(InstructionWork, st.integers(1, 10**15), st.integers(0, 10**12))


@given(st.lists(works, min_size=1, max_size=6), st.floats(0, 0.9), st.floats(0.001, 1))
def test_no_forward_takes_longer(forwards: list[InstructionWork], share: float, forward_s: float) -> None:
    scale = fit_work_scale(forwards, GpuConfig(forward_s=forward_s, memory_share=share))
    times_s = [sum(scale.seconds(work)) for work in forwards]
    assert max(times_s) == pytest.approx(forward_s)
    most_flops = max(forwards, key=lambda work: work.flops)
    compute_s, memory_s = scale.seconds(most_flops)
    expected_s = share * (compute_s + memory_s) if most_flops.bytes else 0
    assert memory_s == pytest.approx(max(expected_s, 1e-6 - compute_s))


def test_what_has_nothing_to_compute_takes_a_microsecond() -> None:
    scale = fit_work_scale([InstructionWork(1e6, 10)], GpuConfig(work_scale=1e-8, memory_share=0.25))
    assert scale.seconds(InstructionWork(0, 0)) == pytest.approx((0.0, 1e-6))
    assert scale.seconds(InstructionWork(40, 0)) == pytest.approx((0.3e-6, 0.7e-6))
    assert scale.seconds(InstructionWork(400, 0)) == pytest.approx((3e-6, 0.0))


def test_explicit_scale() -> None:
    scale = fit_work_scale([InstructionWork(1e6, 10)], GpuConfig(work_scale=1e-8, memory_share=0.25))
    assert scale.seconds(InstructionWork(2e6, 20)) == pytest.approx((0.015, 0.005))


@pytest.mark.parametrize("forwards", [[], [InstructionWork(0, 100)]])
def test_work_without_operations_is_refused(forwards: list[InstructionWork]) -> None:
    with pytest.raises(ConfigurationError, match="at least one stage's forward must have floating-point operations"):
        fit_work_scale(forwards, GpuConfig())
