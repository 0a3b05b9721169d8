"""The stages of a step, all in one process, one after the other; gradients are passed by hand."""

import copy

import torch
from torch import nn

from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.compat.tensors import tree_leaves
from lightning_pfo.strategy.engine.stage import Stage
from lightning_pfo.strategy.model.calls import layer_calls
from lightning_pfo.strategy.model.ownership import release_others
from lightning_pfo.strategy.model.partition import partition_layers
from lightning_pfo.strategy.model.reach.caches import Caches
from lightning_pfo.strategy.model.split import split_units
from lightning_pfo.strategy.model.tracing.dividing.program import programs_of
from lightning_pfo.strategy.model.tracing.forms.values import remember_buffers
from lightning_pfo.strategy.model.tracing.tracked import follow_units
from lightning_pfo.strategy.model.units import find_units
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.step.tracing import trace_untouched

CPU = torch.device("cpu")
SEED = (7,)
CACHES = Caches()


class Holder(nn.Module):
    """Modules under names, as a user's module holds them."""

    def __init__(self, model=None, /, **children):
        super().__init__()
        for name, child in (({"model": model} if model is not None else {}) | children).items():
            self.add_module(name, child)


class Followed:
    """A module whose units are followed until `close`, and its step."""

    def __init__(self, owner, step, num_stages, name=None):
        self.owner, self.patches = owner, Patches()
        self.step = lambda: step(owner)
        self.units = find_units(owner, name, num_stages)
        remember_buffers(owner)
        follow_units(self.units.all, self.patches)

    def trace(self):
        split = split_units(self.owner, self.units, layer_calls(self.units, None), (0,))
        while True:
            trace = trace_untouched(self.owner, self.step, CPU, CACHES, (*SEED, 0))
            if not split.follow_into(trace.listened, self.patches):
                return trace

    def close(self):
        self.patches.close()


class Stages:
    """A step's stages, each on a copy of the module that lacks what other stages hold.

    Args:
        owner: The user's module.
        step: Runs the step: `step(owner)`.
        boundaries: The first layer of each stage, and the number of layers.
        num_stages: Instead of `boundaries`: the stages have equally many layers.
        name: Dotted name of what is split.
    """

    def __init__(self, owner, step, boundaries=None, num_stages=None, name=None):
        num_stages = num_stages or len(boundaries) - 1
        self.copies, self.splits = [], []
        for stage in range(num_stages):
            followed = Followed(copy.deepcopy(owner), step, num_stages, name)
            trace = followed.trace()
            calls = layer_calls(followed.units, trace)
            if boundaries is None:
                boundaries = partition_layers(
                    "uniform", calls.num_parameters, num_stages, types=calls.types, undivided=calls.undivided
                )
            split = split_units(followed.owner, followed.units, calls, tuple(boundaries), trace)
            release_others(followed.owner, split.held, [stage])
            self.copies.append(followed)
            self.splits.append(split)

    @property
    def roots(self):
        return [followed.owner for followed in self.copies]

    def run(self, step=None, train=True):
        """What the step returns on the last stage; in training gradients are left in the copies."""
        programs = []
        for index, (followed, split) in enumerate(zip(self.copies, self.splits, strict=True)):
            if step is not None:
                followed.step = lambda owner=followed.owner: step(owner)
            with torch.set_grad_enabled(train):
                programs.append(split.programs(followed.trace())[index])
        self.programs = programs
        return run_programs(programs, [followed.step for followed in self.copies], train)

    def gradients(self):
        """Of all parameters, summed over the stages that hold them."""
        total = {}
        for root in self.roots:
            for name, parameter in root.named_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad
        return total

    def held(self):
        """The names of the parameters that each stage holds."""
        return [{name for name, p in root.named_parameters() if not p.is_meta} for root in self.roots]

    def close(self):
        for followed in self.copies:
            followed.close()


def run_programs(programs, steps, train=True):
    """Run stages one after the other as the engine does; returns what the step returns on the last one."""
    outputs = []

    def loss_of(output, microbatch):
        outputs.append(output)
        loss = output.get("loss") if isinstance(output, dict) else output
        return loss if isinstance(loss, torch.Tensor) else torch.zeros(())

    stages = []
    for index, (program, step) in enumerate(zip(programs, steps, strict=True)):
        compute_loss = loss_of if index == len(programs) - 1 else None
        stage = Stage(index, CPU, emitter=None, compute_loss=compute_loss, train=train)
        stage.programs, stage.seed = [program], SEED
        stage.step = lambda index, microbatch, step=step: step()
        stages.append(stage)
    with random_state.isolated(CPU), torch.set_grad_enabled(train):
        sent = ()
        for index, stage in enumerate(stages):
            buffers = ()
            if index:
                shapes = stages[index - 1].varying_sent(Instruction(index - 1, InstructionType.FORWARD, 0), sent)
                forward = Instruction(index, InstructionType.FORWARD, 0)
                assert stage.varying_received(forward) == len(shapes)
                buffers = stage.make_buffers(forward, shapes)
            assert [(b.shape, b.dtype) for b in buffers] == [(t.shape, t.dtype) for t in sent]
            sent = run(stage, InstructionType.FORWARD, tuple(t.clone() for t in sent))
        gradients = ()
        for stage in reversed(stages) if train else ():
            buffers = stage.make_buffers(Instruction(stage.index, InstructionType.BACKWARD, 0))
            if stage is not stages[-1]:
                assert [(b.shape, b.dtype) for b in buffers] == [(g.shape, g.dtype) for g in gradients]
            gradients = run(stage, InstructionType.BACKWARD, gradients)
    return outputs[0]


def run(stage, kind, received):
    """Run an instruction of a stage; the engine raises what fails when its iteration is finished."""
    sent = stage.run(Instruction(stage.index, kind, 0), received)
    if stage.failure is not None:
        raise stage.failure
    return sent


def run_plainly(owner, step, train=True):
    """What the step returns on one device, and the gradients of all parameters."""
    owner.zero_grad()
    with random_state.isolated(CPU), torch.set_grad_enabled(train):
        random_state.seed(CPU, *SEED, 0, 0)
        output = step(owner)
        if train:
            (output["loss"] if isinstance(output, dict) else output).backward()
    gradients = {name: p.grad.clone() for name, p in owner.named_parameters() if p.grad is not None}
    owner.zero_grad()
    return output, gradients


def assert_equal(found, expected, tolerance=1e-5):
    """Compare what the step returned, and gradients; a gradient that is not there may be zero."""
    (output, gradients), (expected_output, expected_gradients) = found, expected
    leaves, expected_leaves = tree_leaves(output), tree_leaves(expected_output)
    assert len(leaves) == len(expected_leaves)
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            torch.testing.assert_close(leaf, expected_leaf, rtol=tolerance, atol=tolerance)
        else:
            assert leaf == expected_leaf
    assert set(expected_gradients) <= set(gradients)
    for name, gradient in gradients.items():
        wanted = expected_gradients.get(name, torch.zeros_like(gradient))
        atol = tolerance * (1e-3 + float(wanted.abs().max()))
        torch.testing.assert_close(gradient, wanted, rtol=10 * tolerance, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def run_cut(owner, step, trace, cuts):
    """Run the stages between cuts of a trace on one module, which holds everything."""
    owner.zero_grad()
    programs = programs_of(trace, cuts)
    output = run_programs(programs, [step] * len(programs))
    return output, {name: p.grad.clone() for name, p in owner.named_parameters() if p.grad is not None}
