"""Groups of processes: who is who in one, what they tell each other, and groups that are made once and go together.

Ranks of a pipeline do the same things in the same order. A rank that leaves its loop early, or calls something alone,
comes to another meeting than the others (`meet`): then all of them raise an error that names the places.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import PfoError, has_other_batch
from lightning_pfo.strategy.compat.processes import name_of_group
from lightning_pfo.strategy.compat.tensors import in_memory
from lightning_pfo.strategy.parallel.dtensor import local


def global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """The rank in the world of a group's rank; None is the world itself."""
    return rank if group is None else dist.get_global_rank(group, rank)


def tell_all(value: Any, group: dist.ProcessGroup | None, source: int = 0) -> Any:
    """Give every process of a group what one of them has, the first unless told otherwise; a collective call."""
    message = [value]
    dist.broadcast_object_list(message, src=global_rank(group, source), group=group)
    return message[0]


def tell_each_other(value: Any, hosts: dist.ProcessGroup | None) -> list[Any]:
    """What each process of a group has, by rank; a collective call.

    Small values go in one message, where torch's `all_gather_object` sends two, of which the first says how long the
    second is.

    Args:
        value: What this process has.
        hosts: The processes; see `Groups.hosts`.
    """
    data = pickle.dumps(value)
    mine = torch.zeros(_LENGTH_BYTES + _SMALL_BYTES, dtype=torch.uint8)
    told = len(data).to_bytes(_LENGTH_BYTES, "little") + data[:_SMALL_BYTES]
    mine[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(hosts))]
    dist.all_gather(everyone, mine, group=hosts)
    found = [each.numpy().tobytes() for each in everyone]
    lengths = [int.from_bytes(each[:_LENGTH_BYTES], "little") for each in found]
    if max(lengths) <= _SMALL_BYTES:
        return [pickle.loads(each[_LENGTH_BYTES:]) for each in found]
    values: list[Any] = [None] * len(found)
    dist.all_gather_object(values, value, group=hosts)
    return values


def spread(
    mine: torch.Tensor,
    both: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    hosts: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Put together what all processes have; a collective call, which takes half the time of gloo's `all_reduce`.

    In round k a process hears from the one 2^k before it, so that after log2 of their number it has heard from all,
    from some twice: the dissemination of Hensgen, Finkel and Manber, Two Algorithms for Barrier Synchronization (1988).

    Args:
        mine: What this process has: a small tensor on the CPU.
        both: Makes what two know, a new tensor, from what each knows; it may be told the same again.
        hosts: The processes; see `Groups.hosts`.
    """
    rank, size = dist.get_rank(hosts), dist.get_world_size(hosts)
    known, distance = mine, 1
    while distance < size:
        heard = torch.empty_like(known)
        sent = start_send(known, hosts, (rank + distance) % size, _SPREADING)
        start_receive(heard, hosts, (rank - distance) % size, _SPREADING).wait()
        sent.wait()
        known, distance = both(known, heard), 2 * distance
    return known


_LENGTH_BYTES = 8
_SMALL_BYTES = 504
_SPREADING = 1
"""Tells messages from those of a pipeline's stages, which may be of the same group."""
_MOST_VOTES = 5


class RanksApartError(PfoError, RuntimeError):
    """Ranks that do everything together are at different places.

    Args:
        text: What is said of it.
        places: What comes next on some ranks and others, where that is known.
    """

    def __init__(self, text: str, places: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.places = tuple(places)


class OutOfMemoryElsewhereError(PfoError, RuntimeError):
    """Another rank has run out of memory, outside of a step; in words by which it is known to be that."""


OUT_OF_MEMORY = "a call that has run out of memory"
"""Where ranks come to that say so to others, which run out of it, too."""


def meet(what: str, group: dist.ProcessGroup | None, votes: Sequence[bool] = (), same: int = 0) -> list[bool]:
    """Say what comes next; a collective call of processes that do it together.

    Args:
        what: What comes next, for people.
        group: The processes, for tensors on the CPU.
        votes: Up to five questions, each answered with yes if any process says so.
        same: A number of 32 bits that the batches which all have ready have in common.

    Returns:
        The answers.

    Raises:
        RanksApartError: On every rank, if another one comes to something else.
        OutOfMemoryElsewhereError: On every rank, if one comes to `OUT_OF_MEMORY`, and another to something else.
        BatchError: On every rank, if another one has another number.
    """
    if dist.get_world_size(group) == 1:
        return list(votes)
    code = zlib.crc32(what.encode(), same)
    unasked = [False] * (_MOST_VOTES - len(votes))  # of one size everywhere
    said = torch.tensor([code, -code, *votes, *unasked], dtype=torch.int64)
    largest, smallest, *answers = spread(said, torch.maximum, group).tolist()
    if largest == -smallest:
        return list(map(bool, answers[: len(votes)]))
    told = tell_each_other((what, same), group)
    if all(place == what for place, _ in told):
        raise has_other_batch([rank for rank, (_, number) in enumerate(told) if number != told[0][1]])
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, (place, _) in enumerate(told):
        ranks[place].append(rank)
    if OUT_OF_MEMORY in ranks:
        where = ", ".join(str(global_rank(group, rank)) for rank in ranks[OUT_OF_MEMORY])
        raise OutOfMemoryElsewhereError(f"CUDA out of memory. It was so on rank {where}.")
    found = "; ".join(f"rank {', '.join(map(str, some))}: {place}" for place, some in ranks.items())
    raise RanksApartError(
        f"The ranks of a pipeline do everything together, but they are at different places: {found}. Decide alike on "
        f"every rank what ends a loop (StopIteration, returning -1), and call what all take part in on all of them, "
        f"not on the main process only.",
        ranks,
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: gloo does not know all types."""
    row = tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any stride, and is contiguous
    return row.view(torch.uint8)


def content_of(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor, in host memory; not by `numpy()`, after which torch lets no layer resize its buffers."""
    return np.from_dlpack(as_bytes(in_memory(tensor.detach().cpu())))


def checksum(tensor: torch.Tensor) -> int:
    """That of a tensor's bytes; of others it is another one, nearly always."""
    return zlib.crc32(content_of(tensor))


def start_send(tensor: torch.Tensor, group: dist.ProcessGroup | None, rank: int, tag: int = 0) -> dist.Work:
    """Send to a rank of a group that this process is in; as `dist.isend`, which asks several things first each time."""
    return _group(group).send([_real(tensor)], rank, tag)


def start_receive(tensor: torch.Tensor, group: dist.ProcessGroup | None, rank: int, tag: int = 0) -> dist.Work:
    """Receive from a rank of a group; see `start_send`."""
    return _group(group).recv([_real(tensor)], rank, tag)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = group or dist.group.WORLD
    assert group is not None
    return group


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@contextmanager
def in_background() -> Iterator[None]:
    """Let threads that this one starts while the context is open not interrupt others; on Linux only.

    gloo moves data in threads of its own. When one wakes up, Linux likes to run it in place of one that computes on the
    same processor. If this had locked a connection to send, the thread of gloo, which needs the lock too, polls and
    tries again until it gets it (`Pair::handleEvents` in gloo's tcp/pair.cc): with two processes on two processors a
    third of their time went there. Under `SCHED_BATCH`, which anybody may ask for, a thread has the same share of a
    processor as others, but does not interrupt them when it wakes up. Where somebody has chosen another policy than the
    usual one, that is kept: not everybody may go back to it.
    """
    if sys.platform != "linux" or not _change_policy(os.SCHED_OTHER, os.SCHED_BATCH):
        yield
        return
    try:
        yield
    finally:
        _change_policy(os.SCHED_BATCH, os.SCHED_OTHER)


def _change_policy(before: int, after: int) -> bool:
    try:
        if os.sched_getscheduler(0) != before:
            return False
        os.sched_setscheduler(0, after, os.sched_param(0))
    except OSError:  # a sandbox, or a C library that does not know of policies
        return False
    return True


class Wanted(NamedTuple):
    """A group that is to be made.

    Attributes:
        ranks: Its ranks in the world.
        backend: Its backend; None is the world's.
        use: What for, where the same processes need several.
    """

    ranks: tuple[int, ...]
    backend: str | None = None
    use: str = ""


class Groups:
    """The groups of some processes of the world that one pipeline uses, which may have those of others too.

    Each is made once, however many pipelines (and Trainers) use it, and goes with the world at the latest.

    Args:
        device_type: Of the devices of the processes.
        timeout: How long processes wait for each other in a group; None is torch's default.

    Attributes:
        backends: Those of processes that talk with their devices, and as hosts: one does for both on CPUs.
    """

    def __init__(self, device_type: str, timeout: timedelta | None = None) -> None:
        assert dist.group.WORLD is not None
        self.backends: tuple[str | None, ...] = (None,) if device_type == "cpu" else (None, "gloo")
        self._timeout = timeout
        self._made = _made.setdefault(dist.group.WORLD, {})
        self._times = _times.setdefault(dist.group.WORLD, Counter())

    def of(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """A group of some processes.

        A collective call of these, none of which makes groups with others at the same time: see `together`.
        """
        return self._make(Wanted(tuple(ranks), backend), of_these_only=True)

    def together(self, wanted: Sequence[Wanted]) -> list[dist.ProcessGroup]:
        """Groups of processes that overlap; a collective call of the world.

        Processes that make several overlapping groups without the others (`use_local_synchronization`) wait for each
        other for ever, even in the same order; seen with gloo in torch 2.13.

        Args:
            wanted: Those that this process is in.
        """
        everyone = tell_each_other(wanted, self.hosts(None))
        for each in sorted({each for of_process in everyone for each in of_process}, key=str):
            self._make(each)
        return [self._make(each) for each in wanted]

    def hosts(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The processes of `group` for agreements that devices have no part in; a collective call of these.

        Args:
            group: Some processes; None is the world.
        """
        return (
            group
            if len(self.backends) == 1
            else self.of(dist.get_process_group_ranks(group or dist.group.WORLD), "gloo")
        )

    def destroy_unused(self) -> None:
        """Destroy groups whose users are all gone, as a Trainer may be; a collective call of the world.

        Ranks do it together, as communicators ask for, whoever has kept a Trainer.
        """
        if any(user is not self for made in self._made.values() for user in made.users):
            gc.collect()  # a Trainer goes when Python looks for cycles, which may be long after its end
        used = tell_each_other({key for key, made in self._made.items() if made.users}, self.hosts(None))
        for key in sorted(set(self._made).difference(*used), key=str):
            dist.destroy_process_group(self._made.pop(key).group)

    def _make(self, wanted: Wanted, *, of_these_only: bool = False) -> dist.ProcessGroup:
        ranks, backend, _ = wanted
        key = wanted, self._timeout
        if key not in self._made:
            self._times[key] += 1  # how often is the same for all that are in it
            with in_background(), name_of_group(f"lightning_pfo {key} {self._times[key]}"):
                group = dist.new_group(list(ranks), self._timeout, backend, use_local_synchronization=of_these_only)
            self._made[key] = _Made(group, WeakSet())
        self._made[key].users.add(self)
        return self._made[key].group


_Key = tuple[Wanted, timedelta | None]


class _Made(NamedTuple):
    """A group that was made, on processes that are not in it too if they took part, and who uses it."""

    group: dist.ProcessGroup
    users: WeakSet[Groups]


_made: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, _Made]] = WeakKeyDictionary()
"""All groups of each world."""
_times: WeakKeyDictionary[dist.ProcessGroup, Counter[_Key]] = WeakKeyDictionary()
"""How often each was made, also of those that have been destroyed."""


@dataclass(frozen=True)
class Shared:
    """What the same ranks of a pipeline hold, several of them.

    Attributes:
        ranks: The ranks, in the pipeline.
        names: Names of the parameters and buffers in the user's module.
        parameters: The parameters.
        group: The ranks' processes.
        hosts: The same for tensors on the CPU; see `Groups.hosts`.
    """

    ranks: tuple[int, ...]
    names: list[str]
    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None
    hosts: dist.ProcessGroup | None


def share(
    tensors: Mapping[str, torch.Tensor],
    holders: Mapping[str, frozenset[int]],
    group: dist.ProcessGroup | None,
    groups: Groups,
) -> list[Shared]:
    """Find what this rank of a pipeline holds together with others; a collective call of the world.

    Each set of ranks gets a process group.

    Args:
        tensors: Parameters and buffers by name, placeholders for those of others.
        holders: The ranks that hold each.
        group: The pipeline's process group.
        groups: Makes groups.
    """
    own, size = dist.get_rank(group), dist.get_world_size(group)
    sets = sorted({tuple(sorted(ranks)) for ranks in holders.values() if own in ranks and len(ranks) > 1})
    members = {ranks: tuple(global_rank(group, rank) for rank in ranks) for ranks in sets if len(ranks) < size}
    groups.together([Wanted(ranks, backend) for ranks in members.values() for backend in groups.backends])
    found = []
    for ranks in sets:  # of a buffer that several modules have, each has its own once it was moved to a device
        of_ranks = {name: tensors[name] for name, of_name in holders.items() if tuple(sorted(of_name)) == ranks}
        processes = groups.of(members[ranks]) if ranks in members else group
        found.append(
            Shared(
                ranks,
                list(of_ranks),
                [tensor for tensor in of_ranks.values() if isinstance(tensor, nn.Parameter)],
                processes,
                groups.hosts(processes),
            )
        )
    return found


def copy_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all processes of a group the values that its first one has; a collective call."""
    for tensor in tensors:
        copy_from(tensor, group)


def copy_from(tensor: torch.Tensor, group: dist.ProcessGroup | None, source: int = 0) -> None:
    """Give all processes of a group the values that one of them has; a collective call."""
    own = local(tensor.detach())
    if own.layout == torch.strided:
        value = in_memory(own)
        dist.broadcast(as_bytes(value), src=global_rank(group, source), group=group)
        if value is not own:
            own.copy_(value)
    else:  # sparse ones may have other numbers of elements
        own.copy_(tell_all(own.cpu(), group, source))
