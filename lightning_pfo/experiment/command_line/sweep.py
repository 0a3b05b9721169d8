"""The jobs of a sweep, each a script of its own: the ranks of a job are processes that know only a command line."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd, to_absolute_path

_OF_THE_SWEEP = re.compile(r"hydra\.(mode|run|sweep|sweeper|launcher)\b|hydra/(sweeper|launcher)\b")


def run_as_own_script() -> None:
    """Run one job, with the flags and settings of the sweep; ends the process where the job fails."""
    logging.getLogger("hydra").setLevel(logging.WARNING)  # the launcher would write into the log file of the job before
    hydra_config = HydraConfig.get()
    overrides = [text for text in hydra_config.overrides.task if not re.match(r"\+*output_dir=", text)]
    print(f"Job {hydra_config.job.num} of the sweep: {' '.join(overrides)}", flush=True)  # noqa: T201
    command = [sys.executable, *_script(), *_flags(), *overrides, *_settings_of_hydra()]
    process = subprocess.Popen(command, cwd=get_original_cwd())
    interrupted = False
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:  # the job got it too, says so, and restores the clocks before it ends
            interrupted = True
    if interrupted or status:
        sys.exit(130 if interrupted else status)


def _script() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # `python -m MODULE` has one
    return [to_absolute_path(sys.argv[0])] if spec is None else ["-m", spec.name]


def _flags() -> list[str]:
    """Where this composition has found its files: `--config-path`, `--config-dir` and `--config-name`."""
    flag_of = {"main": "--config-path", "command-line": "--config-dir"}
    flags = [f"--config-name={HydraConfig.get().job.config_name}"]
    for source in HydraConfig.get().runtime.config_sources:
        if source.provider in flag_of:
            prefix = "pkg://" if source.schema == "pkg" else ""
            flags.append(f"{flag_of[source.provider]}={prefix}{source.path}")
    return flags


def _settings_of_hydra() -> list[str]:
    hydra_config = HydraConfig.get()
    folder = hydra_config.runtime.output_dir
    given = [text for text in hydra_config.overrides.hydra if not _OF_THE_SWEEP.match(text.lstrip("+~"))]
    return [*given, f'output_dir="{folder}"', f'hydra.run.dir="{folder}"']
