"""What instructions of a rank take of memory: one microbatch runs on each of its stages, without values if possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.engine.executor import followed_at_once
from lightning_pfo.strategy.engine.living_bytes import LivingBytes, bytes_on
from lightning_pfo.strategy.engine.stage import Stage, received_forms
from lightning_pfo.strategy.model.buffers import StepBuffers
from lightning_pfo.strategy.model.reach.caches import Caches
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.model.tracing.forms.values import without_reports
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.dtensor import is_divided_over, local
from lightning_pfo.strategy.step.gradients import StepGradients, put_gradients, take_gradients
from lightning_pfo.strategy.step.memory.costs import OF_WEIGHTS, Cost, StageCosts
from lightning_pfo.strategy.step.memory.exchanges import Exchanges
from lightning_pfo.strategy.step.memory.leavings import Leavings, Left
from lightning_pfo.strategy.step.memory.substitutes import Substitutes
from lightning_pfo.strategy.step.metrics.states import metrics_in, modules_around
from lightning_pfo.strategy.step.whole.end import End, JoinedLoss
from lightning_pfo.strategy.step.whole.joining import Join

_WAYS = (
    (InstructionType.FORWARD, InstructionType.BACKWARD),
    (InstructionType.FORWARD, InstructionType.INPUT_GRADIENT, InstructionType.WEIGHT_GRADIENT),
)
"""What a schedule does of a microbatch."""


@dataclass(frozen=True)
class Tried:
    """A step of which one microbatch is tried.

    Attributes:
        programs: What each stage does of the microbatch.
        step: The user's step on it.
        batch: The tensors that the step begins with, which are there anyway.
        sizes: How many samples each microbatch has.
        batch_dim: The dimension along which tensors have samples.
        wants_outputs: Whether somebody wants what the step returns beside the loss.
        changes: The stages that change buffers.
        end: The end of the step on the whole batch, if it has one.
        joins: How values are joined for that.
    """

    programs: Sequence[StageProgram]
    step: Callable[[], Any]
    batch: Any
    sizes: Sequence[int]
    batch_dim: int
    wants_outputs: bool
    changes: Mapping[str, int | None]
    end: End | None = None
    joins: Sequence[Join] = ()


@dataclass(frozen=True)
class Found:
    """What a trial has found.

    Attributes:
        of_stages: What instructions of each stage of this rank take.
        beside_bytes: What there is beside them during an iteration.
        left: What is there when the step has ended, where this rank ends it.
        trained: The parameters that have gradients then; None: nobody knows.
    """

    of_stages: Mapping[int, StageCosts]
    beside_bytes: int
    left: Left
    trained: Collection[nn.Parameter] | None = None


def try_stages(
    engine: PipelineEngine,
    owner: nn.Module,
    split: Split,
    tried: Tried,
    parameters: Mapping[int, Sequence[nn.Parameter]],
    substitutes: Substitutes,
    *,
    precise: bool,
    exchanges: Exchanges | None,
) -> Found:
    """Run a microbatch on each stage of this rank, by itself; nothing remains of it.

    Args:
        engine: The pipeline engine of this rank, whose schedule is known.
        owner: The user's module.
        split: How it is divided.
        tried: The step.
        parameters: Parameters of each stage.
        substitutes: What it is run with.
        precise: Whether gradients of microbatches are added up in 32 bits where parameters have 16.
        exchanges: What is done with gradients of divided layers in each backward; None: they stay.

    Raises:
        Exception: If the step, or a layer, needs values that are not there.
    """
    replaced = {unit.module: list(unit.module.parameters()) for unit in split.units.all}
    with (
        nothing_remains(engine.device, owner),
        substitutes.in_place_of(owner, split.units.all) as stand_ins,
    ):
        living = LivingBytes(engine.device)
        living.leave_out((list(stand_ins.values()), tried.batch))
        if exchanges is not None:
            for layer in {unit.module for stage in engine.stages for unit in split.layers_of(stage)}:
                divided = [p for p in replaced[layer] if p.requires_grad and is_divided_over(p, "data_parallel")]
                exchanges.of_layer([stand_ins[parameter] for parameter in divided])
        with living:
            sizes = tried.sizes if tried.end is None else (sum(tried.sizes),)
            leavings = Leavings(owner, sizes, tried.batch_dim, wanted=tried.wants_outputs, is_sent=engine.num_ranks > 1)
            leavings.leave_alone(tried.changes)
            buffers = StepBuffers(owner, tried.changes, len(engine.stages), split.held)
        beside = living.now
        costs = {}
        trained: set[nn.Parameter] = set()
        for stage in engine.stages:
            whole = [stand_ins[parameter] for parameter in parameters[stage]]
            sums = StepGradients({stage: whole}, None, precise=precise)
            with living:
                of_stage = _StageTrial(stage, engine, tried, substitutes, living, sums, exchanges, leavings, buffers)
                costs[stage] = of_stage.run()
            gradients = sums.finish([])
            costs[stage] = costs[stage].leaving(
                sum(bytes_on(engine.device, local(g).nbytes) for g in gradients.values())
            )
            trained.update(parameter for parameter in parameters[stage] if stand_ins[parameter] in gradients)
        left = leavings.put_together(living, engine.device) if engine.is_last else Left()
        return Found(costs, beside, left, trained)


class _StageTrial:
    """Runs a stage as the engine does, and counts; see `try_stages`."""

    def __init__(
        self,
        index: int,
        engine: PipelineEngine,
        tried: Tried,
        substitutes: Substitutes,
        living: LivingBytes,
        sums: StepGradients,
        exchanges: Exchanges | None,
        leavings: Leavings,
        buffers: StepBuffers,
    ) -> None:
        assert engine.schedule is not None
        self._index, self._device, self._number = index, engine.device, engine.schedule.num_microbatches
        self._program = tried.programs[index]
        self._substitutes, self._living, self._sums, self._exchanges = substitutes, living, sums, exchanges
        self._order = engine.schedule.orders[engine.rank]
        self._joined: JoinedLoss | None = None
        is_last = index == engine.num_stages - 1
        end = tried.end if is_last else None

        def run_step(*_: int) -> Any:
            with buffers.of(index), leavings.of(ends_here=is_last and end is None):
                return tried.step()

        def run_end(values: Any) -> Any:
            assert end is not None
            with buffers.of(index), leavings.of(ends_here=True):
                return end.run(values)[0]

        if end is not None:
            self._joined = JoinedLoss(tried.joins, tried.sizes, run_end, leavings.take)
        take = leavings.take if self._joined is None else self._joined
        self._stage = Stage(
            index,
            engine.device,
            emitter=None,
            compute_loss=take if is_last else None,
            train=True,
            offload=engine.offload,
        )
        if len(followed_at_once(self._order, index)) == self._number:
            self._stage.at_once = frozenset(range(self._number))
        self._stage.programs = [self._program] * self._number
        self._stage.step = run_step
        self._stage.seed = (engine.seed,)

    def run(self) -> StageCosts:
        """What each instruction takes."""
        kinds = {inst.type for inst in self._order if inst.stage == self._index}
        first: dict[InstructionType, Cost] = {}
        again: dict[InstructionType, Cost] = {}
        last_forward = None
        for way in _WAYS:
            if not kinds.issuperset(way):
                continue
            if self._joined is None:
                first = first or {kind: self._instruction(kind, 0) for kind in way}
                again |= {kind: self._instruction(kind, 0) for kind in way}
                continue
            forwards, last_forward = self._all_forwards(self._joined)
            backwards = [{kind: self._instruction(kind, index) for kind in way[1:]} for index in (0, self._number - 1)]
            first = first or {way[0]: forwards[0]} | backwards[0]
            again |= {way[0]: forwards[-1]} | backwards[1]
        program = self._program
        inputs = {label: program.forms[label] for label in program.received}
        return StageCosts(
            _bytes_of(inputs.values(), self._device),
            _bytes_of(
                [form for label, form in inputs.items() if program.has_gradient(label, sent=False)], self._device
            ),
            _bytes_of(self._received_forms(InstructionType.BACKWARD), self._device),
            first,
            again,
            last_forward=last_forward,
        )

    def _all_forwards(self, joined: JoinedLoss) -> tuple[list[Cost], Cost]:
        """The first ones, and the last, which ends the step for all; of others there is only what they come to."""
        behind = min(2, self._number - 1)
        costs = [self._instruction(InstructionType.FORWARD, index) for index in range(behind)]
        for index in range(behind, self._number - 1):
            forms = [self._program.forms[label] for label in self._program.sent]
            values = [self._substitutes.like(form).requires_grad_(form.requires_grad) for form in forms]
            self._living.leave_out(values)
            joined.add(tuple(values), index)
        return costs, self._instruction(InstructionType.FORWARD, self._number - 1)

    def _received_forms(self, kind: InstructionType) -> Sequence[torch.Tensor]:
        is_given = kind is InstructionType.FORWARD or self._joined is None  # the end has left the gradients here
        return received_forms(self._program, kind) if is_given else []

    def _instruction(self, kind: InstructionType, microbatch: int) -> Cost:
        living, stage = self._living, self._stage
        received = [tuple(self._substitutes.like(form) for form in self._received_forms(kind))]
        living.count(received)
        start = living.peak = living.now
        # nothing of this function may hold what the instruction lets go of
        stage.run(Instruction(self._index, kind, microbatch), received.pop())
        if kind in OF_WEIGHTS:
            self._sums.after_backward(self._index, ())
            if self._exchanges is not None:
                self._exchanges.end()
        if stage.failure is not None:
            raise stage.failure
        return Cost(living.peak - start, living.now - start)


def _bytes_of(forms: Iterable[torch.Tensor], device: torch.device) -> int:
    return sum(bytes_on(device, form.numel() * form.element_size()) for form in forms)


@contextmanager
def nothing_remains(device: torch.device, owner: nn.Module) -> Iterator[None]:
    """Put back, when the context is closed, all that a run with substitutes may change.

    Args:
        device: Where it runs.
        owner: The user's module, whose metrics do nothing meanwhile.
    """

    def nothing(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros((), device=device)

    parameters = list(owner.parameters())
    with ExitStack() as stack:
        stack.callback(put_gradients, parameters, take_gradients(parameters))
        stack.enter_context(without_reports())
        stack.enter_context(Caches().left_alone())
        stack.enter_context(random_state.isolated(device))
        patches = stack.enter_context(Patches())
        for metric in metrics_in(modules_around(owner)):  # most look at values
            patches.set(metric, "forward", nothing)
            patches.set(metric, "update", nothing)
            patches.set(metric, "compute", nothing)
        stack.enter_context(untouched(owner))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)  # casts without values
        yield
