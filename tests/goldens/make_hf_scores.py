"""Sliding-window losses and likeliest last words by Hugging Face transformers, for tests without it.

    python tests/goldens/make_hf_scores.py

writes hf_scores.json beside this file. Made with transformers 5.23.0, torch 2.13.0 (CPU), in float64. The
models are those of make_hf_goldens.py, the token ids random. The loss is that of transformers' guide to the
perplexity of fixed-length models: windows of ``max_length`` tokens every ``stride`` tokens, labels of what
was scored before set to -100.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from make_hf_goldens import load_stored, stored
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
CLASSES = {"hf_gpt2": (GPT2Config, GPT2LMHeadModel), "hf_llama": (LlamaConfig, LlamaForCausalLM)}
# (tokens of the text, tokens per window of ours, which is one less than max_length, stride)
CASES = [(150, 16, 5), (150, 23, 23), (150, 23, 1), (22, 23, 4), (24, 23, 4), (25, 23, 4), (2, 8, 3)]
CLOZE_LENGTH, NUM_CLOZE = 20, 37


def build(name: str) -> torch.nn.Module:
    config_class, model_class = CLASSES[name]
    config, weights = stored(name)
    model = load_stored(model_class(config_class(**config)), weights, lacks="lm_head.weight")
    model.tie_weights()
    return model.double()


def loss_of(model: torch.nn.Module, ids: list[int], length: int, stride: int) -> float:
    total, count, previous_end = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length + 1, len(ids))
        window = torch.tensor([ids[begin:end]])
        labels = window.clone()
        labels[:, : -(end - previous_end)] = -100
        logits = model(window).logits
        total += cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum").item()
        count, previous_end = count + int((labels[:, 1:] != -100).sum()), end
        if end == len(ids):
            break
    assert count == len(ids) - 1
    return total / count


def cloze(model: torch.nn.Module, rng: np.random.Generator) -> dict:
    """A context, one to three tokens that end it (every second example: the likeliest ones), and whether they
    are the likeliest. The model sees at most CLOZE_LENGTH tokens."""
    context = rng.integers(0, 97, rng.integers(1, 31)).tolist()
    size = int(rng.integers(1, 4))
    start = max(0, len(context) + size - CLOZE_LENGTH - 1)
    likeliest: list[int] = []
    for _ in range(size):
        likeliest.append(int(model(torch.tensor([context[start:] + likeliest])).logits[0, -1].argmax()))
    target = list(likeliest)
    if rng.integers(2):
        target[-1] = (target[-1] + 1) % 97
    return {"context": context, "target": target, "right": target == likeliest}


@torch.no_grad()
def main() -> None:
    ids = np.random.default_rng(7).integers(0, 97, 150).tolist()
    out: dict = {"ids": ids, "cloze_length": CLOZE_LENGTH, "models": {}}
    for name in CLASSES:
        model, rng = build(name), np.random.default_rng(8)
        losses = [[n, length, stride, loss_of(model, ids[:n], length, stride)] for n, length, stride in CASES]
        examples = [cloze(model, rng) for _ in range(NUM_CLOZE)]
        out["models"][name] = {"losses": losses, "cloze": examples}
    (HERE / "hf_scores.json").write_text(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
