"""Sharing what came of a step: the last stage knows, every rank needs it, and an error of any stage is everybody's.

One all-reduce per step carries all numbers, which stay on the device; what numbers and tensors belong to (names,
arguments of `self.log`, containers) is sent only when it changes, and tensors are sent as they are. The all-reduce is
also where devices wait for the slowest, so that an iteration ends at the same time everywhere. Whether something
changed, or the step failed, is agreed between the hosts: they need not wait for their devices, which may be far behind.
Where the device is the host, the numbers go with that.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.parallel.groups import RanksApartError, as_bytes, global_rank, spread, tell_each_other
from lightning_pfo.strategy.step.effects.parcel import Parcel, forms_of, pack, unpack

_LARGEST_ERROR_BYTES = 2**16


class StepFailedError(PfoError, RuntimeError):
    """The user's step raised an error on another rank."""


RULE_OF_TEXTS = (
    "Or the step walks over a set of texts (for kind in set(kinds)), which each process does in an order of its own: "
    "walk over sorted(kinds) or dict.fromkeys(kinds), or start all with the environment variable PYTHONHASHSEED=0."
)
"""Why ranks may come to something else, for messages."""
_APART = (
    "The ranks of a pipeline divide a step alike, but here they do not, and would wait for each other. What calls "
    "layers in threads of its own (ThreadPoolExecutor) cannot be followed: call them one after the other. Else please "
    "report this step; with partition='custom:...' it is divided at other layers."
)


class ValueExchange:
    """Sends what came of a step from the rank of the last stage to all; one object for each kind of step.

    Args:
        device: Where shared numbers live.
        group: The pipeline's process group.
        hosts: A group of the same processes for tensors on the CPU; see `Groups.hosts`.
        last_rank: The rank of the last stage.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None,
        hosts: dist.ProcessGroup | None,
        last_rank: int,
    ) -> None:
        self._device = device
        self._group = group
        self._hosts = hosts
        self._last_rank = last_rank
        self._is_last = dist.get_rank(group) == last_rank
        self._is_alone = dist.get_world_size(group) == 1
        self._known: tuple[bytes, int, list[Any]] = (b"", 0, [])

    def share(self, value: Any, error: BaseException | None = None) -> Any:
        """Exchange what came of one step; a collective call.

        Args:
            value: On the rank of the last stage what came of it; of others nobody looks at it.
            error: What went wrong on this rank.

        Returns:
            The same on every rank, detached.

        Raises:
            BaseException: The error of this rank, if it was the first to fail or all fail alike; else the first one's
                error, caused by a `StepFailedError` that quotes it, or that alone if the error cannot be sent.
            RanksApartError: If all take another rank for the one that has it.
        """
        if self._is_alone:  # nothing need be sent: objects stay what they are
            if error is not None:
                raise error
            return tree_map_only(torch.Tensor, torch.Tensor.detach, value)
        parcel = Parcel(b"")
        if self._is_last and error is None:
            try:
                parcel = pack(value, self._device)
            except Exception as failed:
                error = failed
        outline, count, forms = self._known
        is_new = error is not None or (self._is_last and parcel.outline != outline)
        # float64 holds losses and counts exactly
        numbers = torch.zeros(count, dtype=torch.float64, device=self._device)
        if parcel.numbers and not is_new:
            numbers = self._stacked(parcel)
        said = torch.tensor([is_new, self._is_last], dtype=torch.float64)
        if self._device.type == "cpu":
            said, numbers = spread(torch.cat([said, numbers]), _known_to_both, self._hosts).tensor_split([2])
        else:
            said = spread(said, torch.maximum, self._hosts)
        if said[0]:
            return self._share_anew(parcel, error)
        if not said[1]:
            raise RanksApartError(_APART)
        if self._device.type != "cpu":
            dist.all_reduce(numbers, group=self._group)
        return unpack(outline, numbers, self._share_tensors(parcel, forms), self._device)

    def send_to_first(self, value: Any) -> Any:
        """Send a value from the rank of the last stage to the first rank, which returns it; others return None."""
        rank, last = dist.get_rank(self._group), global_rank(self._group, self._last_rank)
        if self._last_rank == 0 or rank not in (0, self._last_rank):
            return value
        if rank == 0:
            message: list[Any] = [None]
            dist.recv_object_list(message, src=last, group=self._hosts)
            forms = forms_of(message[0])[1]
            tensors = [torch.empty(form.shape, dtype=form.dtype) for form in forms]
            for data in map(as_bytes, tensors):
                dist.recv(data, src=last, group=self._hosts)
            return unpack(message[0], torch.empty(0), tensors, self._device)
        parcel = pack(value, None)
        first = global_rank(self._group, 0)
        dist.send_object_list([parcel.outline], dst=first, group=self._hosts)
        for data in map(as_bytes, parcel.tensors):
            dist.send(data.cpu(), dst=first, group=self._hosts)
        return None

    def _stacked(self, parcel: Parcel) -> torch.Tensor:
        return torch.stack([torch.as_tensor(n, dtype=torch.float64).to(self._device) for n in parcel.numbers])

    def _share_tensors(self, parcel: Parcel, forms: list[Any]) -> list[torch.Tensor]:
        tensors = [tensor.to(self._device) for tensor in parcel.tensors]
        if not self._is_last:
            tensors = [torch.empty(form.shape, dtype=form.dtype, device=self._device) for form in forms]
        for data in map(as_bytes, tensors):
            dist.broadcast(data, src=global_rank(self._group, self._last_rank), group=self._group)
        return tensors

    def _share_anew(self, parcel: Parcel, error: BaseException | None) -> Any:
        found = tell_each_other((_told(error), parcel.outline), self._hosts)
        _raise_first([told for told, _ in found], error, self._group, self._last_rank)
        outline = found[self._last_rank][1]
        self._known = (outline, *forms_of(outline))
        _, count, forms = self._known
        numbers = torch.zeros(count, dtype=torch.float64, device=self._device)
        if parcel.numbers:
            numbers = self._stacked(parcel)
        if count:
            dist.broadcast(numbers, src=global_rank(self._group, self._last_rank), group=self._group)
        return unpack(outline, numbers, self._share_tensors(parcel, forms), self._device)


def _sendable(error: BaseException | None) -> bytes:
    """An error for other ranks; nothing where it cannot be sent, or holds much."""
    try:
        data = pickle.dumps(error)
        is_same = type(pickle.loads(data)) is type(error)
    except Exception:  # classes do what they like there
        return b""
    return data if is_same and error is not None and len(data) <= _LARGEST_ERROR_BYTES else b""


def share_error(error: BaseException | None, hosts: dist.ProcessGroup | None, what: str = "The step") -> None:
    """Raise an error of any process of a group in all of them; a collective call.

    Args:
        error: That of this process.
        hosts: The processes; see `Groups.hosts`.
        what: What may have failed, for people.

    Raises:
        BaseException: As by `ValueExchange.share`.
    """
    if spread(torch.tensor([error is not None], dtype=torch.uint8), torch.maximum, hosts)[0]:
        _raise_first(tell_each_other(_told(error), hosts), error, hosts, what=what)


class Prints(NamedTuple):
    """Numbers that are others where ranks have divided a step otherwise.

    Attributes:
        by_label: Which values stages send, by their numbers in the order of the step.
        by_order: What these are made of, in that order, and what stages compute.
        by_content: The same, in whatever order.
    """

    by_label: int = 0
    by_order: int = 0
    by_content: int = 0


ALIKE = Prints()
"""Where nothing is divided."""


def agree_on_trace(
    error: BaseException | None,
    failure: BaseException | None,
    prints: Prints = ALIKE,
    *,
    hosts: dist.ProcessGroup | None,
) -> bool:
    """What goes wrong with a trace on any rank is everybody's; a collective call.

    A step that fails in the trace of all ranks may do so because of what traces are made of, and run. If it fails on
    some only, that is the step's own error there.

    Args:
        error: What was raised on this rank.
        failure: What the traced step has raised, which need not be an error.
        prints: How this rank divides the step.
        hosts: The processes; see `Groups.hosts`.

    Returns:
        Whether ranks do the same in other orders, so that values are to be sent in the order of their contents.

    Raises:
        BaseException: As by `ValueExchange.share`.
        RanksApartError: If ranks divide it differently.
    """
    others = (*prints, hash(RULE_OF_TEXTS) >> 1)
    said = [error is not None, failure is not None, failure is None, *others, *(-each for each in others)]
    any_error, any_failed, any_ran, *found = spread(torch.tensor(said), torch.maximum, hosts).tolist()
    if any_failed and any_ran:
        _raise_first(tell_each_other(_told(failure), hosts), failure, hosts)
    if any_error:
        _raise_first(tell_each_other(_told(error), hosts), error, hosts)
    by_label, by_order, by_content, by_hash = (most == -least for most, least in zip(found[:4], found[4:], strict=True))
    if by_label and by_order:
        return False
    if by_content:
        return True
    if not by_label:  # they would wait for each other
        raise RanksApartError(_APART if by_hash else f"{_APART} {RULE_OF_TEXTS}")
    return False


def _told(error: BaseException | None) -> tuple[str, str, bytes]:
    """What others are told of an error: its class and text, where it was raised, and itself if it can be sent."""
    if error is None:
        return "", "", b""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text, "".join(traceback.format_exception(error)), _sendable(error)


def _raise_first(
    everyone: Sequence[tuple[str, str, bytes]],
    error: BaseException | None,
    group: dist.ProcessGroup | None,
    last_rank: int | None = None,
    what: str = "The step",
) -> None:
    """Raise the first error that processes of a group tell of, if there is one; that of this process is itself."""
    first = next((rank for rank, (text, *_) in enumerate(everyone) if text), None)
    if first is None:
        return
    text, quoted, sent = everyone[first]
    if error is not None and text == _told(error)[0]:
        raise error
    where = ", which runs the last stage" if first == last_rank else ""
    failed = StepFailedError(f"{what} failed on rank {global_rank(group, first)}{where}:\n{quoted}")
    if sent:  # so that what catches errors does so on every rank
        raise pickle.loads(sent) from failed
    raise failed


def _known_to_both(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether something is new, whether it comes from the last rank, and the numbers if it does."""
    both = (other if other[1] else one).clone()
    both[0] = max(one[0], other[0])
    return both
