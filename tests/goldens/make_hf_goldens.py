"""Logits, loss and gradients of random Hugging Face models, for tests that must run without transformers.

    python tests/goldens/make_hf_goldens.py

writes hf_gpt2.npz and hf_llama.npz beside this file, and hf_classification.npz: scores and loss of GPT-2 for
sequence classification on the same weights, padded on the right with a token that no sequence holds. Made
with transformers 5.23.0, torch 2.13.0 (CPU).
Every bias and norm gain is randomised too, so that none of them can be mapped wrongly unseen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

HERE = Path(__file__).parent
GRADIENTS = {
    "hf_gpt2": ["transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.h.1.ln_2.bias"],
    "hf_llama": [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "lm_head.weight",
    ],
}


GPT2 = {
    "vocab_size": 97, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "eager",
}  # fmt: skip
LLAMA = {
    "vocab_size": 97, "max_position_embeddings": 24, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
PADDING, NUM_CLASSES = 5, 3


def stored(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Configuration and weights of a golden model."""
    with np.load(HERE / f"{name}.npz") as archive:
        keys = [key for key in archive.files if key.startswith("weight/")]
        weights = {key.removeprefix("weight/"): archive[key] for key in keys}
        return json.loads(str(archive["config"])), weights


def load_stored(model: torch.nn.Module, weights: dict[str, np.ndarray], *, lacks: str) -> torch.nn.Module:
    """``model`` with these weights, of which it may lack, or have besides, the tensor ``lacks`` alone."""
    tensors = {key: torch.from_numpy(value) for key, value in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert {*missing, *unexpected} <= {lacks}, (missing, unexpected)
    return model.eval()


def write_model(name: str, model: torch.nn.Module) -> None:
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            shift = 1.0 if "norm" in key.lower() or ".ln_" in key else 0.0
            is_gain = parameter.ndim == 1 and key.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (shift if is_gain else 0.0))
    tokens = torch.randint(0, 97, (3, 20))
    model.eval()
    output = model(tokens)
    loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    named = dict(model.named_parameters())
    arrays = {f"weight/{key}": value.detach().numpy() for key, value in named.items()}
    arrays |= {f"grad/{key}": named[key].grad.numpy() for key in GRADIENTS[name]}
    arrays["tokens"], arrays["logits"] = tokens.numpy(), output.logits.detach().numpy()
    arrays["loss"] = np.float64(loss.item())
    arrays["config"] = np.array(json.dumps(model.config.to_dict(), default=str))
    np.savez_compressed(HERE / f"{name}.npz", **arrays)


def write_classification() -> None:
    config, weights = stored("hf_gpt2")
    generator = np.random.default_rng(11)
    score = generator.normal(0, 0.5, (NUM_CLASSES, config["n_embd"])).astype(np.float32)
    tokens, lengths = generator.integers(6, config["vocab_size"], (4, 12)), np.array([12, 1, 7, 11])
    tokens[np.arange(12) >= lengths[:, None]] = PADDING
    labels = np.array([2, 0, 1, 1])
    model = GPT2ForSequenceClassification(
        GPT2Config(**{**config, "num_labels": NUM_CLASSES, "pad_token_id": PADDING})
    )
    load_stored(model, {**weights, "score.weight": score}, lacks="lm_head.weight")
    out = model(torch.from_numpy(tokens), labels=torch.from_numpy(labels))
    arrays = {"score": score, "tokens": tokens, "lengths": lengths, "labels": labels}
    arrays |= {"logits": out.logits.detach().numpy(), "loss": out.loss.item()}
    np.savez_compressed(HERE / "hf_classification.npz", **arrays)


def main() -> None:
    for name, build in (
        ("hf_gpt2", lambda: GPT2LMHeadModel(GPT2Config(**GPT2))),
        ("hf_llama", lambda: LlamaForCausalLM(LlamaConfig(**LLAMA))),
    ):
        torch.manual_seed(1234)
        write_model(name, build())
    write_classification()


if __name__ == "__main__":
    main()
