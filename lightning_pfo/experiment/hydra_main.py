"""The one place where a script meets Hydra: composition, sweeps, and errors that a user can act on.

The training itself runs in several processes, because Lightning starts the script again for each rank, or clones it.
Every rank has the same config; sweeps therefore start each of their jobs as a script of its own.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.core.paths import conf_dir
from lightning_pfo.core.wording import did_you_mean
from lightning_pfo.experiment.compat import helps_of_any_kind
from lightning_pfo.experiment.config import ExperimentConfig
from lightning_pfo.experiment.processes import is_first_process

Config = TypeVar("Config", bound=ExperimentConfig)

_TRACEBACK = "HYDRA_FULL_ERROR"


def hydra_main(
    config_name: str, schema: type[Config], section_schemas: Mapping[str, type[Any]] | None = None
) -> Callable[[Callable[[Config], None]], Callable[[], None]]:
    """Make a function of a config the main function of a script, with Hydra's command line.

    The processes of other ranks than the first end in it; the first one returns.

    `key=value`, `group=option`, `+key=value`, `--multirun`, `--cfg job` and `--help` work as in any Hydra application;
    `plan=` also takes a selection such as `plan=1.02x` or `"plan=T'=2.9s"`.
    A user's mistake ends the script with one paragraph and exit status 1; HYDRA_FULL_ERROR=1 shows the traceback.

    Args:
        config_name: Name of a YAML file in `conf/` whose defaults list starts with `<config_name>_schema`.
        schema: Type of the config that the function receives (a dataclass, not an OmegaConf container).
        section_schemas: Types of a section of which the schema names a base only, as `GROUP/schema/NAME`. Files of the
            group choose theirs by `optional schema@_here_: NAME` in their defaults list.
    """

    def decorate(task: Callable[[Config], None]) -> Callable[[], None]:
        ConfigStore.instance().store(name=f"{config_name}_schema", node=schema)
        for path, node in (section_schemas or {}).items():
            group, _, name = path.rpartition("/")
            ConfigStore.instance().store(group=group, name=name, node=node)
        wants_traceback = os.environ.get(_TRACEBACK) == "1"
        has_begun = False

        @functools.wraps(task)
        def job(composed: DictConfig) -> None:
            nonlocal has_begun
            has_begun = True
            with _environment(_TRACEBACK, "1" if wants_traceback else None), _errors_explained(wants_traceback):
                if HydraConfig.get().mode is RunMode.MULTIRUN:
                    _run_as_own_script()
                else:
                    for handler in logging.getLogger().handlers:
                        handler.addFilter(_is_first_or_severe)
                    config: Any = OmegaConf.to_object(composed)
                    check_no_foreign_keys(config)
                    task(config)

        @functools.wraps(task)
        def main() -> None:
            sys.argv[1:] = map(with_folder, map(with_selection, sys.argv[1:]))  # the other ranks get the same
            run = hydra.main(config_path=str(conf_dir()), config_name=config_name, version_base="1.3")(job)
            # Asked for a full error, Hydra raises it instead of printing its own text.
            try:
                with _environment(_TRACEBACK, "1"), _errors_explained(wants_traceback), helps_of_any_kind():
                    _check_folder(sys.argv[1:])
                    run()
                    if not is_first_process():
                        sys.exit()  # see _leave
            except SystemExit as leaving:
                _leave(leaving)
            except OSError as error:  # before the job, Hydra makes its folder
                if has_begun or wants_traceback:
                    raise
                sys.exit(f"Error: The output folder cannot be made ({error}). Give another: output_dir=PATH.")

        return main

    return decorate


def with_selection(argument: str) -> str:
    """Let `plan=1.02x`, or any other selection that is no file of conf/plan, stand for `plan.select=1.02x`.

    Numbers are quoted where a group's option is expected: Hydra has names only, and fails on `gpu=40`. So are the
    boundaries of a partition, whose commas Hydra takes for a sweep.
    """
    key, _, value = argument.partition("=")
    if re.fullmatch(r"custom:[\d,]+", value):
        return f'{key}="{value}"'
    if re.fullmatch(r"[\d.]+", value) and (conf_dir() / key).is_dir():
        return f'plan.select="{value}"' if key == "plan" else f'{key}="{value}"'
    if key != "plan" or not value or (conf_dir() / "plan" / f"{value}.yaml").exists():
        return argument
    from lightning_pfo.planner import check_selection  # the planner need not be imported to compose a configuration

    try:
        check_selection(value)
    except PfoError:
        return argument  # Hydra says which options there are
    return f'plan.select="{value}"'


def with_folder(argument: str) -> str:
    """Take the folder of `output_dir=` as it stands: Hydra makes the number 7 of 007, and a folder named ~ of ~/out.

    Quoted values, sweeps and interpolations stay Hydra's.
    """
    key, _, value = argument.partition("=")
    if key != "output_dir" or not re.fullmatch(r"[^,'\"\\${}()]+", value):
        return argument
    return f'output_dir="{os.path.expanduser(value)}"'  # noqa: PTH111 (Path would drop ./)


def _check_folder(arguments: Sequence[str]) -> None:
    """Check that no empty folder is given, which would be the present one.

    Raises:
        ConfigurationError: If one is.
    """
    for argument in arguments:
        if re.fullmatch(r"output_dir=(''|\"\")?", argument):
            raise ConfigurationError("output_dir is a folder; got ''. Give output_dir=PATH, or leave it out.")


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
    if group != "plan":
        return ""
    from lightning_pfo.planner.frontier.select import FORMS

    return f" Or select one by {FORMS}."


def _alternatives(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    return f"{did_you_mean(name, names)} Known: {', '.join(names)}."


@contextmanager
def _errors_explained(wants_traceback: bool) -> Iterator[None]:
    """End the process with one paragraph where the mistake is the user's."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as ending:
        # Ctrl-C during a fit: Lightning ends the process with 1, and without a word where it is told to be quiet.
        ended_by_lightning = isinstance(ending, SystemExit) and ending.code == 1
        if not isinstance(ending.__context__ if ended_by_lightning else ending, KeyboardInterrupt):
            raise
        if is_first_process():
            print("Interrupted.", file=sys.stderr)  # noqa: T201
        sys.exit(130)
    except (PfoError, HydraException, OmegaConfBaseException) as error:
        if wants_traceback:
            raise
        if not is_first_process() and _parent_ends(within_s=10):
            sys.exit(1)  # rank 0 has found the same mistake, and said so
        text = str(error) if isinstance(error, PfoError) else explain_config_error(error)
        sys.exit(f"Error: {text}")


def _leave(leaving: SystemExit) -> None:
    """End the process with this status.

    The interpreter's own way out aborts now and then (`terminate called`) while connections to other ranks, which break
    at the same time, are open; so it is cut short after the functions registered with `atexit`. It also writes to all
    memory, of which clones of the first process would each need a copy of their own then.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        raise leaving
    if isinstance(leaving.code, str):
        print(leaving.code, file=sys.stderr)  # noqa: T201
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))


def _is_first_or_severe(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or is_first_process()  # asked each time: others may be clones of the first


def _run_as_own_script() -> None:
    """Run one job of a sweep; the ranks of a job are processes that know only a command line."""
    hydra_config = HydraConfig.get()
    overrides = [text for text in hydra_config.overrides.task if not re.match(r"\+*output_dir=", text)]
    print(f"Job {hydra_config.job.num} of the sweep: {' '.join(overrides)}", flush=True)  # noqa: T201
    command = [sys.executable, sys.argv[0], *overrides, f"output_dir={hydra_config.runtime.output_dir}"]
    process = subprocess.Popen(command)
    interrupted = False
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:  # the job got it too, says so, and restores the clocks before it ends
            interrupted = True
    if interrupted or status:
        sys.exit(130 if interrupted else status)


def _parent_ends(within_s: float) -> bool:
    """Wait until the process that started this one ends; False if it does not."""
    parent, end_s = os.getppid(), time.monotonic() + within_s
    while os.getppid() == parent:
        if time.monotonic() >= end_s:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set or unset an environment variable for the time of the block."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
