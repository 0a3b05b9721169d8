"""Forked processes that work together: none outlives the others' failure for long, nor the time limit."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lightning_pfo.core.errors import PfoError
from tests.ranks import run_rank

_GRACE_S = 5.0
"""How long the others may go on after one has failed: what they say may be more telling."""


@dataclass(frozen=True)
class Failure:
    """How a process failed.

    Attributes:
        kind: `refused` (an error of this package), `crashed` (another one), `ended` (without a word) or `too slow`.
        message: What it says.
        details: The traceback.
    """

    kind: str
    message: str
    details: str = ""

    @property
    def order(self) -> int:
        """Smaller for what explains more: when one rank fails, others lose the connection to it."""
        lost = any(word in self.message.lower() for word in ("connection", "peer", "other rank", "timed out"))
        return ("refused", "crashed", "ended", "too slow").index(self.kind) + (lost and self.kind == "crashed")


def run_together(function: Callable[..., Any], num_ranks: int, limit_s: float, *arguments: Any) -> list[Any] | Failure:
    """Call `function(*arguments)` on `num_ranks` forks of this process that have a process group (a single one: none).

    Returns:
        What each rank returned, or the failure that explains most.
    """
    context = get_context("fork")
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        receivers, processes = {}, []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            arguments_of_rank = (sender, rank, num_ranks, folder, function, arguments)
            processes.append(context.Process(target=_report, args=arguments_of_rank, daemon=False))
            processes[-1].start()
            sender.close()
            receivers[receiver] = rank
        try:
            _collect(receivers, results, limit_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [result for result in results.values() if isinstance(result, Failure)]
    if failures:
        return min(failures, key=lambda failure: failure.order)
    return [results[rank] for rank in range(num_ranks)]


def _collect(receivers: dict[Connection, int], results: dict[int, Any], limit_s: float) -> None:
    """Wait for all ranks, after a failure only a little longer."""
    deadline_s = time.monotonic() + limit_s
    while receivers:
        ready = wait([*receivers], max(0.0, deadline_s - time.monotonic()))
        for receiver in ready:
            rank = receivers.pop(receiver)  # type: ignore[arg-type]
            try:
                results[rank] = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                results[rank] = Failure("ended", f"rank {rank} ended without a word")
            if isinstance(results[rank], Failure):
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        if not ready:
            results |= {rank: Failure("too slow", f"not done after {limit_s:g} s") for rank in receivers.values()}
            return


def _report(
    sender: Connection, rank: int, num_ranks: int, folder: str, function: Callable[..., Any], arguments: Any
) -> None:
    """What a fork does: run, tell the result, and end without the exit handlers of the process it is a fork of."""
    with Path(folder, f"output_{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    result: list[Any] = []
    try:
        run_rank(rank, num_ranks, f"file://{folder}/store", lambda: result.append(function(*arguments)), ())
        told = result[0]
    except BaseException as error:  # SystemExit too: a rank that has ended must be told
        told = Failure(*_described(error), traceback.format_exc())
    sender.send(told)
    sys.stdout.flush()
    os._exit(0)


def _described(error: BaseException) -> tuple[str, str]:
    """Its kind and message; an error of this package may tell of one that is not, which is no refusal."""
    if not isinstance(error, PfoError):
        return "crashed", f"{type(error).__name__}: {error}"
    first, *rest = str(error).split("Traceback (most recent call last)")
    message = first + rest[-1].strip().splitlines()[-1] if rest else first
    named = set(re.findall(r"\b(\w+Error): ", message))
    return "crashed" if rest or named - {"ConfigurationError", "BatchError"} else "refused", message
