"""The one place where a script meets Hydra: composition, sweeps, and errors that a user can act on.

The training itself runs in several processes, because Lightning starts the script again for each rank, or clones it.
Every rank has the same config; sweeps therefore start each of their jobs as a script of its own.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.paths import conf_dir
from lightning_pfo.core.schedules.registry import file_of
from lightning_pfo.experiment.command_line.arguments import understood
from lightning_pfo.experiment.command_line.compat import helps_of_any_kind
from lightning_pfo.experiment.command_line.explain import check_no_foreign_keys, explain_config_error
from lightning_pfo.experiment.command_line.search_path import find_packaged_groups, searched_folders
from lightning_pfo.experiment.command_line.sweep import run_as_own_script
from lightning_pfo.experiment.config import ExperimentConfig
from lightning_pfo.experiment.earlier import begun, put_back_if_refused
from lightning_pfo.experiment.processes import is_first_process, watch_starter

Config = TypeVar("Config", bound=ExperimentConfig)

_TRACEBACK = "HYDRA_FULL_ERROR"


def hydra_main(
    config_name: str,
    schema: type[Config],
    section_schemas: Mapping[str, type[Any]] | None = None,
    *,
    config_path: str | None = None,
) -> Callable[[Callable[[Config], None]], Callable[[], None]]:
    """Make a function of a config the main function of a script, with Hydra's command line.

    The processes of other ranks than the first end in it; the first one returns.

    `key=value`, `group=option`, `+key=value`, `--multirun`, `--config-dir`, `--cfg job` and `--help` work as in any
    Hydra application; `plan=` also takes a selection such as `plan=1.02x` or `"plan=T'=2.9s"`.
    A user's mistake ends the script with one paragraph and exit status 1; HYDRA_FULL_ERROR=1 shows the traceback.

    Args:
        config_name: Name of a YAML file in `conf/`, or in `config_path`, whose defaults list starts with
            `<config_name>_schema`.
        schema: Type of the config that the function receives (a dataclass, not an OmegaConf container).
        section_schemas: Types of a section of which the schema names a base only, as `GROUP/schema/NAME`. Files of the
            group choose theirs by `optional schema@_here_: NAME` in their defaults list.
        config_path: A folder of the script's own, with its primary config and groups, as `hydra.main` takes it:
            relative to the script, or `pkg://MODULE`. What it does not have is found in the package's `conf`.
    """

    def decorate(task: Callable[[Config], None]) -> Callable[[], None]:
        ConfigStore.instance().store(name=f"{config_name}_schema", node=schema)
        for path, node in (section_schemas or {}).items():
            group, _, name = path.rpartition("/")
            ConfigStore.instance().store(group=group, name=name, node=node)
        wants_traceback = os.environ.get(_TRACEBACK) == "1"
        has_begun = False
        starter_ends = watch_starter()

        @functools.wraps(task)
        def job(composed: DictConfig) -> None:
            nonlocal has_begun
            has_begun = True
            with (
                _environment(_TRACEBACK, "1" if wants_traceback else None),
                _errors_explained(wants_traceback, starter_ends),
            ):
                if HydraConfig.get().mode is RunMode.MULTIRUN:
                    run_as_own_script()
                else:
                    _set_up_logging()
                    composed.output_dir = _results_dir(composed.output_dir)
                    config: Any = OmegaConf.to_object(composed)
                    check_no_foreign_keys(config)
                    _find_files_from_elsewhere(config)
                    task(config)
                    begun()

        @functools.wraps(task)
        def main() -> None:
            nonlocal starter_ends
            starter_ends = watch_starter()
            find_packaged_groups()
            folder = str(conf_dir()) if config_path is None else config_path
            run = hydra.main(config_path=folder, config_name=config_name, version_base="1.3")(job)
            # Asked for a full error, Hydra raises it instead of printing its own text.
            try:
                with (
                    put_back_if_refused(),
                    _environment(_TRACEBACK, "1"),
                    _errors_explained(wants_traceback, starter_ends),
                    helps_of_any_kind(),
                ):
                    folders = searched_folders(sys.argv[1:], _own_folder(task, config_path))
                    sys.argv[1:] = understood(sys.argv[1:], folders)  # the other ranks get the same
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


def _own_folder(task: Callable[..., None], config_path: str | None) -> Path | None:
    """The script's folder of files, where it is one; see `hydra_main`."""
    if config_path is None or config_path.startswith("pkg://"):
        return None
    return Path(inspect.getfile(task)).parent / config_path


@contextmanager
def _errors_explained(wants_traceback: bool, starter_ends: Callable[[float], bool]) -> Iterator[None]:
    """End the process with one paragraph where the mistake is the user's."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as ending:
        if _is_termination(ending):
            if is_first_process():
                print("Terminated.", file=sys.stderr)  # noqa: T201
            sys.exit(128 + signal.SIGTERM)
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
        if not is_first_process() and starter_ends(10.0):
            sys.exit(1)  # rank 0 has found the same mistake, and said so
        text = str(error) if isinstance(error, PfoError) else explain_config_error(error)
        sys.exit(f"Error: {text}")


def _is_termination(ending: BaseException) -> bool:
    """Whether SIGTERM has ended a fit, which Lightning ends with status 0, as if all had been done."""
    exceptions = sys.modules.get("lightning.pytorch.utilities.exceptions")
    return exceptions is not None and isinstance(ending, exceptions.SIGTERMException)


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


def _set_up_logging() -> None:
    """Let one process speak, and the terminal have what `hydra.verbose` asks for."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_first_or_severe)
        if HydraConfig.get().verbose:
            handler.setLevel(logging.NOTSET)


def _is_first_or_severe(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or is_first_process()  # asked each time: others may be clones of the first


def _results_dir(output_dir: str) -> str:
    """Where results go: to `output_dir` if it was given, else where this run of Hydra is (`hydra.run.dir`).

    Absolute where `hydra.job.chdir` has made another folder the present one.
    """
    hydra_config = HydraConfig.get()
    absolute, run_dir = to_absolute_path(output_dir), hydra_config.runtime.output_dir
    is_given = any(re.match(r"\+*output_dir=", text) for text in hydra_config.overrides.task)
    if os.path.realpath(absolute) != os.path.realpath(run_dir) and not is_given:
        return str(run_dir)
    return absolute if hydra_config.job.chdir else output_dir


def _find_files_from_elsewhere(config: ExperimentConfig) -> None:
    """Paths on the command line are relative to where the command was given, also after `hydra.job.chdir`."""
    if not HydraConfig.get().job.chdir:
        return
    order = file_of(config.schedule.name)
    if order is not None:
        config.schedule.name = f"file:{to_absolute_path(str(order))}"
    if config.profile:
        config.profile = to_absolute_path(str(Path(config.profile).expanduser()))


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
