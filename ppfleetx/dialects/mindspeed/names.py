"""MindSpeed-Core-MS's names of what Megatron's arguments say: flat, and in the blocks of its 38B example."""

from __future__ import annotations

from ppfleetx.dialects.megatron.keys import TABLES

_SECTIONS = {
    "model_config": "model recomputation",
    "training_config": "training profiler parallelism others",
    "dataset_config": "data",
    "optimizer_config": "optimizer training parallelism others",
    "parallel_config": "parallelism recomputation",
}
# Where the second column of the guide's tables has another name than the first.
_RENAMED = {
    "model_config.vocab_size": "padded_vocab_size",
    "model_config.seq_length": "seq_length",
    "model_config.use_rotary_embedding": "use_rotary_position_embeddings",
    "model_config.attention_dropout_rate": "attention_dropout",
    "model_config.hidden_dropout_rate": "hidden_dropout",
    "model_config.use_flash_attention": "use_flash_attn",
    "model_config.out_proj_has_bias": "add_dense_bias",
    "model_config.fa_config.pre_tokens": "pre_tockens",
    "model_config.fa_config.next_tokens": "next_tockens",
    "model_config.fa_config.input_layout": "shape_order",
    "model_config.params_dtype": "params_dtype",
    "model_config.compute_dtype": "compute_dtype",
    "model_config.embedding_init_dtype": "embedding_dtype",
    "model_config.apply_swiglu_fusion": "use_fused_swiglu",
    "model_config.apply_rope_fusion": "apply_rope_fusion",
    "training_config.training_iters": "train_iters",
    "training_config.loss_scale_value": "initial_loss_scale",
    "training_config.crc_check": "resume_crc_check",
    "training_config.load_checkpoint": "load",
    "training_config.output_dir": "save",
    "training_config.prefix": "ckpt_prefix",
    "dataset_config.batch_size": "micro_batch_size",
    "dataset_config.dataset_dir": "data_path",
    "optimizer_config.optimizer_type": "optimizer",
    "optimizer_config.eps": "adam_eps",
    "optimizer_config.learning_rate": "lr",
}
_PIPELINE, _LLM = "accelerate_config.parallelization.pipeline", "model_config.llm"
_IN_BLOCKS = {
    "accelerate_config.parallelization.tensor_parallel": "tensor_model_parallel_size",
    "accelerate_config.parallelization.context_parallel": "context_parallel_size",
    "accelerate_config.parallelization.expert_parallel": "expert_model_parallel_size",
    f"{_PIPELINE}.num_stages": "pipeline_model_parallel_size",
    f"{_PIPELINE}.layer_list": "num_layer_list",
    f"{_PIPELINE}.micro_batch_size": "micro_batch_size",
    f"{_PIPELINE}.noop_layers": "noop_layers",
    f"{_PIPELINE}.num_layers_per_vpp": "num_layers_per_virtual_pipeline_stage",
    f"{_PIPELINE}.virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "accelerate_config.parallelization.use_sequence_parallel": "sequence_parallel",
    "accelerate_config.parallelization.use_distributed_optimizer": "use_distributed_optimizer",
    "accelerate_config.precision.param_init_dtype": "params_dtype",
    "accelerate_config.precision.compute_dtype": "compute_dtype",
    f"{_LLM}.tokenizer.padded_size": "padded_vocab_size",
    f"{_LLM}.tokenizer.type": "tokenizer_type",
    f"{_LLM}.tokenizer.vocab_file": "vocab_file",
    f"{_LLM}.tokenizer.merge_file": "merge_file",
    f"{_LLM}.embedding.hidden_size": "hidden_size",
    f"{_LLM}.embedding.init_std": "embedding_init_method_std",
    f"{_LLM}.position.type": "position_embedding_type",
    f"{_LLM}.position.max_size": "max_position_embeddings",
    f"{_LLM}.position.rope_base": "rotary_base",
    f"{_LLM}.position.rotary_percent": "rotary_percent",
    f"{_LLM}.position.seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    f"{_LLM}.blocks.num_layers": "num_layers",
    f"{_LLM}.blocks.init_std": "init_method_std",
    f"{_LLM}.blocks.sandwich_norm": "use_sandwich_norm",
    f"{_LLM}.blocks.layernorm.epsilon": "norm_epsilon",
    f"{_LLM}.blocks.attention.head_num": "num_attention_heads",
    f"{_LLM}.blocks.attention.projection_bias": "add_dense_bias",
    f"{_LLM}.blocks.attention.dropout_rate": "attention_dropout",
    f"{_LLM}.blocks.attention.post_norm_scale": "attn_post_norm_scale",
    f"{_LLM}.blocks.ffn.hidden_size": "ffn_hidden_size",
    f"{_LLM}.blocks.ffn.activation": "hidden_act",
    f"{_LLM}.blocks.ffn.dropout_rate": "hidden_dropout",
    f"{_LLM}.blocks.ffn.post_norm_scale": "ffn_post_norm_scale",
}
# In place of the train_config block of the example, its sections may stand at the top.
_PREFIXES = ("train_config.ms_training_config.", "train_config.")


def _flat() -> dict[str, str]:
    names = {}
    for section, tables in _SECTIONS.items():
        for table in tables.split():
            names |= {f"{section}.{key.name}": key.name for key in TABLES[table]}
    return {**names, **_RENAMED}


ALIASES = {**_flat(), **_IN_BLOCKS}
"""A dotted name of MindSpeed-Core-MS -> the argument of Megatron that says the same."""


def plain(name: str) -> str:
    """``name`` without the ``train_config`` block around a section, or around training keys themselves."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.split(".")[0] in _SECTIONS else f"training_config.{rest}"
    return name
