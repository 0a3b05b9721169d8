"""Noticing that a rank has died, and telling the others which one.

Every rank holds a connection to the first one, the hub. When a process ends, however it ends, the system closes its
connections at once; when a whole node is lost, TCP's keepalive does within half a minute. The hub tells the others::

    rank 1 --begin--> hub (rank 0)      a run (fit, validate, ...) begins and is done on every rank by itself
    rank 2 --done---> hub
    rank 2 closed     hub --dead 2--> rank 1, rank 3        if it was not done with a run that others are in

A rank that is told breaks off its transfers, so that waiting for others ends with an error; if its run does not end (it
waits elsewhere), the process is ended after a grace period. The same is done when a rank's run has raised and its
process goes on, as soon as the others wait for it in vain. What ranks do together between runs is `calls`.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy.watch.calls import Calls
from lightning_pfo.strategy.watch.connection import CONNECT_TIMEOUT_S, Address, RankConnection, open_server
from lightning_pfo.strategy.watch.errors import RankDiedError, tells_of_others, text_of
from lightning_pfo.strategy.watch.stuck import Waits

_log = logging.getLogger(__name__)
_PATIENCE_S = 10.0  # so long a rank may wait at one place for others of which one has failed, ...
_STUCK_S = 1.0  # ... and so long when transfers were broken off


@dataclass
class _Peer:
    """What a rank knows of another one: the hub of all, the others of the hub."""

    name: str
    completed: int = 0
    calls: int = 0
    error: str = ""
    explained: bool = False
    gone: bool = False

    def ending(self) -> str:
        return f"{self.name} failed with {self.error}" if self.error else f"{self.name} died (its process has ended)"


class RankWatch:
    """Watches the other ranks of a run, from a thread of its own.

    Args:
        rank: This process's rank.
        world_size: Number of processes.
        waits: How a process waits for others; broken off in another thread.
        grace_s: How long a run may take to end after a rank has died, before this process is ended.
    """

    def __init__(self, rank: int, world_size: int, waits: Waits, grace_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._waits = waits
        self._grace_s = grace_s
        self._run = 0
        self._active = False
        self._death: str | None = None
        self._death_error = ""
        self._failures: dict[str, str] = {}  # of other ranks in the present run: their errors, and what is said of them
        self._failures_ahead: list[tuple[dict[str, Any], str]] = []  # in runs that this rank has not come to
        self._failed: set[int] = set()  # other ranks, in the present run
        self._left: dict[int, int] = {}  # the last run that each other rank has left, done or failed
        self._has_raised = False
        self._told_before: list[tuple[int | None, dict[str, Any]]] = []  # by the hub, while ranks were not connected
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, RankConnection] = {}
        self._server: socket.socket | None = None
        self._token = ""
        self._peers: dict[int, _Peer] = {}
        self._started = 0
        self._calls = Calls(
            self._changed,
            lambda: self._death,
            lambda text: self._declare(text, "", is_news=True),
            self._end_process,
            grace_s,
        )
        self._expected_to_end = 0

    # ---- connecting ----

    def listen(self, host: str, *, local_only: bool) -> Address:
        """Become the hub (rank 0); returns where the others connect."""
        self._server = open_server(local_only=local_only)
        self._token = secrets.token_hex(16)
        self._peers = {rank: _Peer(f"rank {rank}") for rank in range(1, self._world_size)}
        self._selector.register(self._server, selectors.EVENT_READ)
        self._start_thread()
        return Address("127.0.0.1" if local_only else host, self._server.getsockname()[1], self._token)

    def connect(self, address: Address) -> None:
        """Join the hub; without it this rank goes on unwatched, with a warning."""
        try:
            connected = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S)
        except OSError as error:
            _log.warning(
                "Rank %d cannot reach rank 0 at %s:%d (%s): if a process dies, others may notice only by the timeout.",
                self._rank,
                address.host,
                address.port,
                error,
            )
            return
        connected.settimeout(None)
        self._peers = {0: _Peer("rank 0")}
        connection = self._add(connected, rank=0)
        connection.send(token=address.token, rank=self._rank, host=socket.gethostname(), pid=os.getpid())
        self._start_thread()

    def _start_thread(self) -> None:
        threading.Thread(target=self._watch, name="pfo-rank-watch", daemon=True).start()

    def _add(self, connected: socket.socket, rank: int | None) -> RankConnection:
        connection = RankConnection(connected, rank)
        self._selector.register(connected, selectors.EVENT_READ, connection)
        if rank is not None:
            self._connections[rank] = connection
        return connection

    def close_in_child(self) -> None:
        """For forked children (data loaders): a copy of the connection would hide the end of this process."""
        for connection in self._connections.values():
            connection.socket.close()
        self._connections.clear()
        if self._server is not None:
            self._server.close()

    # ---- runs of this rank ----

    def begin(self) -> None:
        """Say that a run begins; after one that this rank has not come to the end of, when others have left it, too.

        They may still wait there for this rank, and would take what it does next for that.

        Raises:
            RankDiedError: If a rank is gone by now.
        """
        with self._changed:
            if self._has_raised and self._connections:
                others, most_s = set(range(self._world_size)) - {self._rank}, _PATIENCE_S + 2 * self._grace_s
                self._changed.wait_for(lambda: self._death or self._have_left(others), most_s)
            self._has_raised = False
            self._run += 1
            self._active = True
            self._failures.clear()
            self._failed.clear()
            self._started = max(self._started, self._run)
            self._tell(event="begin", run=self._run)
            ahead, self._failures_ahead = self._failures_ahead, []
            for failure in ahead:
                self._note_failure(*failure)
            self._judge()
            if self._death is not None:
                raise RankDiedError(self._death)

    def done(self) -> None:
        """Say that the run has ended well."""
        with self._changed:
            if self._active:
                self._tell(event="done", run=self._run)
                self._leave()

    def failed(self, error: BaseException, wait_s: float = 0.0) -> str | None:
        """Say that the run has raised, so that the others do not wait for this rank.

        Args:
            error: What it has raised; where others have raised the same, it is its own.
            wait_s: How long to wait for the news that another rank has died or failed.

        Returns:
            Which rank that is, so that this one has raised an error; None if none has.
        """
        text, is_of_others = text_of(error), tells_of_others(error)
        with self._changed:
            if not self._active:
                return None
            self._has_raised = True
            explained = isinstance(error, PfoError) or is_of_others
            self._tell(event="failed", rank=self._rank, run=self._run, error=text, explained=explained)
            has_news = self._connections and not isinstance(error, PfoError)
            self._changed.wait_for(lambda: self._death is not None or self._failures, wait_s if has_news else 0.0)
            cause = next(iter(self._failures.values()), self._death)
            if not is_of_others and text in (self._death_error, *self._failures):
                cause = None
            if cause is not None and self._death is None:  # else that has been told
                _log.error("Rank %d: %s", self._rank, cause)
            self._leave()
            return cause

    def have_all_failed(self, wait_s: float) -> bool:
        """Whether all other ranks have failed in this run too, so that all can still do something together.

        Args:
            wait_s: How long to wait for them.
        """
        with self._changed:
            if not self._connections:  # nobody hears of others
                return True
            others = self._world_size - 1
            self._changed.wait_for(lambda: self._death is not None or len(self._failed) == others, wait_s)
            return self._death is None and len(self._failed) == others

    def _have_left(self, ranks: Iterable[int]) -> bool:
        return all(self._left.get(rank, 0) >= self._run for rank in ranks)

    def _leave(self) -> None:
        self._active = False
        self._changed.notify_all()

    def _tell(self, source: int | None = None, **message: Any) -> None:
        """Send to all that are connected, but not to where it comes from."""
        with self._changed:
            if self._rank == 0 and len(self._connections) < self._world_size - 1:
                self._told_before.append((source, message))
            for rank, connection in self._connections.items():
                if rank != source:
                    connection.send(**message)

    def death(self, wait_s: float = 0.0) -> str | None:
        """Which rank has died in the present run, waiting a moment for the news; None if none."""
        with self._changed:
            self._changed.wait_for(lambda: self._death is not None, wait_s if self._connections else 0.0)
            return self._death

    # ---- calls outside runs ----

    @property
    def is_active(self) -> bool:
        """Whether a run is under way, or a call outside runs."""
        return self._active or self._calls.under_way

    @contextmanager
    def call(self) -> Iterator[None]:
        """While the context is open, do outside runs what all ranks do together.

        Raises:
            RankDiedError: If it cannot come to an end because a rank has ended.
        """
        with self._calls.call():
            yield
        self._tell(event="called", calls=self._calls.completed)

    def first_end(self) -> str | None:
        """What is said of the first other rank that has ended, after a moment for the news; None if none has."""
        return self._calls.first_end() if self._connections else None

    def end(self, error: BaseException | None) -> None:
        """Say that the script of this rank is at its end: it tells others nothing more, though its process is there."""
        text = "" if error is None else text_of(error)
        self._tell(event="ended", name=f"rank {self._rank}", error=text, calls=self._calls.completed)

    def _note_end(self, rank: int, peer: _Peer, error: str = "") -> None:
        self._calls.note_end(peer.name, error, peer.calls)
        if self._rank == 0:
            self._tell(rank, event="ended", name=peer.name, error=error, calls=peer.calls)

    # ---- the watching thread ----

    def _watch(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    assert self._server is not None
                    self._add(self._server.accept()[0], rank=None)
                else:
                    self._read(key.data)

    def _read(self, connection: RankConnection) -> None:
        try:
            messages = connection.receive()
        except ValueError:  # not one of us
            messages = None
        with self._changed:
            for message in messages or []:
                if connection.rank is None:
                    if message.get("token") != self._token:
                        messages = None
                        break
                    self._welcome(connection, message)
                else:
                    self._take(connection.rank, message)
            if messages is None:
                self._selector.unregister(connection.socket)
                connection.socket.close()
                if connection.rank is not None:
                    peer = self._peers[connection.rank]
                    peer.gone = True
                    self._judge()
                    self._note_end(connection.rank, peer)

    def _welcome(self, connection: RankConnection, greeting: dict[str, Any]) -> None:
        rank = connection.rank = greeting["rank"]
        self._connections[rank] = connection
        self._peers[rank].name = f"rank {rank} (pid {greeting['pid']} on {greeting['host']})"
        for source, message in self._told_before:
            if source != rank:
                connection.send(**message)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        peer, event = self._peers[rank], message["event"]
        if event == "begin":
            self._started = max(self._started, message["run"])
            peer.error, peer.explained = "", False
            self._judge()
        elif event == "done":
            peer.completed = message["run"]
            self._note_left(rank, message["run"])
            if self._rank == 0:
                self._tell(rank, event="done elsewhere", rank=rank, run=message["run"])
        elif event == "done elsewhere":
            self._note_left(message["rank"], message["run"])
        elif event == "failed":
            peer.error, peer.explained = message["error"], message["explained"]
            self._note_failure(message, peer.ending())
            if self._rank == 0:
                self._tell(rank, **message | {"event": "failed elsewhere", "text": peer.ending()})
        elif event == "failed elsewhere":
            self._note_failure(message, message["text"])
        elif event == "dead":
            self._declare(message["text"], message["error"], is_news=message["is_news"])
        elif event == "called":
            peer.calls = message["calls"]
        elif event == "ended" and self._rank == 0:
            self._note_end(rank, peer, message["error"])
        elif event == "ended":
            self._calls.note_end(message["name"], message["error"], message["calls"])

    def _note_left(self, rank: int, run: int) -> None:
        self._left[rank] = max(run, self._left.get(rank, 0))
        self._changed.notify_all()

    def _note_failure(self, message: dict[str, Any], text: str) -> None:
        self._note_left(message["rank"], message["run"])
        if message["run"] > self._run:
            self._failures_ahead.append((message, text))
            return
        said = f"{text}. The run cannot go on without it."
        if message["run"] == self._run:
            self._failed.add(message["rank"])
            if not message["explained"]:
                self._failures.setdefault(message["error"], said)
            self._changed.notify_all()
        self._expect_end(message["run"], said, message["error"])

    def _judge(self) -> None:
        """Declare ranks dead that are gone although they are needed."""
        for rank, peer in self._peers.items():
            if peer.gone and peer.completed < self._started:
                # where one has failed, others may end because of it
                first = next((other for other in self._peers.values() if other.error), peer)
                text = f"{first.ending()}. The run cannot go on without it."
                if self._rank == 0:
                    self._tell(rank, event="dead", text=text, error=first.error, is_news=not first.explained)
                self._declare(text, first.error, is_news=not first.explained)

    def _declare(self, text: str, error: str, *, is_news: bool) -> None:
        if self._death is None:
            self._death, self._death_error = text, error
            self._changed.notify_all()
            if self.is_active:
                # a mistake of the user's is said where it was found, and most are found by all ranks
                _log.log(logging.ERROR if is_news else logging.INFO, "Rank %d: %s", self._rank, text)
                self._expect_end(self._run, text)
                self._waits.stop()  # if they do not end by that, the grace period ends what still waits

    def _expect_end(self, run: int, text: str, failed_with: str | None = None) -> None:
        """End this process if the run does not end by itself; sooner if it waits for others, of which one has failed.

        Of gloo's transfers none is broken off here, they end with the process on the other side.
        """
        if not self._active or self._run != run or self._expected_to_end == run:
            return
        self._expected_to_end = run

        def is_over(wait_s: float) -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: self._run != run or not self._active, wait_s)

        def is_over_by_breaking_off() -> bool:
            is_in_vain = bool(self._waits.stuck_at(is_over, _PATIENCE_S, self._grace_s))
            with self._changed:
                if is_in_vain and not is_over(0):
                    self._declare(text, failed_with or "", is_news=True)
            return is_in_vain and not self._waits.stuck_at(is_over, _STUCK_S, 2 * _STUCK_S) and is_over(self._grace_s)

        def wait() -> None:
            is_ended = is_over(self._grace_s) if failed_with is None else is_over_by_breaking_off()
            with self._changed:
                if not (is_ended or is_over(0)):
                    self._end_process(text)

        threading.Thread(target=wait, name="pfo-rank-watch-grace", daemon=True).start()

    def _end_process(self, text: str) -> None:
        _log.critical("Rank %d is ended, because %s", self._rank, text)
        logging.shutdown()
        os._exit(1)
