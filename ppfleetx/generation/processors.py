"""Operations on logits: penalties, temperature, top-k and top-p, as defined in Hugging Face transformers.

All but :func:`typical` can be exported.

Shape letters: b rows, n positions so far, V vocabulary, m tokens left to choose from.
"""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F

from ppfleetx.nn.cpu_ops import ops as cpu_ops

# Within float32 precision, a temperature or top_p below this selects the likeliest token. Much smaller values
# would overflow or underflow, and leave nothing to draw.
SMALLEST = 1e-6


def penalize_repetition(logits: paddle.Tensor, history: paddle.Tensor, penalty: float) -> paddle.Tensor:
    """Make tokens that have occurred less likely (Keskar et al., 2019): ``history`` is ``[b, n]`` int64.

    A token's logit is divided by ``penalty`` if it is positive, and multiplied by it if negative, once,
    however often the token occurred.
    """
    seen = paddle.take_along_axis(logits, history, axis=1)
    seen = paddle.where(seen < 0, seen * penalty, seen / penalty)
    return paddle.put_along_axis(logits, history, seen, axis=1)


def forbid(logits: paddle.Tensor, ids: paddle.Tensor) -> paddle.Tensor:
    """Give the tokens ``ids [e]`` int64 probability 0 in ``logits [b, V]``."""
    columns = is_any_of(paddle.arange(logits.shape[-1]), ids)
    return paddle.where(columns, paddle.full([], -np.inf, dtype=logits.dtype), logits)


def is_any_of(tokens: paddle.Tensor, ids: paddle.Tensor) -> paddle.Tensor:
    """Whether each of ``tokens [m]`` is one of ``ids [e]``, ``[m]`` bool."""
    return (tokens.unsqueeze(-1) == ids).any(-1)


def force(logits: paddle.Tensor, token_id: int, rows: paddle.Tensor) -> paddle.Tensor:
    """Put all probability of ``logits [b, V]`` on one token, in the rows where ``rows [b]`` is true."""
    column = paddle.arange(logits.shape[-1]) == token_id
    forced = paddle.where(
        column, paddle.zeros([], dtype=logits.dtype), paddle.full([], -np.inf, dtype=logits.dtype)
    )
    return paddle.where(rows.unsqueeze(-1), forced.unsqueeze(0), logits)


def candidates(
    logits: paddle.Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> paddle.Tensor:
    """Apply temperature, top-k, top-p, min-p and typical-p, in this order, and return the distribution: ``[b,
    V]`` probabilities up to a factor per row, 0 where a token is not kept.

    Top-k keeps the k likeliest tokens (0: all). Top-p renormalizes these and keeps the smallest set of
    likeliest tokens whose probability reaches p (Holtzman et al., 2020); at least one is kept. Min-p keeps
    the tokens with at least this share of the largest probability (Nguyen et al., 2024).
    """
    temperature, top_p = max(temperature, SMALLEST), max(top_p, SMALLEST)
    if temperature != 1.0:
        logits = logits / temperature
    vocab = logits.shape[-1]
    if 0 < top_k < vocab:
        values, ids = largest(logits, top_k)
        kept = F.softmax(values, axis=-1)
        kept = by_id(kept if top_p >= 1.0 else keep_top_p(kept, top_p), ids, vocab)
    else:
        kept = F.softmax(logits, axis=-1)
        kept = kept if top_p >= 1.0 else nucleus(kept, top_p)
    if min_p > 0.0:
        kept = kept * (kept >= min_p * kept.max(-1, keepdim=True)).astype(kept.dtype)
    return kept if typical_p >= 1.0 else typical(kept, typical_p)


def typical(weights: paddle.Tensor, mass: float) -> paddle.Tensor:
    """Locally typical sampling (Meister et al., 2022) of ``weights [b, V]``, probabilities up to a factor per
    row.

    Keeps the tokens whose information is nearest to the entropy, until their probability reaches ``mass``.
    """
    given = weights.numpy()
    probabilities = given.astype(np.float64) / given.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        information = -np.log(probabilities)
        entropy = np.nansum(probabilities * information, axis=-1, keepdims=True)
    distance = np.abs(information - entropy)
    order = np.argsort(distance, axis=-1, kind="stable")
    reached = np.take_along_axis(probabilities, order, axis=-1).cumsum(-1)
    last = np.minimum((reached < mass).sum(-1, keepdims=True), given.shape[-1] - 1)
    farthest = np.take_along_axis(distance, np.take_along_axis(order, last, axis=-1), axis=-1)
    return paddle.to_tensor(given * (distance <= farthest))


def by_id(probabilities: paddle.Tensor, ids: paddle.Tensor, vocab_size: int) -> paddle.Tensor:
    """Scatter ``probabilities [b, m]`` of tokens ``ids [b, m]`` into ``[b, vocab_size]``, 0 for other tokens.
    Unlike in sorted order, two almost equally likely tokens do not swap places if the last bits of their
    probabilities change."""
    nothing = paddle.zeros([probabilities.shape[0], vocab_size], dtype=probabilities.dtype)
    return paddle.put_along_axis(nothing, ids, probabilities, axis=1)


def largest(values: paddle.Tensor, count: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The ``count`` largest values in each row of ``values [b, m]``, descending, and their columns."""
    if not _is_on_host(values):
        return paddle.topk(values, count, axis=-1)
    # Paddle's CPU kernel sorts whole rows; NumPy selects first, which is several times faster.
    array = values.numpy()
    if count < array.shape[-1]:
        columns = np.argpartition(array, -count, axis=-1)[:, -count:]
        order = np.argsort(-np.take_along_axis(array, columns, axis=-1), axis=-1)
        columns = np.take_along_axis(columns, order, axis=-1)
    else:
        columns = np.argsort(-array, axis=-1)
    return paddle.to_tensor(np.take_along_axis(array, columns, axis=-1)), paddle.to_tensor(columns)


def log_probabilities(logits: paddle.Tensor) -> paddle.Tensor:
    """``log_softmax`` of ``logits [b, V]``; Paddle's own kernel takes a second for 8 rows on a CPU."""
    shifted = logits - logits.max(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def keep_top_p(falling: paddle.Tensor, top_p: float | paddle.Tensor) -> paddle.Tensor:
    """Set probabilities ``[b, m]``, in descending order, to zero after their sum has reached ``top_p``."""
    return paddle.where(_before(falling) < _in_float32(top_p), falling, paddle.zeros([], falling.dtype))


def nucleus(probabilities: paddle.Tensor, top_p: float) -> paddle.Tensor:
    """Apply top-p to probabilities ``[b, V]`` in the order of ids. Of equal probabilities, lower ids are
    kept.

    There are four implementations: our operator, NumPy if it has not been compiled, a sort on a GPU, and
    :mod:`ppfleetx.deploy.static.token_choice` in an exported program, which cannot use NumPy. All keep the
    same tokens, which the tests verify. On a CPU, 8 rows of 50304 take NumPy 2.5 ms, the program 18 ms and a
    sort 98 ms.
    """
    if _is_on_host(probabilities):
        if cpu_ops.are_available():
            return cpu_ops.nucleus(probabilities, paddle.full([1], top_p, "float32"))
        # Paddle's CPU kernels take longer to sort two rows than a small model takes for a step.
        rows = probabilities.numpy()
        return paddle.to_tensor(np.stack([_nucleus_of_row(row, top_p) for row in rows]))
    # Only values are sorted, to find the smallest one to keep: sorting ids as well would take far longer.
    smallest, count = last_kept(paddle.sort(probabilities, axis=-1, descending=True), top_p)
    return keep_from(probabilities, smallest, count)


def _nucleus_of_row(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Apply :func:`nucleus` to one row ``[V]``, sorting only the bucket of values in which p is reached."""
    top_p = _in_float32(top_p)
    # Buckets by exponent and the top 8 bits of the fraction, which sort like the numbers: none is negative.
    bucket = probabilities.view(np.int32) >> 15
    bucket = (bucket - bucket.min()).astype(np.int64)
    up_to = np.bincount(bucket, weights=probabilities).cumsum()
    above = up_to[-1] - up_to
    # If rounding keeps the total below p, every token is kept.
    boundary = max(np.count_nonzero(above >= top_p), np.count_nonzero(up_to <= 0))
    inside = np.sort(probabilities[bucket == boundary])[::-1]
    short = np.count_nonzero(above[boundary] + inside.cumsum(dtype=np.float64) < top_p)
    count = min(short + 1, len(inside))
    smallest = inside[count - 1]
    kept = probabilities >= smallest
    too_many = np.count_nonzero(inside == smallest) - np.count_nonzero(inside[:count] == smallest)
    if too_many:
        kept[np.flatnonzero(probabilities == smallest)[-too_many:]] = False
    return probabilities * kept  # several times faster than np.where


def last_kept(falling: paddle.Tensor, top_p: float | paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The smallest of the probabilities ``[b, m]`` that top-p keeps, and how many it keeps; ``[b, 1]`` each.
    They must be in descending order, with a sum of at least p."""
    count = (_before(falling) < _in_float32(top_p)).astype("int64").sum(-1, keepdim=True)
    return paddle.take_along_axis(falling, count - 1, axis=1), count


def keep_from(probabilities: paddle.Tensor, smallest: paddle.Tensor, count: paddle.Tensor) -> paddle.Tensor:
    """Zero all but the ``count`` largest of ``probabilities [b, V]``; ``smallest`` is the last one kept."""
    kept = probabilities >= smallest
    too_many = kept.astype("int64").sum(-1, keepdim=True) - count
    if bool((too_many > 0).any()):
        equal = (probabilities == smallest).astype("int64")
        room = equal.sum(-1, keepdim=True) - too_many
        kept = paddle.logical_and(kept, paddle.logical_or(equal == 0, equal.cumsum(-1) <= room))
    return paddle.where(kept, probabilities, paddle.zeros([], dtype=probabilities.dtype))


def _before(falling: paddle.Tensor) -> paddle.Tensor:
    """The float64 sum of all elements before each element of a row, equal in all implementations."""
    cumulative = falling.astype("float64").cumsum(-1)
    return paddle.concat([paddle.zeros_like(cumulative[:, :1]), cumulative[:, :-1]], axis=-1)


def _in_float32(top_p: float | paddle.Tensor) -> float | paddle.Tensor:
    """Round ``top_p`` to float32, like our operator and exported programs; tensors come out as float64."""
    return np.float32(top_p).item() if isinstance(top_p, float) else top_p.astype("float64")


def _is_on_host(tensor: paddle.Tensor) -> bool:
    """Whether NumPy can work on ``tensor``: it is in host memory, and no program is being exported."""
    return paddle.in_dynamic_mode() and tensor.place.is_cpu_place()
