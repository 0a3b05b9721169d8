from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.paths import conf_dir
from lightning_pfo.device import GpuConfig, gpu_config_from, known_gpu_configs, load_gpu_config
from lightning_pfo.device.emulated.physics import GpuPhysics

MODELS = ["a100", "a40", "a6000", "h100", "h200", "rtx3090", "v100"]


def test_the_promised_models_are_there() -> None:
    assert known_gpu_configs() == sorted(["auto", "nvml", "zeus", *(f"emulated_{model}" for model in MODELS)])


@pytest.mark.parametrize("name", known_gpu_configs())
def test_files_load_and_hydra_composes_the_same(name: str) -> None:
    config = load_gpu_config(name)
    assert config.kind == name.split("_")[0]
    with initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        composed = compose(overrides=[f"+gpu={name}"])
    assert gpu_config_from(composed.gpu) == config


def test_auto_falls_back_to_the_a100() -> None:
    expected = load_gpu_config("emulated_a100")
    expected.kind = "auto"
    assert load_gpu_config("auto") == expected


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"emulated_a40.*got 'emulated_a400'\. Did you mean emulated_a40\?"):
        load_gpu_config("emulated_a400")
    with pytest.raises(ConfigurationError, match=r"one of auto, emulated_a100, .*nvml"):
        load_gpu_config("../secrets")


def test_misspelt_key_names_the_right_one() -> None:
    with pytest.raises(ConfigurationError, match=r"'top_clock'.*Did you mean top_clock_mhz\?"):
        gpu_config_from({"top_clock": 1410})
    with pytest.raises(ConfigurationError, match=r"'zzz'\. Known settings: kind, model"):
        gpu_config_from({"zzz": 1})


def test_wrong_type() -> None:
    with pytest.raises(ConfigurationError, match=r"gpu.top_clock_mhz: .*'fast'"):
        gpu_config_from({"top_clock_mhz": "fast"})


def test_accepts_omegaconf_and_null() -> None:
    config = gpu_config_from(OmegaConf.create({"kind": "emulated", "work_scale": None, "noise": 0.01}))
    assert config == GpuConfig(kind="emulated", noise=0.01)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "amd"),
        ("time", "warped"),
        ("top_clock_mhz", 0),
        ("min_clock_mhz", 5000),
        ("clock_step_mhz", 0),
        ("power_limit_w", 10),
        ("static_power_w", -1),
        ("dynamic_power_w", 0),
        ("voltage_knee_mhz", 2000),
        ("voltage_rise", -0.1),
        ("idle_power_w", -1),
        ("blocked_activity", 1.1),
        ("memory_share", 1),
        ("forward_s", 0),
        ("work_scale", 0),
        ("time_scale", 0),
        ("clock_latency_s", -1),
        ("counter_tick_s", -1),
        ("counter_lag_s", -1),
        ("noise", 0.5),
        ("throttle_clock_mhz", -1),
        ("straggler_index", -2),
        ("straggler_factor", 0.5),
        ("forward_s", float("nan")),
        ("forward_s", float("inf")),
    ],
)
def test_values_out_of_range_name_the_field_and_the_value(field: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"gpu\.{field} .*got '?{value}'?"):
        GpuConfig(**{field: value})  # type: ignore[arg-type]


def test_every_field_is_documented() -> None:
    import lightning_pfo.device.config as module

    lines = Path(module.__file__).read_text().splitlines()
    fields = [
        i for i, line in enumerate(lines) if line.startswith("    ") and line[4:].split(":")[0] in vars(GpuConfig())
    ]
    assert len(fields) == len(vars(GpuConfig()))
    assert all(lines[i + 1].startswith('    """') for i in fields)


@pytest.mark.parametrize("model", MODELS)
def test_supported_clocks_cover_the_range(model: str) -> None:
    config = load_gpu_config(f"emulated_{model}")
    clocks = GpuPhysics(config).supported_clocks_mhz
    assert clocks[0] == config.top_clock_mhz
    assert clocks[-1] == config.min_clock_mhz
    assert list(clocks) == sorted(set(clocks), reverse=True)


def test_v100_clocks_are_rounded_as_the_driver_lists_them() -> None:
    clocks = GpuPhysics(load_gpu_config("emulated_v100")).supported_clocks_mhz
    assert clocks[:6] == (1530, 1522, 1515, 1507, 1500, 1492)
    assert len(clocks) == 187


@pytest.mark.parametrize("model", MODELS)
def test_energy_has_a_valley_between_the_lowest_and_the_top_clock(model: str) -> None:
    config = load_gpu_config(f"emulated_{model}")
    physics = GpuPhysics(config)
    clocks = physics.supported_clocks_mhz
    times_s = [physics.time_s(mhz, 1 - config.memory_share, config.memory_share) for mhz in clocks]
    energies = [time_s * physics.computing_power_w(mhz) for time_s, mhz in zip(times_s, clocks, strict=True)]
    lowest = energies.index(min(energies))
    assert 0 < lowest < len(clocks) - 1
    assert all(above >= below - 1e-9 for above, below in pairwise(energies[: lowest + 1]))
    assert all(above < below for above, below in pairwise(energies[lowest:]))
    assert 0.6 < min(energies) / energies[0] < 0.95


def test_power_by_hand() -> None:
    """P = static + dynamic * f / f_top * (V / V_top)^2, V rising by half from 1000 to 2000 MHz."""
    physics = GpuPhysics(
        GpuConfig(
            top_clock_mhz=2000,
            voltage_knee_mhz=1000,
            voltage_rise=0.5,
            static_power_w=90,
            dynamic_power_w=450,
            power_limit_w=1000,
            idle_power_w=40,
            blocked_activity=0.1,
        )
    )
    by_hand = {500: 90 + 450 / 4 / 2.25, 1000: 90 + 450 / 2 / 2.25, 1600: 90 + 450 * 0.8 * (1.3 / 1.5) ** 2, 2000: 540}
    for clock_mhz, power_w in by_hand.items():
        assert physics.computing_power_w(clock_mhz) == pytest.approx(power_w)
        assert physics.blocked_power_w(clock_mhz) == pytest.approx(40 + 0.1 * (power_w - 90))
        assert physics.time_s(clock_mhz, 0.2, 0.1) == pytest.approx(0.2 * 2000 / clock_mhz + 0.1)


@given(
    limit_w=st.floats(110, 600),
    knee_mhz=st.floats(0, 1400),
    rise=st.floats(0, 1),
    clock_mhz=st.integers(210, 1410),
)
def test_power_never_exceeds_the_cap_and_rises_with_the_clock(
    limit_w: float, knee_mhz: float, rise: float, clock_mhz: int
) -> None:
    physics = GpuPhysics(
        GpuConfig(static_power_w=100, power_limit_w=limit_w, voltage_knee_mhz=knee_mhz, voltage_rise=rise)
    )
    power_w = physics.computing_power_w(clock_mhz)
    assert power_w <= limit_w + 1e-6
    assert power_w <= physics.computing_power_w(clock_mhz + 1) + 1e-9
    assert physics.time_s(clock_mhz, 1, 0.5) >= 1.5 - 1e-9
    assert physics.time_s(clock_mhz, 1, 0.5) >= physics.time_s(clock_mhz + 1, 1, 0.5) - 1e-12
    if physics.capped_clock_mhz < 1410:  # the cap is used, not merely kept
        assert physics.computing_power_w(1410) == pytest.approx(limit_w)
