"""Whether microbatches give the gradients of the batch where their losses give its loss: compared once, as losses are.

`a / a.detach() + b / b.detach()` is 2 on every microbatch and on the batch, and yet each microbatch is weighed by its
own losses. It suffices to know the gradients by what layers return last, and by parameters that the step itself uses
after that: what is looked at is the loss, not the layers. So results of modules with parameters are cut from what made
them while a step runs, which leaves a graph of the end of the step, and what the loss reaches in it is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.model.tracing.differentiating import operations_behind
from lightning_pfo.strategy.model.tracing.tracked import Tracked, following, value_of
from lightning_pfo.strategy.step.gradients import way_of
from lightning_pfo.strategy.step.whole.joining import Join

_LEAST_TOLERANCE = 1e-3  # rounding of gradients that cancel each other
_OF_TOLERANCE = 8  # gradients are rounded on more ways than a loss
_RANDOM = 10  # how far apart random gradients must be, in the error of their mean, which four draws hardly tell


class Slopes:
    """Takes the gradients of losses of a step's microbatches, each when its step has ended.

    Attributes:
        found: The gradients.
        ways: How the losses are made, see `way_of`.
    """

    def __init__(self) -> None:
        self.found: list[list[torch.Tensor]] = []
        self.ways: set[int] = set()

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Where a step runs to its loss."""
        with torch.enable_grad(), register_module_forward_hook(_cut_off):
            yield

    def take(self, loss: Any) -> None:
        """Differentiate the loss of the next microbatch; a loss that cannot be is followed by none."""
        self.ways.add(way_of(loss).number)
        leaves = [] if loss.grad_fn is None else _leaves_of(loss.grad_fn)
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True) if leaves else ()
        self.found.append([torch.zeros(()) if each is None else each.detach() for each in gradients])


def _cut_off(module: nn.Module, args: Any, output: Any) -> Any:
    """Cut what a module with parameters returns from what made it."""
    if torch.compiler.is_compiling() or not any(True for _ in module.parameters(recurse=False)):
        return None
    with following(None):
        return tree_map_only(torch.Tensor, _cut, output)


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Tracked) and tensor.is_absent:
        return tensor
    value = value_of(tensor)
    if not (value.is_floating_point() and value.dim() and value.requires_grad):  # a loss is no layer's result
        return tensor
    cut = value.detach().requires_grad_().clone()  # which may be changed in place
    if not isinstance(tensor, Tracked):
        return cut
    tensor.held = cut  # the step calls another layer after it, and is followed until then
    return tensor


def _leaves_of(node: Any) -> list[torch.Tensor]:
    """The tensors that a loss is made from, in the order in which its graph has them."""
    found = (getattr(operation, "variable", None) for operation in operations_behind([node]))
    return [*{id(leaf): leaf for leaf in found if leaf is not None}.values()]


class Compared(NamedTuple):
    """The gradients of the same samples, by one draw of random numbers.

    Attributes:
        of_parts: Those of microbatches.
        of_all: Those of all as one batch.
        weights: How much each microbatch counts.
        sizes: How many samples it has.
    """

    of_parts: Slopes
    of_all: Slopes
    weights: Sequence[float]
    sizes: Sequence[int]

    def flat(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a pipeline trains on, and one device, in one order; None where these are not of the same things."""
        parts = self.of_parts.found
        if len(parts) != len(self.weights) or len(self.of_all.found) != 1:
            return None
        (wholes,) = self.of_all.found
        if any(len(part) != len(wholes) for part in parts):
            return None
        of_each = zip(*parts, wholes, strict=True)
        joined = [
            (_joined([w * g for w, g in zip(self.weights, of, strict=True)], one, self.sizes), one)
            for *of, one in of_each
        ]
        pairs = [(ours.flatten(), one.flatten()) for ours, one in joined if ours is not None]
        if not pairs:
            return None
        ours, theirs = (torch.cat(each) for each in zip(*pairs, strict=True))
        return (ours, theirs) if ours.dtype == torch.float64 else (ours.float(), theirs.float())


def _joined(parts: Sequence[torch.Tensor], whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
    """Gradients by the samples of each microbatch one after the other, or those by a parameter added up.

    Where samples have several rows, these lie in the order that is nearest to the whole; or in any in which they are
    the same rows, as those of packed sequences, which lie by time.
    """
    if any(each.layout != torch.strided or each.is_nested or each.dim() != whole.dim() for each in (*parts, whole)):
        return None
    if all(each.shape == whole.shape for each in parts):
        return torch.stack([*parts]).sum(0)
    for dim, size in enumerate(whole.shape):
        others = {(*each.shape[:dim], *each.shape[dim + 1 :]) for each in (*parts, whole)}
        if len(others) == 1 and sum(each.shape[dim] for each in parts) == size:
            rows, rest = divmod(size, sum(sizes))
            orders = [blocks for blocks in range(1, rows + 1) if rows % blocks == 0] if not rest else []
            found = [Join(dim, rows, blocks)(parts, sizes) for blocks in orders or (1,)]
            nearest = min(found, key=lambda joined: float((joined - whole).norm()))
            return nearest if _is_near(nearest, whole) else _as_the_same_rows(nearest, whole, dim)
    return None


def _is_near(joined: torch.Tensor, whole: torch.Tensor) -> bool:
    return float((joined - whole).norm()) <= _LEAST_TOLERANCE * float(whole.norm())


def _as_the_same_rows(joined: torch.Tensor, whole: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows in the order in which the whole has them, if it has the same ones; else as they are."""
    if joined.is_complex() or joined.dtype != whole.dtype:
        return joined
    ours, theirs = joined.movedim(dim, 0), whole.movedim(dim, 0)
    # the same rows have the same sum, with weights that no others have; nothing is drawn for them
    weights = torch.arange(1, ours[0].numel() + 1, dtype=torch.double, device=ours.device).cos()
    order, wanted = (rows.flatten(1).double().mv(weights).argsort() for rows in (ours, theirs))
    again = torch.empty_like(ours)
    again[wanted] = ours[order]
    again = again.movedim(0, dim)
    return again if _is_near(again, whole) else joined


def gap(draws: Sequence[Compared | None], tolerance: float) -> float:
    """How far the gradients are from those of one device, as a share of these; 0: rounding and chance explain it.

    Args:
        draws: The gradients by several draws of random numbers, or by one if nothing is random.
        tolerance: The relative difference of losses that rounding explains.
    """
    pairs = [draw.flat() for draw in draws if draw is not None]
    found = [pair for pair in pairs if pair is not None]
    if len(found) != len(draws) or len({one.shape for _, one in found}) != 1:
        return 0.0
    differences = torch.stack([ours - one for ours, one in found])
    mean = differences.mean(0)
    size = max(float(gradient.norm()) for pair in found for gradient in pair)
    chance = 0.0
    if len(found) > 1:
        spread = float((differences - mean).square().sum()) / (len(found) * (len(found) - 1))
        chance = _RANDOM * spread**0.5
    distance = float(mean.norm())
    if not 0 < size < float("inf") or not distance > chance + max(_LEAST_TOLERANCE, _OF_TOLERANCE * tolerance) * size:
        return 0.0
    return distance / size


def describe(share: float, batch: str) -> str:
    """What is said of gradients that are others than on one device, with ways out.

    Args:
        share: How far they are from those, as a share.
        batch: Which one it is.
    """
    return (
        f"The loss of {batch} is the mean of its microbatches' losses, but its gradients are not the mean of theirs: "
        f"they are {100 * share:.2g} % apart, by what layers return last. Either it has parts that are means over "
        f"different things, as labels that are not -100 and samples; or its value does not tell what it depends on, as "
        f"where it is divided by its own detached value (a / a.detach()), which is that of a microbatch. Use "
        f"loss_over='batch' with schedule='gpipe', where the end of the step has all samples; or divide by a number "
        f"that all microbatches share, such as one of the batch before. "
        f"check_loss=False leaves the comparison out."
    )
