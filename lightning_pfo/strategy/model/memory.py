"""How the memory of parameters is divided: what each stage uses, what several ranks hold, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from lightning_pfo.strategy.model.partition import Amount, balance, in_bytes
from lightning_pfo.strategy.model.split import Split

_MOST_HELD_TWICE = 0.1
_LARGEST_IMBALANCE = 1.5


@dataclass(frozen=True)
class Memory:
    """Parameters of a split model.

    Attributes:
        of_stages: Those that each stage uses.
        total: All, each once.
        held_twice: What ranks hold beyond that.
        most_of_it: The module with most of these.
    """

    of_stages: tuple[Amount, ...]
    total: Amount
    held_twice: Amount
    most_of_it: str

    @property
    def share_held_twice(self) -> float:
        """What ranks hold beyond one copy of all parameters, as a share of these."""
        return self.held_twice.num_bytes / max(1, self.total.num_bytes)

    @property
    def imbalance(self) -> float:
        """The parameters of the heaviest stage in bytes, over the mean of all stages."""
        of_stages = [amount.num_bytes for amount in self.of_stages]
        return max(of_stages) * len(of_stages) / max(1, sum(of_stages))

    def __str__(self) -> str:
        if not self.held_twice.number:
            return "  held twice: nothing"
        return f"  held twice: {self.held_twice}, {self.share_held_twice:.1%} of all, most of it in {self.most_of_it!r}"


def memory_of(root: nn.Module, split: Split, placement: Sequence[int]) -> Memory:
    """Add up the parameters of a split model; placeholders count as what they stand for."""
    parameters = dict(root.named_parameters())
    copies = {name: len({placement[stage] for stage in split.held[name]}) - 1 for name in parameters}
    by_module: dict[str, int] = {}
    for name, parameter in parameters.items():
        module = name.rpartition(".")[0] or name
        by_module[module] = by_module.get(module, 0) + copies[name] * parameter.nbytes
    return Memory(
        tuple(
            _amount({name: stage in split.held[name] for name in parameters}, parameters)
            for stage in range(split.num_stages)
        ),
        _amount(dict.fromkeys(parameters, 1), parameters),
        _amount(copies, parameters),
        max(by_module, key=lambda module: by_module[module], default=""),
    )


def _amount(counts: Mapping[str, int], parameters: Mapping[str, nn.Parameter]) -> Amount:
    return Amount(
        sum(counts[name] * parameter.numel() for name, parameter in parameters.items()),
        sum(counts[name] * parameter.nbytes for name, parameter in parameters.items()),
    )


def warnings_of(root: nn.Module, memory: Memory, split: Split, placement: Sequence[int]) -> list[str]:
    """What to tell the user of memory that is badly divided, with the module that is the cause and a way out."""
    warnings = []
    if memory.share_held_twice > _MOST_HELD_TWICE:
        warnings.append(
            f"Ranks hold {memory.share_held_twice:.1%} of the parameters twice "
            f"({in_bytes(memory.held_twice.num_bytes)}), most of it in {memory.most_of_it!r}, "
            f"{_why_held_twice(root, memory.most_of_it, split, placement)}"
        )
    if memory.imbalance > _LARGEST_IMBALANCE:
        heaviest = max(range(split.num_stages), key=lambda stage: memory.of_stages[stage].num_bytes)
        warnings.append(
            f"Stage {heaviest} has {memory.imbalance:.2f} times the mean of the parameters of all stages "
            f"({in_bytes(memory.of_stages[heaviest].num_bytes)}), {_why_unequal(heaviest, split)}"
        )
    warnings += [
        f"{unit.name!r} changes its buffers, such as running statistics, on several stages: each rank has those of its "
        f"own calls, and checkpoints hold those of one. Give each call a module of its own, or use fewer stages."
        for unit in split.several_states
    ]
    return warnings


def _why_held_twice(root: nn.Module, module: str, split: Split, placement: Sequence[int]) -> str:
    if any(name.rpartition(".")[0] == module or name == module for name in split.everywhere):
        return (
            "which the step uses by itself, without a value that a module has returned, so that every stage does. Use "
            "it in the forward of a module that the step calls."
        )
    users = sorted({stage for name, s in split.held.items() if name.rpartition(".")[0] == module for stage in s})
    calls = [unit for unit in split.units.all if split.owners.get(unit) and f"{module}.".startswith(f"{unit.name}.")]
    stages = ", ".join(map(str, users))
    if any(len(split.owners[unit]) > 1 for unit in calls):
        return (
            f"which is called on stages {stages}, so that each holds it. Replicas in place of stages divide such a "
            f"model: data_parallel_size={len(set(placement))} with fully_shard=True, or use fewer stages."
        )
    followed = {id(module) for module, _ in split.weights}
    if any(id(unit.module.get_submodule(module[len(unit.name) + 1 :])) in followed for unit in calls):
        return (
            f"which the step uses by itself on stages {stages}, together with other weights or as a whole, as an "
            f"average of weights does. What it makes of one weight, as its norm, is computed where that is; or use it "
            f"in the forward of a module that the step calls."
        )
    if _is_of_called(root, module, split):
        way_out = "Untie it, or use fewer stages."
        if users == [0, split.num_stages - 1] and placement[0] != placement[-1]:
            way_out = "A schedule that has the first and the last stage on one rank holds it once: schedule='zbv'."
        return f"which stages {stages} use, as tied weights are. {way_out}"
    return (
        "which no layer holds that the first batch is known to call, so that any stage may need it. Leave out what no "
        "step calls (or let one rank hold it: hold_uncalled='once'), and let a module that the step calls hold what it "
        "uses."
    )


def _is_of_called(root: nn.Module, module: str, split: Split) -> bool:
    """Whether a unit that is called has a parameter of a module, by whatever name, as T5's encoder its embedding."""
    own = {id(p) for name, p in root.named_parameters() if name.rpartition(".")[0] == module}
    called = (unit for unit in split.units.all if split.owners.get(unit))
    return any(id(parameter) in own for unit in called for parameter in unit.module.parameters())


def _why_unequal(heaviest: int, split: Split) -> str:
    weights = split.calls.num_parameters
    layers = range(split.boundaries[heaviest], split.boundaries[heaviest + 1])
    index = max(layers, key=lambda layer: weights[layer])
    units = (split.calls.layers[index], *split.calls.others[index])
    name = max(units, key=lambda unit: unit.num_parameters).name
    for num_stages in range(split.num_stages, 1, -1):
        boundaries = balance(weights, num_stages)
        stages = [sum(weights[start:stop]) for start, stop in pairwise(boundaries)]
        imbalance = max(stages) * num_stages / max(1, sum(stages))
        if imbalance > _LARGEST_IMBALANCE:
            continue
        if boundaries == split.boundaries:  # by layers it is even
            return (
                f"most of it in {_beside(heaviest, split)!r}, which is no layer and stays there with any partition. "
                f"Leave out what no step calls, and let a layer hold what it uses."
            )
        how = "" if num_stages == split.num_stages else f" in {num_stages} stages"
        listed = ",".join(map(str, boundaries))
        return f"most of it in {name!r}. partition='custom:{listed}'{how} gives {imbalance:.2f} times the mean."
    return (
        f"most of it in {name!r}, which is not divided. Hold the parts of {name!r} in an nn.Sequential or an "
        f"nn.ModuleList, so that stages can share them."
    )


def _beside(stage: int, split: Split) -> str:
    """A module whose parameters this stage holds, not all do, and no unit that is called has; what has most of them."""
    called = [f"{unit.name}." for unit in split.units.all if split.owners.get(unit)]
    of_stage = [name for name, stages in split.held.items() if stage in stages and len(stages) < split.num_stages]
    names = [name for name in of_stage if not name.startswith(tuple(called))]
    modules = [name.rpartition(".")[0] or name for name in names]
    return max(modules, key=modules.count, default="")
