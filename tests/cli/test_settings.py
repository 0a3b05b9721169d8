"""How arguments become settings."""

from dataclasses import dataclass, field
from typing import Any, Optional

import pytest

from lightning_pfo.cli.settings import read_settings, without_dashes
from lightning_pfo.core.errors import ConfigurationError


@dataclass
class Settings:
    folder: str = field(metadata={"is_path": True})
    name: str = "none"
    power_w: Any = field(default=None, metadata={"is_path": True})
    num_plans: int = 50
    every: Optional[int] = None  # noqa: UP045
    times_s: list[float] = field(default_factory=list)
    json: bool = False


def read(*given):
    return read_settings(Settings, given)


@pytest.mark.parametrize(
    "text",
    ["007", "yes", "null", "1e3", "my out #2", "a: b", "[x", "${p}", "???", "GPU [/x]", "it's", "~nobody-so-named/x"],
)
def test_text_is_taken_as_it_stands(text):
    settings = read(f"folder={text}", f"name={text}")
    assert (settings.folder, settings.name) == (text, text)


def test_quotes_around_a_text_are_not_part_of_it():
    settings = read('folder="T\'=2.9s"', "name='a b'")
    assert (settings.folder, settings.name) == ("T'=2.9s", "a b")


def test_a_tilde_is_the_users_folder_in_paths_only(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    settings = read("folder=~/out", "name=~/out", "power_w=~/my power #2.json")
    assert (settings.folder, settings.name, settings.power_w) == ("/home/me/out", "~/out", "/home/me/my power #2.json")


def test_what_is_not_text_is_read_as_yaml():
    settings = read("folder=x", "power_w={1410: 85, 705: 66}", "times_s=2.5", "every=3", "json=yes", "num_plans=10")
    assert settings == Settings("x", power_w={1410: 85, 705: 66}, times_s=[2.5], every=3, json=True, num_plans=10)
    assert read("folder=x", "power_w=85").power_w == 85
    assert read("folder=x", "times_s=[1,2e-1]").times_s == [1, 0.2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["folder="], "Setting folder cannot be empty; got ''. Give folder=VALUE."),
        (["folder=''"], "Setting folder cannot be empty; got ''. Give folder=VALUE."),
        (["folder=a\0b"], r"Setting folder is text without NUL characters; got 'a\\x00b'"),
        (["folder=x", 'power_w="a\\0b"', "power_w=a\0b"], "without NUL characters|Values are read as YAML"),
        ([], r"Give folder=\.\.\."),
        (["folder=x", "num_plans=many"], "num_plans is a whole number; got num_plans=many. Give num_plans=50, for"),
        (["folder=x", "num_plans=1e9"], "num_plans is a whole number; got num_plans=1e9. Give num_plans=50, for"),
        (["folder=x", "every=x"], "every is a whole number; got every=x. Give every=8, for example"),
        (["folder=x", "json=maybe"], "json is true or false; got json=maybe. Give json=false, for example"),
        (
            ["folder=x", "times_s=[abc]"],
            r"times_s is a list of numbers; got times_s=\[abc\]. Give times_s=\[2.84,2.87\]",
        ),
        (["folder=x", "num_plans=${a}"], "Setting num_plans cannot be used: .*'a'"),
        (["folder=x", "times_s=[1"], "Values are read as YAML"),
        (["folder=x", "times_s=" + "[" * 100_000], "Values are read as YAML"),
    ],
)
def test_what_cannot_be_read_is_refused(given, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        read(*given)
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["--write", "conf/gpu/x.yaml"], ["write=conf/gpu/x.yaml"]),
        (["--write=a=b", "json=true"], ["write=a=b", "json=true"]),
        (["--json"], ["json=true"]),
        (["--json", "--num-clocks", "3", "gpu=nvml"], ["json=true", "num_clocks=3", "gpu=nvml"]),
        (["--json", "gpu=nvml"], ["json=true", "gpu=nvml"]),
    ],
)
def test_settings_may_be_spelled_with_dashes(given, read):
    assert without_dashes(given) == read
