"""Frontier files: `frontier.json` (everything), `frontier.csv` (the numbers) and Zeus plan files.

`frontier.json` is versioned and self-contained, so that it can be applied, drawn and checked without other files; see
`frontier_json`. The form of Zeus has no place for clocks of waits; they are in the JSON file only.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from pathlib import Path

from lightning_pfo.core.errors import PfoError, PlanError
from lightning_pfo.core.files import write_texts_together
from lightning_pfo.core.wording import cut, listed, shortened
from lightning_pfo.planner.frontier.check import check_predictions
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.frontier_json import FORMAT, READ_VERSIONS, frontier_from, frontier_text
from lightning_pfo.planner.frontier.zeus_files import zeus_text

JSON_NAME, CSV_NAME = "frontier.json", "frontier.csv"
_ZEUS_NAME = "freqs_pipeline_{:05d}.py"
_ZEUS_PATTERN = re.compile(r"freqs_pipeline_(\d{5})\.py")


def save_frontier(frontier: Frontier, directory: str | os.PathLike[str]) -> None:
    """Write `frontier.json`, `frontier.csv` and one `freqs_pipeline_%05d.py` per plan into `directory`.

    All of them or none: where the disk is full, an earlier frontier stays whole. Zeus plan files of an earlier, longer
    frontier are removed, so that the directory holds one frontier.

    Raises:
        PlanError: If a plan has no predicted time and energy.
        OSError: If the files cannot be written.
    """
    folder = Path(directory)
    texts = {_ZEUS_NAME.format(number): zeus_text(plan, number) for number, plan in enumerate(reversed(frontier.plans))}
    write_texts_together(folder, {**texts, CSV_NAME: _csv_text(frontier), JSON_NAME: frontier_text(frontier)})
    for path in folder.iterdir():
        if _ZEUS_PATTERN.fullmatch(path.name) and path.name not in texts:
            path.unlink()


def load_frontier(path: str | os.PathLike[str]) -> Frontier:
    """Read a `frontier.json`, given by its path or by its directory.

    Raises:
        PlanError: If there is none, it has another version, it is malformed, or its plans do not take the times and
            energies that they say.
    """
    try:
        where = Path(path)
        if where.is_dir():
            where = where / JSON_NAME
        data = json.loads(where.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        folder = where.parent if where.suffix == ".json" else where
        raise PlanError(
            f"There is no frontier at {where}. Make one with `lightning-pfo plan ... output_dir={folder}`."
        ) from None
    except (OSError, ValueError, TypeError, RecursionError) as error:  # ValueError: no JSON, or no path
        raise PlanError(
            f"{shortened(path)} cannot be read as JSON ({cut(str(error))}). Plan again to write it anew."
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError(f'{where} is not a frontier file: it must be a JSON object with "format": "{FORMAT}".')
    version = data.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version not in READ_VERSIONS:
        raise PlanError(
            f"{where} has version {shortened(version)} of the frontier format; this release reads versions "
            f"{listed(READ_VERSIONS)}. Plan again with this release."
        )
    try:
        frontier = frontier_from(data)
        check_predictions(frontier)
        return frontier
    except (PfoError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = cut(f"lacks {error}" if isinstance(error, KeyError) else str(error), 1000)
        raise PlanError(f"{where} is malformed: {what} Plan again to write it anew.") from error


def _csv_text(frontier: Frontier) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = frontier.rows()
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return text.getvalue()
