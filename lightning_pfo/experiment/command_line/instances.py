"""Objects that a configuration names by their class, as Hydra's users write them: `_target_` and arguments."""

from __future__ import annotations

from typing import Any

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import shortened


def make_callbacks(section: dict[str, Any]) -> list[Callback]:
    """Make the callbacks of the section `callbacks`.

    Raises:
        ConfigurationError: If an entry is none, or its class refuses the arguments.
    """
    return _make("callbacks", section, Callback, "lightning.pytorch.callbacks.EarlyStopping")


def make_loggers(section: dict[str, Any]) -> list[Logger]:
    """Make the loggers of the section `logger`.

    Raises:
        ConfigurationError: If an entry is none, or its class refuses the arguments.
    """
    return _make("logger", section, Logger, "lightning.pytorch.loggers.CSVLogger")


def check_targets(config_section: str, section: dict[str, Any]) -> None:
    """Check that what the entries name can be imported, making nothing: loggers may begin their files when made.

    Raises:
        ConfigurationError: If one does not.
    """
    for path, entry in _entries(config_section, section).items():
        try:
            get_object(str(entry["_target_"]))
        except Exception as error:  # importing may raise anything
            raise ConfigurationError(f"{path}._target_ cannot be imported: {_first_line(error)}.") from error


def _make(name: str, section: dict[str, Any], kind: type[Any], example: str) -> list[Any]:
    made = []
    for path, entry in _entries(name, section).items():
        try:
            one = instantiate(entry)
        except HydraException as error:
            raise ConfigurationError(f"{path} cannot be made: {_first_line(error.__cause__ or error)}.") from error
        if not isinstance(one, kind):
            raise ConfigurationError(
                f"{path}._target_ is a class of {kind.__module__.rpartition('.')[0]}'s {kind.__name__}s; got "
                f"{entry['_target_']}. Such as {example}."
            )
        made.append(one)
    return made


def _entries(name: str, section: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries by path, but for those that are null; a section that has a `_target_` itself is the only one."""
    entries = {name: section} if "_target_" in section else {f"{name}.{key}": entry for key, entry in section.items()}
    found = {path: entry for path, entry in entries.items() if entry is not None}
    for path, entry in found.items():
        if not isinstance(entry, dict) or "_target_" not in entry:
            raise ConfigurationError(
                f"Each entry of {name} has a _target_, its class, beside its arguments; {path} is {shortened(entry)}. "
                f"Use +{path}._target_=PACKAGE.CLASS."
            )
    return found


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
