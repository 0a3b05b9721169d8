"""Files of a Hydra group, read without Hydra: for those who name one in Python, such as `gpu="emulated_a40"`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.paths import conf_dirs
from lightning_pfo.core.wording import did_you_mean

Config = TypeVar("Config")


def known_options(group: str) -> list[str]:
    """Names of the files in conf/GROUP, and in the user's own folder."""
    return sorted({path.stem for folder in conf_dirs() for path in (folder / group).glob("*.yaml")})


def load_option(group: str, name: str, schema: type[Config]) -> Config:
    """Read conf/GROUP/NAME.yaml.

    Args:
        group: The group, which is also the name of the setting.
        name: The file, without its ending.
        schema: The dataclass that describes it.

    Raises:
        ConfigurationError: If there is no such file (the message lists those there are), or a key or value is wrong.
    """
    known = known_options(group)
    if name not in known:
        raise ConfigurationError(
            f"{group} is one of {', '.join(known)} (files of conf/{group}); got {name!r}.{did_you_mean(name, known)}"
        )
    return checked(group, _read(group, name), schema)


def checked(group: str, settings: Mapping[str, Any], schema: type[Config]) -> Config:
    """Check settings against their schema.

    Raises:
        ConfigurationError: If a key is unknown (the message names the nearest), or a value has the wrong type or range.
    """
    from omegaconf import OmegaConf  # slow to import, and the clock watchdog must start quickly
    from omegaconf.errors import OmegaConfBaseException

    structured = OmegaConf.structured(schema)
    for key in settings:
        if key not in structured:
            hint = did_you_mean(str(key), structured) or f" Known settings: {', '.join(structured)}."
            raise ConfigurationError(f"{group} has no setting {key!r}.{hint}")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(structured, settings))
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{group}.{error.full_key}: {str(error).splitlines()[0]}.") from error
    assert isinstance(config, schema)
    return config


def _read(group: str, name: str) -> dict[str, Any]:
    """Read an option, following its Hydra defaults list (options of the same group, then the file itself)."""
    from omegaconf import OmegaConf

    paths = [folder / group / f"{name}.yaml" for folder in conf_dirs()]
    loaded = OmegaConf.to_container(OmegaConf.load(next(filter(Path.exists, paths), paths[0])))
    assert isinstance(loaded, dict)
    own: dict[str, Any] = {str(key): value for key, value in loaded.items()}
    settings: dict[str, Any] = {}
    for entry in own.pop("defaults", []):
        if entry != "_self_":
            settings.update(_read(group, entry))
    return settings | own
