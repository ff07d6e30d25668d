"""Choice of experts, balancing losses and capacity as functions of a router's logits, in float32.

Shape letters: s positions on this rank, b sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import paddle
import paddle.nn.functional as F

from ppfleetx.config.sections.moe import RouterConfig

_TINY = 1e-20  # as in DeepSeek-V3; the sigmoids of all chosen experts can be 0


class Routing(NamedTuple):
    """A router's decision for each position.

    Attributes:
        choice: ``[s, b, top_k]`` chosen experts, the best one first.
        weights: ``[s, b, top_k]`` weights of the chosen experts' outputs.
        scores: ``[s, b, experts]`` scores of all experts, normalized to sum 1.
    """

    choice: paddle.Tensor
    weights: paddle.Tensor
    scores: paddle.Tensor


def route(logits: paddle.Tensor, top_k: int, cfg: RouterConfig, bias: paddle.Tensor | None = None) -> Routing:
    """Choose the ``top_k`` experts of each position from ``logits [s, b, experts]``. ``bias [experts]`` is
    added to the scores for the choice only, not for the weights."""
    if cfg.score == "softmax":
        own = shares = F.softmax(logits)
    else:
        own = F.sigmoid(logits)
        shares = own / (own.sum(-1, keepdim=True) + _TINY)
    choice = _choose(own, top_k, cfg, bias)
    if cfg.normalize and cfg.score == "softmax":
        weights = F.softmax(logits.take_along_axis(choice, -1))
    else:
        weights = own.take_along_axis(choice, -1)
        if cfg.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return Routing(choice, weights if cfg.scale == 1 else weights * cfg.scale, shares)


@paddle.no_grad()
def _choose(
    scores: paddle.Tensor, top_k: int, cfg: RouterConfig, bias: paddle.Tensor | None
) -> paddle.Tensor:
    if bias is not None:
        scores = scores + bias
    if cfg.num_groups is not None:
        grouped = scores.reshape([*scores.shape[:-1], cfg.num_groups, -1])
        best = grouped.topk(2, -1)[0].sum(-1) if cfg.group_score == "top2" else grouped.max(-1)
        kept = chosen_mask(best.topk(cfg.top_groups, -1)[1], cfg.num_groups).unsqueeze(-1)
        scores = paddle.where(
            kept.expand_as(grouped) > 0, grouped, paddle.full([], -float("inf"), scores.dtype)
        )
        scores = scores.reshape([*kept.shape[:-2], -1])
    return scores.topk(top_k, -1)[1]


def chosen_mask(choice: paddle.Tensor, count: int) -> paddle.Tensor:
    """Convert expert indices ``choice [..., top_k]`` to a mask ``[..., count]``: 1 for chosen experts, 0 for
    others."""
    zeros = paddle.zeros([*choice.shape[:-1], count], "float32")
    return zeros.put_along_axis(choice, paddle.ones([], "float32"), -1)


# -- values of the auxiliary losses (:class:`~ppfleetx.nn.aux_loss.AuxLoss`)


def sequence_sums(scores: paddle.Tensor, chosen: paddle.Tensor, loss_mask: paddle.Tensor) -> paddle.Tensor:
    """Return three weighted sums over the positions of each sequence on this rank: the choices of each
    expert, the scores of each expert, and the number of positions. The sums are concatenated to
    ``[b, 2 * experts + 1]``.

    Args:
        scores, chosen: ``[s, b, experts]``; ``chosen`` is 1 for chosen experts, else 0.
        loss_mask: ``[s, b]``, weight of each position.
    """
    of_each = loss_mask.unsqueeze(-1)
    return paddle.concat([(chosen * of_each).sum(0), (scores * of_each).sum(0), of_each.sum(0)], -1)


def sequence_balance(sums: paddle.Tensor, top_k: int) -> paddle.Tensor:
    """Return the balancing loss of each sequence, ``[b]`` (Wang et al., 2024).

    Args:
        sums: ``[b, 2 * experts + 1]``, the result of :func:`sequence_sums`, summed over the ranks that hold
            different positions of the same sequences.
    """
    experts = (sums.shape[-1] - 1) // 2
    choices, scores, positions = sums.split([experts, experts, 1], -1)
    positions = positions.clip(min=1.0)
    # E sum_e f_e P_e, with f_e the expert's share of the choices, and P_e its mean score.
    return experts * (choices / (top_k * positions) * scores / positions).sum(-1)


def balance_of_shares(scores: paddle.Tensor, shares: paddle.Tensor) -> paddle.Tensor:
    """Return the balancing loss of each position, ``[s, b]``: the number of experts times
    ``sum(scores * shares)``.

    Args:
        scores: ``[s, b, experts]``.
        shares: ``[experts]``, each expert's share of all choices.
    """
    return scores.shape[-1] * (scores * shares).sum(-1)


def z_loss(logits: paddle.Tensor) -> paddle.Tensor:
    """Return the squared log-sum-exp of each position's logits, ``[s, b]`` (Zoph et al., 2022)."""
    return logits.logsumexp(-1).square()


def entropy(scores: paddle.Tensor) -> paddle.Tensor:
    """Return the entropy of each position's scores, ``[s, b]``. It is largest if all experts have equal
    scores, and 0 if one expert has score 1."""
    return -(scores * scores.clip(min=_TINY).log()).sum(-1)


# -- loss-free balancing, and capacity


def moved_bias(bias: paddle.Tensor, loads: paddle.Tensor, rate: float) -> paddle.Tensor:
    """Return ``bias [experts]`` after an update. The bias of an expert is raised by ``rate`` if its load is
    below the mean of ``loads [experts]``, and lowered by ``rate`` if it is above."""
    return bias + rate * (loads.mean() - loads).sign()


@paddle.no_grad()
def within_capacity(
    choice: paddle.Tensor,
    weights: paddle.Tensor,
    loss_mask: paddle.Tensor,
    *,
    num_experts: int,
    factor: float,
    policy: str,
) -> paddle.Tensor:
    """Return a mask of the choices that fit into the experts' capacity, ``[s, b, top_k]``: 1 for kept
    choices, 0 for dropped ones. All positions of the sequences must be on this rank.

    Args:
        loss_mask: ``[s, b]``, 1 for positions that count in the loss, else 0. The choices of other positions
            are never dropped.
        factor: capacity factor. In each sequence, an expert keeps at most ``factor`` times the mean number of
            choices per expert.
        policy: ``position``: an expert keeps the choices of the first positions. ``probs``: an expert keeps
            the choices with the largest weights.
    """
    chosen = chosen_mask(choice, num_experts) * loss_mask.unsqueeze(-1)
    if policy == "position":
        place = chosen.cumsum(0)
    else:
        order = paddle.zeros_like(chosen).put_along_axis(choice, weights, -1) * chosen
        place = order.argsort(0, descending=True, stable=True).argsort(0) + 1.0
    limit = factor * choice.shape[-1] / num_experts * loss_mask.sum(0)
    limit = (limit * (1 - 1e-6)).ceil().reshape([1, -1, 1])  # float32 can round to just above an integer
    dropped = (chosen * (place > limit).astype(chosen.dtype)).take_along_axis(choice, -1)
    return 1.0 - dropped
