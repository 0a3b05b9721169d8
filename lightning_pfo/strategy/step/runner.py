"""One step of the user's module on the pipeline: split the batch, run the stages, share what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.engine.executor import AfterBackward
from lightning_pfo.strategy.model.batch_norm import DeferredBatchNorms
from lightning_pfo.strategy.model.buffers import StepBuffers
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.model.tracing.ends import DeviationError
from lightning_pfo.strategy.model.tracing.tracked import following, plain
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.buckets import ReplicaMeans
from lightning_pfo.strategy.parallel.compat import tree_map_only
from lightning_pfo.strategy.parallel.groups import Shared
from lightning_pfo.strategy.parallel.patches import Patches, all_of
from lightning_pfo.strategy.parallel.reductions import Gradients
from lightning_pfo.strategy.step.batches.batching import DEFAULT_BATCHING, Batching
from lightning_pfo.strategy.step.batches.notices import tell_of_buffers, warn_once
from lightning_pfo.strategy.step.batches.weights import LaterGaps
from lightning_pfo.strategy.step.effects.effects import Effects
from lightning_pfo.strategy.step.effects.fresh import FreshBatches
from lightning_pfo.strategy.step.effects.large import Earlier
from lightning_pfo.strategy.step.effects.layer_watch import LayerWatch
from lightning_pfo.strategy.step.effects.within import without_replicas
from lightning_pfo.strategy.step.first_batch.looks import FirstLooks
from lightning_pfo.strategy.step.first_batch.not_a_number import refuse_nan
from lightning_pfo.strategy.step.gradients import (
    attach_gradients,
    do_nothing,
    kept_of,
    loss_of,
    to_be_differentiated,
)
from lightning_pfo.strategy.step.iterations.gathering import Iterations
from lightning_pfo.strategy.step.iterations.phases import Between, PhaseRunner
from lightning_pfo.strategy.step.known_rules import KnownRules
from lightning_pfo.strategy.step.metrics.aggregators import Aggregators
from lightning_pfo.strategy.step.metrics.compat import set_batch_value, without_synchronisation
from lightning_pfo.strategy.step.metrics.states import EarlierRuns, PipelineMetrics
from lightning_pfo.strategy.step.microbatches import shapes_of
from lightning_pfo.strategy.step.outcome import StepOnBatch, StepRun
from lightning_pfo.strategy.step.programs import Programs, Whole, changes_on_the_way
from lightning_pfo.strategy.step.recording import LogRecorder, check_skipped
from lightning_pfo.strategy.step.values import ValueExchange, agree_on_trace, share_error
from lightning_pfo.strategy.step.whole.end import Ends

T = TypeVar("T")
Step = Callable[..., Any]
"""A user's step: `step(batch, *rest)`."""
Outputs = Literal["all", "first", "last", "nobody"]
"""Which ranks are to have what a step returned: all, the first, or the one that knows it."""


class StepRunner:
    """Runs `training_step` and its siblings on the pipeline.

    Args:
        engine: The pipeline engine of this rank.
        owner: The user's module whose steps are run.
        split: How it is divided.
        parameters: Parameters of each stage of this rank; one of several stages is of that which ends last.
        shared: Parameters and buffers that this rank holds together with others.
        patches: Gives the user's metrics back when it is closed.
        replica_group: Processes with the same stages in other replicas; None where there is one replica.
        batching: How batches are divided, and how much each microbatch counts.
        check_loss: Whether the loss and other numbers of the first batch are compared with those of its microbatches.
        divided: Whether layers are divided over replicas.
        compiled: Whether layers are compiled.
        deferred: Batch norms whose running statistics are those of whole batches.
        means: Averages gradients over replicas; None where there is one.
        precise_gradients: Whether gradients of microbatches are added up in 32 bits where parameters have 16.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        owner: nn.Module,
        split: Split,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        shared: Sequence[Shared],
        patches: Patches,
        replica_group: dist.ProcessGroup | None = None,
        *,
        batching: Batching = DEFAULT_BATCHING,
        check_loss: bool = True,
        divided: bool = False,
        compiled: bool = False,
        deferred: DeferredBatchNorms | None = None,
        means: ReplicaMeans | None = None,
        precise_gradients: bool = False,
    ) -> None:
        self.batching = batching
        self.engine = engine
        self.owner = owner
        self._split = split
        self._hosts = engine.host_group()
        self.programs = Programs(owner, split, engine.device, patches, partial(agree_on_trace, hosts=self._hosts))
        self._ends = Ends(engine, owner, self.programs)
        self._deferred = deferred
        self._means = means
        self._shared = shared
        self._earlier = Earlier()
        self._exchanges: dict[str, ValueExchange] = {}
        self.rules = KnownRules(self.programs, batching)
        self.layers = LayerWatch(owner, split.modules_inside(owner, list(parameters)))
        self._phases = PhaseRunner(self)
        self._iterations = Iterations(engine, parameters, shared, means, self.layers, precise=precise_gradients)
        self._first_looks = FirstLooks(self, check_loss, compiled=compiled, divided=divided, deferred=deferred)
        self._gaps = LaterGaps() if check_loss and batching.microbatch_weight == "samples" else None
        self._fresh = FreshBatches()
        self._is_first_batch = True
        self._skipped: list[set[int]] = []
        self._metrics = PipelineMetrics(engine, owner, replica_group, patches)
        self._aggregators = Aggregators(owner, patches)

    def train(
        self,
        step: Step,
        num_microbatches: int,
        step_seed: tuple[int, ...],
        batch: Any,
        rest: Any,
        loss_scale: torch.Tensor | None = None,
        average: bool = False,
        then: Callable[[], object] = do_nothing,
        keep_gradients: bool = True,
        outputs: Outputs = "all",
        between: Between | None = None,
    ) -> Any:
        """Run a training step with gradients.

        Args:
            step: The user's step.
            num_microbatches: Number of microbatches of an ordinary batch; one of fewer samples has fewer. Listeners
                hear of iterations with that number only.
            step_seed: Makes the random numbers of this step differ from those of others.
            batch: What the step takes first.
            rest: Its other arguments.
            loss_scale: What the loss is multiplied with during backward, so that fp16 gradients do not underflow; what
                is returned, logged and handed out does not have it.
            average: Whether gradients are averaged over replicas at once, while the pipeline goes on; else somebody
                does it after accumulation.
            then: Called when `backward` has handed out the gradients.
            keep_gradients: Whether gradients of earlier steps are still needed; otherwise their memory is used again.
            outputs: `all` if every rank is to have what the step returns beside the loss; it may be large.
            between: What a step that optimizes by itself does after its phases but the last; None: it has no phases.

        Returns:
            The loss of the batch, the weighted mean of its microbatches' losses, in the form the step returned it; None
            if the step returned None. Its `backward` hands out the gradients.

        Raises:
            ConfigurationError: On every rank, if the step does not return a loss, or returns on the first batch one
                that is NaN or does not suit microbatches; see `first_batch`.
        """
        engine = self.engine
        engine.set_num_microbatches(num_microbatches)
        microbatches = self.batching.split(batch, num_microbatches)
        if len(microbatches) == num_microbatches:
            engine.microbatch = engine.microbatch or shapes_of(microbatches[0])
        of = StepOnBatch("train", self._fresh.given_to("train", step), microbatches, step_seed, batch, rest)
        if between is not None and not self.batching.joins_microbatches:
            *earlier_phases, of = self._phases.find(of)
            for phase in earlier_phases:
                with self._iterations.gathering(phase, average=average) as gathered:
                    with self._error_of_replicas(average):
                        shared = self._phases.run(phase, loss_scale, gathered.after_backward, between)
                    gradients = self._iterations.finish(phase, gathered)
                between.act(attach_gradients(shared["loss"], gradients, loss_scale), shared["calls"])
        self._first_looks.look(of)
        is_first = self._is_first_batch

        def run() -> tuple[dict[str, Any], list[Any], Gradients]:
            with self._iterations.gathering(of, average=average, keeps=keep_gradients) as gathered:
                with self._error_of_replicas(average):
                    outcome, results = self._run(of, loss_scale, outputs, gathered.after_backward)
                return outcome, results, self._iterations.finish(of, gathered)

        outcome, results, gradients = self._following(of, run)
        loss = outcome["loss"]
        if loss is not None:
            loss = loss.to(torch.get_default_dtype())
            if is_first:
                refuse_nan(engine, self.owner, batch, loss, results)
            self._is_first_batch = False  # a batch that is skipped is none
        self._leave_behind(outcome, microbatches.size, train=True)
        if loss is None:
            return None
        loss = attach_gradients(loss, gradients, loss_scale, then)
        return outcome["output"] | {"loss": loss} if outcome["is_dict"] else loss

    def _following(self, of: StepOnBatch, run: Callable[[], T]) -> T:
        """Run a step; once more, and with a trace of each microbatch, if it does something else than in a trace."""
        try:
            return run()
        except DeviationError:
            if of.programs is not None or not self.programs.follow(of.kind):
                raise
            return run()

    @contextmanager
    def _error_of_replicas(self, average: bool) -> Iterator[None]:
        """Where replicas wait for each other next, an error of one is everybody's."""
        error: Exception | None = None
        try:
            yield
        except Exception as failed:
            error = failed
        if average and self._means is not None:
            share_error(error, self._means.hosts)
        if error is not None:
            raise error

    def evaluate(
        self,
        kind: str,
        step: Step,
        num_microbatches: int,
        step_seed: tuple[int, ...],
        batch: Any,
        rest: Any,
        *,
        outputs: Outputs = "all",
        loader: int = 0,
    ) -> Any:
        """Run a validation, test or predict step.

        Args:
            kind: Which step it is.
            step: The user's step.
            num_microbatches: At most so many microbatches.
            step_seed: Makes the random numbers of this step differ from those of others.
            batch: What the step takes first.
            rest: Its other arguments.
            outputs: Which ranks are wanted to have what it returned.
            loader: Which of several loaders the batch is of.

        Returns:
            What the step returned, merged over microbatches, on the ranks that are wanted to have it; else None.
        """
        with _without_inference_mode((batch, rest)) as (batch, rest):
            microbatches = self.batching.split(batch, num_microbatches)
            of = StepOnBatch(
                kind, self._fresh.given_to(kind, step), microbatches, step_seed, batch, rest, loader=loader
            )
            self._first_looks.look(of)
            outcome, _ = self._following(of, lambda: self._run(of, outputs=outputs))
            self._leave_behind(outcome, microbatches.size, train=False)
            return outcome["output"]

    def _run(
        self,
        of: StepOnBatch,
        loss_scale: torch.Tensor | None = None,
        outputs: Outputs = "nobody",
        after_backward: AfterBackward | None = None,
    ) -> tuple[dict[str, Any], list[Any]]:
        """Run a step; returns what came of it, and on the last rank what it returned for microbatches."""
        engine, kind, microbatches, train = self.engine, of.kind, of.parts, of.kind == "train"
        whole = None
        if self.batching.joins_microbatches and len(microbatches) > 1:
            whole = Whole(of.batch, lambda: of.step(of.batch, *of.rest), microbatches.sizes)
        sizes = microbatches.sizes if whole is None else (microbatches.size,)
        weights: tuple[float, ...] = ()
        if engine.is_last:
            weights = (1.0,) if whole is not None else self.batching.weights(microbatches.parts, sizes)
            if train and whole is None and self._gaps is not None:
                self._gaps.look(of.batch, microbatches)
        recorder = LogRecorder(self.owner, weights, sizes, of_epochs=kind != "train")
        results: list[Any] = []

        def take(result: Any, index: int) -> torch.Tensor:
            if not train or result is None:
                # only what somebody wants is kept: it may be large
                kept = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
                results.append(kept if outputs != "nobody" else None)
                return torch.zeros(())
            loss = loss_of(result)
            results.append(kept_of(result, loss, wanted=outputs != "nobody"))
            return to_be_differentiated(loss, weights[index], loss_scale)

        error: Exception | None = None
        self._earlier.begin(kind)
        effects = Effects(self.owner, self.programs.modules, self._earlier)
        outcome: dict[str, Any] = {}
        self.layers.begin(microbatches.sizes, looks=train)

        try:
            self.run(
                kind, of.of_microbatch, microbatches, of.seed, recorder, take, whole, effects, after_backward, phase=of
            )
            if engine.is_last:
                run = StepRun(effects, recorder, results, train, self.batching.batch_dim)
                with self.rules.looking(of, run, engine.seed) as rules:
                    outcome = run.merged(rules, is_sent=engine.num_ranks > 1)
                outcome["skipped"] = sorted(self._skipped[-1])
        except Exception as exception:
            error = exception
        if (exchange := self._exchanges.get(kind)) is None:
            exchange = ValueExchange(engine.device, engine.group, self._hosts, engine.last_rank)
            self._exchanges[kind] = exchange
        apart = outcome.pop("output", None) if outputs in ("first", "last") else None
        shared: dict[str, Any] = exchange.share(outcome, error)
        if outputs in ("first", "last"):
            shared["output"] = apart if outputs == "last" else exchange.send_to_first(apart)
        check_skipped(self._skipped, shared["skipped"])
        effects.leave(shared, is_first=engine.rank == 0)
        self.layers.end(engine.all_gather)
        return shared, results

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

        Returns:
            What the stages have done of each microbatch.

        Raises:
            Exception: What went wrong on this rank; others may not know of it.
        """
        engine = self.engine
        train, last = kind == "train", engine.num_stages - 1
        ends = phase is None or phase.ends

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            with following(None):
                recorder.log(name, plain(value), *args, **kwargs)

        def inside(stage: int | None, *, ends_here: bool) -> AbstractContextManager[None]:
            """Where the user's step runs; without a stage nothing is noted of it."""
            contexts: list[AbstractContextManager[Any]] = []
            if stage is not None and changes:
                contexts.append(buffers.of(stage))
            contexts.append(kept.of(ends_here=ends_here, log=log, index=recorder.index, size=recorder.size))
            if metrics:
                contexts.append(without_synchronisation(metrics))
                if not ends_here:
                    contexts.append(earlier_runs.of(recorder.index))
            if self._aggregators:
                contexts.append(self._aggregators.as_at_begin())
            if self._deferred is not None and stage is not None:
                contexts.append(self._deferred.forward_of(engine.num_stages if whole and ends_here else stage))
            return contexts[0] if len(contexts) == 1 else all_of(contexts)

        def run_step(stage: int, index: int) -> Any:
            recorder.index = index if whole is None else 0
            counting = self.layers.of_microbatch(index) if self.layers.counts else nullcontext()
            with inside(stage, ends_here=ends and whole is None and stage == last), counting:
                return step(index)

        with random_state.isolated(engine.device) as before:
            kept = Effects(self.owner, self.programs.modules) if effects is None else effects
            metrics = self._metrics.found(kept.modules())
            earlier_runs = EarlierRuns(metrics)
            seed = (engine.seed, *step_seed)
            found = None if phase is None else phase.programs
            if found is None:
                found = self.programs.of(kind, microbatches, step, seed, train=train, whole=whole, flags=kept.flags)
            changes: dict[str, int | None] = {}
            for of_stages, whole_step in found:
                changes |= changes_on_the_way(whole_step or of_stages, last)
            kept.leave_alone(changes)
            if whole is not None:
                random_state.expect_draws_on_host()
                trying, running = partial(inside, None, ends_here=False), partial(inside, last, ends_here=True)
                take = self._ends.of(kind, found, microbatches, whole, step, step_seed, trying, running, take)
            programs = [of_stages for of_stages, _ in found]
            looks = train and effects is not None and self._earlier.number > 0
            buffers = StepBuffers(self.owner, changes, len(engine.stages), looks=looks)
            try:
                with self._deferred.batch() if train and self._deferred is not None else nullcontext():
                    memory = () if phase is None else phase.memory
                    self._skipped = engine.run(
                        programs, step_seed, run_step, take, train=train, after_backward=after_backward, memory=memory
                    )
                if random_state.notice_draws_on_host(before):
                    _tell_of_draws()
                kept.check_switched()
                tell_of_buffers(buffers.gone_on, len(microbatches))
            finally:
                buffers.agree(engine.placement, self._shared, engine.group)
                if phase is None:  # nothing of it counts
                    buffers.put_back()
                if effects is None:
                    kept.discard()
        return programs

    def _leave_behind(self, outcome: dict[str, Any], batch_size: int, *, train: bool) -> None:
        """Log what was logged, on every rank."""
        for name, metric_path, arguments, number in outcome["logged"]:
            value: Any = number.to(torch.get_default_dtype())
            if metric_path is not None:
                metric: Any = self.owner.get_submodule(metric_path)
                set_batch_value(metric, value)
                value = metric
            # all pipeline ranks log the same value, so there is nothing to synchronise between them; values of a batch
            # that is evaluated are a replica's, unless the user says otherwise, as others may have none
            with nullcontext() if train or arguments.get("sync_dist") else without_replicas():
                self.owner.log(name, value, **{"batch_size": batch_size, **arguments, "sync_dist": True})  # type: ignore[operator]


@contextmanager
def _without_inference_mode(values: Any) -> Iterator[Any]:
    """Values as ordinary tensors, and no inference mode: in it tensors do not tell whether they have been changed."""
    if not torch.is_inference_mode_enabled():
        yield values
        return
    with torch.inference_mode(False), torch.no_grad():
        yield tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if tensor.is_inference() else tensor, values)


def _tell_of_draws() -> None:
    warn_once(
        "A step has drawn from the global generator of Python or NumPy for the first time, and did not do so when it "
        "was traced: in this batch stages may have drawn different numbers; from the next on they draw the same."
    )
