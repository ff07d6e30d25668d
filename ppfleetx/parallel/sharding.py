"""States, gradients and parameters divided over the sharding ranks (ZeRO, Rajbhandari et al., 2020).

Whole parameters are dealt out: each has one owner in the sharding group. Stage 1: only the owner keeps
optimizer states and updates, then sends the result (``new_values.py``). Stage 2: gradients leave for their
owners during the backward pass. Stage 3: the owner alone keeps the values between uses; a stage of the model
gets what it needs just before its forward and its backward pass (``sharded_values.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import paddle
from paddle import distributed
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import DygraphShardingOptimizer

from ppfleetx.distributed.collectives import BUCKET_BYTES, move_together, reduce_packed
from ppfleetx.optims.gradients import add_gradient, drop_gradient, gradient_of, take_gradient
from ppfleetx.parallel.overlap import BUCKETS_IN_SIZE, Bucket, BucketSums, cut

if TYPE_CHECKING:
    from ppfleetx.optims.adamw import Optimizer

UNWAITED_MESSAGES = 2
"""Of stages 2 and 3, that have left and have not been waited for: those to two owners go in both directions
of a link. More would keep gradients whose memory these stages are to save."""

Owners = Mapping[str, int]
"""Canonical name -> rank in the sharding group."""


def deal_out(parameters: Sequence[paddle.Tensor], num_ranks: int, tied: Iterable[str] = ()) -> dict[str, int]:
    """An owner for each parameter: the largest first, each to the rank that has least so far.

    Tied parameters go to rank 0, so that their copies on other pipeline ranks have the same owner.
    """
    names = {parameter.info.name for parameter in parameters} & set(tied)
    owners, load = dict.fromkeys(names, 0), [0] * num_ranks
    load[0] = sum(parameter.size for parameter in parameters if parameter.info.name in names)
    for parameter in sorted(parameters, key=lambda p: p.size, reverse=True):
        if parameter.info.name not in owners:
            rank = load.index(min(load))
            owners[parameter.info.name] = rank
            load[rank] += parameter.size
    return owners


class Values(Protocol):
    """How the values of parameters come from their owners."""

    def updated(self) -> None:
        """The owners have new values."""

    def finish(self) -> None:
        """Wait until nothing is under way."""


class StateSharding(DygraphShardingOptimizer):
    """Fleet's stage 1 optimizer with our owners; what follows an update is for ``values``."""

    def __init__(self, optimizer: Any, hcg: Any, owners: Owners, values: Values) -> None:
        self._owners, self._values = owners, values
        super().__init__(optimizer, hcg)

    def _partition_parameters(self) -> dict[int, list[paddle.Tensor]]:
        ranks = range(self._sharding_world_size)
        return {
            rank: [p for p in self._parameter_list if self._owners[p.info.name] == rank] for rank in ranks
        }

    def _sharding_sync_parameters(self) -> None:
        self._values.updated()


class Sharding:
    """What sharding does to a model's parameters and their gradients.

    Args:
        parameters: trainable parameters of this rank, each once.
        group: the sharding ranks.
        stage: 1, 2 or 3.
        tied: canonical names of parameters with copies on other pipeline ranks.
        frozen: the others, which have no gradients and states, but values to hold (stage 3) and to save.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        group: Any,
        stage: int,
        tied: Iterable[str] = (),
        frozen: Sequence[paddle.Tensor] = (),
    ) -> None:
        self._parameters, self._group, self._stage = list(parameters), group, stage
        # Apart, so that both states and values are shared evenly.
        self.owners = {**deal_out(frozen, group.nranks, tied), **deal_out(parameters, group.nranks, tied)}
        # By owner and type, since what travels together is of one type; the same keys in the same order on
        # every rank.
        types = dict.fromkeys(parameter.dtype for parameter in self._parameters)
        self._pending: dict[tuple[int, Any], dict[str, paddle.Tensor]] = {
            (rank, dtype): {} for rank in range(group.nranks) for dtype in types
        }
        self._bucket_bytes = BUCKET_BYTES
        self._overlaps = False
        self._under_way: deque[tuple[Any, list[paddle.Tensor], list[paddle.Tensor]]] = deque()
        if stage > 1:
            for parameter in self._parameters:
                parameter._register_backward_hook(lambda *_, p=parameter: self._on_gradient(p))

    def owner_of(self, parameter: paddle.Tensor) -> int:
        """Rank of the parameter's owner in the sharding group."""
        return self.owners[parameter.info.name]

    def owns(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank is the parameter's owner."""
        return self.owner_of(parameter) == self._group.rank

    def holds(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank has the parameter's value between its uses."""
        return self._stage < 3 or self.owns(parameter)

    def wrap(self, optimizer: Optimizer, values: Values) -> None:
        """Leave to ``optimizer`` on this rank only what is owned here, and tell ``values`` of each update."""
        from paddle.distributed import fleet

        hcg = fleet.get_hybrid_communicate_group()
        optimizer.wrap(lambda inner: StateSharding(inner, hcg, self.owners, values))
        optimizer.named_params = [(name, p) for name, p in optimizer.named_params if self.owns(p)]

    def bucket_sums(self, nbytes: int) -> BucketSums | None:
        """Let gradients travel while the backward pass goes on, in messages of about ``nbytes``.

        Returns:
            Of stage 1, whose gradients leave once a step, the sums to begin and to finish in each step.
        """
        self._bucket_bytes, self._overlaps = nbytes, True
        if self._stage > 1:
            return None
        buckets = cut(list(reversed(self._parameters)), nbytes // BUCKETS_IN_SIZE, self.owner_of)
        return BucketSums(
            [
                Bucket(bucket, self._start(owner), partial(self._drop, owner, bucket))
                for owner, bucket in buckets
            ]
        )

    def _start(self, owner: int) -> Callable[[paddle.Tensor], Any]:
        destination = self._group.ranks[owner]
        return lambda flat: distributed.reduce(flat, destination, group=self._group, sync_op=False)

    def _drop(self, owner: int, parameters: Iterable[paddle.Tensor]) -> None:
        """Forget gradients that have been summed into another rank."""
        if owner != self._group.rank:
            for parameter in parameters:
                drop_gradient(parameter)

    def finish_gradients(self) -> list[paddle.Tensor]:
        """Complete the owners' sums; give the parameters owned here, which alone have gradients then."""
        if self._stage == 1 and not self._overlaps:
            for parameter in self._parameters:
                self._pending_with(parameter)[parameter.info.name] = parameter
        for owner, dtype in self._pending:
            self._send(owner, dtype)
        while self._under_way:
            self._complete()
        if self._stage == 3:
            # The first layer's input carries no gradient that could tell when its backward pass is over.
            for parameter in self._parameters:
                if not self.owns(parameter) and parameter._is_initialized():
                    parameter._clear_data()
        return [parameter for parameter in self._parameters if self.owns(parameter)]

    def _on_gradient(self, parameter: paddle.Tensor) -> None:
        """A backward pass has added to the gradient: send it when enough has come together."""
        pending = self._pending_with(parameter)
        pending[parameter.info.name] = parameter
        if sum(p.size * p.element_size() for p in pending.values()) >= self._bucket_bytes:
            self._send(self.owner_of(parameter), parameter.dtype)

    def _pending_with(self, parameter: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """What travels together with the parameter's gradient."""
        return self._pending[self.owner_of(parameter), parameter.dtype]

    def _send(self, owner: int, dtype: Any) -> None:
        """Sum pending gradients into the owner, who keeps the sum and adds to it in the next pass."""
        parameters = [p for p in self._pending[owner, dtype].values() if gradient_of(p) is not None]
        self._pending[owner, dtype] = {}
        if not parameters:
            return
        if not self._overlaps:
            reduce_packed([gradient_of(p) for p in parameters], self._group, owner)
            self._drop(owner, parameters)
            return
        while len(self._under_way) == UNWAITED_MESSAGES or self._is_under_way(parameters):
            self._complete()
        gradients = [take_gradient(p) for p in parameters]
        task = self._start(owner)(move_together(gradients))
        self._under_way.append((task, parameters, gradients))

    def _is_under_way(self, parameters: Sequence[paddle.Tensor]) -> bool:
        """Whether a gradient of an earlier micro batch is. Sums are then added in the order of the passes."""
        travelling = {id(p) for _, others, _ in self._under_way for p in others}
        return any(id(p) in travelling for p in parameters)

    def _complete(self) -> None:
        """Wait for the oldest; its owner adds it to what passes have given since."""
        task, parameters, gradients = self._under_way.popleft()
        task.wait()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if self.owns(parameter):
                add_gradient(parameter, gradient)
