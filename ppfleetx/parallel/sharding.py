"""ZeRO sharding of optimizer states, gradients and parameters (Rajbhandari et al., 2020).

Each parameter is owned as a whole by one rank. In every stage, only the owner keeps the optimizer states of
the parameter and updates it. In stages 2 and 3, most gradients are kept only by the owner between backward
passes. In stage 3, only the owner keeps the values between uses (``zero3.py``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import paddle
from paddle import distributed

from ppfleetx.distributed.collectives import BUCKET_BYTES, flatten_in_place, reduce_packed
from ppfleetx.nn.chunked_loss import ChunkedHead
from ppfleetx.nn.param_spec import Axes, assign_owners, may_lack_gradient, owner_axes
from ppfleetx.optims.gradients import (
    add_gradient,
    complete_gradient,
    drop_gradient,
    is_in_use,
    take_gradient,
)
from ppfleetx.parallel.grad_buckets import BUCKETS_IN_SIZE, Bucket, BucketSums, SendOrder, cut

if TYPE_CHECKING:
    from ppfleetx.distributed.context import ParallelContext

MAX_MESSAGES_IN_FLIGHT = 2
"""The largest number of gradient messages in transit in stages 2 and 3. Two messages to different owners use
both directions of a link. Each further message would keep more gradients in memory."""


class Sharding:
    """Assigns an owner to each parameter, and reduces gradients to the owners.

    Args:
        parameters: this rank's trainable parameters without duplicates, in model order.
        ctx: this process's rank and coordinates, with the process groups of the owners.
        frozen: this rank's frozen parameters. They also have owners, for stage 3.
        bucket_bytes: approximate size of the gradient messages that overlap the backward pass; None: no
            overlap.
    """

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        ctx: ParallelContext,
        stage: int,
        frozen: Sequence[paddle.Tensor] = (),
        bucket_bytes: int | None = None,
    ) -> None:
        self._parameters, self._ctx, self._stage = list(parameters), ctx, stage
        both = [*frozen, *parameters]
        self._axes_of = {p.info.name: owner_axes(p.spec, ctx.mesh) for p in both}
        self._group_of = {name: ctx.group_over(axes) for name, axes in self._axes_of.items()}
        # Assign trainable and frozen parameters separately, to balance both optimizer states and values.
        self.owners = {**self._assign_owners(frozen), **self._assign_owners(parameters)}
        self._overlaps = bucket_bytes is not None
        self._under_way: deque[tuple[Any, list[paddle.Tensor], list[paddle.Tensor]]] = deque()
        shared = [p for p in self._parameters if self._axes(p)]
        late = [p for p in shared if may_lack_gradient(p.spec)]
        early = [p for p in reversed(shared) if not may_lack_gradient(p.spec)]
        self._sums: BucketSums | None = None
        self._order: SendOrder | None = None
        self._passes_of: Counter[int] = Counter()  # by the id of a layer
        if stage > 1:
            self._full, rest = self._full_buckets(early, bucket_bytes or BUCKET_BYTES)
            self._order = SendOrder(self._full, self._send_full, each_pass=True)
            late += rest
        elif bucket_bytes is not None:
            self._sums = self._stage_1_sums(early, bucket_bytes // BUCKETS_IN_SIZE)
        else:
            late += early
        # Gradients sent at the end of a step. They are also cut into buckets, because experts have many.
        pieces = cut(late, bucket_bytes or BUCKET_BYTES, self._bucket_key)
        self._late = [bucket for _, bucket in pieces]

    def _axes(self, parameter: paddle.Tensor) -> Axes:
        return self._axes_of[parameter.info.name]

    def _assign_owners(self, parameters: Sequence[paddle.Tensor]) -> dict[str, int]:
        """Assign an owner to each parameter, separately in each process group. A tied parameter with copies
        on several pipeline ranks belongs to the first rank of its process group."""
        sizes: dict[Axes, dict[str, int]] = {}
        for parameter in parameters:
            sizes.setdefault(self._axes(parameter), {})[parameter.info.name] = parameter.size
        has_copies = self._ctx.size_of("pp") > 1
        tied = [p.info.name for p in parameters if has_copies and p.spec.tie is not None]
        owners: dict[str, int] = {}
        for axes, named in sizes.items():
            owners |= assign_owners(named, self._ctx.group_over(axes).nranks if axes else 1, tied)
        return owners

    def group_of(self, parameter: paddle.Tensor) -> Any:
        """Return the process group from whose ranks the parameter's owner is chosen; None if this rank is the
        only candidate."""
        return self._group_of[parameter.info.name]

    def owner_of(self, parameter: paddle.Tensor) -> int:
        """Return the owner of the parameter, as a rank within :meth:`group_of`."""
        return self.owners[parameter.info.name]

    def owns(self, parameter: paddle.Tensor) -> bool:
        group = self.group_of(parameter)
        return group is None or self.owner_of(parameter) == group.rank

    def holds(self, parameter: paddle.Tensor) -> bool:
        return self._stage < 3 or self.owns(parameter)

    def _bucket_key(self, parameter: paddle.Tensor) -> tuple[Axes, int, Any]:
        """Return the properties that all parameters of a bucket share: the axes of the process group, the
        owner, and the dtype."""
        return self._axes(parameter), self.owner_of(parameter), parameter.dtype

    def _full_buckets(
        self, parameters: Iterable[paddle.Tensor], nbytes: int
    ) -> tuple[list[list[paddle.Tensor]], list[paddle.Tensor]]:
        """Split parameters into buckets of at least ``nbytes``. Returns the buckets, and the remaining
        parameters, which do not fill a bucket."""
        full: list[list[paddle.Tensor]] = []
        filling: dict[tuple[Axes, int, Any], list[paddle.Tensor]] = {}
        for parameter in parameters:
            bucket = filling.setdefault(self._bucket_key(parameter), [])
            bucket.append(parameter)
            if sum(p.size * p.element_size() for p in bucket) >= nbytes:
                full.append(filling.pop(self._bucket_key(parameter)))
        return full, [parameter for bucket in filling.values() for parameter in bucket]

    def _stage_1_sums(self, parameters: Sequence[paddle.Tensor], nbytes: int) -> BucketSums:
        buckets = cut(parameters, nbytes, lambda p: (self._axes(p), self.owner_of(p)))
        return BucketSums(
            [Bucket(bucket, self._start(*to), partial(self._drop, bucket)) for to, bucket in buckets]
        )

    def _start(self, axes: Axes, owner: int) -> Callable[[paddle.Tensor], Any]:
        group = self._ctx.group_over(axes)
        return lambda flat: distributed.reduce(flat, group.ranks[owner], group=group, sync_op=False)

    def _drop(self, parameters: Iterable[paddle.Tensor]) -> None:
        for parameter in parameters:
            if not self.owns(parameter):
                drop_gradient(parameter)

    def begin(self, num_passes: int) -> None:
        self._passes_of = Counter()
        for sums in (self._sums, self._order):
            if sums is not None:
                sums.begin(num_passes)

    def register_hooks(
        self,
        indexed_layers: Sequence[tuple[int, paddle.nn.Layer]],
        when_complete: Callable[[Callable[[], None]], None],
    ) -> None:
        """Register hooks that mark the gradients of a layer as complete in each backward pass, even if some
        parameters got no gradient. The hooks then send the buckets that are complete. Does nothing in
        sharding stage 1.

        In sharding stage 2, a hook runs at the end of the backward pass. In sharding stage 3, it runs when
        the gradient of the layer's input exists, but at the end of the backward pass if the input is a leaf.
        If the input needs no gradient, the layer's gradients are not marked. :meth:`finish_gradients` sends
        the buckets that are still incomplete.

        Args:
            indexed_layers: the model's layers on this rank, such as the embedding and the blocks, each as
                (index in the model, layer).
            when_complete: function that calls its argument once the weight gradients exist: immediately, or
                later if weight gradients are deferred (``Matmul.when_complete``).
        """
        if self._order is None:
            return
        followed: set[int] = set()
        for _, layer in sorted(indexed_layers, key=lambda pair: pair[0]):
            # A parameter shared by several layers is complete when the backward pass has reached the first of
            # these layers.
            new = [p for p in layer.parameters() if id(p) not in followed and not p.stop_gradient]
            followed |= {id(parameter) for parameter in new}
            layer.register_forward_pre_hook(partial(self._register_hook, new, when_complete))

    def _register_hook(
        self,
        parameters: Sequence[paddle.Tensor],
        when_complete: Callable[[Callable[[], None]], None],
        layer: paddle.nn.Layer,
        inputs: tuple[Any, ...],
    ) -> None:
        hidden = inputs[0][0]
        if not layer.training or not paddle.is_grad_enabled() or hidden.stop_gradient:
            return
        if isinstance(layer, ChunkedHead) and layer.defers(inputs):
            return
        passed = partial(self._passed, layer, parameters)
        can_wait = self._stage != 3 or hidden.is_leaf
        hidden.register_hook(lambda _: self._after_weights(partial(when_complete, passed), can_wait))

    def _after_weights(self, call: Callable[[], None], can_wait: bool) -> None:
        """Run ``call``, which sends the gradients of a layer's weights. If ``can_wait``, it runs at the end
        of the backward pass, else immediately."""
        # When the gradient of the layer's input exists, the gradients of its weights may be incomplete:
        # Paddle may add to them later, for example if there is a cast between weight and matmul. In stage 3,
        # only the first layer can wait, because ranks must send the gradients of a layer before they fetch
        # the values of the previous layer. If more than two such operators follow a weight in stage 3, the
        # run ends with an error.
        if not can_wait:
            call()
        else:
            paddle.base.core.eager._add_backward_final_hook(call)

    def _passed(self, layer: paddle.nn.Layer, parameters: Sequence[paddle.Tensor]) -> None:
        self._passes_of[id(layer)] += 1
        self._order.complete(parameters, self._passes_of[id(layer)])

    def finish_gradients(self) -> None:
        """Wait until all gradients are reduced to their owners. Afterwards, this rank has gradients only of
        the parameters that it owns."""
        for sums in (self._sums, self._order):
            if sums is not None:
                sums.finish()
        for bucket in self._late:
            self._send(bucket)
        while self._under_way:
            self._complete()
        if self._stage == 3:
            # The first layer's input has no gradient, so no hook has freed its values after the backward
            # pass.
            for parameter in self._parameters:
                if not self.owns(parameter) and parameter._is_initialized():
                    parameter._clear_data()

    def _send_full(self, index: int) -> None:
        self._send(self._full[index])

    def _send(self, bucket: Iterable[paddle.Tensor]) -> None:
        """Start to reduce a bucket's gradients to the owner, which accumulates them over micro batches."""
        parameters = [p for p in bucket if is_in_use(p)]
        if not parameters:
            return
        axes, owner, _ = self._bucket_key(parameters[0])
        if not self._overlaps:
            group = self._ctx.group_over(axes)
            reduce_packed([complete_gradient(p) for p in parameters], group, owner)
            self._drop(parameters)
            return
        # The owner must add the gradients of micro batches in order, so wait for earlier reductions.
        while len(self._under_way) == MAX_MESSAGES_IN_FLIGHT or self._is_under_way(parameters):
            self._complete()
        gradients = [take_gradient(p) for p in parameters]
        task = self._start(axes, owner)(flatten_in_place(gradients))
        self._under_way.append((task, parameters, gradients))

    def _is_under_way(self, parameters: Sequence[paddle.Tensor]) -> bool:
        """Return whether a gradient reduction of any of these parameters is still in progress."""
        traveling = {id(p) for _, others, _ in self._under_way for p in others}
        return any(id(p) in traveling for p in parameters)

    def _complete(self) -> None:
        """Wait for the oldest gradient reduction in progress. The owner adds the result to its gradients."""
        task, parameters, gradients = self._under_way.popleft()
        task.wait()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if self.owns(parameter):
                add_gradient(parameter, gradient)
