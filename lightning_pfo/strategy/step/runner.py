"""One step of the user's module on the pipeline: split the batch, run the stages, share what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.engine.endings import ending_as_raised
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.engine.executor import AfterBackward
from lightning_pfo.strategy.model.batch_norm import DeferredBatchNorms
from lightning_pfo.strategy.model.reach.made_weights import find_made_weights
from lightning_pfo.strategy.model.reach.metrics import type_of_logged
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.dividing.program import Counts
from lightning_pfo.strategy.model.tracing.ends import DeviationError
from lightning_pfo.strategy.model.tracing.placeholders import check_known
from lightning_pfo.strategy.parallel.buckets import ReplicaMeans
from lightning_pfo.strategy.parallel.groups import Shared, spread
from lightning_pfo.strategy.parallel.reductions import Gradients, reduced_together
from lightning_pfo.strategy.step.batches.batching import DEFAULT_BATCHING, Batching, ShortBatches
from lightning_pfo.strategy.step.batches.splitting import Microbatches
from lightning_pfo.strategy.step.by_units.endings import meet_at_end
from lightning_pfo.strategy.step.by_units.evaluations import UnitEvaluations
from lightning_pfo.strategy.step.effects.effects import AddedMetricError, Effects
from lightning_pfo.strategy.step.effects.fresh import FreshBatches, put, without_inference_mode
from lightning_pfo.strategy.step.effects.outward.calls import OF_BATCH
from lightning_pfo.strategy.step.effects.outward.profiling import StepActions
from lightning_pfo.strategy.step.effects.rows import RowsLeft
from lightning_pfo.strategy.step.effects.within import without_replicas
from lightning_pfo.strategy.step.first_batch.looks import FirstLooks
from lightning_pfo.strategy.step.first_batch.not_a_number import refuse_nan
from lightning_pfo.strategy.step.first_batch.sizes import refuse_optimizing_less, refuse_skipping
from lightning_pfo.strategy.step.gradients import (
    Newcomers,
    WayMade,
    attach_gradients,
    do_nothing,
    kept_of,
    loss_of,
    to_be_differentiated,
    way_of,
)
from lightning_pfo.strategy.step.iterations.again import WeighedOtherwiseError, run_again
from lightning_pfo.strategy.step.iterations.gathering import Iterations
from lightning_pfo.strategy.step.iterations.phases import Between, PhaseRunner
from lightning_pfo.strategy.step.metrics.compat import set_batch_value
from lightning_pfo.strategy.step.metrics.states import metric_at
from lightning_pfo.strategy.step.microbatches import shapes_of
from lightning_pfo.strategy.step.on_stages import StepOnStages
from lightning_pfo.strategy.step.outcome import StepOnBatch, StepRun, loss_in
from lightning_pfo.strategy.step.programs import Whole
from lightning_pfo.strategy.step.recording import LogRecorder, check_skipped, logged_by_any
from lightning_pfo.strategy.step.values import ValueExchange, share_error

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
        when_calling: Called where a step calls others than any of its kind before, before it runs; a collective call.
        when_training: Called before each training step; a collective call of the pipeline.
        actions: What a step times with the Trainer's profiler.
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
        when_calling: Callable[[], object] = do_nothing,
        when_training: Callable[[], object] = do_nothing,
        actions: StepActions | None = None,
    ) -> None:
        self.batching = batching
        self.engine = engine
        self.owner = owner
        followed = {unit.module for unit in split.units.all}
        made_weights = None if compiled else find_made_weights(owner, followed, patches)
        self._stages = on_stages = StepOnStages(
            *(engine, owner, split, parameters, shared, patches, replica_group, batching, deferred, made_weights),
            repeats_layers=not (compiled or divided),
            actions=actions,
        )
        self.programs = on_stages.programs
        self._hosts = engine.host_group()
        self._when_calling = when_calling
        self._when_training = when_training
        self._means = means
        self._exchanges: dict[str, ValueExchange] = {}
        self._phases = PhaseRunner(on_stages, divided=divided)
        self._iterations = Iterations(engine, parameters, shared, means, on_stages.layers, precise=precise_gradients)
        self._first_looks = FirstLooks(on_stages, check_loss, compiled=compiled, divided=divided, deferred=deferred)
        self._newcomers = Newcomers(owner)
        self._divided = divided
        self._fresh = FreshBatches()
        self._rows = RowsLeft()
        self._short = ShortBatches(batching)
        self._is_first_batch = True
        self._sizes_checked: set[tuple[int, ...]] = set()
        self._by_units = UnitEvaluations(engine, owner)

    @ending_as_raised
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
        tells: bool = True,
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
            tells: Whether batches are to have what the step puts into them.
            between: What a step that optimizes by itself does after its phases but the last; None: it has no phases.

        Returns:
            The loss of the batch, the weighted mean of its microbatches' losses, in the form the step returned it; None
            if the step returned None. Its `backward` hands out the gradients.

        Raises:
            ConfigurationError: On every rank, if the step does not return a loss, or returns on the first batch one
                that is NaN or does not suit microbatches; see `first_batch`.
        """
        engine = self.engine
        self._when_training()
        engine.set_num_microbatches(num_microbatches)
        microbatches = self._split("train", batch, num_microbatches)
        if len(microbatches) == num_microbatches:
            engine.microbatch = engine.microbatch or shapes_of(microbatches[0])
        step = self._fresh.given_to("train", step, tells=tells)
        of = StepOnBatch("train", step, microbatches, step_seed, batch, rest, rows=self._rows)
        between = None if self.batching.joins_microbatches else between
        if between is not None:
            self._check_sizes(of)
            whole, (*earlier_phases, of) = of, self._phases.find(of)
            if earlier_phases:
                self._first_looks.look(replace(whole, is_of_phases=True))
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

        try:
            outcome, results, gradients = self._run_again(of, run)
        except DeviationError:
            if between is None or of.phase or not self.programs.follow(of.kind):
                raise
            of = self._phases.find(of)[-1]
            if of.phase:  # what it has optimized before cannot be done again
                raise
            outcome, results, gradients = self._run_again(of, run)
        loss = outcome["loss"]
        if loss is not None:
            if is_first:
                refuse_nan(engine, self.owner, batch, loss, results)
            self._is_first_batch = False  # a batch that is skipped is none
        self._leave_behind(outcome, batch, train=True)
        if loss is None:
            if between is None:
                refuse_skipping(of, self.programs)
            return None
        loss = attach_gradients(loss, gradients, loss_scale, then)
        loss = loss.reshape(outcome["shape"]) if outcome["shape"] else loss
        return outcome["output"] | {"loss": loss} if outcome["is_dict"] else loss

    def _check_sizes(self, of: StepOnBatch) -> None:
        """Check a step that optimizes by itself, once for batches of a size."""
        sizes = of.parts.sizes
        if len(sizes) > 1 and sizes not in self._sizes_checked:
            self._sizes_checked.add(sizes)
            refuse_optimizing_less(of, self.programs)

    def _split(self, kind: str, batch: Any, num_microbatches: int) -> Microbatches:
        """A batch's microbatches; where replicas gather layers for each, all have as many as the one with fewest."""
        microbatches = self._short.split(kind, batch, num_microbatches)
        while self._divided and self._means is not None:
            number = len(microbatches)
            most, fewest = spread(torch.tensor([number, -number]), torch.maximum, self._means.hosts).tolist()
            if most == -fewest:
                break
            microbatches = self.batching.split(batch, -fewest)
        return microbatches

    def _run_again(self, of: StepOnBatch, run: Callable[[], T]) -> T:
        joins, rewritten = self.batching.joins_microbatches, self._stages.rewritten
        return run_again(of, run, self.owner, self.programs, rewritten, joins=joins)

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

    @ending_as_raised
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
        tells: bool = True,
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
            tells: Whether batches are to have what the step puts into them.
            loader: Which of several loaders the batch is of.

        Returns:
            What the step returned, merged over microbatches, on the ranks that are wanted to have it; else None.
        """
        given = batch
        with without_inference_mode((batch, rest)) as (batch, rest):
            microbatches = self._split(
                kind, batch, num_microbatches if self._first_looks.divides((kind, loader)) else 1
            )
            of = StepOnBatch(
                kind,
                self._fresh.given_to(kind, step, tells=tells),
                microbatches,
                step_seed,
                batch,
                rest,
                loader=loader,
                rows=self._rows,
            )
            outcome = self._evaluated(of, outputs)
            self._leave_behind(outcome, given, train=False)
            return outcome["output"]

    def _evaluated(self, of: StepOnBatch, outputs: Outputs) -> dict[str, Any]:
        """What came of a step of an evaluation; where it cannot be divided into stages, it runs unit by unit."""
        refused = self._by_units.refused(of.source)
        if refused is None:
            try:
                self._first_looks.look(of)
                if not self._first_looks.divides(of.source):
                    of = replace(of, parts=self._split(of.kind, of.batch, 1))
                return self._run_again(of, lambda: self._run(of, outputs=outputs))[0]
            except AddedMetricError:
                raise
            except ConfigurationError as error:
                refused = error
        in_one_piece = replace(of, parts=self.batching.split(of.batch, 1), by_units=True)
        return self._by_units.run(of, refused, lambda: self._run(in_one_piece, outputs=outputs)[0])

    def _run(
        self,
        of: StepOnBatch,
        loss_scale: torch.Tensor | None = None,
        outputs: Outputs = "nobody",
        after_backward: AfterBackward | None = None,
    ) -> tuple[dict[str, Any], list[Any]]:
        """Run a step; returns what came of it, and on the last rank what it returned for microbatches."""
        engine, stages, kind, microbatches = self.engine, self._stages, of.kind, of.parts
        train = kind == "train"
        whole = None
        if self.batching.joins_microbatches and len(microbatches) > 1:
            whole = Whole(of.batch, lambda: of.step(of.batch, *of.rest), microbatches.sizes)
        sizes = microbatches.sizes if whole is None else (microbatches.size,)
        weights: tuple[float, ...] = ()
        if engine.is_last:
            weights = (1.0,) if whole is not None else stages.rules.weights(of.source, microbatches.parts, sizes)
        recorder = LogRecorder(self.owner, weights, sizes, of_epochs=kind != "train")
        results: list[Any] = []
        shape: tuple[int, ...] = ()
        way, of_sizes = WayMade(), set[int]()

        def take(result: Any, index: int) -> torch.Tensor:
            nonlocal shape, way
            if not train or result is None:
                # only what somebody wants is kept: it may be large
                kept = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
                results.append(kept if outputs != "nobody" else None)
                return torch.zeros(())
            loss, shape = loss_of(result), tuple(loss_in(result).shape)
            check_known(loss)
            if whole is None and (size := microbatches.sizes[index]) not in of_sizes:
                looks = bool(of_sizes) and recorder.weights[index] > 0  # of fewer samples there may be no mean
                of_sizes.add(size)
                made = way_of(loss, microbatches.parts[index], looks=looks)
                if not way.number and stages.rules.labels(of.source, made.number) != stages.rules.labels(of.source):
                    recorder.weights = stages.rules.weights(of.source, microbatches.parts, sizes, made.number)
                way = way.beside(made)
            results.append(kept_of(result, loss, wanted=outputs != "nobody"))
            weight = recorder.weights[index]
            return to_be_differentiated(loss, weight, loss_scale, runs_backward=self._divided)

        error: Exception | None = None
        stages.earlier.begin(kind)
        effects = Effects(self.owner, self.programs.modules, stages.earlier)
        newcomers = self._newcomers.without_gradients(effects.flags.parameters) if train else []
        outcome: dict[str, Any] = {}
        units: Counts = ()
        stages.layers.begin(microbatches.sizes, looks=train, learns=self._first_looks.learns_numbers)

        def merged() -> dict[str, Any]:
            run = StepRun(effects, recorder, results, train, self.batching.batch_dim)
            with stages.rules.looking(of, run, engine.seed) as rules:
                found = run.merged(rules, is_sent=engine.num_ranks > 1)
            return found | {"skipped": sorted(skipped[-1]), "shape": shape, "way": way}

        try:
            if of.by_units:
                stages.run_by_units(of, recorder, take, effects)
            else:
                given = kind, of.of_microbatch, microbatches, of.seed, recorder, take, whole, effects, after_backward
                programs = stages.run(*given, phase=of, when_calling=self._when_calling)
                units = programs[0][-1].units_called if self.programs.has_traced else ()
            skipped = stages.skipped
            self._newcomers.refuse(newcomers)
            if engine.is_last:
                outcome = merged()
                outcome["news"] = self._first_looks.finds_news(of, outcome, units)
        except Exception as exception:
            error = exception
        if of.by_units:
            meet_at_end(kind, self._hosts, error)
        if (exchange := self._exchanges.get(kind)) is None:
            exchange = ValueExchange(engine.device, engine.group, self._hosts, engine.last_rank)
            self._exchanges[kind] = exchange
        apart = outcome.pop("output", None) if outputs in ("first", "last") else None
        shared: dict[str, Any] = {}
        try:
            shared = exchange.share(outcome, error)
        finally:
            is_news = self._any_replica(shared.get("news", False))
        stages.layers.end(engine.all_gather, partial(self._first_looks.learn_numbers, of))
        if is_news:
            before = stages.rules.labels(of.source)
            self._first_looks.look_at_news(of)
            # replicas would have to do so together
            if train and not stages.has_replicas and stages.rules.labels(of.source) != before:
                raise WeighedOtherwiseError
            outcome = merged() if engine.is_last else {}
            apart = outcome.pop("output", None) if outputs in ("first", "last") else None
            shared = exchange.share(outcome)
        stages.rules.ran(of.source, shared["way"])
        if outputs in ("first", "last"):
            shared["output"] = apart if outputs == "last" else exchange.send_to_first(apart)
        check_skipped(skipped, shared["skipped"])
        self._rows.note(effects.leave(shared, is_first=engine.rank == 0))
        stages.layers.leave()
        if not engine.is_last:
            stages.windows_go_on(shared["told"])
        return shared, results

    def _any_replica(self, is_news: bool) -> bool:
        """Whether something is to be looked at; where replicas compute each layer together, any of them says so."""
        if not self._divided or self._means is None:
            return is_news
        return bool(spread(torch.tensor([int(is_news)]), torch.maximum, self._means.hosts))

    def _leave_behind(self, outcome: dict[str, Any], batch: Any, *, train: bool) -> None:
        """Put into the batch what the step has put there, and log what was logged, on every rank."""
        for (root, *path), args, _ in outcome["calls"]:
            if root == OF_BATCH:
                put(batch, path, args[0])
        logged = outcome["logged"]
        if train and self._means is not None:
            logged = logged_by_any(logged, self.engine.device, self._means.hosts)
        with reduced_together():  # after each other hosts would wait once for each name
            for name, place, has_value, arguments, number in logged:
                value: Any = number if place is None and not number.is_floating_point() else number.to(type_of_logged())
                if place is not None:
                    metric = metric_at(self.owner, place)
                    set_batch_value(metric, value if has_value else None)
                    value = metric
                # all pipeline ranks log the same value, so there is nothing to synchronise between them; values of a
                # batch that is evaluated are a replica's, unless the user says otherwise, as others may have none
                with nullcontext() if train or arguments.get("sync_dist") else without_replicas():
                    self.owner.log(name, value, **{**arguments, "sync_dist": True})  # type: ignore[operator]
