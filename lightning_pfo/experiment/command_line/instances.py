"""Objects that a configuration names by their class, as Hydra's users write them: `_target_` and arguments."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Iterable
from typing import Any

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import did_you_mean, shortened


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
        _found(path, str(entry["_target_"]))


def _make(name: str, section: dict[str, Any], kind: type[Any], example: str) -> list[Any]:
    made = []
    for path, entry in _entries(name, section).items():
        target = _found(path, str(entry["_target_"]))
        try:
            one = instantiate(entry)
        except HydraException as error:
            arguments = did_you_mean(*_unexpected(error.__cause__, target))
            told = _first_line(error.__cause__ or error)
            raise ConfigurationError(f"{path} cannot be made: {told}.{arguments}") from error
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


def _found(path: str, target: str) -> Any:
    """What a `_target_` names."""
    log = logging.getLogger("hydra.utils")
    before, log.disabled = log.disabled, True  # which says the same
    try:
        return get_object(target)
    except Exception as error:  # importing may raise anything
        package, _, name = target.rpartition(".")
        names = dir(sys.modules[package]) if package in sys.modules else ()
        why = " ".join(str(error).split("\n")[1:2]) or _first_line(error)  # Hydra's first line only repeats the name
        raise ConfigurationError(
            f"{path}._target_ cannot be imported: {target} ({why.strip()}).{did_you_mean(name, names)}"
        ) from error
    finally:
        log.disabled = before


def _unexpected(error: BaseException | None, kind: Any) -> tuple[str, Iterable[str]]:
    """An argument that a class does not have, and those that it has."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    try:
        return (found[1], inspect.signature(kind).parameters) if found else ("", ())
    except ValueError:  # a class that is not written in Python
        return "", ()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
