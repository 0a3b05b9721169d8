"""Models as users bring them, on a pipeline and on one device: which train, and do they train alike?

    python benchmarks/model_zoo.py [models='llama,resnet*'] [stages=2,4] [steps=8] [output=docs/models.md]

`models` are names of cases or groups (`own`, `steps`, `torchvision`, `timm`, `transformers`), with wildcards; all
without it. torchvision and timm are not among this project's requirements: their models are skipped where they are not
installed. Every case is trained by AdamW on one device, which averages the losses of the same microbatches, and on
`stages`, in processes of its own with a time limit (`limit_s`), so that none stops the others.

Prints a table in Markdown, and on stderr tracebacks of what crashed if `verbose=true`; `output` writes a page of the
documentation. Equal are losses with a relative difference of at most 2e-5 at every step, if weights and buffers agree
at the end, too.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.strategy.zoo import CASES, Outcome, Settings, matching, measure  # isort: skip (before Lightning)
from lightning_pfo.cli.settings import read_settings, without_dashes
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.files import write_text_atomically
from tests.strategy.zoo.runner import NUM_MICROBATCHES

HEADER = """\
| model | of | stages | result | largest loss difference | weights | held twice | most on a rank | time (s) |
|---|---|---:|---|---:|---:|---:|---:|---:|"""
LONGEST_MESSAGE = 160


@dataclass
class Command:
    """What the command line may say."""

    models: str = "*"
    stages: str = "2"
    steps: int = 8
    limit_s: float = 120.0
    partition: str = "uniform"
    schedule: str = "1f1b"
    output: str = ""
    verbose: bool = False


def row(outcome: Outcome) -> str:
    """A row of the table."""

    def percent(share: float) -> str:
        return "" if isnan(share) else f"{100 * share:.1f} %"

    def number(value: float, form: str) -> str:
        return "" if isnan(value) else format(value, form)

    message = " ".join(outcome.message.split())
    if len(message) > LONGEST_MESSAGE:
        message = message[: LONGEST_MESSAGE - 3] + "..."
    result = outcome.status + (f": {message}" if message else "")
    cells = [
        outcome.case.name,
        outcome.case.group,
        str(outcome.stages),
        result.replace("|", "\\|"),
        number(outcome.loss_difference, ".1e"),
        number(outcome.weight_difference, ".1e"),
        percent(outcome.held_twice),
        percent(outcome.largest_share),
        number(outcome.seconds, ".1f"),
    ]
    return "| " + " | ".join(cells) + " |"


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many are what."""
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{number} {status}" for status, number in counts.most_common())


def page(outcomes: Sequence[Outcome], rows: Sequence[str], steps: int) -> str:
    """The page of the documentation."""
    return f"""# Models on a pipeline

Written by `python benchmarks/model_zoo.py`: models as users bring them, tiny and with random weights, trained for
{steps} steps of AdamW on one device and on a pipeline, without naming anything. One device averages the losses of the
same {NUM_MICROBATCHES} microbatches. Of {len(outcomes)} trainings: {summary(outcomes)}.

*Largest loss difference*: relative, to one device, of all steps; *equal* is at most 2e-5, with weights and buffers
that agree at the end. *Weights*: their distance to those of one device, as a share of the way they went. *Held twice*:
parameters that more than one rank holds, as a share of all. *Most on a rank*: the largest share of all parameters that
one rank holds. *Alike*: the model draws random numbers, which are others than on one device. torch
{torch.__version__}, CPU.

{HEADER}
{chr(10).join(rows)}
"""


def main(arguments: Sequence[str]) -> int:
    """Run the cases and print their rows; the status is 1 if something differs or crashes."""
    try:
        command: Command = read_settings(Command, without_dashes(arguments))
        stages = [int(number) for number in command.stages.split(",")]
        cases = matching([pattern.strip() for pattern in command.models.split(",")])
        if not cases:
            raise ConfigurationError(f"No model is called {command.models!r}. There are {', '.join(CASES)}.")
    except (ConfigurationError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = Settings(command.steps, command.limit_s, command.partition, command.schedule)
    outcomes: list[Outcome] = []
    rows = []
    begin_s = time.monotonic()
    print(HEADER)
    for case in cases:
        for outcome in measure(case, stages, settings):
            outcomes.append(outcome)
            rows.append(row(outcome))
            print(rows[-1], flush=True)
            if command.verbose and outcome.details:
                print(f"{case.name}, {outcome.stages} stages:\n{outcome.details}", file=sys.stderr)
    print(f"\n{summary(outcomes)}; {time.monotonic() - begin_s:.0f} s")
    if command.output:
        write_text_atomically(command.output, page(outcomes, rows, command.steps))
    return int(any(outcome.status in ("differs", "crashed", "ended", "too slow", "broken") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
