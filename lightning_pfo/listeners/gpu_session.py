"""One GPU of one pipeline rank, shared by the callbacks that use it."""

from __future__ import annotations

import logging
import os
from weakref import WeakKeyDictionary

import torch

from lightning_pfo.core.errors import ConfigurationError, DeviceError, PfoError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.device import ClockController, EmulatedGpu, Gpu, GpuConfig, load_gpu_config, open_gpu
from lightning_pfo.device.emulated.cluster import ClusterConfig, load_cluster_config
from lightning_pfo.device.safety.others import our_job
from lightning_pfo.device.safety.process_id import ProcessId, this_process
from lightning_pfo.listeners.agreement import check_together, first_problem, is_first
from lightning_pfo.listeners.device_follower import DeviceFollower, cuda_device_index, no_mark, record_mark
from lightning_pfo.listeners.emulated.emulation import EmulationListener

logger = logging.getLogger(__name__)

GpuChoice = str | GpuConfig | Gpu
"""A name such as `auto`, `nvml` or `emulated_a40`, a configuration, or an open GPU."""

ClusterChoice = str | ClusterConfig
"""How emulated GPUs are connected: a name of conf/cluster such as `nvlink` or `ideal`, or a configuration."""

DEFAULT_CLUSTER = "nvlink"

_sessions: WeakKeyDictionary[InstructionSource, GpuSession] = WeakKeyDictionary()


class GpuSession:
    """An open GPU with its clock controller; emulated GPUs are attached to the pipeline's instructions.

    Attributes:
        config: Its settings; the defaults for a GPU that was given open.
        gpu: The GPU of this rank.
        clocks: Sets its clocks off the training thread, and restores them.
        follower: Does things when the GPU gets to them.
    """

    def __init__(self, source: InstructionSource, choice: GpuChoice, num_gpus: int, cluster: ClusterChoice) -> None:
        self.config = _config_of(choice)
        index = source.local_device_index
        if self.config.kind != "emulated":
            trained_on = cuda_device_index()  # need not be the rank's number: Trainer(devices=[2, 3])
            index = index if trained_on is None else trained_on
        self.gpu = open_gpu(choice, index, num_gpus=num_gpus)
        self.clocks = ClockController(self.gpu, is_quiet=source.local_device_index > 0)
        # without the follower nobody would raise a low clock again
        self.follower = DeviceFollower(no_mark if self.gpu.is_emulated else record_mark, on_failure=self.clocks.end)
        self._source = source
        self._choice, self._cluster = choice, cluster
        self._users: list[object] = []
        self._clock_owner: object | None = None
        self._emulation: EmulationListener | None = None
        if isinstance(self.gpu, EmulatedGpu):
            links = load_cluster_config(cluster) if isinstance(cluster, str) else cluster
            self._emulation = EmulationListener(self.gpu, source, links)
            self._emulation.attach()

    @property
    def ready(self) -> bool:
        """Whether measurements mean something: an emulated GPU spends the first iteration counting work."""
        return self._emulation is None or self._emulation.ready

    def release(self, user: object) -> None:
        """Say that `user` is done. After the last one the clocks are restored and the GPU is closed."""
        if user not in self._users:
            return
        self._users.remove(user)
        if self._clock_owner is user:
            self._clock_owner = None
        if self._users:
            return
        _sessions.pop(self._source, None)
        self.follower.close()
        self.clocks.close()
        if self._emulation is not None:
            self._emulation.detach()
        try:
            self.gpu.close()
        except DeviceError as error:  # the training is over, and its result is worth more
            logger.error(
                "%s was not released: %s The watchdog tries again when this process ends; after that: "
                "lightning-pfo restore-clocks.",
                self.gpu.name,
                error,
            )

    def own_clocks(self, user: object, *, is_quiet: bool = False) -> None:
        """Claim the right to set clocks, against other callbacks and other jobs; a collective call.

        Where any rank's GPU cannot be claimed, because another job sets its clocks or computes on it say, no rank sets
        clocks: `clocks.error` says why, and the first rank warns. Training goes on.

        Args:
            user: The callback.
            is_quiet: It tells itself why clocks are not set.

        Raises:
            ConfigurationError: If another callback sets them; on every rank, if CUDA trains on another GPU.
        """
        if self._clock_owner not in (None, user):
            raise ConfigurationError(
                f"One callback sets the clocks of a GPU at a time; {type(self._clock_owner).__name__} does already, "
                f"and {type(user).__name__} wants to. Use them in two runs: profile first, then apply a plan."
            )
        check_together(self._source, lambda: check_same_gpu(self.gpu))
        self._clock_owner = user
        self.clocks.is_quiet = is_quiet or self.clocks.is_quiet
        self._note_our_job()
        found = first_problem(self._source, self._claim_clocks())
        if found is not None:
            self._do_without_clocks(*found, is_quiet=is_quiet)
            return
        # On the main thread, as on CUDA requests come from the follower's; and late enough to be installed over
        # Lightning's own SIGTERM handler, which waits for other ranks before it calls the handlers it replaced.
        self.clocks.guard()

    def _note_our_job(self) -> None:
        """The other ranks on this machine may compute on this GPU too."""
        here = this_process()
        ranks: list[ProcessId] = self._source.all_gather(here, everywhere=True)
        our_job.update(rank.pid for rank in ranks if (rank.boot_id, rank.namespace) == (here.boot_id, here.namespace))

    def _claim_clocks(self) -> DeviceError | None:
        try:
            self.gpu.claim_clocks()
        except DeviceError as error:
            return error
        return None

    def _do_without_clocks(self, where: str, problem: PfoError, *, is_quiet: bool) -> None:
        try:
            self.gpu.restore()  # gives up a claim of ours; nothing was changed
        except DeviceError as error:
            logger.warning("The claim of %s could not be given up: %s", self.gpu.name, error)
        self.clocks.refuse(problem)
        if is_first(self._source) and not is_quiet:
            logger.warning("Training goes on without clock control on all ranks, as %s meets: %s", where, problem)


def open_session(
    source: InstructionSource,
    choice: GpuChoice,
    user: object,
    *,
    num_gpus: int,
    cluster: ClusterChoice = DEFAULT_CLUSTER,
) -> GpuSession:
    """Open the GPU of this rank, or join the callbacks that opened it before.

    Args:
        source: The pipeline rank.
        choice: Which GPU.
        user: The callback; it calls `release` when it is done.
        num_gpus: How many ranks of this node open a GPU.
        cluster: How GPUs are connected, if they are emulated.

    Raises:
        ConfigurationError: If another callback opened a different GPU for this rank, or a choice is impossible.
    """
    session = _sessions.get(source)
    if session is None:
        session = _sessions[source] = GpuSession(source, choice, num_gpus, cluster)
    for name, mine, others in (("gpu", choice, session._choice), ("cluster", cluster, session._cluster)):
        if mine != others:
            raise ConfigurationError(
                f"All callbacks of a run use the same {name}; {type(user).__name__} has {name}={mine!r}, another "
                f"callback {name}={others!r}. Pass the same {name}= to both."
            )
    session._users.append(user)
    return session


def check_same_gpu(gpu: Gpu) -> None:
    """Check that CUDA computes on this GPU, before anybody sets the clocks of another one.

    Raises:
        ConfigurationError: If CUDA counts GPUs in another order; the message says how to change that.
    """
    index = cuda_device_index()
    if index is None or getattr(gpu, "is_split", False):  # an instance has a UUID of its own
        return
    ours = getattr(gpu, "uuid", "")
    cudas = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    if ours.startswith("GPU-") and cudas and ours.removeprefix("GPU-") != cudas.removeprefix("GPU-"):
        raise ConfigurationError(
            f"Clocks are set on the GPU that trains; index {index} is GPU {cudas} for CUDA, but {ours} for the driver, "
            "which counts in PCI order. Set CUDA_DEVICE_ORDER=PCI_BUS_ID."
        )


def ranks_on_this_node(source: InstructionSource) -> int:
    """How many pipeline ranks run on this node: as torchrun says, else all of them; a collective call."""
    num_ranks = len(source.all_gather(None, everywhere=True))
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))


def _config_of(choice: GpuChoice) -> GpuConfig:
    if isinstance(choice, str):
        return load_gpu_config(choice)
    return choice if isinstance(choice, GpuConfig) else GpuConfig()
