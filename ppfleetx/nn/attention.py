"""Attention layers: self-attention with grouped key/value heads, and multi-head latent attention, which
projects keys and values from one compressed vector per position. Both support rotary positions and a
key/value cache.

Shape letters: s positions, b batch, h hidden size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import nn

from ppfleetx.nn.attention_kernels import KernelOptions, attend, packed_attention_serves
from ppfleetx.nn.attention_spec import AttentionSpec, LatentAttentionSpec
from ppfleetx.nn.flash import packed_flash_attention
from ppfleetx.nn.masks import window_start
from ppfleetx.nn.positions import Rotary
from ppfleetx.nn.recompute import may_recompute, recompute
from ppfleetx.nn.stage import LayerFactory


class KeyValueCache(Protocol):
    """Interface of a cache that holds, for each layer, the keys and values of all earlier positions."""

    def update(
        self, layer_index: int, key: paddle.Tensor, value: paddle.Tensor, window: int | None = None
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor | None]:
        """Append the keys and values of the new positions to the cache of layer ``layer_index``.

        Args:
            key, value: ``[batch, key/value heads, new positions, head size]``.
            window: number of earlier positions that each position may attend to; None: all.

        Returns:
            All keys, all values, and a mask ``[batch, heads, new positions, all positions]`` to add to the
                scores. If the mask is None, the causal mask and the window apply.
        """

    def row_lengths(self) -> paddle.Tensor:
        """Return the number of tokens of each row, ``[b or 1, 1]`` int64, including the new positions. While
        a prompt is processed in chunks, the number includes the chunks that are still to come."""


class HeadAttention(nn.Layer):
    """Base class of attention layers. Subclasses add the projections to queries, keys and values.

    Args:
        recompute_core: whether the backward pass recomputes scores and attention weights.
    """

    def __init__(
        self,
        factory: LayerFactory,
        spec: AttentionSpec | LatentAttentionSpec,
        *,
        layer_index: int,
        rotary: Rotary | None,
        options: KernelOptions,
        recompute_core: bool = False,
    ) -> None:
        super().__init__()
        self.factory, self.strategy = factory, factory.attention
        self.layer_index, self.rotary, self.options = layer_index, rotary, options
        self.window, self.recompute_core = spec.window, recompute_core
        self.dropout = factory.dropout(spec.dropout, inside_heads=True)

    def run_core(
        self,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        document_start: paddle.Tensor | None,
    ) -> paddle.Tensor:
        """Return the result of :meth:`core`. In training with ``recompute_core``, the activations of
        :meth:`core` are dropped, and recomputed in the backward pass."""
        if self.recompute_core and may_recompute(self):
            return recompute(self.core, query, key, value, document_start)
        return self.core(query, key, value, document_start)

    def core(
        self,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        document_start: paddle.Tensor | None,
    ) -> paddle.Tensor:
        """Compute attention. Return its output ``[s, b, width]`` before the output projection."""
        return joined(self.strategy.core(self.attend_heads, query, key, value, document_start))

    def attend_heads(
        self,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        document_start: paddle.Tensor | None,
        penalty: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Compute attention inside the window, with the kernel that ``options`` select. The result has the
        layout of ``query`` and the head size of ``value``.

        Args:
            query: ``[batch, key/value heads, query heads per key/value head, queries, head size]``.
            key, value: ``[batch, key/value heads, keys, head size]``.
            penalty: added to the scores instead of the causal mask, the window and ``document_start``; None:
                these three apply.
        """
        if self.window is not None and penalty is None:
            document_start = window_start(
                self.window, query.shape[0], query.shape[3], document_start, key.shape[2]
            )
        return attend(query, key, value, document_start, self.dropout, self.options, penalty)


class Attention(HeadAttention):
    """Causal self-attention on ``[s, b, h]``. The fused projection has, for each key/value head, the columns
    of its queries, its key and its value, in this order."""

    def __init__(self, factory: LayerFactory, spec: AttentionSpec, **options: Any) -> None:
        super().__init__(factory, spec, **options)
        self.head_dim, self.queries_per_group = spec.head_dim, spec.queries_per_group
        self.num_groups = factory.local_count(spec.num_kv_heads, "key/value heads")
        self.num_heads, self.has_biases = spec.num_heads, spec.has_biases
        width = spec.head_dim + (2 if spec.has_biases else 0)
        scale = spec.head_dim**-0.5 if spec.score_scale is None else spec.score_scale
        # Kernels divide scores by the square root of the queries' width.
        self.query_factor = scale * width**0.5 if spec.has_biases or spec.score_scale is not None else 1.0
        self.options = replace(self.options, softcap=spec.softcap)
        self.qkv = factory.linear(spec.qkv)
        self.q_norm, self.k_norm = (None if norm is None else factory.norm(norm) for norm in spec.norms)
        self.norms_outside = spec.head_norm is not None and spec.head_norm.has_gain_per_head
        self.out_proj = factory.linear(spec.out_proj)

    def forward(
        self,
        hidden: paddle.Tensor,
        position_ids: paddle.Tensor | None = None,
        document_start: paddle.Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> paddle.Tensor:
        """Run attention on ``hidden [s, b, h]``.

        Args:
            position_ids: ``[b, s]``, required with rotary positions or linear biases.
            document_start: ``[b, s]``, the first position that each position may attend to; None: no limit.
            cache: keys and values of earlier positions, to which this call appends.
        """
        qkv = self.qkv(hidden).reshape([0, 0, self.num_groups, self.queries_per_group + 2, self.head_dim])
        if self.norms_outside:  # before the exchange moves heads to other ranks
            qkv = self._normed(qkv)
        qkv = self.strategy.enter(qkv)
        if position_ids is not None:
            position_ids = self.strategy.positions_inside(position_ids)
        if document_start is not None:
            document_start = self.strategy.positions_inside(document_start)
        if cache is None and document_start is None and self._takes_packed(qkv):
            core = partial(packed_flash_attention, dropout=self.dropout)
            recomputes = self.recompute_core and may_recompute(self)
            context = recompute(core, qkv) if recomputes else core(qkv)
            return self.out_proj(self.strategy.leave(context))
        query, key, value = self.divide(qkv, position_ids)
        if cache is not None:
            key, value, penalty = cache.update(self.layer_index, key, value, self.window)
            context = joined(self.attend_heads(query, key, value, document_start, penalty))
        else:
            context = self.run_core(query, key, value, document_start)
        return self.out_proj(self.strategy.leave(context))

    def _normed(self, qkv: paddle.Tensor) -> paddle.Tensor:
        """Apply ``q_norm`` to the queries and ``k_norm`` to the keys in ``qkv``. A norm receives all heads of
        a position as one vector."""
        groups, per_group, size = self.num_groups, self.queries_per_group, self.head_dim
        query, key, value = qkv.split([per_group, 1, 1], axis=3)
        query = self.q_norm(query.flatten(2)).reshape([0, 0, groups, per_group, size])
        key = self.k_norm(key.flatten(2)).reshape([0, 0, groups, 1, size])
        # At AMP level O1, gains are float32, so the result must be cast back to 16 bits.
        return paddle.concat([query.astype(qkv.dtype), key.astype(qkv.dtype), value], axis=3)

    @property
    def _norms_inside(self) -> bool:
        return self.q_norm is not None and not self.norms_outside

    def _takes_packed(self, qkv: paddle.Tensor) -> bool:
        """Return whether the kernel for packed queries, keys and values can process the projection ``qkv``
        as it is. This requires as many key heads as query heads, and the default scale of the scores. There
        must be no rotary positions, per-head norms, window or linear biases, and the context-parallel
        strategy must not have its own attention core (``has_own_core``)."""
        is_plain = self.queries_per_group == 1 and self.rotary is None and not self._norms_inside
        is_plain = is_plain and self.window is None and not self.strategy.has_own_core
        is_plain = is_plain and not self.has_biases and self.query_factor == 1.0
        return is_plain and packed_attention_serves(qkv, self.dropout, self.options)

    def divide(
        self, qkv: paddle.Tensor, position_ids: paddle.Tensor | None
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Split the fused projection ``qkv`` into the heads of queries, keys and values. Apply norms and
        position embeddings. Linear biases (ALiBi) make queries and keys two features wider."""
        query, key, value = self._parts(qkv, position_ids)
        if self.query_factor != 1.0:
            query = query * self.query_factor
        if self.has_biases:
            query, key = self._with_biases(query, key, position_ids)
        return query, key, value

    def _with_biases(
        self, query: paddle.Tensor, key: paddle.Tensor, position_ids: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Append two features to each query and key. Their products add the linear biases (ALiBi) to the
        scores."""
        # ALiBi's bias is proportional to the distance between query and key. A bias proportional to the key's
        # position differs by a constant for each query, so the softmax is the same. The position is split
        # into two numbers that 16 bits represent exactly.
        groups, per_group, length, size = query.shape[1:]
        heads = (self.num_heads, self._first_head(groups * per_group), groups * per_group, size + 2)
        # In an exported program, the features are a constant. Otherwise they are cached on the device, so
        # that they are not copied in each pass.
        features = (
            _kept_bias_features(*heads, paddle.get_device())
            if paddle.in_dynamic_mode()
            else paddle.to_tensor(bias_features(*heads))
        )
        of_heads = features.reshape([1, groups, per_group, 1, 2]).astype(query.dtype)
        query = paddle.concat([query, of_heads.expand([query.shape[0], -1, -1, length, -1])], axis=-1)
        parts = paddle.stack([position_ids // 256, position_ids % 256], axis=-1)  # [b, s, 2]
        parts = parts.astype(key.dtype).unsqueeze(1).expand([-1, groups, -1, -1])
        return query, paddle.concat([key, parts], axis=-1)

    def _first_head(self, num_heads: int) -> int:
        """Return the global index of this rank's first attention head.

        Args:
            num_heads: number of attention heads on this rank.
        """
        rank = 0
        for group in (self.factory.group, self.strategy.group):
            rank = rank if group is None else rank * group.nranks + group.rank
        return rank * num_heads

    def _parts(
        self, qkv: paddle.Tensor, position_ids: paddle.Tensor | None
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        per_group = self.queries_per_group
        # Transpose queries, keys and values at once to avoid further copies.
        if per_group == 1 and self.rotary is None and not self._norms_inside:
            query, key, value = qkv.transpose([3, 1, 2, 0, 4]).unbind(0)
            return query.unsqueeze(2), key, value
        qkv = qkv.transpose([1, 2, 3, 0, 4])
        if self.rotary is None or self._norms_inside:
            query, key, value = qkv.split([per_group, 1, 1], axis=2)
            if self._norms_inside:
                query, key = self.q_norm(query), self.k_norm(key)
            if self.rotary is not None:
                query, key = (self.rotary.rotate(part, position_ids) for part in (query, key))
        else:
            turning, value = qkv.split([per_group + 1, 1], axis=2)
            query, key = self.rotary.rotate(turning, position_ids).split([per_group, 1], axis=2)
        return query, key.squeeze(2), value.squeeze(2)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return the slopes ``[num_heads]`` of linear biases (ALiBi, Press et al., 2022)."""
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    # The remaining heads get every second slope of a model with 2 * below heads.
    slopes += [2 ** (-8 * (2 * i + 1) / (2 * below)) for i in range(num_heads - below)]
    return np.array(slopes)


def bias_features(num_heads: int, first: int, count: int, width: int) -> np.ndarray:
    """Return the two features that linear biases (ALiBi) append to each query, ``[count, 2]`` float32, with
    one row for each head on this rank.

    Args:
        num_heads: number of heads of the whole model.
        first, count: index of this rank's first head in the model, and number of this rank's heads.
        width: number of features of a query, including the two appended ones.
    """
    # The features of keys are position // 256 and position % 256. Kernels divide scores by sqrt(width).
    slopes = alibi_slopes(num_heads)[first : first + count] * width**0.5
    return np.stack([slopes * 256, slopes], axis=-1).astype(np.float32)


@lru_cache(maxsize=8)
def _kept_bias_features(num_heads: int, first: int, count: int, width: int, device: str) -> paddle.Tensor:
    return paddle.to_tensor(bias_features(num_heads, first, count, width))


def joined(context: paddle.Tensor) -> paddle.Tensor:
    """Reshape attention's output ``[batch, key/value heads, query heads per key/value head, s, head size]``
    to ``[s, batch, width]``."""
    _, groups, per_group, num_queries, head_dim = context.shape
    if num_queries == 1:  # no transpose needed
        return context.reshape([1, -1, groups * per_group * head_dim])
    return context.transpose([3, 0, 1, 2, 4]).flatten(2)


class LatentAttention(HeadAttention):
    """Causal multi-head latent attention on ``[s, b, h]`` (DeepSeek-AI, "DeepSeek-V2", 2024). The cache holds
    the compressed vectors and the rotary features of keys."""

    def __init__(self, factory: LayerFactory, spec: LatentAttentionSpec, **options: Any) -> None:
        super().__init__(factory, spec, **options)
        self.spec = spec
        self.num_heads = factory.local_count(spec.num_heads, "attention heads")
        self.q_down = None if spec.q_down is None else factory.linear(spec.q_down)
        self.q_norm = None if spec.q_norm is None else factory.norm(spec.q_norm)
        self.q_up = factory.linear(spec.q_up)
        self.kv_down = factory.linear(spec.kv_down)
        self.kv_norm = factory.norm(spec.kv_norm)
        self.kv_up = factory.linear(spec.kv_up)
        self.out_proj = factory.linear(spec.out_proj)
        self.register_buffer("to_keys", None)
        self.register_buffer("to_values", None)
        self._kept_with: tuple[int, ...] = ()

    def forward(
        self,
        hidden: paddle.Tensor,
        position_ids: paddle.Tensor,
        document_start: paddle.Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> paddle.Tensor:
        """Run attention on ``hidden [s, b, h]``.

        Args:
            position_ids: ``[b, s]``.
            document_start: ``[b, s]``, the first position that each position may attend to; None: no limit.
            cache: compressed vectors and rotary features of earlier positions, to which this call appends.
        """
        position_ids = self.strategy.positions(position_ids)
        if document_start is not None:
            document_start = self.strategy.positions_inside(document_start)
        query = self._queries(hidden, position_ids)
        compressed, turned = self._compressed(hidden, position_ids)
        if cache is None:
            context = self.run_core(*self._enter(query, *self._heads(compressed, turned)), document_start)
            return self.out_proj(self.strategy.leave(context))
        own = compressed.transpose([1, 0, 2]).unsqueeze(1)
        held, held_turned, penalty = cache.update(self.layer_index, own, turned, self.window)
        if held is own:  # the cache was empty
            heads = self._heads(compressed, turned)
            context = self.attend_heads(query, *heads, document_start, penalty)
        else:
            context = self._attend_compressed(query, held, held_turned, document_start, penalty)
        return self.out_proj(joined(context))

    def _queries(self, hidden: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """Return queries ``[b, heads, 1, s, head_dim]`` of this rank's heads. The last ``rope_head_dim``
        features are rotated."""
        if self.q_down is not None:
            hidden = self.q_norm(self.q_down(hidden))
        query = self.q_up(hidden).reshape([0, 0, self.num_heads, self.spec.head_dim])
        still, turning = self._cut(query.transpose([1, 2, 0, 3]).unsqueeze(2))
        query = paddle.concat([still, self.rotary.rotate(turning, position_ids)], axis=-1)
        return query if self.spec.score_factor == 1.0 else query * self.spec.score_factor

    def _cut(self, heads: paddle.Tensor) -> list[paddle.Tensor]:
        return heads.split([self.spec.nope_head_dim, self.spec.rope_head_dim], axis=-1)

    def _compressed(
        self, hidden: paddle.Tensor, position_ids: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the compressed vectors ``[s, b, kv_rank]``, and the rotary features of keys
        ``[b, 1, s, rope_head_dim]``. Under sequence parallelism, the compressed vectors cover only this
        rank's positions. The rotary features cover the positions of all tensor-parallel ranks."""
        compressed, turning = self.kv_down(hidden).split(
            [self.spec.kv_rank, self.spec.rope_head_dim], axis=-1
        )
        # All tensor-parallel ranks hold these features, so their gradients are summed over the ranks. The
        # order of the dimensions below makes the gradient contiguous, as collectives require.
        turning = self.factory.enter_head(turning)
        turned = self.rotary.rotate(turning.unsqueeze([1, 2]), position_ids.transpose([1, 0]))
        turned = turned.squeeze([1, 2]).transpose([1, 0, 2]).unsqueeze(1)
        normed = self.kv_norm(compressed)  # at AMP level O1, float32 like the gain
        return normed if normed.dtype == turned.dtype else normed.astype(turned.dtype), turned

    def _heads(self, compressed: paddle.Tensor, turned: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return the keys ``[b, heads, s, head_dim]`` and values ``[b, heads, s, value_head_dim]`` of this
        rank's heads. They are computed from the compressed vectors and the rotary features (``turned``)."""
        width = self.spec.nope_head_dim + self.spec.value_head_dim
        both = self.kv_up(compressed).reshape([0, 0, self.num_heads, width]).transpose([1, 2, 0, 3])
        still, value = both.split([self.spec.nope_head_dim, self.spec.value_head_dim], axis=-1)
        turned = turned.expand([-1, self.num_heads, -1, -1])
        return paddle.concat([still, turned], axis=-1), value

    def _enter(
        self, query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Exchange queries, keys and values among the context-parallel ranks. The results have all positions
        of some of the heads."""
        if self.strategy.group is None:
            return query, key, value
        packed = paddle.concat([query.squeeze(2), key, value], axis=-1).transpose([2, 0, 1, 3])
        packed = self.strategy.enter(packed.unsqueeze(3)).squeeze(3).transpose([1, 2, 0, 3])
        sizes = [self.spec.head_dim, self.spec.head_dim, self.spec.value_head_dim]
        query, key, value = packed.split(sizes, axis=-1)
        return query.unsqueeze(2), key, value

    def _attend_compressed(
        self,
        query: paddle.Tensor,
        compressed: paddle.Tensor,
        turned: paddle.Tensor,
        document_start: paddle.Tensor | None,
        penalty: paddle.Tensor | None,
    ) -> paddle.Tensor:
        """Attend to cached compressed vectors without projecting them to keys and values.

        Args:
            compressed: ``[b, 1, cached positions, kv_rank]``, the compressed vectors.
            turned: ``[b, 1, cached positions, rope_head_dim]``, the rotary features of keys.

        Returns:
            The context ``[b, heads, 1, s, value_head_dim]``.
        """
        # Queries and context are projected instead of the cached vectors.
        to_keys, to_values = self._projections()
        still, turning = self._cut(query.squeeze(2))
        latent = paddle.matmul(still, to_keys)
        key = paddle.concat([compressed, turned], axis=-1)
        # Kernels divide scores by the root of the key's width, here kv_rank + rope_head_dim; scale back to
        # head_dim.
        factor = (key.shape[-1] / self.spec.head_dim) ** 0.5
        query = (paddle.concat([latent, turning], axis=-1) * factor).unsqueeze(1)
        context = self.attend_heads(query, key, compressed, document_start, penalty)
        return paddle.matmul(context.squeeze(1), to_values).unsqueeze(2)

    def _projections(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return two matrices per head. They project compressed vectors to keys
        (``[heads, nope_head_dim, kv_rank]``) and to values (``[heads, kv_rank, value_head_dim]``). If weights
        do not change, the matrices are cached."""
        # Adapters are added and removed as hooks. Cached projections are valid only while the hooks are the
        # same as when the projections were computed.
        hooks = tuple(self.kv_up._forward_post_hooks)
        if self.to_keys is not None and self._kept_with == hooks:
            return self.to_keys, self.to_values
        if self.to_keys is not None and hooks:
            return self._cut_projections()
        if self.factory.keeps_weights and paddle.in_dynamic_mode() and not paddle.is_grad_enabled():
            self.keep_projections()
            return self.to_keys, self.to_values
        return self._cut_projections()

    @paddle.no_grad()
    def keep_projections(self) -> None:
        """Compute and cache the matrices that project compressed vectors to keys and to values. The weights
        must not change afterwards."""
        self.to_keys, self.to_values = self._cut_projections()
        self._kept_with = tuple(self.kv_up._forward_post_hooks)

    def _cut_projections(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        spec = self.spec
        # The linear's output for the identity matrix is its weight, even if quantized or adapted.
        unit = paddle.eye(spec.kv_rank, dtype=self.kv_norm.weight.dtype)
        matrix = self.kv_up(unit.unsqueeze(1)).reshape([spec.kv_rank, self.num_heads, -1])
        to_keys, to_values = matrix.split([spec.nope_head_dim, spec.value_head_dim], axis=-1)
        return to_keys.transpose([1, 2, 0]).contiguous(), to_values.transpose([1, 0, 2]).contiguous()
