"""The command line: `lightning-pfo COMMAND key=value ...` (also `python -m lightning_pfo COMMAND ...`).

A command is a module of this folder with a dataclass `Settings` and a function `run(settings) -> None`; the first line
of its docstring is its line in `--help`. It is imported only when it is called, and this module imports next to
nothing, so that the command line starts quickly, and `main` meets Ctrl-C during imports. Read this module, `settings`
(how arguments are read), `console` (how results are shown), then any command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.core.wording import LONGEST_MESSAGE, cut, did_you_mean

COMMANDS = {
    "plan": "lightning_pfo.cli.plan",
    "compare": "lightning_pfo.cli.compare",
    "sample": "lightning_pfo.cli.sample",
    "serve": "lightning_pfo.cli.serve",
    "gpu": "lightning_pfo.cli.gpu",
    "p2p-power": "lightning_pfo.cli.p2p_power",
    "restore-clocks": "lightning_pfo.cli.restore_clocks",
    "report": "lightning_pfo.cli.report",
    "demo": "lightning_pfo.cli.demo",
}
"""Commands by name: the module that implements each."""

_HELP_FLAGS = ("-h", "--help", "help")
_VERSION_FLAGS = ("--version", "version")
_INTERRUPTED, _READER_LEFT = 130, 141
"""What shells report for a program that SIGINT or SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    0; 2 after an error that the user can correct; 130 after Ctrl-C; 141 if whoever read the output has left, such as
    `head`.
    """
    try:
        _prepare_output()
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # what cannot be written is met here rather than by the interpreter on its way out
    except PfoError as error:
        return _explain(str(error))
    except BrokenPipeError:
        _discard_output()
        return _READER_LEFT
    except OSError as error:
        _discard_output()
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _explain(f"Files are read and written where this user may; {reason}. Give another path.")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return _INTERRUPTED
    return status


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in _HELP_FLAGS:
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] in _VERSION_FLAGS:
        from lightning_pfo import __version__

        print(f"lightning-pfo {__version__}")
        return 0
    name, overrides = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise ConfigurationError(
            f"Unknown command {name!r}.{did_you_mean(name, COMMANDS)} Commands: {', '.join(COMMANDS)}."
        )

    import importlib
    import logging

    from lightning_pfo.cli.settings import read_settings, usage, without_dashes

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    command = importlib.import_module(COMMANDS[name])
    if any(flag in overrides for flag in _HELP_FLAGS):
        print(usage(name, command))
    else:
        first = getattr(command, "FIRST", None)  # the setting that may be given without its name
        if first is not None and overrides and "=" not in overrides[0] and not overrides[0].startswith("-"):
            overrides = [f"{first}={overrides[0]}", *overrides[1:]]
        command.run(read_settings(command.Settings, without_dashes(overrides)))
    return 0


def _overview() -> str:
    lines = ["usage: lightning-pfo COMMAND key=value ...", "", "commands:"]
    lines += [f"  {name:<14} {_summary(module)}" for name, module in COMMANDS.items()]
    return "\n".join([*lines, "", "`lightning-pfo COMMAND --help` lists the settings of a command."])


def _summary(module: str) -> str:
    """The first line of a module's docstring, read from its source: importing all commands takes seconds."""
    import ast
    from importlib.abc import InspectLoader
    from importlib.util import find_spec

    loader = getattr(find_spec(module), "loader", None)
    source = loader.get_source(module) if isinstance(loader, InspectLoader) else None
    return (ast.get_docstring(ast.parse(source or "")) or "").partition("\n")[0]


def _explain(problem: str) -> int:
    print(f"lightning-pfo: error: {cut(problem, LONGEST_MESSAGE)}", file=sys.stderr)
    return 2


def _prepare_output() -> None:
    """Let names that the terminal's encoding does not have be shown as escapes."""
    if hasattr(sys.stdout, "reconfigure"):  # notebooks and tests put something simpler in its place
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Let what is still to be written to stdout, which failed, go nowhere: the interpreter would try and fail again."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file
        return
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
