"""Which layers go to which stage: integers in, boundaries out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_pfo.core.errors import PartitionError

Boundaries = tuple[int, ...]
"""Stage s owns layers `boundaries[s]` up to, not including, `boundaries[s + 1]`."""


def partition_layers(spec: str, layer_weights: Sequence[float], num_stages: int) -> Boundaries:
    """Divide layers into contiguous stages.

    Args:
        spec: `uniform` (equal layer counts, the first stages take the remainder), `parameters` (least heaviest stage by
            `layer_weights`), or `custom:0,3,6,10` (the boundaries themselves).
        layer_weights: One weight per layer, e.g. its number of parameters.
        num_stages: Number of stages; each gets at least one layer.

    Returns:
        `num_stages + 1` boundaries from 0 to the number of layers.

    Raises:
        PartitionError: If there are fewer layers than stages, or the spec is malformed or does not fit.
    """
    num_layers = len(layer_weights)
    if num_layers < num_stages:
        raise PartitionError(
            f"Each stage needs at least one layer; the pipelined module has {num_layers} layers for {num_stages} "
            f"stages. Use devices={num_layers} or fewer, or split the module into more layers."
        )
    kind, _, argument = spec.partition(":")
    if kind == "uniform" and not argument:
        base, extra = divmod(num_layers, num_stages)
        sizes = [base + (stage < extra) for stage in range(num_stages)]
        return tuple(sum(sizes[:stage]) for stage in range(num_stages + 1))
    if kind == "parameters" and not argument:
        return _least_heaviest_stage(layer_weights, num_stages)
    if kind == "custom":
        return _custom(argument, num_layers, num_stages)
    raise PartitionError(
        f"partition is 'uniform', 'parameters' or 'custom:0,...,{num_layers}'; got {spec!r}. "
        f"For {num_stages} stages try partition='uniform'."
    )


def _custom(argument: str, num_layers: int, num_stages: int) -> Boundaries:
    try:
        boundaries = tuple(int(part) for part in argument.split(","))
    except ValueError:
        boundaries = ()
    rising = all(a < b for a, b in pairwise(boundaries))
    if len(boundaries) != num_stages + 1 or not rising or (boundaries[0], boundaries[-1]) != (0, num_layers):
        example = ",".join(str(stage * num_layers // num_stages) for stage in range(num_stages + 1))
        raise PartitionError(
            f"A custom partition lists {num_stages + 1} rising boundaries from 0 to {num_layers} (the number of "
            f"layers) for {num_stages} stages; got {argument!r}. For example partition='custom:{example}'."
        )
    return boundaries


def _least_heaviest_stage(weights: Sequence[float], num_stages: int) -> Boundaries:
    """Minimise the heaviest stage exactly by dynamic programming over (stages, layers)."""
    num_layers = len(weights)
    prefix = [0.0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    # best[end]: (heaviest stage, boundaries) of dividing layers [0, end) into the stages so far
    best: list[tuple[float, Boundaries]] = [(prefix[end], (0, end)) for end in range(num_layers + 1)]
    for stage in range(2, num_stages + 1):
        best = [
            min(
                ((max(best[cut][0], prefix[end] - prefix[cut]), (*best[cut][1], end)) for cut in range(stage - 1, end)),
                default=(float("inf"), ()),
            )
            for end in range(num_layers + 1)
        ]
    return best[num_layers][1]


def describe_partition(name: str, boundaries: Boundaries, weights: Sequence[int], placement: Sequence[int]) -> str:
    """Say which layers and how many parameters each stage has."""
    lines = [f"{name!r} runs in {len(placement)} stages:"]
    for stage, (start, stop) in enumerate(pairwise(boundaries)):
        where = "" if placement[stage] == stage else f" on rank {placement[stage]}"
        lines.append(f"  stage {stage}{where}: layers {start}-{stop - 1}, {sum(weights[start:stop]):,} parameters")
    return "\n".join(lines)
