"""Attention kernels, and the choice between them.

Shape letters: b batch, q query positions, k key positions, g key/value heads, r query heads per key/value
head, d head size. Kernels map ``query [b, g, r, q, d]`` and ``key, value [b, g, k, d]`` to
``[b, g, r, q, d]``. Values can be narrower than keys. The result has the width of the values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import paddle
import paddle.nn.functional as F
from paddle import _C_ops, nn

from ppfleetx.config.errors import ConfigError
from ppfleetx.distributed.device import on_card
from ppfleetx.nn.cpu_ops import bfloat16
from ppfleetx.nn.flash import HALF_PRECISION, drops, flash_attention, flash_obstacle, flash_version
from ppfleetx.nn.fused_ops import NO_FUSED_OPS, FusedOps
from ppfleetx.nn.layers import add_smaller
from ppfleetx.nn.masks import mask_scores
from ppfleetx.utils.log import get_logger


@dataclass(frozen=True)
class KernelOptions:
    """Options of the attention kernels.

    Attributes:
        kernel: a value of ``Model.attention_kernel``.
        softmax_in_fp32: whether the softmax of 16-bit scores is in float32.
        qk_scale_guard: divisor that keeps 16-bit scores from overflowing float16. Scores are multiplied by it
            again before the softmax.
    """

    kernel: str = "auto"
    softmax_in_fp32: bool = True
    qk_scale_guard: float = 1.0
    fused: FusedOps = NO_FUSED_OPS
    softcap: float | None = None


def attend(
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    document_start: paddle.Tensor | None,
    dropout: nn.Layer,
    options: KernelOptions,
    penalty: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Compute causal attention with the kernel chosen by ``options``. Queries that follow cached keys always
    use the reference kernel.

    Args:
        document_start: ``[batch, queries]``, the first position that each query may attend to; None: no
            limit.
        penalty: added to the scores in place of the causal mask and ``document_start``. It broadcasts against
            ``[batch, heads, queries, keys]``.

    Raises:
        ConfigError: ``options`` require flash attention, and it cannot run here.
    """
    if options.kernel == "reference":
        return reference_attention(query, key, value, document_start, dropout, options, penalty)
    if options.softcap is None:
        obstacle = flash_obstacle(
            query, dropout, has_documents=document_start is not None, fused=options.fused
        )
    else:
        obstacle = "it has no soft limit of scores (Model.attn_logit_softcapping)"
    if options.kernel == "flash" and obstacle:
        raise ConfigError(
            f"flash attention cannot run here: {obstacle}; use auto or reference",
            key="Model.attention_kernel",
            value="flash",
        )
    # The causal mask of queries that follow cached keys does not begin at the first key. Flash attention
    # would also save little time, because there are few such queries.
    follows_cache = penalty is not None or query.shape[-2] != key.shape[-2]
    if bfloat16.in_autocast() and options.softcap is None and not follows_cache and not drops(dropout):
        return bfloat16.attention(query, key, value, document_start)
    if obstacle or follows_cache:
        if obstacle and on_card():
            _say_once(f"attention uses the reference kernel: flash attention cannot run here, {obstacle}")
        return reference_attention(query, key, value, document_start, dropout, options, penalty)
    return flash_attention(query, key, value, document_start, dropout)


def packed_attention_serves(qkv: paddle.Tensor, dropout: nn.Layer, options: KernelOptions) -> bool:
    """Return whether :func:`~ppfleetx.nn.flash.packed_flash_attention` can compute attention of
    ``qkv [s, b, heads, 3, head size]``."""
    if options.kernel == "reference" or options.softcap or not options.fused.takes("packed_attention", qkv):
        return False
    is_version_2 = flash_version(qkv.shape[-1], has_documents=False) == 2
    return is_version_2 and not flash_obstacle(qkv, dropout, has_documents=False)


@functools.cache
def _say_once(text: str) -> None:
    get_logger().info(text)


def reference_attention(
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    document_start: paddle.Tensor | None,
    dropout: nn.Layer,
    options: KernelOptions,
    penalty: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Compute attention with plain operators: a matmul, a softmax and a matmul. All other kernels must
    agree with this kernel."""
    _, groups, per_group, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    half = query.dtype in HALF_PRECISION
    # Scores in 16 bits are divided by the guard, and multiplied by it again below.
    guard = options.qk_scale_guard if half else 1.0
    query = (query * (head_dim**-0.5 / guard)).reshape([0, groups, -1, head_dim])
    # Stack the query heads of one key/value head as rows, so that keys do not have to be repeated.
    scores = paddle.matmul(query, key, transpose_y=True)
    if half and options.softmax_in_fp32:
        scores = scores.astype("float32")
    if guard != 1.0:
        scores = scores * guard
    if options.softcap is not None:
        scores = softcapped(scores, options.softcap)
    if penalty is not None:
        weights = F.softmax(_add_penalty(scores, penalty, per_group))
    elif num_queries == 1 and document_start is None:  # a single query sees all keys
        weights = F.softmax(scores)
    else:
        scores = scores.reshape([0, groups * per_group, -1, num_keys])
        weights = _masked_softmax(scores, num_queries, num_keys, document_start, options.fused)
        weights = weights.reshape([0, groups, -1, num_keys])
    if half:
        weights = weights.astype(value.dtype)
    context = paddle.matmul(dropout(weights), value)
    return context.reshape([0, groups, per_group, -1, value.shape[-1]])


def softcapped(x: paddle.Tensor, limit: float) -> paddle.Tensor:
    """Soft-cap ``x``: ``limit * tanh(x / limit)``, elementwise (Bello et al., 2016; Gemma 2)."""
    return paddle.tanh(x / limit) * limit


def _masked_softmax(
    scores: paddle.Tensor,
    num_queries: int,
    num_keys: int,
    document_start: paddle.Tensor | None,
    fused: FusedOps,
) -> paddle.Tensor:
    """Return the softmax of ``scores [batch, heads, queries, keys]``. Masked keys get probability 0."""
    if fused.takes("causal_softmax", scores) and document_start is None and _fits_triangle(scores):
        return _C_ops.fused_softmax_mask_upper_triangle(scores)
    return F.softmax(mask_scores(scores, num_queries, num_keys, document_start))


def _fits_triangle(scores: paddle.Tensor) -> bool:
    """Return whether Paddle's fused causal softmax supports these scores. The numbers of queries and keys
    must be equal, a multiple of 8, and from 32 to 8192."""
    num_queries, num_keys = scores.shape[2:]
    return num_queries == num_keys and 32 <= num_keys <= 8192 and num_keys % 8 == 0


def _add_penalty(scores: paddle.Tensor, penalty: paddle.Tensor, per_group: int) -> paddle.Tensor:
    """Return ``scores + penalty``. ``scores`` is
    ``[batch, key/value heads, query heads per key/value head * queries, keys]``. ``penalty`` broadcasts
    against ``[batch, heads, queries, keys]``."""
    shape = scores.shape
    if penalty.dtype != scores.dtype:
        penalty = penalty.astype(scores.dtype)
    if per_group > 1:
        scores = scores.reshape([0, shape[1] * per_group, -1, shape[3]])
    scores = add_smaller(scores, penalty)
    return scores.reshape([0, shape[1], -1, shape[3]]) if per_group > 1 else scores
