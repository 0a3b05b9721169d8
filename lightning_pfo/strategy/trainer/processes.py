"""The processes of a pipeline run in Lightning's terms: launching, connecting, arranging, talking to each other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.processes import abort_process_group
from lightning_pfo.strategy.engine.executor import WAITS_IN, progress
from lightning_pfo.strategy.engine.forked import refuse_forked
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.groups import in_background, meet, tell_all
from lightning_pfo.strategy.parallel.mesh import ProcessMesh, check_mesh_sizes, make_mesh, mesh_dimensions
from lightning_pfo.strategy.parallel.reductions import reduce_in_place
from lightning_pfo.strategy.step.batches.loading import FirstRank, LoadedByFirst
from lightning_pfo.strategy.step.effects.within import (
    logs_without_replicas,
    number_in_step,
    step_meets_replicas,
    within_step,
)
from lightning_pfo.strategy.trainer.compat import (
    StrategyBase,
    connect_processes,
    default_backend,
    noted_indices,
    seed_workers,
)
from lightning_pfo.strategy.trainer.first_rank import rank_in_step
from lightning_pfo.strategy.trainer.launchers import START_METHODS, CloneLauncher, ForkLauncher, ScriptLauncher
from lightning_pfo.strategy.trainer.together import together
from lightning_pfo.strategy.watch.present import GRACE_S, check_ranks, watch_ranks
from lightning_pfo.strategy.watch.rank_watch import RankWatch
from lightning_pfo.strategy.watch.stuck import Waits

WAITS = Waits(abort_process_group, WAITS_IN, progress)
"""How a process waits for others in a run."""


class MeshStrategy(StrategyBase):
    """Base of strategies whose processes form a mesh of data-parallel, pipeline and tensor-parallel ranks.

    Args:
        data_parallel_size: Number of replicas.
        tensor_parallel_size: Number of processes that share the layers of a pipeline rank.
        mesh_order: Which processes are neighbours; see `mesh_dimensions`.
        start_method: One of `START_METHODS`.
        process_group_backend: Backend of torch.distributed; None is gloo on CPU and nccl on CUDA.
        timeout: How long a rank waits for others in a collective.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Reads and writes checkpoint files.
        precision_plugin: Set by the Trainer.

    Raises:
        ConfigurationError: If `mesh_order` or `start_method` is unknown.
    """

    _load_batches = "all"

    def __init__(
        self,
        data_parallel_size: int,
        tensor_parallel_size: int,
        mesh_order: str,
        start_method: str,
        process_group_backend: str | None,
        timeout: timedelta,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        mesh_dimensions(mesh_order)
        self._data_parallel_size = data_parallel_size
        self._tensor_parallel_size = tensor_parallel_size
        if start_method not in START_METHODS:
            raise ConfigurationError(f"start_method is one of {', '.join(START_METHODS)}; got {start_method!r}.")
        self._start_method: Any = start_method
        self._mesh_order = mesh_order
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._num_nodes = 1
        self.rank_watch: RankWatch | None = None
        self._mesh: ProcessMesh | None = None
        self._meeting: tuple[dist.ProcessGroup | None, ...] | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[super().local_rank]

    @property
    @override
    def global_rank(self) -> int:
        """The rank of this process; within a step, where it decides who writes, see `number_in_step`."""
        return number_in_step(self.mesh.replica) if within_step() else super().global_rank

    @property
    @override
    def local_rank(self) -> int:
        """The rank on its node; within a step see `rank_in_step`."""
        rank = super().local_rank
        return rank_in_step(rank, self.mesh.first_of_replica % self.num_processes) if within_step() else rank

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this is the first process; within a step, whether it runs that to its end, for the first replica."""
        return self.global_rank == 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes; set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """Backend of torch.distributed."""
        return self._process_group_backend

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning must distribute the sampler: the ranks of a pipeline read the same batches."""
        return self._data_parallel_size > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._data_parallel_size, "rank": self._replica}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # Lightning would seed workers by process, and the ranks of a pipeline augment the same batch differently
        seed_workers(dataloader, self._replica)
        dataloader = super().process_dataloader(dataloader)
        first = self._loading_rank()
        return dataloader if first is None else LoadedByFirst(dataloader, first, noted_indices)

    def _loading_rank(self) -> FirstRank | None:
        """The rank that loads batches for all of this pipeline; None: all do."""
        if self._load_batches == "all" or self.mesh.num_ranks == 1:
            return None
        group = self.mesh.groups.hosts(self.mesh.pipeline_group)
        cpu = torch.device("cpu")
        return FirstRank(
            dist.get_rank(group) == 0,
            self.meet,
            partial(tell_all, group=group),
            partial(random_state.get_state, cpu),
            partial(random_state.set_state, device=cpu),
            random_state.same_state,
        )

    @property
    def mesh(self) -> ProcessMesh:
        """How processes are arranged.

        Raises:
            RuntimeError: Before the processes are connected.
        """
        if self._mesh is None:
            raise RuntimeError("Accessing the mesh before setup_environment() is not possible; use it from setup on.")
        return self._mesh

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas: so many batches are read at a time."""
        return self._data_parallel_size

    @property
    def _replica(self) -> int:
        return self.mesh.replica if self._data_parallel_size > 1 else 0

    @override
    def make_launcher(self) -> ScriptLauncher | ForkLauncher:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            # also where it starts nothing: it limits the threads of each process to its share of the cores
            return ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        if self._start_method == "clone":
            return CloneLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        return ForkLauncher(self, self._start_method)

    def set_world_ranks(self) -> None:
        """Number the processes; called by the Trainer when it is made, as scripts ask it then who they are."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        refuse_forked("a run of the Trainer")
        check_ranks()
        super().setup_environment()
        self.set_world_ranks()  # again: what forks knows only now which process it is
        assert self.cluster_environment is not None
        check_mesh_sizes(self._data_parallel_size, self._tensor_parallel_size, self.world_size)
        backend = self._process_group_backend or default_backend(self.root_device)
        self._process_group_backend = backend
        with in_background():
            connect_processes(self.cluster_environment, backend, timeout=self._timeout)
        self.rank_watch = watch_ranks(
            self.cluster_environment.main_address,
            WAITS,
            one_node=self.num_nodes == 1,
            grace_s=min(GRACE_S, self._timeout.total_seconds()),
        )
        if self.rank_watch is not None:
            self.rank_watch.begin()
        self._meeting = None
        self._mesh = make_mesh(
            self.root_device.type,
            self._data_parallel_size,
            self._tensor_parallel_size,
            self._mesh_order,
            self._timeout,
        )

    @together
    def meet(self, what: str, votes: Sequence[bool] = (), same: int = 0) -> list[bool]:
        """Notice if other ranks of this pipeline do something else next, and vote; a collective call.

        Args:
            what: What this rank does next.
            votes: Questions, each answered with yes if any rank of any replica says so.
            same: A number that batches have in common.

        Raises:
            RanksApartError: On every rank, if ranks of this pipeline do something else.
            BatchError: On every rank, if ranks of this pipeline have another number.
        """
        if self._mesh is None or not dist.is_initialized() or within_step():
            return list(votes)
        if self._meeting is None:
            self._meeting = tuple(map(self._mesh.groups.hosts, (self._mesh.pipeline_group, None)))
        of_pipeline, of_world = self._meeting
        answers = meet(what, of_pipeline, votes, same)
        if votes and self._mesh.pipeline_group is not None:
            answers = meet("a vote of all replicas", of_world, answers)
        return answers

    @override
    @together
    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes; within a step, which the last stage alone runs to its end, for the replicas."""
        if within_step():
            if self.mesh.replica_group is not None and step_meets_replicas():
                dist.barrier(group=self.mesh.replica_group)
            return
        self.meet(f"a barrier ({name})" if name else "a barrier")
        if dist.is_initialized():
            device_ids = [self.root_device.index] if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=device_ids)

    @override
    @together
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or within_step():  # in a step all have the same
            return obj
        self.meet("a broadcast")
        message = [obj]
        dist.broadcast_object_list(message, src)
        return message[0]

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over the replicas: the ranks of a pipeline hold the same values, and in a step only the last runs on.

        As Lightning's where there is one process, a single replica gets its tensor as it is.
        """
        if group not in (None, dist.group.WORLD):
            return self._all_gather(tensor, group, sync_grads)
        replicas = None if self._mesh is None else self._mesh.replica_group
        if replicas is None:
            return tensor
        if within_step() and not step_meets_replicas():  # elsewhere it may have no value
            return torch.stack([tensor] * dist.get_world_size(replicas))
        return self._all_gather(tensor, replicas, sync_grads)

    @together
    def _all_gather(self, tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas; the ranks of a pipeline hold the same metric values."""
        if self._mesh is None or self._mesh.replica_group is None or not isinstance(tensor, Tensor):
            return tensor
        if logs_without_replicas():
            return tensor
        return self._reduce(tensor, group or self._mesh.replica_group, reduce_op)

    @together
    def _reduce(self, tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
        return reduce_in_place(tensor, group, reduce_op)

    @override
    @together
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        group = None
        if within_step():
            group = self.mesh.replica_group
            if group is None or not step_meets_replicas():
                return decision
        if not dist.is_initialized():
            return decision
        self.meet("a decision of all ranks")
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, group=group)
        return bool(votes)
