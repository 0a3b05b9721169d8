"""Moving gradients between the pipeline, which produces them inside a step, and loops, which expect them later.

Lightning's closure runs `training_step`, then `zero_grad`, then `backward`. The pipeline has its gradients already when
`training_step` returns; they are set aside and handed out when Lightning calls backward on the loss. So accumulation,
loss division and the hooks around backward work as they are, in loops of users' own too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.autograd import (
    accumulation_hooks_of,
    gradient_hooks_of,
    ignored_label_of,
    kind_of_operation,
    target_of,
)
from lightning_pfo.strategy.compat.optimizers import emptied, scale_in_place
from lightning_pfo.strategy.compat.tensors import memory_of, tree_map_only
from lightning_pfo.strategy.parallel.buckets import ReplicaMeans
from lightning_pfo.strategy.parallel.dtensor import is_divided_over, local, placed_like
from lightning_pfo.strategy.parallel.groups import Shared
from lightning_pfo.strategy.parallel.reductions import (
    Gradients,
    gradient_type,
    hand_out,
    in_type,
    sum_shared_gradients,
)
from lightning_pfo.strategy.step.batches.structures import leaves_of

_LAST_OPERATIONS = 32
"""So many tell how a loss is made: those of its layers are no more of interest, and all would take long to look at."""
_CHOOSING = ("Topk", "Sort", "MaxB", "MinB", "Amax", "Amin", "Median", "Kthvalue", "IndexB", "MaskedSelect")
"""How operations begin that take some of the losses, as of the hardest samples."""
_NAMED = 5
"""Of more parameters only the first are named."""


def do_nothing() -> None:
    """What follows backward where nothing does."""


def take_gradients(parameters: Iterable[nn.Parameter]) -> Gradients:
    """Detach the gradients from the parameters and return them."""
    return dict(_taken(parameters))


class Newcomers:
    """Parameters that a module has got since it was divided: nobody hands out their gradients.

    Args:
        owner: The module, as it is divided.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        self._known = {id(parameter): parameter for parameter in owner.parameters()}

    def without_gradients(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those among the parameters that the module has now, which have no gradient."""
        return [each for each in parameters if id(each) not in self._known and each.grad is None]

    def refuse(self, newcomers: Iterable[nn.Parameter]) -> None:
        """Refuse those that have a gradient when a step has run.

        Raises:
            ConfigurationError: If some have.
        """
        trained = {id(each) for each in newcomers if each.grad is not None}
        if not trained:
            return
        names = [name for name, parameter in self._owner.named_parameters() if id(parameter) in trained]
        raise ConfigurationError(
            f"A pipeline trains the parameters that a model has when it is divided, as training begins; "
            f"{', '.join(map(repr, names[:_NAMED]))}{' and others' if len(names) > _NAMED else ''} came later, and "
            f"would never change. Put them there before: in __init__, configure_model or setup, and switch them on "
            f"when they are due; or train on with another call of fit (of a loop of your own: prepare the model anew)."
        )


def put_gradients(parameters: Iterable[nn.Parameter], gradients: Gradients) -> None:
    """Attach gradients that `take_gradients` returned, and no others."""
    for parameter in parameters:
        parameter.grad = None
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def without_hooks(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Let hooks of parameters wait for `attach_gradients`: a microbatch's gradients are not those of the batch."""
    of_each = ((gradient_hooks_of(parameter), accumulation_hooks_of(parameter)) for parameter in parameters)
    return emptied([registered for both in of_each for registered in both if registered])


def _taken(parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = None
            yield parameter, placed_like(gradient, parameter)


class StepGradients:
    """Gathers the gradients of one step, stage by stage.

    Args:
        parameters: Those of each stage of this rank; one of several stages is of that which ends last.
        means: Averages them over replicas, while later stages go on; None: nobody does.
        precise: Whether the gradients of microbatches are added up in 32 bits where parameters have 16.
    """

    def __init__(
        self, parameters: Mapping[int, Sequence[nn.Parameter]], means: ReplicaMeans | None, *, precise: bool
    ) -> None:
        self._parameters = parameters
        self._means = means
        self._precise = precise
        self._gradients: Gradients = {}

    def after_backward(self, stage: int, ended: Sequence[int]) -> None:
        """Take what a backward of a stage has left; see `engine.executor.AfterBackward`."""
        if self._precise:
            self._take(chain.from_iterable(self._parameters.values()))
        if self._means is not None:
            for each in ended:
                self._take(self._parameters[each])
                self._means.start(self._parameters[each], self._gradients)

    def _take(self, parameters: Iterable[nn.Parameter]) -> None:
        is_first = not self._gradients  # tensors take long to be looked up
        for parameter, gradient in _taken(parameters):
            earlier = None if is_first else self._gradients.get(parameter)
            if earlier is not None:
                local(earlier).add_(local(gradient))
            elif is_divided_over(parameter, "data_parallel"):
                self._gradients[parameter] = gradient
            else:
                self._gradients[parameter] = in_type(gradient, gradient_type(parameter, precise=self._precise))

    def finish(self, shared: Sequence[Shared]) -> Gradients:
        """All gradients, averaged over replicas, with those of other stages where parameters are shared."""
        self._take(chain.from_iterable(self._parameters.values()))
        if self._means is not None:
            self._means.finish(self._gradients)
        sum_shared_gradients(shared, self._gradients, precise=self._precise)
        return self._gradients


def _add_gradients(gradients: Gradients, factor: torch.Tensor) -> None:
    if factor.is_cuda or factor != 1:  # looking at it would wait for the GPU, where a pass costs little
        scale_in_place(list(map(local, gradients.values())), factor)
    for parameter in gradients:
        for hook in [*gradient_hooks_of(parameter).values()]:
            replaced = hook(in_type(gradients[parameter], parameter.dtype))
            if replaced is not None:
                gradients[parameter] = replaced
    hand_out(gradients)


class _LossWithGradients(torch.autograd.Function):
    """Identity on the loss whose backward hands out gradients computed before."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, loss: torch.Tensor, install: Callable[[torch.Tensor], None]) -> Any:
        ctx.install = install
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, None]:
        ctx.install(grad_outputs[0])
        return None, None, None


_HANDING_OUT = f"{_LossWithGradients.__name__}Backward"


def attach_gradients(
    loss: torch.Tensor,
    gradients: Gradients,
    loss_scale: torch.Tensor | None = None,
    then: Callable[[], object] = do_nothing,
) -> torch.Tensor:
    """Return `loss` such that `backward` on it adds `gradients`, times its incoming gradient, to the parameters.

    Args:
        loss: 0-dimensional loss value.
        gradients: What is handed out; by the first backward, which leaves none.
        loss_scale: What the loss was multiplied with when the gradients were computed.
        then: Called when they have been handed out.

    Raises:
        ConfigurationError: By a second backward.
    """
    is_done = False

    def install(factor: torch.Tensor) -> None:
        nonlocal is_done
        if is_done:
            raise ConfigurationError(
                "A pipeline hands the gradients of a step out once, and does not keep them; this is another backward "
                "on its loss. Differentiate the sum of what both are of (loss + 3 * loss), or run the step once more."
            )
        is_done = True
        parameters = [*gradients]
        _add_gradients(gradients, factor if loss_scale is None else factor / loss_scale)
        for parameter in parameters:
            for hook in [*accumulation_hooks_of(parameter).values()]:
                hook(parameter)
        then()

    return _with_backward(loss, install)


def without_gradients(loss: torch.Tensor, why: str) -> torch.Tensor:
    """Return `loss` such that `backward` on it raises a ConfigurationError that says why it has no gradients."""

    def refuse(factor: torch.Tensor) -> None:
        raise ConfigurationError(why)

    return _with_backward(loss, refuse)


def _with_backward(loss: torch.Tensor, then: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """Return `loss` such that `backward` on it calls something with its incoming gradient."""
    handle = torch.zeros((), device=loss.device, requires_grad=True)
    attached: torch.Tensor = _LossWithGradients.apply(handle, loss, then)  # type: ignore[no-untyped-call]
    return attached


def loss_of(result: Any) -> torch.Tensor:
    """The loss that a training step returned.

    Raises:
        ConfigurationError: If it returned none.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ConfigurationError(
            "A step on a pipeline returns the loss as a one-element tensor that depends on the model's output, or a "
            f"dict with it under 'loss'; got {_describe(result)} of a microbatch. In a loop of your own whose model "
            f"returns no loss, give it one (loss_fn=nn.functional.cross_entropy) and call model(inputs, target), which "
            f"returns the loss: it is computed on the last stage. Outputs are there in evaluation."
        )
    return loss.reshape(()) if loss.dim() else loss


class WayMade(NamedTuple):
    """How a loss is made.

    Attributes:
        number: Another one for another way, such as a sum for a mean; 0: nobody knows.
        chooses: Whether it may choose among samples.
        ignored: Labels that have no part in it.
    """

    number: int = 0
    chooses: bool = False
    ignored: frozenset[int] = frozenset()

    def beside(self, other: WayMade) -> WayMade:
        """How losses of a batch are made of which some are made in another way, as those of fewer samples."""
        numbers = (self.number, other.number)
        number = max(numbers) if not all(numbers) or len(set(numbers)) == 1 else zlib.crc32(repr(numbers).encode()) or 1
        return WayMade(number, self.chooses or other.chooses, self.ignored | other.ignored)


def way_of(loss: torch.Tensor, batch: Any = None, *, looks: bool = False) -> WayMade:
    """How a loss is made, by its last operations, and by which leaves of its batch they take for labels.

    Args:
        loss: The loss.
        batch: Its batch.
        looks: Whether one that is NaN is taken for one that is made in another way; one has to wait for its value.
    """
    operations = _last_operations(loss)
    kinds = list(map(kind_of_operation, operations))
    if looks and bool(loss.isnan().any()):
        kinds.append("nan")
    targets = {memory_of(target) for each in operations if (target := target_of(each)) is not None}
    if targets and batch is not None:
        leaves = ((path, leaf) for path, leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))
        kinds += (path for path, leaf in leaves if memory_of(leaf) in targets)
    number = (zlib.crc32(" ".join(kinds).encode()) or 1) if kinds else 0
    ignored = {label for each in operations if (label := ignored_label_of(each)) is not None}
    return WayMade(number, any(kind.startswith(_CHOOSING) for kind in kinds), frozenset(ignored))


def hands_gradients_out(value: torch.Tensor) -> bool:
    """Whether a value is the loss of a step, or made of it by a few operations: gradients come by its backward only."""
    return any(operation.name() == _HANDING_OUT for operation in _last_operations(value))


def _last_operations(value: torch.Tensor) -> list[Any]:
    if value.grad_fn is None:
        return []
    operations: list[Any] = [value.grad_fn]
    seen = {value.grad_fn}
    for operation in operations:
        new = (before for before, _ in operation.next_functions if before is not None and before not in seen)
        for before in islice(new, _LAST_OPERATIONS - len(operations)):
            seen.add(before)
            operations.append(before)
    return operations


def to_be_differentiated(
    loss: torch.Tensor, weight: float, loss_scale: torch.Tensor | None, *, runs_backward: bool = False
) -> torch.Tensor:
    """What a microbatch of some weight is differentiated by; of no weight nothing.

    Args:
        loss: Its loss; NaN perhaps, as a mean over no labels, where it has no weight.
        weight: The weight.
        loss_scale: What the loss is multiplied with besides.
        runs_backward: Whether layers run backward all the same, as those that are divided over replicas: others wait.
    """
    if not weight:
        return _with_zeros_for_gradients(loss) if runs_backward else torch.zeros(())
    loss = loss * weight
    return loss if loss_scale is None else loss * loss_scale


def _with_zeros_for_gradients(loss: torch.Tensor) -> torch.Tensor:
    """A loss of which all that is differentiated gets zeros, whatever its own operations make of them (0 x NaN)."""
    operations: list[Any] = [loss.grad_fn]
    seen = {loss.grad_fn}
    for operation in operations:
        operation.register_prehook(_zeros_for)
        for before, _ in operation.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                operations.append(before)
    return loss


def _zeros_for(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)


def kept_of(result: Any, loss: torch.Tensor, *, wanted: bool) -> Any:
    """What is kept of what a training step returned: its loss, and the rest if somebody wants it; it may be large."""
    if not isinstance(result, Mapping):
        return loss.detach()
    return tree_map_only(torch.Tensor, torch.Tensor.detach, {**(result if wanted else {}), "loss": loss})


def _describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)} with requires_grad={result.requires_grad}"
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {len(result)} (transformers' models return a dict with return_dict=True)"
    return f"a dict with keys {list(result)}" if isinstance(result, Mapping) else repr(result)
