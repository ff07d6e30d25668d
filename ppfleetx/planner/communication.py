"""The time of collectives and messages on the links of a cluster: bytes over bandwidth, plus a latency.

A collective of n ranks moves (n - 1) / n of its bytes over every link, as a ring does (Thakur et al. 2005);
an all-reduce does so twice. Ranks within a node use the node's links. Ranks on different nodes use the
network, which all communicating ranks of a node share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ppfleetx.config.mesh import SMALL_MESSAGE, Mesh
from ppfleetx.config.plan import AXES, ParallelPlan
from ppfleetx.planner.cards import Card

_MICRO = 1e-6
_RAMP_BYTES = 4e6
"""Bytes above which a collective within a node runs at the full speed of the links (vTrain's all-reduce
table)."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical nodes of cards.

    Attributes:
        card: the cards in the nodes.
        per_node: the number of cards in a node.
        network: bytes/s that a node sends over all its interfaces; 0: the value in the card's description.
        axes: the order in which ranks are numbered, the fastest changing axis last: fleet's order or, for
            published runs of another program, that program's.
    """

    card: Card
    per_node: int = 8
    network: float = 0.0
    axes: tuple[str, ...] = AXES

    @property
    def node_bandwidth(self) -> float:
        """Bytes/s that a message between two ranks reaches on a node's network."""
        stated = self.network or self.card.network_gbps * 1e9 / 8
        return stated * self.card.network_efficiency

    def collective_bandwidth(self, nodes: float) -> float:
        """Bytes/s that a collective over ``nodes`` nodes reaches on a node's network. Every doubling of the
        nodes adds the share ``card.collective_loss`` to the time.
        """
        return self.node_bandwidth / (1 + self.card.collective_loss * math.log2(max(1.0, nodes)))

    def straggling(self, num_cards: int) -> float:
        """The factor by which a step takes longer because all nodes wait for the slowest one. The expected
        maximum of n normal deviates is about sqrt(2 ln n) standard deviations (``card.jitter``).
        """
        nodes = max(1.0, num_cards / self.per_node)
        return 1 + self.card.jitter * math.sqrt(2 * math.log(nodes))


@dataclass(frozen=True)
class Group:
    """The layout of a communication group over nodes.

    Attributes:
        size: the number of ranks in the group.
        inside: the number of the group's ranks in one node.
        sharing: the number of groups of the same axis that share a node's network.
    """

    size: int
    inside: int
    sharing: int

    @property
    def leaves_node(self) -> bool:
        return self.inside < self.size


def group_of(plan: ParallelPlan, axis: str, cluster: Cluster) -> Group:
    """The layout of the groups of ``axis`` over the nodes of ``cluster``."""
    if axis in ("ep", "emp", "edp"):
        return _expert_group(plan, axis, cluster)
    size, stride = getattr(plan, axis), 1
    for name in cluster.axes[cluster.axes.index(axis) + 1 :]:
        stride *= getattr(plan, name)
    return _group(size, stride, cluster.per_node)


def _expert_group(plan: ParallelPlan, axis: str, cluster: Cluster) -> Group:
    """:func:`group_of` for the axes of experts, which divide the ranks of a pipeline stage in order."""
    stride = {"emp": 1, "ep": plan.emp, "edp": plan.ep * plan.emp}[axis]
    side_by_side = plan.stage_size if plan.pp == 1 else plan.stage_size // plan.dp
    return _group(Mesh(plan).size_of(axis), stride, min(cluster.per_node, side_by_side))


def _group(size: int, stride: int, per_node: int) -> Group:
    inside = max(1, min(size, per_node // stride))
    return Group(size, inside, max(1, per_node // inside))


def rival_groups(plan: ParallelPlan, cluster: Cluster) -> int:
    """The number of tensor-parallel groups of a node that use the network at different times, because they
    belong to different replicas whose pipelines cross nodes; 1 if all groups run in step.
    """
    in_step = plan.mp == 1 or plan.data_size == 1 or not group_of(plan, "pp", cluster).leaves_node
    return 1 if in_step else max(1, cluster.per_node // plan.mp)


def all_reduce_seconds(num_bytes: float, group: Group, cluster: Cluster) -> float:
    """The time of an all-reduce of ``num_bytes`` per rank over ``group``."""
    return 2 * _one_way(num_bytes, group, cluster)


def gather_seconds(num_bytes: float, group: Group, cluster: Cluster) -> float:
    """The time of an all-gather with a result of ``num_bytes``, or of a reduce-scatter with an input of
    ``num_bytes``.

    Sharding's reduction of gradients to their owners, and its broadcast of parameters, take as long.
    """
    return _one_way(num_bytes, group, cluster)


def all_to_all_seconds(num_bytes: float, group: Group, cluster: Cluster, *, levels: int = 1) -> float:
    """The time for every rank to exchange ``num_bytes`` evenly with all others.

    Args:
        levels: 2: the rows for a node are sent in one message and distributed within the node
            (``nn/expert_exchange.py``), so that fewer messages leave the node with as many bytes.
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
    """:func:`all_to_all_seconds` with the number of levels that the engine would choose."""
    has_two = group.leaves_node and group.inside > 1 and group.size % group.inside == 0
    levels = 2 if has_two and num_bytes / group.size < SMALL_MESSAGE else 1
    return all_to_all_seconds(num_bytes, group, cluster, levels=levels)


def message_seconds(num_bytes: float, plan: ParallelPlan, cluster: Cluster) -> float:
    """The time for one rank to send an activation to the next pipeline stage.

    All ranks of a stage send at the same time and share the network between nodes.
    """
    group, card = group_of(plan, "pp", cluster), cluster.card
    if not group.leaves_node:
        return num_bytes / card.link_bandwidth(2) + card.link_latency_us / 2 * _MICRO
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
