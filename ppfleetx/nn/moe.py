"""Mixture of experts: a router sends each position to a few MLPs (experts), whose outputs are summed.

Shape letters: s positions of the hidden states on this rank, b sequences, h hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from ppfleetx.config.sections.moe import BATCH_LOSSES
from ppfleetx.nn import routing as choices
from ppfleetx.nn.aux_loss import AuxLoss, local_loss_mask, with_aux_loss
from ppfleetx.nn.matmul import Counts
from ppfleetx.nn.mlp import MLP, Activation
from ppfleetx.nn.mlp_spec import MoESpec
from ppfleetx.nn.recompute import is_recomputing
from ppfleetx.nn.stage import LayerFactory

_WHOLE_SEQUENCES = ("mp", "sep")


class Router(nn.Layer):
    """Chooses the experts of each position, and counts how often each expert is chosen.

    Attributes:
        seen: ``[2, experts]``, how often each expert was chosen in training since the last reset; None: no
            choices yet. Row 0 counts the actual choices, row 1 the choices that the balancing loss uses. Only
            positions that count in the loss are included.
    """

    def __init__(self, factory: LayerFactory, spec: MoESpec) -> None:
        super().__init__()
        self.factory, self.spec, self.cfg = factory, spec, spec.cfg
        self.bias = self.load = None
        for name, one in spec.router_parameters(sequence_parallel=factory.sequence_parallel).items():
            parameter = self.create_parameter(
                list(one.shape), default_initializer=nn.initializer.Constant(0.0)
            )
            parameter.stop_gradient = not one.trains
            factory.declare(parameter, one)
            setattr(self, name, parameter)
        self.jitter = factory.dropout(spec.cfg.router.jitter)
        self.seen: paddle.Tensor | None = None

    def forward(self, hidden: paddle.Tensor) -> tuple[choices.Routing, paddle.Tensor | None, list[AuxLoss]]:
        """Choose the experts of each position of ``hidden [s, b, h]``.

        Returns:
            The routing; a mask of the choices within the experts' capacity, or None if all choices are kept;
                and the router's auxiliary losses and statistics.
        """
        with paddle.amp.auto_cast(enable=False):
            logits = paddle.matmul(self._input(hidden), self.weight.astype("float32"))
            routing = choices.route(logits, self.cfg.top_k, self.cfg.router, self.bias)
            loss_mask = local_loss_mask()
            if loss_mask is None:  # outside of a step
                return routing, None, []
            loss_mask = loss_mask.astype("float32")
            kept = self._kept(routing, loss_mask)
            with paddle.no_grad():
                chosen = choices.chosen_mask(routing.choice, self.cfg.num_experts)
                of_loss = self._counted_by_loss(chosen, routing)
                statistics = list(self._statistics(routing, kept))
                if self.training and not is_recomputing():
                    self._keep_count(chosen, of_loss, loss_mask)
            return routing, kept, [*statistics, *self._losses(logits, routing, of_loss, loss_mask)]

    def _input(self, hidden: paddle.Tensor) -> paddle.Tensor:
        hidden, jitter = hidden.astype("float32"), self.jitter
        if not self.training or not jitter.p:
            return hidden
        with getattr(jitter, "stream", nullcontext)():
            return hidden * paddle.uniform(hidden.shape, min=1.0 - jitter.p, max=1.0 + jitter.p)

    def _kept(self, routing: choices.Routing, loss_mask: paddle.Tensor) -> paddle.Tensor | None:
        capacity = self.cfg.capacity
        if capacity is None or not self.training:
            return None
        known = (routing.choice, routing.weights.detach(), loss_mask)
        kept = choices.within_capacity(
            *(self.factory.all_positions(values) for values in known),
            num_experts=self.cfg.num_experts,
            factor=capacity.factor,
            policy=capacity.policy,
        )
        return self.factory.own_positions(kept)

    def _statistics(self, routing: choices.Routing, kept: paddle.Tensor | None) -> Iterator[AuxLoss]:
        yield AuxLoss("router_entropy", choices.entropy(routing.scores), 0.0)
        if kept is not None:
            yield AuxLoss("dropped_choices", 1.0 - kept.mean(-1), 0.0)

    def _keep_count(self, chosen: paddle.Tensor, of_loss: paddle.Tensor, loss_mask: paddle.Tensor) -> None:
        # Only positions that count in the loss.
        seen = (paddle.stack([chosen, of_loss]) * loss_mask.unsqueeze(-1)).sum([1, 2])
        self.seen = seen if self.seen is None else self.seen + seen

    def _losses(
        self,
        logits: paddle.Tensor,
        routing: choices.Routing,
        of_loss: paddle.Tensor,
        loss_mask: paddle.Tensor,
    ) -> Iterator[AuxLoss]:
        cfg, balance, scores = self.cfg, self.cfg.aux_loss, routing.scores
        if balance.kind == "sequence":
            sums = self.factory.sum_over_positions(choices.sequence_sums(scores, of_loss, loss_mask))
            value = choices.sequence_balance(sums, cfg.top_k)
            yield AuxLoss("balance_loss", value, balance.weight, "sequences", _WHOLE_SEQUENCES)
        elif balance.kind in BATCH_LOSSES:
            pooled = balance.kind == "pooled"
            value = choices.balance_of_shares(scores, self.load) * (cfg.top_k if pooled else 1)
            weight = balance.weight / (self.spec.num_mixtures if pooled else 1)
            yield AuxLoss("balance_loss", value, weight)
        if cfg.z_loss_weight:
            yield AuxLoss("z_loss", choices.z_loss(logits), cfg.z_loss_weight)

    def _counted_by_loss(self, chosen: paddle.Tensor, routing: choices.Routing) -> paddle.Tensor:
        """Return a mask ``[s, b, experts]`` of the choices that the balancing loss counts. Depending on the
        configuration, these are the actual choices (``chosen``) or the experts with the highest scores."""
        cfg = self.cfg
        if cfg.aux_loss.kind == "gshard":  # only the best expert of each position
            return choices.chosen_mask(routing.scores.argmax(-1, keepdim=True), cfg.num_experts)
        if self.bias is None and cfg.router.num_groups is None:
            return chosen
        # The experts with the highest scores, without bias and group limits.
        return choices.chosen_mask(routing.scores.topk(cfg.top_k, -1)[1], cfg.num_experts)

    @paddle.no_grad()
    def balance(self, loads: paddle.Tensor, shares: paddle.Tensor) -> None:
        """Balance the experts after a step: update the router's bias, and store ``shares``, which the
        balancing loss of the next step uses. A frozen router does not change.

        Args:
            loads: ``[experts]``, how often each expert was chosen in the global batch. Used for the bias.
            shares: ``[experts]``, each expert's fraction of the choices that the balancing loss counts. The
                fractions sum to 1. With the loss ``pooled``, they are the means over all layers.
        """
        if self.weight.stop_gradient:
            return
        rate = self.cfg.bias_update_rate
        if self.bias is not None and rate and self.bias._is_initialized():
            self.bias.set_value(choices.moved_bias(self.bias.detach(), loads, rate))
        if self.load is not None and self.load._is_initialized():
            self.load.set_value(shares)


class Experts(nn.Layer):
    def __init__(self, factory: LayerFactory, spec: MoESpec) -> None:
        super().__init__()
        self.exchange = factory.experts
        self.activation = Activation(factory, spec.expert.activation)
        self.fc1, self.fc2 = factory.grouped_linear(spec.fc1), factory.grouped_linear(spec.fc2)

    def forward(self, rows: paddle.Tensor, counts: Counts) -> paddle.Tensor:
        """Apply each expert to its rows in ``rows [rows, h]``, which are sorted by expert. The result has the
        same shape."""
        inner = self.activation(self.fc1(rows, counts).unsqueeze(0)).squeeze(0)
        return self.fc2(inner, counts, adds_bias=self.exchange.adds_output_bias)


class MoE(nn.Layer):
    """A mixture of experts on ``[s, b, h]``, with optional shared experts that process every position."""

    def __init__(self, factory: LayerFactory, spec: MoESpec) -> None:
        super().__init__()
        self.exchange, self.num_experts = factory.experts, spec.cfg.num_experts
        self.router, self.experts = Router(factory, spec), Experts(factory, spec)
        self.shared = None if spec.shared is None else MLP(factory, spec.shared)
        self.shared_gate = None if spec.shared_gate is None else factory.linear(spec.shared_gate)

    def forward(self, hidden: paddle.Tensor) -> paddle.Tensor:
        routing, kept, losses = self.router(hidden)
        result = self._mixed(hidden, routing, kept)
        for loss in losses:
            result = with_aux_loss(result, loss)
        return result

    def _mixed(
        self, hidden: paddle.Tensor, routing: choices.Routing, kept: paddle.Tensor | None
    ) -> paddle.Tensor:
        exchange, width = self.exchange, hidden.shape[-1]
        rows, choice, weights = (
            exchange.own(tensor.reshape([-1, tensor.shape[-1]]))
            for tensor in (hidden, routing.choice, routing.weights)
        )
        kept = None if kept is None else exchange.own(kept.reshape([-1, kept.shape[-1]]))
        order = Order(choice, self.num_experts, kept)
        journey = exchange.dispatch(order.dispatch(rows), order.counts)
        shared = self._shared(hidden)  # while rows are in transit
        outputs = journey.back(self.experts(*journey.arrive()))
        mixed = exchange.whole(order.combine(outputs, weights), hidden.shape[0] * hidden.shape[1])
        mixed = mixed.reshape([*hidden.shape[:-1], width])
        return mixed if shared is None else mixed + shared

    def _shared(self, hidden: paddle.Tensor) -> paddle.Tensor | None:
        if self.shared is None:
            return None
        shared = self.shared(hidden)
        return shared if self.shared_gate is None else shared * F.sigmoid(self.shared_gate(hidden))


class Order:
    """Sorts rows by expert, and restores the original order.

    Args:
        choice: ``[positions, top_k]``, experts of each position.
        kept: ``[positions, top_k]``, 1 for choices within the experts' capacity, 0 for dropped ones; None:
            all are kept.

    Attributes:
        counts: ``[experts]`` int64, number of rows of each expert.
    """

    @paddle.no_grad()
    def __init__(self, choice: paddle.Tensor, num_experts: int, kept: paddle.Tensor | None) -> None:
        self._k, self.kept = choice.shape[1], kept
        experts = choice.reshape([-1])
        if kept is not None:  # dropped choices are sorted last and removed
            experts = paddle.where(kept.reshape([-1]) > 0, experts, paddle.full([], num_experts, "int64"))
        order = experts.argsort(stable=True)
        if paddle.in_dynamic_mode():
            place = paddle.scatter(paddle.empty_like(order), order, paddle.arange(order.shape[0]))
        else:  # while exporting, when the number of rows is unknown
            place = order.argsort()
        self.counts = paddle.bincount(experts, minlength=num_experts)
        if kept is not None:
            self.counts = self.counts[:num_experts]
            left = int(self.counts.sum())
            order, place = order[:left], place.clip(max=left - 1)
        self._order, self._place = order, place.reshape(choice.shape)

    def dispatch(self, rows: paddle.Tensor) -> paddle.Tensor:
        """Return one row per kept choice, sorted by expert. Each is a copy of its position's row in
        ``rows [positions, h]``."""
        if not paddle.in_dynamic_mode():  # while exporting
            return self.gather(rows)
        return _Dispatch.apply(rows, self)

    def combine(self, outputs: paddle.Tensor, weights: paddle.Tensor) -> paddle.Tensor:
        """Return the weighted sum of the outputs of each position's experts, ``[positions, h]``.

        Args:
            outputs: one row per kept choice, sorted by expert.
            weights: ``[positions, top_k]``. Weights of dropped choices are ignored.
        """
        if self.kept is not None:
            weights = weights * self.kept
        weights = weights.astype(outputs.dtype)
        if not paddle.in_dynamic_mode():
            return self.add_up(outputs, weights)
        return _Combine.apply(outputs, weights, self)

    def gather(self, rows: paddle.Tensor) -> paddle.Tensor:
        """Return the same rows as :meth:`dispatch`, without its custom backward pass."""
        return rows.index_select(self._order // self._k)

    def add_up(self, outputs: paddle.Tensor, weights: paddle.Tensor | None) -> paddle.Tensor:
        """Return the sum of the outputs of each position's experts, ``[positions, h]``, without the custom
        backward pass of :meth:`combine`.

        Args:
            outputs: one row per kept choice, sorted by expert.
            weights: ``[positions, top_k]``, weights of the outputs. The weights of dropped choices must be 0.
                None: the sum is not weighted; then no choice may have been dropped.
        """
        if self.kept is not None and outputs.shape[0] == 0:  # all choices of this rank were dropped
            return paddle.zeros([self._place.shape[0], outputs.shape[-1]], outputs.dtype)
        if weights is not None:
            parts = outputs.index_select(self._place.reshape([-1])).reshape([-1, self._k, outputs.shape[-1]])
            return paddle.bmm(weights.unsqueeze(1), parts).squeeze(1)
        total = outputs.index_select(self._place[:, 0])
        for j in range(1, self._k):
            total.add_(outputs.index_select(self._place[:, j]))
        return total

    def of_choices(self, values: paddle.Tensor) -> paddle.Tensor:
        """Convert ``values [positions, top_k]`` to ``[kept choices, 1]``, sorted by expert."""
        return values.reshape([-1, 1]).index_select(self._order)

    def of_positions(self, values: paddle.Tensor) -> paddle.Tensor:
        """Convert ``values`` from one per kept choice, sorted by expert, to ``[positions, top_k]``. The
        entries of dropped choices are arbitrary."""
        if values.shape[0] == 0:
            return paddle.zeros(self._place.shape, values.dtype)
        return values.index_select(self._place.reshape([-1])).reshape(self._place.shape)


class _Dispatch(PyLayer):
    @staticmethod
    def forward(ctx: Any, rows: paddle.Tensor, order: Order) -> paddle.Tensor:
        ctx.order = order
        return order.gather(rows)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> paddle.Tensor:
        kept = ctx.order.kept
        return ctx.order.add_up(upstream, None if kept is None else kept.astype(upstream.dtype))


class _Combine(PyLayer):
    @staticmethod
    def forward(ctx: Any, outputs: paddle.Tensor, weights: paddle.Tensor, order: Order) -> paddle.Tensor:
        ctx.order = order
        ctx.save_for_backward(outputs, weights)
        return order.add_up(outputs, weights)

    @staticmethod
    def backward(ctx: Any, upstream: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        outputs, weights = ctx.saved_tensor()
        order, rows = ctx.order, ctx.order.gather(upstream)
        # Rows are summed by a product with ones, because Paddle's CPU kernels sum rows slowly.
        of_weights = paddle.matmul(rows * outputs, paddle.ones([rows.shape[1], 1], rows.dtype))
        return rows * order.of_choices(weights), order.of_positions(of_weights)
