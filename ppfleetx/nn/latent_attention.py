"""Multi-head latent attention: keys and values are projected from one compressed vector per position.

Shape letters: s positions, b batch.
"""

from __future__ import annotations

from typing import Any

import paddle

from ppfleetx.nn.attention import HeadAttention, KeyValueCache, joined
from ppfleetx.nn.attention_spec import LatentAttentionSpec
from ppfleetx.nn.stage import LayerFactory


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
            context = self.whole(*self._enter(query, *self._heads(compressed, turned)), document_start)
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
        """Return compressed keys and values ``[s, b, kv_rank]``, and rotary features of keys
        ``[b, 1, s, rope_head_dim]``. Under sequence parallelism, only the rotary features cover the positions
        of all tensor-parallel ranks."""
        compressed, turning = self.kv_down(hidden).split(
            [self.spec.kv_rank, self.spec.rope_head_dim], axis=-1
        )
        # All tensor-parallel ranks hold these features, so their gradients are summed over the ranks. The
        # order of the dimensions below makes the gradient contiguous, as collectives require.
        turning = self.factory.enter_head(turning)
        turned = self.rotary.rotate(turning.unsqueeze([1, 2]), position_ids.transpose([1, 0]))
        turned = turned.squeeze([1, 2]).transpose([1, 0, 2]).unsqueeze(1)
        normed = self.kv_norm(compressed)  # at O1, float32 like the norm's weights
        return normed if normed.dtype == turned.dtype else normed.astype(turned.dtype), turned

    def _heads(self, compressed: paddle.Tensor, turned: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Project compressed vectors to keys ``[b, heads, s, head_dim]`` and values
        ``[b, heads, s, value_head_dim]`` of this rank's heads."""
        width = self.spec.nope_head_dim + self.spec.value_head_dim
        both = self.kv_up(compressed).reshape([0, 0, self.num_heads, width]).transpose([1, 2, 0, 3])
        still, value = both.split([self.spec.nope_head_dim, self.spec.value_head_dim], axis=-1)
        turned = turned.expand([-1, self.num_heads, -1, -1])
        return paddle.concat([still, turned], axis=-1), value

    def _enter(
        self, query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Exchange queries, keys and values among the context-parallel ranks. Afterwards this rank has all
        positions of some of the heads."""
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
        """Return the projections from compressed vectors to keys, ``[heads, nope_head_dim, kv_rank]``, and to
        values, ``[heads, kv_rank, value_head_dim]``. If weights do not change, the projections are cached."""
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
        """Compute and keep the matrices that project compressed vectors to keys and to values. Call this only
        if the weights no longer change."""
        self.to_keys, self.to_values = self._cut_projections()
        self._kept_with = tuple(self.kv_up._forward_post_hooks)

    def _cut_projections(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        spec = self.spec
        # The linear's output for the identity matrix is its weight, even if quantized or adapted.
        unit = paddle.eye(spec.kv_rank, dtype=self.kv_norm.weight.dtype)
        matrix = self.kv_up(unit.unsqueeze(1)).reshape([spec.kv_rank, self.num_heads, -1])
        to_keys, to_values = matrix.split([spec.nope_head_dim, spec.value_head_dim], axis=-1)
        return to_keys.transpose([1, 2, 0]).contiguous(), to_values.transpose([1, 0, 2]).contiguous()
