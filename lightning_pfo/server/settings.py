"""What the server can be told: on the command line (`lightning-pfo serve key=value`), or by environment variables.

`uvicorn lightning_pfo.server:app` reads the variables: `LIGHTNING_PFO_SERVE` has settings as on the command line
(`frontier=plans select=1.02x`), and those of Zeus's server are understood besides:

=============================  ====================================================================================
`ZEUS_PFO_SCHEDULER`           `PointSolution` or `PointSolution3D`: `solution_path`; `InstructionProfiler`: `online`
`ZEUS_PFO_SCHEDULER_ARGS`      JSON with settings, such as `{"solution_path": "freqs_pipeline_00031.py"}`
`ZEUS_PFO_LOG_LEVEL`           `DEBUG`, `INFO`, ...
`ZEUS_PFO_DUMP_DATA`           whether files are written that say what happens
`ZEUS_PFO_DUMP_DIR`            where
`ZEUS_PFO_MAX_JOB_IDLE_TIME`   seconds after which a job of which nothing is heard is over
=============================  ====================================================================================
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Optional

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.files import check_can_write
from lightning_pfo.core.ranges import check_between, check_whole
from lightning_pfo.core.wording import did_you_mean, listed, shortened
from lightning_pfo.planner.frontier.select import FORMS, check_selection
from lightning_pfo.planner.settings import PlanSettings

VARIABLE, ZEUS_PREFIX = "LIGHTNING_PFO_SERVE", "ZEUS_PFO_"
_SOURCES = ("frontier", "solution_path", "profile", "online")
_SCHEDULERS = ("PointSolution", "PointSolution3D", "InstructionProfiler")
_PROFILERS = ("scan", "adaptive")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass
class ServerSettings(PlanSettings):
    """What `lightning-pfo serve` can be told: where plans come from, how to plan, and where to listen."""

    frontier: str = field(default="", metadata={"help": "frontier.json to choose from, or its folder", "is_path": True})
    solution_path: str = field(
        default="", metadata={"help": "one plan file of Zeus or Perseus (freqs_pipeline_*.py)", "is_path": True}
    )
    profile: str = field(default="", metadata={"help": "profile CSV to plan from before serving", "is_path": True})
    online: bool = field(default=False, metadata={"help": "let jobs scan their clocks while they train, then plan"})
    num_microbatches: Optional[int] = field(  # noqa: UP045 (OmegaConf reads the annotation)
        default=None, metadata={"help": "microbatches per iteration, for profile and online"}
    )
    schedule: str = field(default="1f1b", metadata={"help": "order of instructions, for profile and online"})
    select: str = field(default="no_slowdown", metadata={"help": f"plan to train under: {FORMS}"})
    profiler: str = field(
        default="scan", metadata={"help": "with online: scan (all clocks, from the highest down) or adaptive (a few)"}
    )
    clock_step_mhz: int = field(default=30, metadata={"help": "with online: measured clocks are so far apart at least"})
    verify_pairs: int = field(
        default=6,
        metadata={"help": "with online: windows at the top clocks and under the plan, each so often; 0: none"},
    )
    tolerance: float = field(
        default=0.005,
        metadata={"help": "with online: a plan that is later than promised by more makes way for a faster"},
    )
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen at; 0.0.0.0 for all machines"})
    port: int = field(default=7787, metadata={"help": "port to listen at; 0 for any that is free"})
    state: str = field(
        default="", metadata={"help": "file that keeps jobs over restarts (default: one per port)", "is_path": True}
    )
    token_file: str = field(
        default="", metadata={"help": "file with a secret that every request must have", "is_path": True}
    )
    certfile: str = field(default="", metadata={"help": "PEM certificate, for https", "is_path": True})
    keyfile: str = field(default="", metadata={"help": "its key, if in another file", "is_path": True})
    dump_dir: str = field(
        default="", metadata={"help": "folder for files as Zeus's server dumps them; none writes none", "is_path": True}
    )
    wait_s: float = field(
        default=600.0,
        metadata={"help": "a rank waits so long for the others of its job, then it is told who is missing"},
    )
    idle_s: float = field(
        default=604_800.0, metadata={"help": "a job is over when nothing was heard of it for so long"}
    )
    silence_s: float = field(
        default=3_600.0, metadata={"help": "the same for jobs whose ranks speak at each step, as ours do"}
    )
    max_body_bytes: int = field(default=8_000_000, metadata={"help": "larger requests are refused"})
    max_jobs: int = field(default=1_000, metadata={"help": "jobs at a time"})
    log_level: str = field(default="INFO", metadata={"help": ", ".join(_LEVELS)})

    def check(self) -> None:
        """Check what can be checked before anything is read.

        Raises:
            ConfigurationError: If a value is out of range, or it is not said where plans come from.
        """
        super().check()
        given = [name for name in _SOURCES if getattr(self, name)]
        if len(given) != 1:
            raise ConfigurationError(
                f"Plans come from one of frontier=DIR, solution_path=FILE, profile=CSV and online=true; got "
                f"{listed(given) or 'none'}. Give one of them."
            )
        if (self.profile or self.online) and self.num_microbatches is None:
            raise ConfigurationError(f"With {given[0]}, give num_microbatches, e.g. num_microbatches=8.")
        check_selection(self.select)
        check_whole("port", self.port, 0, 65_535)
        check_whole("clock_step_mhz", self.clock_step_mhz, 1, 100_000)
        if self.profiler not in _PROFILERS:
            raise ConfigurationError(f"profiler is one of {listed(_PROFILERS)}; got {self.profiler!r}.")
        check_whole("verify_pairs", self.verify_pairs, 0, 40)
        check_between("tolerance", self.tolerance, 0.0, 1.0)
        check_whole("max_body_bytes", self.max_body_bytes, 1_000, 1_000_000_000)
        check_whole("max_jobs", self.max_jobs, 1, 100_000)
        check_between("wait_s", self.wait_s, 0.01, 86_400.0)
        check_between("idle_s", self.idle_s, 1.0)
        check_between("silence_s", self.silence_s, 1.0)
        if self.log_level.upper() not in _LEVELS:
            raise ConfigurationError(f"log_level is one of {listed(_LEVELS)}; got {self.log_level!r}.")
        if self.dump_dir:
            check_can_write("dump_dir", self.dump_dir, is_folder=True)
        if self.keyfile and not self.certfile:
            raise ConfigurationError("keyfile belongs to a certificate; got no certfile. Give certfile=CERT.pem too.")
        for name in ("certfile", "keyfile", "token_file"):
            path = getattr(self, name)
            if path and not os.access(path, os.R_OK):
                raise ConfigurationError(f"{name} is a file that can be read; got {path!r}. Give another path.")

    @property
    def state_path(self) -> Path | str:
        """The file that keeps jobs."""
        if self.state:
            return self.state if self.state == ":memory:" else Path(self.state)
        base = os.environ.get("XDG_STATE_HOME", "")
        folder = Path(base if os.path.isabs(base) else os.path.expanduser("~/.local/state"))  # noqa: PTH111, PTH117
        return folder / "lightning-pfo" / f"server-{self.port}.sqlite"

    def token(self) -> str:
        """The secret of `token_file`; empty if there is none.

        Raises:
            ConfigurationError: If the file has none.
        """
        if not self.token_file:
            return ""
        try:
            token = Path(self.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"token_file is a file of ASCII text; got {self.token_file!r} ({error})."
            ) from None
        if len(token) < 16 or len(token.split()) != 1:
            raise ConfigurationError(
                f"token_file has one word of at least 16 characters; {self.token_file!r} has not. Make one: "
                "python -c 'import secrets; print(secrets.token_urlsafe())' > FILE"
            )
        return token


def settings_from_environment(environment: Mapping[str, str]) -> ServerSettings:
    """Settings for `uvicorn lightning_pfo.server:app`.

    Raises:
        ConfigurationError: If a variable cannot be used.
    """
    zeus = {
        name.removeprefix(ZEUS_PREFIX): value for name, value in environment.items() if name.startswith(ZEUS_PREFIX)
    }
    scheduler = zeus.get("SCHEDULER", "PointSolution")
    if scheduler not in _SCHEDULERS:
        raise ConfigurationError(
            f"{ZEUS_PREFIX}SCHEDULER is one of {listed(_SCHEDULERS)}; got {scheduler!r}."
            f"{did_you_mean(scheduler, _SCHEDULERS)}"
        )
    values: dict[str, Any] = {"online": True} if scheduler == "InstructionProfiler" else {}
    values |= _arguments(zeus.get("SCHEDULER_ARGS", "{}"))
    if "LOG_LEVEL" in zeus:
        values["log_level"] = zeus["LOG_LEVEL"]
    if zeus.get("DUMP_DATA", str("DUMP_DIR" in zeus)).lower() in ("1", "true", "yes", "on"):
        values["dump_dir"] = zeus.get("DUMP_DIR", "./dump")
    if "MAX_JOB_IDLE_TIME" in zeus:
        values["idle_s"] = _number(f"{ZEUS_PREFIX}MAX_JOB_IDLE_TIME", zeus["MAX_JOB_IDLE_TIME"])
    for word in shlex.split(environment.get(VARIABLE, "")):
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigurationError(f"{VARIABLE} has settings key=value; got {word!r}.")
        values[key] = value
    known = {entry.name: entry for entry in fields(ServerSettings)}
    for name in values:
        if name not in known:
            raise ConfigurationError(f"There is no setting {shortened(name)}.{did_you_mean(name, known)}")
    settings = ServerSettings(**{name: _typed(name, value, known[name].type) for name, value in values.items()})
    settings.check()
    return settings


def _arguments(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigurationError(
            f'{ZEUS_PREFIX}SCHEDULER_ARGS is a JSON object such as {{"solution_path": "plan.py"}}; got '
            f"{shortened(text)}."
        )
    return given


def _typed(name: str, value: Any, kind: Any) -> Any:
    """A value of an environment variable as the field's type; what is no text already has its type."""
    if not isinstance(value, str) or kind == "str":
        return value
    if kind == "bool":
        return value.lower() in ("1", "true", "yes", "on")
    try:
        return json.loads(value)
    except ValueError:
        if kind == "Any":
            return value
        raise ConfigurationError(f"{name} is {kind}; got {value!r}.") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} is a number of seconds; got {text!r}.") from None
