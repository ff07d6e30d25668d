"""Token loss in float32."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F


def token_loss(
    logits: paddle.Tensor, labels: paddle.Tensor, loss_mask: paddle.Tensor, true_vocab: int
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Sum of the cross entropy over the tokens that count, and how many count.

    The caller divides by the global count, so that neither micro batches nor data ranks change the loss.

    Args:
        logits: ``[s, b, V]``; columns from ``true_vocab`` on are padding and take no probability.
        labels: ``[b, s]`` int64, below ``true_vocab`` wherever the mask is not 0.
        loss_mask: ``[b, s]`` float32 weights, usually 0 or 1.
        true_vocab: size of the vocabulary without padding.

    Returns:
        (loss sum, token count), float32 scalars; the count carries no gradient.
    """
    vocab = logits.shape[-1]
    logits = logits.astype("float32")
    if true_vocab < vocab:
        logits = paddle.where(
            paddle.arange(vocab) < true_vocab, logits, paddle.full([], -1e9, dtype="float32")
        )
    per_token = F.cross_entropy(logits, labels.transpose([1, 0]).unsqueeze(-1), reduction="none").squeeze(-1)
    weights = loss_mask.astype("float32").transpose([1, 0])
    return (per_token * weights).sum(), weights.sum().detach()
