"""What is looked at on the first batches, do losses and numbers suit microbatches, and now and then of a later one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.model.tracing.ends import DeviationError
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.compat import tree_map_only
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.splitting import Microbatches
from lightning_pfo.strategy.step.effects.effects import Effects
from lightning_pfo.strategy.step.effects.layer_watch import LayerWatch, Numbers
from lightning_pfo.strategy.step.first_batch.losses import (
    EXTRA_DRAWS,
    LARGEST_BYTES,
    Losses,
    describe,
    differ,
    no_weights_explain,
    tolerance_of,
)
from lightning_pfo.strategy.step.first_batch.numbers import NumberCheck, Pair
from lightning_pfo.strategy.step.first_batch.numbers import describe as describe_numbers
from lightning_pfo.strategy.step.known_rules import KnownRules
from lightning_pfo.strategy.step.outcome import Source, StepOnBatch, StepRun, loss_in
from lightning_pfo.strategy.step.programs import Programs, Whole
from lightning_pfo.strategy.step.recording import LogRecorder
from lightning_pfo.strategy.step.values import ValueExchange

_log = logging.getLogger(__name__)
T = TypeVar("T")
_TRIES = 3
"""So many batches are looked at, where the first does not tell all."""
_LATER = frozenset(4**power for power in range(2, 16))
"""Numbers of the training batches whose loss is compared again: 16, 64, 256 and so on."""


class _Said(NamedTuple):
    """What is to be said of a batch."""

    is_error: bool
    is_of_loss: bool
    text: str


class RunsSteps(Protocol):
    """Runs a user's steps on the pipeline; see `StepRunner`."""

    engine: PipelineEngine
    owner: nn.Module
    batching: Batching
    programs: Programs
    layers: LayerWatch
    rules: KnownRules

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
    ) -> list[list[StageProgram]]:
        """Run a step on microbatches."""


class Comparison:
    """Compares what a batch comes to by microbatches and in one piece: losses and numbers; see the checks of these.

    Nothing remains of it: no gradient, log, metric, buffer, weight, attribute, random number or counter. What the step
    tells others, such as a file, is the exception.

    Args:
        runner: Runs the user's step.
        compiled: Whether layers are compiled; here they are not, since a second batch size would compile them anew.
        divided: Whether layers are divided over replicas, which run them together then.
    """

    def __init__(self, runner: RunsSteps, *, compiled: bool, divided: bool) -> None:
        self._runner = runner
        self._engine, self._owner = runner.engine, runner.owner
        self._compiled, self._divided = compiled, divided
        self._output_bytes = 0
        self._dtypes: set[torch.dtype] = set()
        self._tries: dict[Source, int] = {}
        self._number_trained = 0
        self._looks_later = True
        self._numbers: dict[Source, NumberCheck] = {}
        self._everywhere = True
        self._grown: Numbers = {}
        self._evaluates = False

    def check(self, first: StepOnBatch) -> None:
        """Compare for one batch, if it is one of the first of its kind and loader.

        A collective call of the pipeline, for training steps of all processes.

        Raises:
            ConfigurationError: On every rank, if the loss of the batch is no mean of the microbatches' losses, weighted
                or not. If it is a weighted mean, or nearly the mean, there is a warning.
        """
        engine, kind, source = self._engine, first.kind, first.source
        self._number_trained += kind == "train"
        if not self._tries.setdefault(source, _TRIES):
            if kind == "train" and self._looks_later and self._number_trained in _LATER:
                self._check_later(first)
            return
        self._everywhere = kind == "train" or self._divided
        self._tries[source] -= 1
        said: list[_Said] = []
        if len(first.parts) > 1:
            with self._aside():
                said = self._compare(first)
        is_open = source in self._numbers and bool(self._numbers[source].open)
        layers = self._runner.layers
        everyone = engine.all_gather((said, is_open, list(layers.means)), everywhere=self._everywhere)
        layers.share({place for *_, places in everyone for place in places})
        if not any(is_open for _, is_open, _ in everyone):
            self._tries[source] = 0
        for verdict in sorted({verdict for verdicts, *_ in everyone for verdict in verdicts}, reverse=True):
            if verdict.is_error:
                raise ConfigurationError(verdict.text)
            self._looks_later = self._looks_later and not (verdict.is_of_loss and kind == "train")
            if engine.rank == 0 and engine.place == (0, 0):
                _log.warning(verdict.text)

    def _check_later(self, of: StepOnBatch) -> None:
        """Compare the loss of a later training batch, and warn once: in the first, masks may have been all alike."""
        engine = self._engine
        numbers = engine.all_gather(len(of.parts), everywhere=True)
        if self._runner.batching.joins_microbatches or len(set(numbers)) > 1 or numbers[0] == 1:
            return
        self._everywhere = True
        with self._aside():
            said = self._compare_later(of)
        found = sorted(filter(None, engine.all_gather(said, everywhere=True)))
        self._looks_later = not found
        if found and engine.rank == 0 and engine.place == (0, 0):
            _log.warning(found[0])

    def _compare_later(self, of: StepOnBatch) -> str:
        by_parts = self._run(of, of.parts, 0)
        run = self._in_one_piece(of, by_parts, self._most() if by_parts else 0)
        if run is None:
            return ""
        parts, pairs, _ = run
        tolerance = self._tolerance()
        if any(self._tell(differ(list(map(_losses_of, pairs)), tolerance) if pairs else False)):
            self._draw_again(of, parts, pairs, None)
        losses = list(map(_losses_of, pairs))
        if not losses or not differ(losses, tolerance):
            return ""
        return describe(losses, len(of.parts), tolerance, f"training batch {self._number_trained}")

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Where the step runs forward without that anything of torch remains of it."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(random_state.isolated(self._engine.device))
            if self._compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(torch.clear_autocast_cache)  # casts made without gradients would have none in training
            yield

    def _compare(self, first: StepOnBatch) -> list[_Said]:
        """What to say; nothing on all ranks but the last."""
        batching, num_microbatches = self._runner.batching, len(first.parts)
        is_training = first.kind == "train"
        whole = None
        if batching.joins_microbatches:
            if not is_training:
                return []
            whole = Whole(first.batch, lambda: first.step(first.batch, *first.rest), first.parts.sizes)
        by_parts = self._run(first, first.parts, 0, whole)
        most = 0
        counts = any(self._engine.all_gather(bool(self._grown), everywhere=self._everywhere))
        if by_parts and whole is None and (self._is_unsure(first, by_parts) or is_training or counts):
            most = self._most()
        if whole is not None:  # the end of the step has all of the batch in any case
            most = num_microbatches * bool(by_parts)
        run = self._in_one_piece(first, by_parts, most, whole)
        if run is None:
            return []
        parts, pairs, grown = run
        if whole is None:
            self._runner.layers.learn(*grown, len(parts))
        tolerance = self._tolerance()
        losses = [_losses_of(pair) for pair in pairs] if is_training else []
        is_other = bool(losses) and differ(losses, tolerance)
        check = None
        if whole is None:
            check = self._numbers.setdefault(first.source, NumberCheck(self._runner.rules.of(first.source)))
            is_other = is_other or (bool(pairs) and self._differ(check, pairs, tolerance))
        if any(self._tell(is_other)):
            self._draw_again(first, parts, pairs, whole)
        said: list[_Said] = []
        losses = [_losses_of(pair) for pair in pairs] if is_training else []
        is_error = no_weights_explain(losses, tolerance)
        if any(self._tell(is_error)):
            is_error = self._is_error_in_evaluation(first, parts, whole, tolerance) and is_error
        if losses and differ(losses, tolerance):
            text = describe(losses, None if whole is not None else num_microbatches, tolerance)
            said.append(_Said(is_error, True, text))
        if check is None or any(self._tell(any(each.is_error for each in said))):
            return said
        situations = [pairs, self._go_on(first, min(len(parts), 2), pairs, check, tolerance)]
        if pairs:
            unfit = _tried(lambda: check.find_rules(situations, tolerance)) or {}
            if said:  # the loss that is logged too
                loss = f"{losses[0].mean:.6g} instead of {losses[0].of_all:.6g}"
                unfit = {place: how for place, how in unfit.items() if how != loss}
            if unfit:
                said.append(_Said(False, False, describe_numbers(unfit)))
        return said

    def _is_error_in_evaluation(
        self, first: StepOnBatch, parts: Microbatches, whole: Whole | None, tolerance: float
    ) -> bool:
        """Whether the loss is none of microbatches also if nothing moves that does in training only."""
        self._evaluates = True
        try:
            pairs = self._pair(first, parts, 1, whole)
        finally:
            self._evaluates = False
        return no_weights_explain(list(map(_losses_of, pairs)), tolerance)

    def _most(self) -> int:
        """How many microbatches may be run as one."""
        return max(2, LARGEST_BYTES // max(1, self._output_bytes))

    def _in_one_piece(
        self, first: StepOnBatch, by_parts: StepRun | None, most: int, whole: Whole | None = None
    ) -> tuple[Microbatches, list[Pair], tuple[Numbers, Numbers]] | None:
        """Run as many microbatches as one as fit, and where that is not all, these by themselves once more.

        Args:
            first: The batch.
            by_parts: What its microbatches have come to.
            most: On the last rank how many to try at most; 0: none.
            whole: The batch, where the step ends on it.

        Returns:
            These microbatches; what they come to, on the last rank; and how numbers of layers have grown by both. None
            where nothing is compared.
        """
        num_microbatches, grown = len(first.parts), self._grown
        most = min(self._tell(most))
        if not most:
            return None
        possible = {min(most, num_microbatches), num_microbatches if whole is not None else 2}
        for number in sorted(possible, reverse=True):  # two may fit where all do not
            of_all = self._run(first, self._joined(first, number), 0)
            if all(self._tell(bool(of_all))):
                break
        else:
            return None
        parts, of_whole = first.parts[:number], self._grown
        if number < num_microbatches:
            by_parts = self._run(first, parts, 0)
            grown = self._grown
        return parts, [Pair(by_parts, of_all)] if by_parts and of_all else [], (grown, of_whole)

    def _joined(self, first: StepOnBatch, number: int) -> Microbatches:
        """The samples of the first microbatches as one."""
        is_all = number == len(first.parts)
        joined = first.batch if is_all else self._runner.batching.first_parts(first.batch, first.parts, number)
        return Microbatches((joined,), (sum(first.parts.sizes[:number]),))

    def _draw_again(self, first: StepOnBatch, parts: Microbatches, pairs: list[Pair], whole: Whole | None) -> None:
        """Run the same with other random numbers, to see what differs by chance."""
        for draw in range(1, 1 + EXTRA_DRAWS):
            pairs += self._pair(first, parts, draw, whole)
        if len(pairs) <= EXTRA_DRAWS:
            pairs.clear()

    def _pair(self, first: StepOnBatch, parts: Microbatches, draw: int, whole: Whole | None = None) -> list[Pair]:
        """Run microbatches, and the same samples in one piece; nothing where one of both is not known."""
        by_parts = self._run(first, parts, draw, whole)
        of_all = self._run(first, self._joined(first, len(parts)), draw)
        return [Pair(by_parts, of_all)] if by_parts and of_all else []

    def _go_on(
        self, first: StepOnBatch, number: int, pairs: Sequence[Pair], check: NumberCheck, tolerance: float
    ) -> list[Pair]:
        """Run the first microbatches once more, where what was left of the batch is there: it may decide."""
        left: Any = {}
        if pairs:
            left = _tried(lambda: pairs[0].whole.effects.outcome((1,), (1.0,), is_sent=self._engine.num_ranks > 1))
        changes = left.get("changes") if left else None
        if not any(self._tell(bool(changes))):
            return []
        exchange = ValueExchange(
            self._engine.device, self._engine.group, self._engine.host_group(), self._engine.last_rank
        )
        with untouched(self._owner):
            Effects(self._owner, self._runner.programs.modules).change(exchange.share(changes))
            parts = first.parts[:number]
            found = self._pair(first, parts, 0)
            if any(self._tell(bool(found) and self._differ(check, found, tolerance))):
                self._draw_again(first, parts, found, None)
        return found

    def _tell(self, value: int) -> list[int]:
        """What the last ranks of replicas say: they go on together, since layers may be divided over them."""
        engine = self._engine
        values = engine.all_gather(value if engine.is_last else None, everywhere=self._everywhere)
        return [found for found in values if found is not None]

    def _is_unsure(self, first: StepOnBatch, run: StepRun) -> bool:
        """Whether there are numbers that may be others than on one device: not only rows of samples."""

        def find() -> bool:
            with self._runner.rules.looking(first, run, self._engine.seed) as rules:
                numbers = run.numbers(rules)
            return any(not n.dim() or rules.is_number(place, n.dim()) for place, n in numbers.items())

        return bool(_tried(find))

    def _differ(self, check: NumberCheck, pairs: Sequence[Pair], tolerance: float) -> bool:
        return bool(_tried(lambda: check.differing(pairs, tolerance)))

    def _run(self, first: StepOnBatch, parts: Microbatches, draw: int, whole: Whole | None = None) -> StepRun | None:
        """What microbatches (or the whole batch) come to, on the last rank; None where it is not known."""
        results: list[Any] = []
        is_training, batching = first.kind == "train", self._runner.batching
        sizes = parts.sizes if whole is None else (parts.size,)
        weights = batching.weights(parts.parts, sizes) if whole is None else (1.0,)
        recorder = LogRecorder(self._owner, weights, sizes, of_epochs=not is_training)

        def take(result: Any, index: int) -> torch.Tensor:
            results.append(tree_map_only(torch.Tensor, torch.Tensor.detach, result))
            return torch.zeros(())

        with untouched(self._owner):
            for module in self._owner.modules():  # what the step does `if self.training` counts
                is_moved = is_training and module is self._owner and not self._evaluates
                module.training = is_moved and module.training
            effects = Effects(self._owner, self._runner.programs.modules)
            effects.draw_others(draw)
            problem, before = "", self._runner.layers.numbers()
            try:
                programs = self._runner.run(
                    "compare" if is_training else first.kind,
                    lambda index: first.step(parts[index], *first.rest),
                    parts,
                    (*first.seed, draw),
                    recorder,
                    take,
                    whole,
                    effects,
                )
                self._output_bytes = max((form.nbytes for form in programs[0][0].forms), default=0)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            self._grown = self._runner.layers.growth_since(before)
            problems = [found for found in self._engine.all_gather(problem, everywhere=self._everywhere) if found]
        deviates = any(found.startswith(DeviationError.__name__) for found in problems)
        if deviates and self._runner.programs.follow("compare" if is_training else first.kind):
            return self._run(first, parts, draw, whole)
        run = StepRun(effects, recorder, results, is_training, batching.batch_dim)
        if not problems and is_training:
            try:
                for loss in map(loss_in, results):
                    self._dtypes.add(loss.dtype)
                    float(loss)
            except Exception as error:  # training itself will say what is wrong; other ranks must not wait
                problems = [f"{type(error).__name__}: {error}"]
        if problems:
            what = "as one batch" if len(parts) == 1 else "by microbatches"
            _log.info("A batch did not run forward %s, so it is not compared. %s", what, problems[0])
        return run if results and not problems else None

    def _tolerance(self) -> float:
        device = self._engine.device.type
        dtypes = self._dtypes | {p.dtype for p in self._owner.parameters() if not p.is_meta}
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
        return tolerance_of(list(dtypes))


def _tried(function: Callable[[], T]) -> T | None:
    """What a function of values returns, which may be anything; None if it fails, since other ranks must not wait."""
    try:
        return function()
    except Exception as error:
        _log.info("What a step leaves is not compared with that of one device. %s: %s", type(error).__name__, error)
        return None


def _losses_of(pair: Pair) -> Losses:
    of_parts, (of_all,) = ([float(loss_in(result)) for result in run.results] for run in (pair.parts, pair.whole))
    weights = pair.parts.recorder.weights if len(of_parts) > 1 else ()
    return Losses(tuple(of_parts), of_all, tuple(weights))
