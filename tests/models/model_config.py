"""The ``Model`` keys the model reads, small, for tests that build models directly."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TinyModelConfig:
    vocab_size: int = 61
    padded_vocab_size: int = 64
    hidden_size: int = 32
    num_layers: int = 2
    num_attention_heads: int = 4
    num_query_groups: int | None = None
    head_dim: int | None = None
    ffn_hidden_size: int | None = None
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 16
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000.0
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    add_bias_linear: bool = True
    add_qkv_bias: bool | None = None
    add_out_proj_bias: bool | None = None
    add_mlp_bias: bool | None = None
    add_head_bias: bool | None = None
    sandwich_norm: bool = False
    attn_post_norm_scale: float = 1.0
    ffn_post_norm_scale: float = 1.0
    initializer_range: float = 0.02
    scale_output_init: bool = True
    scale_qk_by_layer_num: bool = True
    softmax_in_fp32: bool = True
    use_flash_attn: bool = False
    attention_kernel: str = "auto"
    use_recompute: bool = False
    recompute_granularity: str | None = None
    no_recompute_layers: list[int] = field(default_factory=list)
    recompute_layers: list[int] = field(default_factory=list)
    recompute_interval: int = 1
