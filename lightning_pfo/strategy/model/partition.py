"""Which layers go to which stage: numbers in, boundaries out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_pfo.core.errors import PartitionError
from lightning_pfo.core.wording import counted

_ALONE, _WITH_ARGUMENT = ("uniform", "parameters", "profile"), ("type", "custom")

Boundaries = tuple[int, ...]
"""Stage s owns layers `boundaries[s]` up to, not including, `boundaries[s + 1]`."""


def check_partition(spec: str) -> None:
    """Check that `partition_layers` knows a spec, before there are layers.

    Raises:
        PartitionError: If it does not.
    """
    kind, colon, _ = spec.partition(":") if isinstance(spec, str) else ("", "", "")  # a setting may be anything
    if kind not in (_WITH_ARGUMENT if colon else _ALONE):
        raise _unknown(spec)


def _unknown(spec: str) -> PartitionError:
    return PartitionError(
        f"partition is 'uniform', 'parameters', 'type:REGEX', 'profile' or 'custom:0,...,LAYERS'; got {spec!r}. Try "
        "partition='uniform'."
    )


def partition_layers(
    spec: str,
    num_parameters: Sequence[float],
    num_stages: int,
    *,
    types: Sequence[str] = (),
    times_s: Sequence[float] = (),
    undivided: Collection[int] = (),
) -> Boundaries:
    """Divide layers into contiguous stages.

    Args:
        spec: `uniform` (equal layer counts, the first stages take the remainder), `parameters` (balances numbers of
            parameters), `type:REGEX` (balances the number of layers whose class has a matching name), `profile`
            (balances measured times), or `custom:0,3,6,10` (the boundaries themselves). For what is balanced, see
            `balance`.
        num_parameters: Number of parameters of each layer, with what runs around it.
        num_stages: Number of stages; each gets at least one layer.
        types: Class name of each layer; for `type:REGEX`.
        times_s: Measured time of each layer in seconds, forward and backward; for `profile`.
        undivided: Layers that cannot begin a stage. Where too few others are left, and in a custom partition, they may
            all the same: whoever uses that says why not.

    Returns:
        `num_stages + 1` boundaries from 0 to the number of layers.

    Raises:
        PartitionError: If there are fewer layers than stages, or the spec is malformed or does not fit.
    """
    num_layers = len(num_parameters)
    if num_stages == 1 and not num_layers:  # a step without layers, as that of a baseline that learns nothing
        return (0, 0)
    if num_layers < num_stages:
        raise PartitionError(
            f"Each stage needs at least one layer; the pipelined module has {counted(num_layers, 'layer')} for "
            f"{counted(num_stages, 'stage')}. Use {num_layers} or fewer (devices, times stages per rank where a "
            f"schedule has several), split the module into more layers, or name one whose parts are layers by "
            f"pipeline_module='...'. Layers are modules that the first batch calls: one that it leaves out (a depth "
            f"that grows), or of which a step takes the weights alone (functional.linear(x, layer.weight)) is none."
        )
    check_partition(spec)
    kind, _, argument = spec.partition(":")
    if kind == "custom":
        return _custom(argument, num_layers, num_stages)
    starts = [layer for layer in range(num_layers) if layer not in undivided]
    if len(starts) < num_stages:
        starts = list(range(num_layers))
    if kind == "uniform" and len(starts) == num_layers:
        base, extra = divmod(num_layers, num_stages)
        return tuple(accumulate((base + (stage < extra) for stage in range(num_stages)), initial=0))
    weights: Sequence[float]
    if kind == "uniform":
        weights = [1] * num_layers
    elif kind == "parameters":
        weights = num_parameters
    elif kind == "profile" and len(times_s) == num_layers:
        weights = times_s
    elif kind == "type":
        weights = _matches(argument, types, num_stages)
    else:
        raise _unknown(spec)
    edges = [*starts, num_layers]
    groups = balance([sum(weights[start:stop]) for start, stop in pairwise(edges)], num_stages)
    return tuple(edges[group] for group in groups)


def balance(weights: Sequence[float], num_stages: int) -> Boundaries:
    """Make the heaviest stage as light as possible, and of these divisions take the most even one.

    The heaviest stage sets the pace of a pipeline. Among divisions with the same heaviest stage, the one with the least
    sum of squares is taken: the sum of all stages is fixed, so that is the one of least variance. Both steps are exact,
    by dynamic programming over (stages, layers) in O(stages x layers^2) time.

    Args:
        weights: One non-negative weight per layer.
        num_stages: Number of stages, at most the number of layers.
    """
    prefix = list(accumulate(weights, initial=0.0))
    heaviest, _ = _cheapest(prefix, num_stages, max, float("inf"))
    equal = heaviest * (1 + 1e-9)  # sums of floats differ in their last digits
    return _cheapest(prefix, num_stages, lambda before, stage: before + stage * stage, equal)[1]


def _cheapest(
    prefix: Sequence[float], num_stages: int, add: Callable[[float, float], float], limit: float
) -> tuple[float, Boundaries]:
    """Minimise a cost over divisions whose stages weigh `limit` at most; `add` takes the cost so far and a stage."""
    impossible: tuple[float, Boundaries] = (float("inf"), ())
    # best[end]: (cost, boundaries) of dividing layers [0, end) into the stages so far
    best: list[tuple[float, Boundaries]] = [(0.0, (0,))] + [impossible] * (len(prefix) - 1)
    for stage in range(1, num_stages + 1):
        best = [
            min(
                (
                    (add(best[cut][0], prefix[end] - prefix[cut]), (*best[cut][1], end))
                    for cut in range(stage - 1, end)
                    if best[cut][1] and prefix[end] - prefix[cut] <= limit
                ),
                default=impossible,
            )
            for end in range(len(prefix))
        ]
    return best[-1]


def _matches(pattern: str, types: Sequence[str], num_stages: int) -> list[bool]:
    try:
        matches = [bool(re.search(pattern, name, re.IGNORECASE)) for name in types]
    except re.error as error:
        raise PartitionError(
            f"partition='type:REGEX' takes a regular expression; {pattern!r} is none: {error}."
        ) from error
    if not pattern or sum(matches) < num_stages:
        raise PartitionError(
            f"partition='type:REGEX' gives each of the {num_stages} stages a layer of a matching class; {pattern!r} "
            f"matches {sum(matches) if pattern else 0} of the layers, whose classes are {sorted(set(types))}."
        )
    return matches


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
            f"layers) for {counted(num_stages, 'stage')}; got {argument!r}. For example partition='custom:{example}'."
        )
    return boundaries


def describe_partition(
    name: str,
    boundaries: Boundaries,
    parameters: Sequence[Amount],
    placement: Sequence[int],
    times_s: Sequence[float] = (),
    saved_bytes: Sequence[int] = (),
) -> str:
    """Say what each stage has, and how unequal the stages are.

    Args:
        name: What is divided; empty: the whole module.
        boundaries: The partition.
        parameters: Those that each stage uses.
        placement: Rank of every stage.
        times_s: Measured time of each layer.
        saved_bytes: What each stage keeps of a microbatch for its backward.
    """
    times = [sum(times_s[start:stop]) for start, stop in pairwise(boundaries)] if times_s else []
    what = repr(name) if name else "the module"
    lines = [f"{what} runs in {counted(len(placement), 'stage')}:"]
    for stage, (start, stop) in enumerate(pairwise(boundaries)):
        where = "" if placement[stage] == stage else f" on rank {placement[stage]}"
        time = f", {times[stage] * 1e3:,.1f} ms" if times else ""
        saved = f", keeps {in_bytes(saved_bytes[stage])} of a microbatch" if any(saved_bytes) else ""
        layers = f"layers {start}-{stop - 1}" if stop > start else "no layers"
        lines.append(f"  stage {stage}{where}: {layers}, {parameters[stage]}{time}{saved}")
    imbalances = [f"{_imbalance([amount.number for amount in parameters])} by parameters"]
    imbalances += [f"{_imbalance(times)} by measured time"] if times else []
    lines.append(f"  imbalance (heaviest / lightest stage): {', '.join(imbalances)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Amount:
    """Parameters: how many, and how large they are together."""

    number: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.number:,} parameters ({in_bytes(self.num_bytes)})"


def in_bytes(number: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def _imbalance(stages: Sequence[float]) -> str:
    return f"{max(stages) / min(stages):.2f}" if min(stages) > 0 else "infinite"
