"""Predict the time of collectives and messages on a cluster: bytes divided by bandwidth, plus a latency.

All-reduce, all-gather and reduce-scatter are assumed to use ring algorithms (Thakur et al. 2005).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ppfleetx.config.mesh import EXPERT_AXES, SMALL_MESSAGE, Mesh
from ppfleetx.config.parallel_plan import AXES, ParallelPlan
from ppfleetx.planner.cards import Card

_MICRO = 1e-6
_RAMP_BYTES = 4e6
"""Size in bytes up to which the latency of a collective grows with its size (vTrain's all-reduce table)."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical nodes.

    Attributes:
        per_node: the number of cards in a node.
        network: bytes/s that a node sends over all its network interfaces; 0: ``card.network_gbps``.
        axes: the parallel axes in the order of the global rank: along the last axis, neighbors have
            consecutive ranks.
    """

    card: Card
    per_node: int = 8
    network: float = 0.0
    axes: tuple[str, ...] = AXES

    @property
    def node_bandwidth(self) -> float:
        """The bytes/s of messages between two nodes: the network's stated speed times its efficiency."""
        stated = self.network or self.card.network_gbps * 1e9 / 8
        return stated * self.card.network_efficiency

    def collective_bandwidth(self, nodes: float) -> float:
        """Return the bandwidth of a node's network, in bytes/s, in a collective over ``nodes`` nodes.

        Each doubling of ``nodes`` lengthens the transfer by the fraction ``card.collective_loss``. With 0.06
        and 4 nodes, it takes 1.12 times as long as with :attr:`node_bandwidth`.
        """
        return self.node_bandwidth / (1 + self.card.collective_loss * math.log2(max(1.0, nodes)))

    def num_nodes(self, num_cards: int) -> float:
        return max(1.0, num_cards / self.per_node)

    def straggling(self, num_cards: int) -> float:
        """Return the factor by which a step takes longer because all nodes wait for the slowest one."""
        nodes = self.num_nodes(num_cards)
        # Of n normally distributed node times, the longest is about sqrt(2 ln n) standard deviations above
        # the mean.
        return 1 + self.card.jitter * math.sqrt(2 * math.log(nodes))


@dataclass(frozen=True)
class Group:
    """How the ranks of a communication group are spread over the nodes of a cluster.

    Attributes:
        size: the number of ranks in the group.
        inside: the number of these ranks in one node.
        sharing: the number of groups along the same axis that share a node's network.
    """

    size: int
    inside: int
    sharing: int

    @property
    def leaves_node(self) -> bool:
        return self.inside < self.size


def group_of(plan: ParallelPlan, axis: str, cluster: Cluster) -> Group:
    """Return how the communication groups of a parallel axis, such as ``mp``, are spread over nodes."""
    if axis in EXPERT_AXES:
        return _expert_group(plan, axis, cluster)
    size, stride = getattr(plan, axis), 1
    for name in cluster.axes[cluster.axes.index(axis) + 1 :]:
        stride *= getattr(plan, name)
    return _group(size, stride, cluster.per_node, plan.world_size)


def _expert_group(plan: ParallelPlan, axis: str, cluster: Cluster) -> Group:
    """Return how the communication groups of an expert-parallel axis are spread over nodes.

    Experts are divided among the ranks along ``ep``, sliced along ``emp``, and replicated along ``edp``.
    """
    stride = {"emp": 1, "ep": plan.emp, "edp": plan.ep * plan.emp}[axis]
    side_by_side = plan.stage_size if plan.pp == 1 else plan.stage_size // plan.dp
    return _group(Mesh(plan).size_of(axis), stride, min(cluster.per_node, side_by_side), plan.world_size)


def _group(size: int, stride: int, per_node: int, world_size: int) -> Group:
    block = size * stride
    if size > 1 and block <= per_node < world_size and per_node % block:
        # A node does not hold a whole number of such blocks, so some blocks lie on two nodes, and the others
        # wait for them. A node has one at each end, whose ``stride`` groups share its network.
        return Group(size, -(-size // 2), min(per_node, 2 * stride))
    inside = max(1, min(size, per_node // stride))
    return Group(size, inside, max(1, per_node // inside))


def independent_groups_per_node(plan: ParallelPlan, cluster: Cluster) -> int:
    """Return the number of tensor-parallel groups on a node if they communicate at different times; otherwise
    1.

    The larger this number is, the more a step can exceed its predicted time.
    """
    # Replicas drift apart within a step if their pipelines cross nodes. Otherwise all groups communicate at
    # the same time.
    in_step = plan.mp == 1 or plan.data_size == 1 or not group_of(plan, "pp", cluster).leaves_node
    return 1 if in_step else max(1, cluster.per_node // plan.mp)


def all_reduce_seconds(num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Return the time of an all-reduce of ``num_bytes`` per rank."""
    return 2 * _one_way(num_bytes, group, cluster)


def gather_seconds(num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Return the time of an all-gather or reduce-scatter. ``num_bytes`` is the size of the whole tensor."""
    return _one_way(num_bytes, group, cluster)


def all_to_all_seconds(num_bytes: float, group: Group, cluster: Cluster, *, levels: int = 1) -> float:
    """Return the time of an all-to-all in which every rank sends ``num_bytes`` in total, evenly to all ranks.

    With ``levels`` 2, ranks exchange data between nodes and then within a node (``nn/token_dispatcher.py``).
    """
    if group.size == 1:
        return 0.0
    card = cluster.card
    nodes = group.size / group.inside
    outside = num_bytes * (group.size - group.inside) / group.size
    within = num_bytes * (group.inside - 1) / (group.size if levels == 1 else group.inside)
    seconds = within / card.link_bandwidth(group.inside) + card.link_latency_us * _MICRO
    if levels == 2:
        seconds += card.memory_seconds(2 * num_bytes)  # rows are sorted by destination between the levels
    if outside:
        messages = group.size - group.inside if levels == 1 else nodes - 1
        seconds += (
            outside * group.sharing * group.inside / cluster.collective_bandwidth(nodes)
            + messages * card.network_latency_us * _MICRO
        )
    return seconds


def expert_all_to_all_seconds(num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Return the time of an all-to-all that sends tokens to their experts.

    As in training, the all-to-all has two levels if messages between nodes are small. Ranks then exchange
    data first between nodes and then within a node, which needs fewer messages.
    """
    has_two = group.leaves_node and group.inside > 1 and group.size % group.inside == 0
    levels = 2 if has_two and num_bytes / group.size < SMALL_MESSAGE else 1
    return all_to_all_seconds(num_bytes, group, cluster, levels=levels)


def message_seconds(num_bytes: float, plan: ParallelPlan, cluster: Cluster) -> float:
    """Return the time for one rank to send an activation of ``num_bytes`` to the next pipeline stage."""
    group, card = group_of(plan, "pp", cluster), cluster.card
    if not group.leaves_node:
        return num_bytes / card.link_bandwidth(2) + card.link_latency_us / 2 * _MICRO
    # The ranks of a node send at the same time.
    return num_bytes * group.sharing / cluster.node_bandwidth + card.network_latency_us * _MICRO


def _one_way(num_bytes: float, group: Group, cluster: Cluster) -> float:
    if group.size == 1:
        return 0.0
    card, share = cluster.card, (group.size - 1) / group.size
    ramp = min(1.0, num_bytes / _RAMP_BYTES)
    latency = card.link_latency_us * (0.5 + 0.75 * ramp) * _MICRO
    if not group.leaves_node:
        return share * num_bytes / card.link_bandwidth(group.size) + latency
    nodes = group.size / group.inside
    per_group = cluster.collective_bandwidth(nodes) / group.sharing
    return share * num_bytes / per_group + latency + nodes * card.network_latency_us * _MICRO
