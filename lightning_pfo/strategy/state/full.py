"""The state of a split model and its optimizers: collected from the ranks that hold it, and given back to them.

State dicts have the names, order and optimizer ids of a single device: placeholders keep the places of other ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import unwarned
from lightning_pfo.strategy.compat.tensors import memory_of, tree_leaves, tree_map
from lightning_pfo.strategy.parallel.groups import as_bytes, global_rank, tell_all
from lightning_pfo.strategy.state.alike import changed_in, note_alike
from lightning_pfo.strategy.state.placeholders import what_is_lacking

Key = TypeVar("Key", bound=Hashable)
Id = TypeVar("Id", int, str)


def local_module_state(module: nn.Module) -> dict[str, Any]:
    """The part of a module's state dict that this rank holds."""
    return {key: value for key, value in module.state_dict().items() if not _is_placeholder(value)}


def local_optimizer_state(optimizer: Optimizer) -> dict[tuple[int, str], Any]:
    """What an optimizer holds on this rank, by parameter id and name of the value.

    Some, as Adagrad, have a state of all parameters from the beginning; that of placeholders is none.
    """
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    elsewhere = {index for index, parameter in enumerate(parameters) if parameter.is_meta}
    held = {index: values for index, values in optimizer.state_dict()["state"].items() if index not in elsewhere}
    return {(index, name): value for index, values in held.items() for name, value in values.items()}


def gather_module_state(module: nn.Module, last_rank: int, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Collect the full state dict on the world's first rank (empty on other ranks); a collective call of all ranks.

    Of what every rank has (what is outside the pipelined module), the copy of `last_rank` is kept: the rank of the last
    stage alone runs whole steps, so only its buffers are up to date. But what a hook has changed elsewhere only is
    taken from there.
    """
    first_names = _first_names(module)
    local = {key: value for key, value in local_module_state(module).items() if first_names.get(key, key) == key}
    gathered = gather_tensors(local, last_rank, group, changed_in(module, local))
    keys = {key: first_names.get(key, key) for key in module.state_dict()}
    # ordered, as torch's own, by which Accelerate tells that it has to leave out all but one name of a tied tensor
    return OrderedDict((key, gathered[first]) for key, first in keys.items() if first in gathered)


def _first_names(module: nn.Module) -> dict[str, str]:
    """For each name of a parameter its first one: tied parameters have several names."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


def gather_optimizer_state(optimizer: Optimizer, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Collect the full optimizer state on the world's first rank (empty on others); a collective call of all ranks."""
    gathered = gather_tensors(local_optimizer_state(optimizer), 0, group)
    if dist.get_rank() != 0:
        return {}
    return {"state": nest_optimizer_state(gathered), "param_groups": optimizer.state_dict()["param_groups"]}


def nest_optimizer_state(values: Mapping[tuple[Id, str], Any]) -> dict[Id, dict[str, Any]]:
    """Turn values by (parameter id, name) into the form of `Optimizer.state_dict()["state"]`."""
    nested: dict[Id, dict[str, Any]] = {index: {} for index in sorted({index for index, _ in values})}
    for (index, name), value in values.items():
        nested[index][name] = value
    return nested


def load_module_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
    """Load this rank's part of a full state dict, by the module's own `load_state_dict` and its hooks.

    Returns:
        The keys that are missing, and those that are unexpected. Of a tied parameter one name is enough where another
        rank holds it.

    Raises:
        RuntimeError: By torch, if keys are missing or unexpected and `strict`, or shapes differ.
    """
    own = module.state_dict()
    placed = {key: _placed_like(value, own[key]) if key in own else value for key, value in state.items()}
    first_names = _first_names(module)
    loaded = {first_names.get(key, key) for key in state}
    placed |= {
        key: value
        for key, value in own.items()
        if key not in placed and _is_placeholder(value) and first_names.get(key, key) in loaded
    }
    with unwarned(".*copying from a non-meta parameter in the checkpoint to a meta.*"):  # layers of other ranks
        found: Any = module.load_state_dict(placed, strict=strict)
    note_alike(module)
    missing, unexpected = found if isinstance(found, tuple) else ((), ())  # a user's own need not return torch's
    return list(missing), list(unexpected)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's part of a full optimizer state dict; parameters may have any ids there, such as names."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = [parameter_id for group in state["param_groups"] for parameter_id in group["params"]]
    local = {
        parameter_id: {name: _for_optimizer(value, parameter) for name, value in state["state"][parameter_id].items()}
        for parameter_id, parameter in zip(ids, parameters, strict=False)
        if parameter_id in state["state"] and not parameter.is_meta
    }
    optimizer.load_state_dict({"state": local, "param_groups": state["param_groups"]})


def given_to_some(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A whole state on all ranks, where some are given an empty one; a collective call of all processes.

    Whole states are gathered on the first rank, and others have empty ones. Kept in memory, they are given back so.

    Returns:
        What this rank is given; instead of an empty state that of the first rank which has one, if any has.

    Raises:
        ConfigurationError: On all ranks, before anything is sent, if others would take one that lacks values.
    """
    have_one: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(have_one, (bool(state), what_is_lacking(state)))
    are_given, lacking = zip(*have_one, strict=True)
    if all(are_given) or not any(are_given):
        return state
    source = are_given.index(True)
    if lacking[source] is not None:
        raise ConfigurationError(f"Ranks without a state take that which rank {source} is given. {lacking[source]}")
    is_mine = dist.get_rank() == source
    described = tell_all(tree_map(_Layout.of, dict(state)) if is_mine else None, None, source)
    values: Iterator[Any] = iter(tree_leaves(dict(state)) if is_mine else ())
    device = _transport_device(None)

    def told(layout: Any) -> Any:
        value: Any = next(values, None)
        if not isinstance(layout, _Layout):
            return layout
        buffer = as_bytes(value.detach().to(device).contiguous()) if is_mine else layout.empty(device)
        if layout.num_bytes:
            dist.broadcast(buffer, src=source)
        return value if is_mine else layout.filled(buffer)

    found: dict[str, Any] = tree_map(told, described)
    return state if state else found


def _for_optimizer(value: Any, parameter: torch.Tensor) -> Any:
    # a copy, because what was read may be backed by the checkpoint's file
    return _placed_like(value, parameter).clone() if isinstance(value, torch.Tensor) else value


def owned(
    local: Mapping[Key, Any],
    last_rank: int,
    group: dist.ProcessGroup | None = None,
    changed: Collection[Key] = (),
) -> dict[Key, Any]:
    """Of the values this rank holds, those it contributes to a checkpoint; each has one owner. A collective call.

    Values that several ranks of `group` hold belong to `last_rank` if it is one of them, otherwise to the first; where
    some of them have changed a value and others have not, to one of the former.

    Args:
        local: What this rank holds.
        last_rank: The rank of the last stage.
        group: The pipeline's processes; None is the world.
        changed: The keys of what this rank has changed, of what others hold too.
    """
    return {key: local[key] for key in _owners(local, last_rank, group, changed)[dist.get_rank(group)]}


def _owners(
    local: Mapping[Key, Any], last_rank: int, group: dist.ProcessGroup | None, changed: Collection[Key]
) -> list[dict[Key, Any]]:
    """For each rank the keys it owns, with shape and dtype of tensors and other values as they are."""
    number = dist.get_world_size(group)
    described: list[dict[Key, tuple[Any, bool]]] = [{} for _ in range(number)]
    mine = {key: (_Layout.of(value), key in changed) for key, value in local.items()}
    dist.all_gather_object(described, mine, group=group)
    in_turn = [last_rank, *(rank for rank in range(number) if rank != last_rank)]
    owner: dict[Key, int] = {}
    for only_changed in (True, False):
        for rank in in_turn:
            for key, (_, is_changed) in described[rank].items():
                if is_changed or not only_changed:
                    owner.setdefault(key, rank)
    return [{k: layout for k, (layout, _) in part.items() if owner[k] == rank} for rank, part in enumerate(described)]


def gather_tensors(
    local: Mapping[Key, Any], last_rank: int, group: dist.ProcessGroup | None, changed: Collection[Key] = ()
) -> dict[Key, Any]:
    """Copies of the values of all ranks of `group` on the first one, in CPU memory; a collective call of all ranks.

    Tensors are put together and sent one at a time, by the rank that owns them.

    Args:
        local: What this rank holds, in the same order on all who hold the same.
        last_rank: The rank of the last stage, see `owned`.
        group: The pipeline's processes; None is the world.
        changed: See `owned`.
    """
    owners = _owners(local, last_rank, group, changed)
    is_sent = global_rank(group, 0) == 0  # another replica holds the same, or other parts of it
    device = _transport_device(group)
    if dist.get_rank() != 0:
        for key, layout in owners[dist.get_rank(group)].items():
            value = _whole(local[key])  # by those who hold parts of it
            if is_sent and isinstance(layout, _Layout) and layout.num_bytes:
                dist.send(as_bytes(value.detach().to(device).contiguous()), dst=0, group=group)
            del value  # before the next one is put together
        return {}
    gathered: dict[Key, Any] = {}
    for rank, part in enumerate(owners):
        for key, layout in part.items():
            if rank == 0:
                gathered[key] = _copied(_whole(local[key]), local[key])
            elif isinstance(layout, _Layout):
                buffer = layout.empty(device)
                if layout.num_bytes:
                    dist.recv(buffer, src=global_rank(group, rank), group=group)
                gathered[key] = layout.filled(buffer)
            else:
                gathered[key] = layout
    return gathered


def _copied(value: Any, held: Any) -> Any:
    """A copy on the CPU, as is what others send: training goes on in what is held."""
    if not isinstance(value, torch.Tensor):
        return value
    is_held = value.layout != torch.strided or memory_of(value) == memory_of(held)
    return value.to("cpu", copy=is_held)


@dataclass(frozen=True)
class _Layout:
    """Stands for a tensor while ranks tell each other what they hold."""

    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # sparse tensors have no row of bytes, and go as they are
        return _Layout(value.shape, value.dtype) if value.layout == torch.strided else value.detach().cpu()

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """Room for the tensor's bytes."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def filled(self, received: torch.Tensor) -> torch.Tensor:
        """The tensor of these bytes, in CPU memory."""
        return received.cpu().view(self.dtype).reshape(self.shape)


def _transport_device(group: dist.ProcessGroup | None) -> torch.device:
    if "gloo" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        on_device = cast(DTensor, value.to(value.device_mesh.device_type))  # from the host, if it is there
        value = on_device.full_tensor()
    return value.detach() if isinstance(value, torch.Tensor) else value


def _placed_like(value: Any, like: Any) -> Any:
    """Shard `value` as `like` is sharded, if it is and their shapes are equal."""
    if isinstance(like, DTensor) and not isinstance(value, DTensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta
