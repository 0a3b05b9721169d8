"""The computations of one stage: forwards and backwards of its microbatches, which tell when they begin and end.

A microbatch is in flight from its forward to the end of its backward (or of its weight gradient): for that long the
stage holds its inputs and outputs, and autograd what it saved. Nothing else outlives an instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_pfo.core.events import EventEmitter, InstructionEvent, InstructionWork
from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass, in_memory
from lightning_pfo.strategy.engine.endings import as_error
from lightning_pfo.strategy.engine.offload import Offload
from lightning_pfo.strategy.engine.split_backward import backward_of_inputs
from lightning_pfo.strategy.engine.work_counter import WorkCounter
from lightning_pfo.strategy.model.batch_norm import in_our_words
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.model.tracing.ends import SKIPPED, deviates
from lightning_pfo.strategy.model.tracing.placeholders import placeholders_on
from lightning_pfo.strategy.model.tracing.stage_run import run_stage
from lightning_pfo.strategy.model.tracing.tracked import Tracked
from lightning_pfo.strategy.parallel import random_state

CountedWork = dict[tuple[int, InstructionType], InstructionWork]
"""What one instruction of a stage and kind computes."""

Tensors = tuple[torch.Tensor, ...]


class Stage:
    """Runs the instructions of one stage.

    Args:
        index: Index of the stage.
        device: Device of the stage.
        emitter: Receives the events; None emits nothing.
        compute_loss: On the last stage, maps what the step returned and the microbatch to a loss; part of the forward.
        train: Whether backwards follow.
        offload: Takes what forwards save to the host; None: it stays.

    Attributes:
        skipped: Microbatches of the present iteration of which the step has called nothing; see `SKIPPED`.
        at_once: Microbatches whose backward follows their forward at once: what these save stays.
        iteration: Number of the iteration, for events.
        counted_work: What is counted; None counts nothing.
        programs: What the stage does of each microbatch.
        step: Runs the user's step on a stage and a microbatch.
        seed: What the random numbers of a microbatch derive from.
        memory: Of each microbatch the values that phases of the step compute for later ones; empty: it has no phases.
        failure: The first error of the present iteration. Others that depend on this stage get zeros, so that all
            finish the iteration, and then learn of it.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        *,
        emitter: EventEmitter | None,
        compute_loss: Callable[[Any, int], torch.Tensor] | None,
        train: bool,
        offload: Offload | None = None,
    ) -> None:
        self.index = index
        self.skipped: set[int] = set()
        self.at_once: frozenset[int] = frozenset()
        self.iteration = 0
        self.counted_work: CountedWork | None = None
        self.programs: Sequence[StageProgram] = ()
        self.step: Callable[[int, int], Any] | None = None
        self.seed: tuple[int, ...] = ()
        self.memory: Sequence[dict[int, torch.Tensor]] = ()
        self._device = device
        self._emitter = emitter
        self._compute_loss = compute_loss
        self._train = train
        self._offload = offload
        self.failure: Exception | None = None
        self._in_flight: dict[int, tuple[Tensors, list[torch.Tensor]]] = {}
        self._differentiated: dict[int, tuple[StageProgram, set[int]]] = {}  # by program
        self._sent_sizes: dict[int, list[torch.Size]] = {}
        self._weight_gradients: dict[int, Callable[[], None]] = {}
        self._computations: dict[InstructionType, Callable[[int, Tensors], Tensors]] = {
            InstructionType.FORWARD: self._forward,
            InstructionType.BACKWARD: self._outside_autocast(self._backward),
            InstructionType.INPUT_GRADIENT: self._outside_autocast(self._input_gradient),
            InstructionType.WEIGHT_GRADIENT: self._outside_autocast(self._weight_gradient),
        }

    def _outside_autocast(self, backward: Callable[[int, Tensors], Tensors]) -> Callable[[int, Tensors], Tensors]:
        """Autocast is for forwards, but the step that runs the pipeline may be under it."""

        def run(microbatch: int, received: Tensors) -> Tensors:
            with placeholders_on(self._device):  # parts of the step that are recomputed
                if not torch.is_autocast_enabled(self._device.type):
                    return backward(microbatch, received)
                with torch.autocast(self._device.type, enabled=False):
                    return backward(microbatch, received)

        return run

    def run(self, instruction: Instruction, received: Tensors) -> Tensors:
        """Run one instruction.

        Args:
            instruction: One of this stage.
            received: What the neighbouring stage computed for it: activations for a forward, gradients for a backward;
                nothing for the first stage's forwards, the last stage's backwards and weight gradients.

        Returns:
            What the other neighbour needs: activations of a forward, gradients of a backward.
        """
        if not self._emitter:
            return self._computations[instruction.type](instruction.microbatch, received)
        self._emitter.instruction_begin(InstructionEvent(instruction, self.iteration))
        key = (self.index, instruction.type)
        if self.counted_work is not None and key not in self.counted_work:
            with WorkCounter() as counter:
                produced = self._computations[instruction.type](instruction.microbatch, received)
            sent_bytes = sum(tensor.numel() * tensor.element_size() for tensor in produced)
            self.counted_work[key] = replace(counter.work, sent_bytes=sent_bytes)
        else:
            produced = self._computations[instruction.type](instruction.microbatch, received)
        work = self.counted_work.get(key) if self.counted_work is not None else None
        self._emitter.instruction_end(InstructionEvent(instruction, self.iteration, work))
        return produced

    def make_buffers(self, instruction: Instruction, sizes: Sequence[Sequence[int]] = ()) -> Tensors:
        """Make tensors to receive what `instruction` needs from another rank.

        Args:
            instruction: One of this stage.
            sizes: The shapes of what it needs of varying shape; see `varying_received`.
        """
        program, told = self.programs[instruction.microbatch], iter(sizes)
        if instruction.type is not InstructionType.FORWARD:  # gradients, of what was sent
            told = iter(self._sent_sizes.get(instruction.microbatch, ()))
        with DisableTorchFunctionSubclass():  # forms would take three times as long to tell theirs
            return tuple(
                torch.empty(
                    next(told) if label in program.varying else form.shape, dtype=form.dtype, device=self._device
                )
                for label, form in _received(program, instruction.type)
            )

    def varying_received(self, instruction: Instruction) -> int:
        """How many tensors an instruction receives of which only the sender knows the shape."""
        if instruction.type is not InstructionType.FORWARD:
            return 0
        program = self.programs[instruction.microbatch]
        return sum(label in program.varying for label in program.received) if program.varying else 0

    def varying_sent(self, instruction: Instruction, tensors: Tensors) -> list[torch.Size]:
        """The shapes of those among the tensors that an instruction sends of which only the sender knows them."""
        if instruction.type is not InstructionType.FORWARD:
            return []
        program = self.programs[instruction.microbatch]
        if not program.varying:
            return []
        sent = zip(program.sent, tensors, strict=True)
        return [tensor.shape for label, tensor in sent if label in program.varying]

    def forget(self) -> None:
        """Drop the microbatches in flight, which an exception has left."""
        self._in_flight.clear()
        self._differentiated.clear()
        self._sent_sizes.clear()
        self._weight_gradients.clear()

    def _forward(self, microbatch: int, received: Tensors) -> Tensors:
        program = self.programs[microbatch]
        with DisableTorchFunctionSubclass():
            for tensor, label in zip(received, program.received, strict=True):
                tensor.requires_grad_(program.is_differentiable(label, sent=False) and torch.is_grad_enabled())
        outputs = None
        offload = self._offload if self._train and microbatch not in self.at_once else None
        with _NotingFailures(self), nullcontext() if offload is None else offload.of_forward():
            outputs = self._outputs(program, microbatch, received) if self.failure is None else None
        if outputs is None:
            forms = [program.forms[label] for label in program.sent]
            outputs = [torch.zeros(form.shape, dtype=form.dtype, device=self._device) for form in forms]
        if self._train:
            differentiated = outputs
            if self._compute_loss is None:
                pairs = zip(outputs, program.sent, strict=True)
                differentiated = [tensor for tensor, label in pairs if program.has_gradient(label, sent=True)]
            self._in_flight[microbatch] = (received, [tensor for tensor in differentiated if tensor.requires_grad])
            if program.varying and self._compute_loss is None:
                self._sent_sizes[microbatch] = [
                    tensor.shape
                    for label, tensor in zip(program.sent, outputs, strict=True)
                    if label in program.varying and program.has_gradient(label, sent=True)
                ]
        return () if self._compute_loss is not None else tuple(tensor.detach() for tensor in outputs)

    def _outputs(self, program: StageProgram, microbatch: int, received: Tensors) -> list[torch.Tensor] | None:
        assert self.step is not None
        # the step's own numbers are the same on all stages, those of what a stage computes are its own
        random_state.seed_step(self._device, *self.seed, microbatch, 0)
        numbers = _TwoStreams(self._device, (*self.seed, microbatch, 1 + self.index))
        step = partial(self.step, self.index, microbatch)
        around: dict[str, Any] = {"around": numbers.own} if program.draws else {"enter": numbers.begin}
        if program.is_phase:
            around = {"around": numbers.of_event, "memory": self.memory[microbatch]}
        with placeholders_on(self._device), nullcontext() if self._train else _as_traced():
            output = run_stage(program, step, received, **around)
            if output is SKIPPED:
                self.skipped.add(microbatch)
                output = None  # neighbours get zeros, which they skip too
            if self._compute_loss is not None:
                return [self._compute_loss(output, microbatch)]
            return None if output is None else list(output)

    def _backward(self, microbatch: int, gradients: Tensors) -> Tensors:
        inputs, outputs = self._in_flight.pop(microbatch)
        with _NotingFailures(self):
            _backward(outputs, gradients)
        return self._gradients_of(inputs, microbatch, is_skipped=not outputs)

    def _input_gradient(self, microbatch: int, gradients: Tensors) -> Tensors:
        inputs, outputs = self._in_flight.pop(microbatch)
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        # where nobody waits for it, the whole backward is done with the weights
        self._weight_gradients[microbatch] = partial(_backward, outputs, gradients)
        if differentiable and outputs:
            with _NotingFailures(self):
                self._weight_gradients[microbatch] = backward_of_inputs(outputs, gradients, differentiable)
        return self._gradients_of(inputs, microbatch, is_skipped=not outputs)

    def _gradients_of(self, inputs: Tensors, microbatch: int, *, is_skipped: bool) -> Tensors:
        """The gradients that the stage before waits for; zeros where an input was not used."""
        program = self.programs[microbatch]
        if not inputs:
            return ()
        found, gradients = set[int](), []
        for label, tensor in zip(program.received, inputs, strict=True):
            gradient = tensor.grad
            if gradient is not None:
                found.add(label)
            if program.has_gradient(label, sent=False):
                gradients.append(torch.zeros_like(tensor) if gradient is None else in_memory(gradient))
        if not is_skipped:
            self._differentiated.setdefault(id(program), (program, set()))[1].update(found)
        return tuple(gradients)

    def end(self) -> None:
        """All instructions of the iteration have run.

        If the loss depends on other values than in the trace, or has done in an earlier iteration, the step has
        deviated: what computes them would lack gradients, or have zeros where it has none.
        """
        for program, found in self._differentiated.values():
            if found & program.undifferentiated or program.differentiated - found:
                self.failure = self.failure or deviates()
            program.differentiated.update(found)
        self._differentiated.clear()

    def _weight_gradient(self, microbatch: int, received: Tensors) -> Tensors:
        with _NotingFailures(self):
            self._weight_gradients.pop(microbatch)()
        return ()


def received_forms(program: StageProgram, kind: InstructionType) -> list[Tracked]:
    """The forms of what an instruction needs of a neighbouring stage: activations, or gradients of what was sent."""
    return [form for _, form in _received(program, kind)]


def _received(program: StageProgram, kind: InstructionType) -> list[tuple[int, Tracked]]:
    """The values that an instruction needs, or needs the gradients of: labels and forms."""
    if kind is InstructionType.FORWARD:
        return [(label, program.forms[label]) for label in program.received]
    if kind is InstructionType.WEIGHT_GRADIENT:
        return []
    return [(label, program.forms[label]) for label in program.sent if program.has_gradient(label, sent=True)]


def _backward(outputs: list[torch.Tensor], gradients: Tensors) -> None:
    if outputs:
        torch.autograd.backward(outputs, gradients or None)


@contextmanager
def _as_traced() -> Iterator[None]:
    """Let attention layers take the way of training in evaluations under autocast on CPUs, as they do when traced.

    Torch's faster one returns another dtype there, and is not taken where something watches, or with CUDA.
    """
    if not (torch.is_autocast_enabled("cpu") and torch.backends.mha.get_fastpath_enabled()):
        yield
        return
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class _NotingFailures:
    """Lets a stage go on after an error, which it notes."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        failure = None if error is None else as_error(error)
        if failure is None:
            return False
        self._stage.failure = self._stage.failure or in_our_words(failure)
        return True


class _TwoStreams:
    """Random numbers of a step, which all stages draw alike, and those of what one stage computes."""

    def __init__(self, device: torch.device, seed: tuple[int, ...]) -> None:
        self._device = device
        self._seed = seed
        self._state: dict[str, Any] | None = None

    def begin(self) -> None:
        """From now on numbers are the stage's own."""
        random_state.seed_step(self._device, *self._seed)

    @contextmanager
    def own(self, event: int) -> Iterator[None]:
        """Draw the stage's own numbers while the context is open, and the step's outside."""
        of_step = random_state.get_state(self._device)
        if self._state is None:
            self.begin()
        else:
            random_state.set_state(self._state, self._device)
        try:
            yield
        finally:
            self._state = random_state.get_state(self._device)
            random_state.set_state(of_step, self._device)

    @contextmanager
    def of_event(self, event: int) -> Iterator[None]:
        """The same, with numbers of an event, which are the same ones where it is computed again."""
        of_step = random_state.get_state(self._device)
        random_state.seed_step(self._device, *self._seed, event)
        try:
            yield
        finally:
            random_state.set_state(of_step, self._device)
