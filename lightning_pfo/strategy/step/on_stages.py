"""A user's step on microbatches, on the stages of this rank: what surrounds it there, and what is put back after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.compat.patches import Patches, all_of
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.engine.executor import AfterBackward
from lightning_pfo.strategy.model.batch_norm import DeferredBatchNorms
from lightning_pfo.strategy.model.buffers import StepBuffers, writes_otherwise
from lightning_pfo.strategy.model.reach.made_weights import MadeWeights
from lightning_pfo.strategy.model.reach.rewritten import RewrittenWeights
from lightning_pfo.strategy.model.reach.written import WrittenWeights, watch_data
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.dividing.program import Counts, StageProgram
from lightning_pfo.strategy.model.tracing.ends import WrittenError
from lightning_pfo.strategy.model.tracing.placeholders import placeholders_on
from lightning_pfo.strategy.model.tracing.tracked import following, plain
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.groups import Shared
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.notices import tell_of_buffers, warn_once
from lightning_pfo.strategy.step.effects.effects import Effects
from lightning_pfo.strategy.step.effects.layers.once import BuffersOnce
from lightning_pfo.strategy.step.effects.layers.watch import LayerWatch
from lightning_pfo.strategy.step.effects.outward.profiling import StepActions
from lightning_pfo.strategy.step.effects.outward.told import MetricPlace
from lightning_pfo.strategy.step.effects.tensors import Earlier
from lightning_pfo.strategy.step.effects.within import step_by_units, step_under_way
from lightning_pfo.strategy.step.first_batch.differences.slopes import Slopes
from lightning_pfo.strategy.step.first_batch.known_rules import KnownRules
from lightning_pfo.strategy.step.metrics.aggregators import Aggregators
from lightning_pfo.strategy.step.metrics.compat import without_synchronisation
from lightning_pfo.strategy.step.metrics.states import EarlierRuns, PipelineMetrics, SaidOfAll
from lightning_pfo.strategy.step.outcome import StepOnBatch
from lightning_pfo.strategy.step.programs import Programs, Whole, changes_on_the_way
from lightning_pfo.strategy.step.recording import LogRecorder
from lightning_pfo.strategy.step.values import agree_on_trace
from lightning_pfo.strategy.step.whole.end import Ends


class StepOnStages:
    """Runs a user's step on microbatches; what comes of it stays where it is.

    Args:
        engine: The pipeline engine of this rank.
        owner: The user's module whose steps are run.
        split: How it is divided.
        stages: The stages of this rank.
        shared: Parameters and buffers that this rank holds together with others.
        patches: Gives the user's metrics back when it is closed.
        replica_group: Processes with the same stages in other replicas; None where there is one replica.
        batching: How batches are divided, and how much each microbatch counts.
        deferred: Batch norms whose running statistics are those of whole batches.
        made_weights: What makes weights and changes buffers in doing so; None if nothing does.
        repeats_layers: Whether layers can run once more on the whole batch: they are neither compiled nor divided.
        actions: What a step times with the Trainer's profiler; None if nobody asked for a profile.

    Attributes:
        programs: What stages do of each kind of step.
        rules: What is known of how microbatches come together.
        layers: What layers keep in attributes.
        rewritten: Weights that layers write into.
        earlier: What earlier batches have left.
        has_replicas: Whether there are several replicas.
        skipped: The microbatches that each stage has skipped in the last run.
        differentiates: Whether a training step calls torch.autograd.grad, so that one that is compared needs gradients.
        slopes: Takes gradients of losses where a step is compared; None: they are not looked at.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        owner: nn.Module,
        split: Split,
        stages: Collection[int],
        shared: Sequence[Shared],
        patches: Patches,
        replica_group: dist.ProcessGroup | None,
        batching: Batching,
        deferred: DeferredBatchNorms | None,
        made_weights: MadeWeights | None,
        repeats_layers: bool,
        actions: StepActions | None,
    ) -> None:
        self.engine = engine
        self.owner = owner
        self.batching = batching
        self.has_replicas = replica_group is not None
        agree = partial(agree_on_trace, hosts=engine.host_group())
        self.programs = Programs(owner, split, engine.device, patches, agree)
        self.rules = KnownRules(self.programs, batching)
        of_weights = made_weights.names if made_weights else ()
        where = owner, split.owners, stages
        once = BuffersOnce(*where, of_weights, repeats=repeats_layers, batch_dim=batching.batch_dim)
        self.layers = LayerWatch(owner, split.modules_inside(owner, stages), once, of_weights)
        self.rewritten = RewrittenWeights(owner)
        self.earlier = Earlier()
        self.skipped: list[set[int]] = []
        self.differentiates = False
        self.slopes: Slopes | None = None
        self._shared = shared
        self._called: defaultdict[str, set[Counts]] = defaultdict(set)
        self._users = split.held
        self._deferred = deferred
        self._made_weights = made_weights
        self._ends = Ends(engine, owner, self.programs, split.held)
        self._metrics = PipelineMetrics(engine, owner, replica_group, patches)
        self._aggregators = Aggregators(owner, patches)
        self._actions = actions
        self._has_written: WrittenError | None = None
        watch_data(patches)

    @property
    def aggregates(self) -> bool:
        """Whether there are metrics that are told once for a batch, when it is done."""
        return bool(self._aggregators)

    def windows_go_on(self, told: Iterable[tuple[MetricPlace, str]]) -> None:
        """Let windows of metrics stand where the last rank's stand, which was told these; see `Aggregators`."""
        self._aggregators.windows_go_on(told)

    def said_by_metrics(self, effects: Effects) -> SaidOfAll:
        """What metrics say after a run that begins now."""
        return SaidOfAll(self.owner, self._metrics.found(effects.modules()))

    def run(
        self,
        kind: str,
        step: Callable[[int], Any],
        microbatches: Sequence[Any],
        step_seed: tuple[int, ...],
        recorder: LogRecorder,
        take: Callable[[Any, int], torch.Tensor],
        whole: Whole | None = None,
        effects: Effects | None = None,
        after_backward: AfterBackward | None = None,
        *,
        phase: StepOnBatch | None = None,
        when_calling: Callable[[], object] | None = None,
    ) -> list[list[StageProgram]]:
        """Run a step on microbatches; all ranks finish, whatever fails.

        Args:
            kind: Which step it is; `train` runs backward too.
            step: The user's step on the microbatch of an index.
            microbatches: The microbatches.
            step_seed: Makes the random numbers of this step differ from those of others.
            recorder: Where logs of the last stage go.
            take: Takes, on the rank of the last stage, what the step returned for a microbatch; returns the loss.
            whole: The whole batch, on which the step ends, so that something is taken for index 0 only; None: it ends
                on every microbatch.
            effects: Takes what it leaves behind; None: nothing of it counts.
            after_backward: Called after each backward of this rank.
            phase: Where the programs are known already, which phase of the step it is.
            when_calling: Called where such a step calls others than any before, before it runs; a collective call. None
                for runs that do not count.

        Returns:
            What the stages have done of each microbatch.

        Raises:
            Exception: What went wrong on this rank; others may not know of it.
        """
        engine = self.engine
        train, last = kind == "train", engine.num_stages - 1
        differentiates = kind == "compare" and self.differentiates
        ends = phase is None or phase.ends

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            with following(None):
                recorder.log(name, plain(value), *args, **kwargs)

        def inside(stage: int | None, index: int = 0, *, ends_here: bool) -> AbstractContextManager[None]:
            """Where the user's step runs; without a stage nothing is noted of it."""
            contexts: list[AbstractContextManager[Any]] = []
            if stage is not None and changes:
                contexts.append(buffers.of(stage, ends_here=ends_here))
            if stage is not None and (once := self.layers.once.of_microbatch(stage, index)) is not None:
                contexts.append(once)
            if self.rewritten.names and stage is not None and not (whole and ends_here):
                contexts.append(self.rewritten.of_microbatch(stage))
            contexts.append(kept.of(ends_here=ends_here, log=log, index=recorder.index, size=recorder.size))
            if metrics:
                contexts.append(without_synchronisation(metrics))
                if not ends_here:
                    contexts.append(earlier_runs.of(recorder.index))
            if self._aggregators:
                contexts.append(self._aggregators.as_at_begin())
            if metrics and ends_here:
                contexts.append(
                    recorder.said.of_microbatch(metrics, self._aggregators, is_part=len(recorder.sizes) > 1)
                )
            if self._deferred is not None and stage is not None:
                contexts.append(self._deferred.forward_of(engine.num_stages if whole and ends_here else stage))
            if self._made_weights is not None and stage is not None:
                contexts.append(self._made_weights.microbatch())
            if self._actions is not None and phase is not None:
                contexts.append(self._actions.of_run())
            if self.slopes is not None and ends_here:
                contexts.append(self.slopes.of_step())
            return contexts[0] if len(contexts) == 1 else all_of(contexts)

        def run_step(stage: int, index: int) -> Any:
            recorder.index = index if whole is None else 0
            counting = self.layers.of_microbatch(index) if self.layers.counts else nullcontext()
            with inside(stage, index, ends_here=ends and whole is None and stage == last), counting:
                return step(index)

        @contextmanager
        def again() -> Iterator[None]:
            """Where a layer runs once more: what it calls of other processes concerns replicas, as in the step."""
            random_state.seed_step(engine.device, *seed)
            with step_under_way(ends_here=True):
                yield

        with random_state.isolated(engine.device) as before:
            kept = Effects(self.owner, self.programs.modules) if effects is None else effects
            metrics = self._metrics.found(kept.modules())
            earlier_runs = EarlierRuns(metrics)
            seed = (engine.seed, *step_seed)
            found = None if phase is None else phase.programs
            if found is None:
                flows = train or differentiates
                found = self.programs.of(kind, microbatches, step, seed, train=flows, whole=whole, flags=kept.flags)
                if when_calling is not None and (called := found[0][0][-1].units_called) not in self._called[kind]:
                    self._called[kind].add(called)
                    when_calling()
            changes: dict[str, int | None] = {}
            for of_stages, whole_step in found:
                changes |= changes_on_the_way(whole_step or of_stages, last, self.owner)
            kept.leave_alone(changes)
            if whole is not None:
                random_state.expect_draws_on_host()
                trying, running = partial(inside, None, ends_here=False), partial(inside, last, ends_here=True)
                take = self._ends.of(kind, found, microbatches, whole, step, step_seed, trying, running, take)
            programs = [of_stages for of_stages, _ in found]
            looks = effects is not None and self.earlier.number > 0
            buffers = StepBuffers(self.owner, changes, len(engine.stages), self._users, looks=looks)
            try:
                of_batch = all_of([each.batch() for each in (self._deferred, self._made_weights) if train and each])
                counts = train and effects is not None
                writes = self._writes_known(kept.flags.parameters, programs) if counts else nullcontext()
                rewritten = self.rewritten.of_run(programs, engine.stages, trains=train, counts=phase is not None)
                sizes = recorder.sizes if whole is None else whole.sizes
                stays, known = phase is not None, (self.layers.means, changes)
                once = self.layers.once.of_run(kind, sizes, again, *known, stays=stays)
                with of_batch, earlier_runs.undone_if_it_fails(), writes, rewritten, once:
                    self.layers.looks.of_step = {*changes, *self.rewritten.names}
                    memory = () if phase is None else phase.memory
                    self.skipped = engine.run(
                        programs,
                        step_seed,
                        run_step,
                        take,
                        train=train,
                        after_backward=after_backward,
                        memory=memory,
                        differentiates=differentiates,
                    )
                if random_state.notice_draws_on_host(before):
                    _tell_of_draws()
                buffers.leave(self.layers.once.repeated)
                kept.check_switched()
                if kind != "compare":  # training has more microbatches than those that are compared
                    tell_of_buffers(kind, buffers.gone_on, len(microbatches))
                name = min(buffers.differing, default="")
                if name and engine.place == (0, 0) and (engine.rank == 0 or changes[name] is not None):
                    warn_once(writes_otherwise(name))
            finally:
                kept.flags.freeze()
                buffers.agree(engine.placement, self._shared, engine.group)
                if phase is None:  # nothing of it counts
                    buffers.put_back()
                if effects is None:
                    kept.discard()
        return programs

    @contextmanager
    def _writes_known(
        self, parameters: Sequence[nn.Parameter], programs: Sequence[Sequence[StageProgram]]
    ) -> Iterator[None]:
        """Where a step runs: it writes into parameters as it was known to.

        Where another rank's error lets the step run again, and it has written here, that is said after the second run.
        """
        written = WrittenWeights(parameters)
        try:
            with written.watched():
                yield
        finally:
            error = written.error(self.owner, (each for of_stages in programs for each in of_stages))
            self._has_written = self._has_written or error
        if self._has_written is not None:
            error, self._has_written = self._has_written, None
            raise error

    def run_by_units(
        self, of: StepOnBatch, recorder: LogRecorder, take: Callable[[Any, int], torch.Tensor], effects: Effects
    ) -> None:
        """Run a step of an evaluation on all ranks, in one piece; see room `by_units`.

        Args:
            of: The step, on a batch of one part.
            recorder: Where logs of the rank of the last stage go.
            take: Takes what the step has returned there.
            effects: Takes what it has left behind there.

        Raises:
            Exception: What went wrong on this rank; others may not know of it.
        """
        engine = self.engine
        device, ends_here = engine.device, engine.is_last
        metrics = self._metrics.found(effects.modules())
        earlier_runs = EarlierRuns(metrics)
        self.skipped = [set() for _ in range(engine.num_stages)]
        with random_state.isolated(device), placeholders_on(device), step_by_units(), torch.no_grad():
            random_state.seed(device, engine.seed, *of.seed)
            contexts: list[AbstractContextManager[Any]] = [
                effects.of(ends_here=ends_here, log=recorder.log, size=recorder.size),
                without_synchronisation(metrics),
                earlier_runs.undone_if_it_fails() if ends_here else earlier_runs.of(0),
            ]
            if self._actions is not None:
                contexts.append(self._actions.of_run())
            with all_of(contexts):
                result = of.of_microbatch(0)
            if ends_here:
                take(result, 0)


def _tell_of_draws() -> None:
    warn_once(
        "A step has drawn from the global generator of Python or NumPy for the first time, and did not do so when it "
        "was traced: in this batch stages may have drawn different numbers; from the next on they draw the same."
    )
