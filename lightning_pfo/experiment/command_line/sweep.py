"""The jobs of a sweep, each a script of its own: the ranks of a job are processes that know only a command line."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd, to_absolute_path

from lightning_pfo.device.safety.guard import SIGNALS

_OF_THE_SWEEP = re.compile(r"hydra\.(mode|run|sweep|sweeper|launcher)\b|hydra/(sweeper|launcher)\b")
_LOOK_EVERY_S = 0.2


def run_as_own_script() -> None:
    """Run one job, with the flags and settings of the sweep; ends the process where the job fails."""
    logging.getLogger("hydra").setLevel(logging.WARNING)  # the launcher would write into the log file of the job before
    hydra_config = HydraConfig.get()
    overrides = [text for text in hydra_config.overrides.task if not re.match(r"\+*output_dir=", text)]
    print(f"Job {hydra_config.job.num} of the sweep: {' '.join(overrides)}", flush=True)  # noqa: T201
    command = [sys.executable, *_script(), *_flags(), *overrides, *_settings_of_hydra()]
    with _signals_noted() as noted:
        # in a session of its own: a terminal's Ctrl-C comes to it through us, and so once, as any other signal does
        process = subprocess.Popen(command, cwd=get_original_cwd(), start_new_session=True)
        num_passed_on = 0
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_EVERY_S)
            for signum in noted[num_passed_on:]:
                _pass_on(process, signum)
                num_passed_on += 1
    if noted or process.returncode:
        sys.exit(128 + noted[0] if noted else process.returncode)


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Note signals that would end this process; those that it ignores stay ignored."""
    noted: list[int] = []
    replaced = {one: before for one in SIGNALS if (before := signal.getsignal(one)) not in (signal.SIG_IGN, None)}
    for one in replaced:
        signal.signal(one, lambda signum, _: noted.append(signum))
    try:
        yield noted
    finally:
        for one, before in replaced.items():
            signal.signal(one, before)


def _pass_on(process: subprocess.Popen[bytes], signum: int) -> None:
    """To the job's first process, which ends the others; Ctrl-C to all of them, as a terminal does."""
    if signum == signal.SIGINT and hasattr(os, "killpg") and process.poll() is None:
        os.killpg(process.pid, signum)
    else:
        process.send_signal(signum)


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
