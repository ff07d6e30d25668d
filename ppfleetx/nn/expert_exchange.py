"""The all-to-all exchange that brings hidden states to the ranks of their experts and back.

A mixture layer gathers a row of hidden states for each choice, sorted by expert. With expert parallelism the
experts of a layer are divided among the ranks along ``ep``, so every rank sends each other one the rows of
that rank's experts (Lepikhin et al., "GShard", 2020). Nothing is dropped: ranks first exchange the numbers of
rows, then the rows. If the matrices of an expert are also sliced, the ranks along ``emp`` gather each other's
rows, and add up the outputs of their slices.

The backward pass is the same exchange in the other direction. All ranks take part in every exchange, even
without rows to send or receive.

Shape letters: n rows of this rank, h hidden size, E experts of a layer.
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

from ppfleetx.distributed.collectives import gather_rows, start_alltoall_rows
from ppfleetx.distributed.transfer import read, upload


class ExpertExchange:
    """The exchange among the expert-parallel ranks of a pipeline stage; without groups, nothing is sent.

    Args:
        ep: ranks among which the experts are divided; None: every rank has all of them.
        emp: ranks that slice each expert's matrices; None: experts are whole.
        alike: ranks that hold the same rows; None: there are none.

    Attributes:
        adds_output_bias: whether this rank adds the experts' last bias; one rank along ``emp`` does.
    """

    def __init__(self, *, ep: Any = None, emp: Any = None, alike: Any = None) -> None:
        self._ep, self._emp, self._alike = ep, emp, alike
        self.adds_output_bias = emp is None or emp.rank == 0

    def own(self, rows: paddle.Tensor) -> paddle.Tensor:
        """The part of ``rows [n, ...]`` this rank dispatches when several ranks hold the same rows. The
        backward pass gathers the gradient of all rows."""
        if self._alike is None:
            return rows
        if rows.stop_gradient:
            return _part(rows, self._alike)
        return _Own.apply(rows, self._alike)

    def whole(self, rows: paddle.Tensor, num_rows: int) -> paddle.Tensor:
        """Gather the parts of :meth:`own` into all ``num_rows`` rows."""
        return rows if self._alike is None else _Whole.apply(rows, num_rows, self._alike)

    def dispatch(self, rows: paddle.Tensor, counts: paddle.Tensor) -> Journey:
        """Send rows to their experts.

        Args:
            rows: ``[n, h]``, sorted by expert.
            counts: ``[E]``, int64: number of rows for each expert.
        """
        if self._ep is None and self._emp is None:
            return Journey(rows, counts)
        return _Travel(rows, Route.of(counts, self._ep, self._emp))


class Journey:
    """One dispatch of rows to experts and back. This base class sends nothing."""

    def __init__(self, rows: paddle.Tensor, counts: paddle.Tensor) -> None:
        self._rows, self._counts = rows, counts

    def arrive(self) -> tuple[paddle.Tensor, np.ndarray]:
        """Wait for the rows of this rank's experts; return them sorted by expert, with the number of rows
        per expert on the host. Work queued before this call overlaps the exchange."""
        return self._rows, read(self._counts)

    def back(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """Send the experts' outputs back; return them in the order of the rows that were dispatched."""
        return outputs


class _Travel(Journey):
    def __init__(self, rows: paddle.Tensor, route: Route) -> None:
        if paddle.is_grad_enabled() and rows.stop_gradient:  # all ranks take part in the backward pass
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


@dataclass(frozen=True)
class Route:
    """The route of the rows of one dispatch.

    A rank that would send or receive nothing sends itself a row of zeros for its last expert, because
    Paddle's exchanges and operators do not accept empty tensors on every device.

    Attributes:
        sent: rows for each rank along ``ep``.
        table: ``[emp, ep, experts of this rank]``: the rows that each rank along ``emp`` received from each
            rank along ``ep``.
        zeros_at: index of the row of zeros among the rows sent; None: there is none.
        ep, emp: the groups, or None.
    """

    sent: np.ndarray
    table: np.ndarray
    zeros_at: int | None
    ep: Any
    emp: Any

    @classmethod
    def of(cls, counts: paddle.Tensor, ep: Any, emp: Any) -> Route:
        """Exchange the row counts: one message along each axis, and one wait for the device."""
        size, me = (1, 0) if ep is None else (ep.nranks, ep.rank)
        slices, num_experts = 1 if emp is None else emp.nranks, counts.shape[0]
        table = counts
        if ep is not None:
            table = paddle.empty_like(counts)
            distributed.alltoall_single(table, counts, group=ep)
        lacks = paddle.logical_or(counts.sum() == 0, table.sum() == 0).astype(counts.dtype)
        last = (me + 1) * num_experts // size - 1  # where the last expert's rows from this rank are counted
        table = table + lacks * upload(np.eye(1, num_experts, last, dtype=np.int64)[0])
        if emp is not None:
            own, table = table, paddle.empty([slices * num_experts], counts.dtype)
            distributed.stream.all_gather(table, own, group=emp)
        lacking, known, received = np.split(
            read(paddle.concat([lacks.reshape([1]), counts, table])), [1, 1 + num_experts]
        )
        sent = known.reshape(size, -1).sum(1)
        sent[me] += lacking[0]
        zeros_at = int(known[: last + 1].sum()) if lacking[0] else None
        return cls(sent, received.reshape(slices, size, -1), zeros_at, ep, emp)

    @property
    def local_counts(self) -> np.ndarray:
        return self.table.sum((0, 1))

    @property
    def _received(self) -> np.ndarray:
        """The number of rows received from each rank along ``ep``."""
        return self.table[0 if self.emp is None else self.emp.rank].sum(1)

    @property
    def _longest(self) -> int:
        """The largest number of rows any rank along ``emp`` received; every rank pads to it."""
        return int(self.table.sum((1, 2)).max())

    @cached_property
    def _order(self) -> paddle.Tensor:
        """The positions of each expert's rows among the rows gathered along ``emp``."""
        return upload(sorted_by_expert(self.table, self._longest))

    @cached_property
    def _place(self) -> paddle.Tensor:
        """The inverse of :attr:`_order`. Padding maps to an arbitrary row, which nothing reads."""
        order = sorted_by_expert(self.table, self._longest)
        place = np.zeros(len(self.table) * self._longest, np.int64)
        place[order] = np.arange(len(order))
        return upload(place)

    def depart(self, rows: paddle.Tensor, message: Message) -> paddle.Tensor:
        """Start sending rows, sorted by expert, to the ranks of their experts."""
        if self.zeros_at is not None:
            zeros = paddle.zeros([1, *rows.shape[1:]], rows.dtype)
            rows = _joined(rows[: self.zeros_at], zeros, rows[self.zeros_at :])
        return message.start(rows, self.sent, self._received, self.ep)

    def spread(self, rows: paddle.Tensor) -> paddle.Tensor:
        """Gather the rows received along ``ep`` over all ranks along ``emp``, sorted by expert."""
        if self.emp is not None:
            rows = gather_rows(rows, self._longest, self.emp)
        return rows.index_select(self._order)

    def collect(self, rows: paddle.Tensor) -> paddle.Tensor:
        """Reduce-scatter the outputs over the ranks along ``emp``: the inverse of :meth:`spread`."""
        rows = rows.index_select(self._place)
        if self.emp is None:
            return rows
        total = paddle.empty([self._longest, *rows.shape[1:]], rows.dtype)
        distributed.stream.reduce_scatter(total, rows, group=self.emp)
        return total[: int(self._received.sum())]

    def send_back(self, rows: paddle.Tensor, message: Message) -> paddle.Tensor:
        """Start sending outputs back; :meth:`at_home` waits for them."""
        return message.start(rows, self._received, self.sent, self.ep)

    def at_home(self, message: Message) -> paddle.Tensor:
        rows = message.wait()
        if self.zeros_at is None:
            return rows
        return _joined(rows[: self.zeros_at], rows[self.zeros_at + 1 :])


class Message:
    """An all-to-all along ``ep`` that has been started."""

    def __init__(self) -> None:
        self._finish: Callable[[], paddle.Tensor] | None = None

    def start(self, rows: paddle.Tensor, sent: np.ndarray, received: np.ndarray, group: Any) -> paddle.Tensor:
        """Start the exchange and return the tensor it fills. Without a group, that tensor is already
        complete."""
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


def sorted_by_expert(table: np.ndarray, stride: int) -> np.ndarray:
    """The indices that reorder rows from (source, expert) to (expert, slice, source) order; the rows of
    slice ``j`` begin at ``j * stride``.

    Args:
        table: ``[slice, source, expert]``, numbers of rows.
    """
    slices = len(table)
    lengths = table.reshape(slices, -1)
    begins = lengths.cumsum(1) - lengths + stride * np.arange(slices)[:, None]
    begins, lengths = (
        array.reshape(table.shape).transpose(2, 0, 1).reshape(-1) for array in (begins, lengths)
    )
    ends = lengths.cumsum()
    return np.repeat(begins - (ends - lengths), lengths) + np.arange(int(lengths.sum()))


class _Depart(PyLayer):
    """Send rows in the forward pass. In the backward pass their gradients, sent by :class:`_Arrive`,
    arrive here."""

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
    """This rank's share of the rows, or one row of zeros if there are fewer rows than ranks."""
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
