"""What the optimizer has measured, kept: in a file, in checkpoints, for the next run of the same job.

A fingerprint says what measurements are of. They are used again where it is the same; where it is not, what differs is
named, and measuring starts anew.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.files import PatientFiles, write_text_atomically
from lightning_pfo.core.wording import counted, cut
from lightning_pfo.listeners.profile_row import ProfileRow

VERSION = 1
FILE_NAME = "optimizer.json"

_TEXTS = {"instruction", "flags", "switch_latency", "gpu"}
_WHOLE = {"stage", "frequency", "samples", "dp_rank", "tp_rank"}


@dataclass(frozen=True)
class Memory:
    """What is kept.

    Attributes:
        fingerprint: What was measured: names and values.
        rows: The measurements, each once: one for each stage, instruction, clock and GPU.
        latencies_s: Latencies of clock changes, by the clock before and after: `[before, after, [s, ...]]`.
        is_complete: Whether enough is measured.
        iterations: Iterations that measuring took.
        cost_j: Energy that they took beyond that of as many iterations at the top clocks.
        cost_s: Time likewise.
    """

    fingerprint: Mapping[str, str]
    rows: tuple[ProfileRow, ...] = ()
    latencies_s: tuple[tuple[int, int, tuple[float, ...]], ...] = ()
    is_complete: bool = False
    iterations: int = 0
    cost_j: float = 0.0
    cost_s: float = 0.0

    def __str__(self) -> str:
        clocks = len({row.frequency for row in self.rows})
        return f"{counted(self.iterations, 'iteration')} and {counted(clocks, 'clock')}"

    def with_rows(self, rows: Sequence[ProfileRow]) -> Memory:
        """The same with measurements; those of before of the same clock, instruction and GPU are replaced."""
        by_place = {_place(row): row for row in (*self.rows, *rows)}
        return replace(self, rows=tuple(by_place.values()))

    def without_stages(self, stages: Sequence[int]) -> Memory:
        """The same without what was measured of some stages."""
        return replace(self, rows=tuple(row for row in self.rows if row.stage not in stages), is_complete=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not known is None."""
        rows = [
            {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
            for row in map(asdict, self.rows)
        ]
        return {"version": VERSION, **asdict(replace(self, rows=())), "rows": rows}

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_text_atomically(path, json.dumps(self.as_dict()) + "\n")


def _place(row: ProfileRow) -> tuple[Any, ...]:
    return row.stage, row.instruction, row.frequency, row.dp_rank, row.tp_rank


def load_memory(path: Path) -> Memory:
    """Read what was kept.

    Raises:
        ConfigurationError: If the file is none of ours, or damaged.
    """
    try:
        return memory_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"The optimizer's state in {path} cannot be read ({cut(str(error))}). Remove the file to measure anew."
        ) from error


def memory_of(state: object) -> Memory:
    """Take a `Memory.as_dict` back.

    Raises:
        ConfigurationError: If it is none.
    """
    if not isinstance(state, dict) or state.get("version") != VERSION:
        version = state.get("version") if isinstance(state, dict) else None
        raise ConfigurationError(f"The optimizer's state has version {VERSION}; got version {version!r}.")
    try:
        return Memory(
            fingerprint={str(name): str(value) for name, value in state["fingerprint"].items()},
            rows=tuple(_row_of(row) for row in state["rows"]),
            latencies_s=tuple(
                (int(before), int(after), tuple(map(float, some))) for before, after, some in state["latencies_s"]
            ),
            is_complete=state["is_complete"] is True,
            iterations=int(state["iterations"]),
            cost_j=float(state["cost_j"]),
            cost_s=float(state["cost_s"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"The optimizer's state is damaged ({type(error).__name__}: {cut(str(error))})."
        ) from error


def _row_of(values: Mapping[str, Any]) -> ProfileRow:
    known: dict[str, Any] = {}
    for field in fields(ProfileRow):
        value = values[field.name]
        if field.name in _TEXTS:
            known[field.name] = str(value)
        elif field.name in _WHOLE:
            known[field.name] = int(value)
        elif field.name == "transfer_time":
            known[field.name] = None if value is None else float(value)
        else:
            known[field.name] = math.nan if value is None else float(value)
    return ProfileRow(**known)


def differences(kept: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """How two fingerprints differ, in words."""
    names = sorted(set(kept) | set(now))
    return [
        f"{name} was {cut(kept.get(name, 'not known'))} and is {cut(now.get(name, 'not known'))}"
        for name in names
        if kept.get(name) != now.get(name)
    ]


def _place_in(cache_dir: Path, fingerprint: Mapping[str, str]) -> Path:
    """The folder of a cache that belongs to a fingerprint."""
    text = json.dumps(dict(sorted(fingerprint.items())))
    return cache_dir / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class Keeper:
    """Where a run keeps what it has measured, and finds what an earlier one has; the first rank's business.

    Args:
        output_dir: Where results are.
        cache_dir: Where further runs of the same job look too, if anywhere.
        given: `Memory.as_dict` of a checkpoint, if there is one.

    Attributes:
        files: Writes what is kept.
    """

    def __init__(self, output_dir: Path, cache_dir: Path | None, given: Mapping[str, Any] | None) -> None:
        self._output_dir, self._cache_dir, self._given = output_dir, cache_dir, given
        self.files = PatientFiles()

    def _folders(self, fingerprint: Mapping[str, str]) -> list[Path]:
        cached = [] if self._cache_dir is None else [_place_in(self._cache_dir, fingerprint)]
        return [*cached, self._output_dir]

    def save(self, memory: Memory) -> None:
        """Write it everywhere."""
        for folder in self._folders(memory.fingerprint):
            self.files.write(folder / FILE_NAME, partial(memory.save, folder / FILE_NAME))

    def recall(self, fingerprint: Mapping[str, str]) -> tuple[Memory | None, str | None]:
        """The most that was kept of a pipeline; or None, and why not if there was something."""
        loads: list[Callable[[], Memory]] = [] if not self._given else [partial(memory_of, self._given)]
        paths = [folder / FILE_NAME for folder in self._folders(fingerprint)]
        loads += [partial(load_memory, path) for path in paths if path.exists()]
        best: Memory | None = None
        refusal: str | None = None
        for load in loads:
            try:
                kept = load()
            except ConfigurationError as error:
                refusal = str(error)
                continue
            different = differences(kept.fingerprint, fingerprint)
            if different:
                refusal = f"what an earlier run has measured is not used, as {'; '.join(different)}."
            elif best is None or (kept.is_complete, len(kept.rows)) > (best.is_complete, len(best.rows)):
                best = kept
        return best, None if best is not None else refusal
