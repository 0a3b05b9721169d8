"""Groups of processes, layers and checkpoints that are divided over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_group

from lightning_pfo.strategy.compat.patches import Patches

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader
    from torch.distributed.fsdp import FSDPModule


__all__ = [
    "abort_process_group",
]

PRIVATE = {
    "torch.distributed.distributed_c10d._abort_process_group": (
        "Where a rank has died, the others would wait for their transfers until the timeout."
    ),
    "torch.distributed.distributed_c10d._process_group_name": (
        "Groups that only their processes make are named by how many groups these are in (up to torch 2.13): they "
        "would wait for each other for ever where that differs, and fail where a name comes again."
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups": (
        "Gradients of a schedule whose last backward is one of weights only would never be averaged over replicas. "
        "torch's pipeline stages do the same."
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group": (
        "The same with older torch, which has one group per layer at most."
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback": (
        "Gathered parameters would not be let go of at the end of an iteration."
    ),
    "torch.distributed.checkpoint.state_dict_loader._load_state_dict": (
        "Every rank would have to read a sharded checkpoint at the same time; the public `load` can be told otherwise "
        "from torch 2.7 on."
    ),
    "torch.serialization._get_layout": (
        "The index of a sharded checkpoint could not be read with weights_only=True: it names this function."
    ),
}
"""Private names, and what they are needed for."""

OLDER_LACK = {"torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups"}
"""Names that the newest versions have, and the oldest do not; they are looked for where they are used."""

OLDEST_FSDP = {"cpu": "2.9"}
"""The oldest torch that divides layers rightly, by device; 2.7 on others, as 2.6 has no `ignored_params`.

Up to 2.8, gloo returns the sum of gradients where FSDP2 asks for their mean, and says nothing.
"""
LAYOUT_READER = ("torch.serialization", "_get_layout")
"""Module and name of the function that a pickled layout of a tensor calls."""


@contextmanager
def name_of_group(name: str) -> Iterator[None]:
    """Let a group that is made meanwhile have a name, which no other has had."""
    with Patches() as patches:
        patches.set(distributed_c10d, "_process_group_name", lambda *args, **kwargs: name)
        yield


def finish_backward(layer: FSDPModule) -> None:
    """Do what FSDP2 does in the hooks of the last backward: average gradients, let go of gathered parameters."""
    from torch.distributed.fsdp import fully_shard  # here, for those who divide nothing

    state = fully_shard.state(layer)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:
            group.post_backward()
    state._root_post_backward_final_callback()


def load_alone(tensors: dict[str, torch.Tensor], reader: StorageReader) -> None:
    """Fill tensors from a sharded checkpoint; nothing is communicated."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # here, for those who load none

    _load_state_dict(tensors, reader, no_dist=True)
