"""A page for people: which jobs there are, what they train under, and when they were heard of last."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from lightning_pfo.core.wording import counted, listed
from lightning_pfo.server.jobs.job import Job
from lightning_pfo.server.web.service import Service

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>lightning-pfo</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="refresh" content="5">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1f24;
  background: #fff }}
h1 {{ font-size: 1.3rem; margin: 0 }} p {{ color: #57606a; margin: .2rem 0 1.5rem }}
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .5rem .8rem .5rem 0; border-bottom: 1px solid #d8dee4; vertical-align: top }}
th {{ font-weight: 600; color: #57606a; white-space: nowrap }} td.number {{ font-variant-numeric: tabular-nums;
  white-space: nowrap }} td.job {{ overflow-wrap: anywhere; min-width: 14rem }}
small {{ display: block; color: #57606a; white-space: normal; max-width: 20rem }} .bad {{ color: #b42318 }}
@media (prefers-color-scheme: dark) {{ body {{ background: #0d1117; color: #e6edf3 }} .bad {{ color: #ff8577 }}
  p, th, small {{ color: #9198a1 }} th, td {{ border-color: #30363d }} }}
</style></head><body>
<h1>Jobs</h1><p>{summary}</p>
{table}
</body></html>
"""
_UNDER_WAY = {"scan": "scanning", "verify": "verifying"}
_HEADINGS = ("Job", "Ranks", "Plan", "Predicted", "Measured", "Heard of")


def status_html(service: Service) -> str:
    """The page; it loads itself anew every five seconds."""
    registry = service.registry
    jobs = sorted(registry.jobs.values(), key=lambda job: job.seen_s, reverse=True)
    summary = f"{counted(len(jobs), 'job')}, {counted(service.num_waiting, 'request')} waiting for other ranks"
    rows = "".join(_row(job, registry.seconds_since(job)) for job in jobs)
    headings = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    table = (
        f'<div class="wide"><table><tr>{headings}</tr>{rows}</table></div>'
        if jobs
        else "<p>No job has registered yet.</p>"
    )
    return _PAGE.format(summary=escape(summary), table=table)


def _row(job: Job, silent_s: float) -> str:
    job_cells = f'<td class="job">{escape(job.job_id)}</td>'
    ranks = f"{len(job.ranks)} of {job.info.world_size}"
    if job.missing and job.ranks:
        ranks += _small(f"missing: {listed(sorted(job.missing))}")
    cells = [ranks, _plan(job), _predicted(job), _measured(job) + _verified(job), _ago(silent_s)]
    return f"<tr>{job_cells}" + "".join(f'<td class="number">{cell}</td>' for cell in cells) + "</tr>"


def _plan(job: Job) -> str:
    if job.failure:
        return f'<span class="bad">none</span>{_small(job.failure[:200])}'
    if job.plan is None:
        return "not yet"
    text = f"{job.plan.version}" + _small(job.plan.label[:80])
    if job.plan.purpose in _UNDER_WAY:
        text += _small(_UNDER_WAY[job.plan.purpose])
    if job.contacts and job.plan.from_step:
        text += _small(f"from step {job.plan.from_step}")
    return text


def _predicted(job: Job) -> str:
    plan = job.plan
    if plan is None or plan.iteration_time_s is None or plan.iteration_energy_j is None:
        return "unknown"
    saving = "" if plan.saving_percent is None else _small(f"saves {plan.saving_percent:.1f} % of the top clocks")
    return f"{plan.iteration_time_s:.4g} s, {plan.iteration_energy_j:.4g} J{saving}"


def _measured(job: Job) -> str:
    """The slowest rank's iteration and the energy of all in the last round under the plan; and what its trial found."""
    if job.plan is None or not job.measured or job.measured[-1]["version"] != job.plan.version:
        return "not yet"
    means = [means["iteration"] for means in job.measured[-1]["ranks"].values()]
    times_s, energies_j = ([mean[at] for mean in means if mean[at] is not None] for at in (0, 1))
    parts = [f"{max(times_s):.4g} s"] if times_s else []
    parts += [f"{sum(energies_j):.4g} J"] if energies_j else []
    return ", ".join(parts) or "nothing"


def _verified(job: Job) -> str:
    found = None if job.plan is None else job.plan.verified
    if found is None:
        return ""
    saving, slowdown = (_with_interval(found, name) for name in ("saving", "slowdown"))
    return _small(f"verified: saves {saving}, takes {slowdown} longer")


def _with_interval(found: Mapping[str, Any], name: str) -> str:
    interval = found[f"{name}_interval_percent"]
    between = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f} %)"
    return f"{found[f'{name}_percent']:.2f} %{between}"


def _ago(silent_s: float) -> str:
    for unit, seconds in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if silent_s >= 2 * seconds:
            return f"{silent_s / seconds:.0f} {unit} ago"
    return f"{silent_s:.0f} s ago"


def _small(text: str) -> str:
    return f"<small>{escape(text)}</small>"
