"""From settings to a running server."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

import uvicorn

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.server.build import make_registry
from lightning_pfo.server.settings import ServerSettings, settings_from_environment
from lightning_pfo.server.web.app import make_app
from lightning_pfo.server.web.guard import Guard
from lightning_pfo.server.web.service import Service

_GRACE_S = 1
"""So long an answer that is being sent may take after the server was told to end."""
_BACKLOG = 4_096
_SWEEPS = 4
"""How often in the shortest silence jobs are looked at."""


def app_of(settings: ServerSettings) -> Guard:
    """The application.

    Raises:
        PfoError: If a file or a setting cannot be used.
    """
    settings.check()
    token = settings.token()
    service = Service(
        make_registry(settings),
        wait_s=settings.wait_s,
        sweep_s=min(60.0, min(settings.silence_s, settings.idle_s) / _SWEEPS),
    )
    return make_app(service, token=token, max_body_bytes=settings.max_body_bytes)


def app_from_environment() -> Guard:
    """The application for `uvicorn lightning_pfo.server:app`."""
    try:
        settings = settings_from_environment(os.environ)
        logging.basicConfig(level=settings.log_level.upper())
        return app_of(settings)
    except PfoError as error:
        raise SystemExit(f"lightning-pfo: error: {error}") from None


def serve(settings: ServerSettings, ready: Callable[[str], None]) -> None:
    """Serve until a signal comes.

    Args:
        settings: What to serve, and where.
        ready: Called with the address when requests are answered.

    Raises:
        PfoError: If a file or a setting cannot be used.
    """
    settings.check()
    listener = _listen(settings.host, settings.port)
    with listener:
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            app_of(settings),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=settings.certfile or None,
            ssl_keyfile=settings.keyfile or None,
            server_header=False,
            backlog=_BACKLOG,
        )
        try:
            config.load()
        except OSError as error:  # of which ssl.SSLError is one
            raise ConfigurationError(
                f"certfile is a certificate in PEM form, with its key in it or in keyfile; got {settings.certfile!r} "
                f"({error})."
            ) from error
        ready(f"{'https' if settings.certfile else 'http'}://{_shown(settings.host)}:{port}")
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"A server listens at an address of this machine, at a port that nobody uses; got host={host} port={port} "
            f"({error.strerror}). Use port=0 for one that is free."
        ) from error


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
