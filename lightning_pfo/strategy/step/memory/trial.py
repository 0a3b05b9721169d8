"""What instructions of a rank take of memory: one microbatch runs on each of its stages, without values if possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.engine.executor import followed_at_once
from lightning_pfo.strategy.engine.living_bytes import LivingBytes, bytes_on
from lightning_pfo.strategy.engine.stage import Stage, received_forms
from lightning_pfo.strategy.model.reach.caches import Caches
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.outline import without_reports
from lightning_pfo.strategy.model.tracing.program import StageProgram
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.dtensor import is_divided_over, local
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.step.gradients import StepGradients, loss_of, put_gradients, take_gradients
from lightning_pfo.strategy.step.memory.exchanges import Exchanges
from lightning_pfo.strategy.step.memory.substitutes import Substitutes
from lightning_pfo.strategy.step.metrics import metrics_of
from lightning_pfo.strategy.step.programs import logs_noted

OF_WEIGHTS = (InstructionType.BACKWARD, InstructionType.WEIGHT_GRADIENT)
"""Instructions that end the backward of a microbatch."""
_WAYS = (
    (InstructionType.FORWARD, InstructionType.BACKWARD),
    (InstructionType.FORWARD, InstructionType.INPUT_GRADIENT, InstructionType.WEIGHT_GRADIENT),
)
"""What a schedule does of a microbatch."""


@dataclass(frozen=True)
class Cost:
    """What an instruction takes.

    Attributes:
        peak_bytes: The most beyond what is there before, while it runs.
        kept_bytes: What is there more when it has run; less, if negative.
    """

    peak_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class StageCosts:
    """What the instructions of a stage take.

    Attributes:
        input_bytes: Of what a forward receives from the stage before.
        input_gradient_bytes: Of the gradients that it is given for that.
        output_gradient_bytes: Of the gradients that a backward receives from the stage behind.
        first: Costs of instructions for the first microbatch, which leaves gradients behind.
        again: Costs for others.
        left_bytes: Of the gradients of parameters that a first microbatch leaves behind.
    """

    input_bytes: int
    input_gradient_bytes: int
    output_gradient_bytes: int
    first: Mapping[InstructionType, Cost]
    again: Mapping[InstructionType, Cost]
    left_bytes: int = 0

    def leaving(self, left_bytes: int) -> StageCosts:
        """The same for so much left, which the first that ends a backward in another way would leave too."""
        first = dict(self.first)
        for kind, cost in self.again.items():
            more = left_bytes if kind in OF_WEIGHTS else 0
            first.setdefault(kind, Cost(cost.peak_bytes + more, cost.kept_bytes + more))
        return replace(self, first=first, left_bytes=left_bytes)


def try_stages(
    engine: PipelineEngine,
    owner: nn.Module,
    split: Split,
    programs: Sequence[StageProgram],
    step: Callable[[], Any],
    batch: Any,
    parameters: Mapping[int, Sequence[nn.Parameter]],
    substitutes: Substitutes,
    *,
    precise: bool,
    exchanges: Exchanges | None,
) -> dict[int, StageCosts]:
    """Run a microbatch on each stage of this rank, by itself; nothing remains of it.

    Args:
        engine: The pipeline engine of this rank, whose schedule is known.
        owner: The user's module.
        split: How it is divided.
        programs: What each stage does of the microbatch.
        step: The user's step on the microbatch.
        batch: The tensors that the step begins with, which are there anyway.
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
        living.leave_out((list(stand_ins.values()), batch))
        if exchanges is not None:
            for layer in {unit.module for stage in engine.stages for unit in split.layers_of(stage)}:
                divided = [p for p in replaced[layer] if p.requires_grad and is_divided_over(p, "data_parallel")]
                exchanges.of_layer([stand_ins[parameter] for parameter in divided])
        costs = {}
        for stage in engine.stages:
            whole = [stand_ins[parameter] for parameter in parameters[stage]]
            sums = StepGradients({stage: whole}, None, precise=precise)
            with living:
                of_stage = _try_stage(stage, engine, programs[stage], step, substitutes, living, sums, exchanges)
            left = sum(bytes_on(engine.device, local(g).nbytes) for g in sums.finish([]).values())
            costs[stage] = of_stage.leaving(left)
        return costs


def _try_stage(
    index: int,
    engine: PipelineEngine,
    program: StageProgram,
    step: Callable[[], Any],
    substitutes: Substitutes,
    living: LivingBytes,
    sums: StepGradients,
    exchanges: Exchanges | None,
) -> StageCosts:
    assert engine.schedule is not None
    is_last = index == engine.num_stages - 1
    compute_loss = (lambda result, _: loss_of(result)) if is_last else None
    stage = Stage(index, engine.device, emitter=None, compute_loss=compute_loss, train=True, offload=engine.offload)
    order = engine.schedule.orders[engine.rank]
    if len(followed_at_once(order, index)) == engine.schedule.num_microbatches:
        stage.at_once = frozenset([0])
    stage.programs = [program]
    stage.step = lambda *_: step()
    stage.seed = (engine.seed,)

    def run(kind: InstructionType) -> Cost:
        received = [tuple(substitutes.like(form) for form in received_forms(program, kind))]
        living.count(received)
        start = living.peak = living.now
        # nothing of this function may hold what the instruction lets go of
        stage.run(Instruction(index, kind, 0), received.pop())
        if kind in OF_WEIGHTS:
            sums.after_backward(index, ())
            if exchanges is not None:
                exchanges.end()
        if stage.failure is not None:
            raise stage.failure
        return Cost(living.peak - start, living.now - start)

    kinds = {inst.type for inst in order if inst.stage == index}
    first: dict[InstructionType, Cost] = {}
    again: dict[InstructionType, Cost] = {}
    for way in _WAYS:
        if kinds.issuperset(way):
            first = first or {kind: run(kind) for kind in way}
            again |= {kind: run(kind) for kind in way}
    inputs = [program.forms[label] for label in program.received]
    return StageCosts(
        _bytes_of(inputs, engine.device),
        _bytes_of([form for form in inputs if form.requires_grad], engine.device),
        _bytes_of(received_forms(program, InstructionType.BACKWARD), engine.device),
        first,
        again,
    )


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
        for metric in metrics_of(owner):  # most look at values
            patches.set(metric, "forward", nothing)
            patches.set(metric, "update", nothing)
            patches.set(metric, "compute", nothing)
        stack.enter_context(untouched(owner))
        stack.enter_context(logs_noted(owner))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)  # casts without values
        yield
