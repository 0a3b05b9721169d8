"""Cutting a backward in two: gradients of the inputs first, those of the weights later.

The idea is that of zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2023): the stage before waits
for the first part only. It runs the nodes of autograd's graph on the paths from outputs to inputs. Where such a node
leads to weights besides, the gradient that arrives at it is kept; from there the second part goes on. It computes
nothing again, except between the places where a weight is used several times.

torch has functions for it (`torch.distributed.pipelining._backward`), but they are private, miss weights from which no
path to an output passes such a node (the position bias of T5), and fail where weights are used several times. Here are
public parts of autograd alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_LEAF = "torch::autograd::AccumulateGrad"


@dataclass
class _Group:
    """Nodes from which the second part goes on, and all weights it reaches from them without passing an input's path.

    Attributes:
        kept: Nodes on the way to inputs, and the gradients that arrive at them, one for each of their outputs.
        outputs: Outputs from which no path leads to an input, and their gradients.
        weights: What is reached; no other group reaches it.
    """

    kept: dict[Node, tuple[torch.Tensor | None, ...]] = field(default_factory=dict)
    outputs: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)

    def keep(self, node: Node, gradients: tuple[torch.Tensor | None, ...]) -> None:
        self.kept[node] = gradients

    def merge(self, other: _Group) -> None:
        self.kept |= other.kept
        self.outputs += other.outputs
        self.weights += other.weights


def backward_of_inputs(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """Add the gradients of `inputs` to their `.grad`.

    Args:
        outputs: Differentiable outputs.
        gradients: Their gradients; empty for a loss.
        inputs: Leaves that require gradients.

    Returns:
        What adds the gradients of all other leaves to their `.grad`; to be called once.
    """
    gradients = gradients or [torch.ones_like(output) for output in outputs]
    roots = [get_gradient_edge(output) for output in outputs]
    leads_to_inputs = _nodes_leading_to([get_gradient_edge(tensor).node for tensor in inputs], roots)
    groups = _find_groups(roots, gradients, leads_to_inputs)
    hooks = [node.register_prehook(partial(group.keep, node)) for group in groups for node in group.kept]
    try:
        torch.autograd.backward(outputs, gradients, inputs=inputs, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    return partial(_backward_of_weights, groups)


def _nodes_leading_to(targets: Iterable[Node], roots: Iterable[GradientEdge]) -> dict[Node, None]:
    """The nodes on paths from roots to targets, as an ordered set."""
    predecessors: dict[Node, list[Node]] = {edge.node: [] for edge in roots}
    queue = deque(predecessors)
    while queue:
        node = queue.popleft()
        for successor, _ in node.next_functions:
            if successor is None:
                continue
            if successor not in predecessors:
                predecessors[successor] = []
                queue.append(successor)
            predecessors[successor].append(node)
    found = {node: None for node in targets if node in predecessors}
    queue = deque(found)
    while queue:
        for node in predecessors[queue.popleft()]:
            if node not in found:
                found[node] = None
                queue.append(node)
    return found


def _find_groups(
    roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], leads_to_inputs: Collection[Node]
) -> list[_Group]:
    group_of: dict[Node, _Group] = {}

    def explore(start: Node, group: _Group) -> _Group:
        """Let `group` have all that is reached from `start`, with whatever has reached any of it before."""
        queue = [start]
        while queue:
            node = queue.pop()
            known = group_of.get(node)
            if known is None:
                group_of[node] = group
                if node.name() == _LEAF:
                    group.weights.append(node.variable)  # type: ignore[attr-defined]
                queue += [successor for successor, _ in node.next_functions if successor is not None]
            elif known is not group:
                known.merge(group)
                group_of.update((other, known) for other, whose in group_of.items() if whose is group)
                group = known
        return group

    for node in leads_to_inputs:
        apart = [s for s, _ in node.next_functions if s is not None and s not in leads_to_inputs]
        group = _Group(kept={node: ()})
        for successor in apart:
            group = explore(successor, group)
    for edge, gradient in zip(roots, gradients, strict=True):
        if edge.node not in leads_to_inputs:
            explore(edge.node, _Group(outputs=[(edge, gradient)]))
    groups = {id(group): group for group in group_of.values() if group.weights}
    return list(groups.values())


def _backward_of_weights(groups: list[_Group]) -> None:
    # from several nodes one may pass through others, which must still be there
    for group in sorted(groups, key=lambda group: -len(group.kept)):
        edges = [edge for edge, _ in group.outputs]
        gradients = [gradient for _, gradient in group.outputs]
        for node, arrived in group.kept.items():
            edges += [GradientEdge(node, i) for i, gradient in enumerate(arrived) if gradient is not None]
            gradients += [gradient for gradient in arrived if gradient is not None]
        if not edges:
            continue
        # what arrives at a node from another one of them, or is changed by hooks, counts already
        hooks = [node.register_prehook(_replace_by(arrived)) for node, arrived in group.kept.items()]
        try:
            torch.autograd.backward(edges, gradients, inputs=group.weights, retain_graph=len(group.kept) > 1)
        finally:
            for hook in hooks:
                hook.remove()
    groups.clear()


def _replace_by(gradients: tuple[torch.Tensor | None, ...]) -> Callable[[Any], Any]:
    return lambda arrived: gradients
