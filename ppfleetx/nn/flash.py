"""Flash attention of Paddle or of a device plugin: limits and calls.

Shape letters: s positions, b batch.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext

import paddle
import paddle.nn.functional as F
from paddle import nn

from ppfleetx.distributed.device import capability, on_card, on_gpu, plugin_operator
from ppfleetx.nn.fused_ops import NO_FUSED_OPS, FusedOps
from ppfleetx.nn.masks import attention_mask, flash_row_limits

HALF_PRECISION = (paddle.float16, paddle.bfloat16)
# Limits are checked here first, because in Paddle 3.3.1 unsupported sizes end in an assertion or an external
# error of the kernel.
_LARGEST_HEAD = 256
# The backward pass needs more shared memory, and not all cards have enough.
_LARGEST_HEAD_TRAINED_ANYWHERE = 192
_CARDS_THAT_TRAIN_LARGER = ((8, 0), (9, 0))


def flash_obstacle(
    query: paddle.Tensor, dropout: nn.Layer, *, has_documents: bool, fused: FusedOps | None = None
) -> str | None:
    """Return the reason why flash attention cannot process ``query`` here; None if it can.

    Args:
        dropout: dropout of the attention weights.
        has_documents: whether a row holds several documents.
        fused: the fused operators in use; None: there are none.
    """
    if not on_gpu():  # NO_FUSED_OPS as the default argument would break the tracing of exports
        return _plugin_obstacle(query, dropout, NO_FUSED_OPS if fused is None else fused)
    if query.dtype not in HALF_PRECISION:
        return _not_in_16_bits(query)
    head_size = query.shape[-1]
    version = flash_version(head_size, has_documents=has_documents)
    # In training mode, a backward pass is assumed to follow.
    return unsupported_reason(
        version, _capability(paddle.get_device()), head_size, drops=drops(dropout), trains=dropout.training
    )


def drops(dropout: nn.Layer) -> bool:
    """Return whether the layer ``dropout`` is in training mode with a probability above 0."""
    return dropout.training and dropout.p > 0


def _not_in_16_bits(query: paddle.Tensor) -> str:
    return f"it needs float16 or bfloat16, the activations are {str(query.dtype).split('.')[-1]}"


def _plugin_obstacle(query: paddle.Tensor, dropout: nn.Layer, fused: FusedOps) -> str | None:
    if "plugin_attention" not in fused.taken:
        why = fused.refused.get("plugin_attention")
        also = f" (plugin_attention: {why})" if why and on_card() else ""
        return f"it needs a GPU, the device is {paddle.get_device()}{also}"
    if not fused.takes("plugin_attention", query):
        return _not_in_16_bits(query)
    if drops(dropout):
        return (
            "the plugin applies dropout in the backward pass only; set "
            "Model.attention_probs_dropout_prob to 0"
        )
    return None


def unsupported_reason(
    version: int, capability: tuple[int, int], head_size: int, *, drops: bool, trains: bool
) -> str | None:
    """Return the reason why ``version`` (2 or 3) of flash attention cannot run; None if it can.

    Args:
        capability: compute capability of the GPU, (major, minor).
        drops: whether dropout is applied to attention weights.
        trains: whether a backward pass follows.
    """
    # The limits are those in csrc/capi/flash_attn.cu of PaddlePaddle/flash-attention (version 2), and in
    # flash_attn_v3_kernel.cu and nn/functional/flash_attention.py of Paddle (version 3).
    card = f"this card has {capability[0]}.{capability[1]}"
    if version == 3 and capability != (9, 0):
        return f"its version 3 (FLAGS_flash_attn_version) needs compute capability 9.0, {card}"
    if capability[0] != 8 and capability != (9, 0):
        return f"it needs compute capability 8.x or 9.0, {card}"
    if head_size % 8:
        return f"it needs a head size that is a multiple of 8, this is {head_size}"
    if head_size > _LARGEST_HEAD:
        return f"its largest head size is {_LARGEST_HEAD}, this is {head_size}"
    if trains and head_size > _LARGEST_HEAD_TRAINED_ANYWHERE and capability not in _CARDS_THAT_TRAIN_LARGER:
        return (
            f"to train a head size above {_LARGEST_HEAD_TRAINED_ANYWHERE} (this is {head_size}) it needs "
            f"compute capability 8.0 or 9.0, {card}"
        )
    if version == 3 and drops:
        return (
            "its version 3 (FLAGS_flash_attn_version) has no dropout; set Model.attention_probs_dropout_prob "
            "to 0, or Global.flags.FLAGS_flash_attn_version to 2"
        )
    return None


def flash_version(head_size: int, *, has_documents: bool) -> int:
    """Return the version of flash attention that Paddle runs for heads of this size. ``has_documents``:
    whether a row holds several documents."""
    # In deterministic mode, Paddle honors the flag only for packed documents with head sizes up to 128.
    version = _flag("FLAGS_flash_attn_version", 2)
    takes_other = _flag("FLAGS_cudnn_deterministic", False) and (not has_documents or head_size > 128)
    return 2 if takes_other else version


def flash_attention(
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    document_start: paddle.Tensor | None,
    dropout: nn.Layer,
) -> paddle.Tensor:
    """Compute causal attention with flash attention. Values can have a smaller head size than keys. The
    result has the head size of the values.

    Args:
        query: ``[b, key/value heads, query heads per key/value head, s, head size]``. The result has the same
            layout.
        key, value: ``[b, key/value heads, s, head size]``.
        document_start: ``[b, s]``, the first position that each position may attend to; None: no limit.
    """
    _, groups, per_group, _, head_dim = query.shape
    value_dim = value.shape[-1]
    if value_dim < head_dim:  # the kernels take one head size
        value = F.pad(value, [0, head_dim - value_dim], data_format="NLC", pad_from_left_axis=False)
        return flash_attention(query, key, value, document_start, dropout)[..., :value_dim]
    q_bsnd = query.flatten(1, 2).transpose([0, 2, 1, 3])
    k_bsnd, v_bsnd = key.transpose([0, 2, 1, 3]), value.transpose([0, 2, 1, 3])
    of_plugin = None if on_gpu() else plugin_operator("flash_attention_npu")
    if of_plugin is not None:
        length = query.shape[-2]
        hidden = None if document_start is None else ~attention_mask(length, length, document_start)
        # Arguments: no fixed seed, mask, dropout 0.0, causal if there is no mask, do not return the softmax,
        # test mode (so that the device's random generator is not advanced), triangular mask.
        context = of_plugin(q_bsnd, k_bsnd, v_bsnd, None, hidden, 0.0, hidden is None, False, True, True)[0]
        return context.transpose([0, 2, 1, 3]).reshape([0, groups, per_group, -1, head_dim])
    # training=False only switches dropout off; version 3 does not accept it.
    options = {"dropout": dropout.p if dropout.training else 0.0, "causal": True, "training": True}
    with getattr(dropout, "stream", nullcontext)():
        if document_start is None:
            context, _ = F.flash_attention.flash_attention(q_bsnd, k_bsnd, v_bsnd, **options)
        else:
            limits = flash_row_limits(document_start)
            context = F.flash_attention.flashmask_attention(q_bsnd, k_bsnd, v_bsnd, limits, **options)
    return context.transpose([0, 2, 1, 3]).reshape([0, groups, per_group, -1, head_dim])


def packed_flash_attention(qkv: paddle.Tensor, dropout: nn.Layer) -> paddle.Tensor:
    """Compute causal attention of ``qkv [s, b, heads, 3, head size]``, which packs queries, keys and values.
    Return ``[s, b, heads * head size]``."""
    rows = qkv.transpose([1, 0, 3, 2, 4])
    probability = dropout.p if dropout.training else 0.0
    with getattr(dropout, "stream", nullcontext)():
        context, _ = F.flash_attention.flash_attn_qkvpacked(
            rows, dropout=probability, causal=True, training=True
        )
    return context.transpose([1, 0, 2, 3]).flatten(2)


_capability = functools.cache(capability)


def _flag(name: str, default: int) -> int:
    """Return the value of a Paddle flag; ``default`` in a build that lacks it."""
    try:
        return paddle.get_flags(name)[name]
    except ValueError:
        return default
