"""The trace of a user's step: what it calls, in order, and which values flow between the calls.

The step runs once without computing: each module that is followed as a whole (a unit) is asked only for the form of
what it returns, and the operations between units run on zeros in that form. What follows from the batch alone is
computed as it is; every rank has the batch.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from lightning_pfo.strategy.compat.tensors import (
    CHECKS,
    DisableTorchFunctionSubclass,
    base_of,
    has_memory,
    memory_of,
    reserved_memory,
)
from lightning_pfo.strategy.model.tracing.differentiating import differentiation, gradients_in_form
from lightning_pfo.strategy.model.tracing.ends import calls_backward
from lightning_pfo.strategy.model.tracing.events import (
    FOREVER,
    NUMBERS,
    Adopted,
    Event,
    New,
    Number,
    Passed,
    Trace,
    Value,
)
from lightning_pfo.strategy.model.tracing.forms.hidden import HidingError, refuse_hidden
from lightning_pfo.strategy.model.tracing.forms.inside import Inside, need_gradients
from lightning_pfo.strategy.model.tracing.forms.left import LeftInTrace, returned_of
from lightning_pfo.strategy.model.tracing.forms.outline import Outline, Same, outline_call, varying_of_call
from lightning_pfo.strategy.model.tracing.forms.parts import is_cache
from lightning_pfo.strategy.model.tracing.forms.remembered import attributes_kept, form_of_call, outlines_of
from lightning_pfo.strategy.model.tracing.forms.selecting import Selected, Selecting, decide_about_shapes
from lightning_pfo.strategy.model.tracing.forms.talking import FirstCall
from lightning_pfo.strategy.model.tracing.forms.values import check_looks, fill_rising, on_zeros, zeros_of
from lightning_pfo.strategy.model.tracing.forms.varying import (
    ASK_SIZE,
    labels_in,
    numbers_of,
    told,
    varying_of_operation,
    without_memory_of_sizes,
)
from lightning_pfo.strategy.model.tracing.functions import (
    HOOKS,
    Uncompiled,
    is_in_compiled_function,
    switches_gradients,
    whose_values_count,
)
from lightning_pfo.strategy.model.tracing.noticing.applied import functions_followed, is_transform, leave_transform
from lightning_pfo.strategy.model.tracing.noticing.content import Contents, number_of
from lightning_pfo.strategy.model.tracing.noticing.held import HeldAsValues, HeldTensors, Place, TensorsSeen
from lightning_pfo.strategy.model.tracing.noticing.leaves import (
    any_varies,
    changed_without_mark,
    is_ordinary,
    is_value,
    mark_of,
    memory_behind,
    on_device,
    trained_by,
    values_within,
    version_behind,
)
from lightning_pfo.strategy.model.tracing.noticing.switches import recomputation_noted, switched_back, switches_noted
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder, placeholders_on
from lightning_pfo.strategy.model.tracing.tracked import (
    Tracked,
    following,
    ordinary,
    plain,
    tracked,
    untracked,
)
from lightning_pfo.strategy.model.tracing.trees import tree_flatten, tree_leaves, tree_unflatten
from lightning_pfo.strategy.model.variables import users_line, users_module, within_metric
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.dtensor import writes


def trace_step(
    owner: nn.Module,
    step: Callable[[], Any],
    device: torch.device,
    selected: Selected = Selected.ALL,
    *,
    rising: bool = False,
    weights: Sequence[Place] = (),
) -> Trace:
    """Trace a step of the user's module, whose units are followed (see `follow_units`).

    The caller keeps away what a step leaves behind: attributes, random states, caches.

    Args:
        owner: The user's module.
        step: Runs it on a microbatch.
        device: Where it runs.
        selected: What is selected where values of stages decide about shapes.
        rising: Whether numbers that rise from 1 to 2 stand for what units return, instead of zeros.
        weights: Parameters that are followed, too: what takes one of them by itself is an event.
    """
    held = HeldTensors(owner)
    run = _TraceRun(device, held, selected, rising=rising)
    seen = run.seen = TensorsSeen(run, held, run.see, run.select, weights, run.draw_for_metric)
    run.trace.weights = weights
    result = None
    noted = recomputation_noted(run, run.trace.events, run.trace.recomputed)
    switches: dict[tuple[nn.Module, str], Any] = {}
    noted_too = switches_noted(run, switches)
    with placeholders_on(device), following(run), functions_followed(run), noted, noted_too, Uncompiled(), seen:
        try:
            result = contextvars.copy_context().run(step)
        except (HidingError, KeyboardInterrupt):
            run.finish(None)
            with torch.no_grad():
                held.put_back()
            raise
        except (Exception, SystemExit) as error:  # which the step raises again when it is run
            run.trace.failure = error
            run.trace.listened += run.trace.units_of_the_batch()  # it may have looked at what these return
            # what of them is still held somewhere may be needed, which each rank would find otherwise
            run.trace.use_sizes(range(len(run.trace.values)), FOREVER)
    run.finish(result)
    with torch.no_grad():
        held.put_back()
    run.trace.switches = switched_back(switches)
    run.trace.skips = result is None and run.trace.failure is None and not run.trace.events
    run.trace.everywhere, run.trace.changed_everywhere = list(seen.names), list(seen.changed)
    modules = (unit.module for event in run.trace.events for unit in event.units) if seen.names else ()
    run.trace.of_layers = held.names(p for module in dict.fromkeys(modules) for p in module.parameters())
    return run.trace


_OF_UNITS = ("saved_bytes", "changes_state", "changes_weights", "rewrites", "returns", "left", "guessed_after")
"""What events say of their units as outlines do."""


class _TraceRun:
    """Follows a step and notes what it does."""

    seen: TensorsSeen

    def __init__(self, device: torch.device, held: HeldTensors, selected: Selected, *, rising: bool) -> None:
        self.trace = Trace()
        self._rising = rising
        self._selected = selected
        self._held = held
        self._as_values = HeldAsValues(held, self.trace)
        self._reserved: list[object] = []  # so that memory that is gone has another number than what comes after it
        self._device = device
        self._adopted: list[torch.Tensor] = []
        self._changed_memory: dict[int, int] = {}  # of ordinary tensors, and the event that changed it
        self._glue_state: Any = None
        self._has_read = False
        self._left = LeftInTrace()
        self._contents, self._num_made = Contents(), 0
        self._taken: list[tuple[int, torch.Tensor]] = []  # ordinary tensors with gradients, by events

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a function and run it on zeros."""
        if function in CHECKS:  # on values that are not there yet
            return torch.ones((), dtype=torch.bool)
        given = args, kwargs
        leaves, structure = tree_flatten(given)
        asked = leaves
        held = self._held.names(whose_values_count(function, args, leaves))
        event = Event(function, held=held, of_metric=within_metric())
        self._as_values.given(leaves)
        if any(map(is_placeholder, leaves)):
            args, kwargs = tree_unflatten([on_device(leaf, self._device) for leaf in leaves], structure)
            leaves, _ = tree_flatten((args, kwargs))
        if writes(function, kwargs):
            self._held.remember(name for name in map(self._as_values.name, leaves) if name is not None)
        else:
            self._as_values.use_changed(event)
        self._as_values.note_memory(leaves)
        self.see(leaves)
        marks = [mark_of(leaf) for leaf in leaves]
        position = self._begin(event, leaves)
        if sizes := labels_in(leaves):
            self.trace.use_sizes(sizes, position)
        run: Callable[[Any, Any], Any] = functools.partial(on_zeros, function)
        if function is torch.autograd.grad:
            self.trace.deciding.append(users_module())
            one = differentiation(*given, position, self.trace.events, self._taken, self._held.names)
            is_steps = one.module is self._held.owner
            self.trace.differentiations.append(replace(one, module=None) if is_steps else one)
            run = gradients_in_form
        depends = Selecting(self._selected, by_stages=decide_about_shapes(function, leaves))
        with self._nothing_drawn(), following(Inside(self, event)), depends:
            result = run(*(without_memory_of_sizes(args, kwargs) if sizes else (args, kwargs)))
        if is_transform(function):  # inside it weights belong to its own level, out of which no gradients are known
            result = trained_by(event.units, result)
        if function is torch.Tensor.backward:
            raise HidingError(calls_backward())
        if depends.by_batch_found:
            self.select()
        unmarked = changed_without_mark(function, args)
        changed = [
            index
            for index, (leaf, mark) in enumerate(zip(leaves, marks, strict=True))
            if mark_of(leaf) != mark or (is_ordinary(leaf) and id(leaf) in unmarked)
        ]
        for leaf in leaves:
            is_marked = is_value(leaf) and version_behind(leaf) != self._versions.get(leaf.label, version_behind(leaf))
            if is_marked or (is_value(leaf) and id(leaf) in unmarked):
                self.trace.values[leaf.label].changed_at = position
                if self.trace.optimizing and not event.line:  # it may have to be told of
                    event.line = users_line()
                self._note_gradients(leaf, position)
                self._as_values.change(self._as_values.name(leaf))
            elif is_value(leaf) and leaf.requires_grad and switches_gradients(function):
                self.trace.switch_on(leaf.label, position)
        found, structure = tree_flatten(result)
        self.trace.has_sizes |= depends.by_stages_found
        varying: Sequence[frozenset[int]] = ()
        if (depends.by_stages_found or sizes or any_varies(leaves)) and not all(
            leaf is None or id(leaf) in set(map(id, leaves)) for leaf in found
        ):
            with self._nothing_drawn():
                varying = varying_of_operation(function, args, kwargs, found, from_values=depends.by_stages_found)
        # what is given back as it is stays the parameter, on each rank: it may be one that is followed
        back = [leaves[index] if index in changed else leaf for index, leaf in enumerate(asked)]
        return self._end(event, leaves, found, structure, changed, varying, back=back)

    def call(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a unit, and return what it would, in form."""
        leave_transform()
        leaves, _ = tree_flatten((args, kwargs))
        event = Event(unit, units=[unit], held=self._held.names(leaves))
        self._as_values.given(leaves)
        self._as_values.use_changed(event)
        if unit.is_listened and unit not in self.trace.listened:
            self.trace.listened.append(unit)
        if unit.is_layer:
            self.trace.marks.append((unit, len(self.trace.events)))
        self.see(leaves)
        position = self._begin(event, [*leaves, *values_within(unit.module)])
        self._as_values.note_unit(unit, position)
        self.trace.caches += [(position, unit, leaf) for leaf in leaves if is_cache(cast(Any, type(leaf)))]
        given = args, kwargs
        if sizes := labels_in(leaves):
            self.trace.use_sizes(sizes, position)
            args, kwargs = without_memory_of_sizes(args, kwargs)
        outline = self.outline(event, unit, args, kwargs)
        refuse_hidden(unit.name, outline.hiding)
        self.trace.has_sizes |= outline.from_values
        if outline.guessed_after:
            self.trace.guessed_after.append(outline.guessed_after)
        varying: Sequence[frozenset[int]] = outline.varying
        if sizes or any_varies(leaves):
            with self._nothing_drawn(), following(None):
                selects_all = self._selected is Selected.ALL
                varying = varying_of_call(unit.module, unit.forward, given, outline, self._device, selects_all)
        for known in _OF_UNITS:
            setattr(event, known, getattr(outline, known))
        if outline.detached:
            others = [leaf for index, leaf in enumerate(leaves) if index not in outline.detached]
            event.detached = _labels(leaves) - _labels([*others, *values_within(unit.module)])
        for index in outline.changed:
            if is_value(leaves[index]):
                self.trace.values[leaves[index].label].changed_at = position
        for index in outline.given_gradients:
            need_gradients(leaves[index])
            self._note_gradients(leaves[index], position)
        for leaf in outline.leaves if outline.left else ():
            if is_value(leaf):  # it is kept somewhere, and changed there
                self.trace.values[leaf.label].changed_at = position
        found = [self._values_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in outline.leaves]
        changed = [index for index in outline.changed if is_ordinary(leaves[index])]
        numbers = outline.from_values or any(type(leaf) in NUMBERS for leaf in leaves)
        result = self._end(event, leaves, found, outline.structure, changed, varying, sends_numbers=numbers)
        self._left.note(event, result)
        return returned_of(event, result, given)

    def told(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Any:
        """Sizes that depend on values remember what they are sizes of."""
        tensor: Any = args[0] if args else None
        is_size = isinstance(answer, torch.Size) or getattr(function, "__name__", "") in ASK_SIZE
        if not is_value(tensor) or not is_size:
            return answer
        self.trace.asked.add(tensor.label)
        if not tensor.varies:
            return answer
        return told(function, args, kwargs, answer, self.decide)

    def decide(self, labels: Iterable[int]) -> None:
        """Python has looked at sizes of values, which may decide all that follows."""
        self.trace.use_sizes(labels, FOREVER)
        if self.trace.decided_after is None:
            self.trace.decided_after = len(self.trace.events)
        self.trace.decided_at = self.trace.decided_at or users_line()
        self._look()

    def _note_gradients(self, changed: Any, position: int) -> None:
        with DisableTorchFunctionSubclass():
            if is_value(changed) and changed.requires_grad:
                self.trace.need_gradients(changed.label, position)

    def _values_of(self, form: torch.Tensor) -> torch.Tensor:
        zeros = zeros_of(form)
        return fill_rising(zeros) if self._rising else zeros

    def _look(self) -> None:
        self.trace.deciding.append(users_module())
        check_looks(len(self.trace.deciding), lambda: f"at {users_line()}")

    def outline(self, event: Event, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outline:
        """What a unit would return, in form; remembered if it depends on nothing else than what it is given."""
        given, structure = tree_flatten((args, kwargs))
        of_stages = [leaf for leaf in given if type(leaf) is Tracked]
        selects_all = bool(of_stages) and self._selected is Selected.ALL
        with ordinary(of_stages):
            leaves = plain(given)
            key = form_of_call(unit.module, leaves, structure, self._device, selects_all=selects_all)
            outlines, how = outlines_of(unit), str(structure)  # who tells nobody anything does not in evaluation
            known = outlines.find(key, leaves)
            if known is not None:
                return known

            def call(inside: Inside, heard: Any, *, again: bool = False) -> tuple[Outline, dict[str, None]]:
                arguments = tree_unflatten(leaves, structure)
                with self._nothing_drawn(), following(inside), self.seen.instead(inside) as names, heard:
                    found = outline_call(
                        unit.module, unit.forward, arguments, self._device, selects_all=selects_all, again=again
                    )
                return found, names

            first = None if how in outlines.silent else FirstCall(unit.module)
            inside = Inside(self, event)
            with attributes_kept(unit.module) as kept:
                outline, names = call(inside, first or nullcontext())
            event.held += names  # of other modules; its own are replaced meanwhile
            if first is not None and not (inside.was_asked or outline.way):
                said = hash(tuple(first.said))
                if not outlines.says_as_others(key, how, said) and first.talks(
                    self._held.owner, lambda heard: call(Inside(self, event), heard, again=True)
                ):
                    self.trace.talking.append((len(self.trace.events) - 1, unit))
                    return outline
                outlines.silent[how] = said
            self.trace.counted += [".".join(filter(None, (unit.name, *place))) for place in kept.counted]
            if kept.are_kept and not (names or inside.was_asked or outline.left):
                outlines.keep(key, leaves, outline)
            return outline

    def select(self) -> None:
        """Note that a size comes from the values of the batch."""
        self.trace.selects.append(len(self.trace.events))

    @contextmanager
    def draw_for_metric(self) -> Iterator[None]:
        """Take no notice of what a metric draws meanwhile: that decides about nothing that stages do."""
        before = self._glue_state
        is_first_draw = before is not None and random_state.same_state(before, random_state.get_state(self._device))
        yield
        if is_first_draw:
            self._glue_state = random_state.get_state(self._device)

    def listen(self, event: Event) -> None:
        """Note a unit that is to be followed into, since it logs by itself."""
        if event.what in event.units and event.what not in self.trace.listened:
            self.trace.listened.append(event.what)

    def begin_inside(self, unit: Any) -> None:
        """Note that a layer is called inside of the event that is under way."""
        position = len(self.trace.events) - 1
        if unit.is_layer and position not in (place for _, place in self.trace.marks):
            self.trace.marks.append((unit, position))

    def enter(self, unit: Any) -> None:
        """Note that a layer begins that is followed into."""
        if unit.is_layer:
            self.trace.marks.append((unit, len(self.trace.events)))

    def note(self, values: Any) -> None:
        """Note that values are wanted at the end, as what is logged."""
        self.trace.use(values, FOREVER)
        self.trace.at_end += self._held.names(tree_leaves(values))

    def optimize(self, loss: Any, changed: Iterable[nn.Parameter] = ()) -> None:
        """Note where the step differentiates a loss by itself, or does something with gradients, or weights."""
        parameters = list(changed)
        self.trace.optimize(loss, parameters, self._held.names(parameters), users_line())

    def looks_again(self, weights: Sequence[torch.Tensor]) -> bool:
        """Note that the step uses weights by themselves that it has changed: they are to be followed."""
        self.trace.looks_again = True
        return True

    def finish(self, result: Any) -> None:
        """The step has returned."""
        self.note(result)
        loss: Any = result.get("loss") if isinstance(result, Mapping) else result
        self.trace.loss = loss.label if is_value(loss) else None
        self._left.finish(lambda label: label < 0 or bool(self.trace.values[label].uses))
        for name, buffer in self._held.assigned().items():
            if isinstance(buffer, Tracked) and is_value(buffer) and buffer.label not in self._left.labels:
                self.trace.changes.setdefault(name, []).append((self.trace.values[buffer.label].born, ""))
        for tensor in self._adopted:
            untracked(tensor)
        if self._glue_state is not None:
            self.trace.draws = not random_state.same_state(self._glue_state, random_state.get_state(self._device))

    def use_inside(self, event: Event, values: Any) -> None:
        """Note tracked tensors that reach the inside of an event by another way than as arguments."""
        self.trace.use(values, self.trace.events.index(event))

    def _begin(self, event: Event, leaves: list[Any]) -> int:
        if self._glue_state is None:
            self._glue_state = random_state.get_state(self._device)
        position = len(self.trace.events)
        event.content, self._num_made = self._contents.of_call(event.what, event.held, leaves), 0
        self.trace.events.append(event)
        self.trace.use(leaves, position)
        self._taken += [(position, leaf) for leaf in leaves if is_ordinary(leaf) and leaf.requires_grad]
        if not self.trace.compiled and is_in_compiled_function():
            self.trace.compiled = users_line()
        self._versions = {leaf.label: version_behind(leaf) for leaf in leaves if is_value(leaf)}
        return position

    def _end(
        self,
        event: Event,
        leaves: list[Any],
        found: list[Any],
        structure: Any,
        changed: list[int],
        varying: Sequence[frozenset[int]],
        *,
        sends_numbers: bool = False,
        back: Sequence[Any] = (),
    ) -> Any:
        returned: list[Any] = []
        numbers: list[Any] = []
        texts = {leaf: index for index, leaf in enumerate(leaves) if type(leaf) is str} if event.units else {}
        event.structure = structure
        own: dict[int, int] = {}
        for index, leaf in enumerate(leaves):  # the first of several, as those that stand for it are not one object
            if isinstance(leaf, torch.Tensor):
                own.setdefault(id(plain(leaf)), index)
        for index_of, leaf in enumerate(found):
            if isinstance(leaf, Same) or (isinstance(leaf, torch.Tensor) and id(leaf) in own):
                index = leaf.argument if isinstance(leaf, Same) else own[id(leaf)]
                event.results.append(Same(index))
                returned.append((back or leaves)[index])
            elif isinstance(leaf, torch.Tensor):
                value = tracked(leaf)
                event.results.append(New(self._new(value, varying[index_of] if varying else frozenset())))
                returned.append(value)
            elif sends_numbers and type(leaf) in NUMBERS:
                event.results.append(Number(len(numbers), leaf))
                numbers.append(leaf)
                returned.append(leaf)
            elif type(leaf) is str and leaf in texts:
                event.results.append(Passed(texts[leaf]))
                returned.append(leaf)
            else:
                event.results.append(leaf)
                returned.append(leaf)
        if numbers:
            value = tracked(torch.tensor(numbers, dtype=torch.float64, device=self._device))
            event.numbers = self._new(value)
            self.trace.use(value, FOREVER)  # numbers do not tell who uses them
        for index in changed:
            self._adopt(event, leaves[index], index)
        for index, leaf in enumerate(leaves):
            if is_value(leaf) and self.trace.values[leaf.label].changed_at == len(self.trace.events) - 1:
                self._contents.of_values[leaf.label] = number_of((event.content, "changed", index))
        returns_tensors = any(isinstance(leaf, torch.Tensor) for leaf in found)
        nothing = all(leaf is None for leaf in found)
        if not (returns_tensors or event.adopted or event.units or event.what in HOOKS or nothing):
            event.reads = True
            self._look()
            event.line = users_line()
            self.trace.use(leaves, FOREVER)
            returned = self._read(event.what, leaves, found)
        return tree_unflatten(returned, structure)

    def _read(self, function: Any, leaves: list[Any], found: list[Any]) -> list[Any]:
        """What Python reads: numbers remember what they come from, or anything may depend on them."""
        if getattr(function, "__name__", "") in ("item", "tolist"):
            return numbers_of(found, frozenset(leaf.label for leaf in leaves if is_value(leaf)), self.decide)
        # other functions have to give Python plain numbers
        self._has_read |= not all(isinstance(leaf, (bool, str, type(None))) for leaf in found)
        return found

    def _adopt(self, event: Event, tensor: torch.Tensor, index: int) -> None:
        """Follow an ordinary tensor from now on, and what it is a view of; other views of that cannot be found."""
        name = self._as_values.names[index]
        self._as_values.change(name)
        if type(tensor) is not torch.Tensor:
            return
        base = base_of(tensor)
        self._changed_memory[memory_of(tensor)] = len(self.trace.events) - 1
        for each, is_base in ((tensor, False), (base, True)):
            if each is not None and type(each) is torch.Tensor:
                adopted = tracked(each)
                self._adopted.append(adopted)
                event.adopted.append(Adopted(index, is_base, self._new(adopted)))
                self._as_values.note(adopted, name)

    def see(self, leaves: list[Any]) -> None:
        """Notice ordinary tensors whose values a stage has changed through another view of theirs."""
        for leaf in leaves if self._changed_memory else ():
            if is_ordinary(leaf) and has_memory(leaf) and memory_of(leaf) in self._changed_memory:
                self.trace.stale.append((self._changed_memory[memory_of(leaf)], users_line()))

    def _new(self, value: Tracked, varying: frozenset[int] = frozenset()) -> int:
        if self._has_read:
            varying = frozenset(range(value.dim()))
        value.varies = varying
        value.label = len(self.trace.values)
        position = len(self.trace.events) - 1
        with following(None):
            memory = memory_behind(value)
            if memory:
                self._reserved.append(reserved_memory(value))
            self._as_values.note_view(value, memory)
            form, varies = Tracked.absent(value), bool(varying) or self.trace.decided_by_sizes
            form.varies = varying
            self._num_made += 1
            content = number_of((self.trace.events[position].content if position >= 0 else 0, self._num_made))
            self._contents.of_values[value.label] = content
            memory = memory or -value.label
            self.trace.values.append(Value(form, position, memory=memory, varies=varies, content=content))
        return value.label

    @contextmanager
    def _nothing_drawn(self) -> Iterator[None]:
        """Random numbers of what one stage computes are not those of the step."""
        with random_state.isolated(self._device) as before:
            yield
            random_state.notice_draws_on_host(before)


def _labels(leaves: Iterable[Any]) -> frozenset[int]:
    return frozenset(leaf.label for leaf in leaves if is_value(leaf))
