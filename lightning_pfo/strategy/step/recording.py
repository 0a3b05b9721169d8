"""What a step logs and returns, microbatch by microbatch, on the rank of the last stage."""

from __future__ import annotations

import math
import numbers
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import shortened
from lightning_pfo.strategy.model.reach.metric_objects import is_metric
from lightning_pfo.strategy.model.reach.metrics import BY_POSITION
from lightning_pfo.strategy.parallel.groups import spread, tell_each_other
from lightning_pfo.strategy.step.batches.merging import merge_outputs
from lightning_pfo.strategy.step.batches.rules import Rules, merged_by
from lightning_pfo.strategy.step.effects.left import place_of_log, place_of_size
from lightning_pfo.strategy.step.effects.outward.noted import Call, Noted
from lightning_pfo.strategy.step.effects.outward.told import MetricPlace
from lightning_pfo.strategy.step.metrics.compat import batch_value
from lightning_pfo.strategy.step.metrics.of_batch import SaidOfBatch
from lightning_pfo.strategy.step.metrics.states import place_of
from lightning_pfo.strategy.step.metrics.totals import Totals, is_count


class Logged(NamedTuple):
    """A call of `self.log`, for a batch.

    Attributes:
        name: What is logged.
        metric: Where the module holds the metric object that was logged; None: a number was.
        has_value: Whether that has a value for the batch; one that was only updated has none.
        arguments: The other arguments of `self.log`.
        value: Its value for the batch.
    """

    name: str
    metric: MetricPlace | None
    has_value: bool
    arguments: dict[str, Any]
    value: torch.Tensor


@dataclass
class LogRecorder:
    """Collects `self.log` calls of the microbatches of one step.

    A name that a step logs twice is logged twice for the batch: Lightning says whether it may.

    Attributes:
        owner: The user's module, which holds the metric objects that are logged.
        weights: How much each microbatch counts.
        sizes: How many samples it has.
        index: The microbatch whose step runs.
        values: What was logged, by name and how often the step had logged it before, and for which microbatch.
        arguments: The other arguments of `self.log`.
        batch_sizes: What is said by `batch_size` that each microbatch stands for.
        metrics: For names under which a metric object was logged, where `owner` holds it.
        without_value: Those of them that have no value for the batch.
        said: What metrics have said of the batch.
        of_epochs: Whether a step logs on_epoch if it does not say otherwise, as all but that of training do.
    """

    owner: nn.Module
    weights: Sequence[float] = ()
    sizes: Sequence[int] = ()
    index: int = 0
    values: dict[tuple[str, int], list[tuple[int, torch.Tensor | float]]] = field(default_factory=dict)
    arguments: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    batch_sizes: dict[tuple[str, int], dict[int, int]] = field(default_factory=dict)
    metrics: dict[str, MetricPlace] = field(default_factory=dict)
    without_value: set[str] = field(default_factory=set)
    of_epochs: bool = False

    def __post_init__(self) -> None:
        self.said = SaidOfBatch()

    @property
    def size(self) -> int:
        """How many samples it has."""
        return self.sizes[self.index] if self.sizes else 1

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for `LightningModule.log`."""
        logged = value
        if is_metric(value):
            # where Lightning finds none it asks for a name, and takes any
            place = place_of(self.owner, value, anywhere=kwargs.get("metric_attribute") is not None)
            if place is None:
                raise self._refused(name, value, *args, **kwargs | {"metric_attribute": None})
            self.metrics[name] = place
            of_batch = batch_value(value)
            if of_batch is None:
                self.without_value.add(name)
            value = math.nan if of_batch is None else of_batch
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().clone()  # the step may write into it afterwards
            value = value.reshape(()) if value.dim() else value
        elif isinstance(value, numbers.Real):
            value = int(value) if isinstance(value, numbers.Integral) else float(value)
        elif isinstance(value, Noted):
            float(value)  # which raises, and names the line
        else:
            raise self._refused(name, value, *args, **kwargs)
        kwargs.update(zip(BY_POSITION, args, strict=False))
        key = (name, 0)
        while (values := self.values.get(key)) and values[-1][0] == self.index:  # a microbatch's come one by one
            key = (name, key[1] + 1)
        if kwargs.get("batch_size") is not None:
            self.batch_sizes.setdefault(key, {})[self.index] = kwargs["batch_size"]
        self.said.logs(key, logged)
        self.values.setdefault(key, []).append((self.index, value))
        self.arguments[key] = kwargs

    def _refused(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Exception:
        """What `LightningModule.log` itself raises of a value that cannot be logged."""
        try:
            if hasattr(type(self.owner), "log"):  # a plain module has the one that is here instead
                type(self.owner).log(self.owner, name, value, *args, **kwargs)  # type: ignore[attr-defined]
        except Exception as error:
            return error
        return ConfigurationError(
            f"`self.log({name}, {shortened(value)})` was called, but it takes a number, a one-element tensor or a "
            f"metric object; this is a {type(value).__name__}. Log its mean, or the parts one by one."
        )

    def logged(
        self, rules: Rules | None = None, totals: Totals | None = None, told: Sequence[Call] = ()
    ) -> list[Logged]:
        """The calls for the batch, with values over its microbatches.

        Args:
            rules: What is known of values at the same place.
            totals: Knows the counts that the step keeps.
            told: What metrics are told of the batch.
        """
        known = rules or Rules()
        return [
            Logged(
                key[0],
                self.metrics.get(key[0]),
                key[0] not in self.without_value,
                self._arguments_of(key, known),
                _whole(self._reduce(key, values, known, totals, told), values),
            )
            for key, values in self.values.items()
        ]

    def values_of(self, index: int) -> list[tuple[str, Any, int | None]]:
        """What a microbatch has logged, in order, and what it stands for."""
        return [
            (key[0], value, self.batch_sizes.get(key, {}).get(index))
            for key, values in self.values.items()
            for n, value in values
            if n == index
        ]

    def is_looked_at(self, key: tuple[str, int]) -> bool:
        """Whether the value of the batch counts: of a metric object that is logged for epochs it does not."""
        return key[0] not in self.metrics or bool(self.arguments[key].get("on_step", not self.of_epochs))

    def output(self, results: list[Any], rules: Rules | None = None, *, train: bool, batch_dim: int) -> dict[str, Any]:
        """What the step returned for the batch, from what it returned for microbatches.

        Raises:
            ConfigurationError: If a training step skips some of them.
        """
        merge = partial(merge_outputs, sizes=self.sizes, weights=self.weights, batch_dim=batch_dim, rules=rules)
        if not train:
            return {"output": merge(results)}
        skipped = [result is None for result in results]
        if all(skipped):
            return {"loss": None, "is_dict": False, "output": {}}
        if any(skipped):
            raise skips_some(sum(skipped), len(skipped))
        is_dict = isinstance(results[0], dict)
        losses = [result["loss"] if is_dict else result for result in results]
        rest = merge([{key: value for key, value in r.items() if key != "loss"} for r in results]) if is_dict else {}
        return {"loss": self.mean_loss(losses), "is_dict": is_dict, "output": rest}

    def mean_loss(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of the batch: the weighted mean of the microbatches' losses, or their sum if weights say so."""
        mean = self._mean([(index, loss.detach()) for index, loss in enumerate(losses)], is_loss=True)
        return mean.to(losses[0].dtype)

    def _arguments_of(self, key: tuple[str, int], rules: Rules) -> dict[str, Any]:
        """What is said beside the value; a `batch_size` may be counted in each microbatch, or be a constant."""
        if key not in self.batch_sizes:
            return self.arguments[key]
        said = list(self.batch_sizes[key].values())
        by_rule = merged_by(rules.of(place_of_size(*key), said[0], ask=len(said) > 1), said)
        is_constant = len(set(said)) == 1 < len(set(self.sizes))
        of_batch = by_rule[0] if by_rule is not None else said[0] if is_constant else sum(said)
        return self.arguments[key] | {"batch_size": of_batch}

    def _reduce(
        self,
        key: tuple[str, int],
        values: list[tuple[int, Any]],
        rules: Rules,
        totals: Totals | None,
        told: Sequence[Call],
    ) -> torch.Tensor:
        """The value of a batch; `reduce_fx` is for batches, so of microbatches only counts are added or compared."""
        said = self.said.value(key, len(self.sizes), told) if self.is_looked_at(key) else None
        if said is not None:
            return said.detach().to(torch.float64).reshape(())
        if totals is not None and key[0] not in self.metrics:
            total = totals(place_of_log(*key), dict(values), rules)
            if total is not None:
                return torch.as_tensor(total, dtype=torch.float64).reshape(())
        name = _reduction_in(self.arguments[key])
        found = [value for _, value in values]
        asks = all(map(is_count, found)) and any(found)
        rule = rules.of(place_of_log(*key), found[0], ask=asks)
        by_rule = merged_by(rule, found)
        if by_rule is not None and key[0] not in self.metrics:
            return torch.as_tensor(by_rule[0], dtype=torch.float64)
        counts_samples = found == list(self.sizes) and max(found) > 1
        is_setting = all(type(value) is int and value == found[0] for value in found) and not counts_samples
        if name in ("sum", "max", "min") and all(map(is_count, found)) and not is_setting:
            return cast(torch.Tensor, getattr(_stack(found), name)())
        if rule == "samples" and self.sizes:
            return self._mean(values, [float(self.sizes[index]) for index, _ in values])
        return self._mean(values, self._stands_for(key, values, rules), is_loss=rule == "weighed")

    def _stands_for(self, key: tuple[str, int], values: list[tuple[int, Any]], rules: Rules) -> list[float] | None:
        """How much each value counts, where `batch_size` says of how many others than samples it is the mean."""
        said = self.batch_sizes.get(key, {})
        if len(said) != len(values):  # of most nothing is said
            return None
        if len(set(said.values())) == 1 and rules.of(place_of_size(*key), next(iter(said.values()))) != "sum":
            return None  # it is that of all, or of each batch
        sizes = [self.sizes[index] if self.sizes else 1 for index, _ in values]
        numbers_said = [said[index] for index, _ in values]
        return [float(number) for number in numbers_said] if numbers_said != sizes else None

    def _mean(
        self, values: list[tuple[int, Any]], weights: list[float] | None = None, *, is_loss: bool = False
    ) -> torch.Tensor:
        """The weighted mean; of losses the sum, if weights say that they are to be added."""
        if weights is None:
            weights = [self.weights[index] if self.weights else 1.0 for index, _ in values]
        counted = [(weight, value) for weight, (_, value) in zip(weights, values, strict=True) if weight]
        if not counted:
            return _stack([value for _, value in values]).mean()
        stacked = _stack([value for _, value in counted])
        total = 1.0 if is_loss and self.weights else sum(weight for weight, _ in counted)
        return (stacked * stacked.new_tensor([weight / total for weight, _ in counted])).sum()


def skips_some(number: int, of: int) -> ConfigurationError:
    """What is said where a step returns None for some of its microbatches."""
    return ConfigurationError(
        f"A training step that returns None skips the batch, so it does so for all microbatches; got None for {number} "
        f"of {of}. Decide by what all of them have in common, such as batch_idx."
    )


def check_skipped(of_stages: Sequence[set[int]], on_last: Sequence[int]) -> None:
    """Check that the stages of this rank and the last one have skipped the same microbatches."""
    if any(sorted(skipped) != on_last for skipped in of_stages):
        raise ConfigurationError(
            f"A step that returns None before it calls the model skips its batch on all ranks alike; here the stages "
            f"of this rank have skipped microbatches {[sorted(skipped) for skipped in of_stages]}, and the last stage "
            f"{on_last}. Let it decide by the batch and batch_idx, not by what ranks have for themselves."
        )


def _reduction_in(arguments: Mapping[str, Any]) -> str:
    """The name of what reduces over batches, in the arguments of `self.log`."""
    how = arguments.get("reduce_fx", "mean")
    return how if isinstance(how, str) else getattr(how, "__name__", "mean")


def _stack(values: Sequence[Any]) -> torch.Tensor:
    on_device = next((value for value in values if isinstance(value, torch.Tensor)), torch.empty(0))
    if all(isinstance(value, torch.Tensor) and value.dtype == on_device.dtype for value in values):
        return torch.stack(list(values)).to(torch.float64)
    return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=on_device.device) for value in values])


def _whole(value: torch.Tensor, values: Sequence[tuple[int, Any]]) -> torch.Tensor:
    """A value as the integer that the step has logged as a tensor, of which Lightning warns."""
    are_integers = all(isinstance(each, torch.Tensor) and not each.dtype.is_floating_point for _, each in values)
    if not are_integers or value.device.type != "cpu":  # nobody waits for a device for the sake of a warning
        return value
    return value.to(torch.int64) if value.numel() == 1 and float(value) % 1 == 0 else value


# ---- what replicas log ----
#
# Lightning reduces what was logged in its order, name by name. Replicas have other batches, and steps may log by what
# these are (`if task == 0: self.log("small", ...)`): values of other names would come together, or nobody would come.


def logged_by_any(logged: Sequence[Any], device: torch.device, hosts: dist.ProcessGroup | None) -> list[Logged]:
    """What a step logs on this replica, and what it logs on others only; a collective call of the replicas.

    The latter counts nothing in a mean or a sum, and is what others have found in a maximum or a minimum.

    Args:
        logged: What was logged here.
        device: Where values are.
        hosts: The replicas, for tensors on the CPU; see `Groups.hosts`.

    Returns:
        The same names on all replicas, in one order.
    """
    mine: dict[tuple[str, int], Logged] = {}
    times = Counter[str]()
    for one in (Logged(*each) for each in logged):
        mine[one.name, times[one.name]] = one
        times[one.name] += 1
    code = zlib.crc32(repr(list(mine)).encode())
    largest, smallest = spread(torch.tensor([code, -code]), torch.maximum, hosts).tolist()
    if largest == -smallest:
        return [*mine.values()]
    everyone = tell_each_other({key: Logged(*one[:-1], one.value.detach().cpu()) for key, one in mine.items()}, hosts)
    keys = dict.fromkeys(key for of_replica in everyone for key in of_replica)
    return [mine.get(key) or _of_others([each[key] for each in everyone if key in each], device) for key in keys]


def _of_others(found: Sequence[Logged], device: torch.device) -> Logged:
    values = [float(one.value) for one in found]
    of_counts = {"sum": 0.0, "max": max(values), "min": min(values)}
    value = of_counts.get(_reduction_in(found[0].arguments), sum(values) / len(values))
    of_none = found[0].arguments | {"batch_size": 0}
    return Logged(found[0].name, found[0].metric, False, of_none, torch.tensor(value, device=device))
