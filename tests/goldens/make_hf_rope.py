"""What transformers makes of the rotary settings in a config.json, for tests that run without it.

    python tests/goldens/make_hf_rope.py

writes hf_rope.npz beside this file: for every case of CASES the frequencies and the attention factor of a
Llama, and for those of LOGITS every fifth position's logits of the model of hf_llama.npz with these settings,
on a sequence longer than its original_max_position_embeddings. Made with transformers 5.23.0, torch 2.13.0.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from make_hf_goldens import stored
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
LENGTH = 60

# Keys that are put over (or, with the value "absent", taken out of) a plain Llama's config.json.
ABSENT = "absent"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.25, 4.0],
    "long_factor": [1.25, 3.0, 7.5, 9.0],
    "original_max_position_embeddings": 16,
}
LARGE = {"head_dim": 128, "max_position_embeddings": 131072}
OLD = {"rope_parameters": ABSENT, "rope_theta": 500000.0}
CASES = {
    "plain": {},
    "theta at the top": {"rope_parameters": ABSENT, "rope_theta": 500000.0},
    "theta inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    "theta twice": {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7e3}},
    "no theta": {"rope_parameters": ABSENT},
    "type by its old name": {**OLD, "rope_scaling": {"type": "linear", "factor": 2.5}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3": {**LARGE, **OLD, "rope_scaling": LLAMA3},
    "llama3 inside": {**LARGE, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
    "llama3.2": {**LARGE, **OLD, "head_dim": 64, "rope_scaling": {**LLAMA3, "factor": 32.0}},
    "llama3 shortened": {**OLD, "head_dim": 128, "max_position_embeddings": 4096, "rope_scaling": LLAMA3},
    "yarn": {**LARGE, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "yarn wide": {**LARGE, **OLD, "rope_scaling": {**YARN, "beta_fast": 64.0, "beta_slow": 0.5}},
    "yarn given factor": {**LARGE, **OLD, "rope_scaling": {**YARN, "attention_factor": 1.25}},
    "yarn mscale": {**LARGE, **OLD, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2}},
    "yarn half an mscale": {**LARGE, **OLD, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.0}},
    "yarn not truncated": {**LARGE, **OLD, "rope_scaling": {**YARN, "truncate": False}},
    "yarn no factor": {**OLD, "max_position_embeddings": 16384, "rope_scaling": {**YARN, "factor": None}},
    "yarn no original": {
        **OLD, "max_position_embeddings": 900, "rope_scaling": {"type": "yarn", "factor": 2.0},
    },
    "yarn original at the top": {
        **OLD, "max_position_embeddings": 8192, "original_max_position_embeddings": 512, "rope_scaling": YARN,
    },
    "yarn tiny": {**OLD, "rope_scaling": {**YARN, "original_max_position_embeddings": 4}},
    "yarn huge": {
        **LARGE, "head_dim": 8, "rope_scaling": {**YARN, "original_max_position_embeddings": 1 << 30},
    },
    "both, the same": {
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "both, only one scales": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 12},
    },
    "both, the other way round": {
        "rope_theta": 300.0, "rope_parameters": {**YARN, "rope_theta": 500000.0},
        "rope_scaling": {"rope_type": "default"},
    },
    "both, one empty": {"rope_parameters": {**YARN, "rope_theta": 500000.0}, "rope_scaling": {}},
    "keys of another type": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 8.0, "low_freq_factor": 3.0},
    },
    "longrope": {**OLD, "max_position_embeddings": 96, "rope_scaling": LONGROPE},
    "longrope given factor": {**OLD, "rope_scaling": {**LONGROPE, "factor": 32.0}},
    "longrope given attention factor": {**OLD, "rope_scaling": {**LONGROPE, "attention_factor": 1.19}},
    "longrope shortened": {**OLD, "max_position_embeddings": 8, "rope_scaling": LONGROPE},
    "longrope original at the top": {
        **OLD, "max_position_embeddings": 96, "original_max_position_embeddings": 12,
        "rope_scaling": LONGROPE,
    },
    "finetuned": {**LARGE, **OLD, "rope_scaling": {**YARN, "finetuned": True}},
    # Those below run with the weights of hf_llama.npz: heads of 8 features, 60 tokens.
    "short linear": {
        "max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 4.0},
    },
    "short llama3": {
        **OLD, "max_position_embeddings": 64, "rope_theta": 100.0,
        "rope_scaling": {**LLAMA3, "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "short yarn": {
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0,
            "truncate": False, "rope_theta": 100.0,
        },
    },
    "short longrope": {"max_position_embeddings": 64, "rope_parameters": {**LONGROPE, "rope_theta": 100.0}},
    "short longrope within its length": {
        "max_position_embeddings": 512,
        "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 60, "rope_theta": 100.0},
    },
    "short both": {
        "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 12},
    },
}  # fmt: skip
LOGITS = [name for name in CASES if name.startswith("short ")]


def main() -> None:
    base, weights = stored("hf_llama")
    tokens = np.random.default_rng(11).integers(0, base["vocab_size"], (1, LENGTH))
    arrays: dict[str, np.ndarray] = {"tokens": tokens}
    for name, changes in CASES.items():
        config = {key: value for key, value in (base | changes).items() if value != ABSENT}
        # transformers writes into the settings it is given; a copy through JSON keeps ours as they are.
        rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(json.loads(json.dumps(config))))
        arrays[f"frequencies/{name}"] = rotary.inv_freq.numpy()
        arrays[f"factor/{name}"] = np.float64(rotary.attention_scaling)
        if name in LOGITS:
            model = LlamaForCausalLM(LlamaConfig.from_dict(json.loads(json.dumps(config)))).eval()
            model.load_state_dict({key: torch.from_numpy(value) for key, value in weights.items()})
            with torch.no_grad():
                arrays[f"logits/{name}"] = model(torch.from_numpy(tokens)).logits[:, ::5].numpy()
    arrays["cases"] = np.array(json.dumps(CASES))
    np.savez_compressed(HERE / "hf_rope.npz", **arrays)
    print((HERE / "hf_rope.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
