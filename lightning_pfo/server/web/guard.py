"""What every request has to pass before anything is read of it: the secret, and the size of its body."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

_BODY_TIMEOUT_S = 30.0


class Guard:
    """An ASGI application around another one.

    The secret comes as `Authorization: Bearer SECRET`, or as the password of `Basic`, so that clients which know no
    tokens can have it in their URL: `http://any:SECRET@host:7787`.

    Args:
        app: The application.
        token: The secret; empty lets everybody in.
        max_body_bytes: Larger bodies are refused.

    Attributes:
        answered: How many requests were answered, by status.
    """

    def __init__(self, app: AsgiApp, *, token: str, max_body_bytes: int) -> None:
        self._app, self._token, self._most_bytes = app, token.encode(), max_body_bytes
        self.answered: Counter[int] = Counter()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket
            await send({"type": "websocket.close", "code": 1003})
            return

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answered[message["status"]] += 1
            await send(message)

        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._token and not self._is_allowed(headers.get(b"authorization", b"")):
            await _refuse(
                counted_send, 401, "Every request has the server's token: Authorization: Bearer TOKEN.",
                (b"www-authenticate", b'Basic realm="lightning-pfo"'),
            )  # fmt: skip
            return
        try:
            body = await asyncio.wait_for(self._read(headers.get(b"content-length", b"0"), receive), _BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            await _refuse(counted_send, 408, f"A request is sent within {_BODY_TIMEOUT_S:.0f} s.")
            return
        except _LeftError:
            return
        if body is None:
            await _refuse(counted_send, 413, f"A request has at most {self._most_bytes:,} bytes.")
            return
        is_read = False

        async def replay() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, counted_send)

    def _is_allowed(self, header: bytes) -> bool:
        kind, _, given = header.partition(b" ")
        if kind.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif kind.lower() != b"bearer":
            return False
        return hmac.compare_digest(given.strip(), self._token)

    async def _read(self, length: bytes, receive: Receive) -> bytes | None:
        """The whole body; None if it is too large."""
        if not length.isdigit() or len(length) > 12 or int(length) > self._most_bytes:
            return None
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _LeftError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(parts)


class _LeftError(Exception):
    """Who sent the request has left."""


async def _refuse(send: Send, status: int, sentence: str, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps({"detail": sentence}).encode()
    length = (b"content-length", str(len(body)).encode())
    content = (b"content-type", b"application/json")
    close = (b"connection", b"close")  # what is left of the body is not read
    await send({"type": "http.response.start", "status": status, "headers": [content, length, close, *headers]})
    await send({"type": "http.response.body", "body": body})
