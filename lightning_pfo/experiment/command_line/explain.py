"""Mistakes of a user's command line or YAML files, as one paragraph with the names that would work."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.registry import SCHEDULES
from lightning_pfo.core.wording import did_you_mean


def check_no_foreign_keys(section: Any, path: str = "") -> None:
    """Check that a config has only the keys of its dataclass; `+key=value` adds any, and nothing would read them.

    Raises:
        ConfigurationError: Naming the key and those there are.
    """
    if not dataclasses.is_dataclass(section):
        return
    known = [entry.name for entry in dataclasses.fields(section)]
    for key, value in vars(section).items():
        if key not in known:
            raise ConfigurationError(_no_such_key(key, path, known))
        check_no_foreign_keys(value, f"{path}.{key}".lstrip("."))


def explain_config_error(error: HydraException | OmegaConfBaseException) -> str:
    """Say in one paragraph what is wrong with an override or a YAML file, and which names would work."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"There is no {group}={option}.{_alternatives(option, error.options)}{_selections(group)}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key} needs a value. Give it on the command line: {cause.full_key}=VALUE."
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        known = [str(key) for key in cause.parent_node if key != "hydra"]
        where = re.match(r"In '(.+?)': ", str(error))  # a YAML file, not an override
        return (f"In {where[1]}.yaml: " if where else "") + _no_such_key(
            str(cause.key), (cause.full_key or "").rpartition(".")[0], known
        )
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key}: {cause.msg or cause}".splitlines()[0]
    return " ".join(str(error).split()).removeprefix("Error ")


def _no_such_key(key: str, section: str, known: Iterable[str]) -> str:
    place = f"in {section}" if section else "at the top level of the configuration"
    return f"There is no key {key!r} {place}.{_alternatives(key, known)}"


def _selections(group: str) -> str:
    if group == "schedule":
        return f" Schedules: {', '.join(SCHEDULES)}; select one by schedule.name=NAME."
    if group != "plan":
        return ""
    from lightning_pfo.planner.frontier.select import FORMS

    return f" Or select one by {FORMS}."


def _alternatives(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    return f"{did_you_mean(name, names)} Known: {', '.join(names)}."
