"""The model as a list of stages, from the ``Model`` section of a configuration."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.config.registries import ARCHITECTURES, POSITIONS
from ppfleetx.distributed.device import on_card
from ppfleetx.models.gpt.layers import (
    Block,
    BlockShape,
    ClassificationHead,
    Embedding,
    FinalNorm,
    Head,
    TiedHead,
)
from ppfleetx.nn.init import Normal
from ppfleetx.nn.kernels import KernelOptions
from ppfleetx.nn.lora import with_adapters
from ppfleetx.nn.positions import Positions
from ppfleetx.nn.rope import RotaryEmbedding
from ppfleetx.nn.stage import LayerFactory, Stage, Tie
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.config.sections.model import ModelConfig

_WORD_TIE = Tie(key="embedding.word_embeddings", attribute="word_embeddings")


def model_stages(cfg: ModelConfig, factory: LayerFactory) -> list[Stage]:
    """The stages of the architecture that ``Model.name`` names, first to last.

    Raises:
        ConfigError: there is no such architecture, or it is not a list of stages.
    """
    stages = ARCHITECTURES.make(cfg.name, cfg, factory, gives=list)
    other = next((stage for stage in stages if not isinstance(stage, Stage)), None)
    if not stages or other is not None:
        found = "none" if not stages else shown(other)
        raise ConfigError(
            f"must be made of one or more Stages; found {found}", key="Model.name", value=cfg.name
        )
    return stages


def gpt_stages(cfg: ModelConfig, factory: LayerFactory, block: type[Block] = Block) -> list[Stage]:
    """Embedding, ``num_layers`` blocks, final norm, head; with ``Model.lora`` frozen but for adapters.

    Args:
        cfg: the ``Model`` section.
        factory: makes the layers; the only thing that knows whether they are sliced.
        block: the class of the blocks: GPT's, or one of another architecture that is made alike.
    """
    shape = block_shape(cfg)
    positions = POSITIONS.make(cfg.position_embedding_type, cfg, gives=Positions)
    if isinstance(positions.rotary, RotaryEmbedding):
        positions.rotary.fused = factory.fused
    kernel, granularity = (
        replace(kernel_options(cfg), fused=factory.fused),
        cfg.recompute_granularity or "full",
    )
    blocks = [
        Stage(
            f"decoder.layers.{index}",
            block,
            {
                "factory": factory,
                "shape": shape,
                "layer_index": index,
                "rotary": positions.rotary,
                "kernel": kernel,
                "recompute": granularity if cfg.is_recomputed(index) else None,
            },
        )
        for index in range(cfg.num_layers)
    ]
    final_norm = Stage(
        "decoder.final_norm",
        FinalNorm,
        {
            "factory": factory,
            "norm": shape.norm,
            "hidden_size": shape.hidden_size,
            "epsilon": shape.norm_epsilon,
        },
        wraps=True,
    )
    stages = [_embedding(cfg, factory, positions), *blocks, final_norm, _head(cfg, factory)]
    return stages if cfg.lora is None else with_adapters(stages, cfg.lora, factory)


def gpt_classification_stages(cfg: ModelConfig, factory: LayerFactory, num_outputs: int) -> list[Stage]:
    """The stages of a GPT with a classification head, ``score.weight``, in the place of its head."""
    kwargs = {
        "factory": factory,
        "hidden_size": cfg.hidden_size,
        "num_outputs": num_outputs,
        "init": Normal(cfg.initializer_range),
    }
    body = [replace(stage, tie=None) for stage in model_stages(cfg, factory)[:-1]]  # nothing to tie it to
    return [*body, Stage("score", ClassificationHead, kwargs, wraps=True)]


def _embedding(cfg: ModelConfig, factory: LayerFactory, positions: Positions) -> Stage:
    kwargs = {
        "factory": factory,
        "padded_vocab_size": cfg.padded_vocab_size,
        "hidden_size": cfg.hidden_size,
        "positions": positions,
        "dropout": cfg.embedding_dropout,
        "word_init": Normal(cfg.embedding_std, padded_dim=0, true_size=cfg.vocab_size),
        "position_init": Normal(cfg.embedding_std),
        "carries_positions": positions.rotary is not None,
    }
    return Stage("embedding", Embedding, kwargs, tie=_WORD_TIE if cfg.tie_word_embeddings else None)


def _head(cfg: ModelConfig, factory: LayerFactory) -> Stage:
    kwargs = {
        "factory": factory,
        "hidden_size": cfg.hidden_size,
        "padded_vocab_size": cfg.padded_vocab_size,
        "loss_chunks": cfg.loss_chunks,
    }
    if cfg.tie_word_embeddings:
        kwargs["word_init"] = Normal(cfg.embedding_std, padded_dim=0, true_size=cfg.vocab_size)
        return Stage("head", TiedHead, kwargs, tie=_WORD_TIE)
    kwargs["init"] = Normal(cfg.initializer_range, padded_dim=1, true_size=cfg.vocab_size)
    return Stage("head", Head, {**kwargs, "bias": cfg.has_head_bias}, wraps=True)


def block_shape(cfg: ModelConfig) -> BlockShape:
    """The block's sizes and options with every default filled in."""
    std = cfg.initializer_range
    output_std = std / math.sqrt(2 * cfg.num_layers) if cfg.scale_output_init else std
    return BlockShape(
        hidden_size=cfg.hidden_size,
        num_heads=cfg.num_attention_heads,
        num_kv_heads=cfg.kv_heads,
        head_dim=cfg.head_size,
        ffn_hidden_size=cfg.ffn_size,
        activation=cfg.hidden_act,
        norm=cfg.normalization,
        norm_epsilon=cfg.norm_epsilon,
        qkv_bias=cfg.has_qkv_bias,
        output_bias=cfg.has_out_proj_bias,
        mlp_bias=cfg.has_mlp_bias,
        hidden_dropout=cfg.hidden_dropout_prob,
        attention_dropout=cfg.attention_probs_dropout_prob,
        attention_window=cfg.attention_window,
        qk_layernorm=cfg.qk_layernorm,
        parallel_residual=cfg.parallel_residual,
        sandwich_norm=cfg.sandwich_norm,
        attention_post_norm_gain=cfg.attn_post_norm_scale,
        mlp_post_norm_gain=cfg.ffn_post_norm_scale,
        init=Normal(std),
        output_init=Normal(output_std),
    )


def kernel_options(cfg: ModelConfig) -> KernelOptions:
    """How attention is computed. ``use_flash_attn`` asks for flash where there is one, and says where not."""
    if cfg.use_flash_attn and cfg.attention_kernel == "auto" and not on_card():
        get_logger().warning("Model.use_flash_attn: a CPU has no flash attention; not used")
    guard = float(cfg.num_layers) if cfg.scale_qk_by_layer_num else 1.0
    return KernelOptions(cfg.attention_kernel, cfg.softmax_in_fp32, guard)
