"""Serve plans to any framework, by the protocol of Zeus's pipeline frequency optimizer.

Listens at 127.0.0.1 only unless host=... says otherwise; docs/server.md has the protocol. Needs the extra `server`:
pip install 'lightning-pfo[server]'. Examples:

  lightning-pfo serve frontier=plans
  lightning-pfo serve solution_path=plans/freqs_pipeline_00031.py
  lightning-pfo serve profile=profile.csv num_microbatches=12 p2p_blocking_power_w=85 host=0.0.0.0 token_file=secret.txt
  lightning-pfo serve online=true num_microbatches=12 profiler=adaptive
"""

from __future__ import annotations

import logging

from lightning_pfo.cli.console import plain_console
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.server.settings import ServerSettings as Settings

__all__ = ["Settings", "run"]


def run(settings: Settings) -> None:
    """Serve until Ctrl-C or a signal.

    Raises:
        PfoError: If a setting cannot be used, or what is served cannot be read.
    """
    settings.check()
    logging.getLogger("lightning_pfo").setLevel(settings.log_level.upper())
    try:
        from lightning_pfo.server.web.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"Serving needs FastAPI and uvicorn; {error.name} is not installed: pip install 'lightning-pfo[server]'."
        ) from error
    console = plain_console(stderr=True)
    serve(settings, lambda address: console.print(f"serving {_what(settings)} at {address}; Ctrl-C ends it"))


def _what(settings: Settings) -> str:
    source = settings.frontier or settings.solution_path or settings.profile
    return source or "scans of jobs while they train"
