"""Which values of a traced step the loss does not depend on, so that nobody sends their gradients.

What computes them has no gradients then, as on one device: zeros would let optimizers decay its weights.
"""

from __future__ import annotations

from lightning_pfo.strategy.model.tracing.events import Adopted, New, Trace


def undifferentiated(trace: Trace) -> frozenset[int]:
    """The labels of values that may have gradients and have none; in doubt a value has them.

    An event whose results the loss needs is taken to need all that it takes, but for what a layer detaches itself, and
    one that takes something that is changed in place somewhere all: it may be what is written there.

    Args:
        trace: The step.
    """
    if trace.loss is None or trace.optimizing or trace.failure is not None:
        return frozenset()
    last_changes = trace.last_changes()
    changed = {label for label, value in enumerate(trace.values) if last_changes[value.memory] >= 0}
    needed = changed | {trace.loss}
    for event, taken in zip(reversed(trace.events), reversed(trace.taken()), strict=True):
        made = [leaf.label for leaf in (*event.results, *event.adopted) if isinstance(leaf, (New, Adopted))]
        counts = any(label in needed and trace.values[label].form.requires_grad for label in made)
        if not changed.isdisjoint(taken):
            needed.update(taken)
        elif counts:
            needed.update(label for label in taken if label not in event.detached)
    return frozenset(
        label for label, value in enumerate(trace.values) if value.form.requires_grad and label not in needed
    )
