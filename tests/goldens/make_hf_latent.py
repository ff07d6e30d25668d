"""What transformers' latent attention gives, for tests that run without it.

    python tests/goldens/make_hf_latent.py

writes hf_latent.npz beside this file: for each case of CASES the attention's output and the gradient of its
input, computed in float64, for the input, the weights and the upstream gradient that ``random_weight`` makes
of their names. Made with transformers 5.23.0 and torch 2.13.0.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DeepseekV2Config, DeepseekV3Config

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.generation.hf_weights import random_weight

BATCH, LENGTH = 2, 19
SIZES = {
    "hidden_size": 27,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 15,
    "kv_lora_rank": 11,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 5,
    "v_head_dim": 7,
    "max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2.0,
    "beta_slow": 1.0,
}
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"model_type": "deepseek_v2"},
    "deepseek_v2 lite": {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3 halves": {"model_type": "deepseek_v3", "rope_interleave": False, "attention_bias": True},
}
CONFIGS = {"deepseek_v2": DeepseekV2Config, "deepseek_v3": DeepseekV3Config}


def attention(keys: dict[str, Any]) -> tuple[torch.nn.Module, Any, torch.nn.Module]:
    """The attention of a case in float64, its config, and what makes its positions."""
    keys = dict(keys)
    kind = keys.pop("model_type")
    config = CONFIGS[kind](**(SIZES | keys))
    config._attn_implementation = "eager"
    code = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    prefix = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}[kind]
    layer = getattr(code, f"{prefix}Attention")(config, layer_idx=0).double().eval()
    for name, parameter in layer.named_parameters():
        parameter.data = torch.from_numpy(random_weight(name, tuple(parameter.shape))).double()
    return layer, config, getattr(code, f"{prefix}RotaryEmbedding")(config)


def run(keys: dict[str, Any]) -> dict[str, np.ndarray]:
    layer, config, rotary = attention(keys)
    shape = (BATCH, LENGTH, config.hidden_size)
    hidden, upstream = (torch.from_numpy(random_weight(name, shape)).double() for name in ("hidden", "up"))
    hidden = (hidden * 10).requires_grad_()
    positions = torch.arange(LENGTH).unsqueeze(0).expand(BATCH, -1)
    mask = torch.full((LENGTH, LENGTH), -1e30, dtype=torch.float64).triu(1)[None, None]
    output = layer(hidden, position_embeddings=rotary(hidden, positions), attention_mask=mask)[0]
    (output * upstream).sum().backward()
    found = {"output": output.detach(), "gradient": hidden.grad}
    return {name: tensor.numpy().astype(np.float32) for name, tensor in found.items()}


def main() -> None:
    stored: dict[str, np.ndarray] = {"cases": np.array(json.dumps({n: SIZES | k for n, k in CASES.items()}))}
    for name, keys in CASES.items():
        stored |= {f"{name}/{key}": array for key, array in run(keys).items()}
    np.savez_compressed(HERE / "hf_latent.npz", **stored)


if __name__ == "__main__":
    main()
