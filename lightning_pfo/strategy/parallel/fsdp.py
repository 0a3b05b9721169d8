"""Layers whose parameters, gradients and optimizer states are divided over the replicas (FSDP2).

Layers keep their names, so optimizers and checkpoints see nothing of it; FSDP2 hooks into a module around each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.compat.processes import OLDEST_FSDP, finish_backward
from lightning_pfo.strategy.parallel.holder import Holder

_SHARDED = "_pfo_sharded"
_share_buffers = getattr(fsdp, "share_comm_ctx", None)
LETS_GO_EARLY = _share_buffers is not None
"""Whether a layer's gradients, once exchanged, are let go of before the backward ends; older torch keeps them.

FSDP2 does so among the parts of one root, but each layer is a root here.
"""


@dataclass(frozen=True)
class Sharding:
    """How layers are divided over replicas.

    Attributes:
        mesh: The replicas; of two dimensions, those along the first hold copies of what those along the second divide.
        zero_stage: What is divided while an iteration runs, in the words of ZeRO: the states of optimizers (1), the
            sums of gradients too, which takes an exchange for each microbatch (2), and weights too, which are gathered
            for each forward and each backward (3).
        precision: Types of gathered weights and exchanged gradients; None: those of the parameters.
        offload: Whether what is divided is in the host's memory.
    """

    mesh: DeviceMesh
    zero_stage: int = 1
    precision: MixedPrecisionPolicy | None = None
    offload: bool = False


def check_shard_offload(shard_offload: bool, fully_shard: bool) -> None:
    """Check that something is divided that can be kept in the host's memory.

    Raises:
        ConfigurationError: If not.
    """
    if shard_offload and not fully_shard:
        raise ConfigurationError(
            "shard_offload=True keeps in the host's memory what fully_shard divides; got fully_shard=False. Use "
            "fully_shard='zero3', or leave shard_offload out."
        )


def check_shardable(sharding: Sharding, schedule: PipelineSchedule) -> None:
    """Check that a schedule can run divided layers.

    Raises:
        ConfigurationError: If it computes weight gradients on their own, and weights or gradients are exchanged for
            each microbatch: that is done with the gradients of inputs, when those of weights are not there yet.
    """
    splits = any(inst.type == InstructionType.WEIGHT_GRADIENT for order in schedule.orders for inst in order)
    if splits and sharding.zero_stage > 1:
        raise ConfigurationError(
            f"schedule={schedule.name!r} computes the gradients of weights after those of inputs, but "
            f"fully_shard='zero{sharding.zero_stage}' exchanges gradients with those of inputs. Use "
            f"fully_shard='zero1', or schedule='1f1b' or 'interleaved_1f1b'."
        )


class ShardedLayers:
    """Layers of a rank that are divided, and stay so.

    Args:
        layers: The layers of a rank.
        sharding: How they are divided.
        kept_whole: Parameters that are not divided.

    Attributes:
        holders: What is to be called in place of the `forward` of a divided layer.

    Raises:
        ConfigurationError: If the installed torch cannot.
    """

    def __init__(self, layers: Iterable[nn.Module], sharding: Sharding, kept_whole: Iterable[nn.Parameter]) -> None:
        _check_torch(sharding.mesh.device_type)
        ignored = set(kept_whole)
        is_pinned = sharding.mesh.device_type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=is_pinned) if sharding.offload else OffloadPolicy()
        self._stage = sharding.zero_stage
        self._has_begun = False
        self.holders: dict[nn.Module, Holder] = {}
        for layer in dict.fromkeys(layers):
            if layer.__dict__.get(_SHARDED) is None and not ignored.issuperset(layer.parameters()):
                holder = Holder(layer, layer.forward)
                fully_shard(
                    holder,
                    mesh=sharding.mesh,
                    mp_policy=as_traced(sharding.precision),
                    offload_policy=offload,
                    ignored_params=ignored,
                )
                layer.__dict__[_SHARDED] = holder
            if _SHARDED in layer.__dict__:
                self.holders[layer] = layer.__dict__[_SHARDED]
        for divided in self._divided():
            divided.set_reshard_after_forward(self._stage == 3)

    def begin(self) -> None:
        """An iteration with backwards begins."""
        if not self._has_begun:
            self._has_begun = True
            self._use_same_buffers()
        for layer in self._divided():
            _exchange_gradients(layer, enabled=self._stage > 1, reshard=self._stage == 3)

    def _use_same_buffers(self) -> None:
        layers = list(self._divided())
        if _share_buffers is None or not layers:
            return
        for layer in layers:
            layer.unshard()  # makes buffers of its own, which it would do later otherwise
            layer.reshard()
            # by the order of forwards, which are of other microbatches, the wrong layers would be gathered ahead
            layer.set_modules_to_backward_prefetch([layer])
        _share_buffers(layers)

    def end(self) -> None:
        """Its backwards are over: average the gradients over the replicas, and let go of gathered parameters.

        FSDP2 does so in the hooks of the last backward. The last backward of a schedule may be one of weights only,
        which runs no hooks, so they are called here, as torch's own pipeline stages do.
        """
        for layer in self._divided():
            _exchange_gradients(layer, enabled=True, reshard=True)
            if self._stage == 1:
                finish_backward(layer)
        self.release()

    def release(self) -> None:
        """Let go of gathered parameters, which would be out of date after the next optimizer step."""
        for layer in self._divided():
            layer.reshard()

    def _divided(self) -> Iterator[FSDPModule]:
        for holder in self.holders.values():
            assert isinstance(holder, FSDPModule)
            yield holder


def holders_of(module: nn.Module) -> list[nn.Module]:
    """What FSDP2 hooks into, of all divided layers of a module."""
    return [found for each in module.modules() if (found := each.__dict__.get(_SHARDED)) is not None]


def as_traced(precision: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """A policy under which layers return what they return in the trace, where nothing is divided."""
    if precision is None or precision.output_dtype is not None:
        return precision or MixedPrecisionPolicy()
    return replace(precision, output_dtype=torch.get_default_dtype())


def _exchange_gradients(layer: FSDPModule, *, enabled: bool, reshard: bool) -> None:
    layer.set_is_last_backward(enabled)
    layer.set_reshard_after_backward(reshard)
    layer.set_requires_gradient_sync(enabled)


def _check_torch(device_type: str) -> None:
    oldest = OLDEST_FSDP.get(device_type, "2.7")
    if torch.__version__ < oldest:
        raise ConfigurationError(
            f"fully_shard=True takes torch {oldest} or newer where the accelerator is {device_type!r}; got "
            f"{torch.__version__}. Use a newer torch, or fully_shard=False."
        )


def check_not_sharded(model: nn.Module) -> None:
    """Check that the user has not applied FSDP2, whose hooks would run outside the stages.

    Raises:
        ConfigurationError: If so.
    """
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and _SHARDED not in module.__dict__:
            raise ConfigurationError(
                f"fully_shard was applied to {name or type(model).__name__!r}, but on a pipeline it is applied to the "
                f"layers of each stage. Leave it out of configure_model and use PfoPipelineStrategy(fully_shard=True)."
            )
