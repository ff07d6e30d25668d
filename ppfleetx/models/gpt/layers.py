"""The four layers of a GPT: embedding, block, final norm, head.

What travels between them is a tuple of tensors, so that a pipeline can send it: :class:`HiddenState`, packed.
The first stage takes ``(tokens [b, s], position_ids [b, s], document_start [b, s] if given)``, the last gives
logits ``[s, b, V]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import paddle
from paddle import nn

from ppfleetx.nn.attention import Attention, KeyValueCache
from ppfleetx.nn.chunked_loss import LogitsInPieces, PieceHead, PieceTarget
from ppfleetx.nn.embedding import TokenEmbedding
from ppfleetx.nn.init import Init
from ppfleetx.nn.kernels import KernelOptions
from ppfleetx.nn.mlp import MLP
from ppfleetx.nn.positions import Rotary
from ppfleetx.nn.quantized import QuantizedEmbedding, QuantizedLinear
from ppfleetx.nn.recompute import may_recompute, recompute
from ppfleetx.nn.stage import LayerFactory

State = tuple[paddle.Tensor, ...]


class HiddenState(NamedTuple):
    """What the blocks hand on.

    Attributes:
        hidden: ``[s, b, h]``, or this rank's part of it.
        position_ids: ``[b, s]`` where blocks turn by positions (rotary), else None.
        document_start: ``[b, s]`` first position each row may attend to; None: all before it.
    """

    hidden: paddle.Tensor
    position_ids: paddle.Tensor | None = None
    document_start: paddle.Tensor | None = None

    @classmethod
    def unpack(cls, state: State, *, carries_positions: bool) -> HiddenState:
        """The state that :meth:`pack` made a tuple of."""
        hidden, *rest = state
        position_ids = rest.pop(0) if carries_positions else None
        return cls(hidden, position_ids, rest[0] if rest else None)

    def pack(self) -> State:
        """The tensors that are there, in order."""
        return tuple(tensor for tensor in self if tensor is not None)


class Embedding(TokenEmbedding):
    """First stage. ``carries_positions``: whether the blocks need position ids (rotary)."""

    def __init__(self, factory: LayerFactory, *, carries_positions: bool, **kwargs: object) -> None:
        super().__init__(factory, **kwargs)
        self.carries_positions = carries_positions

    def forward(self, state: State, cache: KeyValueCache | None = None) -> State:
        """``state``: tokens ``[b, s]``, position ids ``[b, s]``, and perhaps document starts ``[b, s]``.

        Returns the packed :class:`HiddenState`, with ``hidden [s, b, h]``.
        """
        tokens, position_ids, document_start = HiddenState.unpack(state, carries_positions=True)
        hidden = super().forward(tokens, position_ids)
        return HiddenState(hidden, position_ids if self.carries_positions else None, document_start).pack()


@dataclass(frozen=True)
class BlockShape:
    """Everything a block is made from. Every value is resolved: None never means "derive it".

    Attributes:
        hidden_size: width of the hidden states, h.
        num_heads: query heads.
        num_kv_heads: key and value heads; ``num_heads`` divides by it (Ainslie et al., 2023).
        head_dim: width of a head.
        ffn_hidden_size: width inside the feed-forward part; of each half for gated activations.
        activation: a name of ``Model.hidden_act``.
        norm: a name of ``Model.normalization``.
        norm_epsilon: added to the variance or mean square.
        qkv_bias: whether queries, keys and values have a bias.
        output_bias: whether the projection after attention has one.
        mlp_bias: whether both matrices of the feed-forward part have one.
        hidden_dropout: share of elements dropped from a branch before it is added to the hidden states.
        attention_dropout: share of attention weights dropped.
        attention_window: how many positions before its own a token sees; None: all of them.
        qk_layernorm: whether each head's query and key are normalised (Henry et al., 2020).
        parallel_residual: whether the feed-forward part reads what attention reads (Black et al., 2022).
        sandwich_norm: whether each branch is normalised again before it is added (Ding et al., 2021).
        attention_post_norm_gain: initial gain of that norm after attention.
        mlp_post_norm_gain: the same after the feed-forward part.
        init: initial values of matrices that read the hidden states.
        output_init: initial values of matrices that write into the hidden states.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    activation: str
    norm: str
    norm_epsilon: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    hidden_dropout: float
    attention_dropout: float
    attention_window: int | None
    qk_layernorm: bool
    parallel_residual: bool
    sandwich_norm: bool
    attention_post_norm_gain: float
    mlp_post_norm_gain: float
    init: Init
    output_init: Init


class Block(nn.Layer):
    """Pre-norm transformer block; its two branches follow each other, or both read the block's input.

    Args:
        factory: makes linears and norms.
        shape: sizes and options.
        layer_index: index in the whole model.
        rotary: rotary positions, or None.
        kernel: attention kernel options.
        recompute: ``full``, ``full_attn``, ``core_attn`` or None.
    """

    def __init__(
        self,
        factory: LayerFactory,
        *,
        shape: BlockShape,
        layer_index: int,
        rotary: Rotary | None,
        kernel: KernelOptions,
        recompute: str | None,
    ) -> None:
        super().__init__()
        self.granularity, self.carries_positions = recompute, rotary is not None
        self.parallel_residual = shape.parallel_residual

        def norm(gain: float = 1.0) -> nn.Layer:
            return factory.norm(shape.norm, shape.hidden_size, epsilon=shape.norm_epsilon, gain=gain)

        def head_norm() -> nn.Layer:
            return factory.norm(shape.norm, shape.head_dim, epsilon=shape.norm_epsilon, inside_heads=True)

        self.input_norm = norm()
        self.attention = Attention(
            factory,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            layer_index=layer_index,
            rotary=rotary,
            qkv_bias=shape.qkv_bias,
            output_bias=shape.output_bias,
            dropout=shape.attention_dropout,
            window=shape.attention_window,
            head_norm=head_norm if shape.qk_layernorm else None,
            init=shape.init,
            output_init=shape.output_init,
            options=kernel,
            recompute_core=recompute == "core_attn",
        )
        self.attention_post_norm = norm(shape.attention_post_norm_gain) if shape.sandwich_norm else None
        self.mlp_norm = norm()
        self.mlp = MLP(
            factory,
            hidden_size=shape.hidden_size,
            ffn_hidden_size=shape.ffn_hidden_size,
            activation=shape.activation,
            bias=shape.mlp_bias,
            init=shape.init,
            output_init=shape.output_init,
        )
        self.mlp_post_norm = norm(shape.mlp_post_norm_gain) if shape.sandwich_norm else None
        self.dropout = factory.dropout(shape.hidden_dropout)

    def forward(self, state: State, cache: KeyValueCache | None = None) -> State:
        """A packed :class:`HiddenState` to another of its shapes; ``cache`` has earlier keys and values."""
        trunk = HiddenState.unpack(state, carries_positions=self.carries_positions)
        hidden, position_ids, document_start = trunk
        granularity = self.granularity if cache is None and may_recompute(self) else None
        if granularity == "full":
            hidden = recompute(self.transform, hidden, position_ids, document_start)
        else:
            hidden = self.transform(hidden, position_ids, document_start, cache, granularity == "full_attn")
        return trunk._replace(hidden=hidden).pack()

    def transform(
        self,
        hidden: paddle.Tensor,
        position_ids: paddle.Tensor | None,
        document_start: paddle.Tensor | None,
        cache: KeyValueCache | None = None,
        recompute_attention: bool = False,
    ) -> paddle.Tensor:
        """``hidden [s, b, h]`` through attention and feed-forward."""
        attended = hidden + self.attention_branch(
            hidden, position_ids, document_start, cache, recompute_attention
        )
        return attended + self.mlp_branch(hidden if self.parallel_residual else attended)

    def attention_branch(
        self,
        hidden: paddle.Tensor,
        position_ids: paddle.Tensor | None,
        document_start: paddle.Tensor | None,
        cache: KeyValueCache | None = None,
        recompute_attention: bool = False,
    ) -> paddle.Tensor:
        """What attention adds to ``hidden``; computed again in the backward pass where that is asked for."""
        if recompute_attention:
            return recompute(self.attend, hidden, position_ids, document_start)
        return self.attend(hidden, position_ids, document_start, cache)

    def mlp_branch(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """What the feed-forward block adds to ``hidden``."""
        branch = self.dropout(self.mlp(self.mlp_norm(hidden)))
        return branch if self.mlp_post_norm is None else self.mlp_post_norm(branch)

    def attend(
        self,
        hidden: paddle.Tensor,
        position_ids: paddle.Tensor | None,
        document_start: paddle.Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> paddle.Tensor:
        """The attention branch, up to but without its addition to ``hidden``."""
        branch = self.attention(self.input_norm(hidden), position_ids, document_start, cache)
        branch = self.dropout(branch)
        return branch if self.attention_post_norm is None else self.attention_post_norm(branch)


class FinalNorm(nn.Layer):
    """Norm after the last block."""

    def __init__(self, factory: LayerFactory, *, norm: str, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.final_norm = factory.norm(norm, hidden_size, epsilon=epsilon)

    def forward(self, state: State, cache: KeyValueCache | None = None) -> State:
        """A packed :class:`HiddenState` to one of the same shapes."""
        return (self.final_norm(state[0]), *state[1:])


class LanguageHead(PieceHead):
    """What the two heads share: logits at once, or later and in pieces."""

    def __init__(self, factory: LayerFactory, loss_chunks: int) -> None:
        super().__init__(loss_chunks, factory.matmul)
        self.factory = factory

    def forward(
        self, state: State, cache: KeyValueCache | None = None, target: PieceTarget | None = None
    ) -> Any:
        """Logits ``[s, b, V]``, or this rank's columns of them; see :class:`PieceHead` for the rest."""
        if target is not None:
            return self.run_pieces(self.factory.enter_head(state[0]), target)
        if self.defers((state, cache)):
            return LogitsInPieces(self, state[0])
        return self.logits(state[0])

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Whole logits of ``hidden [s, b, h]``."""
        raise NotImplementedError


class Head(LanguageHead):
    """Logits from a matrix of its own."""

    def __init__(
        self,
        factory: LayerFactory,
        *,
        hidden_size: int,
        padded_vocab_size: int,
        bias: bool,
        init: Init,
        loss_chunks: int = 1,
    ) -> None:
        super().__init__(factory, loss_chunks)
        self.head = factory.column_linear(hidden_size, padded_vocab_size, init=init, bias=bias, kind="head")

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return self.head(hidden)

    def matrix(self) -> tuple[paddle.Tensor, paddle.Tensor | None, bool]:
        head = self.head
        weight = head.matrix.dequantized() if isinstance(head, QuantizedLinear) else head.weight
        return weight, head.bias, False


class TiedHead(LanguageHead):
    """Logits from the word embedding, which another stage shares (one card) or mirrors (pipeline)."""

    def __init__(
        self,
        factory: LayerFactory,
        *,
        hidden_size: int,
        padded_vocab_size: int,
        word_init: Init,
        word_embeddings: nn.Layer | None = None,
        loss_chunks: int = 1,
    ) -> None:
        super().__init__(factory, loss_chunks)
        self.word_embeddings = word_embeddings or factory.vocab_embedding(
            padded_vocab_size, hidden_size, init=word_init
        )

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return self.factory.tied_logits(hidden, self._table())

    def matrix(self) -> tuple[paddle.Tensor, paddle.Tensor | None, bool]:
        return self._table(), None, True

    def _table(self) -> paddle.Tensor:
        table = self.word_embeddings
        return table.dequantized() if isinstance(table, QuantizedEmbedding) else table.weight


class ClassificationHead(nn.Layer):
    """Scores of each class (or one number) at every position, ``[s, b, classes]`` whole on every rank."""

    def __init__(self, factory: LayerFactory, *, hidden_size: int, num_outputs: int, init: Init) -> None:
        super().__init__()
        self.factory = factory
        self.score = factory.whole_linear(hidden_size, num_outputs, init=init, bias=False)

    def forward(self, state: State, cache: KeyValueCache | None = None) -> paddle.Tensor:
        """Scores ``[s, b, classes]``."""
        return self.score(self.factory.leave_trunk(state[0]))
