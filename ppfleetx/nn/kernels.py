"""Attention kernels behind one dispatch.

Shape letters: b batch, q query positions, k key positions, g key/value heads, r query heads per
key/value head, d head size. Kernels take ``query [b, g, r, q, d]`` and ``key, value [b, g, k, d]`` and
give ``[b, g, r, q, d]``.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.config.errors import ConfigError
from ppfleetx.nn.linear import add_smaller
from ppfleetx.nn.masks import flash_row_limits, mask_scores

KERNELS = ("auto", "reference", "flash")
_HALF = (paddle.float16, paddle.bfloat16)


@dataclass(frozen=True)
class KernelOptions:
    """What the kernels need to know beside the tensors.

    Attributes:
        kernel: one of :data:`KERNELS`. ``auto`` takes flash where it can run.
        softmax_in_fp32: softmax in float32 when the scores are 16-bit.
        qk_scale_guard: in 16 bits, scores are divided by this before and multiplied after the conversion
            to float32, so that they cannot overflow float16; equal in exact arithmetic.
    """

    kernel: str = "auto"
    softmax_in_fp32: bool = True
    qk_scale_guard: float = 1.0


def attend(
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    document_start: paddle.Tensor | None,
    dropout: nn.Layer,
    options: KernelOptions,
    penalty: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Causal attention by the kernel that ``options`` ask for.

    A ``penalty`` to broadcast against scores ``[b, n, q, k]`` takes the place of the causal mask and of
    ``document_start``.

    Queries that follow cached keys go through the reference whatever is asked for: their causal mask does
    not begin at the first key, and with so few of them flash has little to save.

    Raises:
        ConfigError: flash is asked for where it cannot run.
    """
    obstacle = flash_obstacle(query)
    if options.kernel == "flash" and obstacle:
        raise ConfigError(
            f"flash attention cannot run here: {obstacle}; use auto or reference",
            key="Model.attention_kernel",
            value="flash",
        )
    follows_cache = query.shape[-2] != key.shape[-2]
    if options.kernel == "reference" or obstacle or follows_cache:
        return reference_attention(query, key, value, document_start, dropout, options, penalty)
    return flash_attention(query, key, value, document_start, dropout)


def flash_obstacle(query: paddle.Tensor) -> str | None:
    """Why flash attention cannot serve such queries at all, or None when it can."""
    if not paddle.is_compiled_with_cuda() or not paddle.get_device().startswith("gpu"):
        return f"it needs a GPU, the device is {paddle.get_device()}"
    if query.dtype not in _HALF:
        return f"it needs float16 or bfloat16, the activations are {str(query.dtype).split('.')[-1]}"
    if query.shape[-1] > 256:
        return f"its largest head size is 256, this is {query.shape[-1]}"
    return None


def reference_attention(
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    document_start: paddle.Tensor | None,
    dropout: nn.Layer,
    options: KernelOptions,
    penalty: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Matrix product, softmax, matrix product: runs everywhere and defines what the others must give."""
    _, groups, per_group, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    half = query.dtype in _HALF
    guard = options.qk_scale_guard if half else 1.0
    query = (query * (head_dim**-0.5 / guard)).reshape([0, groups, -1, head_dim])
    # The query heads of one key/value head stand below each other: keys are never repeated.
    scores = paddle.matmul(query, key, transpose_y=True)
    if half and options.softmax_in_fp32:
        scores = scores.astype("float32")
    if guard != 1.0:
        scores = scores * guard
    if penalty is not None:
        scores = _add_penalty(scores, penalty, per_group)
    elif num_queries != 1 or document_start is not None:  # else it sees all keys
        scores = scores.reshape([0, groups * per_group, -1, num_keys])
        scores = mask_scores(scores, num_queries, num_keys, document_start)
        scores = scores.reshape([0, groups, -1, num_keys])
    weights = F.softmax(scores)
    if half:
        weights = weights.astype(value.dtype)
    context = paddle.matmul(dropout(weights), value)
    return context.reshape([0, groups, per_group, -1, head_dim])


def _add_penalty(scores: paddle.Tensor, penalty: paddle.Tensor, per_group: int) -> paddle.Tensor:
    """``scores [b, g, r * q, k]`` and ``penalty``, to broadcast against ``[b, n, q, k]``."""
    shape = scores.shape
    if penalty.dtype != scores.dtype:
        penalty = penalty.astype(scores.dtype)
    if per_group > 1:
        scores = scores.reshape([0, shape[1] * per_group, -1, shape[3]])
    scores = add_smaller(scores, penalty)
    return scores.reshape([0, shape[1], -1, shape[3]]) if per_group > 1 else scores


def flash_attention(
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    document_start: paddle.Tensor | None,
    dropout: nn.Layer,
) -> paddle.Tensor:
    """Paddle's flash attention; documents packed in a row go through flashmask."""
    _, groups, per_group, _, head_dim = query.shape
    q_bsnd = query.flatten(1, 2).transpose([0, 2, 1, 3])
    k_bsnd, v_bsnd = key.transpose([0, 2, 1, 3]), value.transpose([0, 2, 1, 3])
    probability = dropout.p if dropout.training else 0.0
    with getattr(dropout, "stream", nullcontext)():
        if document_start is None:
            # Its default is training=True: dropout would stay on in evaluation.
            context, _ = F.flash_attention.flash_attention(
                q_bsnd, k_bsnd, v_bsnd, dropout=probability, causal=True, training=dropout.training
            )
        else:
            context = F.flash_attention.flashmask_attention(
                q_bsnd,
                k_bsnd,
                v_bsnd,
                flash_row_limits(document_start),
                dropout=probability,
                causal=True,
                training=dropout.training,
            )
    return context.transpose([0, 2, 1, 3]).reshape([0, groups, per_group, -1, head_dim])
