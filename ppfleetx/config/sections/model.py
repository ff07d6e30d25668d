"""Configuration section ``Model``: the sizes and variants of the network, and how it is computed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Literal

from ppfleetx.config.errors import RuleError
from ppfleetx.config.field_types import (
    MAX_SIZE,
    Bool,
    CountInt,
    Fraction,
    NonNegativeFloat,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    Size,
    UnitFloat,
)
from ppfleetx.config.registries import (
    ACTIVATIONS,
    ARCHITECTURES,
    MODULES,
    NORMS,
    POSITIONS,
    ModuleTraits,
    PositionTraits,
)
from ppfleetx.config.registry import Registered
from ppfleetx.config.section import Section
from ppfleetx.config.sections.lora import LoraConfig
from ppfleetx.config.sections.moe import MoEConfig
from ppfleetx.config.sections.rope import RopeScalingConfig

FusedName = Literal[
    "adamw",
    "grad_norm",
    "grad_scale",
    "rms_norm",
    "rope",
    "swiglu",
    "causal_softmax",
    "packed_attention",
    "plugin_attention",
    "linear_grad_add",
    "weight_cast",
]
"""The fused operators that ``Model.fused_ops`` may list; ``ppfleetx.nn.fused_ops`` describes them."""
_LAYER_LISTS = ("attention_window_layers", "rotary_layers", "recompute_layers", "no_recompute_layers")


class LatentAttentionConfig(Section):
    """Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024).

    Keys and values of all heads are computed from one compressed vector per position. All heads share a
    second vector, the rotary part of their keys. Decoding caches only these two vectors.
    """

    q_rank: Size | None = None
    """Width of the compressed queries; null: queries are computed from the hidden states directly."""
    kv_rank: Size
    """Width of the compressed keys and values."""
    rope_head_dim: Size
    """Number of features of each head's query and key that get rotary positions; must be even."""
    nope_head_dim: Size
    """Number of features of each head's query and key that get no positions."""
    value_head_dim: Size
    """Width of each head's value."""
    norm_epsilon: PositiveFloat = 1e-6
    """Added to the mean square in the norms of compressed vectors. DeepSeek's code uses 1e-6 here,
    independently of the epsilon of the other norms."""

    @property
    def head_dim(self) -> int:
        """The width of a head's query and key: the features that rotary positions rotate plus the other
        features."""
        return self.nope_head_dim + self.rope_head_dim

    def violations(self) -> Iterator[RuleError]:
        if self.rope_head_dim % 2:
            yield RuleError(("rope_head_dim",), "rotary positions rotate pairs of features: must be even")


class ModelConfig(Section):
    """The network: sizes (lengths in tokens, widths in features), variants, and how it is computed."""

    module: Annotated[str, Registered(MODULES)] = "GPTModule"
    """The task of the model: pretraining, offline evaluation, generation or finetuning, or a task of your own
    (docs/extending.md)."""
    name: Annotated[str, Registered(ARCHITECTURES)] = "GPT"
    """Architecture: GPT, or one of your own (docs/extending.md)."""
    vocab_size: Size
    """Number of token ids without padding. The embedding table is padded (see the next key); padding ids
    never get any probability."""
    vocab_size_divisible_unit: Size = 128
    """The vocabulary is padded to a multiple of this number, independently of `Distributed.mp_degree`."""
    hidden_size: Size
    """Width of the residual stream."""
    num_layers: NumLayers
    """Number of transformer layers over all pipeline stages."""
    num_attention_heads: Size
    """Number of query heads."""
    num_query_groups: Size | None = None
    """Number of key/value heads (grouped-query attention); null: one per query head."""
    head_dim: Size | None = None
    """Width of one head; null: `hidden_size / num_attention_heads`."""
    ffn_hidden_size: Size | None = None
    """Inner width of the MLP; null: `4 * hidden_size`, with swiglu `int(8/3 * hidden_size / 64) * 64`."""
    hidden_act: Annotated[str, Registered(ACTIVATIONS)] = "gelu"
    """Activation of the MLP. `gelu` is the tanh form, `quick_gelu` is `x * sigmoid(1.702 x)`, and `relu2`
    squares the ReLU. `swiglu` and `geglu_tanh` are gated, with SiLU and the tanh form of GELU."""
    moe: MoEConfig | None = None
    """Mixtures of experts in place of MLPs; null: none."""
    hidden_dropout_prob: Fraction = 0.1
    """Dropout after the embedding and on each residual branch."""
    embedding_dropout_prob: Fraction | None = None
    """Dropout after the embedding alone; null: `hidden_dropout_prob`."""
    attention_probs_dropout_prob: Fraction = 0.1
    """Dropout on attention probabilities."""
    max_position_embeddings: Size = 1024
    """Context length: the largest number of tokens in a sequence. With learned positions, this is also the
    number of rows of the table."""
    position_embedding_type: Annotated[str, Registered(POSITIONS)] = "learned_absolute"
    """Position encoding: a learned table, rotary positions of queries and keys (rope), biases of the
    attention scores that are linear in the distance (alibi), or none."""
    position_offset: CountInt = 0
    """Learned positions: the row of the table for the first token. The table has this many extra rows
    (OPT)."""
    embedding_norm: Bool = False
    """Normalize the word embeddings (BLOOM)."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor of the word embeddings, e.g. `sqrt(hidden_size)` for Gemma."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor by which the outputs of attention and of the MLP are multiplied before they are added to the
    layer's input."""
    attention_multiplier: PositiveFloat | None = None
    """Factor of the attention scores before the softmax; null: `1 / sqrt(head_dim)`."""
    logits_multiplier: PositiveFloat = 1.0
    """Factor of the logits."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Soft limit c of the attention scores, `c * tanh(score / c)` (Gemma 2); null: none. Flash attention does
    not support it."""
    final_logit_softcapping: PositiveFloat | None = None
    """Soft limit of the logits; null: none."""
    rotary_base: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    local_rotary_base: PositiveFloat | None = None
    """Base of the rotary frequencies in layers with an attention window (Gemma 3). `rope_scaling` then has no
    effect in these layers. null: the same frequencies as in the other layers."""
    rotary_layers: tuple[CountInt, ...] | None = None
    """The layers (from 0) with rotary positions; null: all. SmolLM3 leaves out some layers."""
    rotary_percent: UnitFloat = 1.0
    """Fraction of each head that gets rotary positions: its first `int(rotary_percent * head_dim)` features,
    which must be an even number."""
    rotary_interleaved: Bool = False
    """Rotary positions rotate pairs of neighboring features (0 and 1, 2 and 3, ...), as in DeepSeek and
    GPT-J; false: feature `i` of the first half of a head is paired with feature `i` of the second half."""
    rope_scaling: RopeScalingConfig | None = None
    """Scale the rotary frequencies for longer sequences; null: do not."""
    normalization: Annotated[str, Registered(NORMS)] = "LayerNorm"
    """Kind of all norms. RMSNorm has no bias; LayerNormNoBias is LayerNorm without a bias. RMSNorm1P and
    LayerNorm1P store the gain minus 1 (Gemma)."""
    norm_epsilon: PositiveFloat = 1e-5
    """Added to the variance or mean square in all norms."""
    tie_word_embeddings: Bool = True
    """The output head shares the matrix of the word embedding."""
    add_bias_linear: Bool = True
    """Whether all linear layers have biases. Each of the next three keys overrides this for one kind of
    linear layer; null: no override."""
    add_qkv_bias: Bool | None = None
    """Bias of the query/key/value projection."""
    add_out_proj_bias: Bool | None = None
    """Bias of the attention output projection."""
    add_mlp_bias: Bool | None = None
    """Biases of both MLP linears."""
    add_head_bias: Bool | None = None
    """Bias of an untied output head; null: none."""
    qk_layernorm: Literal["all_heads", "each_head"] | Bool = False
    """Normalization of queries and keys before rotary positions; false: none. true: in each head, with one
    gain that all heads share. `each_head` (Command-R+, StableLM 2): in each head, with a separate gain for
    each head and no bias. `all_heads` (OLMo 2): the queries of all heads as one vector, with a gain for each
    element, and the keys likewise; this needs `normalization: RMSNorm`."""
    latent_attention: LatentAttentionConfig | None = None
    """Compute keys and values from one compressed vector per position, like DeepSeek-V2 and V3; null:
    ordinary attention. Latent attention needs rotary positions."""
    parallel_residual: Bool = False
    """Attention and the MLP both read the layer's input, each through its own norm, and both outputs are
    added to it; false: the MLP reads the sum of the input and attention's output."""
    shared_input_norm: Bool = False
    """With `parallel_residual`: attention and the MLP share one input norm (GPT-J, Falcon, Cohere)."""
    sandwich_norm: Bool = False
    """Add a norm after attention and one after the MLP, before the residual addition."""
    pre_norm: Bool = True
    """Normalize the inputs of attention and the MLP; false (OLMo 2): only their outputs, which needs
    `sandwich_norm`."""
    attn_post_norm_scale: NonNegativeFloat = 1.0
    """Initial gain of the norm after attention (with `sandwich_norm`)."""
    ffn_post_norm_scale: NonNegativeFloat = 1.0
    """Initial gain of the norm after the MLP (with `sandwich_norm`)."""
    initializer_range: NonNegativeFloat = 0.02
    """Standard deviation of the initial weights."""
    embedding_initializer_range: NonNegativeFloat | None = None
    """Standard deviation of the initial word and position embeddings; null: `initializer_range`. A head with
    its own matrix (`tie_word_embeddings: False`) starts at `initializer_range`."""
    mup_base_width: Size | None = None
    """Width at which the learning rate and the initial values were tuned (muP; Yang et al., 2022); null: no
    muP. Let m be `hidden_size / mup_base_width`. The weight matrices of the blocks start with the standard
    deviation `initializer_range / sqrt(m)`, and their learning rate is divided by m, which also reduces their
    weight decay per step. Logits are divided by m. Attention heads must keep their size, so a wider model has
    more heads."""
    scale_output_init: Bool = True
    """Start the attention output projection and the second MLP linear with the standard deviation
    `initializer_range / sqrt(2 * num_layers)`."""
    scale_qk_by_layer_num: Bool = True
    """Divide the attention scores by the number of layers, and multiply them by it again in the softmax, so
    that fp16 does not overflow. This changes nothing in exact arithmetic, and is not done in fp32."""
    softmax_in_fp32: Bool = True
    """Attention softmax in float32 under mixed precision."""
    attention_window: Size | None = None
    """A position attends to itself and to at most this many positions before it; null: to all positions
    before it."""
    attention_window_layers: tuple[CountInt, ...] | None = None
    """The layers (from 0) that have the window; null: all."""
    attention_kernel: Literal["auto", "reference", "flash"] = "auto"
    """Attention kernel. `reference` is plain matmul, softmax, matmul. `flash` is a fused kernel, with an
    error if it cannot run; decoding with cached keys still uses the reference. `auto` uses flash if it can
    run, and otherwise logs that it cannot. Flash runs in 16 bits on GPUs of compute capability 8.x and 9.0,
    with head sizes that are multiples of 8, up to 256 (training above 192 needs capability 8.0 or 9.0)."""
    use_flash_attn: Bool = False
    """FleetX's switch: true uses the flash kernel if the device has one."""
    fused_linear: Bool = False
    """Matrix product and bias in one kernel. This key has no effect: Paddle always does so on a GPU, and has
    no such kernel on a CPU."""
    fused_ops: Literal["auto", "none"] | tuple[FusedName, ...] = "auto"
    """Fused operators, each one kernel in place of several. `auto`: all operators that the device has and
    that match the plain operators in a trial at the start (bitwise on a CPU); the log names them. `none`:
    only plain operators. A list: exactly these; an error if one of them cannot run. docs/numerics.md, "Fused
    operators", has the table."""
    fuse_attn_qkv: Bool = True
    """Queries, keys and values have one fused weight, grouped per key/value head. This is always so; false
    only logs a warning."""
    loss_chunks: PositiveInt = 1
    """Compute the output head and the loss in this many chunks of positions, one after another, so that only
    one chunk of the logits is in memory. This saves most of 3 to 4 tensors of `4 x positions x vocabulary`
    bytes, but keeps one more gradient of the head's weight between the passes. 1: no chunks; 4 to 16 are
    useful. Losses differ only by rounding."""
    use_recompute: Bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    recompute_granularity: Literal["full", "full_attn", "core_attn"] | None = None
    """The part to recompute: a whole layer, its attention, or only scores, softmax and context; null:
    full."""
    recompute_layers: tuple[CountInt, ...] | None = None
    """Recompute only these layers (numbered from 0); null: all."""
    no_recompute_layers: tuple[CountInt, ...] | None = None
    """Do not recompute these layers."""
    recompute_interval: PositiveInt = 1
    """Recompute every n-th layer, counted from layer 0."""
    sequence_parallel: Bool = False
    """Split norms and dropouts over the tensor-parallel ranks along the sequence (needs `mp_degree` > 1)."""
    virtual_pp_degree: NumLayers = 1
    """Model chunks per pipeline stage (interleaved schedule)."""
    num_classes: PositiveInt | None = None
    """Number of classes of the finetuning head (GPTFinetuneModule), 1 for a task that predicts a number;
    null: the number of classes of the GLUE task."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and freeze the rest; null: train all weights."""

    @property
    def task(self) -> ModuleTraits:
        """The traits of the task that ``module`` names, such as whether the task classifies."""
        return MODULES.traits(self.module)

    @property
    def is_gated(self) -> bool:
        """Whether the MLP's activation has a gate (SwiGLU), which doubles the width of the MLP's first
        layer."""
        return ACTIVATIONS.traits(self.hidden_act).gated

    @property
    def positions(self) -> PositionTraits:
        """The traits of the position encoding, such as whether it has a table."""
        return POSITIONS.traits(self.position_embedding_type)

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary size, rounded up to a multiple of ``vocab_size_divisible_unit``."""
        unit = self.vocab_size_divisible_unit
        return -(-self.vocab_size // unit) * unit

    @property
    def embedding_dropout(self) -> float:
        given = self.embedding_dropout_prob
        return self.hidden_dropout_prob if given is None else given

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """The width of one attention head. With latent attention, the width of its query and key."""
        if self.latent_attention is not None:
            return self.latent_attention.head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """The number of features in each head that rotary positions rotate."""
        if self.latent_attention is not None:
            return self.latent_attention.rope_head_dim
        return int(self.head_size * self.rotary_percent)

    @property
    def embedding_std(self) -> float:
        """The standard deviation of the initial values of the embeddings."""
        given = self.embedding_initializer_range
        return self.initializer_range if given is None else given

    @property
    def ffn_size(self) -> int:
        """The inner width of the MLP. In a gated MLP, both projections (gate and up) have this width."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.is_gated:
            return int(self.hidden_size * 4 * 2 / 3 / 64) * 64
        return 4 * self.hidden_size

    @property
    def normalized_moe(self) -> MoEConfig | None:
        """A normalized copy of the section ``moe``: two sections that describe the same network have equal
        copies. Null values that shape the network are filled in, and keys that do not shape it get fixed
        values. None if the model is dense."""
        return None if self.moe is None else self.moe.normalized(self.num_layers, self.ffn_size)

    @property
    def has_qkv_bias(self) -> bool:
        return self.add_bias_linear if self.add_qkv_bias is None else self.add_qkv_bias

    @property
    def has_out_proj_bias(self) -> bool:
        return self.add_bias_linear if self.add_out_proj_bias is None else self.add_out_proj_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.add_bias_linear if self.add_mlp_bias is None else self.add_mlp_bias

    @property
    def has_head_bias(self) -> bool:
        return bool(self.add_head_bias)

    def block_linears(self) -> list[str]:
        """The names of all linear layers in the blocks, such as ``decoder.layers.0.attention.qkv``."""
        attention = ["qkv"]
        if self.latent_attention is not None:
            attention = ["q_up", "kv_down", "kv_up"]
            attention += ["q_down"] if self.latent_attention.q_rank else []
        mixtures = () if self.moe is None else self.moe.mixture_layers(self.num_layers)
        mixture = ("mlp.experts", *(("mlp.shared",) if self.moe and self.moe.shared_experts else ()))
        names = []
        for layer in range(self.num_layers):
            mlps = mixture if layer in mixtures else ("mlp",)
            linears = (
                *(f"attention.{own}" for own in (*attention, "out_proj")),
                *(f"{m}.{fc}" for m in mlps for fc in ("fc1", "fc2")),
            )
            names += [f"decoder.layers.{layer}.{linear}" for linear in linears]
        return names

    @property
    def width_multiplier(self) -> float:
        """The hidden size in units of muP's base width (``hidden_size / mup_base_width``); 1 without muP."""
        return 1.0 if self.mup_base_width is None else self.hidden_size / self.mup_base_width

    @property
    def logits_factor(self) -> float:
        return self.logits_multiplier / self.width_multiplier

    @property
    def matrix_std(self) -> float:
        """The standard deviation of the initial weight matrices of the blocks.

        With ``scale_output_init``, output projections start with a smaller standard deviation, computed from
        this one.
        """
        return self.initializer_range / self.width_multiplier**0.5

    @property
    def head_normalization(self) -> str:
        """The name of the norm that ``qk_layernorm`` applies to queries and keys, such as ``RMSNorm``."""
        without_bias = self.qk_layernorm == "each_head" and self.normalization == "LayerNorm"
        return "LayerNormNoBias" if without_bias else self.normalization

    @property
    def why_not_prunable(self) -> tuple[str, str] | None:
        """Why heads and MLP units cannot be pruned, as (configuration key, reason); None if they can."""
        reasons = {
            "moe": "of mixtures of experts only whole experts are pruned (ppfleetx prune --part experts)",
            "latent_attention": "such layers cannot be pruned",
            "attention_window_layers": "layers are pruned alike, and these differ",
            "rotary_layers": "layers are pruned alike, and these differ",
        }
        found = next((key for key in reasons if getattr(self, key) is not None), None)
        if found is not None:
            return found, reasons[found]
        if self.qk_layernorm == "all_heads":
            return "qk_layernorm", "its mean would be over fewer heads"
        if self.qk_layernorm == "each_head":
            return "qk_layernorm", "its gains belong to this number of heads"
        if self.positions.biases:
            return "position_embedding_type", "the slopes of the biases belong to this number of heads"
        return None

    def is_recomputed(self, layer: int) -> bool:
        """Whether the backward pass recomputes layer ``layer``.

        Layers are counted from 0 across all pipeline stages.
        """
        return layer in self.recomputed_layers()

    def recomputed_layers(self) -> Collection[int]:
        """The indices of the recomputed layers, counted from 0 across all pipeline stages."""
        if not self.use_recompute:
            return ()
        chosen = self.recompute_layers
        if chosen is None:
            chosen = range(0, self.num_layers, self.recompute_interval)
        return frozenset(chosen) - frozenset(self.no_recompute_layers or ())

    def violations(self) -> Iterator[RuleError]:
        yield from self._size_violations()
        if self.latent_attention is not None:
            yield from self._latent_attention_violations()
        yield from self._variant_violations()
        if self.rope_scaling is not None and self.rope_scaling.type == "longrope":
            yield from self._longrope_violations(self.rope_scaling)
        yield from self._width_violations()
        if self.tie_word_embeddings and self.add_head_bias:
            yield RuleError(
                ("add_head_bias", "tie_word_embeddings"), "a head tied to the word embedding has no bias"
            )
        if self.use_flash_attn and self.attention_kernel == "reference":
            yield RuleError(
                ("attention_kernel", "use_flash_attn"),
                "the reference kernel and use_flash_attn contradict each other; drop one of them",
            )
        yield from self._layer_list_violations()
        if self.moe is not None and not self.moe.mixture_layers(self.num_layers):
            listed = self.moe.layers is not None
            keys = ("moe.layers",) if listed else ("moe.first_dense_layers", "num_layers")
            yield RuleError(keys, "no layer would be a mixture; for none at all set Model.moe to null")
        if self.lora is not None:
            yield from self.lora.unmatched_targets(self.block_linears())

    def _size_violations(self) -> Iterator[RuleError]:
        heads, groups = self.num_attention_heads, self.kv_heads
        is_ordinary = self.latent_attention is None
        if is_ordinary and self.head_dim is None and self.hidden_size % heads:
            yield RuleError(
                ("num_attention_heads", "hidden_size"),
                f"{heads} heads do not divide the hidden size {self.hidden_size}; "
                "change one of them or give Model.head_dim",
            )
        if heads % groups:
            yield RuleError(
                ("num_query_groups", "num_attention_heads"),
                f"the number of query groups {groups} must divide the number of heads {heads}",
            )
        if is_ordinary and self.positions.rotates and self.head_size % 2:
            yield RuleError(
                ("head_dim", "position_embedding_type", "hidden_size", "num_attention_heads"),
                "rotary positions rotate pairs of features: the head width must be even, not "
                f"{self.head_size}",
            )
        if self.position_embedding_type == "rope" and (self.rotary_size % 2 or not self.rotary_size):
            yield RuleError(
                ("rotary_percent", "head_dim", "hidden_size", "num_attention_heads"),
                f"rotary positions rotate pairs of features: of a head's {self.head_size} features, they "
                f"would rotate {self.rotary_size}, which is not an even number of at least 2",
            )
        if self.ffn_size < 1:
            yield RuleError(
                ("ffn_hidden_size", "hidden_size"),
                f"the swiglu width of hidden size {self.hidden_size} would be 0; give Model.ffn_hidden_size",
            )

    def _latent_attention_violations(self) -> Iterator[RuleError]:
        if self.mup_base_width is not None:
            yield RuleError(
                ("mup_base_width", "latent_attention"),
                "muP is for matrices that grow with the width, and compressed vectors do not grow",
            )
        if not self.positions.rotates:
            yield RuleError(
                ("latent_attention", "position_embedding_type"),
                "a part of each key carries its position: set position_embedding_type to rope",
            )
        others = {
            "num_query_groups": self.kv_heads != self.num_attention_heads,
            "head_dim": self.head_dim is not None,
            "rotary_percent": self.rotary_percent != 1.0,
            "qk_layernorm": self.qk_layernorm,
            "attention_multiplier": self.attention_multiplier is not None,
            "attn_logit_softcapping": self.attn_logit_softcapping is not None,
            "rotary_layers": self.rotary_layers is not None,
        }
        for key, is_set in others.items():
            if is_set:
                yield RuleError(
                    (key, "latent_attention"),
                    "belongs to ordinary heads; latent attention has its own sizes and norms. Leave it out",
                )

    def _variant_violations(self) -> Iterator[RuleError]:
        rotates, has_table = self.positions.rotates, self.positions.has_table
        is_rope = self.position_embedding_type == "rope"
        for key, wants, is_there in (
            ("shared_input_norm", "parallel_residual", self.parallel_residual),
            ("attention_window_layers", "attention_window", self.attention_window is not None),
            ("local_rotary_base", "attention_window_layers", self.attention_window_layers is not None),
            ("rotary_layers", "position_embedding_type", rotates),
            ("local_rotary_base", "position_embedding_type", rotates),
            ("position_offset", "position_embedding_type", has_table),
            ("rotary_interleaved", "position_embedding_type", is_rope),
            ("rope_scaling", "position_embedding_type", is_rope),
        ):
            if getattr(self, key) not in (None, False, 0) and not is_there:
                yield RuleError((key, wants), f"has no meaning with {wants} {getattr(self, wants)}")
        if self.rope_scaling is not None and self.rope_scaling.type == "yarn" and self.rotary_base <= 1:
            yield RuleError(("rotary_base", "rope_scaling.type"), "yarn needs a base greater than 1")
        if self.qk_layernorm == "all_heads" and self.normalization != "RMSNorm":
            yield RuleError(
                ("qk_layernorm", "normalization"), f"needs RMSNorm, and normalization is {self.normalization}"
            )
        parameters = NORMS.traits(self.head_normalization).parameters
        if self.qk_layernorm == "each_head" and set(parameters) != {"weight"}:
            yield RuleError(
                ("qk_layernorm", "normalization"),
                f"needs a norm that has a weight and no bias, and normalization is {self.normalization}; "
                "LayerNorm is taken without its bias",
            )
        if not self.pre_norm and (not self.sandwich_norm or self.shared_input_norm):
            yield RuleError(
                ("pre_norm", "sandwich_norm", "shared_input_norm"),
                "without norms before attention and MLP, their outputs need norms: set sandwich_norm, and "
                "leave out shared_input_norm",
            )

    def window_of(self, layer: int) -> int | None:
        """The attention window of layer ``layer``; None: no limit.

        Layers are counted from 0 across all pipeline stages.
        """
        chosen = self.attention_window_layers
        return self.attention_window if chosen is None or layer in chosen else None

    def rotates_in(self, layer: int) -> bool:
        return self.positions.rotates and (self.rotary_layers is None or layer in self.rotary_layers)

    def _longrope_violations(self, scaling: RopeScalingConfig) -> Iterator[RuleError]:
        for key in ("short_factor", "long_factor"):
            found, pairs = len(getattr(scaling, key)), self.rotary_size // 2
            if found != pairs:
                yield RuleError(
                    (f"rope_scaling.{key}",),
                    f"must have one number for each of the {pairs} frequencies, and has {found}",
                )
        if self.local_rotary_base is not None:
            yield RuleError(
                ("local_rotary_base", "rope_scaling.type"),
                "with longrope all layers rotate by the same angles",
            )

    def _width_violations(self) -> Iterator[RuleError]:
        projection = (self.num_attention_heads + 2 * self.kv_heads) * self.head_size
        inner = self.ffn_size * (2 if self.is_gated else 1)
        for keys, what, width in (
            (("vocab_size", "vocab_size_divisible_unit"), "padded vocabulary", self.padded_vocab_size),
            (("ffn_hidden_size", "hidden_size"), "MLP", inner),
            (("head_dim", "hidden_size", "num_attention_heads"), "query/key/value projection", projection),
        ):
            if width > MAX_SIZE:
                yield RuleError(keys, f"the {what} would be {width} wide; Paddle counts up to {MAX_SIZE}")

    def _layer_list_violations(self) -> Iterator[RuleError]:
        lists = {key: getattr(self, key) for key in _LAYER_LISTS}
        for key, layers in {**lists, "moe.layers": self.moe and self.moe.layers}.items():
            if outside := [layer for layer in layers or () if layer >= self.num_layers]:
                yield RuleError(
                    (key, "num_layers"),
                    f"layer {outside[0]} does not exist: layers are numbered 0 to {self.num_layers - 1}",
                )
            if len(set(layers or ())) != len(layers or ()):
                yield RuleError((key,), "names a layer twice")
        if self.recompute_layers is not None and self.recompute_interval != 1:
            yield RuleError(
                ("recompute_interval", "recompute_layers"),
                "choose the layers by a list or by an interval, not by both",
            )
        both = set(self.recompute_layers or ()) & set(self.no_recompute_layers or ())
        if both:
            yield RuleError(
                ("no_recompute_layers", "recompute_layers"),
                f"layer {min(both)} is in both lists",
            )
