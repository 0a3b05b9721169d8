"""HTTP to the server, by the standard library."""

from __future__ import annotations

import base64
import http.client
import io
import json
import math
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.core.wording import cut, shortened

_MOST_BYTES, _SHOWN_BYTES = 64_000_000, 200
_AGAIN_LATER = (408, 429, 500, 502, 503, 504)


class ServerAwayError(PfoError):
    """The server does not answer, or not now; it may later."""


class ServerRefusalError(PfoError):
    """The server answers that it will not."""


@dataclass(frozen=True)
class Answer:
    """What the server says.

    Attributes:
        status: 200 or 204.
        headers: By name in lower case.
        content: The JSON; None where there is none.
    """

    status: int
    headers: Mapping[str, str]
    content: Any


class ServerLink:
    """Asks one server.

    Args:
        url: Such as `http://127.0.0.1:7787`; `http://any:TOKEN@host:7787` has the token in it.
        token_file: File with the server's token; None for none.
        cafile: Certificates to trust for https; None for the system's.

    Raises:
        ConfigurationError: If the URL or a file cannot be used.
    """

    def __init__(self, url: str, *, token_file: str | None = None, cafile: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigurationError(f"server_url cannot be read: {shortened(url)} ({error}).") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"server_url is like http://127.0.0.1:7787; got {shortened(url)}.")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self._base = f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path.rstrip('/')}"
        self._headers = {"Content-Type": "application/json"}
        try:
            token = Path(token_file).read_text(encoding="ascii").strip() if token_file else ""
            context = ssl.create_default_context(cafile=cafile) if parts.scheme == "https" else None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"token_file and cafile are files that can be read ({error}).") from None
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        elif parts.password:
            secret = base64.b64encode(f"{parts.username}:{parts.password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {secret}"
        handler = _Handler() if context is None else _SecureHandler(context)
        self._opener = urllib.request.build_opener(_NoRedirects(), handler)

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Answer:
        """Send JSON."""
        return self._ask("POST", path, json.dumps(body).encode(), timeout_s)

    def get(self, path: str, query: Mapping[str, Any], *, timeout_s: float) -> Answer:
        """Ask for JSON.

        Args:
            path: Of what is asked.
            query: Its parameters.
            timeout_s: For connecting, and again for the whole answer.

        Raises:
            ServerAwayError: If the server does not answer, or not now.
            ServerRefusalError: If it refuses.
        """
        return self._ask("GET", f"{path}?{urlencode(query)}", None, timeout_s)

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Answer:
        request = urllib.request.Request(self._base + path, data=body, headers=self._headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                text = response.read(_MOST_BYTES)
                headers = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, headers, self._read(text) if text else None)
        except urllib.error.HTTPError as error:
            kind = ServerAwayError if error.code in _AGAIN_LATER else ServerRefusalError
            raise kind(f"{self._base} answers {error.code}: {_detail(error)}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerAwayError(f"{self._base} does not answer ({error}).") from None

    def _read(self, text: bytes) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            start = text[:_SHOWN_BYTES].decode(errors="replace")
            raise ServerAwayError(
                f"{self._base} answers what is no JSON: {shortened(start)}. Is it the URL of `lightning-pfo serve`?"
            ) from None


def quoted(job_id: str) -> str:
    """A job's name as part of a path."""
    return quote(job_id, safe="+")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The token is for this server alone."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


class _BytesInTime(io.RawIOBase):
    """What a socket receives until the time is over that it has for each wait otherwise."""

    def __init__(self, received: io.RawIOBase, connected: socket.socket) -> None:
        self._received, self._socket = received, connected
        self._deadline_s = time.monotonic() + (connected.gettimeout() or math.inf)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the whole answer did not come in time")
        if left_s < math.inf:
            self._socket.settimeout(left_s)
        return self._received.readinto(buffer)

    def close(self) -> None:
        self._received.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A server that sends a byte now and then takes no longer than one that sends none."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_BytesInTime(self.fp.detach(), sock))


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _SecureHandler(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._trusted = context

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request, context=self._trusted)


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return cut(str(json.loads(error.read(100_000))["detail"]), 1_000)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
        return cut(str(error.reason))
