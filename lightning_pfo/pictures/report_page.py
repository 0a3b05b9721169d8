"""`report.html`: a run that optimised itself, for a reader who was not there; one file without others.

It is made of what the run has left in its folder: `report.json`, `profile.csv` and `plans/frontier.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.wording import cut
from lightning_pfo.pictures.page_style import STYLE
from lightning_pfo.pictures.svg import Chart
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.frontier_files import load_frontier
from lightning_pfo.planner.pipeline.timeline import Timeline
from lightning_pfo.planner.profile.profile_csv import read_profile

PAGE_NAME, REPORT_NAME = "report.html", "report.json"
_STATES = ("WarmUp", "Measure", "Plan", "Verify", "Hold")
_MOST_BOXES = 4000
_CLASS = {InstructionType.FORWARD: "forward"}


def write_page(folder: Path) -> Path:
    """Write `report.html` into the folder of a run; returns where it is.

    Raises:
        ConfigurationError: If the folder has no report of such a run.
        PfoError: If its profile or its plans cannot be read.
    """
    path = folder / REPORT_NAME
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(report, dict)
    except (OSError, ValueError, RecursionError, AssertionError) as error:
        raise ConfigurationError(
            f"A run that optimised itself leaves {REPORT_NAME} in its folder; {str(path)!r} is none "
            f"({cut(str(error)) or 'no object'}). Give the folder of a run, such as outputs/demo."
        ) from error
    has_plans = (folder / "plans" / "frontier.json").exists()
    frontier = load_frontier(folder / "plans") if has_plans else None
    page = folder / PAGE_NAME
    write_text_atomically(page, page_of(report, frontier, folder))
    return page


def page_of(report: Mapping[str, Any], frontier: Frontier | None, folder: Path) -> str:
    """The page's text.

    Args:
        report: Content of `report.json`.
        frontier: The plans; None where none were made.
        folder: Where the profile is.
    """
    device = str(report.get("device", "unknown GPU"))
    sections = [_figures(report), _story(report)]
    if frontier is not None:
        sections += [_frontier(frontier, report), _timelines(frontier, _chosen(frontier, report))]
    sections += [_run(report.get("steps") or [])]
    if frontier is not None and (folder / "profile.csv").exists():
        sections.append(_valleys(frontier, folder))
    sections.append(_caveats(report))
    return _PAGE.format(
        title=escape(f"Energy report: {device}"), device=escape(device), style=STYLE, body="\n".join(sections)
    )


def _chosen(frontier: Frontier, report: Mapping[str, Any]) -> FrequencyPlan:
    """The plan that the report predicts for; of the frontier, the nearest in time."""
    time_s = report.get("predicted", {}).get("plan", {}).get("iteration_time_s", frontier.baseline.iteration_time_s)
    return min(frontier.plans, key=lambda plan: abs(plan.iteration_time_s - time_s))


def _figures(report: Mapping[str, Any]) -> str:
    cards = [
        ("Energy saved", _percent(report, "saving_percent"), _interval(report, "saving_interval_percent")),
        ("Slower by", _percent(report, "slowdown_percent"), _interval(report, "slowdown_interval_percent")),
        ("Possible at most", _percent(report, "lower_bound_saving_percent"), "proven, for this profile"),
    ]
    if report.get("profiling_iterations") is not None:
        cost = f"{report['profiling_cost_s']:+.3g} s and {report['profiling_cost_j']:+.4g} J against the top clocks"
        cards.append(("Measuring took", f"{report['profiling_iterations']} iterations", cost))
    if report.get("net_saving_j") is not None:
        cards.append(("Saved in this run", f"{report['net_saving_j']:.4g} J", "net of measuring and comparing"))
    boxes = "".join(f"<div><span>{a}</span><strong>{b}</strong><small>{c}</small></div>" for a, b, c in cards)
    return f'<section class="cards">{boxes}</section>'


def _percent(report: Mapping[str, Any], name: str) -> str:
    value = report.get(name)
    return "not known" if value is None else f"{round(value, 2) + 0.0:.2f} %"


def _interval(report: Mapping[str, Any], name: str) -> str:
    found = report.get(name)
    if not found:
        return "too few pairs of windows for an interval"
    return f"95 % interval: {round(found[0], 2) + 0.0:.2f} to {round(found[1], 2) + 0.0:.2f} %"


def _story(report: Mapping[str, Any]) -> str:
    notes = "".join(f"<li>{escape(str(note))}</li>" for note in report.get("notes") or [])
    rows = ""
    predicted = report.get("predicted") or {}
    for name, heading in (("baseline", "top clocks"), ("plan", "plan")):
        seen, expected = report.get(name) or {}, predicted.get(name) or {}
        cells = [
            _number(values.get(key))
            for key in ("iteration_time_s", "iteration_energy_j")
            for values in (seen, expected)
        ]
        rows += f"<tr><th>{heading}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    headings = "".join(
        f"<th>{name}</th>" for name in ("one iteration", "time, s", "predicted", "energy, J", "predicted")
    )
    table = f"<table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<section><h2>What was done</h2><ol>{notes}</ol><div class='wide'>{table}</div></section>"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.5g}"


def _frontier(frontier: Frontier, report: Mapping[str, Any]) -> str:
    chart = Chart("time of an iteration, s", "energy of an iteration, J", 720, 320)
    chart.line([(plan.iteration_time_s, plan.lower_bound_j) for plan in frontier.plans], "bound")
    chart.line([(plan.iteration_time_s, plan.iteration_energy_j) for plan in frontier.plans], "plan")
    base, chosen = frontier.baseline, _chosen(frontier, report)
    chart.dots([(base.iteration_time_s, base.iteration_energy_j)], "top", "top clocks, predicted:")
    chart.dots([(chosen.iteration_time_s, chosen.iteration_energy_j)], "chosen", "plan, predicted:")
    for name in ("baseline", "plan"):
        seen = report.get(name) or {}
        if "iteration_time_s" in seen:
            chart.dots([(seen["iteration_time_s"], seen["iteration_energy_j"])], "measured", f"{name}, measured:")
    key = _key(
        ("plan", "all plans"), ("bound", "nothing below is possible"), ("top", "top clocks"), ("chosen", "the plan"),
        ("measured", "measured"),
    )  # fmt: skip
    return f'<section><h2>What is possible</h2><div class="wide">{chart.text()}</div>{key}</section>'


def _key(*entries: tuple[str, str]) -> str:
    return '<p class="key">' + "".join(f'<span class="{css}">{escape(text)}</span>' for css, text in entries) + "</p>"


def _run(steps: Sequence[Mapping[str, Any]]) -> str:
    if not steps:
        return ""
    charts = []
    for label, values in (
        ("mean clock, MHz", [step["clock_mhz"] for step in steps if "clock_mhz" in step]),
        ("power of all GPUs, W", [step["energy_j"] / step["time_s"] for step in steps]),
        ("time of an iteration, s", [step["time_s"] for step in steps]),
    ):
        if len(values) < len(steps):  # of an earlier version, which did not tell
            continue
        chart = Chart("iteration", label, 720, 240)
        numbers = [step["iteration"] for step in steps]
        chart.line(list(zip(numbers, values, strict=True)), "faint")
        for state in _STATES:
            points = [
                (number, value)
                for number, value, step in zip(numbers, values, steps, strict=True)
                if step["state"] == state
            ]
            if points:
                chart.dots(points, f"state {state.lower()}", f"{state}:")
        charts.append(chart.text())
    key = _key(*((f"state {state.lower()}", state) for state in _STATES))
    return f'<section><h2>The run</h2><div class="wide">{"".join(charts)}</div>{key}</section>'


def _valleys(frontier: Frontier, folder: Path) -> str:
    measured = read_profile(folder / "profile.csv").instructions
    charts = []
    in_order = sorted(frontier.profile.instructions, key=lambda kind: (kind[0], kind[1] is not InstructionType.FORWARD))
    for stage, kind in in_order:
        fitted = frontier.profile.instructions[stage, kind]
        chart = Chart("clock, MHz", "energy, J", 300, 210)
        chart.line(list(zip(fitted.clocks_mhz, fitted.energies_j, strict=True)), "plan")
        seen = measured.get((stage, kind))
        if seen is not None:
            chart.dots(list(zip(seen.clocks_mhz, seen.energies_j, strict=True)), "measured", "measured:")
        name = {InstructionType.FORWARD: "forward"}.get(kind, kind.profile_name)
        charts.append(f"<figure>{chart.text()}<figcaption>stage {stage}, {name}</figcaption></figure>")
    key = _key(("measured", "measured"), ("plan", "fitted: what was planned with"))
    return f'<section><h2>Energy of an instruction</h2><div class="many">{"".join(charts)}</div>{key}</section>'


def _timelines(frontier: Frontier, plan: FrequencyPlan) -> str:
    both = [("top clocks", frontier.timeline(frontier.baseline)), ("the plan", frontier.timeline(plan))]
    if len(both[0][1].starts_s) > _MOST_BOXES:
        return ""
    clocks = [mhz for _, timeline in both for mhz in timeline.clocks_mhz]
    span = min(clocks), max(clocks)
    until_s = max(timeline.iteration_time_s for _, timeline in both)
    parts = [f'<h3>{name}</h3><div class="wide">{_boxes(timeline, until_s, span)}</div>' for name, timeline in both]
    note = (
        f'<p class="key">Each box is an instruction; the fuller its colour, the higher its clock '
        f"({span[0]} to {span[1]} MHz). Between boxes a GPU waits.</p>"
    )
    return f"<section><h2>One iteration, as predicted</h2>{''.join(parts)}{note}</section>"


def _boxes(timeline: Timeline, until_s: float, span_mhz: tuple[int, int]) -> str:
    wide, row = 720, 22
    height = row * timeline.schedule.num_ranks
    boxes: Iterable[str] = (
        f'<rect class="{_CLASS.get(inst.type, "backward")}" x="{wide * start / until_s:.2f}" '
        f'y="{row * rank + 2}" width="{max(wide * duration / until_s - 0.6, 0.4):.2f}" height="{row - 4}" '
        f'opacity="{_opacity(mhz, span_mhz):.2f}"><title>{inst}: {mhz} MHz, {duration:.4g} s</title></rect>'
        for inst, start, duration, mhz, (rank, _) in zip(
            timeline.schedule.instructions,
            timeline.starts_s,
            timeline.durations_s,
            timeline.clocks_mhz,
            timeline.schedule.places,
            strict=True,
        )
    )
    return f'<svg class="timeline" viewBox="0 0 {wide} {height}" role="img">{"".join(boxes)}</svg>'


def _opacity(mhz: int, span_mhz: tuple[int, int]) -> float:
    low, high = span_mhz
    return 1.0 if high == low else 0.25 + 0.75 * (mhz - low) / (high - low)


def _caveats(report: Mapping[str, Any]) -> str:
    said = []
    if report.get("emulated"):
        said.append("Emulated: times, clocks and energies are modelled; no GPU was measured.")
    if report.get("problem"):
        said.append(f"No plan was applied: {report['problem']}")
    if report.get("clock_failures"):
        said.append(f"Clocks were not set on all ranks: {', '.join(report['clock_failures'])}.")
    said.append("Energy is that of the GPUs; that of processors, memory, fans and networks is not in it.")
    said.append(
        "The saving is against the same GPUs at their top clocks, in windows in turn with those under the plan."
    )
    return f"<section><h2>To be known</h2><ul>{''.join(f'<li>{escape(one)}</li>' for one in said)}</ul></section>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style></head><body>
<header><h1>Energy of a pipeline</h1><p>{device}</p></header>
{body}
</body></html>
"""
