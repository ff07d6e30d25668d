"""Training options in pairs: a few here, all of them by ``make parity``; none is forgotten."""

from __future__ import annotations

import pytest

from ppfleetx.config.parallel_plan import CONFIG_KEYS
from ppfleetx.config.sections.compress import CompressConfig, PruneConfig, QuantizationConfig, WeightsConfig
from ppfleetx.config.sections.distributed import DistributedConfig, ShardingConfig
from ppfleetx.config.sections.engine import MixedPrecisionConfig
from ppfleetx.config.sections.lora import LoraConfig
from ppfleetx.config.sections.model import ModelConfig
from tests.helpers.ranks import Pools
from tests.parity.option_pairs import MIXED, OPTIONS, Comparison, Option, Pair, pairs

SECTIONS = {
    "Distributed": DistributedConfig,
    "Distributed.sharding": ShardingConfig,
    "Engine.mix_precision": MixedPrecisionConfig,
    "Model": ModelConfig,
    "Model.lora": LoraConfig,
    "Compress": CompressConfig,
    "Compress.Quantization": QuantizationConfig,
    "Compress.Weights": WeightsConfig,
    "Compress.Prune": PruneConfig,
}
# Keys that switch nothing about how a step is computed, or not by themselves.
NO_OPTIONS = {
    "what network it is, which every plan of the parity suite has in some form": """
        Model.module Model.name Model.vocab_size Model.vocab_size_divisible_unit Model.hidden_size
        Model.num_layers Model.num_attention_heads Model.num_query_groups Model.head_dim
        Model.ffn_hidden_size Model.hidden_act
        Model.max_position_embeddings Model.position_offset Model.rotary_base Model.rotary_percent
        Model.rotary_interleaved Model.rope_scaling Model.latent_attention
        Model.norm_epsilon Model.tie_word_embeddings
        Model.add_qkv_bias Model.add_out_proj_bias Model.add_mlp_bias Model.add_head_bias
        Model.attn_post_norm_scale Model.ffn_post_norm_scale
        Model.initializer_range Model.embedding_initializer_range Model.scale_output_init
        Model.scale_qk_by_layer_num Model.num_classes Model.fuse_attn_qkv Model.latent_attention
        Model.rotary_interleaved""",
    "random masks of a plan are not those of one card": """
        Model.hidden_dropout_prob Model.attention_probs_dropout_prob Model.embedding_dropout_prob
        Model.lora.dropout""",
    "factors of AdamW's rates, where these pairs have SGD; in test_plans.py": "Model.mup_base_width",
    "a kernel, which tests of its own compare with the plain operators": """
        Model.attention_kernel Model.use_flash_attn Model.fused_linear Model.softmax_in_fp32""",
    "how an option that is here is set": """
        Model.recompute_layers Model.no_recompute_layers Model.recompute_interval Model.lora.alpha
        Model.lora.targets Model.lora.base Distributed.bucket_size Distributed.pp_layers
        Distributed.expert_mp_degree
        Distributed.noop_layers
        Engine.mix_precision.scale_loss Engine.mix_precision.use_dynamic_loss_scaling
        Engine.mix_precision.incr_every_n_steps Engine.mix_precision.hysteresis
        Engine.mix_precision.custom_black_list Engine.mix_precision.custom_white_list
        Engine.mix_precision.main_grad_fp32
        Compress.Quantization.weight_quantize_type Compress.Quantization.activation_quantize_type
        Compress.Quantization.moving_rate Compress.Quantization.weight_preprocess_type
        Compress.Quantization.activation_preprocess_type Compress.Quantization.weight_bits
        Compress.Quantization.activation_bits Compress.Quantization.quantizable_layer_type
        Compress.Quantization.skip_tensor_map Compress.Quantization.skip_layers
        Compress.Quantization.freeze_embedding Compress.Weights.group_size Compress.Weights.activation_bits
        Compress.Weights.asymmetric Compress.Weights.skip Compress.Prune.criterion Compress.Prune.part
        Compress.Prune.begin_step Compress.Prune.end_step Compress.Prune.frequency""",
}


def _all_keys() -> set[str]:
    return {
        f"{section}.{name}"
        for section, model in SECTIONS.items()
        for name in model.model_fields
        if f"{section}.{name}" not in SECTIONS
    }


def _keys_of(option: Option) -> set[str]:
    return {*option.keys, *(CONFIG_KEYS[name] for name in option.plan)}


def test_every_key_of_the_configuration_is_an_option_or_says_why_not() -> None:
    here = set().union(*map(_keys_of, OPTIONS.values()))
    here |= {f"{MIXED}{key}" for key in ("enable", "dtype", "level")} | {
        "Model.fused_ops",
        "Model.add_bias_linear",
    }
    here = {"Compress.Distill" if key.startswith("Compress.Distill") else key for key in here}
    others = {key for keys in NO_OPTIONS.values() for key in keys.split()}
    assert not here & others
    assert _all_keys() - here - others == set(), "in neither list"
    assert (here | others) - _all_keys() == set(), "no such keys"


@pytest.mark.slow
def test_pairs_are_many_and_each_refusal_names_a_key() -> None:
    found = pairs()
    assert len({pair.names for pair in found}) > 10 * len(OPTIONS)
    for pair in found:
        if pair.bias and (refused := pair.refusal()):
            assert any(key in refused for option in pair.options for key in _keys_of(option) | {"fused_ops"})


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    with Pools() as pools:
        yield Comparison(pools, tmp_path_factory.mktemp("pairs"))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "pair",
    [
        Pair(("main_gradients", "zb_h1"), "O2", True),
        Pair(("main_gradients", "sp_async_reduce_scatter"), "O2", True),
        Pair(("main_gradients", "loss_chunks"), "O2", True),
        Pair(("weight_cast", "zb_h1"), "O1", True),
        Pair(("weight_cast", "recompute_allgather"), "O1", True),
        Pair(("loss_chunks", "qat"), "float32", False),
        Pair(("lora", "offload"), "float32", True),
        Pair(("small_weights", "zb_h1"), "O2", True),
    ],
    ids=str,
)
def test_two_options_together(comparison, pair) -> None:
    assert pair.refusal() == ""
    assert comparison.faults(pair) == []


def test_an_option_without_effect_is_seen(comparison, monkeypatch) -> None:
    unseen = Option("ppfleetx.nn.lora:LoraBranch.forward", {"Model.use_recompute": True})
    monkeypatch.setitem(OPTIONS, "lora", unseen)
    faults = comparison.faults(Pair(("lora", "loss_chunks"), "float32", True))
    assert faults == ["ppfleetx.nn.lora:LoraBranch.forward has no effect"]
