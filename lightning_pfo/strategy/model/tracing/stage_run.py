"""Running one stage of a user's step: the step runs as it is, and what other stages compute is left out.

Up to the stage's first event nothing is computed: units and operations return placeholders, or what was received. From
there to the stage's last event everything is computed, and the step is ended. The last stage runs on to the step's end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any
from weakref import ReferenceType

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.autograd import Recompute, recompute_with
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.compat.tensors import CHECKS, DisableTorchFunctionSubclass, in_memory, memory_of
from lightning_pfo.strategy.model.tracing.dividing.cutting import differentiates
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.model.tracing.ends import (
    SKIPPED,
    DeviationError,
    OtherPathError,
    PhaseEnded,
    StageEnded,
    cannot_be_sent,
    deviates,
    differs,
    ended_early,
    is_deviation,
    leaves_otherwise,
)
from lightning_pfo.strategy.model.tracing.events import Event, New, Number, Passed
from lightning_pfo.strategy.model.tracing.forms.hidden import opened
from lightning_pfo.strategy.model.tracing.forms.left import LeftByCalls, returned_of, with_all_left
from lightning_pfo.strategy.model.tracing.forms.outline import Same
from lightning_pfo.strategy.model.tracing.forms.remembered import buffers_kept
from lightning_pfo.strategy.model.tracing.functions import HOOKS, Uncompiled, whose_values_count
from lightning_pfo.strategy.model.tracing.noticing.applied import functions_followed, leave_transform
from lightning_pfo.strategy.model.tracing.noticing.held import WeightsFollowed
from lightning_pfo.strategy.model.tracing.noticing.switches import switches_kept
from lightning_pfo.strategy.model.tracing.numbers import check_same, number_in
from lightning_pfo.strategy.model.tracing.placeholders import has_placeholder
from lightning_pfo.strategy.model.tracing.tracked import (
    AbsentValueError,
    Tracked,
    current_run,
    flattened,
    follow_no_more,
    following,
    natively,
    no_longer_tracked,
    ordinary,
    plain_in_place,
    tracked,
    unflattened,
    untracked,
    value_of,
)
from lightning_pfo.strategy.model.tracing.trees import tree_flatten, tree_map_only, tree_unflatten
from lightning_pfo.strategy.model.variables import users_line

Tensors = tuple[torch.Tensor, ...]
_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_BY_ORDER = (torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.to_dense)
"""Return what they are given, or a copy: so they do by how it lies in memory, which a kernel or a layer may decide."""


class _NoHandle:
    """A hook's handle where no hook was registered."""

    def remove(self) -> None:
        """Do nothing."""


def run_stage(
    program: StageProgram,
    step: Callable[[], Any],
    received: Sequence[torch.Tensor],
    enter: Callable[[], None] = lambda: None,
    around: Callable[[int], Any] = nullcontext,
    memory: dict[int, torch.Tensor] | None = None,
) -> Any:
    """Run a stage.

    Args:
        program: What it does.
        step: The user's step on a microbatch.
        received: The values that it begins with.
        enter: Called when it begins to compute.
        around: Makes a context around an event that is computed, by its number, where random numbers of the step and
            of the stages are told apart.
        memory: Values by label that phases of the step compute for later ones.

    Returns:
        The tensors that the next stage begins with; of the last stage what the step returned; or `SKIPPED`.

    Raises:
        ConfigurationError: If the step does something else than in the trace.
    """
    run = StageRun(program, received, enter, around, memory)
    try:
        is_early = program.switches and (program.stop is not None or program.is_phase)
        kept = switches_kept(program.switches) if is_early else nullcontext()
        with following(run), kept, run.patched() if program.patches else nullcontext():
            result = step()
        if result is None and run.position == 0:
            return SKIPPED
        outputs = run.outputs() if program.stop == run.position and not program.ends_early else ()
    except StageEnded:
        return run.outputs()
    except RuntimeError as error:
        if is_deviation(error) and not isinstance(error, DeviationError):  # as `load_state_dict` tells of it
            raise DeviationError(str(error)) from error
        is_missing = "used in the graph" in str(error) or "require grad" in str(error)
        if is_missing and any(event.what is torch.autograd.grad for event in program.events):
            raise ConfigurationError(differentiates(users_line(error), error)) from error
        raise
    finally:
        run.close()
    if run.has_ended_phase:
        return tree_map_only(Tracked, no_longer_tracked, result)
    if program.stop == run.position and not program.ends_early:  # later stages compute the end of the step only
        return outputs
    if program.stop is not None:
        raise DeviationError(
            f"The step ended before its stage did ({run.position} calls instead of {program.stop}), unlike in the "
            f"trace: what it runs depends on something that changes from batch to batch."
        )
    return tree_map_only(Tracked, no_longer_tracked, result)


class StageRun:
    """Follows a step of which one stage is run; see `run_stage`."""

    def __init__(
        self,
        program: StageProgram,
        received: Sequence[torch.Tensor],
        enter: Callable[[], None],
        around: Callable[[int], Any],
        memory: dict[int, torch.Tensor] | None,
    ) -> None:
        self.position = 0
        self._program = program
        self._events = program.events
        self._start = program.start
        self._received = {
            label: tracked(self._as_computed(label, tensor))
            for label, tensor in zip(program.received, received, strict=True)
        }
        self._memory: dict[int, torch.Tensor] = {} if memory is None else memory
        self._received |= {label: tracked(self._imported(label)) for label in program.imported}
        self._kept: dict[int, torch.Tensor] = dict(self._received)
        for label, tensor in self._received.items():
            self._check_form(label, tensor)
        self._wanted = program.kept.union(program.sent)
        self._free_from = max(program.others, default=program.start - 1) + 1
        self.has_ended_phase = False
        self._enter = enter
        self._around = around
        self._entered = False
        self._adopted: list[torch.Tensor] = []
        self._of_others: list[ReferenceType[torch.Tensor]] = []
        self._left = LeftByCalls()
        self._recomputes = 0
        self.uncompiled = Uncompiled()

    def _as_computed(self, label: int, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was received, which lies in memory as the one that was sent."""
        if (strides := self._program.strides.get(label)) is not None:
            return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor.clone() if label in self._program.changed else tensor.view_as(tensor)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Patch what some steps need beside."""
        with (
            functions_followed(self) if self._program.applies else nullcontext(),
            self.recomputing_parts() if self._program.divided else nullcontext(),
            self.uncompiled if self._program.compiled else nullcontext(),
            WeightsFollowed(self, self._program.weights) if self._program.weights else nullcontext(),
        ):
            yield

    def recomputing_parts(self) -> Patches:
        """Let each unit be recomputed alone in backward where the stage has not all that is recomputed together."""

        def make(original: Recompute) -> Recompute:
            def around(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
                if current_run() is not self or self.position not in self._program.divided:
                    yield from original(*args, **kwargs)
                    return
                self._recomputes += 1
                try:
                    yield
                finally:
                    self._recomputes -= 1

            return around

        patches = Patches()
        recompute_with(make, patches)
        return patches

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run, or leave out, a function of torch."""
        if function in CHECKS:
            return torch.ones((), dtype=torch.bool) if args[0].is_absent else natively(function, args, kwargs)
        return self._event(function, function, args, kwargs)

    def told(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Any:
        """Of the form of a tensor; in a run sizes are what they are."""
        return answer

    def decide(self, labels: Iterable[int]) -> None:
        """See `told`."""

    def call(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run, or leave out, a unit."""
        leave_transform()
        program = self._program
        if program.stop is None and self.position >= self._free_from and self.lacks(unit):
            is_known = not program.failure or self.position < len(self._events)
            raise self._deviates() if is_known else ended_early(unit.name, program.failure)
        compute = unit.compute
        if program.compiled:
            compute = partial(_outside_of, self.uncompiled, compute)
        if self._recomputes:
            compute = partial(checkpoint, compute, use_reentrant=False)
        return self._event(unit, compute, args, kwargs)

    def lacks(self, unit: Any) -> bool:
        """Whether a unit is on another rank; looked at once, as it may have many parameters."""
        known = self._program.lacks
        if unit not in known:
            known[unit] = unit.is_elsewhere
        return known[unit]

    def enter(self, unit: Any) -> None:
        """A layer begins that is followed into."""

    def note(self, values: Any) -> None:
        """Values are wanted at the end."""

    def optimize(self, loss: Any, changed: Iterable[torch.nn.Parameter] = ()) -> None:
        """What the step does to optimize was noted in the trace."""

    def looks_again(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether weights are followed that the step uses by themselves after it has changed them."""
        followed = {id(getattr(module, name)) for module, name in self._program.weights}
        return followed.issuperset(map(id, weights))

    def end_phase(self) -> None:
        """The step goes on with another phase, without an event before it.

        Raises:
            BaseException: What ends the step here.
            ConfigurationError: If the phase does not end here in the trace.
        """
        if not self._program.is_phase:
            raise OtherPathError(str(self._deviates()))
        if self.position != self._program.stop:
            raise self._deviates()
        self._end()

    def _deviates(self, at: Any = None) -> DeviationError:
        before = self._events[: self.position]
        look = next((event.line for event in reversed(before) if event.reads and not event.of_metric), "")
        return deviates(look, at_gradient=_GRADIENT in (at, *(event.what for event in before[-1:])))

    def _set_apart(self) -> None:
        """Keep what was written into tensors of the user's, which get back what they had when the step is left."""
        ours = set(map(id, self._adopted))
        if not ours:
            return
        with following(None), DisableTorchFunctionSubclass():
            for label in self._program.sent:
                if id(self._kept.get(label)) in ours:
                    self._kept[label] = value_of(self._kept[label]).clone()

    def _end(self) -> None:
        if not self._program.ends_early:
            raise StageEnded
        self._remember()
        self.has_ended_phase = True
        raise PhaseEnded

    def outputs(self) -> Tensors:
        """What the next stage receives, each a contiguous tensor of its own.

        Raises:
            ConfigurationError: If one is not as in the trace.
        """
        sent, lasting, program = [], self._lasting(), self._program
        for label in program.sent:
            if label not in self._kept:
                raise self._deviates()
            tensor, form = value_of(self._kept[label]), program.forms[label]
            if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
                raise cannot_be_sent(tensor)
            with DisableTorchFunctionSubclass():
                if (
                    (tensor.shape != form.shape and label not in program.varying)
                    or tensor.dtype != form.dtype
                    or (torch.is_grad_enabled() and tensor.requires_grad != program.is_differentiable(label, sent=True))
                ):
                    raise differs(tensor, form)
                tensor = in_memory(tensor)
                sent.append(tensor.clone() if memory_of(tensor) in lasting else tensor.view_as(tensor))
        self._remember()
        return tuple(sent)

    def _lasting(self) -> set[int]:
        """The memory of what the next microbatch may change while the values of this one are being sent."""
        if not (self._program.sent and (self._adopted or self._program.restless)):
            return set()
        buffers = (buffer for module in self._program.restless for buffer in module.buffers())
        with following(None), DisableTorchFunctionSubclass():
            return set(map(memory_of, chain(self._adopted, buffers)))

    def _imported(self, label: int) -> torch.Tensor:
        """A value of an earlier phase; what it was made of is gone, but it says of itself what it did."""
        with DisableTorchFunctionSubclass():
            is_differentiable = torch.is_grad_enabled() and self._program.forms[label].requires_grad
            value = self._memory[label].detach().requires_grad_(is_differentiable)
            return value.view_as(value)

    def _remember(self) -> None:
        for label in self._program.kept:
            if label not in self._kept:
                raise self._deviates()
            with following(None), DisableTorchFunctionSubclass():
                self._memory[label] = value_of(self._kept[label]).detach()

    def close(self) -> None:
        """Let go of everything."""
        for tensor in (*self._adopted, *(kept for refer in self._of_others if (kept := refer()) is not None)):
            untracked(tensor)
        self._left.put_back()
        self._kept.clear()
        self._received.clear()

    def _event(self, what: Any, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = self.position
        if position == self._program.stop:
            self._end()
        self.position = position + 1
        if position >= self._start:
            if not self._entered:
                self._entered = True
                self._enter()
            if self._program.stop is None and position >= self._free_from:
                return self._to_the_end(position, compute, args, kwargs)
        if position >= len(self._events) or self._events[position].what != what:
            raise self._deviates(at=what)
        event = self._events[position]
        if position < self._start or position in self._program.others:
            return self._leave_out(event, compute, args, kwargs)
        result = self._compute(position, event, compute, args, kwargs)
        if self.position == self._program.stop:
            self._set_apart()
        return result

    def _leave_out(self, event: Event, compute: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        label = event.only_label
        if label is not None:
            return self._received.get(label, self._program.forms[label])
        if event.reads and not event.of_metric:  # a metric counts on the last stage only
            try:
                return natively(compute, args, kwargs)
            except AbsentValueError as error:
                raise ConfigurationError(f"{error} The line is {event.line}") from None
        numbers = self._numbers_of(event)
        has_same = any(isinstance(leaf, (Same, Passed)) for leaf in event.results)
        leaves = tree_flatten((args, kwargs))[0] if event.adopted or has_same else []
        for adopted in event.adopted:
            self._adopt(adopted.of(leaves), self._received.get(adopted.label))
        if event.what in HOOKS:
            return _NoHandle()
        found = [self._stand_in(leaf, leaves, numbers) for leaf in event.results]
        return self._left.left_out(event, tree_unflatten(found, event.structure), (args, kwargs))

    def _stand_in(self, leaf: Any, leaves: Sequence[Any], numbers: Sequence[Any]) -> Any:
        """What stands for a leaf of what another stage returns."""
        if isinstance(leaf, New):
            return self._received.get(leaf.label, self._program.forms[leaf.label])
        if isinstance(leaf, (Same, Passed)):
            return leaves[leaf.argument]
        return number_in(leaf, numbers) if isinstance(leaf, Number) else leaf

    def _numbers_of(self, event: Event) -> list[Any]:
        """The numbers that a unit has returned on an earlier stage, if these have come here."""
        if event.numbers not in self._received:
            return []
        with following(None), DisableTorchFunctionSubclass():
            found: list[Any] = value_of(self._received[event.numbers]).tolist()
        return found

    def _compute(self, position: int, event: Event, compute: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args, kwargs
        leaves, structure = flattened(args, kwargs)
        ours = [leaf for leaf in leaves if type(leaf) is Tracked]
        if has_placeholder(leaves) and has_placeholder(whose_values_count(event.what, args, leaves)):
            raise self._deviates()
        if any(leaf.held is not None or leaf.is_absent for leaf in ours):
            args, kwargs = unflattened(
                [value_of(leaf) if type(leaf) is Tracked else leaf for leaf in leaves], structure
            )
        repeated = (
            buffers_kept(event.units) if position < self._program.begin and event.changes_state else nullcontext()
        )
        before = self._left.before(event) if event.left else ()
        with following(None), self._around(position), ordinary(ours), repeated:
            result = compute(*args, **kwargs)
        if event.units:
            result = opened(result)
        if event.left or event.rewrites:
            result = with_all_left(result, (args, kwargs), event, self._left.take(event, before))
        found, form = ([result], None) if isinstance(result, torch.Tensor) else tree_flatten(result)
        if len(found) != len(event.results):
            name = event.units[0].name if event.units else ""
            raise leaves_otherwise(name, event.guessed_after) if name else self._deviates()
        numbers: list[Any] = []
        for index, (leaf, expected) in enumerate(zip(found, event.results, strict=True)):
            if isinstance(expected, Same):
                if value_of(leaves[expected.argument]) is leaf:
                    found[index] = leaves[expected.argument]
                elif event.what in _BY_ORDER:
                    found[index] = tracked(leaf)
                else:
                    raise self._deviates()
            elif isinstance(expected, New):
                if leaf is None and event.what is torch.autograd.grad:
                    raise ConfigurationError(differentiates(users_line(), "it found no way between them"))
                if not isinstance(leaf, torch.Tensor):
                    raise self._deviates()
                if event.what in _BY_ORDER and any(leaf is given for given in args):
                    with following(None), ordinary(ours):
                        leaf = leaf.clone()
                found[index] = value = tracked(leaf)
                self._check_form(expected.label, value)
                self._keep(expected.label, value)
                if (event.units or event.of_metric) and value.held is None:  # these may keep it: `self.out = ...`
                    self._of_others.append(ReferenceType(value))
            elif event.units and not self._program.is_last:  # later stages take it as it is in the trace
                check_same(event, leaf, expected, leaves)
                numbers += [leaf] if isinstance(expected, Number) else []
        if event.numbers is not None:
            device = self._program.forms[event.numbers].device
            self._keep(event.numbers, tracked(torch.tensor(numbers, dtype=torch.float64, device=device)))
        for adopted in event.adopted:
            tensor = tracked(adopted.of(leaves))
            self._adopted.append(tensor)
            self._keep(adopted.label, tensor)
        return found[0] if form is None else returned_of(event, tree_unflatten(found, form), given)

    def _to_the_end(self, position: int, compute: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The last stage has everything now, and needs to follow nothing more, if the trace has come so far."""
        if self._around is nullcontext and not self._recomputes and not self._program.failure:
            follow_no_more(self)
            with ordinary(list(self._received.values())):  # else functions of it would ask what follows them
                return compute(*plain_in_place(args), **plain_in_place(kwargs))
        with following(None), self._around(position):
            return compute(*plain_in_place(args), **plain_in_place(kwargs))

    def _check_form(self, label: int, tensor: Tracked) -> None:
        if label in self._program.asked:
            with DisableTorchFunctionSubclass():  # tracked tensors would take ten times as long to tell theirs
                is_other = tensor.shape != self._program.forms[label].shape
            if is_other:
                raise differs(tensor, self._program.forms[label])
        if label in self._program.varying:  # as in the trace: some functions are followed for such tensors only
            tensor.varies = self._program.forms[label].varies

    def _keep(self, label: int, tensor: torch.Tensor) -> None:
        if label in self._wanted:
            self._kept[label] = tensor

    def _adopt(self, tensor: torch.Tensor, received: torch.Tensor | None) -> None:
        now = tracked(tensor)
        self._adopted.append(now)
        if received is None:
            now.is_absent = True
        else:
            now.held = received


def _outside_of(uncompiled: Uncompiled, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with uncompiled.paused():
        return compute(*args, **kwargs)
