"""Random weights as a function of Hugging Face name and shape, the same with torch and without."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

VOCAB = 97
PROMPTS = [[11, 60, 3, 3, 42], [7], [90, 13, 55, 2, 2, 8, 71, 64, 30], [1, 2]]
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_positions": 96,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "max_position_embeddings": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIGS = {"gpt2": GPT2, "llama": LLAMA}


def random_weight(name: str, shape: Sequence[int]) -> np.ndarray:
    """N(0, 0.35), gains of norms around 1: large enough that tokens vary.

    RandomState's stream is frozen; default_rng's may change with NumPy.
    """
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape) * 0.35
    is_norm = "norm" in name or ".ln_" in name
    return (values + float(is_norm and name.endswith("weight"))).astype(np.float32)
