"""Connections between the processes of a run, apart from those of torch.distributed: JSON objects over TCP."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from dataclasses import dataclass
from typing import Any

CONNECT_TIMEOUT_S = 20.0
_MAX_MESSAGE_BYTES = 1 << 20
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, probes


@dataclass(frozen=True)
class Address:
    """Where the hub listens, and what a rank says first.

    Attributes:
        host: Name or address of the hub's node.
        port: The hub's port.
        token: Shared by the ranks of a run, so that nobody else can join.
    """

    host: str
    port: int
    token: str


def open_server(*, local_only: bool) -> socket.socket:
    """Listen on a free port, of the loopback interface or of all."""
    if local_only:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class RankConnection:
    """A connected socket that carries one JSON object per line.

    Args:
        connected: The socket. From now on the system notices within half a minute if the other node is lost.
        rank: Who is at the other end; None until that is known.
    """

    def __init__(self, connected: socket.socket, rank: int | None) -> None:
        self.socket = connected
        self.rank = rank
        self._buffer = b""
        self._lock = threading.Lock()
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, **message: Any) -> None:
        """Send, to whoever is still there: that a connection is closed is noticed where it is read."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have arrived; None when the connection is closed.

        Raises:
            ValueError: If what has arrived is no such object.
        """
        try:
            chunk = self.socket.recv(65536)
        except OSError:
            chunk = b""
        if not chunk:
            return None
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if len(self._buffer) > _MAX_MESSAGE_BYTES or not all(isinstance(message, dict) for message in messages):
            raise ValueError("A rank sends JSON objects, one per line.")
        return messages
