"""The command line: `lightning-pfo COMMAND key=value ...` (also `python -m lightning_pfo COMMAND ...`).

A command is a module with a dataclass `Settings` and a function `run(settings) -> None`; it is imported only when it is
called, so that the command line starts quickly. Settings are given in Hydra's override form (`--key value` works too)
and checked against the dataclass; a field's `metadata["help"]` is its line in `--help`.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.core.wording import did_you_mean

COMMANDS = {
    "plan": "lightning_pfo.cli.plan",
    "sample": "lightning_pfo.cli.sample",
    "gpu": "lightning_pfo.cli.gpu",
    "p2p-power": "lightning_pfo.cli.p2p_power",
    "restore-clocks": "lightning_pfo.cli.restore_clocks",
}
"""Commands by name: the module that implements each."""

_HELP_FLAGS = ("-h", "--help", "help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 after an error that the user can correct, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        if not arguments or arguments[0] in _HELP_FLAGS:
            print(_overview())
            return 0 if arguments else 2
        name, overrides = arguments[0], arguments[1:]
        if name not in COMMANDS:
            raise ConfigurationError(
                f"Unknown command {name!r}.{did_you_mean(name, COMMANDS)} Commands: {', '.join(COMMANDS)}."
            )
        command = importlib.import_module(COMMANDS[name])
        if any(flag in overrides for flag in _HELP_FLAGS):
            print(_usage(name, command))
        else:
            command.run(read_settings(command.Settings, without_dashes(overrides)))
    except PfoError as error:
        return _explain(str(error))
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _explain(f"Files are read and written where this user may; {reason}. Give another path.")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return 0


def without_dashes(arguments: Sequence[str]) -> list[str]:
    """Turn `--key value`, `--key=value` and a lone `--key` (true) into `key=value`; `key-name` is `key_name`."""
    settings: list[str] = []
    waiting: str | None = None
    for argument in arguments:
        if argument.startswith("--"):
            settings += [f"{waiting}=true"] if waiting is not None else []
            key, equals, value = argument[2:].partition("=")
            key, waiting = key.replace("-", "_"), None
            if equals:
                settings.append(f"{key}={value}")
            else:
                waiting = key
        elif waiting is not None and "=" not in argument:
            settings.append(f"{waiting}={argument}")
            waiting = None
        else:
            settings += [f"{waiting}=true"] if waiting is not None else []
            settings.append(argument)
            waiting = None
    return settings + ([f"{waiting}=true"] if waiting is not None else [])


def read_settings(schema: type[Any], overrides: Sequence[str]) -> Any:
    """Read `key=value` arguments into an instance of the dataclass `schema`.

    Raises:
        ConfigurationError: If an argument is not `key=value`, a key is unknown, a value has the wrong type, or a
            field without default is not given.
    """
    known = [setting.name for setting in _settings_of(schema)]
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            raise ConfigurationError(f"Settings read key=value, got {override!r}. Available: {', '.join(known)}.")
        if key not in known:
            raise ConfigurationError(
                f"There is no setting {key!r}.{did_you_mean(key, known)} Available: {', '.join(known)}."
            )
    try:
        given = OmegaConf.from_dotlist(list(overrides))
        for setting in _settings_of(schema):
            name = setting.name
            if setting.default_factory is list and name in given and not OmegaConf.is_list(given[name]):
                given[name] = [given[name]]  # one value is a list of one
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), given))
    except MissingMandatoryValue:
        required = [setting.name for setting in _settings_of(schema) if _is_required(setting)]
        named = {override.partition("=")[0] for override in overrides}
        missing = [name for name in required if name not in named]
        raise ConfigurationError(f"Give {', '.join(f'{name}=...' for name in missing or required)}.") from None
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).strip().splitlines()[0].rstrip(".")
        raise ConfigurationError(f"Setting {error.full_key or 'given'} cannot be used: {reason}.") from error
    except YAMLError as error:
        raise ConfigurationError(
            f"Values are read as YAML, e.g. deadlines_s=[2.84,2.87]; not readable: {' '.join(overrides)}."
        ) from error


def _explain(problem: str) -> int:
    print(f"lightning-pfo: error: {problem}", file=sys.stderr)
    return 2


def _overview() -> str:
    lines = ["usage: lightning-pfo COMMAND key=value ...", "", "commands:"]
    for name, module in COMMANDS.items():
        summary = (importlib.import_module(module).__doc__ or "").splitlines()[0]
        lines.append(f"  {name:<14} {summary}")
    return "\n".join([*lines, "", "`lightning-pfo COMMAND --help` lists the settings of a command."])


def _usage(name: str, command: Any) -> str:
    settings = _settings_of(command.Settings)
    required = [f"{field.name}=..." for field in settings if _is_required(field)]
    lines = [
        " ".join(["usage: lightning-pfo", name, *required, "[key=value ...]"]),
        "",
        (command.__doc__ or "").strip(),
        "",
        "settings:",
    ]
    for setting in settings:
        lines.append(f"  {setting.name:<22} {setting.metadata.get('help', '')} ({_default(setting)})")
    return "\n".join(lines)


def _settings_of(schema: type[Any]) -> list[Field[Any]]:
    """The fields of a schema, those first that must be given."""
    return sorted(fields(schema), key=lambda setting: not _is_required(setting))


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _default(field: Field[Any]) -> str:
    if _is_required(field):
        return "required"
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return "default none" if default in (None, "") else f"default {default}"
