"""Profiles as CSV files.

Contract columns `stage,instruction,frequency,time,energy` (MHz, s and J per microbatch and GPU); further columns are
allowed. Some of them mean something here:

- `p2p_blocking_power_w`: power in watts of the stage's GPU while it waits for a neighbour at that clock;
- `time_stderr`, `energy_stderr`: standard errors of time and energy, which `regularise` weighs points by;
- `gpu`: name of the GPU that was measured; an emulated one says so, and so do tables and pictures;
- `rank` or `dp_rank`, `pp_rank`, `tp_rank`: several GPUs work on one stage. A stage is as slow as its slowest rank,
  and energies add up, so that the energy of a stage is that of all its GPUs.

These are the dialects of Zeus' documentation (the contract columns), of Merak (rank columns), of the Perseus artifact
(rows named `load`, the loading of a batch, have no clock to choose and are skipped) and of Kareus (columns that say how
it partitions, which are ignored; one configuration per clock).
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from lightning_pfo.core.errors import ProfileError
from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.planner.profile.profile import InstructionProfile, Profile

COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
"""The columns every profile has."""

BLOCKING_COLUMN = "p2p_blocking_power_w"
_RANK_COLUMNS = ("rank", "dp_rank", "pp_rank", "tp_rank")
_SKIPPED_INSTRUCTIONS = ("load",)

_log = logging.getLogger(__name__)


def write_profile(path: str | os.PathLike[str], rows: Iterable[Any]) -> None:
    """Write profile rows as CSV, whole or not at all: contract columns first, further columns as they come.

    Args:
        path: File to write.
        rows: Mappings or dataclass instances with at least `COLUMNS`; the instruction may be an `InstructionType`.

    Raises:
        ProfileError: If a row lacks a contract column, or there is no row.
    """
    records: list[dict[str, Any]] = []
    for row in rows:
        record = asdict(row) if is_dataclass(row) and not isinstance(row, type) else dict(row)
        if isinstance(record.get("instruction"), InstructionType):
            record["instruction"] = record["instruction"].profile_name
        missing = [column for column in COLUMNS if column not in record]
        if missing:
            raise ProfileError(f"A profile row needs {', '.join(COLUMNS)}; {record} lacks {', '.join(missing)}.")
        records.append(record)
    if not records:
        raise ProfileError(f"A profile needs at least one row; there is nothing to write to {path}.")
    further = dict.fromkeys(column for record in records for column in record if column not in COLUMNS)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *further], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text_atomically(path, text.getvalue())


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile CSV.

    Raises:
        ProfileError: If the file is missing, empty or not a table; a column is missing; a value is not a number of
            the right range; a clock is measured twice; or a stage or an instruction is missing.
    """
    where = Path(path)
    rows = _read_rows(where)
    measured: dict[tuple[int, InstructionType], dict[int, dict[tuple[str, ...], _Row]]] = {}
    ranks_of_stage: dict[int, set[tuple[str, ...]]] = defaultdict(set)
    for row in rows:
        of_rank = measured.setdefault((row.stage, row.kind), {}).setdefault(row.clock_mhz, {})
        if row.rank in of_rank:
            raise ProfileError(
                f"Each clock is measured once per stage and instruction; {where}, line {row.line} repeats line "
                f"{of_rank[row.rank].line}: stage {row.stage}, {row.kind.profile_name}, {row.clock_mhz} MHz. Merge "
                f"repeated measurements, or tell GPUs of one stage apart by a column {' or '.join(_RANK_COLUMNS)}."
            )
        of_rank[row.rank] = row
        ranks_of_stage[row.stage].add(row.rank)
    _check_complete(where, set(measured))
    num_ranks = {len(ranks) for ranks in ranks_of_stage.values()}
    if len(num_ranks) > 1:
        counts = ", ".join(f"stage {stage}: {len(ranks)}" for stage, ranks in sorted(ranks_of_stage.items()))
        raise ProfileError(f"All stages need the same number of ranks; {where} has {counts}.")
    instructions = {
        key: _merge_ranks(where, key, clocks, ranks_of_stage[key[0]]) for key, clocks in sorted(measured.items())
    }
    return Profile(instructions, num_ranks.pop(), tuple(dict.fromkeys(row.gpu for row in rows if row.gpu)))


@dataclass(frozen=True)
class _Row:
    """A checked line of the file."""

    line: int
    stage: int
    kind: InstructionType
    clock_mhz: int
    time_s: float
    energy_j: float
    blocking_w: float | None
    time_stderr_s: float | None
    energy_stderr_j: float | None
    rank: tuple[str, ...]
    gpu: str


def _read_rows(where: Path) -> list[_Row]:
    try:
        with where.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            lines = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except FileNotFoundError:
        raise ProfileError(
            f"There is no profile at {where}. Write one with EnergyProfilerCallback, or give the path of another."
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProfileError(f"The profile {where} cannot be read as a CSV file: {error}.") from error
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise ProfileError(
            f"A profile has the columns {', '.join(COLUMNS)}; {where} lacks {', '.join(missing)} "
            f"(it has: {', '.join(header) or 'nothing at all'}).{_hint(header)}"
        )
    repeated = sorted({column for column in header if column and header.count(column) > 1})
    if repeated:
        raise ProfileError(f"Each column has a name of its own; {where} has more than one {', '.join(repeated)}.")
    rows = []
    for line, cells in lines:
        if len(cells) != len(header):
            raise ProfileError(
                f"{where}, line {line}: expected {len(header)} cells as in the header, got {len(cells)}."
            )
        record = dict(zip(header, map(str.strip, cells), strict=True))
        if record["instruction"].lower() not in _SKIPPED_INSTRUCTIONS:
            rows.append(_parse_row(where, line, record))
    if not rows:
        raise ProfileError(f"The profile {where} has no measurements. Profile again and let it finish one clock.")
    return rows


def _hint(header: Sequence[str]) -> str:
    if "power limit" not in header:
        return ""
    return " Its points differ by power limit; a plan sets clocks, so profile over clocks."


def _parse_row(where: Path, line: int, record: Mapping[str, str]) -> _Row:
    def number(column: str, rule: str, *, least: float, whole: bool = False, above: bool = False) -> float:
        try:
            value = float(record[column])
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < least or (above and value == least) or (whole and value % 1):
            raise ProfileError(
                f"{where}, line {line}: column {column!r} must be {rule}, got {record[column]!r}. "
                "Correct or remove the row."
            )
        return value

    try:
        kind = InstructionType.from_profile_name(record["instruction"].lower())
    except ValueError as error:
        raise ProfileError(f"{where}, line {line}: {error}") from None

    def optional(column: str, rule: str) -> float | None:
        return number(column, rule, least=0) if record.get(column) else None

    return _Row(
        line=line,
        stage=int(number("stage", "a stage number 0, 1, ...", least=0, whole=True)),
        kind=kind,
        clock_mhz=int(number("frequency", "a clock in whole MHz", least=0, whole=True, above=True)),
        time_s=number("time", "a positive number of seconds", least=0, above=True),
        energy_j=number("energy", "a number of joules, at least 0", least=0),
        blocking_w=optional(BLOCKING_COLUMN, "a power in watts, at least 0"),
        time_stderr_s=optional("time_stderr", "a number of seconds, at least 0"),
        energy_stderr_j=optional("energy_stderr", "a number of joules, at least 0"),
        rank=tuple(record[column] for column in _RANK_COLUMNS if column in record),
        gpu=record.get("gpu", ""),
    )


def _check_complete(where: Path, present: set[tuple[int, InstructionType]]) -> None:
    """Check that stages are numbered without holes and that each has a forward and a backward."""
    stages = {stage for stage, _ in present}
    kinds = InstructionType
    for stage in range(max(stages) + 1):
        if stage not in stages:
            raise ProfileError(
                f"Stages are numbered from 0 without holes; {where} has no row of stage {stage} "
                f"(it has {', '.join(map(str, sorted(stages)))})."
            )
        has_backward = (stage, kinds.BACKWARD) in present or {
            (stage, kinds.INPUT_GRADIENT),
            (stage, kinds.WEIGHT_GRADIENT),
        } <= present
        if (stage, kinds.FORWARD) not in present or not has_backward:
            names = ", ".join(sorted(kind.profile_name for s, kind in present if s == stage))
            raise ProfileError(
                f"Every stage needs rows for forward and for backward (or input_gradient and weight_gradient); in "
                f"{where} stage {stage} has only {names}. Profile that stage again."
            )


def _merge_ranks(
    where: Path,
    key: tuple[int, InstructionType],
    clocks: Mapping[int, Mapping[tuple[str, ...], _Row]],
    ranks: set[tuple[str, ...]],
) -> InstructionProfile:
    """Slowest rank's time, sum of energies; only clocks that every rank of the stage has measured."""
    complete = sorted((clock for clock, of_rank in clocks.items() if set(of_rank) == ranks), reverse=True)
    what = f"stage {key[0]}, {key[1].profile_name}"
    if not complete:
        raise ProfileError(f"No clock was measured on all {len(ranks)} ranks of {what} in {where}.")
    if len(complete) < len(clocks):
        _log.warning("%s: %d clocks of %s are not measured on all its ranks", where, len(clocks) - len(complete), what)
    per_clock: Sequence[list[_Row]] = [list(clocks[clock].values()) for clock in complete]
    slowest = [max(rows, key=lambda row: row.time_s) for rows in per_clock]
    return InstructionProfile(
        clocks_mhz=tuple(complete),
        times_s=tuple(row.time_s for row in slowest),
        energies_j=tuple(sum(row.energy_j for row in rows) for rows in per_clock),
        p2p_blocking_powers_w=_known([[row.blocking_w for row in rows] for rows in per_clock], sum),
        time_stderrs_s=_known([[row.time_stderr_s] for row in slowest], sum),
        energy_stderrs_j=_known([[row.energy_stderr_j for row in rows] for rows in per_clock], _root_of_squares),
    )


def _known(per_clock: Sequence[Sequence[float | None]], merge: Callable[[Sequence[float]], float]) -> tuple[float, ...]:
    """Merge the values of each clock's ranks; empty unless all are known."""
    known = [[value for value in values if value is not None] for values in per_clock]
    return tuple(map(merge, known)) if list(map(len, known)) == list(map(len, per_clock)) else ()


def _root_of_squares(values: Sequence[float]) -> float:
    return math.hypot(*values)
