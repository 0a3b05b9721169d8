"""The computations of one stage: forwards and backwards of its microbatches, which tell when they begin and end.

A microbatch is in flight from its forward to the end of its backward (or of its weight gradient): for that long the
stage holds its inputs and outputs, and autograd what it saved. Nothing else outlives an instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_pfo.core.events import EventEmitter, InstructionEvent, InstructionWork
from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.strategy.engine.shapes import StageShapes, TensorSpec
from lightning_pfo.strategy.engine.split_backward import backward_of_inputs
from lightning_pfo.strategy.engine.work_counter import WorkCounter
from lightning_pfo.strategy.model.sequential import StageModule

CountedWork = dict[tuple[int, InstructionType], InstructionWork]
"""What one instruction of a stage and kind computes."""

Tensors = tuple[torch.Tensor, ...]


class Stage:
    """Runs the instructions of one stage.

    Args:
        index: Index of the stage.
        module: The layers of the stage.
        shapes: What the stage receives and returns.
        device: Device of the stage.
        emitter: Receives the events; None emits nothing.
        before_forward: Called with stage and microbatch inside each forward, before the layers.
        compute_loss: On the last stage, maps the model's output and the microbatch to a loss; part of the forward.
        train: Whether backwards follow.
    """

    def __init__(
        self,
        index: int,
        module: StageModule,
        shapes: StageShapes,
        device: torch.device,
        *,
        emitter: EventEmitter | None,
        before_forward: Callable[[int, int], None],
        compute_loss: Callable[[Any, int], torch.Tensor] | None,
        train: bool,
    ) -> None:
        self.index = index
        self.iteration = 0
        self.counted_work: CountedWork | None = None
        self._module = module
        self._shapes = shapes
        self._device = device
        self._emitter = emitter
        self._before_forward = before_forward
        self._compute_loss = compute_loss
        self._train = train
        self._in_flight: dict[int, tuple[Tensors, list[torch.Tensor]]] = {}
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

    def make_buffers(self, instruction: Instruction) -> Tensors:
        """Make tensors to receive what `instruction` needs from another rank."""
        if instruction.type is InstructionType.FORWARD:
            return tuple(spec.make_buffer(self._device) for spec in self._received)
        return tuple(spec.make_buffer(self._device) for spec in self._shapes.returned if spec.requires_grad)

    def forget(self) -> None:
        """Drop the microbatches in flight, which an exception has left."""
        self._in_flight.clear()
        self._weight_gradients.clear()

    @property
    def _received(self) -> tuple[TensorSpec, ...]:
        return self._shapes.received or ()

    def _forward(self, microbatch: int, received: Tensors) -> Tensors:
        for tensor, spec in zip(received, self._received, strict=True):
            tensor.requires_grad_(spec.requires_grad and self._train)
        self._before_forward(self.index, microbatch)
        # the first stage looks its inputs up, so they may be of any form
        output = self._module(*(received if self._shapes.received is not None else (microbatch,)))
        outputs = [output] if isinstance(output, torch.Tensor) else list(output)
        if self._compute_loss is not None:
            output, self._module.output = self._module.output, None
            outputs = [self._compute_loss(output, microbatch)]
        if self._train:
            self._in_flight[microbatch] = (received, [tensor for tensor in outputs if tensor.requires_grad])
        return () if self._compute_loss is not None else tuple(tensor.detach() for tensor in outputs)

    def _backward(self, microbatch: int, gradients: Tensors) -> Tensors:
        inputs, outputs = self._in_flight.pop(microbatch)
        _backward(outputs, gradients)
        return _gradients_of(inputs)

    def _input_gradient(self, microbatch: int, gradients: Tensors) -> Tensors:
        inputs, outputs = self._in_flight.pop(microbatch)
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        if differentiable and outputs:
            self._weight_gradients[microbatch] = backward_of_inputs(outputs, gradients, differentiable)
        else:  # nobody waits for it: the whole backward is done with the weights
            self._weight_gradients[microbatch] = partial(_backward, outputs, gradients)
        return _gradients_of(inputs)

    def _weight_gradient(self, microbatch: int, received: Tensors) -> Tensors:
        self._weight_gradients.pop(microbatch)()
        return ()


def _backward(outputs: list[torch.Tensor], gradients: Tensors) -> None:
    if outputs:
        torch.autograd.backward(outputs, gradients or None)


def _gradients_of(inputs: Tensors) -> Tensors:
    """The gradients that the stage before waits for; zeros where an input was not used."""
    return tuple(
        torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()
        for tensor in inputs
        if tensor.requires_grad
    )
