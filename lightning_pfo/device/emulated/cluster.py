"""How emulated GPUs are connected, and what else takes time between iterations. The schema of `conf/cluster`.

::

    F of stage 0 |====|                       |====|            the sender computes on
                       ~ latency + bytes / bandwidth ~~|
    F of stage 1                                       |====|   blocked until it has arrived

Transfers do not share a link's bandwidth, and neither side's computing is slowed by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_pfo.core.ranges import check_above, check_between
from lightning_pfo.device.conf_files import known_options, load_option


@dataclass
class ClusterConfig:
    """The machines around emulated GPUs in virtual time. Real GPUs, and real time, have links of their own."""

    gpus_per_node: int = 8
    """Ranks on one node (>= 1); those of other nodes are reached over the network."""

    node_latency_s: float = 5e-6
    """What a transfer inside a node takes before the first byte, s (>= 0)."""

    node_bandwidth_gb_s: float = 250.0
    """Bandwidth inside a node, GB/s (> 0; .inf: bytes take no time)."""

    network_latency_s: float = 1e-5
    """What a transfer between nodes takes before the first byte, s (>= 0)."""

    network_bandwidth_gb_s: float = 25.0
    """Bandwidth between two GPUs of different nodes, GB/s (> 0; .inf: bytes take no time)."""

    activation_mb: float = 50.0
    """How large the largest activation of a microbatch that a stage sends is taken to be, MB (>= 0); what else is sent
    is scaled alike."""

    gradient_mb: float = 1000.0
    """How large the gradients of a GPU are that replicas add up after an iteration, MB (>= 0)."""

    optimizer_s: float = 0.0
    """Time of the optimizer's step between two iterations, s (>= 0)."""

    data_s: float = 0.0
    """Time that the next batch is waited for between two iterations, s (>= 0)."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigurationError: Naming the field, its range and the value received.
        """
        check_between("cluster.gpus_per_node", self.gpus_per_node, 1)
        for name in ("node_latency_s", "network_latency_s", "activation_mb", "gradient_mb", "optimizer_s", "data_s"):
            check_between(f"cluster.{name}", getattr(self, name), 0)
        for name in ("node_bandwidth_gb_s", "network_bandwidth_gb_s"):
            if getattr(self, name) != math.inf:
                check_above(f"cluster.{name}", getattr(self, name), 0)

    def transfer_s(self, num_bytes: float, source: int, destination: int) -> float:
        """How long a transfer takes.

        Args:
            num_bytes: Its size.
            source: Number of the sending process in the whole job.
            destination: Number of the receiving one.
        """
        if source // self.gpus_per_node == destination // self.gpus_per_node:
            return self.node_latency_s + num_bytes / self.node_bandwidth_gb_s / 1e9
        return self.network_latency_s + num_bytes / self.network_bandwidth_gb_s / 1e9

    def all_reduce_s(self, replicas: list[int]) -> float:
        """How long some processes take to add up their gradients around a ring, whose slowest link decides.

        Each of n processes sends 2 (n - 1) parts of 1/n of the gradients (Patarasuk and Yuan, Bandwidth optimal
        all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009).
        """
        if len(replicas) < 2:
            return 0.0
        part = self.gradient_mb * 1e6 / len(replicas)
        links = zip(replicas, replicas[1:] + replicas[:1], strict=True)
        return 2 * (len(replicas) - 1) * max(self.transfer_s(part, *link) for link in links)


def known_cluster_configs() -> list[str]:
    """Names of the files in conf/cluster: what `cluster=` accepts."""
    return known_options("cluster")


def load_cluster_config(name: str) -> ClusterConfig:
    """Read conf/cluster/NAME.yaml.

    Raises:
        ConfigurationError: If there is no such file (the message lists those there are), or a key or value is wrong.
    """
    return load_option("cluster", name, ClusterConfig)
