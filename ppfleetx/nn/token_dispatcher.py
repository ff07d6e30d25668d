"""All-to-all exchange that sends hidden states to the ranks of their experts and back (expert parallelism;
Lepikhin et al., "GShard", 2020).

The exchange can have two levels, between nodes and inside a node (Nie et al., "HetuMoE", and Hwang et al.,
"Tutel", 2022). All ranks take part in every exchange, even without rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import paddle
from paddle import distributed
from paddle.autograd import PyLayer

from ppfleetx.distributed.collectives import alltoall_rows, gather_rows, start_alltoall_rows
from ppfleetx.distributed.host_device_copy import read, upload


class TokenDispatcher:
    """Exchanges hidden states among the expert-parallel ranks of a pipeline stage.

    Args:
        ep: group of the ranks among which experts are divided; None: every rank has all experts.
        emp: group of the ranks that slice each expert's matrices; None: experts are whole.
        alike: group of the ranks that hold the same rows; None: no other rank holds this rank's rows.
        levels: this rank's groups between nodes and inside its node
            (:func:`~ppfleetx.config.mesh.levels_of`); None: the exchange has one level.

    Attributes:
        adds_output_bias: whether this rank adds the bias of the experts' output. Only one rank along ``emp``
            adds it.
    """

    def __init__(
        self, *, ep: Any = None, emp: Any = None, alike: Any = None, levels: tuple[Any, Any] | None = None
    ) -> None:
        self._between, self._within = levels or (ep, None)
        self._emp, self._alike = emp, alike
        self.adds_output_bias = emp is None or emp.rank == 0

    def own(self, rows: paddle.Tensor) -> paddle.Tensor:
        """Return this rank's share of ``rows``. If several ranks hold the same rows, each dispatches only its
        share. The backward pass gathers the gradient of all rows."""
        if self._alike is None:
            return rows
        if rows.stop_gradient:
            return _part(rows, self._alike)
        return _Own.apply(rows, self._alike)

    def whole(self, rows: paddle.Tensor, num_rows: int) -> paddle.Tensor:
        """Undo :meth:`own`: gather all ``num_rows`` rows from the ranks that hold shares of them. ``rows`` is
        this rank's share."""
        return rows if self._alike is None else _Whole.apply(rows, num_rows, self._alike)

    def dispatch(self, rows: paddle.Tensor, counts: paddle.Tensor) -> RoundTrip:
        """Start to send rows of hidden states to the ranks of their experts. Return a :class:`RoundTrip`,
        which receives the rows for this rank's experts and sends the experts' outputs back.

        Args:
            rows: ``[rows, h]``, sorted by expert.
            counts: ``[experts]`` int64, number of rows for each expert.
        """
        if self._between is None and self._emp is None:
            return RoundTrip(rows, counts)
        return _Travel(rows, Route.of(counts, self._between, self._within, self._emp))


class RoundTrip:
    """Sends rows to their experts and the experts' outputs back. This base class is for a rank that has all
    experts, so nothing is sent."""

    def __init__(self, rows: paddle.Tensor, counts: paddle.Tensor) -> None:
        self._rows, self._counts = rows, counts

    def arrive(self) -> tuple[paddle.Tensor, np.ndarray]:
        """Wait for the rows that are sent to this rank's experts. Return the rows, sorted by expert, and the
        number of rows of each expert."""
        return self._rows, read(self._counts)

    def back(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """Send the outputs of this rank's experts back. Wait for the outputs of the rows that this rank has
        dispatched, and return them in the order of these rows."""
        return outputs


class _Travel(RoundTrip):
    def __init__(self, rows: paddle.Tensor, route: Route) -> None:
        if paddle.is_grad_enabled() and rows.stop_gradient:  # all ranks join the backward pass
            rows = rows.detach()
            rows.stop_gradient = False
        self._route, self._message = route, Message()
        self._received = _Depart.apply(rows, route, self._message)

    def arrive(self) -> tuple[paddle.Tensor, np.ndarray]:
        rows = _Arrive.apply(self._received, self._route, self._message)
        self._received = None
        return rows, self._route.local_counts

    def back(self, outputs: paddle.Tensor) -> paddle.Tensor:
        return _Return.apply(outputs, self._route)


# The place of a rank is its index in its node. With two levels, a rank sends all rows for a node to the rank
# with the same place in that node, which forwards the rows within the node. Experts receive the same rows in
# the same order as with one level.
@dataclass(frozen=True)
class Route:
    """The numbers of rows that ranks exchange in one round trip, and the methods that exchange the rows. If
    the exchange has only one level, every rank along ``ep`` counts as a node.

    Attributes:
        sent: ``[nodes]``, number of rows that this rank sends to each node.
        passing: ``[nodes, ranks per node]``. ``passing[n, p]`` is the number of rows that this rank receives
            from node ``n`` and forwards to rank ``p`` of its own node.
        table: ``[emp, ranks per node, nodes, experts of this rank]``. ``table[i, p, n, e]`` is the number of
            rows for expert ``e`` that rank ``i`` along ``emp`` receives from rank ``p`` of node ``n``.
        zeros_at: index in the rows to send at which a row of zeros is inserted, because this rank would
            otherwise send, forward or receive no rows; None: no row is inserted.
        between, within, emp: the process groups, or None.
    """

    sent: np.ndarray
    passing: np.ndarray
    table: np.ndarray
    zeros_at: int | None
    between: Any
    within: Any
    emp: Any

    @classmethod
    def of(cls, counts: paddle.Tensor, between: Any, within: Any, emp: Any) -> Route:
        """Return the route of one dispatch. All ranks must call this together, because they exchange their
        numbers of rows.

        Args:
            counts: ``[experts]``, this rank's number of rows for each expert.
        """
        # There is one exchange for each process group, and the host waits for the device only once.
        (nodes, node), (places, place), (slices, _) = map(_size_and_rank, (between, within, emp))
        num_experts, to_itself = counts.shape[0], np.zeros([nodes, places], np.int64)
        to_itself[node, place] = 1
        passing = _exchanged(counts, between)
        table = passing.reshape([nodes, places, -1]).transpose([1, 0, 2])
        table = _exchanged(table.reshape([-1]), within)
        # A rank that would send, forward or receive no rows sends itself a row of zeros for its last expert,
        # because Paddle's collectives and operators do not accept empty tensors on every device.
        lacks = paddle.logical_or(counts.sum() == 0, table.sum() == 0)
        if within is not None:
            lacks = paddle.logical_or(lacks, passing.sum() == 0)
        lacks = lacks.astype(counts.dtype).reshape([1])
        extra = np.zeros([places, nodes, num_experts // (nodes * places)], np.int64)
        extra[place, node, -1] = 1
        table = table + lacks * upload(extra.reshape(-1))
        if emp is not None:
            own, table = table, paddle.empty([slices * num_experts], counts.dtype)
            distributed.stream.all_gather(table, own, group=emp)
        lacking, known, passed, received = np.split(
            read(paddle.concat([lacks, counts, passing, table])), [1, 1 + num_experts, 1 + 2 * num_experts]
        )
        to_itself *= lacking
        of_ranks = known.reshape(nodes * places, -1).sum(1)
        zeros_at = int(of_ranks[: node * places + place + 1].sum()) if lacking[0] else None
        return cls(
            of_ranks.reshape(nodes, places).sum(1) + to_itself.sum(1),
            passed.reshape(nodes, places, -1).sum(2) + to_itself,
            received.reshape(slices, places, nodes, -1),
            zeros_at,
            between,
            within,
            emp,
        )

    @property
    def local_counts(self) -> np.ndarray:
        return self.table.sum((0, 1, 2))

    @property
    def _received(self) -> np.ndarray:
        """Number of rows that this rank receives from each rank of its node."""
        return self.table[0 if self.emp is None else self.emp.rank].sum((1, 2))

    @property
    def _longest(self) -> int:
        """Largest number of rows that any rank along ``emp`` receives. Each of these ranks pads its rows to
        this number, because a gather needs equal sizes."""
        return int(self.table.sum((1, 2, 3)).max())

    @cached_property
    def _by_place(self) -> paddle.Tensor:
        """Indices that sort the rows to be forwarded within the node by their destination rank."""
        return upload(self._passing_order())

    @cached_property
    def _by_node(self) -> paddle.Tensor:
        """The inverse permutation of :attr:`_by_place`. Indexing rows with it restores the order in which
        they arrived: by the node from which they came."""
        return upload(self._passing_order().argsort())

    def _passing_order(self) -> np.ndarray:
        return sorted_by_expert(self.passing[None, None], 0)  # sorts by place instead of by expert

    @cached_property
    def _by_expert(self) -> paddle.Tensor:
        """Indices that sort rows by expert. The rows come from all ranks that slice the same experts
        (``emp``), and have already been gathered."""
        return upload(sorted_by_expert(self.table, self._longest))

    @cached_property
    def _by_source(self) -> paddle.Tensor:
        """Indices that undo :attr:`_by_expert`: rows are again ordered by the ranks from which they were
        gathered. The rows of each rank along ``emp`` are again padded to :attr:`_longest`. The contents of
        padding rows are arbitrary."""
        order = sorted_by_expert(self.table, self._longest)
        place = np.zeros(len(self.table) * self._longest, np.int64)
        place[order] = np.arange(len(order))
        return upload(place)

    def depart(self, rows: paddle.Tensor, message: Message) -> paddle.Tensor:
        """Start to send rows, sorted by expert, to the ranks of their experts. Return the tensor that will
        hold the received rows."""
        if self.zeros_at is not None:
            zeros = paddle.zeros([1, *rows.shape[1:]], rows.dtype)
            rows = _joined(rows[: self.zeros_at], zeros, rows[self.zeros_at :])
        return message.start(rows, self.sent, self.passing.sum(1), self.between)

    def spread(self, rows: paddle.Tensor) -> paddle.Tensor:
        """Forward ``rows``, which this rank received in the exchange between nodes, to the ranks of its node
        that have their experts. Return the rows for this rank's experts, sorted by expert. Ranks that slice
        the same experts get the same rows."""
        if self.within is not None:
            rows = rows.index_select(self._by_place)
            rows = alltoall_rows(rows, self.passing.sum(0), self._received, self.within)
        if self.emp is not None:
            rows = gather_rows(rows, self._longest, self.emp)
        return rows.index_select(self._by_expert)

    def collect(self, rows: paddle.Tensor) -> paddle.Tensor:
        """Return the experts' outputs for the rows that this rank passed to :meth:`spread`, in the same
        order. The outputs of ranks that slice the same experts are summed. Each output is sent to the rank
        that forwarded its row."""
        rows = rows.index_select(self._by_source)
        if self.emp is not None:
            total = paddle.empty([self._longest, *rows.shape[1:]], rows.dtype)
            distributed.stream.reduce_scatter(total, rows, group=self.emp)
            rows = total[: int(self._received.sum())]
        if self.within is None:
            return rows
        rows = alltoall_rows(rows, self._received, self.passing.sum(0), self.within)
        return rows.index_select(self._by_node)

    def send_back(self, rows: paddle.Tensor, message: Message) -> paddle.Tensor:
        """Start to send the experts' outputs back to the ranks that dispatched the rows. Return the tensor
        that will hold the outputs of this rank's own rows. :meth:`at_home` waits for them."""
        return message.start(rows, self.passing.sum(1), self.sent, self.between)

    def at_home(self, message: Message) -> paddle.Tensor:
        rows = message.wait()
        if self.zeros_at is None:
            return rows
        return _joined(rows[: self.zeros_at], rows[self.zeros_at + 1 :])


class Message:
    """One all-to-all exchange of rows, which :meth:`start` begins and :meth:`wait` completes."""

    def __init__(self) -> None:
        self._finish: Callable[[], paddle.Tensor] | None = None

    def start(self, rows: paddle.Tensor, sent: np.ndarray, received: np.ndarray, group: Any) -> paddle.Tensor:
        """Start to exchange ``rows`` among the ranks of ``group``. Return the tensor that will hold the
        received rows after :meth:`wait`; without a group, return ``rows``."""
        if group is None:
            self._finish = lambda: rows
            return rows
        out, self._finish = start_alltoall_rows(rows, sent, received, group)
        return out

    def wait(self) -> paddle.Tensor:
        finish, self._finish = self._finish, None
        return finish()


def _joined(*parts: paddle.Tensor) -> paddle.Tensor:
    some = [part for part in parts if part.shape[0]]
    return paddle.concat(some) if some else parts[0]


def _size_and_rank(group: Any) -> tuple[int, int]:
    return (1, 0) if group is None else (group.nranks, group.rank)


def _exchanged(numbers: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Return the result of an all-to-all exchange of ``numbers``, which sends an equal part to each rank of
    ``group``."""
    if group is None:
        return numbers
    received = paddle.empty_like(numbers)
    distributed.alltoall_single(received, numbers, group=group)
    return received


def sorted_by_expert(table: np.ndarray, stride: int) -> np.ndarray:
    """Return the indices that sort received rows by expert.

    Args:
        table: numbers of rows, as in :class:`Route`.
        stride: number of rows, with padding, of each rank along ``emp``. The rows that rank ``j`` received
            start at index ``j * stride``.
    """
    # Rows arrive ordered by slice, place, node and expert. In the result, the rows of each expert are ordered
    # by slice, node and place.
    slices = len(table)
    lengths = table.reshape(slices, -1)
    begins = lengths.cumsum(1) - lengths + stride * np.arange(slices)[:, None]
    begins, lengths = (
        array.reshape(table.shape).transpose(3, 0, 2, 1).reshape(-1) for array in (begins, lengths)
    )
    ends = lengths.cumsum()
    return np.repeat(begins - (ends - lengths), lengths) + np.arange(int(lengths.sum()))


class _Depart(PyLayer):
    """Autograd function that starts to send rows to their experts. Its backward pass waits for the rows'
    gradients, which the backward pass of :class:`_Arrive` starts to send back."""

    @staticmethod
    def forward(ctx: Any, rows: paddle.Tensor, route: Route, message: Message) -> paddle.Tensor:
        ctx.route, ctx.message = route, message
        departed = route.depart(rows, message)
        return departed.clone() if departed is rows else departed

    @staticmethod
    def backward(ctx: Any, _: paddle.Tensor) -> paddle.Tensor:
        return ctx.route.at_home(ctx.message)


class _Arrive(PyLayer):
    @staticmethod
    def forward(ctx: Any, received: paddle.Tensor, route: Route, message: Message) -> paddle.Tensor:
        ctx.route, ctx.message = route, message
        message.wait()
        return route.spread(received)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        gradient = ctx.route.collect(upstream)
        ctx.route.send_back(gradient, ctx.message)
        return gradient


class _Return(PyLayer):
    @staticmethod
    def forward(ctx: Any, outputs: paddle.Tensor, route: Route) -> paddle.Tensor:
        ctx.route, message = route, Message()
        route.send_back(route.collect(outputs), message)
        return route.at_home(message)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        message = Message()
        ctx.route.depart(upstream, message)
        return ctx.route.spread(message.wait())


def _share(num_rows: int, group: Any) -> int:
    return -(-num_rows // group.nranks)


def _part(rows: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Return this rank's share of ``rows``. All ranks of ``group`` hold the same ``rows``. An empty share is
    replaced by one row of zeros."""
    share = _share(rows.shape[0], group)
    part = rows[group.rank * share : (group.rank + 1) * share]
    return part if part.shape[0] else paddle.zeros([1, *rows.shape[1:]], rows.dtype)


class _Own(PyLayer):
    @staticmethod
    def forward(ctx: Any, rows: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.arguments = rows.shape[0], group
        return _part(rows, group).clone()

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        num_rows, group = ctx.arguments
        return gather_rows(upstream, _share(num_rows, group), group)[:num_rows]


class _Whole(PyLayer):
    @staticmethod
    def forward(ctx: Any, rows: paddle.Tensor, num_rows: int, group: Any) -> paddle.Tensor:
        ctx.group = group
        return gather_rows(rows, _share(num_rows, group), group)[:num_rows]

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        return _part(upstream, ctx.group)
