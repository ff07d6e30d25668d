"""Logits and greedy continuations of Hugging Face's families, for tests that must run without transformers.

    python tests/goldens/make_hf_families.py

writes hf_families.json (configurations and token ids) and hf_families.npz (logits) beside this file. Made
with transformers 5.24.0, torch 2.14.1 (CPU); stablelm_norms_serial with torch 2.13.0. The weights are not
stored: tests/generation/hf_weights.py makes them from their names on both sides.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.generation.hf_weights import PROMPTS, random_weight

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    **GROUPED, "sliding_window": None, "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 300.0, "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.25, 1.5], "long_factor": [1.5, 3.0, 4.75],
    },
}  # fmt: skip
GPT2_SIZES = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
FALCON = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "ffn_hidden_size": 56,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "neox": ("gpt_neox", {**SIZES}),
    "neox_serial": (
        "gpt_neox",
        {
            **SIZES, "use_parallel_residual": False, "tie_word_embeddings": True, "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "neox_yarn_without_bias": (
        "gpt_neox",
        {**SIZES, "attention_bias": False, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    ),
    "qwen2": ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2_window": (
        "qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 12}),
    "qwen3_window": (
        "qwen3",
        {
            **GROUPED, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True,
            "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0,
        },
    ),
    "mistral": ("mistral", {**GROUPED, "head_dim": 10, "sliding_window": 4}),
    "mistral_whole": ("mistral", {**GROUPED, "sliding_window": None}),
    "qwen2_some_windows": (
        "qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "gemma": ("gemma", {**GROUPED, "head_dim": 10}),
    "gemma2": ("gemma2", {**GROUPED, "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 7}),
    "gemma3": (
        "gemma3_text",
        {
            **GROUPED, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            },
        },
    ),
    "granite": (
        "granite",
        {
            **GROUPED, "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere": ("cohere", {**SIZES, "num_key_value_heads": 2, "logit_scale": 0.4}),
    "cohere_norms": ("cohere", {**SIZES, "num_key_value_heads": 2, "logit_scale": 0.4, "use_qk_norm": True}),
    "cohere2": (
        "cohere2",
        {
            **SIZES, "num_key_value_heads": 1, "head_dim": 8, "logit_scale": 0.5, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "glm": ("glm", {**GROUPED, "head_dim": 12, "pad_token_id": 0}),
    "glm4": ("glm4", {**GROUPED, "head_dim": 8, "attention_bias": False, "pad_token_id": 0}),
    "stablelm": ("stablelm", {**SIZES, "num_key_value_heads": 2, "use_qkv_bias": True}),
    "stablelm_parallel": (
        "stablelm",
        {**SIZES, "num_key_value_heads": 4, "use_parallel_residual": True},
    ),
    "stablelm_norms": (
        "stablelm",
        {**SIZES, "num_key_value_heads": 2, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "stablelm_norms_serial": (
        "stablelm",
        {
            **SIZES, "hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2,
            "intermediate_size": 38, "partial_rotary_factor": 0.4, "qk_layernorm": True, "use_qkv_bias": True,
        },
    ),
    "phi3": ("phi3", {**GROUPED, "sliding_window": 5, "pad_token_id": 0}),
    # The 20 tokens of the logits are a long row, and in the next case a short one; continuations of prompts
    # become long in both.
    "phi3_longrope": ("phi3", {**LONGROPE, "original_max_position_embeddings": 12}),
    "phi3_longrope_up_to_its_length": (
        "phi3",
        {
            **LONGROPE, "original_max_position_embeddings": 24,
            "rope_parameters": {**LONGROPE["rope_parameters"], "attention_factor": 1.3},
        },
    ),
    "smollm3": ("smollm3", {**GROUPED, "no_rope_layers": [1, 0], "pad_token_id": 0}),
    "olmo2": ("olmo2", {**GROUPED, "attention_bias": True}),
    "olmo3": (
        "olmo3",
        {
            **GROUPED, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": YARN,
            },
        },
    ),
    "ernie4_5": ("ernie4_5", {**GROUPED, "head_dim": 12, "use_bias": True}),
    "seed_oss": ("seed_oss", {**GROUPED, "head_dim": 10}),
    "gptj": ("gptj", {**GPT2_SIZES, "rotary_dim": 6}),
    "phi": ("phi", {**SIZES}),
    "gpt_bigcode": ("gpt_bigcode", {**GPT2_SIZES, "n_inner": 40}),
    "gpt_bigcode_heads": ("gpt_bigcode", {**GPT2_SIZES, "multi_query": False}),
    "starcoder2": ("starcoder2", {**SIZES, "num_key_value_heads": 2, "sliding_window": 6}),
    "opt": (
        "opt",
        {
            "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "ffn_dim": 40, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
        },
    ),
    "bloom": ("bloom", {"vocab_size": 97, "hidden_size": 36, "n_layer": 2, "n_head": 6}),
    "falcon": ("falcon", {**FALCON}),
    "falcon_new": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon_serial": ("falcon", {**FALCON, "multi_query": False, "parallel_attn": False}),
}  # fmt: skip
NEW = 24


def build(kind: str, keys: dict[str, Any]) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys), attn_implementation="eager")
    with tempfile.TemporaryDirectory() as directory:  # the names in files are not those of the modules
        model.save_pretrained(directory)
        file = Path(directory) / "model.safetensors"
        with safe_open(file, "pt") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        from safetensors.numpy import save_file

        save_file(
            {name: random_weight(name, shape) for name, shape in shapes.items()}, file, {"format": "pt"}
        )
        return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def main() -> None:
    told: dict[str, Any] = {}
    arrays = {}
    for name, (kind, keys) in CASES.items():
        model = build(kind, keys)
        tokens = torch.from_numpy(np.random.RandomState(3).randint(0, 97, (2, 20)))
        with torch.no_grad():
            arrays[name] = model(tokens).logits.numpy()
        rows = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 96}
            # 96 is the end token of the test's tokenizer.
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, suppress_tokens=[96], **options
            )
            rows.append(out[0, len(prompt) :].tolist())
        config = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
        told[name] = {"config": config, "ids": rows}
        print(name, np.abs(arrays[name]).max(), [len(set(row)) for row in rows])
    arrays["tokens"] = tokens.numpy()
    np.savez_compressed(HERE / "hf_families.npz", **arrays)
    (HERE / "hf_families.json").write_text(json.dumps(told, default=str) + "\n")


if __name__ == "__main__":
    main()
