"""Operations on the logits or probabilities of the next token, such as penalties, temperature, top-k and
top-p, as in Hugging Face transformers.

Shape letters: b rows (sequences of the batch), V vocabulary size, m candidate tokens.
"""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F

from ppfleetx.nn.cpu_ops import ops as cpu_ops

# The lower limit of temperature and top_p; smaller values are raised to it. At this limit, the likeliest
# token is already certain in float32. Much smaller values would overflow or underflow.
SMALLEST = 1e-6


def penalize_repetition(logits: paddle.Tensor, history: paddle.Tensor, penalty: float) -> paddle.Tensor:
    """Apply the repetition penalty (Keskar et al., 2019) to ``logits [b, V]``. ``history`` are the token ids
    of each row so far, int64 [b, length]."""
    seen = paddle.take_along_axis(logits, history, axis=1)
    seen = paddle.where(seen < 0, seen * penalty, seen / penalty)
    return paddle.put_along_axis(logits, history, seen, axis=1)


def forbid(logits: paddle.Tensor, ids: paddle.Tensor) -> paddle.Tensor:
    """Set the logits of the tokens ``ids`` (a flat int64 tensor) to -inf in all rows of ``logits [b, V]``."""
    columns = is_any_of(paddle.arange(logits.shape[-1]), ids)
    return paddle.where(columns, paddle.full([], -np.inf, dtype=logits.dtype), logits)


def is_any_of(tokens: paddle.Tensor, ids: paddle.Tensor) -> paddle.Tensor:
    """Return whether each of the token ids ``tokens`` is one of ``ids``, as bool in the shape of ``tokens``.
    Both inputs are flat tensors."""
    return (tokens.unsqueeze(-1) == ids).any(-1)


def force(logits: paddle.Tensor, token_id: int, rows: paddle.Tensor) -> paddle.Tensor:
    """Allow only the token ``token_id`` in the rows of ``logits [b, V]`` for which ``rows [b]`` is true."""
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
    """Apply temperature, top-k, top-p (Holtzman et al., 2020), min-p (Nguyen et al., 2024) and typical-p, in
    this order, to ``logits [b, V]``. Returns unnormalized probabilities ``[b, V]``, which are 0 for tokens
    that are filtered out. ``top_k=0`` keeps all tokens."""
    temperature, top_p = max(temperature, SMALLEST), max(top_p, SMALLEST)
    if temperature != 1.0:
        logits = logits / temperature
    vocab = logits.shape[-1]
    if 0 < top_k < vocab:
        values, ids = largest(logits, top_k)
        kept = F.softmax(values, axis=-1)
        kept = scatter_by_id(kept if top_p >= 1.0 else keep_top_p(kept, top_p), ids, vocab)
    else:
        kept = F.softmax(logits, axis=-1)
        kept = kept if top_p >= 1.0 else nucleus(kept, top_p)
    if min_p > 0.0:
        kept = kept * (kept >= min_p * kept.max(-1, keepdim=True)).astype(kept.dtype)
    return kept if typical_p >= 1.0 else typical(kept, typical_p)


def typical(weights: paddle.Tensor, mass: float) -> paddle.Tensor:
    """Apply locally typical sampling (Meister et al., 2022) to unnormalized probabilities ``[b, V]``. The
    tokens whose information -log p is closest to the entropy are kept, until their probabilities sum to
    ``mass``. The others get probability 0. This does not work in exported programs."""
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
    # Tokens as close to the entropy as the last one are kept, too.
    return paddle.to_tensor(given * (distance <= farthest))


def scatter_by_id(probabilities: paddle.Tensor, ids: paddle.Tensor, vocab_size: int) -> paddle.Tensor:
    """Return the probabilities of the whole vocabulary in the order of token ids, ``[b, vocab_size]``. The
    candidate tokens ``ids [b, m]`` get ``probabilities [b, m]``, and all other tokens get 0."""
    # If tokens stayed sorted by probability, rounding could swap two almost equally likely tokens.
    nothing = paddle.zeros([probabilities.shape[0], vocab_size], dtype=probabilities.dtype)
    return paddle.put_along_axis(nothing, ids, probabilities, axis=1)


def largest(values: paddle.Tensor, count: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the ``count`` largest values in each row of a matrix, in descending order, and their column
    indices."""
    if not _numpy_can_read(values):
        return paddle.topk(values, count, axis=-1)
    # NumPy's argpartition is several times faster than Paddle's CPU kernel, which sorts whole rows.
    array = values.numpy()
    if count < array.shape[-1]:
        columns = np.argpartition(array, -count, axis=-1)[:, -count:]
        order = np.argsort(-np.take_along_axis(array, columns, axis=-1), axis=-1)
        columns = np.take_along_axis(columns, order, axis=-1)
    else:
        columns = np.argsort(-array, axis=-1)
    return paddle.to_tensor(np.take_along_axis(array, columns, axis=-1)), paddle.to_tensor(columns)


def log_probabilities(logits: paddle.Tensor) -> paddle.Tensor:
    """Return ``log_softmax`` of ``logits [b, V]``."""
    # Paddle's own kernel takes a second for 8 rows on a CPU.
    shifted = logits - logits.max(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def keep_top_p(falling: paddle.Tensor, top_p: float | paddle.Tensor) -> paddle.Tensor:
    """Apply top-p to ``falling [b, m]``, probabilities of candidate tokens in descending order. Once the
    probabilities of a row sum to ``top_p``, the rest of the row becomes 0."""
    return paddle.where(_sum_before(falling) < _as_float64(top_p), falling, paddle.zeros([], falling.dtype))


def nucleus(probabilities: paddle.Tensor, top_p: float) -> paddle.Tensor:
    """Apply top-p to probabilities ``[b, V]``, which are not sorted: column i is token id i. Among equally
    likely tokens at the limit, lower ids are kept."""
    if _numpy_can_read(probabilities):
        if cpu_ops.are_available():
            return cpu_ops.nucleus(probabilities, paddle.full([1], top_p, "float32"))
        # Paddle's CPU sort of two rows takes longer than a whole step of a small model.
        rows = probabilities.numpy()
        return paddle.to_tensor(np.stack([_nucleus_of_row(row, top_p) for row in rows]))
    # Sorting only values, to find the smallest value to keep, is much faster than sorting ids as well.
    smallest, count = last_kept(paddle.sort(probabilities, axis=-1, descending=True), top_p)
    return keep_from(probabilities, smallest, count)


def _nucleus_of_row(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Apply top-p to one row of probabilities ``[V]`` with NumPy."""
    top_p = _as_float64(top_p)
    # Only the bucket in which the sum reaches top_p is sorted. Sorting the whole row is far slower.
    # A bucket is a float32's exponent and its top 8 fraction bits. As integers, these bits have the order of
    # the probabilities, because none is negative.
    bucket = probabilities.view(np.int32) >> 15
    bucket = (bucket - bucket.min()).astype(np.int64)
    up_to = np.bincount(bucket, weights=probabilities).cumsum()
    above = up_to[-1] - up_to
    # If rounding keeps the total below top_p, every token is kept.
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
    """Return the smallest probability that top-p keeps in each row, and how many it keeps, ``[b, 1]`` each.
    ``falling [b, m]`` are probabilities in descending order. Each row must sum to at least ``top_p``."""
    count = (_sum_before(falling) < _as_float64(top_p)).astype("int64").sum(-1, keepdim=True)
    return paddle.take_along_axis(falling, count - 1, axis=1), count


def keep_from(probabilities: paddle.Tensor, smallest: paddle.Tensor, count: paddle.Tensor) -> paddle.Tensor:
    """Keep the ``count`` largest values in each row of ``probabilities [b, V]``, and set all others to 0.
    ``smallest`` is the smallest value to keep; among values equal to it, lower ids are kept. ``count`` and
    ``smallest`` are ``[b, 1]``."""
    kept = probabilities >= smallest
    too_many = kept.astype("int64").sum(-1, keepdim=True) - count
    if bool((too_many > 0).any()):
        equal = (probabilities == smallest).astype("int64")
        room = equal.sum(-1, keepdim=True) - too_many
        kept = paddle.logical_and(kept, paddle.logical_or(equal == 0, equal.cumsum(-1) <= room))
    return paddle.where(kept, probabilities, paddle.zeros([], dtype=probabilities.dtype))


def _sum_before(falling: paddle.Tensor) -> paddle.Tensor:
    """Return, for each value in a row, the sum of the values before it, in float64. All implementations of
    top-p use this sum, so they keep the same tokens."""
    cumulative = falling.astype("float64").cumsum(-1)
    return paddle.concat([paddle.zeros_like(cumulative[:, :1]), cumulative[:, :-1]], axis=-1)


def _as_float64(top_p: float | paddle.Tensor) -> float | paddle.Tensor:
    """Return ``top_p`` in float64. A Python number is first rounded to float32."""
    # The C++ operator and exported programs get float32. All implementations must keep the same tokens.
    return np.float32(top_p).item() if isinstance(top_p, float) else top_p.astype("float64")


def _numpy_can_read(tensor: paddle.Tensor) -> bool:
    return paddle.in_dynamic_mode() and tensor.place.is_cpu_place()
