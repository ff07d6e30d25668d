"""How rows of hidden states travel to the ranks of their experts, and back.

A mixture layer gathers a row of hidden states for each choice, sorted by expert. With expert parallelism the
experts of a layer are divided among the ranks along ``ep``, so every rank sends each other one the rows of
that rank's experts (Lepikhin et al., "GShard", 2020). Nothing is dropped and nothing is padded on the way:
ranks exchange the numbers of rows first, then the rows. Where the matrices of an expert are sliced too, the
ranks along ``emp`` gather each other's rows, and add up what their slices make of them.

The backward pass is the same journey in the other direction. All ranks make every journey, also those with no
rows to send or to receive.

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

from ppfleetx.distributed.collectives import alltoall_rows, gather_rows
from ppfleetx.distributed.transfer import read, upload


class ExpertExchange:
    """For a rank that has all experts, whole: nothing travels.

    Attributes:
        adds_output_bias: whether this rank adds the experts' last bias; one of those that add up their slices
            does.
    """

    adds_output_bias = True

    def own(self, rows: paddle.Tensor) -> paddle.Tensor:
        """The part of ``rows [n, ...]`` that this rank sends to experts, where several ranks hold the same
        rows. The gradient is that of all rows."""
        return rows

    def whole(self, rows: paddle.Tensor, num_rows: int) -> paddle.Tensor:
        """All ``num_rows`` again, from the parts of :meth:`own`."""
        return rows

    def dispatch(self, rows: paddle.Tensor, counts: paddle.Tensor) -> tuple[paddle.Tensor, np.ndarray]:
        """Send rows to their experts.

        Args:
            rows: ``[n, h]``, sorted by expert.
            counts: ``[E]``, int64: how many of them each expert gets.

        Returns:
            The rows for this rank's experts, sorted by expert, and how many each gets, on the host.
        """
        return rows, read(counts)

    def combine(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """What the experts made of the rows of the last :meth:`dispatch`, in the order of these rows."""
        return outputs


class ParallelExperts(ExpertExchange):
    """Among the ranks of a pipeline stage.

    Args:
        ep: ranks among which the experts are divided; None: every rank has all of them.
        emp: ranks that slice each expert's matrices; None: experts are whole.
        alike: ranks that hold the same rows; None: none do.
    """

    def __init__(self, *, ep: Any = None, emp: Any = None, alike: Any = None) -> None:
        self._ep, self._emp, self._alike = ep, emp, alike
        self._route: Route | None = None

    @property
    def adds_output_bias(self) -> bool:  # type: ignore[override]
        return self._emp is None or self._emp.rank == 0

    def own(self, rows: paddle.Tensor) -> paddle.Tensor:
        if self._alike is None:
            return rows
        if rows.stop_gradient:
            return _part(rows, self._alike)
        return _Own.apply(rows, self._alike)

    def whole(self, rows: paddle.Tensor, num_rows: int) -> paddle.Tensor:
        return rows if self._alike is None else _Whole.apply(rows, num_rows, self._alike)

    def dispatch(self, rows: paddle.Tensor, counts: paddle.Tensor) -> tuple[paddle.Tensor, np.ndarray]:
        if self._ep is None and self._emp is None:
            return super().dispatch(rows, counts)
        if paddle.is_grad_enabled() and rows.stop_gradient:  # all ranks come by in the backward pass
            rows = rows.detach()
            rows.stop_gradient = False
        self._route = Route.of(counts, self._ep, self._emp)
        return _Travel.apply(rows, self._route.there, self._route.back), self._route.local_counts

    def combine(self, outputs: paddle.Tensor) -> paddle.Tensor:
        if self._ep is None and self._emp is None:
            return outputs
        route, self._route = self._route, None
        return _Travel.apply(outputs, route.back, route.there)


@dataclass(frozen=True)
class Route:
    """How the rows of one dispatch travel.

    Attributes:
        sent: rows for each rank along ``ep``.
        table: ``[emp, ep, experts of this rank]``: the rows that each rank along ``emp`` received from each
            rank along ``ep``.
        ep, emp: the groups, or None.
    """

    sent: np.ndarray
    table: np.ndarray
    ep: Any
    emp: Any

    @classmethod
    def of(cls, counts: paddle.Tensor, ep: Any, emp: Any) -> Route:
        """Exchange the counts: one message along each axis, and one look at the device."""
        size, slices = 1 if ep is None else ep.nranks, 1 if emp is None else emp.nranks
        table = counts
        if ep is not None:
            table = paddle.empty_like(counts)
            distributed.alltoall_single(table, counts, group=ep)
        if emp is not None:
            own, table = table, paddle.empty([slices * counts.size], counts.dtype)
            distributed.stream.all_gather(table, own, group=emp)
        known = read(paddle.concat([counts, table]))
        sent, received = known[: counts.size], known[counts.size :]
        return cls(sent.reshape(size, -1).sum(1), received.reshape(slices, size, -1), ep, emp)

    @property
    def local_counts(self) -> np.ndarray:
        """Rows that each expert of this rank gets."""
        return self.table.sum((0, 1))

    @property
    def _received(self) -> np.ndarray:
        """Rows from each rank along ``ep``."""
        return self.table[0 if self.emp is None else self.emp.rank].sum(1)

    @property
    def _longest(self) -> int:
        """Rows of the rank along ``emp`` that received most: all send as many to each other."""
        return int(self.table.sum((1, 2)).max())

    @cached_property
    def _order(self) -> paddle.Tensor:
        """Where the rows of each expert lie in what ``emp`` has gathered."""
        return upload(sorted_by_expert(self.table, self._longest))

    @cached_property
    def _place(self) -> paddle.Tensor:
        """The opposite of :attr:`_order`. Padding gets any row: nobody reads what becomes of it."""
        order = sorted_by_expert(self.table, self._longest)
        place = np.zeros(len(self.table) * self._longest, np.int64)
        place[order] = np.arange(len(order))
        return upload(place)

    def there(self, rows: paddle.Tensor) -> paddle.Tensor:
        """Rows, sorted by expert, to the ranks of their experts: sorted by expert again."""
        if self.ep is not None:
            rows = alltoall_rows(rows, self.sent, self._received, self.ep)
        if self.emp is not None:
            rows = gather_rows(rows, self._longest, self.emp)
        return rows.index_select(self._order)

    def back(self, rows: paddle.Tensor) -> paddle.Tensor:
        """The way of :meth:`there` in the other direction; what the ranks along ``emp`` have is added up."""
        rows = rows.index_select(self._place)
        if self.emp is not None:
            total = paddle.empty([self._longest, *rows.shape[1:]], rows.dtype)
            distributed.stream.reduce_scatter(total, rows, group=self.emp)
            rows = total[: int(self._received.sum())]
        if self.ep is not None:
            rows = alltoall_rows(rows, self._received, self.sent, self.ep)
        return rows


def sorted_by_expert(table: np.ndarray, stride: int) -> np.ndarray:
    """Where rows lie that are wanted in the order (expert, slice, source): those of slice ``j`` begin at
    ``j * stride``, in the order (source, expert).

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


class _Travel(PyLayer):
    @staticmethod
    def forward(
        ctx: Any,
        rows: paddle.Tensor,
        there: Callable[[paddle.Tensor], paddle.Tensor],
        back: Callable[[paddle.Tensor], paddle.Tensor],
    ) -> paddle.Tensor:
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        return ctx.back(upstream)


def _share(num_rows: int, group: Any) -> int:
    return -(-num_rows // group.nranks)


def _part(rows: paddle.Tensor, group: Any) -> paddle.Tensor:
    share = _share(rows.shape[0], group)
    return rows[group.rank * share : (group.rank + 1) * share]


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
