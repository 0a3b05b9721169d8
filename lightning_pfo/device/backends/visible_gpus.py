"""Which GPUs CUDA_VISIBLE_DEVICES leaves, and in which order, by the rules of CUDA's programming guide."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence


def visible_gpus(visible: str | None, uuids: Sequence[str], uuid_of_mig: Callable[[str], str | None]) -> list[int]:
    """Positions of the visible GPUs.

    Entries are indices, (prefixes of) UUIDs of GPUs, or UUIDs of MIG instances, all of the kind of the first. The first
    one that is invalid or ambiguous ends the list; one that comes twice leaves none at all.

    Args:
        visible: The variable; None where it is not set.
        uuids: UUIDs of all GPUs in CUDA's order.
        uuid_of_mig: UUID of the GPU that a MIG instance is part of; None if there is no such instance.
    """
    if visible is None:
        return list(range(len(uuids)))
    entries = [entry.strip() for entry in visible.split(",")]
    kind = next((prefix for prefix in ("GPU-", "MIG-") if entries[0].startswith(prefix)), "")
    chosen: list[int] = []
    seen: set[str] = set()
    for entry in entries:
        number = re.match(r"\+?\d+", entry)
        if not kind:
            matches = [index for index in range(len(uuids)) if number and index == int(number[0])]
        elif not entry.startswith(kind):
            matches = []
        elif kind == "GPU-":
            matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        else:
            matches = [index for index, uuid in enumerate(uuids) if uuid == uuid_of_mig(entry)]
        if len(matches) != 1:
            break
        what = entry if kind == "MIG-" else uuids[matches[0]]  # a GPU may have several visible instances
        if what in seen:
            return []
        seen.add(what)
        chosen += matches
    return chosen
