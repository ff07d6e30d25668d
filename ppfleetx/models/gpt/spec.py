"""Declarations of a GPT's embedding, blocks, final norm and head: dataclasses with sizes and options, without
tensors. The layers are built from them, and the planner, ``--check`` and checkpoint conversion derive
parameter shapes and costs from them. Does not import Paddle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar

from ppfleetx.config.mesh import EXPERTS
from ppfleetx.config.registries import ARCHITECTURES
from ppfleetx.config.registry import load_target
from ppfleetx.config.sections.compress import CompressConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.nn.activation_memory import Step, Tape
from ppfleetx.nn.attention_spec import AttentionSpec, LatentAttentionSpec
from ppfleetx.nn.cost import Operation, Recompute, Work, dropout_step, elementwise, residual
from ppfleetx.nn.init import Normal
from ppfleetx.nn.layer_spec import LayerSpec, LinearSpec, NormSpec, Specs, TableSpec, parameters_within
from ppfleetx.nn.lora_and_quant_specs import transformed
from ppfleetx.nn.mlp_spec import MLPSpec, MoESpec
from ppfleetx.nn.param_spec import REPLICATE, ParamSpec, Shard, dense
from ppfleetx.nn.rope_scaling import score_factor
from ppfleetx.utils.log import get_logger

Shape = tuple[int, ...]


@dataclass(frozen=True)
class EmbeddingSpec:
    """Declaration of the embedding.

    Attributes:
        words: the word embedding, with the padded vocabulary size.
        positions: the learned position embedding, or None.
        dropout: dropout probability of the summed embeddings.
        norm: norm of the word embeddings, or None.
        multiplier: factor by which the word embeddings are multiplied, before the norm.
    """

    words: TableSpec
    positions: TableSpec | None
    dropout: float
    norm: NormSpec | None = None
    multiplier: float = 1.0

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        layers = {"word_embeddings": self.words, "position_embeddings": self.positions, "norm": self.norm}
        return parameters_within(layers.items())

    def operations(self, work: Work) -> list[Operation]:
        moved = work.bytes_of(self.words.width) * (3 + 1 + (self.positions is not None))
        return [elementwise("embedding", "edge", moved, moved, 3)]

    def tape(self, work: Work) -> Tape:
        size, part = work.bytes_of(self.words.width), work.split_bytes_of(self.words.width)
        ids = work.tokens * 8
        steps = [Step("words", size, ("ids",), extra=2 * ids, gradients=self.words.gradient_bytes(work))]
        if self.multiplier != 1.0:
            steps.append(Step("words, multiplied", size, (steps[-1].writes,)))
        if self.norm is not None:
            steps += self.norm.tape(work, "words, normed", steps[-1].writes, size)
        if self.positions is not None:
            words = steps[-1].writes
            steps.append(Step("positions", size, ("ids",), gradients=self.positions.gradient_bytes(work)))
            steps.append(Step("sum", size, (words, "positions")))
        if work.split > 1:
            steps.append(Step("part", part, (steps[-1].writes,)))
        steps.append(dropout_step(work, "out", steps[-1].writes, part, self.dropout))
        return Tape({"ids": 0.0}, tuple(steps), work.new_gradient_share)


@dataclass(frozen=True)
class BlockSpec:
    """Declaration of a transformer block.

    Attributes:
        layer: the layer class that is built from this declaration, or its ``module:class`` name.
        input_norm: norm of attention's input; None: no norm.
        attention: declaration of attention.
        attention_post_norm: norm of attention's output, before the residual addition (Ding et al., 2021).
        mlp_norm: norm of the MLP's input; None: ``input_norm`` also normalizes the MLP's input.
        mlp: declaration of the MLP or mixture of experts.
        mlp_post_norm: norm of the MLP's output, before the residual addition.
        parallel_residual: whether the MLP reads the block's input, as attention does, instead of the sum of
            input and attention output (Black et al., 2022).
        dropout: dropout probability of each branch's output, before the residual addition.
        multiplier: factor of each branch's output, before the residual addition.
    """

    layer: ClassVar[str | Callable[..., Any]] = "ppfleetx.models.gpt.layers:Block"

    input_norm: NormSpec | None
    attention: AttentionSpec | LatentAttentionSpec
    attention_post_norm: NormSpec | None
    mlp_norm: NormSpec | None
    mlp: MLPSpec | MoESpec
    mlp_post_norm: NormSpec | None
    parallel_residual: bool
    dropout: float
    multiplier: float = 1.0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # cached, because blocks are keys of the cost caches
        return hash((self.attention, self.mlp, self.input_norm))

    @property
    def hidden_size(self) -> int:
        return self.attention.hidden_size

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        names = ("input_norm", "attention", "attention_post_norm", "mlp_norm", "mlp", "mlp_post_norm")
        layers = ((name, getattr(self, name)) for name in names)
        return parameters_within(layers, sequence_parallel=sequence_parallel)

    def operations(self, work: Work) -> Iterator[Operation]:
        if self.input_norm is not None:
            yield self.input_norm.operation("input norm", "attention", work)
        yield from self.attention.operations(work)
        yield residual("attention residual", "attention", work, self.hidden_size, self.dropout)
        if self.attention_post_norm is not None:
            yield self.attention_post_norm.operation("norm after attention", "attention", work)
        if (mlp_norm := self.mlp_norm or self.input_norm) is not None:
            yield mlp_norm.operation("mlp norm", "mlp", work)
        yield from self.mlp.operations(work)
        yield residual("mlp residual", "mlp", work, self.hidden_size, self.dropout)
        if self.mlp_post_norm is not None:
            yield self.mlp_post_norm.operation("norm after mlp", "mlp", work)

    def tape(self, work: Work, recompute: Recompute) -> Tape:
        """Return the operations of a forward pass as a tape, the input of the memory simulation
        (:mod:`ppfleetx.nn.activation_memory`)."""
        size = work.split_bytes_of(self.hidden_size)
        x, low = {"x": size}, work.new_gradient_share
        normed, reads = _input(self.input_norm, work, "normed", "x")
        attention = [
            *normed,
            *self.attention.tape(work, "attended", reads, recompute_core=recompute == "core_attn"),
            *self._branch(work, "attended", self.attention_post_norm),
        ]
        if recompute == "full_attn":
            attention = [Step(attention[-1].writes, size, ("x",), inner=Tape(x, tuple(attention), low))]
        source = "x" if self.parallel_residual else "y"
        normed, reads = _input(self.mlp_norm or self.input_norm, work, "mlp normed", source)
        mlp = [
            *normed,
            *self.mlp.tape(work, "mlp", reads),
            *self._branch(work, "mlp", self.mlp_post_norm),
        ]
        steps = (
            *attention,
            Step("y", size, ("x", attention[-1].writes)),
            *mlp,
            Step("out", size, ("y", mlp[-1].writes)),
        )
        if recompute == "full":
            steps = (Step("out", size, ("x",), inner=Tape(x, steps, low)),)
        return Tape(x, steps, low)

    def _branch(self, work: Work, name: str, post_norm: NormSpec | None) -> list[Step]:
        size, dropped = work.split_bytes_of(self.hidden_size), f"{name}, dropped"
        steps = [dropout_step(work, dropped, name, size, self.dropout)]
        if post_norm is not None:
            steps += post_norm.tape(work, f"{name}, normed", dropped)
        if self.multiplier != 1.0:
            steps.append(Step(f"{name}, multiplied", size, (steps[-1].writes,)))
        return steps


def _input(norm: NormSpec | None, work: Work, writes: str, reads: str) -> tuple[list[Step], str]:
    return ([], reads) if norm is None else (norm.tape(work, writes, reads), writes)


@dataclass(frozen=True)
class HeadSpec:
    """Declaration of the head: a language-model head, or a classification head that every rank replicates.

    Attributes:
        num_outputs: vocabulary size or number of classes. Columns of the matrix beyond this number are
            padding.
        linear: the head's own matrix; None if the head is tied. If its ``cut`` is ``"whole"``, the head is a
            classification head.
        words: the word embedding that a tied head uses; None if the head is not tied.
        loss_chunks: number of chunks into which the positions are divided to compute logits and loss.
        softcap: soft cap of the logits; None: no cap.
        multiplier: factor of the logits. The final norm applies it to the hidden states.
    """

    num_outputs: int
    linear: LinearSpec | None
    words: TableSpec | None = None
    loss_chunks: int = 1
    softcap: float | None = None
    multiplier: float = 1.0

    @property
    def is_tied(self) -> bool:
        return self.words is not None

    @property
    def name(self) -> str:
        """The prefix of the head's canonical parameter names: ``score`` for a classification head, otherwise
        ``head``."""
        return "score" if self.matrix.cut == "whole" else "head"

    @property
    def matrix(self) -> LinearSpec:
        if self.linear is not None:
            return self.linear
        return LinearSpec(self.words.width, self.words.rows, "columns", False, self.words.init, "head")

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        return self.linear.parameters(sequence_parallel=sequence_parallel) if self.linear else {}

    def _num_logits(self, work: Work) -> float:
        """Return the number of logits that one rank computes for a micro batch."""
        sliced = work.mp if self.matrix.cut == "columns" else 1
        return work.tokens * self.matrix.out_features / sliced

    def operations(self, work: Work) -> Iterator[Operation]:
        logits, e = self._num_logits(work), work.activation_bytes
        yield self.matrix.operation("logits", "edge", work)
        yield elementwise("loss", "edge", logits * (e + 4 + 4), logits * (4 + 4 + e), 4)

    def tape(self, work: Work, source: str) -> list[Step]:
        logits, e, gradients = self._num_logits(work), work.activation_bytes, self.matrix.gradient_bytes(work)
        hides_padding = self.matrix.out_features != self.num_outputs
        # Temporary copies of the logits in the tensor-parallel loss, in addition to its softmax.
        loss_copies = {"cpu": 2, "plugin": 3}.get(work.kernels, 0) if work.mp > 1 else 0
        if self.loss_chunks > 1:
            copies = 1 + (e != 4) + hides_padding + loss_copies
            return [self._chunked_loss(work, source, logits, copies)]
        steps = [Step("logits", logits * e, (source,), keeps=(source,), gradients=gradients)]
        if e != 4:
            steps.append(Step("wide logits", logits * 4, ("logits",), backward_scratch=0.0))
        if hides_padding:
            steps.append(Step("hidden padding", logits * 4, (steps[-1].writes,), reuses=True))
        softmax, named = logits * 4, logits * e if e != 4 else 0.0  # the caller still holds the logits
        scratch = max(named, loss_copies * softmax)
        # In the backward pass, a tensor-parallel CPU run makes one copy; otherwise the gradient of the logits
        # overwrites the softmax.
        back = softmax if work.mp > 1 and work.on_cpu else -softmax
        reads = (steps[-1].writes,)
        return [
            *steps,
            Step(
                "loss",
                0.0,
                reads,
                extra=softmax,
                scratch=scratch,
                backward_scratch=back,
                uses_no_parameters=True,
            ),
        ]

    def _chunked_loss(self, work: Work, source: str, logits: float, copies: int) -> Step:
        """Return the step of the memory simulation (:mod:`ppfleetx.nn.activation_memory`) for head and loss
        together, when they are computed in ``Model.loss_chunks`` chunks."""
        # The gradients of head and loss are computed in the forward pass.
        size, gradients = work.bytes_of(self.matrix.in_features), self.matrix.gradient_bytes(work)
        e = work.activation_bytes
        piece = logits / min(self.loss_chunks, work.seq_len / work.sep)
        elements = gradients / work.gradient_bytes
        return Step(
            "loss",
            0.0,
            (source,),
            extra=size + elements * 4,
            scratch=piece * e + copies * 4.0 * piece + elements * e,
            backward_scratch=-size - (gradients if e == 4 else 0.0),
            gradients=gradients,
        )


@dataclass(frozen=True)
class ModelSpec:
    """Declaration of a whole model. Equal blocks should be one object instead of copies: blocks are keys of
    the planner's caches, and a lookup is faster if the key is the identical object."""

    embedding: EmbeddingSpec
    blocks: tuple[BlockSpec, ...]
    final_norm: NormSpec
    head: HeadSpec

    def stages(self) -> Iterator[tuple[str, LayerSpec]]:
        """Yield (prefix of canonical parameter names, declaration) for each layer, in model order."""
        yield "embedding", self.embedding
        for index, block in enumerate(self.blocks):
            yield f"decoder.layers.{index}", block
        yield "decoder.final_norm", self.final_norm
        yield self.head.name, self.head

    def parameters(self, *, sequence_parallel: bool = True) -> Mapping[str, ParamSpec]:
        """Return the declaration of every parameter by canonical name, in model order. Linear weights are
        [in, out]."""
        specs = parameters_within(self.stages(), sequence_parallel=sequence_parallel)
        return {name: replace(spec, name=name) for name, spec in specs.items()}

    @property
    def metrics(self) -> tuple[str, ...]:
        given = (name for block in self.blocks for name in getattr(block.mlp, "metrics", ()))
        return tuple(dict.fromkeys(given))

    @property
    def routers(self) -> Mapping[str, int]:
        """The number of experts of each router in the model, by the router's canonical name."""
        mixtures = ((index, block.mlp) for index, block in enumerate(self.blocks))
        return {
            f"decoder.layers.{index}.mlp.router": mlp.cfg.num_experts
            for index, mlp in mixtures
            if isinstance(mlp, MoESpec)
        }

    def end_operations(self, work: Work) -> list[Operation]:
        return [self.final_norm.operation("final norm", "edge", work), *self.head.operations(work)]

    def end_tape(self, work: Work) -> Tape:
        steps, size = self.final_norm.tape(work, "normed", "x"), work.split_bytes_of(self.final_norm.size)
        if work.split > 1:
            steps.append(Step("whole", work.bytes_of(self.final_norm.size), ("normed",)))
        steps += self.head.tape(work, steps[-1].writes)
        return Tape({"x": size}, tuple(steps), work.new_gradient_share)


def model_spec(cfg: ModelConfig) -> ModelSpec:
    """Build the declaration of the architecture named by ``Model.name``."""
    traits = ARCHITECTURES.traits(cfg.name)
    if traits.layer_shapes is not None:
        return _with_listed_parameters(gpt_spec(cfg), cfg, load_target(traits.layer_shapes))
    return gpt_spec(cfg) if traits.spec is None else load_target(traits.spec)(cfg)


def gpt_spec(cfg: ModelConfig, block: type[BlockSpec] = BlockSpec) -> ModelSpec:
    """Build the declaration of a GPT from the ``Model`` section, with blocks of class ``block``."""
    h, std = cfg.hidden_size, cfg.matrix_std
    output_init = Normal(std / math.sqrt(2 * cfg.num_layers) if cfg.scale_output_init else std)
    word_init = Normal(cfg.embedding_std, padded_dim=0, true_size=cfg.vocab_size)
    words = TableSpec(cfg.padded_vocab_size, h, word_init)
    rows = cfg.max_position_embeddings + cfg.position_offset if cfg.positions.has_table else None
    positions = None if rows is None else TableSpec(rows, h, Normal(cfg.embedding_std), of_words=False)

    def norm(gain: float = 1.0) -> NormSpec:
        return NormSpec(cfg.normalization, h, cfg.norm_epsilon, gain)

    mlp = MLPSpec(h, cfg.ffn_size, cfg.hidden_act, cfg.has_mlp_bias, Normal(std), output_init)
    one = block(
        input_norm=norm() if cfg.pre_norm else None,
        attention=attention_spec(cfg, output_init),
        attention_post_norm=norm(cfg.attn_post_norm_scale) if cfg.sandwich_norm else None,
        mlp_norm=norm() if cfg.pre_norm and not cfg.shared_input_norm else None,
        mlp=mlp,
        mlp_post_norm=norm(cfg.ffn_post_norm_scale) if cfg.sandwich_norm else None,
        parallel_residual=cfg.parallel_residual,
        dropout=cfg.hidden_dropout_prob,
        multiplier=cfg.residual_multiplier,
    )
    embedding = EmbeddingSpec(
        words,
        positions,
        cfg.embedding_dropout,
        replace(norm(), before_split=True) if cfg.embedding_norm else None,
        cfg.embedding_multiplier,
    )
    limits = {
        "loss_chunks": cfg.loss_chunks,
        "softcap": cfg.final_logit_softcapping,
        "multiplier": cfg.logits_factor,
    }
    if cfg.task.classifies:
        head = classification_head_spec(cfg, cfg.num_classes or 0)
    elif cfg.tie_word_embeddings:
        head = HeadSpec(cfg.vocab_size, None, words, **limits)
    else:
        init = Normal(cfg.initializer_range, padded_dim=1, true_size=cfg.vocab_size)
        linear = LinearSpec(h, words.rows, "columns", cfg.has_head_bias, init, "head")
        head = HeadSpec(cfg.vocab_size, linear, **limits)
    kinds = cache(lambda window, rotates: _with_attention(one, window, rotates))
    blocks = [kinds(cfg.window_of(layer), cfg.rotates_in(layer)) for layer in range(cfg.num_layers)]
    if cfg.moe is not None:
        mixture = moe_spec(cfg, mlp)
        as_mixture = cache(lambda block: replace(block, mlp=mixture))
        for layer in cfg.moe.mixture_layers(cfg.num_layers):
            blocks[layer] = as_mixture(blocks[layer])
    return ModelSpec(embedding, tuple(blocks), norm(), head)


def _with_attention(block: BlockSpec, window: int | None, rotates: bool) -> BlockSpec:
    """Return a copy of the block with the given attention window. If ``rotates`` is False, the copy has no
    rotary positions."""
    attention = replace(block.attention, window=window)
    if not rotates and isinstance(attention, AttentionSpec):
        attention = replace(attention, rotary_size=None)
    return block if attention == block.attention else replace(block, attention=attention)


def moe_spec(cfg: ModelConfig, mlp: MLPSpec) -> MoESpec:
    """Build the declaration of the mixture of experts that replaces ``mlp``. Experts are like ``mlp``, but
    with FFN width ``cfg.moe.expert_ffn_size``, if that is set."""
    expert = replace(mlp, ffn_hidden_size=cfg.moe.expert_ffn_size or mlp.ffn_hidden_size)
    shared = cfg.moe.shared_experts
    shared_mlp = None if shared is None else replace(mlp, ffn_hidden_size=shared.ffn_size)
    return MoESpec(cfg.moe, len(cfg.moe.mixture_layers(cfg.num_layers)), expert, shared_mlp)


def attention_spec(cfg: ModelConfig, output_init: Normal) -> AttentionSpec | LatentAttentionSpec:
    """Build the declaration of attention: latent attention (MLA) if ``Model.latent_attention`` is set, else
    multi-head or grouped-query attention. ``output_init`` initializes the output projection."""
    latent = cfg.latent_attention
    both: dict[str, Any] = {
        "hidden_size": cfg.hidden_size,
        "num_heads": cfg.num_attention_heads,
        "output_bias": cfg.has_out_proj_bias,
        "init": Normal(cfg.matrix_std),
        "output_init": output_init,
        "dropout": cfg.attention_probs_dropout_prob,
        "window": cfg.attention_window,
        "softmax_in_fp32": cfg.softmax_in_fp32,
    }
    if latent is not None:
        return LatentAttentionSpec(
            **both,
            q_rank=latent.q_rank,
            kv_rank=latent.kv_rank,
            rope_head_dim=latent.rope_head_dim,
            nope_head_dim=latent.nope_head_dim,
            value_head_dim=latent.value_head_dim,
            norm=(cfg.normalization, latent.norm_epsilon),
            down_bias=cfg.has_qkv_bias,
            score_factor=score_factor(cfg.rope_scaling),
        )
    has_gain_per_head = isinstance(cfg.qk_layernorm, str)
    head_norm = NormSpec(
        cfg.head_normalization,
        cfg.head_size,
        cfg.norm_epsilon,
        shares_gain_over_heads=not has_gain_per_head,
        has_gain_per_head=has_gain_per_head,
        head_size=cfg.head_size if cfg.qk_layernorm == "each_head" else None,
    )
    return AttentionSpec(
        **both,
        num_kv_heads=cfg.kv_heads,
        head_dim=cfg.head_size,
        qkv_bias=cfg.has_qkv_bias,
        head_norm=head_norm if cfg.qk_layernorm else None,
        rotary_size=cfg.rotary_size if cfg.positions.rotates else None,
        has_biases=cfg.positions.biases,
        score_scale=cfg.attention_multiplier,
        softcap=cfg.attn_logit_softcapping,
    )


def classification_head_spec(cfg: ModelConfig, num_outputs: int) -> HeadSpec:
    """Build the declaration of a classification head with ``num_outputs`` classes (1: regression)."""
    init = Normal(cfg.initializer_range)
    return HeadSpec(num_outputs, LinearSpec(cfg.hidden_size, num_outputs, "whole", False, init))


# -- deprecated, to be removed in the next version: architectures that list the parameter shapes of a block


@dataclass(frozen=True)
class _ListedBlock(BlockSpec):
    """A block whose parameter shapes are listed by the architecture (the deprecated ``layer_shapes``). Its
    other sizes and its cost are those of a GPT block."""

    listed: Specs = field(default_factory=dict, compare=False)

    __hash__ = BlockSpec.__hash__

    def parameters(self, *, sequence_parallel: bool = True) -> Specs:
        return self.listed


def _with_listed_parameters(spec: ModelSpec, cfg: ModelConfig, layer_shapes: Callable[..., Any]) -> ModelSpec:
    _warn_of_layer_shapes(cfg.name)
    known = spec.blocks[0].parameters()
    listed = {
        name: shape if isinstance(shape, ParamSpec) else _spec_of_shape(tuple(shape), known.get(name))
        for name, shape in layer_shapes(cfg).items()
    }
    sizes = {one.name: getattr(spec.blocks[0], one.name) for one in fields(BlockSpec)}
    return replace(spec, blocks=(_ListedBlock(**sizes, listed=listed),) * cfg.num_layers)


@cache
def _warn_of_layer_shapes(architecture: str) -> None:
    get_logger().warning(
        f"architecture {architecture}: ArchitectureTraits(layer_shapes=...) is removed in the next version; "
        "pass spec=..., a function that returns a ModelSpec (docs/extending.md)"
    )


def _spec_of_shape(shape: Shape, like: ParamSpec | None) -> ParamSpec:
    """Return the declaration of a parameter with the shape ``shape``. ``like`` is the GPT block's parameter
    of the same name, if any. If ``like`` has as many dimensions as ``shape``, the result differs from it only
    in the shape. Otherwise, ``like`` is ignored."""
    if like is not None and len(like.shape) == len(shape):
        return replace(like, shape=shape)
    # Tensor parallelism splits a matrix by columns and replicates a vector.
    is_matrix = len(shape) > 1
    mp = Shard(len(shape) - 1) if is_matrix else REPLICATE
    return dense(shape, Normal(0.0), "matrix" if is_matrix else "norm", mp=mp, partial=not is_matrix)


# -- parameter and FLOP counts


def parameter_specs(model: ModelConfig, compress: CompressConfig | None = None) -> Mapping[str, ParamSpec]:
    """Return the declaration of every parameter by canonical name, in model order. LoRA adapters and the
    changes made by the section ``Compress`` are included."""
    return transformed(model_spec(model).parameters(), model.lora, compress)


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the global shape of every parameter by canonical name, in model order."""
    return {name: spec.shape for name, spec in parameter_specs(model).items()}


def trained_count(model: ModelConfig) -> int:
    """Return the number of trainable parameters. With LoRA, only the adapters and a classification head, if
    any, are trainable."""
    return sum(math.prod(spec.shape) for spec in parameter_specs(model).values() if spec.trains)


def parameter_count(model: ModelConfig) -> int:
    """Return the number of parameters of the model. A tied head counts once."""
    # With biases, LayerNorm, P learned positions, multi-head attention, f = 4h and a tied head, this is
    # 12Lh^2 + 13Lh + (V + P)h + 2h (Narayanan et al., 2021, without the 2h of the final norm).
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def active_count(model: ModelConfig) -> int:
    """Return the number of parameters used for one token. This excludes the experts that the router does not
    choose for the token."""
    specs = parameter_specs(model).values()
    experts = sum(math.prod(spec.shape) for spec in specs if spec.view == EXPERTS)
    idle = 0 if model.moe is None else experts - experts * model.moe.top_k // model.moe.num_experts
    return parameter_count(model) - idle


def matrix_size(layer: LayerSpec) -> int:
    """Return the number of weights of ``layer`` that are used in matmuls for one token. This excludes the
    experts that the router does not choose for the token."""
    kinds = ("matrix", "router")
    size = sum(math.prod(spec.shape) for spec in layer.parameters().values() if spec.kind in kinds)
    mlp = getattr(layer, "mlp", layer)
    return size - mlp.idle_size if isinstance(mlp, MoESpec) else size


def flops_per_step(model: ModelConfig, batch_size: int, seq_len: int) -> int:
    """Return the model FLOPs of one optimizer step over the whole job, forward and backward.

    Only matmuls are counted, and a multiply-add is two operations. For attention, only the causal half of the
    scores is counted. Recomputation is excluded. The formula is from Megatron-LM.
    """
    # Bs[6hfkL + 6(h(q + 2kv) + qh)L + 6hV] + 6Bs^2qL with k = 2 (3 for swiglu). q, kv and f are the widths of
    # queries, keys and the MLP. For a plain GPT, this is 72BLsh^2(1 + s/12h + V/12hL).
    blocks = model_spec(model).blocks
    matrices = sum(matrix_size(block) for block in blocks) + model.hidden_size * model.padded_vocab_size
    scores = batch_size * seq_len**2 * sum(block.attention.score_macs_per_pair for block in blocks)
    return 6 * batch_size * seq_len * matrices + 3 * scores
