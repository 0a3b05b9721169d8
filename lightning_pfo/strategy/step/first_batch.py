"""What is looked at on the first training batch, and never again: do losses suit microbatches, and is one NaN?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing.program import StageProgram
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.dtensor import local
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.splitting import Microbatches
from lightning_pfo.strategy.step.batches.structures import leaves_of
from lightning_pfo.strategy.step.loss_check import (
    EXTRA_DRAWS,
    LARGEST_BYTES,
    Losses,
    describe,
    differ,
    is_no_sum,
    is_no_weighted_mean,
    tolerance_of,
)
from lightning_pfo.strategy.step.programs import Whole
from lightning_pfo.strategy.step.recording import LogRecorder

_log = logging.getLogger(__name__)


class RunsSteps(Protocol):
    """Runs a user's steps on the pipeline; see `StepRunner`."""

    engine: PipelineEngine
    owner: nn.Module
    batching: Batching

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
        """Run a step on microbatches."""


class LossComparison:
    """Compares the loss of a batch with the mean of its microbatches' losses; see `loss_check`.

    Nothing remains of it: no gradient, log, metric, buffer, attribute, random number or counter. Parameters that the
    step itself writes into are the exception, and what it tells others, such as a file.

    Args:
        runner: Runs the user's step.
        compiled: Whether layers are compiled; here they are not, since a second batch size would compile them anew.
    """

    def __init__(self, runner: RunsSteps, *, compiled: bool) -> None:
        self._runner = runner
        self._engine, self._owner = runner.engine, runner.owner
        self._compiled = compiled
        self._output_bytes = 0
        self._dtypes: set[torch.dtype] = set()

    def check(
        self, step: Callable[..., Any], parts: Microbatches, step_seed: tuple[int, ...], batch: Any, rest: Any
    ) -> None:
        """Compare them for one batch; a collective call of all processes.

        Raises:
            ConfigurationError: On every rank, if the loss of the batch is no mean of the microbatches' losses, weighted
                or not. If it is a weighted mean, or nearly the mean, there is a warning.
        """
        engine = self._engine
        verdict: tuple[bool, str] | None = None
        if len(parts) > 1:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(random_state.isolated(engine.device))
                if self._compiled:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.callback(torch.clear_autocast_cache)  # casts made without gradients would have none in training
                verdict = self._compare(step, parts, step_seed, batch, rest)
        verdicts = [found for found in engine.all_gather(verdict, everywhere=True) if found is not None]
        for is_error, message in sorted(verdicts, reverse=True):
            if is_error:
                raise ConfigurationError(message)
        if verdicts and engine.rank == 0 and engine.place == (0, 0):
            _log.warning(verdicts[0][1])

    def _compare(
        self, step: Callable[..., Any], parts: Microbatches, step_seed: tuple[int, ...], batch: Any, rest: Any
    ) -> tuple[bool, str] | None:
        """Whether it is an error, and what to say; None if there is nothing to say, or on all ranks but the last."""
        batching, num_microbatches = self._runner.batching, len(parts)

        whole = None
        if batching.joins_microbatches:
            whole = Whole(batch, lambda: step(batch, *rest), parts.sizes)

        def losses_of(parts: Sequence[Any], draw: int) -> tuple[float, ...] | None:
            joined = whole if len(parts) > 1 else None
            return self._losses(lambda index: step(parts[index], *rest), parts, (*step_seed, draw), joined)

        of_parts = losses_of(parts, 0)
        most = max(2, LARGEST_BYTES // max(1, self._output_bytes)) if of_parts else 0
        if whole is not None:  # the end of the step has all of the batch in any case
            most = num_microbatches * bool(of_parts)
        most = min(self._tell(most))
        if not most:
            return None
        numbers = {min(most, num_microbatches), num_microbatches if whole is not None else 2}
        for number in sorted(numbers, reverse=True):  # two may fit where all do not
            joined = [batch if number == num_microbatches else batching.first_parts(batch, parts, number)]
            of_all = losses_of(joined, 0)
            if all(self._tell(bool(of_all))):
                break
        else:
            return None
        weights = () if whole is not None else batching.weights(parts.parts[:number], parts.sizes[:number])
        parts = parts[:number]
        tolerance = self._tolerance()
        draws: list[Losses] = []
        if of_parts and of_all:
            draws.append(Losses(of_parts[:number], of_all[0], weights))
        if not any(self._tell(bool(draws) and differ(draws, tolerance))):
            return None
        for draw in range(1, 1 + EXTRA_DRAWS):
            of_parts, of_all = losses_of(parts, draw), losses_of(joined, draw)
            if of_parts and of_all:
                draws.append(Losses(of_parts, of_all[0], weights))
        if len(draws) <= EXTRA_DRAWS or not differ(draws, tolerance):
            return None
        is_error = is_no_sum(draws) or is_no_weighted_mean(draws, tolerance)
        return is_error, describe(draws, None if whole is not None else num_microbatches, tolerance)

    def _tell(self, value: int) -> list[int]:
        """What the last ranks of all replicas say: they go on together, since layers may be divided over them."""
        values = self._engine.all_gather(value if self._engine.is_last else None, everywhere=True)
        return [found for found in values if found is not None]

    def _losses(
        self, step: Callable[[int], Any], parts: Sequence[Any], step_seed: tuple[int, ...], whole: Whole | None
    ) -> tuple[float, ...] | None:
        """The losses of microbatches (or that of the whole batch), on the last rank; None where they are not known."""
        losses: list[float] = []
        failures: list[Exception] = []

        def take(result: Any, index: int) -> torch.Tensor:
            try:
                loss = result["loss"] if isinstance(result, Mapping) else result
                self._dtypes.add(loss.dtype)
                losses.append(float(loss))
            except Exception as error:  # training itself will say what is wrong; other ranks must not wait
                failures.append(error)
            return torch.zeros(())

        with untouched(self._owner):
            for module in self._owner.modules():
                module.training = False
            problem = ""
            try:
                programs = self._runner.run("compare", step, parts, step_seed, LogRecorder(self._owner), take, whole)
                self._output_bytes = max((form.nbytes for form in programs[0][0].forms), default=0)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            problems = [found for found in self._engine.all_gather(problem, everywhere=True) if found]
            if problems:
                self._say_why_not(len(parts), problems[0])
                return None
        if failures:
            self._say_why_not(len(parts), f"{type(failures[0]).__name__}: {failures[0]}")
        return tuple(losses) if losses and not failures else None

    def _say_why_not(self, number: int, problem: str) -> None:
        what = "as one batch" if number == 1 else "by microbatches"
        _log.info("The first batch did not run forward %s, so losses are not compared. %s", what, problem)

    def _tolerance(self) -> float:
        device = self._engine.device.type
        dtypes = self._dtypes | {p.dtype for p in self._owner.parameters() if not p.is_meta}
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
        return tolerance_of(list(dtypes))


def refuse_nan(
    engine: PipelineEngine, owner: nn.Module, batch: Any, loss: torch.Tensor, of_microbatches: Sequence[Any]
) -> None:
    """Refuse to train on a loss that is NaN although data and parameters are finite; a collective call of all.

    Args:
        engine: The pipeline engine of this rank.
        owner: The user's module.
        batch: The first training batch.
        loss: Its loss.
        of_microbatches: On the last rank the losses of microbatches.

    Raises:
        ConfigurationError: On every rank.
    """
    mine: tuple[bool, list[int], list[str], str] = (False, [], [], "")
    if bool(torch.isnan(loss)):
        losses = [result["loss"] if isinstance(result, Mapping) else result for result in of_microbatches]
        bad = [name for name, parameter in owner.named_parameters() if not _is_finite(parameter.detach())]
        in_batch = [_said(leaf) for _, leaf in leaves_of(batch) if not _is_finite(leaf)]
        which = [index for index, value in enumerate(losses) if len(losses) > 1 and bool(torch.isnan(value))]
        mine = (True, which, bad, in_batch[0] if in_batch else "")
    found = [others for others in engine.all_gather(mine, everywhere=True) if others[0]]
    if not found:
        return
    seen = "The loss of the first training batch is NaN"
    which = next((numbers for _, numbers, _, _ in found if numbers), [])
    if which:
        seen += f" (of microbatches {', '.join(map(str, which))})"
    in_batch_of = next((text for *_, text in found if text), "")
    parameters = sorted({name for _, _, names, _ in found for name in names})
    if not in_batch_of and not parameters:
        raise ConfigurationError(
            f"{seen}, although the batch and all parameters are finite, so training would change all weights to NaN. "
            f"Look at the loss: a mean over no elements (a microbatch whose labels are all -100: use fewer "
            f"microbatches), log(0), 0 / 0, or an overflow in 16 bits. Trainer(detect_anomaly=True), or "
            f"torch.autograd.set_detect_anomaly(True), names the operation; if "
            f"num_microbatches=1 gives a number, the loss does not suit microbatches."
        )
    if engine.rank == 0 and engine.place == (0, 0):
        why = (
            f"the batch has {in_batch_of}" if in_batch_of else f"parameters are not finite: {', '.join(parameters[:3])}"
        )
        _log.warning("%s: %s.", seen, why)


def _is_finite(value: Any) -> bool:
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return bool(np.isfinite(value).all())
    if not isinstance(value, torch.Tensor) or value.is_meta or not value.is_floating_point():
        return True
    return bool(torch.isfinite(local(value)).all())


def _said(values: torch.Tensor | np.ndarray) -> str:
    tensor = torch.as_tensor(values)
    number = int((~torch.isfinite(tensor)).sum())
    return f"{number} of {tensor.numel()} values that are NaN or infinite in a tensor of shape {tuple(tensor.shape)}"
