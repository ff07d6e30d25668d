"""Logits, loss and gradients of random Hugging Face models, for tests that must run without transformers.

    python tests/goldens/make_hf_goldens.py

writes hf_gpt2.npz and hf_llama.npz beside this file. Made with transformers 5.23.0, torch 2.13.0 (CPU).
Every bias and norm gain is randomised too, so that none of them can be mapped wrongly unseen.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

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


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97,
            n_positions=24,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    )


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            max_position_embeddings=24,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    )


def main() -> None:
    for name, build in (("hf_gpt2", gpt2), ("hf_llama", llama)):
        torch.manual_seed(1234)
        model = build()
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
        print(name, (HERE / f"{name}.npz").stat().st_size, "bytes, loss", loss.item())


if __name__ == "__main__":
    main()
