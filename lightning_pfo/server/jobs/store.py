"""The events of all jobs in an SQLite file: what was accepted is written before it is answered."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_pfo.core.errors import ConfigurationError

_VERSION = 1
IN_MEMORY = ":memory:"
_MOST_GONE = 10_000
"""Jobs that are remembered after they are over, to say so."""


class JobStore:
    """Keeps events in the order they were appended. One server has the file at a time.

    Args:
        path: The file, which is made if there is none; `:memory:` keeps everything in memory.

    Raises:
        ConfigurationError: If the file cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        try:
            if self.path != IN_MEMORY:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            # One thread uses it at a time: the event loop's, or that of a test.
            self._database = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute("BEGIN EXCLUSIVE")
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise ConfigurationError(
                    f"state={self.path} has version {version} of the server's state; this release reads version "
                    f"{_VERSION}. Use another file."
                )
            for table in (
                "events (number INTEGER PRIMARY KEY, job TEXT NOT NULL, event TEXT NOT NULL)",
                "gone (number INTEGER PRIMARY KEY, job TEXT UNIQUE NOT NULL, reason TEXT NOT NULL)",
            ):
                self._database.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            self._database.execute("CREATE INDEX IF NOT EXISTS by_job ON events (job)")
            self._database.execute(f"PRAGMA user_version = {_VERSION}")
            self._database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise ConfigurationError(
                f"state is a file for this server alone, that may be written; got {self.path!r} ({error}). Give "
                "another path, or end the server that uses it."
            ) from error

    def append(self, job_id: str, events: Iterable[dict[str, Any]]) -> None:
        """Write events of a job, all or none."""
        rows = [(job_id, json.dumps(event, separators=(",", ":"))) for event in events]
        self._together(("INSERT INTO events (job, event) VALUES (?, ?)", rows))

    def forget(self, job_id: str, reason: str) -> None:
        """Remove a job; that it was there, and why it is not any more, is remembered."""
        self._together(
            ("DELETE FROM events WHERE job = ?", [(job_id,)]),
            ("INSERT OR REPLACE INTO gone (job, reason) VALUES (?, ?)", [(job_id, reason)]),
            ("DELETE FROM gone WHERE number <= (SELECT max(number) FROM gone) - ?", [(_MOST_GONE,)]),
        )

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """All events, in order, with their jobs."""
        for job_id, text in self._database.execute("SELECT job, event FROM events ORDER BY number"):
            yield job_id, json.loads(text)

    def why_gone(self, job_id: str) -> str | None:
        """Why a job is over; None if nobody remembers it."""
        row = self._database.execute("SELECT reason FROM gone WHERE job = ?", (job_id,)).fetchone()
        return None if row is None else str(row[0])

    def close(self) -> None:
        """Let another server have the file."""
        self._database.close()

    def _together(self, *statements: tuple[str, list[tuple[Any, ...]]]) -> None:
        self._database.execute("BEGIN")
        try:
            for statement, rows in statements:
                self._database.executemany(statement, rows)
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")
