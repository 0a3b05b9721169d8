"""What a command line may say beyond Hydra's grammar: selections of a plan, numbers as names, folders as they are."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore

from lightning_pfo.core.errors import ConfigurationError, PfoError


def understood(arguments: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """The arguments as Hydra takes them.

    Args:
        arguments: As they were given.
        folders: Where Hydra finds groups.

    Raises:
        ConfigurationError: If output_dir is empty, which would be the present folder.
    """
    for argument in arguments:
        if re.fullmatch(r"output_dir=(''|\"\")?", argument):
            raise ConfigurationError("output_dir is a folder; got ''. Give output_dir=PATH, or leave it out.")
    return [with_folder(with_names(with_selections(argument, folders), folders)) for argument in arguments]


def with_selections(argument: str, folders: Sequence[Path]) -> str:
    """Let `plan=1.02x`, or any other selection, be an option of the group `plan` beside its files; also in sweeps."""
    key, equals, values = argument.partition("=")
    if key != "plan" or not equals:
        return argument
    return f"{key}={','.join(_option(value, folders) for value in values.split(','))}"


def _option(given: str, folders: Sequence[Path]) -> str:
    if any((folder / "plan" / f"{given}.yaml").exists() for folder in folders):
        return given
    from lightning_pfo.planner import check_selection  # the planner need not be imported to compose a configuration

    name = given[1:-1] if len(given) > 2 and given[0] == given[-1] and given[0] in "'\"" else given
    try:
        check_selection(name)
    except PfoError:
        # Hydra says which options there are. A number would be none: `check_settings` says what selections look like.
        if not re.fullmatch(r"[\d.]+", name):
            return given
    ConfigStore.instance().store(group="plan", name=name, node={"defaults": ["no_slowdown"], "select": name})
    return f'"{name}"'


def with_names(argument: str, folders: Sequence[Path]) -> str:
    """Quote numbers where a group's option is expected: Hydra has names only, and fails on `gpu=40`.

    So are the boundaries of a partition, whose commas Hydra takes for a sweep.
    """
    key, _, value = argument.partition("=")
    is_group = any((folder / key).is_dir() for folder in folders)
    if re.fullmatch(r"custom:[\d,]+", value) or (re.fullmatch(r"[\d.]+", value) and is_group):
        return f'{key}="{value}"'
    return argument


def with_folder(argument: str) -> str:
    """Take the folder of `output_dir=` as it stands: Hydra makes the number 7 of 007, and a folder named ~ of ~/out.

    Quoted values, sweeps and interpolations stay Hydra's.
    """
    key, _, value = argument.partition("=")
    if key != "output_dir" or not re.fullmatch(r"[^,'\"\\${}()]+", value):
        return argument
    return f'output_dir="{os.path.expanduser(value)}"'  # noqa: PTH111 (Path would drop ./)
