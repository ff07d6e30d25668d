"""The layers of a GPT: embedding, block, final norm, heads.

The first stage takes a tuple of tokens, position ids and optionally document starts, each ``[b, s]``. The
stages pass a :class:`HiddenState` to each other as a tuple. The last stage returns logits ``[s, b, V]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import paddle
from paddle import nn

from ppfleetx.config.registry import load_target
from ppfleetx.models.gpt.spec import BlockSpec, EmbeddingSpec, HeadSpec
from ppfleetx.nn.attention import KeyValueCache
from ppfleetx.nn.attention_kernels import KernelOptions
from ppfleetx.nn.chunked_loss import ChunkedHead, ChunkTarget, DeferredLogits
from ppfleetx.nn.layer_spec import NormSpec
from ppfleetx.nn.positions import Positions, Rotary, rotary_table_rows
from ppfleetx.nn.quantized import QuantizedEmbedding, QuantizedLinear
from ppfleetx.nn.recompute import may_recompute, recompute
from ppfleetx.nn.stage import LayerFactory

State = tuple[paddle.Tensor, ...]


class HiddenState(NamedTuple):
    """The tensors that blocks pass to each other.

    Attributes:
        hidden: ``[s, b, h]``; under sequence or context parallelism, this rank's positions.
        position_ids: ``[b, s]``; for LongRoPE, row indices into its cos and sin tables
            (:func:`~ppfleetx.nn.positions.rotary_table_rows`). None if the blocks do not need them.
        document_start: ``[b, s]``, the first position that each position can attend to; None: no limit.
    """

    hidden: paddle.Tensor
    position_ids: paddle.Tensor | None = None
    document_start: paddle.Tensor | None = None

    @classmethod
    def unpack(cls, state: State, *, carries_positions: bool) -> HiddenState:
        """Rebuild the hidden state from ``state``, the tuple that :meth:`pack` returned. If
        ``carries_positions`` is True, the tuple has position ids."""
        hidden, *rest = state
        position_ids = rest.pop(0) if carries_positions else None
        return cls(hidden, position_ids, rest[0] if rest else None)

    def pack(self) -> State:
        """Return the tensors that are not None as a tuple, the form in which pipelines send them."""
        return tuple(tensor for tensor in self if tensor is not None)


class Embedding(nn.Layer):
    """The first stage: word embeddings plus learned or fixed position embeddings, if any.

    Args:
        word_embeddings: a word embedding shared with another stage; None creates a new one.
    """

    def __init__(
        self,
        factory: LayerFactory,
        spec: EmbeddingSpec,
        *,
        positions: Positions,
        word_embeddings: nn.Layer | None = None,
    ) -> None:
        super().__init__()
        self.factory, self.added_positions = factory, positions.added
        self.carries_positions, self.switch_length = positions.reach_blocks, positions.switch_length
        self.offset, self.multiplier = positions.offset, spec.multiplier
        self.word_embeddings = word_embeddings or factory.embedding(spec.words)
        self.position_embeddings = factory.embedding(spec.positions) if spec.positions else None
        self.norm = factory.norm(spec.norm) if spec.norm else None
        self.dropout = factory.dropout(spec.dropout)

    def forward(self, state: State, cache: KeyValueCache | None = None) -> State:
        """Embed the tokens ``[b, s]`` in ``state``, which also has position ids and optionally document
        starts, both ``[b, s]``. Returns a packed :class:`HiddenState` with this rank's positions."""
        tokens, position_ids, document_start = HiddenState.unpack(state, carries_positions=True)
        hidden = self.embed(tokens, position_ids)
        if self.switch_length is not None:
            # Done here once for all blocks, with the position ids of whole sequences.
            lengths = position_ids.max(axis=1, keepdim=True) + 1 if cache is None else cache.row_lengths()
            position_ids = rotary_table_rows(position_ids, lengths, self.switch_length)
        return HiddenState(hidden, position_ids if self.carries_positions else None, document_start).pack()

    def embed(self, tokens: paddle.Tensor, position_ids: paddle.Tensor) -> paddle.Tensor:
        """Return the embeddings ``[s, b, h]`` of ``tokens [b, s]`` at ``position_ids [b, s]``. Under sequence
        or context parallelism, the result has only this rank's positions."""
        # Transpose the ids rather than the much larger embeddings.
        both = (tokens, position_ids)
        tokens, position_ids = (self.factory.local_positions(ids).transpose([1, 0]) for ids in both)
        hidden = self.word_embeddings(tokens)
        if self.multiplier != 1.0:
            hidden = hidden * self.multiplier
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.position_embeddings is not None:
            rows = position_ids + self.offset if self.offset else position_ids
            hidden = hidden + self.position_embeddings(rows)
        elif self.added_positions is not None:
            hidden = hidden + self.added_positions(position_ids).astype(hidden.dtype)
        return self.dropout(self.factory.scatter_positions(hidden))


class Block(nn.Layer):
    """A transformer block, with attention and MLP in sequence or in parallel.

    Args:
        layer_index: index of the block in the whole model.
        recompute: granularity of recomputation: ``full``, ``full_attn`` or ``core_attn``; None: the backward
            pass recomputes nothing.
        carries_positions: whether the packed :class:`HiddenState` has position ids. It must be True if any
            block uses them, even if this block does not. None: True if this block has rotary positions.
    """

    def __init__(
        self,
        factory: LayerFactory,
        spec: BlockSpec,
        *,
        layer_index: int,
        rotary: Rotary | None,
        kernel: KernelOptions,
        recompute: str | None,
        carries_positions: bool | None = None,
    ) -> None:
        super().__init__()
        self.granularity = recompute
        self.carries_positions = rotary is not None if carries_positions is None else carries_positions
        self.parallel_residual, self.multiplier = spec.parallel_residual, spec.multiplier

        def norm(spec: NormSpec | None) -> nn.Layer | None:
            return None if spec is None else factory.norm(spec)

        self.input_norm = norm(spec.input_norm)
        self.attention = load_target(spec.attention.layer)(
            factory,
            spec.attention,
            layer_index=layer_index,
            rotary=rotary,
            options=kernel,
            recompute_core=recompute == "core_attn",
        )
        self.attention_post_norm = norm(spec.attention_post_norm)
        self.mlp_norm = norm(spec.mlp_norm)
        self.mlp = load_target(spec.mlp.layer)(factory, spec.mlp)
        self.mlp_post_norm = norm(spec.mlp_post_norm)
        self.dropout = factory.dropout(spec.dropout)

    def forward(self, state: State, cache: KeyValueCache | None = None) -> State:
        """Run the block on a packed :class:`HiddenState`. ``cache`` has keys and values of earlier
        positions."""
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
        """Run attention and MLP on ``hidden [s, b, h]``, including the residual connections."""
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
        """Return the result of :meth:`attend`. With ``recompute_attention``, the backward pass recomputes
        it."""
        if recompute_attention:
            return recompute(self.attend, hidden, position_ids, document_start)
        return self.attend(hidden, position_ids, document_start, cache)

    def mlp_branch(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Return the output of the MLP branch, before the residual addition."""
        norm = self.input_norm if self.mlp_norm is None else self.mlp_norm
        return self._branch_output(self.mlp(hidden if norm is None else norm(hidden)), self.mlp_post_norm)

    def attend(
        self,
        hidden: paddle.Tensor,
        position_ids: paddle.Tensor | None,
        document_start: paddle.Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> paddle.Tensor:
        """Return the output of the attention branch, before the residual addition: norm, attention, dropout,
        post-norm, multiplier."""
        normed = hidden if self.input_norm is None else self.input_norm(hidden)
        branch = self.attention(normed, position_ids, document_start, cache)
        return self._branch_output(branch, self.attention_post_norm)

    def _branch_output(self, branch: paddle.Tensor, post_norm: nn.Layer | None) -> paddle.Tensor:
        """Apply dropout, ``post_norm`` and multiplier to the output of attention or MLP."""
        branch = self.dropout(branch)
        if post_norm is not None:
            branch = post_norm(branch)
        return branch if self.multiplier == 1.0 else branch * self.multiplier


class FinalNorm(nn.Layer):
    """The norm after the last block. Its output is multiplied by ``multiplier``, the factor of the logits."""

    def __init__(self, factory: LayerFactory, spec: NormSpec, multiplier: float = 1.0) -> None:
        super().__init__()
        self.final_norm, self.multiplier = factory.norm(spec), multiplier

    def forward(self, state: State, cache: KeyValueCache | None = None) -> State:
        hidden = self.final_norm(state[0])
        return (hidden if self.multiplier == 1.0 else hidden * self.multiplier, *state[1:])


class LanguageHead(ChunkedHead):
    """Base class of language-model heads. A head computes all logits at once, or lets the loss compute them
    in chunks (``Model.loss_chunks``)."""

    def __init__(self, factory: LayerFactory, spec: HeadSpec) -> None:
        super().__init__(spec.loss_chunks, factory.matmul, softcap=spec.softcap)
        self.factory = factory

    def forward(
        self, state: State, cache: KeyValueCache | None = None, target: ChunkTarget | None = None
    ) -> Any:
        """Return the logits ``[s, b, V]``; under tensor parallelism, only this rank's columns.

        If the loss is computed in chunks, return :class:`DeferredLogits` instead. To compute the loss,
        :class:`DeferredLogits` calls the head again with a ``target``. The head then returns the sum of the
        loss or, if gradients are disabled, a list with the result of each chunk.
        """
        if target is not None:
            return self.run_chunks(self.gathered_hidden(state[0]), target)
        if self.defers((state, cache)):
            return DeferredLogits(self, state[0])
        return self.capped(self.logits(state[0]))

    def gathered_hidden(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return self.factory.enter_head(hidden)

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Return the logits of ``hidden [s, b, h]`` for all positions, before soft-capping."""
        raise NotImplementedError


class Head(LanguageHead):
    def __init__(self, factory: LayerFactory, spec: HeadSpec) -> None:
        super().__init__(factory, spec)
        self.head = factory.linear(spec.linear)

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return self.head(hidden)

    def matrix(self) -> tuple[paddle.Tensor, paddle.Tensor | None, bool]:
        head = self.head
        weight = head.matrix.dequantized() if isinstance(head, QuantizedLinear) else head.weight
        return weight, head.bias, False


class TiedHead(LanguageHead):
    """A head that multiplies by the word embedding matrix or, on another pipeline rank, by a copy of it."""

    def __init__(
        self, factory: LayerFactory, spec: HeadSpec, *, word_embeddings: nn.Layer | None = None
    ) -> None:
        super().__init__(factory, spec)
        self.word_embeddings = word_embeddings or factory.embedding(spec.words)

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return self.factory.tied_logits(hidden, self._table())

    def matrix(self) -> tuple[paddle.Tensor, paddle.Tensor | None, bool]:
        return self._table(), None, True

    def _table(self) -> paddle.Tensor:
        table = self.word_embeddings
        return table.dequantized() if isinstance(table, QuantizedEmbedding) else table.weight


class ClassificationHead(nn.Layer):
    """A linear head that returns scores ``[s, b, classes]`` at every position; for regression, ``classes`` is
    1. Every rank holds the whole weight."""

    def __init__(self, factory: LayerFactory, spec: HeadSpec) -> None:
        super().__init__()
        self.factory = factory
        self.score = factory.linear(spec.linear)

    def forward(self, state: State, cache: KeyValueCache | None = None) -> paddle.Tensor:
        return self.score(self.factory.gather_positions(state[0]))
