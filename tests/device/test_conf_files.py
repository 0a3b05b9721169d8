"""Files of a group read as Hydra would, on a group of the test's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.device.conf_files import checked, known_options, load_option


@dataclass
class Kettle:
    litres: float = 1.0
    colour: str = "white"

    def __post_init__(self) -> None:
        if self.litres <= 0:
            raise ConfigurationError(f"kettle.litres is above 0; got {self.litres}.")


@pytest.fixture(autouse=True)
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (group := tmp_path / "kettle").mkdir()
    (group / "small.yaml").write_text("litres: 0.5\ncolour: blue\n")
    (group / "camping.yaml").write_text("defaults: [small, _self_]\ncolour: red\n")
    (group / "plain.yaml").write_text("{}\n")
    (group / "notes.txt").write_text("not an option")
    monkeypatch.setattr("lightning_pfo.device.conf_files.conf_dirs", lambda: [tmp_path])
    return group


def test_options_are_the_files_of_the_group() -> None:
    assert known_options("kettle") == ["camping", "plain", "small"]
    assert known_options("teapot") == []


@pytest.mark.parametrize(
    ("name", "kettle"),
    [("small", Kettle(0.5, "blue")), ("camping", Kettle(0.5, "red")), ("plain", Kettle())],
)
def test_a_file_overrides_its_defaults_and_they_the_schema(name: str, kettle: Kettle) -> None:
    assert load_option("kettle", name, Kettle) == kettle


def test_an_unknown_option_names_all_and_the_nearest() -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_option("kettle", "campng", Kettle)
    assert str(raised.value) == (
        "kettle is one of camping, plain, small (files of conf/kettle); got 'campng'. Did you mean camping?"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"color": "red"}, r"^kettle has no setting 'color'\. Did you mean colour\?$"),
        ({"zzz": 1}, r"^kettle has no setting 'zzz'\. Known settings: litres, colour\.$"),
        ({"litres": "many"}, r"^kettle\.litres: .*'many'"),
        ({"litres": 0}, r"^kettle\.litres is above 0; got 0\.0\.$"),
    ],
)
def test_a_wrong_setting_is_named(group: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        checked("kettle", settings, Kettle)
    (group / "wrong.yaml").write_text("\n".join(f"{key}: {value}" for key, value in settings.items()))
    with pytest.raises(ConfigurationError, match=message):
        load_option("kettle", "wrong", Kettle)
