"""The settings of a command: `key=value` arguments, checked against the fields of a dataclass.

Text (`str` fields: paths, names) is taken as it stands, so that `output_dir=007` is a folder of that name. Everything
else is read as YAML, such as `deadlines_s=[2.84,2.87]` or `p2p_blocking_power_w={1410: 85, 705: 66}`. A field's
`metadata` may hold `help`, its line in `--help`, and `is_path`, whether `~` at the beginning is the user's folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, replace
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError
from yaml import YAMLError  # type: ignore[import-untyped]

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import cut, did_you_mean


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
            field without default is not given or empty.
    """
    known = {entry.name: entry for entry in _settings_of(schema)}
    kinds = get_type_hints(schema)
    texts: dict[str, str] = {}
    values: dict[str, str] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigurationError(f"Settings read key=value, got {override!r}. Available: {', '.join(known)}.")
        if key not in known:
            raise ConfigurationError(
                f"There is no setting {key!r}.{did_you_mean(key, known)} Available: {', '.join(known)}."
            )
        (texts if kinds[key] is str else values)[key] = value
    missing = [name for name, entry in known.items() if _is_required(entry) and name not in texts | values]
    if missing:
        raise ConfigurationError(f"Give {', '.join(f'{name}=...' for name in missing)}.")
    parsed = _parse(values)
    # What may be anything and is text after all, such as the path of a file, is taken as it stands too.
    texts |= {key: values[key] for key, value in parsed.items() if isinstance(value, str) and kinds[key] is Any}
    given = {key: [value] if known[key].default_factory is list and not isinstance(value, list) else value
             for key, value in parsed.items() if key not in texts}  # fmt: skip
    return replace(
        _typed(schema, given, texts, values), **{key: _text(known[key], value) for key, value in texts.items()}
    )


def _parse(values: dict[str, str]) -> dict[str, Any]:
    try:
        parsed = OmegaConf.from_dotlist([f"{key}={value}" for key, value in values.items()])
        return {str(key): value for key, value in OmegaConf.to_container(parsed).items()}  # type: ignore[union-attr]
    except (YAMLError, OmegaConfBaseException, RecursionError) as error:
        given = " ".join(f"{key}={value}" for key, value in values.items())
        raise ConfigurationError(
            f"Values are read as YAML, e.g. deadlines_s=[2.84,2.87]; not readable: {given}."
        ) from error


def _typed(schema: type[Any], given: dict[str, Any], texts: dict[str, str], received: dict[str, str]) -> Any:
    """An instance of the schema with what is given; texts, which are to be set afterwards, are empty."""
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), given, dict.fromkeys(texts, "")))
    except (OmegaConfBaseException, RecursionError) as error:
        key = (getattr(error, "full_key", None) or "given").partition("[")[0]
        entry, rule = next((one for one in fields(schema) if one.name == key), None), _rule(schema, key)
        if entry is None or rule is None or not isinstance(error, ValidationError):
            reason = str(getattr(error, "msg", None) or error).strip().splitlines()[0].rstrip(".")
            raise ConfigurationError(f"Setting {key} cannot be used: {reason}.") from error
        example = rule[1] if entry.default in (None, MISSING) else str(entry.default).lower()
        raise ConfigurationError(
            f"Setting {key} is {rule[0]}; got {key}={cut(received[key])}. Give {key}={example}, for example."
        ) from error


def _rule(schema: type[Any], key: str) -> tuple[str, str] | None:
    """What a setting may be, in words, and an example; None where there are no words for it."""
    kind = get_type_hints(schema).get(key)
    of_list = get_args(kind) if get_origin(kind) is list else ()
    if of_list:
        return {float: ("a list of numbers", "[2.84,2.87]"), int: ("a list of whole numbers", "[1,2]")}.get(of_list[0])
    alone = [one for one in get_args(kind) if one is not type(None)] or [kind]
    rules: dict[Any, tuple[str, str]] = {
        bool: ("true or false", "true"),
        int: ("a whole number", "8"),
        float: ("a number", "0.5"),
    }
    return rules.get(alone[0])


def _text(entry: Field[Any], given: str) -> str:
    """The text itself: quotes around all of it are the shell's or Hydra's."""
    is_quoted = len(given) >= 2 and given[0] == given[-1] and given[0] in "'\""
    text = given[1:-1] if is_quoted else given
    if "\0" in text or (not text and _is_required(entry)):
        rule = "cannot be empty" if not text else "is text without NUL characters"
        raise ConfigurationError(f"Setting {entry.name} {rule}; got {text!r}. Give {entry.name}=VALUE.")
    return os.path.expanduser(text) if entry.metadata.get("is_path") else text  # noqa: PTH111 (Path would drop ./)


def usage(name: str, command: Any) -> str:
    """What `lightning-pfo COMMAND --help` prints.

    Args:
        name: Name of the command.
        command: Its module.
    """
    settings = _settings_of(command.Settings)
    required = [f"{entry.name}=..." for entry in settings if _is_required(entry)]
    lines = [
        " ".join(["usage: lightning-pfo", name, *required, "[key=value ...]"]),
        "",
        (command.__doc__ or "").strip(),
        "",
        "settings:",
    ]
    for entry in settings:
        lines.append(f"  {entry.name:<22} {entry.metadata.get('help', '')} ({_default(entry)})")
    return "\n".join(lines)


def _settings_of(schema: type[Any]) -> list[Field[Any]]:
    """The fields of a schema, those first that must be given."""
    return sorted(fields(schema), key=lambda entry: not _is_required(entry))


def _is_required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _default(entry: Field[Any]) -> str:
    if _is_required(entry):
        return "required"
    default = entry.default if entry.default_factory is MISSING else entry.default_factory()
    return "default none" if default in (None, "") else f"default {default}"
