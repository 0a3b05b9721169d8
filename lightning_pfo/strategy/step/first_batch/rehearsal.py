"""How a batch that is compared is run: forward only, by microbatches and in one piece, and nothing of it remains."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from lightning_pfo.strategy.compat.autograd import LACKS_GRADIENTS
from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.engine.endings import StepEndedError
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing.ends import DeviationError
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.splitting import Microbatches
from lightning_pfo.strategy.step.effects.effects import Effects
from lightning_pfo.strategy.step.effects.layers.watch import Numbers
from lightning_pfo.strategy.step.effects.within import replica_alone, step_forward_only
from lightning_pfo.strategy.step.first_batch.differences.pairs import Pair
from lightning_pfo.strategy.step.first_batch.differences.rounding import (
    WideNumbers,
    is_narrow,
    rounds_products,
    tolerance_of,
    types_noted,
)
from lightning_pfo.strategy.step.first_batch.differences.slopes import Compared, Slopes
from lightning_pfo.strategy.step.first_batch.modes import modes_set
from lightning_pfo.strategy.step.on_stages import StepOnStages
from lightning_pfo.strategy.step.outcome import StepOnBatch, StepRun, loss_in
from lightning_pfo.strategy.step.programs import Whole
from lightning_pfo.strategy.step.recording import LogRecorder

_log = logging.getLogger(__name__)
T = TypeVar("T")
EXTRA_DRAWS = 3  # how often what differs is computed again with other random numbers: does it differ by chance?
_SAID_WITHOUT_GRADIENTS = (
    *("torch.autograd.grad", LACKS_GRADIENTS),
    *("cannot register a hook on a tensor that doesn't require gradient", "can't retain_grad on Tensor"),
)
"""What torch, or we, say where nothing has gradients."""
_CANCELS_OUT = 8  # so much smaller is what rounding makes of such a loss, see `Rehearsal.tolerances`
_MOST_STEPS = 10  # of smaller tolerances
_OF_PHASES = (
    "A step that optimizes several times in a batch trains on the means of its microbatches' losses, and nothing "
    "compares these with the loss of the whole batch, as forward only it does not run in one: let losses, and what is "
    "logged, be means over samples (no reduction='sum', nothing that compares samples, or weighs losses by gradients). "
    "With num_microbatches=1 and schedule='gpipe' all is that of one device. {problem}"
)
_LARGEST_BYTES = 256 * 2**20  # of outputs of the model that are held; of larger ones, fewer microbatches are compared


class InOnePiece(NamedTuple):
    """Microbatches that were run by themselves and as one.

    Attributes:
        parts: These microbatches.
        pairs: What they come to, on the last rank; none elsewhere.
        grown: How numbers of layers have grown by both.
    """

    parts: Microbatches
    pairs: list[Pair]
    grown: tuple[Numbers, Numbers]


class Rehearsal:
    """Runs batches forward only, in evaluation mode of layers; where that fails, of torch's layers only.

    Nothing remains of it: no gradient, log, metric, buffer, weight, attribute, random number or counter. What the step
    tells others, such as a file, is the exception. All of it are collective calls of the pipeline.

    Args:
        runner: Runs the user's step.
        compiled: Whether layers are compiled; here they are not, since a second batch size would compile them anew.

    Attributes:
        everywhere: Whether all replicas run together, as they do in training, and where layers are divided over them.
        evaluates: Whether layers of other classes than torch's can run a training step in evaluation mode.
        is_narrow: Whether what is compared runs under the user's autocast, and makes numbers in a narrow type, whose
            rounding hides differences, since it does not run otherwise.
        grown: How numbers of layers have grown by the last run.
        in_training: Layers, by name, that are in training mode all the same.
        loss_shape: Of a loss in one piece that is no number, on the last rank; none of a loss as it should be.
    """

    def __init__(self, runner: StepOnStages, *, compiled: bool) -> None:
        self._runner = runner
        self._engine, self._owner = runner.engine, runner.owner
        self._compiled = compiled
        self._output_bytes = 0
        self._dtypes: set[torch.dtype] = set()
        self._loss_dtypes: set[torch.dtype] = set()
        self.everywhere = True
        self.evaluates = True
        self.is_narrow = False
        self.grown: Numbers = {}
        self.in_training: Collection[str] = ()
        self.loss_shape: tuple[int, ...] = ()
        self._is_silent = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Where the step runs forward without that anything of torch remains of it."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(random_state.isolated(self._engine.device))
            if not self.everywhere:
                stack.enter_context(replica_alone())
            if self._compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(torch.clear_autocast_cache)  # casts made without gradients would have none in training
            yield

    @contextmanager
    def precise(self) -> Iterator[None]:
        """Where autocast is off and numbers are wide, if batches run so: comparisons are as precise as they can be."""
        kind = self._engine.device.type
        with ExitStack() as stack:
            if torch.is_autocast_enabled(kind) and not self.is_narrow:
                stack.enter_context(torch.autocast(kind, enabled=False))
            if self._has_narrow_parameters() and not self.is_narrow:
                stack.enter_context(WideNumbers())
            yield

    def _has_narrow_parameters(self) -> bool:
        return any(is_narrow(parameter.dtype) for parameter in self._owner.parameters())

    @contextmanager
    def silent(self, is_silent: bool) -> Iterator[None]:
        """Where nobody is told why a batch did not run."""
        self._is_silent = is_silent
        try:
            yield
        finally:
            self._is_silent = False

    def most(self) -> int:
        """How many microbatches may be run as one."""
        return max(2, _LARGEST_BYTES // max(1, self._output_bytes))

    def both_ways(self, first: StepOnBatch) -> InOnePiece | None:
        """Run a batch by microbatches, and as many of these as fit as one; None where it does not run."""
        by_parts = self.run(first, first.parts, 0)
        return self.in_one_piece(first, by_parts, self.most() if by_parts else 0)

    def in_one_piece(
        self, first: StepOnBatch, by_parts: StepRun | None, most: int, whole: Whole | None = None
    ) -> InOnePiece | None:
        """Run as many microbatches as one as fit, and where that is not all, these by themselves once more.

        Args:
            first: The batch.
            by_parts: What its microbatches have come to.
            most: On the last rank how many to try at most; 0: none.
            whole: The batch, where the step ends on it.

        Returns:
            What was run; None where nothing is compared.
        """
        num_microbatches, grown = len(first.parts), self.grown
        most = min(self.tell(most))
        if not most:
            return None
        possible = {min(most, num_microbatches), num_microbatches if whole is not None else 2}
        possible = {self._runner.batching.num_to_join(first.parts, number) for number in possible}
        for number in sorted(possible, reverse=True):  # two may fit where all do not
            of_all = self.run(first, self._joined(first, number), 0)
            if all(self.tell(bool(of_all))):
                break
        else:
            return None
        parts, of_whole = first.parts[:number], self.grown
        if number < num_microbatches:
            by_parts = self.run(first, parts, 0)
            grown = self.grown
        return InOnePiece(parts, [Pair(by_parts, of_all)] if by_parts and of_all else [], (grown, of_whole))

    def _joined(self, first: StepOnBatch, number: int) -> Microbatches:
        """The samples of the first microbatches as one."""
        joined = self._runner.batching.first_parts(first.batch, first.parts, number)
        return Microbatches((joined,), (sum(first.parts.sizes[:number]),))

    def draw_again(self, first: StepOnBatch, parts: Microbatches, pairs: list[Pair], whole: Whole | None) -> None:
        """Run the same with other random numbers, to see what differs by chance."""
        for draw in range(1, 1 + EXTRA_DRAWS):
            pairs += self.pair(first, parts, draw, whole)
        if len(pairs) <= EXTRA_DRAWS:
            pairs.clear()

    def pair(
        self, first: StepOnBatch, parts: Microbatches, draw: int, whole: Whole | None = None, *, evaluates: bool = False
    ) -> list[Pair]:
        """Run microbatches, and the same samples in one piece; nothing where one of both is not known."""
        by_parts = self.run(first, parts, draw, whole, evaluates=evaluates)
        of_all = self.run(first, self._joined(first, len(parts)), draw, evaluates=evaluates)
        return [Pair(by_parts, of_all)] if by_parts and of_all else []

    def slopes(self, first: StepOnBatch, parts: Microbatches, draw: int) -> Compared | None:
        """The gradients of microbatches and those of the same samples in one piece; None where they are not known."""
        of_parts, of_all = Slopes(), Slopes()
        with self.silent(True):
            for slopes, each in ((of_parts, parts), (of_all, self._joined(first, len(parts)))):
                self._runner.slopes = slopes
                try:
                    run = self.run(first, each, draw)
                finally:
                    self._runner.slopes = None
                if not all(self.tell(bool(run))):
                    return None
        weights = self._runner.rules.weights(first.source, parts.parts, parts.sizes)
        return Compared(of_parts, of_all, weights, parts.sizes)

    def tell(self, value: T) -> list[T]:
        """What the last ranks of replicas say: they go on together, since layers may be divided over them."""
        engine = self._engine
        values = engine.all_gather(value if engine.is_last else None, everywhere=self.everywhere)
        return [found for found in values if found is not None]

    def by_parts(self, first: StepOnBatch, whole: Whole | None) -> StepRun | None:
        """What the microbatches of a batch come to, in a mode in which they run, for that and all that follows."""
        *others, last = self._modes(first)
        for self.is_narrow, self.evaluates in others:
            run, _ = self._try(first, first.parts, 0, whole)
            if all(self.tell(bool(run))):
                return run
        self.is_narrow, self.evaluates = last
        return self.run(first, first.parts, 0, whole)

    def _modes_of_layers(self, *, evaluates: bool) -> dict[nn.Module, bool]:
        """Which modules are in training mode; what the step does `if self.training` counts."""
        modes = {}
        for name, module in self._owner.named_modules():
            is_other = module is self._owner or not (self.evaluates or type(module).__module__.startswith("torch."))
            modes[module] = (is_other or name in self.in_training) and module.training and not evaluates
        return modes

    def _modes(self, first: StepOnBatch) -> list[tuple[bool, bool]]:
        """Whether it is narrow, and whether layers are in evaluation mode: as it may run, the best first.

        A detector returns boxes in evaluation, and no features; some kernels take half precision only.
        """
        may_be_narrow = torch.is_autocast_enabled(self._engine.device.type) or self._has_narrow_parameters()
        narrow = (False, True) if may_be_narrow and not self.is_narrow else (self.is_narrow,)
        evaluates = (True, False) if first.kind == "train" and self.evaluates else (self.evaluates,)
        return [*itertools.product(narrow, evaluates)]

    def run(
        self, first: StepOnBatch, parts: Microbatches, draw: int, whole: Whole | None = None, *, evaluates: bool = False
    ) -> StepRun | None:
        """What microbatches (or the whole batch) come to, on the last rank; None where it is not known.

        Args:
            first: The batch.
            parts: Its microbatches, or all of them as one.
            draw: Which random numbers are drawn.
            whole: The batch, where the step ends on it.
            evaluates: Whether the user's module is in evaluation mode too.
        """
        run, problem = self._try(first, parts, draw, whole, evaluates=evaluates)
        if problem:
            what = "as one batch" if len(parts) == 1 else "by microbatches"
            is_told = first.kind == "train" and self._engine.is_speaker and not self._is_silent
            if is_told and first.is_of_phases:
                warn_once(_OF_PHASES.format(problem=problem))
            elif is_told:
                warn_once(
                    f"A batch did not run forward {what} before training, so its loss is not compared with the mean of "
                    f"its microbatches' losses, which a pipeline trains on. {problem}"
                )
            else:
                _log.info("A batch did not run forward %s, so it is not compared. %s", what, problem)
        return run

    def _try(
        self, first: StepOnBatch, parts: Microbatches, draw: int, whole: Whole | None = None, *, evaluates: bool = False
    ) -> tuple[StepRun | None, str]:
        """The same with what went wrong."""
        results: list[Any] = []
        is_training, batching = first.kind == "train", self._runner.batching
        sizes = parts.sizes if whole is None else (parts.size,)
        weights = self._runner.rules.weights(first.source, parts.parts, sizes) if whole is None else (1.0,)
        recorder = LogRecorder(self._owner, weights, sizes, of_epochs=not is_training)

        def take(result: Any, index: int) -> torch.Tensor:
            if self._runner.slopes is not None:
                self._runner.slopes.take(loss_in(result))
            results.append(tree_map_only(torch.Tensor, torch.Tensor.detach, result))
            return torch.zeros(())

        with untouched(self._owner), modes_set(self._modes_of_layers(evaluates=evaluates or not is_training)):
            known = dict(self._runner.earlier.meters)
            effects = Effects(self._owner, self._runner.programs.modules, meters=known)
            effects.draw_others(draw)
            said = self._runner.said_by_metrics(effects)
            computed: dict[str, torch.Tensor] = {}
            problem = ""
            ending: StepEndedError | None = None
            dtypes: set[torch.dtype] = set()
            try:
                with (
                    types_noted(dtypes),
                    self.precise(),
                    step_forward_only(),
                    self._runner.layers.rehearsal() as self.grown,
                ):
                    programs = self._runner.run(
                        "compare" if is_training else first.kind,
                        partial(first.of_part, parts),
                        parts,
                        (*first.seed, draw),
                        recorder,
                        take,
                        whole,
                        effects,
                    )
                computed = said.values() if self._engine.is_last else {}
                self._output_bytes = max((form.nbytes for form in programs[0][0].forms), default=0)
            except Exception as failed:
                error = self._runner.programs.explained(failed)
                problem = f"{type(error).__name__}: {error}"
                ending = failed if isinstance(failed, StepEndedError) else None
            everyone = self._engine.all_gather((problem, dtypes, ending), everywhere=self.everywhere)
            ended = next((each for *_, each in everyone if each is not None), None)
            if ended is not None:  # by Ctrl-C: that ends all
                raise ended
            self._dtypes.update(*(found for _, found, _ in everyone))  # layers of others may be in a narrower type
            problems = [found for found, *_ in everyone if found]
        deviates = any(found.startswith(DeviationError.__name__) for found in problems)
        if is_training and not self._runner.differentiates and any(_differentiates(each) for each in problems):
            self._runner.differentiates = True
            return self._try(first, parts, draw, whole, evaluates=evaluates)
        if deviates and self._runner.programs.follow("compare" if is_training else first.kind):
            return self._try(first, parts, draw, whole, evaluates=evaluates)
        if problems and len(parts) > 1 and self._divides_rows(first):
            found = self._try(first, parts, draw, whole, evaluates=evaluates)
            if found[1]:
                first.rows.give_up()
                self._runner.programs.forget()
            return found
        run = StepRun(effects, recorder, results, is_training, batching.batch_dim, computed)
        if not problems and is_training:
            try:
                for loss in map(loss_in, results):
                    self._dtypes.add(loss.dtype)
                    self._loss_dtypes.add(loss.dtype)
                    if loss.numel() > 1 and len(parts) == 1:
                        self.loss_shape = tuple(loss.shape)
                    float(loss)
            except Exception as error:  # training itself will say what is wrong; other ranks must not wait
                problems = [f"{type(error).__name__}: {error}"]
        return (run if results and not problems else None), (problems[0] if problems else "")

    def _divides_rows(self, first: StepOnBatch) -> bool:
        """Whether microbatches are given their own rows of what the module has from now on; all decide together."""
        is_here = first.rows.guess(first.kind, self._owner, first.parts.size)
        if all(self._engine.all_gather(is_here, everywhere=self.everywhere)):
            self._runner.programs.forget()
            return True
        if is_here:
            first.rows.give_up()
        return False

    def tolerance(self) -> float:
        """The relative difference that rounding explains, of what was run."""
        device = self._engine.device
        dtypes = self._dtypes | {p.dtype for p in self._owner.parameters()}
        if self.is_narrow and torch.is_autocast_enabled(device.type):
            dtypes.add(torch.get_autocast_dtype(device.type))
        return tolerance_of(dtypes, rounds_products=rounds_products(self._owner, device))

    def tolerances(self) -> Sequence[float]:
        """That, and a smaller one first where losses are summed up in a wider type than layers compute in.

        Rounding of samples cancels out in such a sum: of bf16, 0.1 % of a loss was seen. What a loss is a mean over is
        to be chosen by the smaller one, as some guesses come as near as the larger one by chance.
        """
        largest = self.tolerance()
        is_wider = bool(self._loss_dtypes) and tolerance_of(self._loss_dtypes) < largest
        is_wider = is_wider or (self._has_narrow_parameters() and not self.is_narrow)
        return (largest / _CANCELS_OUT, largest) if is_wider else (largest,)

    def finer_tolerances(self) -> Sequence[float]:
        """Smaller ones, each half of the next, to tell by what is as near by those; none where these are small."""
        least, steps = min(self.tolerances()), range(1, _MOST_STEPS)
        return [least / 2**step for step in steps if least / 2**step >= tolerance_of(())]


def _differentiates(problem: str) -> bool:
    """Whether a step has failed because it differentiates by itself, where nothing has gradients."""
    return any(said in problem for said in _SAID_WITHOUT_GRADIENTS)
