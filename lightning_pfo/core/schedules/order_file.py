"""A user's own order in a text file: one row per rank, instructions separated by commas or blanks.

Example, two ranks::

    # stage, instruction, microbatch
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0, 1B0, 1F1, 1B1

`rank N:` is optional. Torch's compute_only CSV is read as well: empty cells are bubbles and left out, and
`(0F1;7B0)OVERLAP_F_B` is its parts in turn.
"""

from __future__ import annotations

import re
from pathlib import Path

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Instruction, Orders

_LABEL = re.compile(r"rank\s*(\d{1,9})(?!\d)\s*:?\s*", re.IGNORECASE)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(SEND_|RECV_|UNSHARD|RESHARD|REDUCE_GRAD)")


def read_orders(path: Path) -> Orders:
    """Read one order per rank.

    Raises:
        ConfigurationError: If the file cannot be read, has no rows, or a cell is not an instruction; the message
            names file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:  # ValueError: no text, or no path
        raise ConfigurationError(
            f"A schedule file is a text file with one row of instructions per rank; {path} cannot be read ({error})."
        ) from error
    orders: list[tuple[Instruction, ...]] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            orders.append(_row(text, len(orders), f"{path}, line {number}"))
    if not orders:
        raise ConfigurationError(
            f"A schedule file has one row of instructions per rank, such as '0F0 0F1 0B0 0B1'; {path} has none."
        )
    return tuple(orders)


def _row(text: str, rank: int, where: str) -> tuple[Instruction, ...]:
    label = _LABEL.match(text)
    if label is not None:
        if int(label[1]) != rank:
            raise ConfigurationError(
                f"Rows come in the order of ranks; {where} is row {rank} but says {label[0].strip()!r}. "
                f"Write 'rank {rank}:' or nothing."
            )
        text = text[label.end() :]
    cells = _OVERLAP.sub(lambda match: match[1].replace(";", " "), text).replace(",", " ").split()
    return tuple(_instruction(cell.strip('"'), where) for cell in cells)


def _instruction(cell: str, where: str) -> Instruction:
    if _COMMUNICATION.match(cell):
        raise ConfigurationError(
            f"A schedule file lists computations only, transfers follow from them; {where} has {cell!r}. "
            "Use torch's compute_only format, or leave such cells out."
        )
    try:
        return Instruction.parse(cell)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from None
