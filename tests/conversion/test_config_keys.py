"""Against Hugging Face transformers, by goldens (recipe: tests/goldens/make_hf_goldens.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.config_export import hf_config
from ppfleetx.conversion.huggingface.config_import import model_keys, unknown_keys
from ppfleetx.models.gpt.spec import parameter_count
from tests.conversion import hf_dirs
from tests.models.gpt_builders import load_golden

FAMILIES = ["hf_gpt2", "hf_llama"]


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_equal_hugging_face(name):
    config, arrays = load_golden(name)
    _, weights = hf_dirs.golden(name)
    labels = np.concatenate([arrays["tokens"][:, 1:], np.full((3, 1), -100)], axis=1)
    gradients = {key.removeprefix("grad/"): value for key, value in arrays.items() if "grad/" in key}
    hf_dirs.assert_loss_and_gradients(config, weights, arrays["tokens"], labels, arrays["loss"], gradients)


PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
"""config.json files as they are published, by the programs and releases that wrote them."""
BILLIONS = {
    "gpt2": 0.124, "llama 1": 6.7, "llama 3.1": 8.0, "paddlenlp": 13.0, "Mixtral-8x7B": 46.7,
    "Qwen1.5-MoE-A2.7B": 14.3, "Qwen3-30B-A3B": 30.5, "GLM-4.5-Air": 106.9, "DeepSeek-V3": 671.0,
    "DeepSeek-V2-Lite": 15.7,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_have_no_key_that_is_not_known(name):
    config = PUBLISHED[name]
    keys = model_keys(config)
    model = ModelConfig(**keys)
    assert unknown_keys(config) == []
    assert parameter_count(model) / 1e9 == pytest.approx(BILLIONS[name], abs=0.06)
    assert hf_config(model, "BF16")["model_type"] == config["model_type"]
    # Every key that is mapped is read: another value gives another section, or is refused.
    for key in config.keys() & {"rms_norm_eps", "layer_norm_epsilon", "rope_theta"}:
        assert model_keys(config | {key: 2 * config[key]}) != keys, key


@pytest.mark.parametrize("key, value", [("kv_lora_rank", "512"), ("v_head_dim", 0), ("norm_topk_prob", 1)])
def test_values_have_the_types_of_ours(key, value):
    with pytest.raises(CheckpointError, match=f"{key} = {value!r} in config.json: must be"):
        model_keys(PUBLISHED["DeepSeek-V3"] | {key: value})


@pytest.mark.parametrize(
    "family, change, words",
    [
        ("hf_llama", {"qk_norm": True, "logit_scale": 0.1}, "qk_norm: True of this llama"),
        ("hf_llama", {"n_embd": 64}, "n_embd"),
        ("hf_gpt2", {"rope_theta": 1e4}, "rope_theta"),
        ("hf_gpt2", {"hidden_size": 64}, "hidden_size .*n_embd .*are the same key"),
        ("hf_gpt2", {"scale_attn_weights": False}, "scale_attn_weights: False"),
        ("hf_gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("hf_gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("hf_gpt2", {"activation_function": "tanh"}, "activation_function 'tanh' of this gpt2"),
        ("hf_gpt2", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("hf_llama", {"is_causal": False}, "is_causal"),
        ("hf_gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        *[
            ("hf_llama", {"quantization_config": scheme}, f"quantization_config{words}")
            for scheme, words in (
                ("gptq", ": 'gptq' is not an object"),
                ({"bits": 4}, ".quant_method: None .*'gptq' or 'awq'"),
                ({"quant_method": "fp8"}, ".quant_method: 'fp8'"),
                ({"quant_method": "gptq"}, ".bits: None"),
                ({"quant_method": "gptq", "bits": 3}, ".bits: 3 .*4 or 8"),
                ({"quant_method": "gptq", "bits": 4, "group_size": 0}, ".group_size: 0"),
                ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ".checkpoint_format"),
                ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, ".dynamic"),
                ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, ".is_marlin_format"),
                ({"quant_method": "awq", "bits": 8}, ".bits: 8"),
                ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, ".backend"),
                ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ".version: 'gemv'"),
                ({"quant_method": "awq", "bits": 4, "zero_point": False}, ".zero_point: False"),
            )
        ],
        ("hf_llama", {"position_embedding_type": "rope_gptj"}, "position_embedding_type: 'rope_gptj'"),
        ("hf_llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope scaling 'ntk'"),
        ("hf_llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("hf_llama", {"sliding_window": 16}, "sliding_window: 16"),
        ("hf_llama", {"alibi": True}, "alibi: True"),
        ("hf_llama", {"rope_scaling_type": "ntk"}, "rope_scaling_type"),
        ("hf_llama", {"head_dim": None, "hidden_size": 47}, "6 heads do not divide the hidden size 47"),
    ],
)
def test_every_key_is_understood_or_refused(family, change, words):
    hf_config, _ = load_golden(family)
    with pytest.raises(CheckpointError, match=words):
        model_keys(hf_config | change)


# Keys of published files, beside sizes, that do not change what the network computes.
OF_THE_HUB = {
    "gpt2": {
        "n_special": 0, "predict_special_tokens": True, "_num_labels": 1, "output_past": True, "n_ctx": 1024,
        "summary_type": "cls_index", "task_specific_params": {"conversational": {"max_length": 1000}},
        "tokenizer_class": "GPT2TokenizerFast", "gradient_checkpointing": False, "do_sample": True,
    },
    "llama": {
        "num_labels": 1, "_attn_implementation_autoset": True, "is_llama_config": True, "use_mrope": False,
        "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "pruned_heads": {}, "temperature": 1.0, "top_k": 50, "unsloth_fixed": True, "use_bfloat16": False,
        "num_experts": 0, "qkv_bias": False, "scale_emb": 1, "max_window_layers": 28,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "qwen2": {"use_mrope": False, "attention_bias": False, "tie_encoder_decoder": False},
    "gpt_neox": {"custom_pipelines": {"text-generation": {"impl": "x"}}, "hidden_dropout_prob": 0},
    "mistral": {"_name_or_path": "x", "use_parallel_residual": False, "is_causal": True},
    "qwen3": {"max_new_tokens": 9},
    "gptj": {"scale_attn_weights": True, "gradient_checkpointing": False, "tokenizer_class": "GPT2Tokenizer"},
    "starcoder2": {
        "layer_norm_epsilon": 1e-5, "norm_type": "layer_norm", "mlp_type": "default",
        "scale_attn_weights": True,
    },
    "cohere2": {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_qk_norm": False},
    "phi3": {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}, "attention_bias": False},
}  # fmt: skip


def smallest(kind):
    """A configuration with what it cannot do without."""
    if kind in ("gpt2", "gptj"):
        return {"model_type": kind, "vocab_size": 64, "n_embd": 32, "n_head": 2, "n_layer": 2,
                "n_positions": 16, **({"rotary_dim": 8} if kind == "gptj" else {})}  # fmt: skip
    return {"model_type": kind, "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
            "max_position_embeddings": 16, "sliding_window": None}  # fmt: skip


@pytest.mark.parametrize("kind", OF_THE_HUB)
def test_keys_of_published_files_are_taken_without_a_word(kind):
    config = smallest(kind)
    more = config | OF_THE_HUB[kind]
    assert model_keys(more) == model_keys(config)
    assert unknown_keys(more) == []


@pytest.mark.parametrize("kind", OF_THE_HUB)
def test_a_key_that_nobody_knows_is_passed_over_and_named(kind):
    config = smallest(kind)
    more = config | {"a_new_key": 3, "dual_chunk_attention_config": {"chunk_size": 262144}, "nothing": None}
    assert model_keys(more) == model_keys(config)
    assert unknown_keys(more) == ["a_new_key", "dual_chunk_attention_config"]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "gpt_neox", "mistral", "qwen3"])
@pytest.mark.parametrize(
    "key, value",
    [("use_mrope", True), ("num_local_experts", 8), ("clip_qkv", 6.0), ("logit_scale", 0.0625),
     ("residual_multiplier", 0.22), ("mamba_d_state", 16), ("vision_config", {"depth": 1}), ("n_special", 3),
     ("quantization", {"bits": 4}), ("position_embedding_type", "alibi")],
)  # fmt: skip
def test_a_key_of_another_network_is_refused(kind, key, value):
    with pytest.raises(CheckpointError, match=f"{key}: .* of this {kind} is not supported"):
        model_keys(smallest(kind) | {key: value})


def test_another_networks_key_is_taken_only_if_the_value_is_ours():
    config = smallest("starcoder2")
    with pytest.raises(CheckpointError, match="layer_norm_epsilon: 1e-06 of this starcoder2"):
        model_keys(config | {"layer_norm_epsilon": 1e-6})


def test_a_model_of_ones_own_names_no_token_that_it_does_not_have():
    """transformers' default of Gemma's pad_token_id lies outside of a small vocabulary, and its scale of
    scores must be whole."""
    keys = model_keys(smallest("gemma2") | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0,
                                            "query_pre_attn_scalar": 9})  # fmt: skip
    made = hf_config(ModelConfig(**keys), "F32", token_ids={"bos_token_id": 1, "eos_token_id": 2})
    assert (made["bos_token_id"], made["eos_token_id"], made["pad_token_id"]) == (1, 2, None)
    assert type(made["query_pre_attn_scalar"]) is int and made["query_pre_attn_scalar"] == 9


def test_what_is_switched_off_or_of_no_effect_is_taken():
    hf_config, _ = load_golden("hf_llama")
    more = {"layer_types": ["full_attention"] * 2, "quantization_config": None, "sliding_window": None,
            "is_decoder": True, "auto_map": None, "num_beams": 4, "some_new_key": None}  # fmt: skip
    assert model_keys(hf_config | more) == model_keys(hf_config)
    gpt2, _ = load_golden("hf_gpt2")
    renamed = {"hidden_size": gpt2["n_embd"], **{k: v for k, v in gpt2.items() if k != "n_embd"}}
    assert model_keys(renamed) == model_keys(gpt2)
