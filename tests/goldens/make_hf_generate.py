"""Token ids of Hugging Face ``generate``, for tests that must run without transformers.

    python tests/goldens/make_hf_generate.py

writes hf_generate.json beside this file. Made with transformers 5.23.0, torch 2.13.0 (CPU). The weights
are not stored: tests/generation/hf_weights.py makes them from their names on both sides. Every prompt is
run alone, because in a batch Hugging Face applies the repetition penalty to padding as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "generation"))

from tests.generation.hf_weights import CONFIGS, PROMPTS, random_weight

CLASSES = {"gpt2": (GPT2Config, GPT2LMHeadModel), "llama": (LlamaConfig, LlamaForCausalLM)}
NEW = 64
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8},
    "end": {"repetition_penalty": 1.3, "eos": 1},
    "end_min_length": {"repetition_penalty": 1.3, "eos": 1, "min_new_tokens": 40},
    "no_repeat": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[20], [7, 33], [3, 42, 9], [64]], "suppress_tokens": [1, 2, 50, 51]},
    "bias": {
        "sequence_bias": [[[10], 4.0], [[33], -6.0]],
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
    },
    "beam_no_repeat": {"num_beams": 4, "eos": 1, "no_repeat_ngram_size": 2, "suppress_tokens": [1, 2, 50]},
    "beam": {"num_beams": 4},
    "beam_end": {"num_beams": 4, "eos": 1},
    "beam_penalty_min": {"num_beams": 3, "eos": 1, "repetition_penalty": 1.2, "min_new_tokens": 10},
    "beam_short": {"num_beams": 4, "eos": 1, "length_penalty": -1.0},
    "beam_long": {"num_beams": 4, "eos": 1, "length_penalty": 2.0},
    "beam_early": {"num_beams": 4, "eos": 1, "early_stopping": True},
    "beam_return": {"num_beams": 4, "eos": 1, "num_return_sequences": 3},
    "beam_never": {"num_beams": 4, "eos": 1, "early_stopping": "never", "length_penalty": 0.4},
    "forced_eos": {"repetition_penalty": 1.3, "forced_eos_token_id": 8},
    "beam_forced_eos": {"num_beams": 3, "eos": 1, "min_new_tokens": 63, "forced_eos_token_id": 8},
    # Hugging Face forces a first token only after prompts of one token (an encoder-decoder's start token).
    "forced_bos": {"repetition_penalty": 1.3, "forced_bos_token_id": 5},
    "beam_forced_bos": {"num_beams": 3, "eos": 1, "forced_bos_token_id": 5},
    # Several end tokens: any of them ends a row, none of them comes before the minimum length.
    "ends": {"repetition_penalty": 1.3, "eos": 3},
    "ends_min_length": {"repetition_penalty": 1.3, "eos": 3, "min_new_tokens": 40},
    "beam_ends": {"num_beams": 4, "eos": 3},
    "beam_ends_many": {"num_beams": 2, "eos": 8, "num_return_sequences": 2, "length_penalty": 0.6},
    "beam_ends_min": {"num_beams": 3, "eos": 3, "repetition_penalty": 1.2, "min_new_tokens": 10},
    "beam_ends_early": {"num_beams": 4, "eos": 5, "early_stopping": True},
}
MOST_ENDS = 8
# What generate() makes of one batch of logits: the processors of these options, then a softmax.
PROCESSED: list[dict[str, Any]] = [
    {"temperature": 0.7, "min_p": 0.1},
    {"min_p": 0.9},
    {"typical_p": 0.3},
    {"typical_p": 0.95, "temperature": 1.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.6},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [[5], [3, 9], [4, 7, 3, 1], [2, 2, 2]]},
    {"suppress_tokens": [0, 7, 39], "sequence_bias": [[[4], 2.5], [[8], -1.0]], "repetition_penalty": 1.2},
]
IDS = [[4, 7, 3, 9, 4, 7, 3], [1, 2, 3, 3, 1, 2, 3], [3, 3, 3, 3, 3, 2, 2]]


def build(name: str) -> torch.nn.Module:
    config_class, model_class = CLASSES[name]
    model = model_class(config_class(**CONFIGS[name], attn_implementation="eager"))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(random_weight(key, parameter.shape)))
    return model.eval()


def run(
    model: torch.nn.Module, prompt: list[int], ends: list[int], options: dict[str, Any]
) -> list[list[int]]:
    """New ids of each returned sequence, without padding."""
    options = dict(options)
    eos = ends[: options.pop("eos", 0)]
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=eos or None,
        pad_token_id=96,
        **options,
    )
    rows = []
    for row in out[:, len(prompt) :].tolist():
        size = next((place + 1 for place, token in enumerate(row) if token in eos), len(row))
        rows.append(row[:size])
    return rows


def end_tokens(model: torch.nn.Module) -> list[int]:
    """Tokens that come up early after most prompts, to serve as end tokens."""
    rows = [run(model, prompt, [], CASES["penalty"])[0][4:40] for prompt in PROMPTS]
    order = sorted(range(96), key=lambda token: (sum(token in row for row in rows), token), reverse=True)
    return order[:MOST_ENDS]


def probabilities(model: torch.nn.Module, logits: torch.Tensor, options: dict[str, Any]) -> list[list[float]]:
    """The distribution that generate() samples from."""
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(config, len(IDS[0]), torch.tensor(IDS), None, [])
    return processors(torch.tensor(IDS), logits.clone()).softmax(-1).tolist()


def main() -> None:
    result: dict[str, Any] = {"new_tokens": NEW, "ends": {}}
    for name in CLASSES:
        model = build(name)
        result["ends"][name] = ends = end_tokens(model)
        result[name] = {
            case: {
                "options": options,
                "ids": [run(model, prompt, ends, options) for prompt in PROMPTS],
            }
            for case, options in CASES.items()
        }
    logits = torch.from_numpy(np.random.RandomState(0).standard_normal((3, 40)).astype(np.float32) * 2)
    model = build("gpt2")
    result["processed"] = {
        "logits": logits.tolist(),
        "ids": IDS,
        "cases": [
            {"options": options, "probabilities": probabilities(model, logits, options)}
            for options in PROCESSED
        ],
    }
    target = HERE / "hf_generate.json"
    target.write_text(json.dumps(result) + "\n")
    for name in CLASSES:
        for case, entry in result[name].items():
            print(name, case, [[len(row) for row in rows] for rows in entry["ids"]])
    print(target.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
