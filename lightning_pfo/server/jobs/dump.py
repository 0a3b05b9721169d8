"""Files of a job as Zeus's server writes them: `ranks.json`, `N.sched.json`, `N.prof.json` in a folder of its name."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.server.jobs.job import Job
from lightning_pfo.server.jobs.messages import Report


class Dump:
    """Writes the files when the events happen that they are about.

    Args:
        folder: Where jobs get a folder each.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reports: dict[str, dict[int, Report]] = defaultdict(dict)

    def keep(self, job: Job, report: Report) -> None:
        """A rank has reported."""
        self._reports[job.job_id][report.rank] = report

    def note(self, job: Job, event: Mapping[str, Any]) -> None:
        """An event has changed a job."""
        if event["kind"] == "plan":
            self._write_plan(job)
        if event["kind"] == "round":
            reports = self._reports.pop(job.job_id, {})
            rows = [_zeus_report(report) for _, report in sorted(reports.items())]
            self._write(job, f"{job.round - 1}.prof.json", rows)

    def _write_plan(self, job: Job) -> None:
        assert job.plan is not None  # the event says so
        ranks = [job.ranks[rank] for rank in sorted(job.ranks)]
        places = [
            {name: getattr(info, name) for name in ("rank", "dp_rank", "pp_rank", "tp_rank")}
            | {"available_frequencies": info.clocks_mhz}
            for info in ranks
        ]
        self._write(job, "ranks.json", places)
        rows = [{"rank": info.rank, "frequencies": job.plan.row_of(info)} for info in ranks]
        self._write(job, f"{job.plan.version - 1}.sched.json", rows)

    def _write(self, job: Job, name: str, content: object) -> None:
        write_text_atomically(self._folder / job.job_id / name, json.dumps(content))


def _zeus_report(report: Report) -> dict[str, Any]:
    return {
        "rank": report.rank,
        "iter_time": report.iteration_times_s,
        "iter_energy": report.iteration_energies_j,
        "time_breakdown": report.times_s,
        "energy_breakdown": report.energies_j,
    }
