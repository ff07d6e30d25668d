"""Run all transformer blocks of a model in one C++ operation on a CPU, which avoids the overhead of
launching many small operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import paddle
from paddle import nn

from ppfleetx.generation.kv_cache import GrowingCache
from ppfleetx.models.gpt.layers import Block, FinalNorm
from ppfleetx.nn.attention import Attention
from ppfleetx.nn.cpu_ops import fused_blocks
from ppfleetx.nn.cpu_ops.ops import MOST_ROWS
from ppfleetx.nn.mlp import MLP
from ppfleetx.nn.norm import LayerNorm, RMSNorm
from ppfleetx.nn.panel_matmul import InferenceLinear
from ppfleetx.nn.positions import Rotary, RotaryEmbedding
from ppfleetx.nn.quantized import QuantizedLinear

_MAX_QUANTIZED_TOKENS, _MAX_CACHED_POSITIONS = 1024, 1024
"""With quantized weights, the fused operation takes passes of up to ``_MAX_QUANTIZED_TOKENS`` new tokens if
the cache has at most ``_MAX_CACHED_POSITIONS`` positions. In larger passes, Paddle's own operations compute
attention faster."""
Operands = tuple[str, paddle.Tensor, paddle.Tensor | None]
"""The matrix of a linear layer for the C++ operation: its format (one of `fused_blocks.FORMATS`), its
values, and its scales (None if the matrix is not quantized)."""


class PreparedCache(Protocol):
    """A key/value cache for the fused operation, such as :class:`GrowingCache`."""

    def prepare(
        self, window: int | None, num_new: int
    ) -> tuple[paddle.Tensor, paddle.Tensor | None, list[paddle.Tensor]]:
        """See :meth:`GrowingCache.prepare`."""


class FusedBlocks:
    """All transformer blocks and the final norm of a model as one C++ operation with a key/value cache. The
    layers must satisfy :func:`can_fuse`. ``takes_prompts`` says whether the operation is also used for the
    first pass, which reads the prompts."""

    def __init__(self, layers: Sequence[nn.Layer]) -> None:
        *self._blocks, self._final_norm = layers
        first: Block = self._blocks[0]
        self._window, self._rotary = first.attention.window, first.attention.rotary
        self._epsilon: float = first.input_norm.epsilon
        self._forms: dict[bool, fused_blocks.BlockWeights | None] = {}
        linears = [linear for block in self._blocks for linear in linears_of(block)]
        # For prompts with float32 weights, MKL is faster.
        self.takes_prompts = all(type(linear) is QuantizedLinear for linear in linears)

    def weights(self, num_rows: int, num_columns: int = 0) -> fused_blocks.BlockWeights | None:
        """Return the model's weights in the layout that the C++ operation reads. Passes with one new token
        use a different layout from larger passes. Returns None if the pass is so large that Paddle's own
        operations are faster, or if there is not enough memory for another copy of the weights.

        Args:
            num_rows: the number of new tokens in the pass, counted over all sequences.
            num_columns: the number of positions in the cache, including the new ones.
        """
        # For large passes, Paddle's own operations are faster.
        is_small = self.takes_prompts and num_columns <= _MAX_CACHED_POSITIONS
        if num_rows > (_MAX_QUANTIZED_TOKENS if is_small else MOST_ROWS):
            return None
        is_single = num_rows == 1
        if is_single not in self._forms:
            self._forms[is_single] = self.make_weights(partial(_operands, num_rows=num_rows))
        return self._forms[is_single]

    def run(
        self, hidden: paddle.Tensor, position_ids: paddle.Tensor, cache: GrowingCache
    ) -> paddle.Tensor | None:
        """Run the blocks and the final norm on ``hidden [s, b, h]``, the hidden states at new positions
        ``position_ids [b, s]``, and update ``cache``. Returns the new hidden states ``[s, b, h]``, or None,
        without running, if this pass is not supported."""
        if not hidden.place.is_cpu_place() or hidden.dtype != paddle.float32:
            return None
        weights = self.weights(position_ids.size, cache.length)
        if weights is None:
            return None
        if not cache.has_past:
            attention = self._blocks[0].attention
            cache.begin(len(self._blocks), hidden.shape[1], attention.num_groups, attention.head_dim)
        return self.run_with(weights, hidden, position_ids, cache)[0]

    def run_with(
        self,
        weights: fused_blocks.BlockWeights,
        hidden: paddle.Tensor,
        position_ids: paddle.Tensor,
        cache: PreparedCache,
    ) -> tuple[paddle.Tensor, list[paddle.Tensor]]:
        """Run all blocks and the final norm in the C++ operation on ``hidden [s, b, h]``, the hidden states
        at new positions ``position_ids [b, s]``. Returns the new hidden states ``[s, b, h]``, and the cached
        keys and values of all layers, updated in place."""
        column, penalty, memory = cache.prepare(self._window, hidden.shape[0])
        angles = None if self._rotary is None else self._rotary.cos_sin(position_ids)
        return fused_blocks.run(hidden, column, penalty, angles, memory, weights, self._epsilon)

    def make_weights(
        self, operands: Callable[[nn.Layer], Operands | None]
    ) -> fused_blocks.BlockWeights | None:
        """Return the weights of all blocks and of the final norm in the layout of the C++ operation.
        ``operands(layer)`` gives the matrix of a linear layer. Returns None if ``operands`` returns None
        for any layer."""
        made = fused_blocks.BlockWeights()
        made.begin(_sizes(self._blocks[0]), len(self._blocks))
        for block in self._blocks:
            for linear in linears_of(block):
                found = operands(linear)
                if found is None:
                    return None
                made.add_linear(*found, linear.weight.shape[1], linear.bias)
            for norm in _norms(block):
                made.add_norm(getattr(norm, "weight", None), getattr(norm, "bias", None))
        made.add_norm(self._final_norm.final_norm.weight, getattr(self._final_norm.final_norm, "bias", None))
        return made


def fused_blocks_of(layers: Sequence[nn.Layer]) -> FusedBlocks | None:
    """Make the `FusedBlocks` for a model's blocks and final norm. Returns None if the C++ operator is not
    compiled, or does not support the layers."""
    if not fused_blocks.are_available() or not can_fuse(layers):
        return None
    linears = [linear for block in layers[:-1] for linear in linears_of(block)]
    return FusedBlocks(layers) if all(map(_is_known_linear, linears)) else None


def can_fuse(layers: Sequence[nn.Layer]) -> bool:
    """Return whether the C++ operator supports the architecture of ``layers``, a model's blocks followed by
    its final norm. The storage format of matrices (float32 or quantized) is not checked."""
    *blocks, final_norm = layers
    if not blocks or type(final_norm) is not FinalNorm or final_norm.multiplier != 1.0:
        return False
    if not all(map(_is_plain_block, blocks)):
        return False
    if any(_has_hooks(sublayer) for layer in layers for sublayer in layer.sublayers(include_self=True)):
        return False
    norms = [norm for block in blocks for norm in _norms(block) if norm is not None]
    norms.append(final_norm.final_norm)
    kinds = {(type(norm), norm.epsilon) for norm in norms}
    alike = {(_sizes(block), block.attention.window, id(block.attention.rotary)) for block in blocks}
    return len(kinds) == 1 and type(norms[0]) in (LayerNorm, RMSNorm) and len(alike) == 1


def _is_plain_block(layer: nn.Layer) -> bool:
    return (
        type(layer) is Block
        and type(layer.attention) is Attention
        and type(layer.mlp) is MLP
        and layer.mlp.activation.function in fused_blocks.ACTIVATIONS
        and _is_known_rotary(layer.attention.rotary)
        and layer.mlp_norm is not None
        and not layer.attention.norms_outside
        and layer.multiplier == 1.0
        and not layer.attention.has_biases
        and layer.attention.query_factor == 1.0
        and layer.attention.options.softcap is None
        # The operator cannot communicate inside a block, as tensor and sequence parallelism need.
        and layer.attention.factory.group is None
        and layer.attention.strategy.group is None
    )


def _is_known_rotary(rotary: Rotary | None) -> bool:
    return rotary is None or (type(rotary) is RotaryEmbedding and not rotary.interleaved)


def _has_hooks(layer: nn.Layer) -> bool:
    return bool(layer._forward_pre_hooks or layer._forward_post_hooks)


def _norms(block: Block) -> tuple[nn.Layer | None, ...]:
    attention = block.attention
    return (
        block.input_norm,
        block.attention_post_norm,
        block.mlp_norm,
        block.mlp_post_norm,
        attention.q_norm,
        attention.k_norm,
    )


def linears_of(block: Block) -> tuple[nn.Layer, ...]:
    """Return the linear layers of a block, in the order in which the C++ operator expects them: the
    attention's query/key/value and output projections, and the two layers of the MLP."""
    return block.attention.qkv, block.attention.out_proj, block.mlp.fc1, block.mlp.fc2


def _sizes(block: Block) -> fused_blocks.BlockSizes:
    attention, mlp = block.attention, block.mlp
    wide = mlp.fc1.weight.shape[1]
    activation = fused_blocks.ACTIVATIONS.index(mlp.activation.function)
    return fused_blocks.BlockSizes(
        groups=attention.num_groups,
        per_group=attention.queries_per_group,
        head_dim=attention.head_dim,
        rotary_dim=0 if attention.rotary is None else attention.rotary.head_dim,
        activation=activation,
        inner=wide // 2 if fused_blocks.ACTIVATIONS[activation] is fused_blocks.swiglu else wide,
        parallel_residual=block.parallel_residual,
    )


def _is_known_linear(linear: nn.Layer) -> bool:
    return type(linear) in (InferenceLinear, QuantizedLinear) and not linear.sublayers()


def _operands(linear: nn.Layer, num_rows: int) -> Operands | None:
    if isinstance(linear, QuantizedLinear):
        return linear.matrix.panel_format, *linear.matrix.panels()
    found = linear.matrix.operands(num_rows)
    return None if found is None else (*found, None)
