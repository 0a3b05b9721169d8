"""One step of the user's module on the pipeline: split the batch, run the stages, share what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.model.batch_norm import DeferredBatchNorms
from lightning_pfo.strategy.model.buffers import StepBuffers
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.program import StageProgram
from lightning_pfo.strategy.model.tracing.tracked import following, plain
from lightning_pfo.strategy.model.untouched import untouched
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.compat import tree_map_only
from lightning_pfo.strategy.parallel.groups import Shared, host_group
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.parallel.reductions import average_gradients, sum_shared_gradients
from lightning_pfo.strategy.step.batches.batching import DEFAULT_BATCHING, Batching
from lightning_pfo.strategy.step.batches.merging import merge_outputs
from lightning_pfo.strategy.step.batches.splitting import Microbatches
from lightning_pfo.strategy.step.compat import set_batch_value, without_synchronisation
from lightning_pfo.strategy.step.first_batch import LossComparison, refuse_nan
from lightning_pfo.strategy.step.gradients import (
    attach_gradients,
    put_gradients,
    take_gradients,
)
from lightning_pfo.strategy.step.metrics import metrics_of, take_state_from
from lightning_pfo.strategy.step.programs import Programs, Whole, logging_to
from lightning_pfo.strategy.step.recording import LogRecorder
from lightning_pfo.strategy.step.values import StepValues, ValueExchange
from lightning_pfo.strategy.step.whole.end import Ends

Step = Callable[..., Any]
"""A user's step: `step(batch, *rest)`."""


class StepRunner:
    """Runs `training_step` and its siblings on the pipeline.

    Args:
        engine: The pipeline engine of this rank.
        owner: The user's module whose steps are run.
        split: How it is divided.
        parameters: Parameters this rank holds.
        shared: Parameters and buffers that this rank holds together with others.
        patches: Gives the user's metrics back when it is closed.
        replica_group: Processes with the same stages in other replicas; None where there is one replica.
        batching: How batches are divided, and how much each microbatch counts.
        check_loss: Whether the loss of the first batch is compared with the mean of its microbatches' losses.
        compiled: Whether layers are compiled.
        deferred: Batch norms whose running statistics are those of whole batches.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        owner: nn.Module,
        split: Split,
        parameters: list[nn.Parameter],
        shared: Sequence[Shared],
        patches: Patches,
        replica_group: dist.ProcessGroup | None = None,
        *,
        batching: Batching = DEFAULT_BATCHING,
        check_loss: bool = True,
        compiled: bool = False,
        deferred: DeferredBatchNorms | None = None,
    ) -> None:
        self.batching = batching
        self.engine = engine
        self.owner = owner
        self._programs = Programs(owner, split, engine.device, patches)
        self._ends = Ends(engine, owner, self._programs)
        self._metrics = metrics_of(owner)
        self._deferred = deferred
        self._parameters = parameters
        self._shared = shared
        self._hosts = host_group(engine.group, engine.device)
        self._exchanges: dict[str, ValueExchange] = {}
        self._comparison = LossComparison(self, compiled=compiled) if check_loss else None
        self._is_first_batch = True
        self._rehearsed: set[str] = set()
        for metric in self._metrics:
            take_state_from(metric, engine.last_rank, engine.device, engine.group, replica_group, patches)

    def train(
        self,
        step: Step,
        num_microbatches: int,
        step_seed: tuple[int, ...],
        batch: Any,
        rest: Any,
        loss_scale: torch.Tensor | None = None,
        average_over: dist.ProcessGroup | None = None,
        keep_gradients: bool = True,
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
            average_over: Replicas whose gradients are averaged at once, where nobody does it after accumulation.
            keep_gradients: Whether gradients of earlier steps are still needed; otherwise their memory is used again.

        Returns:
            The loss of the batch, the weighted mean of its microbatches' losses, in the form the step returned it. Its
            `backward` hands out the gradients.

        Raises:
            ConfigurationError: On every rank, if the step does not return a loss, or returns on the first batch one
                that is NaN or does not suit microbatches; see `first_batch`.
        """
        engine = self.engine
        engine.set_num_microbatches(num_microbatches)
        microbatches = self.batching.split(batch, num_microbatches)
        is_first, self._is_first_batch = self._is_first_batch, False
        if is_first and self._comparison is not None:
            self._comparison.check(step, microbatches, step_seed, batch, rest)
            self._comparison = None
        is_ordinary = len(microbatches) == num_microbatches
        if is_ordinary:
            engine.iteration_begin()
        earlier = take_gradients(self._parameters)
        if not keep_gradients:
            earlier = [None] * len(earlier)
        try:
            values, losses = self._run("train", step, microbatches, step_seed, batch, rest, loss_scale)
            if is_ordinary:
                engine.iteration_end()
            sum_shared_gradients(self._shared)
            average_gradients(self._parameters, average_over)
            gradients = take_gradients(self._parameters)
        finally:
            put_gradients(self._parameters, earlier)
        if is_first:
            refuse_nan(engine, self.owner, batch, values.numbers[0], losses)
        self._log(values, microbatches.size)
        loss = attach_gradients(values.numbers[0], self._parameters, gradients, loss_scale)
        return {"loss": loss} if values.structure[0] == "dict" else loss

    def evaluate(
        self, kind: str, step: Step, num_microbatches: int, step_seed: tuple[int, ...], batch: Any, rest: Any
    ) -> Any:
        """Run a validation or test step; returns its scalar result, or None if it has none."""
        microbatches = self.batching.split(batch, num_microbatches)
        values, _ = self._run(kind, step, microbatches, step_seed, batch, rest)
        self._log(values, microbatches.size)
        result_kind = values.structure[0]
        if result_kind is None:
            return None
        return {"loss": values.numbers[0]} if result_kind == "dict" else values.numbers[0]

    def predict(self, step: Step, num_microbatches: int, step_seed: tuple[int, ...], batch: Any, rest: Any) -> Any:
        """Run a predict step; every rank gets the merged outputs, on the CPU."""
        engine = self.engine
        microbatches = self.batching.split(batch, num_microbatches)
        values, results = self._run("predict", step, microbatches, step_seed, batch, rest)
        self._log(values, microbatches.size)
        merged = None
        if engine.is_last:
            weights = self.batching.weights(microbatches.parts, microbatches.sizes)
            outputs = merge_outputs(results, microbatches.sizes, weights, batch_dim=self.batching.batch_dim)
            merged = tree_map_only(torch.Tensor, torch.Tensor.cpu, outputs)
        return engine.all_gather(merged)[engine.last_rank]

    def _run(
        self,
        kind: str,
        step: Step,
        microbatches: Microbatches,
        step_seed: tuple[int, ...],
        batch: Any,
        rest: Any,
        loss_scale: torch.Tensor | None = None,
    ) -> tuple[StepValues, list[Any]]:
        engine = self.engine
        whole = None
        if self.batching.joins_microbatches and len(microbatches) > 1:
            whole = Whole(batch, lambda: step(batch, *rest), microbatches.sizes)
        weights: tuple[float, ...] = ()
        if engine.is_last:
            weights = (1.0,) if whole is not None else self.batching.weights(microbatches.parts, microbatches.sizes)
        recorder = LogRecorder(self.owner, weights)
        results: list[Any] = []
        error: BaseException | None = None

        def take(result: Any, index: int) -> torch.Tensor:
            nonlocal error
            try:
                if isinstance(result, Exception):
                    raise result
                if kind != "train":
                    results.append(result)
                    return torch.zeros(())
                loss = loss_of(result)
                # nothing else is kept: what a step returns besides may be large
                results.append({"loss": loss.detach()} if isinstance(result, dict) else loss.detach())
                if not weights[index]:  # its loss may be NaN, as a mean over no labels
                    return torch.zeros(())
                loss = loss * weights[index]
                return loss if loss_scale is None else loss * loss_scale
            except Exception as exception:  # finish the iteration so that the other ranks do not hang; then all raise
                error = error or exception
                return torch.zeros(())

        self.run(kind, lambda index: step(microbatches[index], *rest), microbatches, step_seed, recorder, take, whole)
        mine = None
        if engine.is_last:
            mine = StepValues(error=error) if error is not None else recorder.step_values(results)
        if kind not in self._exchanges:
            self._exchanges[kind] = ValueExchange(engine.device, engine.group, self._hosts, engine.last_rank)
        return self._exchanges[kind].share(mine), results

    def run(
        self,
        kind: str,
        step: Callable[[int], Any],
        microbatches: Sequence[Any],
        step_seed: tuple[int, ...],
        recorder: LogRecorder,
        take: Callable[[Any, int], torch.Tensor],
        whole: Whole | None = None,
    ) -> list[list[StageProgram]]:
        """Run a step on microbatches; the first time an error of any stage is raised on every rank.

        Args:
            kind: Which step it is; `train` runs backward too.
            step: The user's step on the microbatch of an index.
            microbatches: The microbatches.
            step_seed: Makes the random numbers of this step differ from those of others.
            recorder: Where logs of the last stage go.
            take: Takes, on the rank of the last stage, what the step returned for a microbatch (or the error that it
                raised); returns the loss.
            whole: The whole batch, on which the step ends, so that something is taken for index 0 only; None: it ends
                on every microbatch.

        Returns:
            What the stages have done of each microbatch.
        """
        engine = self.engine
        train, last = kind == "train", engine.num_stages - 1

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            with following(None):
                recorder.log(name, plain(value), *args, **kwargs)

        @contextmanager
        def inside(log: Callable[..., None], stage: int | None = None) -> Iterator[None]:
            """Where the user's step runs; without a stage nothing is noted of it."""
            with ExitStack() as stack:
                stack.enter_context(logging_to(self.owner, log))
                stack.enter_context(without_synchronisation(self._metrics))
                if stage is not None:
                    stack.enter_context(buffers.of(min(stage, last)))
                if self._deferred is not None and stage is not None:
                    stack.enter_context(self._deferred.forward_of(stage))
                yield

        def run_step(stage: int, index: int) -> Any:
            recorder.index = index if whole is None else 0
            with inside(log if whole is None and stage == last else _log_nothing, stage):
                return step(index)

        with random_state.isolated(engine.device):
            found = self._programs.of(kind, microbatches, step, (engine.seed, *step_seed), train=train, whole=whole)
            changes = {n: s for of_stages, whole_step in found for n, s in (whole_step or of_stages)[0].changes.items()}
            changes = {name: stage if stage is None else min(stage, last) for name, stage in changes.items()}
            if whole is not None:
                trying, running = partial(inside, _log_nothing), partial(inside, log, engine.num_stages)
                take = self._ends.of(kind, found, microbatches, whole, step, step_seed, trying, running, take)
            programs = [of_stages for of_stages, _ in found]
            if kind not in self._rehearsed:
                with untouched(self.owner):
                    buffers = StepBuffers(self.owner, changes, len(engine.stages))
                    engine.rehearse(programs[0], step_seed, run_step, train=train)
                self._rehearsed.add(kind)
            buffers = StepBuffers(self.owner, changes, len(engine.stages))
            with self._deferred.batch() if train and self._deferred is not None else nullcontext():
                engine.run(programs, step_seed, run_step, take, train=train)
            buffers.agree(engine.placement, self._shared, engine.group)
        return programs

    def _log(self, values: StepValues, batch_size: int) -> None:
        result_kind, logged = values.structure
        numbers = values.numbers[0 if result_kind is None else 1 :]
        for (name, metric_path, arguments), number in zip(logged, numbers, strict=True):
            value: Any = number
            if metric_path is not None:
                value = self.owner.get_submodule(metric_path)
                set_batch_value(value, number)
            # all pipeline ranks log the same value, so there is nothing to synchronise between them
            self.owner.log(name, value, **{"batch_size": batch_size, **arguments, "sync_dist": True})  # type: ignore[operator]


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for `self.log` where the step is not run to its end."""


def loss_of(result: Any) -> torch.Tensor:
    """The loss that a training step returned.

    Raises:
        ConfigurationError: If it returned none.
    """
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ConfigurationError(
            "A pipelined training_step returns the loss as a one-element tensor that depends on the model's output, or "
            f"a dict with it under 'loss'; got {_describe(result)}."
        )
    return loss.reshape(())


def _describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)} with requires_grad={result.requires_grad}"
    return f"a dict with keys {list(result)}" if isinstance(result, dict) else repr(result)
