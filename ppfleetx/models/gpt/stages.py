"""Build the stages of a model from the configuration section ``Model``. A stage describes one layer, such as
a block; it is not a pipeline stage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.config.registries import ARCHITECTURES, POSITIONS
from ppfleetx.config.registry import load_target
from ppfleetx.distributed.device import on_card
from ppfleetx.models.gpt.layers import Block, ClassificationHead, Embedding, FinalNorm, Head, TiedHead
from ppfleetx.models.gpt.spec import BlockSpec, HeadSpec, classification_head_spec, model_spec
from ppfleetx.nn.attention_kernels import KernelOptions
from ppfleetx.nn.attention_spec import AttentionSpec
from ppfleetx.nn.lora import with_adapters
from ppfleetx.nn.positions import Positions, Rotary, RotaryEmbedding
from ppfleetx.nn.stage import LayerFactory, Stage, Tie
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.config.sections.model import ModelConfig

_WORD_TIE = Tie(key="embedding.word_embeddings", attribute="word_embeddings")


def model_stages(cfg: ModelConfig, factory: LayerFactory) -> list[Stage]:
    """Build the stages of the architecture named by ``Model.name``, first to last.

    Raises:
        ConfigError: the architecture is not registered, or does not build a list of stages.
    """
    stages = ARCHITECTURES.make(cfg.name, cfg, factory, gives=list)
    other = next((stage for stage in stages if not isinstance(stage, Stage)), None)
    if not stages or other is not None:
        found = "none" if not stages else shown(other)
        raise ConfigError(
            f"must consist of one or more Stages; found {found}", key="Model.name", value=cfg.name
        )
    return stages


def gpt_stages(cfg: ModelConfig, factory: LayerFactory, block: type[Block] | None = None) -> list[Stage]:
    """Build the stages of a GPT: embedding, blocks, final norm, head. With ``Model.lora``, only adapters
    train.

    Args:
        block: class of all blocks; None: the class that each block's declaration names.

    Raises:
        ConfigError: the table of learned positions does not have the number of rows that follows from the
            registered traits of ``Model.position_embedding_type``.
    """
    spec, positions = model_spec(cfg), POSITIONS.make(cfg.position_embedding_type, cfg, gives=Positions)
    rows = spec.embedding.positions and spec.embedding.positions.rows
    if positions.table_rows != rows:
        raise ConfigError(
            f"has a table of {positions.table_rows} rows; by its registered traits it must have {rows}",
            key="Model.position_embedding_type",
            value=cfg.position_embedding_type,
        )
    for rotary in (positions.rotary, positions.local_rotary):
        if isinstance(rotary, RotaryEmbedding):
            rotary.fused = factory.fused
    kernel = replace(kernel_options(cfg), fused=factory.fused)
    granularity = cfg.recompute_granularity or "full"

    def stage_of(index: int, one: BlockSpec) -> Stage:
        rotary = _rotary_of(one, positions)
        options = {
            "factory": factory,
            "spec": one,
            "layer_index": index,
            "rotary": rotary,
            "kernel": kernel,
            "recompute": granularity if cfg.is_recomputed(index) else None,
        }
        if positions.reach_blocks and rotary is None:
            options["carries_positions"] = True
        return Stage(f"decoder.layers.{index}", block or load_target(one.layer), options)

    blocks = [stage_of(index, one) for index, one in enumerate(spec.blocks)]
    kwargs = {"factory": factory, "spec": spec.embedding, "positions": positions}
    embedding = Stage("embedding", Embedding, kwargs, tie=_WORD_TIE if spec.head.is_tied else None)
    final_norm = Stage(
        "decoder.final_norm",
        FinalNorm,
        {"factory": factory, "spec": spec.final_norm, "multiplier": spec.head.multiplier},
        wraps=True,
    )
    stages = [embedding, *blocks, final_norm, _head(spec.head, factory)]
    return stages if cfg.lora is None else with_adapters(stages, cfg.lora, factory)


def _rotary_of(block: BlockSpec, positions: Positions) -> Rotary | None:
    attention = block.attention
    if isinstance(attention, AttentionSpec) and attention.rotary_size is None:
        return None
    is_local = attention.window is not None and positions.local_rotary is not None
    return positions.local_rotary if is_local else positions.rotary


def gpt_classification_stages(cfg: ModelConfig, factory: LayerFactory, num_outputs: int) -> list[Stage]:
    """Build the stages of a GPT with a classification head (``score.weight``) instead of a language-model
    head."""
    body = [replace(stage, tie=None) for stage in model_stages(cfg, factory)[:-1]]  # the tied head is removed
    final_norm = body[-1]
    if "multiplier" in final_norm.kwargs:  # scales the language-model head's logits only
        body[-1] = replace(final_norm, kwargs={**final_norm.kwargs, "multiplier": 1.0})
    return [*body, _head(classification_head_spec(cfg, num_outputs), factory)]


def _head(spec: HeadSpec, factory: LayerFactory) -> Stage:
    kwargs = {"factory": factory, "spec": spec}
    if spec.is_tied:
        return Stage(spec.name, TiedHead, kwargs, tie=_WORD_TIE)
    layer = ClassificationHead if spec.name == "score" else Head
    return Stage(spec.name, layer, kwargs, wraps=True)


def kernel_options(cfg: ModelConfig) -> KernelOptions:
    """Return the attention kernel's options. Warns if ``use_flash_attn`` is set on a CPU."""
    if cfg.use_flash_attn and cfg.attention_kernel == "auto" and not on_card():
        get_logger().warning("Model.use_flash_attn: a CPU has no flash attention; not used")
    guard = float(cfg.num_layers) if cfg.scale_qk_by_layer_num else 1.0
    return KernelOptions(cfg.attention_kernel, cfg.softmax_in_fp32, guard)
