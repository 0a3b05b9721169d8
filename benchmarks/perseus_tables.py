"""Table 6, the straggler figure and Zeus's rows of Perseus (SOSP 2024), published beside re-implemented, and ours.

    python benchmarks/perseus_tables.py [output_dir=DIR] [microbatches=12,24,48,96] [json=true]

From the measured profiles beside the project (`../shared/profiles`; GPT-3 175B on A100 SXM and Bloom 176B on A40 are
there, the other two rows of the table are not), 8 stages, 1F1B, everything predicted from the profile: longest path,
sum of energies, blocking power while waiting. Baseline: all stages at the top locked clock. The policies are those of
`lightning_pfo.planner.policies`; EnvPipe as Perseus's authors compare with it (a valley for each kind of instruction,
steps of 15 MHz), Perseus with the options of their artifact. Slowdowns are shown as they are, never taken for 0.

Table: savings of each system's own choice in per cent, and of ours at Perseus's time. Figure: savings of all pipelines
together, waiting included, over T'/T for 16 to 128 pipelines of which one is slow; every system by the same formula
(`planner.cluster.emulation`), with the plans that only pay beside a straggler, Perseus's as ours. The figure published
for EnvPipe counts two pipelines too many as waiting; *corrected* is without them.

Zeus is published for smaller models only, measured with power limits on 4 and 8 GPUs, whose profiles are not at hand;
its rows stand beside the re-implemented ones of the two large models, to be compared as ranges.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines import MEASURED_DIR

from lightning_pfo.pictures.style import GRID, INK, PLAN, new_figure, save_figure, tidy
from lightning_pfo.planner import Frontier, plan_frontier, read_profile, select_plan
from lightning_pfo.planner.cluster.emulation import emulate_frontier
from lightning_pfo.planner.cluster.stragglers import straggler_factors
from lightning_pfo.planner.policies.envpipe import EnvPipe
from lightning_pfo.planner.policies.perseus import Perseus


@dataclass(frozen=True)
class Published:
    """What is published of a model on a GPU; savings in per cent, by number of microbatches.

    Attributes:
        file: Its measured profile.
        power_w: Blocking power of a GPU.
        envpipe: Savings of EnvPipe without stragglers.
        perseus: Of Perseus.
        at_1_2: Of Perseus and of EnvPipe (corrected) for 16 pipelines, 96 microbatches and T'/T = 1.2.
    """

    file: str
    power_w: float
    envpipe: dict[int, float]
    perseus: dict[int, float]
    at_1_2: tuple[float, float]


def _by_count(*percents: float) -> dict[int, float]:
    return dict(zip((12, 24, 48, 96), percents, strict=True))


PUBLISHED = {
    "GPT-3 175B, A100 SXM": Published(
        "gpt3-175b_a100-sxm_bf16.csv", 83.64, _by_count(14.1, 13.4, 13.1, 12.9), _by_count(15.2, 14.2, 13.6, 13.3),
        (27.0, 12.4),
    ),
    "Bloom 176B, A40": Published(
        "bloom-176b_a40_bf16.csv", 70.38, _by_count(6.1, 3.2, 1.6, 0.8), _by_count(7.0, 4.5, 3.1, 2.4),
        (21.1, 0.8),
    ),
}  # fmt: skip
ZEUS = {"zeus_global_power_limit": "global", "zeus_per_stage_power_limit": "per stage"}
PUBLISHED_ZEUS = {
    "A100": {
        "GPT-3 XL": ((4.9, 3.2), (11.2, 1.4)),
        "BERT 1.3B": ((4.4, 3.0), (9.5, 11.6)),
        "T5 3B": ((9.4, 6.7), (12.1, 7.4)),
        "WRN101-8": ((4.3, 3.8), (5.2, 18.1)),
        "Bloom 3B": ((4.7, 2.9), (8.5, 0.4)),
    },
    "A40": {
        "GPT-3 2.7B": ((9.5, 4.1), (16.5, 25.1)),
        "BERT 1.3B": ((0.0, 0.0), (2.1, 55.8)),
        "T5 3B": ((17.3, -3.7), (17.9, 5.3)),
        "Bloom 3B": ((9.3, 3.1), (10.6, 34.3)),
        "WRN101-8": ((15.3, 7.6), (17.9, 14.3)),
    },
}
"""Savings and slowdowns in per cent of Zeus's own choices (eta = 0.5): a limit for all GPUs, and one for each stage."""

POLICIES: dict[str, Any] = {
    "EnvPipe": EnvPipe(step_mhz=15, one_clock=False),
    "Perseus": Perseus(keeps_raw=True),
}
"""Of the others; ours is planned at Perseus's time too."""

THEN = "ours at Perseus's time"
NUM_PIPELINES = (16, 32, 64, 128)
NUM_PERSEUS_PLANS = 200
"""Beside stragglers: lowtime has a plan for every millisecond, this is one for about every third."""

FACTORS = [1 + number / 20 for number in range(11)]


def frontiers_of(
    published: Published, num_microbatches: int, num_plans: int = 50, at: Sequence[float] = ()
) -> dict[str, Frontier]:
    """The frontier of each system.

    Args:
        published: What is published of the model.
        num_microbatches: Of an iteration.
        num_plans: Of each frontier, and as many that only pay beside a straggler.
        at: T'/T of stragglers, at which ours plans besides, as it knows them.
    """
    profile = read_profile(MEASURED_DIR / published.file)
    settings = {
        "num_microbatches": num_microbatches,
        "p2p_blocking_power_w": published.power_w,
        "num_plans": num_plans,
        "num_straggler_plans": num_plans if at else 0,
    }
    frontiers: dict[str, Frontier] = {
        name: plan_frontier(profile, policy=policy, **settings) for name, policy in POLICIES.items()
    }
    times_s = [select_plan(frontiers["Perseus"], "own").iteration_time_s]
    times_s += [frontiers["Perseus"].baseline.iteration_time_s] if at else []
    deadlines_s = [factor * time_s for time_s in times_s for factor in (1.0, *at)]
    frontiers["ours"] = plan_frontier(profile, deadlines_s=deadlines_s, **{**settings, "num_plans": 50})
    return frontiers


def table_row(published: Published, num_microbatches: int, frontiers: dict[str, Frontier]) -> dict[str, float]:
    """Savings and slowdowns without stragglers, in per cent."""
    row: dict[str, float] = {"microbatches": num_microbatches}
    for name, known in (("EnvPipe", published.envpipe), ("Perseus", published.perseus), ("ours", {})):
        own, top = select_plan(frontiers[name], "own"), frontiers[name].baseline
        if num_microbatches in known:
            row[f"{name} published"] = known[num_microbatches]
        row[name] = 100 * (1 - own.iteration_energy_j / top.iteration_energy_j)
        row[f"{name} slowdown"] = 100 * (own.iteration_time_s / top.iteration_time_s - 1)
    top, then_s = frontiers["ours"].baseline, select_plan(frontiers["Perseus"], "own").iteration_time_s
    then = select_plan(frontiers["ours"], f"{then_s!r}s")
    row[THEN] = 100 * (1 - then.iteration_energy_j / top.iteration_energy_j)
    row["bound"] = 100 * (1 - top.lower_bound_j / top.iteration_energy_j)
    return row


def zeus_row(published: Published, num_microbatches: int) -> dict[str, tuple[float, float]]:
    """Saving and slowdown in per cent of what Zeus takes itself, for one limit and for one by stage."""
    row = {}
    for policy, scope in ZEUS.items():
        frontier = plan_frontier(
            MEASURED_DIR / published.file,
            policy=policy,
            num_microbatches=num_microbatches,
            p2p_blocking_power_w=published.power_w,
        )
        own, top = select_plan(frontier, "own"), frontier.baseline
        saving = 100 * (1 - own.iteration_energy_j / top.iteration_energy_j)
        row[scope] = saving, 100 * (own.iteration_time_s / top.iteration_time_s - 1)
    return row


def straggler_savings(
    frontiers: dict[str, Frontier], num_pipelines: int, at: Sequence[float] = FACTORS
) -> dict[str, list[float]]:
    """Savings of all pipelines in per cent, for each factor T'/T; ours at Perseus's time too, which then waits as long.

    Args:
        frontiers: Of each system.
        num_pipelines: Of which one is slow.
        at: The factors.
    """
    ours, then_s = frontiers["ours"], select_plan(frontiers["Perseus"], "own").iteration_time_s
    frontiers = {**frontiers, THEN: replace(ours, own_choice=select_plan(ours, f"{then_s!r}s"))}
    savings: dict[str, list[float]] = {name: [] for name in frontiers}
    for factor in at:
        factors = straggler_factors(factor, num_pipelines, 1)
        top_j = emulate_frontier(_top_of(frontiers["ours"]), factors).iteration_energy_j
        for name, frontier in frontiers.items():
            savings[name].append(100 * (1 - emulate_frontier(frontier, factors).iteration_energy_j / top_j))
    return savings


def _top_of(frontier: Frontier) -> Frontier:
    """The top clocks as a policy's frontier."""
    return Frontier(
        frontier.schedule, frontier.profile, frontier.blocking, frontier.baseline, (frontier.baseline,),
        policy="max_frequency", own_choice=frontier.baseline,
    )  # fmt: skip


def draw(figures: dict[str, dict[int, dict[str, list[float]]]], path: Path) -> None:
    """The straggler figure: a panel for each model, a line for each system and number of pipelines."""
    figure = new_figure(5.2 * len(figures), 4.6)
    colours = {"EnvPipe": "#3f8f5b", "Perseus": "#d9822b", "ours": PLAN, THEN: PLAN}
    for axes, (model, of_count) in zip(
        figure.subplots(1, len(figures), squeeze=False)[0], figures.items(), strict=True
    ):
        for number, savings in enumerate(of_count.values()):
            for name, values in savings.items():
                label = name if number == len(of_count) - 1 else None
                shade = 0.35 + 0.65 * number / max(len(of_count) - 1, 1)
                line = {"color": colours[name], "linestyle": ":" if name == THEN else "-", "label": label}
                axes.plot(FACTORS, values, alpha=shade, linewidth=1.4, **line)
        counts = f"{min(of_count)} (pale) to {max(of_count)} pipelines"
        axes.set_title(f"{model}, 8 x 96\n{counts}, predicted", loc="left", color=INK, fontsize=10)
        axes.set_xlabel("straggler's iteration time, T'/T", color=INK)
        axes.set_ylabel("energy saved, all pipelines (%)", color=INK)
        axes.grid(color=GRID, linewidth=0.8)
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
        tidy(axes)
    save_figure(figure, path)


def print_zeus(zeus: dict[str, dict[int, dict[str, tuple[float, float]]]]) -> None:
    """Published rows, then those of the models at hand."""
    for gpu, published in PUBLISHED_ZEUS.items():
        computed = {
            f"{model}, x {count}: re-implemented": tuple(row.values())
            for model, rows in zeus.items()
            if gpu in model
            for count, row in rows.items()
        }
        print(f"\nZeus's own choice with power limits, {gpu}: saving in % (slowdown in %)\n")
        print("| | one limit for all GPUs | one for each stage |\n|---|---|---|")
        for name, row in {**published, **computed}.items():
            print(f"| {name} | " + " | ".join(f"{saved:.1f} ({slower:+.1f})" for saved, slower in row) + " |")


def main(arguments: list[str]) -> int:
    """Make the table and the figure; returns the exit status."""
    settings = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = settings.keys() - {"output_dir", "microbatches", "json"}
    if unknown:
        print(f"There is no setting {min(unknown)!r}. Known: output_dir, microbatches, json.", file=sys.stderr)
        return 2
    models = {model: one for model, one in PUBLISHED.items() if (MEASURED_DIR / one.file).exists()}
    if not models:
        print(f"The measured profiles are read from {MEASURED_DIR}; there are none.", file=sys.stderr)
        return 2
    counts = [int(count) for count in settings.get("microbatches", "12,24,48,96").split(",")]
    table: dict[str, list[dict[str, float]]] = {}
    figures: dict[str, dict[int, dict[str, list[float]]]] = {}
    zeus = {model: {count: zeus_row(published, count) for count in counts} for model, published in models.items()}
    for model, published in models.items():
        for count in counts:
            frontiers = frontiers_of(published, count)
            table.setdefault(model, []).append(table_row(published, count, frontiers))
        frontiers = frontiers_of(published, counts[-1], num_plans=NUM_PERSEUS_PLANS, at=FACTORS)
        figures[model] = {number: straggler_savings(frontiers, number) for number in NUM_PIPELINES}
    if "output_dir" in settings:
        draw(figures, Path(settings["output_dir"]) / "stragglers.png")
    if settings.get("json") == "true":
        print(json.dumps({"table": table, "factors": FACTORS, "stragglers": figures, "zeus": zeus}))
        return 0
    for model, rows in table.items():
        print(f"\n{model}: saving of each system's own choice in % (slowdown in %)\n")
        columns = [name for name in rows[0] if not name.endswith("slowdown")]
        print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
        for row in rows:
            shown = [str(int(row["microbatches"]))]
            for name in columns[1:]:
                slower = f" ({row[f'{name} slowdown']:+.2f})" if f"{name} slowdown" in row else ""
                shown.append(f"{row[name]:.2f}{slower}" if "published" not in name else f"{row[name]:.1f}")
            print("| " + " | ".join(shown) + " |")
        print(f"\n{model}, {counts[-1]} microbatches, one straggler: saving of all pipelines in %\n")
        shown_at = [1.0, 1.1, 1.2, 1.3, 1.5]
        print("| pipelines | system | " + " | ".join(f"T'/T = {at}" for at in shown_at) + " |\n|" + "---|" * 7)
        for number, savings in figures[model].items():
            for name, values in savings.items():
                cells = [f"{values[min(range(11), key=lambda i: abs(FACTORS[i] - at))]:.2f}" for at in shown_at]
                print(f"| {number} | {name} | " + " | ".join(cells) + " |")
        least = min(
            (ours - perseus, factor)
            for savings in figures[model].values()
            for ours, perseus, factor in zip(savings[THEN], savings["Perseus"], FACTORS, strict=True)
        )
        print(
            f"\nours at Perseus's time saves at least {least[0]:.2f} points more than Perseus (at T'/T = {least[1]:g})"
        )
        perseus, envpipe = models[model].at_1_2
        print(f"\npublished at 1.2, 16 pipelines, 96 microbatches: Perseus {perseus}, EnvPipe {envpipe} (corrected)")
    print_zeus(zeus)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
