"""Profiles as CSV files.

Contract columns `stage,instruction,frequency,time,energy` (MHz, s and J per microbatch and GPU); further columns are
allowed. Some of them mean something here:

- `p2p_blocking_power_w`: power in watts of the stage's GPU while it waits for a neighbour at that clock;
- `time_stderr`, `energy_stderr`: standard errors of time and energy, which `regularise` weighs points by;
- `transfer_time`: seconds from the end of the instruction until the one on another rank that needs its output could
  have started. Empty where not known; a profile has the median over the clocks, and 0 where none is known;
- `flags`: what to doubt, separated by blanks, of which `clock_not_reached`, `power_cap` and `clock_above` matter here:
  see `unreached`; `clock_seen_mhz` is the mean clock at which the GPU ran;
- `switch_latency`: how long the GPU takes to change to that clock, see `switch_latency`;
- `gpu`: name of the GPU that was measured; an emulated one says so, and so do tables and pictures;
- `rank` or `dp_rank`, `pp_rank`, `tp_rank`: several GPUs work on one stage. A stage is as slow as its slowest rank,
  and as late with its output as the latest, and energies add up, so that the energy of a stage is that of all its GPUs.

These are the dialects of Zeus' documentation (the contract columns), of Merak (rank columns), of the Perseus artifact
(rows named `load`, the loading of a batch, have no clock to choose and are skipped) and of Kareus (columns that say how
it partitions, which are ignored; one configuration per clock).

Files are read by the standard library: a cell that is wrong is named with its line and column, texts such as `NA` stay
texts, and the command line need not load pandas. A pandas table is written as CSV and read like one.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_pfo.core.errors import ConfigurationError, ProfileError
from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.core.flags import DRIFT, ENERGY_UNCERTAIN, WAITING_UNCERTAIN, is_unreached
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.ranges import POWER, TRANSFER, Quantity
from lightning_pfo.core.wording import cut, listed, shortened
from lightning_pfo.planner.profile.profile import COLUMNS, STAGE, TRANSFER_COLUMN, InstructionProfile, Profile
from lightning_pfo.planner.profile.row import ProfileRow
from lightning_pfo.planner.profile.switch_latency import SWITCH_COLUMN, switch_latency_of
from lightning_pfo.planner.profile.unreached import merge_capped

if TYPE_CHECKING:
    import pandas as pd

_NEEDED = ("stage", "instruction", "frequency", "time", "energy")
"""The columns every profile has."""

_CLOCK_SEEN = "clock_seen_mhz"
_NUMBERS = {"stage": STAGE, **dict(COLUMNS.values()), TRANSFER_COLUMN: TRANSFER, _CLOCK_SEEN: POWER}
_RANK_COLUMNS = ("rank", "dp_rank", "pp_rank", "tp_rank")
_TEXTS = ("instruction", "gpu", "flags", SWITCH_COLUMN, *_RANK_COLUMNS)
_SKIPPED_INSTRUCTIONS = ("load",)

_log = logging.getLogger(__name__)

_LONGEST_S, _POWERS_W = 60.0, (1.0, 50_000.0)
"""Of an instruction: far beyond what microbatches take, and what a GPU, or all GPUs of a stage together, draw."""

_DOUBTS = frozenset((ENERGY_UNCERTAIN, WAITING_UNCERTAIN, DRIFT))


def write_profile(path: str | os.PathLike[str], rows: Iterable[Any]) -> None:
    """Write profile rows as CSV, whole or not at all; see `profile_text`.

    Args:
        path: File to write.
        rows: What it holds.

    Raises:
        ProfileError: If a row lacks a contract column, or there is no row.
    """
    write_text_atomically(path, profile_text(path, rows))


def profile_text(path: str | os.PathLike[str], rows: Iterable[Any]) -> str:
    """Profile rows as CSV: contract columns first, further columns as they come.

    What is None or nan in a further column is not known: its cell stays empty.

    Args:
        path: Where it is meant for; messages say so.
        rows: Mappings or dataclass instances with at least the contract columns; an instruction may be an
            `InstructionType`.

    Raises:
        ProfileError: If a row lacks a contract column, or there is no row.
    """
    records: list[dict[str, Any]] = []
    for row in rows:
        record = asdict(row) if is_dataclass(row) and not isinstance(row, type) else dict(row)
        if isinstance(record.get("instruction"), InstructionType):
            record["instruction"] = record["instruction"].profile_name
        missing = [column for column in _NEEDED if column not in record]
        if missing:
            raise ProfileError(
                f"A profile row needs {', '.join(_NEEDED)}; {shortened(record)} lacks {', '.join(missing)}."
            )
        unknown = [column for column, value in record.items() if column not in _NEEDED and value != value]
        records.append({**record, **dict.fromkeys(unknown)})
    if not records:
        raise ProfileError(f"A profile needs at least one row; there is nothing to write to {path}.")
    further = dict.fromkeys(column for record in records for column in record if column not in _NEEDED)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_NEEDED, *further], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def read_profile(source: str | os.PathLike[str] | pd.DataFrame) -> Profile:
    """Read a profile CSV, or a pandas table with its columns.

    Raises:
        ProfileError: If the file is missing, empty or not a table; a column is missing; a value is not a number of
            the right range; a clock is measured twice; or a stage or an instruction is missing.
    """
    if hasattr(source, "to_csv"):
        return profile_of_text("the table", source.to_csv(index=False))
    try:
        where = Path(source)
        with where.open(newline="", encoding="utf-8-sig") as file:
            rows = _read_rows(str(where), file)
    except FileNotFoundError:
        raise ProfileError(
            f"There is no profile at {source}. Write one with EnergyProfilerCallback, or give the path of another."
        ) from None
    except ProfileError:
        raise
    except (OSError, ValueError, TypeError, csv.Error) as error:  # ValueError: no text, or no path
        remedy = " Save it as UTF-8." if isinstance(error, UnicodeDecodeError) else ""
        raise ProfileError(
            f"The profile {shortened(source)} cannot be read as a CSV file: {cut(str(error))}.{remedy}"
        ) from error
    return _profile_of(str(where), rows)


def profile_of_text(where: str, text: str) -> Profile:
    """Read a profile of which the CSV is known; messages say `where` it is from.

    Raises:
        ProfileError: Likewise.
    """
    return _profile_of(where, _read_rows(where, io.StringIO(text)))


def _profile_of(where: str, rows: Sequence[ProfileRow]) -> Profile:
    """Merge the rows of a file or table; messages say `where` they are from."""
    measured: dict[tuple[int, InstructionType], dict[int, dict[tuple[str, ...], ProfileRow]]] = {}
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
        counts = listed([f"stage {stage}: {len(ranks)}" for stage, ranks in sorted(ranks_of_stage.items())])
        raise ProfileError(f"All stages need the same number of ranks; {where} has {counts}.")
    instructions = {
        key: _merge_ranks(where, key, clocks, ranks_of_stage[key[0]]) for key, clocks in sorted(measured.items())
    }
    try:
        latency = switch_latency_of((row.clock_mhz, row.switch_latency) for row in rows)
    except ConfigurationError as error:
        raise ProfileError(f"{where}: {error}. Correct or empty the cell.") from None
    _tell_of_doubts(where, rows)
    _tell_of_other_units(where, rows)
    gpus = tuple(dict.fromkeys(row.gpu for row in rows if row.gpu))
    return Profile(instructions, num_ranks.pop(), gpus, latency)


def _tell_of_doubts(where: str, rows: Sequence[ProfileRow]) -> None:
    """Say which energies a plan is made of although the profile itself doubts them."""
    doubted = [row for row in rows if row.flags & _DOUBTS]
    if doubted:
        flags = sorted(frozenset[str]().union(*(row.flags & _DOUBTS for row in doubted)))
        _log.warning(
            "%d of the %d rows of %s are flagged %s (%s): what a plan saves is as uncertain. Measure these clocks "
            "again, for longer.",
            len(doubted),
            len(rows),
            where,
            listed(flags),
            listed([f"line {row.line}" for row in doubted], most=5),
        )


def _tell_of_other_units(where: str, rows: Sequence[ProfileRow]) -> None:
    """Say where numbers look like milliseconds or millijoules: plans of these are as plausible, and wrong."""
    least_w, most_w = _POWERS_W
    odd = [
        row
        for row in rows
        if row.time_s > _LONGEST_S or (row.energy_j and not least_w <= row.energy_j / row.time_s <= most_w)
    ]
    if odd:
        first = odd[0]
        _log.warning(
            "Times of %s are in seconds, energies in joules; %d of its %d rows have more than %g s or a power that no "
            "GPU has, such as line %d: %g s, %g J, %g W. Divide milliseconds and millijoules by 1000.",
            where,
            len(odd),
            len(rows),
            _LONGEST_S,
            first.line,
            first.time_s,
            first.energy_j,
            first.energy_j / first.time_s,
        )


def _read_rows(where: str, lines: Iterable[str]) -> list[ProfileRow]:
    reader = csv.reader(lines)
    header = [name.strip() for name in next(reader, [])]
    if header == ["sep=", ""]:  # Excel's own line, which says how cells are separated
        header = [name.strip() for name in next(reader, [])]
    missing = [column for column in _NEEDED if column not in header]
    if missing:
        raise ProfileError(
            f"A profile has the columns {', '.join(_NEEDED)}; {where} lacks {', '.join(missing)} "
            f"(it has: {listed(header) or 'nothing at all'}).{_hint(header)}"
        )
    repeated = sorted(column for column, count in Counter(header).items() if column and count > 1)
    if repeated:
        raise ProfileError(f"Each column has a name of its own; {where} has more than one {listed(repeated)}.")
    known = {column: header.index(column) for column in (*_NUMBERS, *_TEXTS) if column in header}
    rows = []
    for cells in reader:
        if not any(map(str.strip, cells)):
            continue
        if len(cells) != len(header):
            raise ProfileError(
                f"{where}, line {reader.line_num}: expected {len(header)} cells as in the header, got {len(cells)}."
            )
        record = {column: cells[place].strip() for column, place in known.items()}
        if record["instruction"].lower() not in _SKIPPED_INSTRUCTIONS:
            rows.append(_parse_row(f"{where}, line {reader.line_num}", reader.line_num, record))
    if not rows:
        raise ProfileError(f"The profile {where} has no measurements. Profile again and let it finish one clock.")
    return rows


def _hint(header: Sequence[str]) -> str:
    """What to do about a header that lacks columns, where that can be guessed."""
    if "power limit" in header:
        return " Its points differ by power limit; a plan sets clocks, so profile over clocks."
    if header and header[0].startswith("#"):
        return " The first line is the header: delete the comment above it."
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if any(separator in cell for cell in header):
            return f" Cells are separated by commas, here by {name}: save it with commas."
    if any(cell.lower() in {kind.profile_name for kind in InstructionType} for cell in header):
        return f" The first line is the header: write the columns' names above the measurements ({','.join(_NEEDED)})."
    for column in _NEEDED:
        for cell in header:
            if cell.startswith((f"{column} ", f"{column}(", f"{column}[")):
                return f" Names of columns have no units (they are MHz, s and J): write {column}, not {cut(cell)}."
    capitals = [cell for cell in header if cell not in _NEEDED and cell.lower() in _NEEDED]
    if capitals:
        return f" Names of columns are in lower case: write {capitals[0].lower()}, not {capitals[0]}."
    return ""


def _parse_row(where: str, line: int, record: Mapping[str, str]) -> ProfileRow:
    try:
        kind = InstructionType.from_profile_name(record["instruction"])
    except ValueError as error:
        raise ProfileError(f"{where}: {cut(str(error))}") from None
    values = {
        column: _number(where, column, record[column], quantity)
        for column, quantity in _NUMBERS.items()
        if record.get(column) or column in _NEEDED
    }
    return ProfileRow(
        line=line,
        stage=int(values["stage"]),
        kind=kind,
        clock_mhz=int(values["frequency"]),
        time_s=values["time"],
        energy_j=values["energy"],
        blocking_w=values.get("p2p_blocking_power_w"),
        time_stderr_s=values.get("time_stderr"),
        energy_stderr_j=values.get("energy_stderr"),
        transfer_s=values.get(TRANSFER_COLUMN),
        clock_seen_mhz=values.get(_CLOCK_SEEN),
        flags=frozenset(record.get("flags", "").split()),
        rank=tuple(record[column] for column in _RANK_COLUMNS if column in record),
        gpu=record.get("gpu", ""),
        switch_latency=record.get(SWITCH_COLUMN, ""),
    )


def _number(where: str, column: str, text: str, quantity: Quantity) -> float:
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    whole = int(value) if quantity.is_whole and value.is_integer() else value
    if not quantity.allows(whole):
        raise ProfileError(
            f"{where}: column {column!r} must be {quantity}, got {shortened(text)}. Correct or remove the row."
        )
    return whole


def _check_complete(where: str, present: set[tuple[int, InstructionType]]) -> None:
    """Check that stages are numbered without holes and that each has a forward and a backward."""
    stages = {stage for stage, _ in present}
    kinds = InstructionType
    for stage in range(max(stages) + 1):
        if stage not in stages:
            raise ProfileError(
                f"Stages are numbered from 0 without holes; {where} has no row of stage {stage} "
                f"(it has {listed(sorted(stages))})."
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
    where: str,
    key: tuple[int, InstructionType],
    clocks: Mapping[int, Mapping[tuple[str, ...], ProfileRow]],
    ranks: set[tuple[str, ...]],
) -> InstructionProfile:
    """Slowest rank's time, latest transfer, sum of energies; only clocks that every rank of the stage has measured."""
    complete = sorted((clock for clock, of_rank in clocks.items() if set(of_rank) == ranks), reverse=True)
    what = f"stage {key[0]}, {key[1].profile_name}"
    if not complete:
        raise ProfileError(f"No clock was measured on all {len(ranks)} ranks of {what} in {where}.")
    if len(complete) < len(clocks):
        _log.warning("%s: %d clocks of %s are not measured on all its ranks", where, len(clocks) - len(complete), what)
    per_clock: Sequence[list[ProfileRow]] = [list(rows.values()) for rows in merge_capped(clocks, complete)]
    unreached = [
        clock for clock, rows in zip(complete, per_clock, strict=True) if any(is_unreached(row.flags) for row in rows)
    ]
    slowest = [max(rows, key=lambda row: row.time_s) for rows in per_clock]
    transfers_s = [[row.transfer_s for row in rows if row.transfer_s is not None] for rows in per_clock]
    latest_s = [max(known) for known in transfers_s if known]
    try:
        return InstructionProfile(
            clocks_mhz=tuple(complete),
            times_s=tuple(row.time_s for row in slowest),
            energies_j=tuple(sum(row.energy_j for row in rows) for rows in per_clock),
            p2p_blocking_powers_w=_known([[row.blocking_w for row in rows] for rows in per_clock], sum),
            time_stderrs_s=_known([[row.time_stderr_s] for row in slowest], sum),
            energy_stderrs_j=_known([[row.energy_stderr_j for row in rows] for rows in per_clock], _root_of_squares),
            transfer_s=median(latest_s) if latest_s else None,
            unreached_mhz=tuple(unreached),
        )
    except ProfileError as error:  # too many clocks, or a sum out of range
        raise ProfileError(f"{where}, {what}: {error}") from None


def _known(per_clock: Sequence[Sequence[float | None]], merge: Callable[[Sequence[float]], float]) -> tuple[float, ...]:
    """Merge the values of each clock's ranks; empty unless all are known."""
    known = [[value for value in values if value is not None] for values in per_clock]
    return tuple(map(merge, known)) if list(map(len, known)) == list(map(len, per_clock)) else ()


def _root_of_squares(values: Sequence[float]) -> float:
    return math.hypot(*values)
