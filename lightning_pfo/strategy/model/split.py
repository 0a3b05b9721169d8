"""How a model is divided: which stages have which units, and where a traced step is cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import named_tensors
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.calls import LayerCalls, layer_calls
from lightning_pfo.strategy.model.ownership import Part, find_users, tied_names
from lightning_pfo.strategy.model.partition import Boundaries, partition_layers
from lightning_pfo.strategy.model.tracing.dividing.cutting import Bound, LeadsBackError, cuts_before, cuts_by_owner
from lightning_pfo.strategy.model.tracing.dividing.flow import Flow, stages_by_owner
from lightning_pfo.strategy.model.tracing.dividing.homes import OfLayer, homes_of
from lightning_pfo.strategy.model.tracing.dividing.phases import has_phases, phases_of
from lightning_pfo.strategy.model.tracing.dividing.program import (
    StageProgram,
    check_cuts,
    end_of_samples,
    programs_by_stage,
    programs_of,
    stages_between,
)
from lightning_pfo.strategy.model.tracing.ends import BY_FIRST_BATCH
from lightning_pfo.strategy.model.tracing.events import Event, Trace
from lightning_pfo.strategy.model.tracing.noticing.held import Place
from lightning_pfo.strategy.model.tracing.tracked import follow_units
from lightning_pfo.strategy.model.units import Unit, Units, find_units, units_of
from lightning_pfo.strategy.model.variables import is_of_library, packages_of

_ALIKE = (
    "Use it in the same way in training from the first batch on (in a loop of your own in that of example_batch=), if "
    "only times 0 in the loss."
)


@dataclass(frozen=True)
class Split:
    """A divided model.

    Attributes:
        units: Its units.
        calls: The layers, in the order of their calls.
        boundaries: Which calls belong to which stage.
        owners: The stages that have a unit; none for one that is not called.
        held: The stages that use a parameter or buffer, by name: whose ranks hold it.
        tied: The name by which `held` knows a parameter or buffer, by each other name that it has.
        everywhere: Names of parameters that the step uses by itself, without a value of a stage.
        weights: Parameters and buffers that the step uses by themselves, and that are followed.
        several_states: Units that change their buffers (running statistics) on several stages.
        saved_bytes: What autograd keeps of a microbatch on each stage; empty if it is not known.
        holds_once: Whether the last stage alone holds what the first batch is not known to use.
        follows_weights: Whether what uses weights of layers by themselves may run where the layers are.
        look: What is said of the look at a first batch, if the step has failed there; see `told_of_look`.
    """

    units: Units
    calls: LayerCalls
    boundaries: Boundaries
    owners: dict[Unit, frozenset[int]]
    held: dict[str, frozenset[int]]
    tied: dict[str, str] = field(default_factory=dict)
    everywhere: frozenset[str] = frozenset()
    weights: tuple[Place, ...] = ()
    several_states: tuple[Unit, ...] = ()
    saved_bytes: tuple[int, ...] = ()
    holds_once: bool = False
    follows_weights: bool = True
    look: str = ""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.boundaries) - 1

    def parts(self) -> list[Part]:
        """What each stage runs; modules that are not part of any run on every rank, if at all."""
        return [Part(unit.module, self.owners[unit]) for unit in self.units.all if self.owners.get(unit)]

    def modules_at_end(self, root: nn.Module) -> dict[str, nn.Module]:
        """The modules whose own code a step runs on its last stage, by name: those around units, and the user's there.

        Args:
            root: The user's module, which is none of them.
        """
        at_end = [unit for unit in self.units.all if self.owners.get(unit, self.last) == self.last]
        left_out = {id(module) for unit in self.units.all if unit not in at_end for module in unit.module.modules()}
        inside = {id(module) for unit in at_end for module in unit.module.modules()}
        packages = packages_of(root)
        return {
            name: module
            for name, module in root.named_modules()
            if module is not root
            and id(module) not in left_out
            and not is_of_library(type(module), packages)
            and not (id(module) in inside and any(True for _ in module.parameters()))
        }

    def modules_inside(self, root: nn.Module, stages: Collection[int]) -> dict[str, nn.Module]:
        """The units of some stages and what is in them, by name, of classes of the user's own.

        Args:
            root: The user's module.
            stages: The stages.
        """
        inside = {
            id(module)
            for unit in self.units.all
            if not self.owners.get(unit, frozenset()).isdisjoint(stages)
            for module in unit.module.modules()
        }
        packages, at_end = packages_of(root), self.modules_at_end(root)
        return {
            name: module
            for name, module in root.named_modules()
            if id(module) in inside and name not in at_end and not is_of_library(type(module), packages)
        }

    @property
    def last(self) -> frozenset[int]:
        """The last stage."""
        return frozenset({self.num_stages - 1})

    @property
    def all(self) -> frozenset[int]:
        """All stages."""
        return frozenset(range(self.num_stages))

    def layers_of(self, stage: int) -> list[Unit]:
        """The layers of a stage."""
        return list(dict.fromkeys(self.calls.layers[self.boundaries[stage] : self.boundaries[stage + 1]]))

    def programs(self, trace: Trace) -> list[StageProgram]:
        """What each stage does of a step.

        Raises:
            ConfigurationError: If stages cannot run it one after the other.
        """
        return programs_by_stage(trace, self.stages(trace), self.num_stages)

    def programs_of_phases(self, trace: Trace) -> list[list[StageProgram]]:
        """What each stage does in each phase of a step, which may have one only.

        Raises:
            ConfigurationError: If stages cannot run it one after the other, or in phases.
        """
        if not has_phases(trace):
            return [self.programs(trace)]
        self._check_everywhere(trace)
        bound, flow = self._bound(trace), Flow(trace)
        homes = self._homes(trace, flow)
        return [
            programs_by_stage(
                trace,
                stages_by_owner(trace, flow, phase.computed, bound, self.num_stages, homes),
                self.num_stages,
                phase,
            )
            for phase in phases_of(trace, flow)
        ]

    def with_look(self, error: Exception) -> Exception:
        """What is raised where a step needs something of another stage: the error, or that the first batch missed it.

        Args:
            error: The error, or another one.
        """
        is_missed = isinstance(error, LeadsBackError) or BY_FIRST_BATCH in str(error)
        if not (self.look and is_missed):
            return error
        return ConfigurationError(f"{self.look} What comes after that is not known, so now it is refused: {error}")

    def with_ties(self, error: Exception, root: nn.Module) -> Exception:
        """What is raised where a step fails: the error, or that weights of several stages have been tied.

        Args:
            error: The error.
            root: The user's module as it is now.
        """

        def held(name: str) -> frozenset[int] | None:
            return self.held.get(self.tied.get(name, name))

        if not isinstance(error, ConfigurationError):
            return error
        for name, first in tied_names(root).items():
            is_known = held(name) is not None and held(first) is not None
            if is_known and self.tied.get(name) != first and held(name) != held(first):
                return ConfigurationError(
                    f"A pipeline is divided by the weights that are tied when training begins; {name!r} has become "
                    f"{first!r} since, and other stages use it. Tie them before: in __init__, configure_model or setup "
                    f"(in a loop of your own, before the model is prepared)."
                )
        return error

    def programs_before_end(self, trace: Trace, whole: Trace) -> tuple[list[StageProgram], list[StageProgram]]:
        """What each stage does of a step whose end runs on the whole batch; see `end_of_samples`.

        Args:
            trace: The step on a microbatch.
            whole: The step on the whole batch.

        Returns:
            What each stage does of the microbatch; what it would do of the whole batch, and then the end.

        Raises:
            ConfigurationError: If stages cannot run it one after the other, or it does not end so.
        """
        if has_phases(trace):
            raise ConfigurationError(
                "With loss_over='batch' the end of a step runs on the whole batch, and each batch has one backward; "
                "this step has several, or calls layers after an optimizer's step. Do one in each batch (if batch_idx "
                "% 2 == 0: ...), or leave loss_over='batch' out."
            )
        trace.need_as(whole)
        cuts = self.cuts(trace)
        cuts.append(end_of_samples(trace, whole, cuts[-1] if cuts else 0))
        return programs_of(trace, cuts)[:-1], programs_of(whole, cuts)

    def follow_into(self, units: Sequence[Unit], patches: Patches) -> bool:
        """Follow the parts of units instead; tells whether there are any.

        Raises:
            ConfigurationError: If such a unit runs as a whole, compiled or divided over replicas.
        """
        for unit in units:
            if unit.replacement is not None:
                raise ConfigurationError(
                    f"Something hooks into a part of {unit.name!r}, as output_attentions=True does, but the layer runs "
                    f"as a whole. Leave out compile=True and fully_shard=True, or the hook."
                )
            unit.followed_into = True
            parts = units_of(unit)
            for part in parts:
                part.outside = unit.outside
            self.units.all.extend(parts)
            self.owners.update((part, self.owners[unit]) for part in parts if unit in self.owners)
            follow_units(parts, patches)
        return bool(units)

    def cuts(self, trace: Trace) -> list[int]:
        """Where a step is cut, such that each stage runs what it has and uses what it holds.

        Raises:
            LeadsBackError: If stages do not follow each other in the order of calls.
            ConfigurationError: If it cannot be cut so.
        """
        self._check_everywhere(trace)
        try:
            return self._cuts(trace, self._bound(trace))
        except LeadsBackError as error:
            copies = [unit.name for event in trace.events for unit in event.units if unit.copied_from is not None]
            if not copies:
                raise
            raise LeadsBackError(
                f"{error} The step calls a copy of {copies[0]!r} that was made after the model was divided, and is "
                f"where that is. Copy the layers in __init__: they are divided by themselves then. A hook gives them "
                f"the weights within trainer.strategy.whole_parameters(...)."
            ) from error

    def stages(self, trace: Trace) -> dict[int, int]:
        """The stage of each event of a step, such that each stage runs what it has and uses what it holds.

        Raises:
            ConfigurationError: If it cannot be divided so.
        """
        if trace.weights:  # which the step may use long after the layers
            self._check_everywhere(trace)
            with suppress(ConfigurationError):
                return self._stages_by_owner(trace)
        try:
            cuts = self.cuts(trace)
        except LeadsBackError:  # by the order of calls; what events need may lead nowhere back
            return self._stages_by_owner(trace)
        check_cuts(trace, cuts)
        return stages_between(trace, cuts)

    def _stages_by_owner(self, trace: Trace) -> dict[int, int]:
        flow = Flow(trace)
        homes = self._homes(trace, flow)
        try:
            return stages_by_owner(trace, flow, range(len(trace.events)), self._bound(trace), self.num_stages, homes)
        except ConfigurationError as error:
            names = {name for event in trace.events for name in event.held if f"{name!r}, which" in str(error)}
            hint = _ALIKE if names else self._hint_of_uncalled(trace)
            if not hint:
                raise
            raise type(error)(f"{error} {hint}") from error

    def _hint_of_uncalled(self, trace: Trace) -> str:
        """What to do about units that a step calls, but the first batch did not, and that not all stages hold."""
        for unit in (unit for event in trace.events for unit in event.units if not self.owners.get(unit)):
            missed = f"The first training batch has not called {unit.name!r}"
            tied = [first for name, first in self._names_in(unit) if name != first and self.held[first] != self.all]
            if tied:
                return f"{missed}, so that its {tied[0]!r} is only where other modules use it. {_ALIKE}"
            if self.holds_once and self.last in self._stages_with(unit):
                return f"{missed}, so that not all stages hold it; with hold_uncalled='everywhere' they do."
        return ""

    def _cuts(self, trace: Trace, bound: list[Bound]) -> list[int]:
        if tuple(unit for unit, _ in trace.marks) == self.calls.layers:
            cuts = cuts_before(trace, [trace.marks[first][1] for first in self.boundaries[1:-1]], bound)
            edges = [0, *cuts, len(trace.events)]
            if all(
                stage in stages
                for stage, (start, stop) in enumerate(pairwise(edges))
                for of_event in bound[start:stop]
                for _, stages in of_event
            ):
                return cuts
        return cuts_by_owner(bound, self.num_stages)

    def _bound(self, trace: Trace) -> list[Bound]:
        return [self._bound_to(event) for event in trace.events]

    def _bound_to(self, event: Event) -> Bound:
        units = [(unit.name, stages) for unit in event.units for stages in self._stages_with(unit)]
        metric = [("a metric", self.last)] if event.of_metric else []
        return [*units, *metric, *((name, self.held[name]) for name in event.held if name in self.held)]

    def _homes(self, trace: Trace, flow: Flow) -> dict[int, int]:
        """Where events are computed rather than elsewhere that use weights of layers by themselves."""
        if not trace.weights:
            return {}
        layers = {
            f"{unit.name}.{name}": OfLayer(min(stages), tensor.nbytes)
            for unit, stages in self.owners.items()
            if stages
            for name, tensor in named_tensors(unit.module).items()
        }
        return homes_of(trace, flow, layers)

    def _stages_with(self, unit: Unit) -> set[frozenset[int]]:
        """The stages on which a unit can be called; several sets if it can be on the stages of all of them only."""
        owners = self.owners.get(unit.copied_from or unit)
        if owners:
            return {owners}
        within = {self.held[first] for _, first in self._names_in(unit)}
        return {stages for stages in within if len(stages) < self.num_stages}

    def _names_in(self, unit: Unit) -> list[tuple[str, str]]:
        """The parameters and buffers of a unit: their names in it, and those by which `held` knows them."""
        names = chain(zip(self.held, self.held, strict=True), self.tied.items())
        return [(name, first) for name, first in names if f"{name}.".startswith(f"{unit.name}.")]

    def apart(self, trace: Trace) -> list[str]:
        """The names of parameters and buffers that a step uses by themselves, and that not all stages hold."""
        return [name for name in trace.everywhere if self.held.get(name, self.all) != self.all]

    def _check_everywhere(self, trace: Trace) -> None:
        last = {self.num_stages - 1}
        uses = [(name, set(range(self.num_stages))) for name in trace.everywhere] + [(n, last) for n in trace.at_end]
        for name, stages in uses:
            if not stages <= self.held.get(name, stages):
                raise ConfigurationError(
                    f"{name!r} is held by {_stages(self.held[name])}, {BY_FIRST_BATCH}, but this "
                    f"step uses it on {_stages(stages)}. {_ALIKE}"
                )


def split_units(
    root: nn.Module,
    units: Units,
    calls: LayerCalls,
    boundaries: Boundaries,
    trace: Trace | None = None,
    *,
    uncalled: str = "everywhere",
) -> Split:
    """Give the stages their units, and the parameters that a step uses beside these.

    Args:
        root: The user's module.
        units: Its units.
        calls: In which order it calls them.
        boundaries: Which calls belong to which stage.
        trace: Its step; None: nobody knows what it uses.
        uncalled: Who holds what the step does not use: `everywhere` all do, `once` the last stage.
    """
    owners: dict[Unit, set[int]] = {}
    for stage, (start, stop) in enumerate(pairwise(boundaries)):
        for index in range(start, stop):
            for unit in (calls.layers[index], *calls.others[index]):
                owners.setdefault(unit, set()).add(stage)
    stages_of = {unit: frozenset(stages) for unit, stages in owners.items()}
    split = Split(units, calls, boundaries, stages_of, {}, tied_names(root))
    num_stages = split.num_stages
    if trace is None:
        return replace(split, held=find_users(root, split.parts(), {}, num_stages))
    users: dict[str, set[int]] = {name: set(range(num_stages)) for name in trace.everywhere}
    for name in trace.at_end:
        users.setdefault(name, set()).add(num_stages - 1)
    changing: dict[Unit, set[int]] = {}
    saved_bytes = [0] * num_stages
    for programs in split.programs_of_phases(trace):
        for stage, program in enumerate(programs):
            saved_bytes[stage] = max(saved_bytes[stage], sum(event.saved_bytes for event in program.computed))
            for event in program.computed:
                for name in event.held:
                    users.setdefault(name, set()).add(stage)
                for unit in event.units if event.changes_state else ():
                    changing.setdefault(unit, set()).add(stage)
    beside = {name: frozenset(stages) for name, stages in users.items()}
    of_uncalled = split.last if uncalled == "once" and trace.failure is None else None
    return replace(
        split,
        held=find_users(root, split.parts(), beside, num_stages, of_uncalled),
        everywhere=frozenset(trace.everywhere),
        weights=tuple(trace.weights),
        several_states=tuple(unit for unit, stages in changing.items() if len(stages) > 1),
        saved_bytes=tuple(saved_bytes),
        holds_once=of_uncalled is not None,
    )


def _stages(stages: Collection[int]) -> str:
    return f"stage{'' if len(stages) == 1 else 's'} {', '.join(map(str, sorted(stages)))}"


def check_split(root: nn.Module, partition: str, num_stages: int) -> None:
    """Check that a model can be split, before processes are started.

    Raises:
        ConfigurationError: If it has nothing to split.
        PartitionError: If the partition does not fit its layers.
    """
    calls = layer_calls(find_units(root, at_least=num_stages), None)
    weights = calls.num_parameters  # in place of times, which nobody has measured
    partition_layers(partition, weights, num_stages, types=calls.types, times_s=weights)
