"""What the stages do of a user's step: traced once for each form of a microbatch, and kept for the latest forms."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import named_tensors
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.reach.caches import Caches
from lightning_pfo.strategy.model.reach.flags import Flags
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.backward_hooks import take_backward_hooks
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.model.tracing.events import Trace
from lightning_pfo.strategy.model.tracing.noticing.held import Place
from lightning_pfo.strategy.model.variables import known_to
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.effects.left import Left
from lightning_pfo.strategy.step.effects.within import runs_forward_only
from lightning_pfo.strategy.step.signatures import signature_of
from lightning_pfo.strategy.step.tracing import can_be_followed, place_of, trace_untouched
from lightning_pfo.strategy.step.values import ALIKE, Prints

_KEPT = 256
"""So many forms of microbatches are remembered; a form takes some kB."""

_SURE = 4
"""After so many batches that are traced alike, random numbers that the step draws decide nothing of what it calls."""

StepPrograms = tuple[list[StageProgram], list[StageProgram]]
"""What the stages do of a microbatch; and of the whole batch, where the step ends on that."""
Phases = list[StepPrograms]
"""What they do in each phase of a step that optimizes several times by itself; others have one."""


@dataclass(frozen=True)
class Whole:
    """A batch that is not divided.

    Attributes:
        batch: The batch.
        step: The user's step on it.
        sizes: How many of its samples each microbatch has.
    """

    batch: Any
    step: Callable[[], Any]
    sizes: tuple[int, ...]


Agree = Callable[..., bool]
"""Agrees with other ranks on what was raised, on what a traced step has raised, and on how it is divided; tells whether
values are to be sent in the order of their contents."""


class Programs:
    """Finds what stages do of a step.

    Args:
        owner: The user's module.
        split: How it is divided.
        device: Where the stages run.
        patches: Closing it gives modules back that are followed later than others.
        agree: Raises on all ranks what goes wrong with a trace on any, given this rank's; see `agree_on_trace`.

    Attributes:
        modules: Further modules that a step may leave something in, by name.
        follows_each_batch: Whether steps are traced for each batch, since they may do other things than in others of
            the same form.
    """

    def __init__(
        self,
        owner: nn.Module,
        split: Split,
        device: torch.device,
        patches: Patches,
        agree: Agree,
    ) -> None:
        self._owner = owner
        self._split = split
        self._device = device
        self._patches = patches
        self._agree = agree
        self._traced: list[Any] = []
        self._failure: BaseException | None = None
        self._caches = Caches()
        self._known: OrderedDict[Any, Phases] = OrderedDict()
        self.follows_each_batch = False
        self._followed: set[str] = set()
        self._alike: dict[Any, tuple[Any, int]] = {}
        self._weights: Sequence[Place] = split.weights
        self.modules = split.modules_at_end(owner)

    def of(self, *args: Any, **kwargs: Any) -> list[StepPrograms]:
        """What the stages do of each microbatch, of a step with phases in the first one; see `of_phases`."""
        return [phases[0] for phases in self.of_phases(*args, **kwargs)]

    def of_phases(
        self,
        kind: str,
        microbatches: Sequence[Any],
        step: Callable[[int], Any],
        seed: tuple[int, ...],
        *,
        train: bool,
        whole: Whole | None = None,
        flags: Flags | None = None,
    ) -> list[Phases]:
        """What the stages do of each microbatch; and of the whole batch, see `Split.programs_before_end`.

        Args:
            kind: Which step it is; other steps do other things.
            microbatches: The microbatches.
            step: Runs the step on the microbatch of an index.
            seed: What random numbers of the step derive from.
            train: Whether gradients flow.
            whole: The whole batch, if the end of the step runs on that.
            flags: How modules and parameters are switched; None: nobody has looked.

        Raises:
            ConfigurationError: If stages cannot run the step one after the other.
            Exception: What the step raises on any rank.
        """
        # what is trained decides which gradients stages send; modules may do other things in evaluation
        training, trained = (flags or Flags(self._owner)).at_first
        if self.follows_each_batch or kind in self._followed:
            for key in [key for key in self._known if key[0][0] == kind]:
                del self._known[key]
        state: Any = (
            kind,
            train,
            trained if train else (),
            training,
            torch.is_autocast_enabled(self._device.type),
            None if whole is None else signature_of(whole.batch),
        )
        self._traced, self._failure = [], None
        error: Exception | None = None
        found = []
        try:
            for index, microbatch in enumerate(microbatches):
                run = partial(step, index)
                form = signature_of(microbatch), index if kind in self._followed else 0
                found.append(self._of((state, form), run, (*seed, index), train, whole))
        except Exception as failed:
            error = failed
        try:
            if self._traced:
                by_content = self._agree(error, self._failure, ALIKE if error is not None else _prints_of(found))
            if error is not None:
                raise error
            if self._traced and by_content:
                found = self._put_by_content(found)
            self._note_alike(by_content=bool(self._traced and by_content))
        except Exception as raised:
            self._known.clear()  # that all ranks trace the next one, and alike
            self._weights = self._split.weights
            told = self._split.with_look(raised) if kind == "train" else raised
            if told is raised:
                raise
            raise told from raised
        finally:
            self._failure = None  # its traceback holds what the step had
        if len({len(phases) for phases in found}) > 1:
            raise ConfigurationError(
                "A step that optimizes by itself does so alike for all microbatches of a batch; here some have other "
                "numbers of backwards. Decide by what microbatches have in common, such as batch_idx."
            )
        return found

    def _note_alike(self, *, by_content: bool) -> None:
        """Count for how many batches a form was traced alike, on all ranks; where these go by contents it is not."""
        for key in {*self._traced} & self._known.keys():
            before, number = self._alike.get(key, (None, 0))
            now = None if by_content else _calls_of(self._known[key])
            self._alike[key] = now, 0 if now is None else number + 1 if now == before else 1
        for key in [*self._alike] if len(self._alike) > _KEPT else ():
            if key not in self._known:
                del self._alike[key]

    def _draws_for_paths(self, key: Any, found: Phases) -> bool:
        """Whether random numbers may decide what a step of a known form calls."""
        return found[0][0][0].draws and self._alike.get(key, (None, 0))[1] < _SURE

    def _put_by_content(self, found: list[Phases]) -> list[Phases]:
        """What has been traced now, with what stages send each other in the order of its contents."""
        ordered: dict[int, Phases] = {}
        for key in {*self._traced} & self._known.keys():
            phases = self._known[key]
            self._known[key] = ordered[id(phases)] = [
                (_by_content(stages, len(stages)), _by_content(whole, len(stages))) for stages, whole in phases
            ]
        return [ordered.get(id(phases), phases) for phases in found]

    @property
    def has_traced(self) -> bool:
        """Whether something was traced for the latest microbatches; the same on all ranks."""
        return bool(self._traced)

    def follow(self, kind: str) -> bool:
        """Trace each microbatch of a kind of step from now on: they do other things, though all have the same form.

        Returns:
            False if that is done already.
        """
        is_new = kind not in self._followed
        self._followed.add(kind)
        return is_new

    def explained(self, error: Exception) -> Exception:
        """What is raised where a step fails: the error, or what a hook has done that is the reason; see `Split`."""
        return self._split.with_ties(error, self._owner)

    def forget(self) -> None:
        """Trace all forms anew: the step finds something else."""
        self._known.clear()

    def left_by(
        self, step: Callable[[], Any], seed: tuple[int, ...], *, train: bool, on_zeros: bool = True
    ) -> Left | None:
        """What a step leaves, by a trace of it; None if it does not run to its end.

        Args:
            step: Runs the step.
            seed: What random numbers of the step derive from.
            train: Whether gradients flow.
            on_zeros: Whether zeros stand for what layers compute, if the step runs on these; else other numbers do.
        """
        left = Left()
        with torch.set_grad_enabled(train):
            trace = self._trace_once(step, seed, left, on_zeros=on_zeros)
        return left if trace.failure is None else None

    def trace(self, step: Callable[[], Any], seed: tuple[int, ...], *, train: bool) -> Trace:
        """Trace a step on this rank alone."""
        with torch.set_grad_enabled(train):
            return self._trace_once(step, seed)

    def before_end(self, part: Trace, whole: Trace) -> StepPrograms:
        """What stages do where the end of the step runs on the whole batch; see `Split.programs_before_end`."""
        return self._split.programs_before_end(part, whole)

    def runs(self, trace: Trace) -> bool:
        """Whether stages can run a step."""
        try:
            return trace.failure is None and bool(self._split.programs_of_phases(trace))
        except ConfigurationError:
            return False

    def _of(self, key: Any, step: Callable[[], Any], seed: tuple[int, ...], train: bool, whole: Whole | None) -> Phases:
        found = self._known.pop(key, None)
        # where a mask selects, its values decide sizes
        if found is None or found[0][0][0].selects or self._draws_for_paths(key, found):
            self._traced.append(key)
            trace = self._trace(step, seed, train)
            if runs_forward_only():
                trace.optimizing.clear()  # nothing is optimized, and it has no phases
            if whole is None:
                found = [(programs, []) for programs in self._programs(trace, step, seed, train)]
            else:
                found = [self._split.programs_before_end(trace, self._trace(whole.step, seed, train))]
            if trace.compiled:
                warn_once(
                    f"A compiled function that the step calls between layers runs as it is written: {trace.compiled} "
                    f"Call it in the forward of a layer, or compile layers by compile=True (in a loop of your own by "
                    f"layer.forward = torch.compile(layer.forward), before the model is prepared)."
                )
            if told := _reads_counts(self._owner, trace.counted):
                warn_once(told)
            if trace.skips:  # others of this form may not be
                return found
        self._known[key] = found
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    def _trace(self, step: Callable[[], Any], seed: tuple[int, ...], train: bool) -> Trace:
        take_backward_hooks(self._owner, self._split.units.all, self._patches)
        with torch.set_grad_enabled(train):
            trace = self._trace_once(step, seed)
            while self._split.follow_into(trace.listened, self._patches):
                trace = self._trace_once(step, seed)
            if self._split.apart(trace):
                trace = self._with_weights_followed(trace, step, seed)
            self._weights = trace.weights
            self._failure = self._failure or trace.failure
            return trace

    def _programs(
        self, trace: Trace, step: Callable[[], Any], seed: tuple[int, ...], train: bool
    ) -> list[list[StageProgram]]:
        try:
            return self._split.programs_of_phases(trace)
        except ConfigurationError:
            with torch.set_grad_enabled(train):
                followed = self._with_weights_followed(trace, step, seed)
            if followed is trace:
                raise
            programs = self._split.programs_of_phases(followed)
            self._weights = followed.weights
            return programs

    def _with_weights_followed(self, trace: Trace, step: Callable[[], Any], seed: tuple[int, ...]) -> Trace:
        """The trace of a step that uses weights where they are not held, with these followed; the same if it cannot be.

        A batch may do so that is not the first: a penalty from some epoch on, a target network that gets new weights
        now and then. It can be run if later stages take what these weights are on earlier ones.
        """
        if not self._split.follows_weights:
            return trace
        named = named_tensors(self._owner)
        everything = [place_of(self._owner, name) for name in named]
        followed = self._trace_once(step, seed, weights=everything)
        if not can_be_followed(followed, trace) or self._split.apart(followed):
            return trace
        used = {name for event in followed.events for name in event.held}
        followed.weights = [place_of(self._owner, name) for name in named if name in used]
        return followed

    def _trace_once(
        self,
        step: Callable[[], Any],
        seed: tuple[int, ...],
        left: Left | None = None,
        weights: Sequence[Place] = (),
        *,
        on_zeros: bool = True,
    ) -> Trace:
        return trace_untouched(
            self._owner,
            step,
            self._device,
            self._caches,
            seed,
            self.modules,
            left,
            weights=weights or self._weights,
            follows_weights=self._split.follows_weights,
            on_zeros=on_zeros,
        )


def _by_content(programs: Sequence[StageProgram], num_stages: int) -> list[StageProgram]:
    """But what the last stage comes to: it is joined with what it has come to for other microbatches."""
    return [
        program.by_content(received=stage < num_stages, sent=stage < num_stages - 1)
        for stage, program in enumerate(programs)
    ]


def _calls_of(phases: Phases) -> Any:
    """What stages call, and a print of what they send, whatever that is made of; the same on all ranks."""
    return _prints_of([phases]).by_label, [stages[-1].units_called for stages, _ in phases]


def _prints_of(found: Sequence[Phases]) -> Prints:
    programs = [program for phases in found for stages, whole in phases for program in (*stages, *whole)]
    alike = [(len(program.events), sorted(program.changes)) for program in programs]
    by_label = [(program.received, program.sent, sorted(program.kept)) for program in programs]
    by_order = [
        (
            [[program.contents[label] for label in labels] for labels in of_program],
            [e.content for e in program.computed],
        )
        for program, of_program in zip(programs, by_label, strict=True)
    ]
    by_content = [[sorted(contents) for contents in (*values, events)] for values, events in by_order]
    return Prints(*(zlib.crc32(repr((alike, told)).encode()) for told in (by_label, by_order, by_content)))


def changes_on_the_way(programs: Sequence[StageProgram], last: int, owner: nn.Module) -> dict[str, int | None]:
    """What a step changes before its end, and the stages that do; buffers of its own that its end changes it leaves.

    Args:
        programs: What the stages do; and then what its end does on the whole batch, on the last stage's rank.
        last: The last stage.
        owner: The user's module.
    """
    own = dict(owner.named_buffers(recurse=False)).keys()
    end = len(programs) - 1
    return {
        name: stage if stage is None else min(stage, last)
        for name, stage in programs[0].changes.items()
        if name not in own or stage not in (None, end) or programs[0].is_phase
    }


def _reads_counts(owner: nn.Module, counted: Iterable[str]) -> str:
    """What is said of a step that names an attribute in which a layer counts; nothing of others."""
    names = known_to(type(owner)).names
    asked = next((place for place in counted if place.rpartition(".")[2] in names), None)
    if asked is None:
        return ""
    return (
        f"A layer counts in self.{asked}, which the step names too. While the step runs, a layer of another stage "
        f"has not counted there, and one of the last stage has counted by microbatches; what grows is on all ranks "
        f"what it is on one device when the batch is done. Read it, log it and set it back in on_train_batch_end, or "
        f"let the layer return it."
    )
