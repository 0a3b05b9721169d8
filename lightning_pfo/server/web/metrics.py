"""`/metrics`, in the text form of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_pfo.server.jobs.job import Job
from lightning_pfo.server.web.service import Service

_OF_JOBS = {
    "pfo_job_ranks": "Ranks that have registered.",
    "pfo_job_world_size": "Ranks that the job has.",
    "pfo_job_plan_version": "Version of the latest plan; 0 before there is one.",
    "pfo_job_rounds": "How often all ranks have reported.",
    "pfo_job_predicted_iteration_seconds": "Predicted time of an iteration under the latest plan.",
    "pfo_job_predicted_iteration_joules": "Predicted energy of a pipeline in an iteration under the latest plan.",
    "pfo_job_predicted_saving_ratio": "Predicted saving of energy compared with the top clocks, as a share.",
    "pfo_job_measured_saving_ratio": "Saving of energy compared with the top clocks, as windows in turn have shown it.",
    "pfo_job_measured_slowdown_ratio": "Slowdown, likewise.",
    "pfo_job_step": "Largest step that a rank was heard at.",
    "pfo_job_last_contact_seconds": "Time since anything was heard of the job.",
}


def metrics_text(service: Service, answered: Mapping[int, int]) -> str:
    """All metrics.

    Args:
        service: The jobs.
        answered: Requests that were answered, by status.
    """
    registry = service.registry
    lines = [
        *_metric("pfo_jobs", "gauge", "Jobs.", [("", len(registry.jobs))]),
        *_metric("pfo_requests_waiting", "gauge", "Requests that wait for other ranks.", [("", service.num_waiting)]),
        *_metric("pfo_plans_due", "gauge", "Plans that are being made.", [("", len(registry.due))]),
        *_metric(
            "pfo_requests_total",
            "counter",
            "Requests that were answered, by status.",
            [(f'{{status="{status}"}}', number) for status, number in sorted(answered.items())],
        ),
    ]
    values = {job_id: _values(job, registry.seconds_since(job)) for job_id, job in registry.jobs.items()}
    for name, text in _OF_JOBS.items():
        known = [(f'{{job="{_escaped(job_id)}"}}', of_job[name]) for job_id, of_job in values.items() if name in of_job]
        lines += _metric(name, "gauge", text, known)
    return "\n".join(lines) + "\n"


def _values(job: Job, silent_s: float) -> dict[str, float]:
    plan = job.plan
    values: dict[str, float | None] = {
        "pfo_job_ranks": len(job.ranks),
        "pfo_job_world_size": job.info.world_size,
        "pfo_job_plan_version": 0 if plan is None else plan.version,
        "pfo_job_rounds": job.round,
        "pfo_job_last_contact_seconds": round(silent_s, 3),
        "pfo_job_step": max((contact.step for contact in job.contacts.values()), default=None),
    }
    if plan is not None:
        values["pfo_job_predicted_iteration_seconds"] = plan.iteration_time_s
        values["pfo_job_predicted_iteration_joules"] = plan.iteration_energy_j
        values["pfo_job_predicted_saving_ratio"] = None if plan.saving_percent is None else plan.saving_percent / 100
    if plan is not None and plan.verified is not None:
        for name in ("saving", "slowdown"):
            values[f"pfo_job_measured_{name}_ratio"] = plan.verified[f"{name}_percent"] / 100
    return {name: value for name, value in values.items() if value is not None}


def _metric(name: str, kind: str, text: str, values: list[tuple[str, float]]) -> Iterator[str]:
    if values:
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} {kind}"
        yield from (f"{name}{labels} {value:.12g}" for labels, value in values)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
