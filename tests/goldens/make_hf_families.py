"""Logits and greedy continuations of Hugging Face's families, for tests that must run without transformers.

    python tests/goldens/make_hf_families.py

writes hf_families.json (configurations and token ids) and hf_families.npz (logits) beside this file. Made
with transformers 5.23.0, torch 2.13.0 (CPU). The weights are not stored: tests/generation/hf_weights.py makes
them from their names on both sides.
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
        told[name] = {"config": model.config.to_dict(), "ids": rows}
        print(name, np.abs(arrays[name]).max(), [len(set(row)) for row in rows])
    arrays["tokens"] = tokens.numpy()
    np.savez_compressed(HERE / "hf_families.npz", **arrays)
    (HERE / "hf_families.json").write_text(json.dumps(told, default=str) + "\n")


if __name__ == "__main__":
    main()
