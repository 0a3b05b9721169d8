import pytest

from lightning_pfo.device import EmulatedGpu, GpuConfig
from lightning_pfo.listeners.device_follower import DeviceFollower, no_mark
from lightning_pfo.listeners.meters.iterations import IterationMeter
from tests.listeners.fakes import FakeSource


def test_iterations_are_measured_once_ready(world):
    ready = iter([False, True])
    meter = IterationMeter(world.gpu, world.source, DeviceFollower(no_mark), is_ready=lambda: next(ready))
    world.source.add_listener(meter)
    world.source.run_iteration(lambda inst: world.spend(1, 100))
    assert meter.take() is None
    world.source.run_iteration(lambda inst: world.spend(1, 100))
    measured = meter.take()
    assert (measured.iteration, measured.time_s, measured.energy_j) == (1, 4.0, 400.0)
    assert meter.take() is None


def meter_of_60_w(tick_s):
    gpu = EmulatedGpu(GpuConfig(kind="emulated", idle_power_w=60, counter_tick_s=tick_s))
    source = FakeSource()
    meter = IterationMeter(gpu, source, DeviceFollower(no_mark), is_ready=lambda: True)
    source.add_listener(meter)
    return meter, source, gpu.time_source.sleep


def test_the_mean_energy_of_iterations_is_known_where_a_counter_ticks_within_them():
    meter, source, sleep = meter_of_60_w(tick_s=0.05)
    assert meter.tick_s == 0.1  # is not known yet
    for _ in range(14):
        source.run_iteration(lambda instruction: sleep(0.02))
        sleep(0.01)
    meter.close()
    assert [end_s - begin_s for _, begin_s, end_s in meter._intervals_s] == pytest.approx([0.08] * 14)
    assert meter.tick_s == pytest.approx(0.05, rel=0.05)
    means = meter.mean_energies(lambda iteration: iteration >= 7 if iteration else None)
    assert {group: mean.energy_j for group, mean in means.items()} == pytest.approx(dict.fromkeys((False, True), 4.8))


def test_single_iterations_are_exact_where_the_counter_does_not_tick():
    meter, source, sleep = meter_of_60_w(tick_s=0)
    source.run_iteration(lambda instruction: sleep(0.002))
    meter.close()
    assert (meter.mean_energies(bool), meter.tick_s) == ({}, 0.0)
    assert meter.take().energy_j == pytest.approx(60 * 0.008)


def test_the_hottest_gpu_counts_where_all_tell_their_temperature(monkeypatch):
    monkeypatch.setattr(EmulatedGpu, "temperature_c", lambda gpu: 51.0, raising=False)
    meter, source, sleep = meter_of_60_w(tick_s=0)
    source.run_iteration(lambda instruction: sleep(0.002))
    gather = source.all_gather
    for others, hottest in (([60.0, 40.0], 60.0), ([60.0, None], None)):
        source.all_gather = lambda own, others=others, **_: [
            *gather(own, everywhere=True),
            *((1, (0, 1.0, 1.0, temperature), "") for temperature in others),
        ]
        assert meter.take().temperature_c == hottest
        source.run_iteration(lambda instruction: sleep(0.002))
    meter.close()
