"""How the run of a stage ends: as it should, or otherwise than in the trace."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.variables import told_of_error, users_line

SKIPPED = object()
"""What comes of a step that returns None before it calls anything, as all stages of it do alike."""


class StageEnded(BaseException):
    """Ends the step; a BaseException because users may write `except Exception` around their model."""


class PhaseEnded(BaseException):
    """Ends the step where a phase of it ends on the last stage; who runs the step knows the losses that it had."""


class OtherPathError(ConfigurationError):
    """A step optimizes otherwise than in the trace of an earlier batch."""


class DeviationError(ConfigurationError):
    """A step does something else than in the trace of an earlier batch, which has the same form; it is traced again."""


class WrittenError(ConfigurationError):
    """A step has written into parameters what nobody can take back, so it does not run again."""


_OTHERWISE = "The step runs otherwise than in the trace of a batch of the same form"
_AT_GRADIENT = (
    "it reads gradients, which stages have of the microbatches that have run backward by then. On one device they are "
    "those of the step before: read them in on_before_optimizer_step (in a loop of your own before optimizer.step()), "
    "where trainer.strategy.grad_norm(), or model.clip_grad_norm_(float('inf')), gives the norm over all stages, "
    "called on every rank; what the step is to have of them can be kept there in an attribute."
)
_MASKS = "transformers/masking_utils.py"
_PADDED = (
    "Transformers' models drop a mask that leaves nothing out; with a padded token in each sample (attention_mask 0) "
    "they keep it, as in the trace, where what layers return is zeros."
)


def is_deviation(error: BaseException) -> bool:
    """Whether an error says that a step does something else than in the trace; others may quote it."""
    return _OTHERWISE in str(error)


def deviates(look: str = "", *, at_gradient: bool = False) -> DeviationError:
    """What is said of a step that does something else than in the trace.

    Args:
        look: The line before, if there is one, at which Python has read values of layers.
        at_gradient: Whether it asks for the gradient of a parameter here or there.
    """
    if at_gradient:
        return DeviationError(f"{_OTHERWISE}: {_AT_GRADIENT} It does so at {users_line()}")
    at_look = f"; it has last looked at some at {look}" if look else ""
    of_library = f" {_PADDED}" if _MASKS in look else ""
    return DeviationError(
        f"{_OTHERWISE}: what it calls depends on the values of tensors that stages compute, or on something else that "
        f"changes from batch to batch{at_look}. It does something else at {users_line()} Let only the batch decide, or "
        f"compute all of it on the last stage (partition='custom:...').{of_library}"
    )


def leaves_otherwise(name: str, guessed_after: str = "") -> DeviationError:
    """What is said of a unit that returns or leaves as many values as in no trace.

    Args:
        name: The unit.
        guessed_after: With what it has failed in the trace, if what it returns was taken for like its first argument.
    """
    why = (
        f"In a trace, where layers run without values, it fails ({guessed_after}) and was taken to return one tensor "
        f"like its first argument. Let it do so, or run without values of its arguments."
        if guessed_after
        else "Layers that fill a cache of keys and values as they go may do so: leave it out (use_cache=False), as "
        "training does not need it. Or let only the batch decide what it returns."
    )
    return DeviationError(
        f"{_OTHERWISE}: {name!r} returns, or leaves in what it is given, other values than in a trace. At "
        f"{users_line()} {why}"
    )


def calls_backward() -> str:
    """What is said of a step that calls `backward` on what layers have computed."""
    return (
        f"A step returns its loss, and what layers have computed is differentiated by the pipeline; here it calls "
        f"backward() itself: {users_line()} Each stage has the graph of its own part only. For a gradient by "
        f"the input (an attack, Langevin dynamics), put all that is differentiated into one module, and call "
        f"torch.autograd.grad in its forward."
    )


def differentiates_later() -> str:
    """What is said of a step that gets a function to differentiate layers."""
    return (
        f"torch.func.vjp (and jacrev, which uses it) runs layers now and differentiates them later, by a function that "
        f"it returns: {users_line()} Layers that run on several stages cannot be run so. Use torch.func.grad or jvp, "
        f"which do both at once; or put all that is differentiated into one module, and call vjp in its forward."
    )


BY_FIRST_BATCH = "by what the first training batch uses"
"""Is said where a step needs what other stages hold."""


def told_of_look(failure: BaseException) -> str:
    """What is said of a step that has failed where a first batch is looked at, before training.

    Args:
        failure: What ended its trace.
    """
    is_missing = isinstance(failure, AttributeError)
    way_out = (
        "Hooks have not been called by then and the Trainer has no loaders, so that what these set or give is missing: "
        "set it in __init__ too, or let the step do without."
        if is_missing
        else "Let the step run there too, where numbers stand for the values of layers."
    )
    return (
        f"Before training a first batch is looked at, to give stages the layers and weights that the step uses, in the "
        f"order in which it does. The step ended there with {told_of_error(failure)} {way_out}"
    )


def ended_early(name: str, failure: str) -> ConfigurationError:
    """What is said of a step that calls another stage's layers where its trace has ended.

    Args:
        name: The layer.
        failure: What ended the trace, and the line.
    """
    return ConfigurationError(
        f"A step is traced on numbers that stand for the values of layers, first zeros and then numbers from 1 to 2, "
        f"until all layers are called. Here it fails on both, so nobody knows that {name!r} is needed where another "
        f"stage has it. {failure} Do that behind the last layer, or in the forward of a layer, which has true values."
    )


def cannot_be_sent(tensor: torch.Tensor) -> ConfigurationError:
    """What is said of a divided or sparse tensor that crosses a boundary."""
    if isinstance(tensor, DTensor):
        what = f"a DTensor with placements {tensor.placements}"
        way = "Give the layer's plan use_local_output=True in configure_model"
    else:
        what = f"one of layout {tensor.layout}"
        way = "Let the layer return a dense one (x.to_dense()), or its indices and values"
    return ConfigurationError(
        f"What a stage sends to the next one is a plain tensor; got {what}. {way}, or move the stage boundary with "
        f"partition='custom:...'."
    )


def differs(tensor: torch.Tensor, form: torch.Tensor) -> DeviationError:
    """What is said of a value that has another form than in the trace."""
    if (tensor.shape, tensor.dtype) == (form.shape, form.dtype):
        return DeviationError(
            f"A value that stages send, of shape {tuple(form.shape)}, has requires_grad={tensor.requires_grad}, and in "
            f"the trace of the batch {form.requires_grad}: perhaps something that needs gradients was written into it "
            f"in place, after it was made without. Make a new tensor instead (total = total + loss)."
        )
    return DeviationError(
        f"A value is as the trace of the batch has shown, a tensor of shape {tuple(form.shape)}, {form.dtype} and "
        f"requires_grad={form.requires_grad}; now it is {tuple(tensor.shape)}, {tensor.dtype} and "
        f"requires_grad={tensor.requires_grad}, so its form depends on values, or on something beside "
        f"tensors that layers tell each other, as by a number in an object that they are given. Move the stage "
        f"boundary with partition='custom:...'."
    )
