"""Scores of Hugging Face's GPT-2 for sequence classification, on the weights of hf_gpt2.npz.

    python tests/goldens/make_hf_classification.py

writes hf_classification.npz beside this file. Made with transformers 5.23.0, torch 2.13.0 (CPU). Padded on
the right with token 5, which no sequence holds.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification

HERE = Path(__file__).parent
PADDING, NUM_CLASSES = 5, 3


def main() -> None:
    with np.load(HERE / "hf_gpt2.npz") as archive:
        config = json.loads(str(archive["config"]))
        weights = {k.removeprefix("weight/"): archive[k] for k in archive.files if k.startswith("weight/")}
    generator = np.random.default_rng(11)
    score = generator.normal(0, 0.5, (NUM_CLASSES, config["n_embd"])).astype(np.float32)
    tokens, lengths = generator.integers(6, config["vocab_size"], (4, 12)), np.array([12, 1, 7, 11])
    tokens[np.arange(12) >= lengths[:, None]] = PADDING
    labels = np.array([2, 0, 1, 1])

    model = GPT2ForSequenceClassification(
        GPT2Config(**{**config, "num_labels": NUM_CLASSES, "pad_token_id": PADDING})
    )
    state = {**weights, "score.weight": score}
    missing, unexpected = model.load_state_dict(
        {key: torch.from_numpy(value) for key, value in state.items()}, strict=False
    )
    assert not missing, missing
    assert set(unexpected) <= {"lm_head.weight"}, unexpected
    model.eval()
    out = model(torch.from_numpy(tokens), labels=torch.from_numpy(labels))
    np.savez_compressed(
        HERE / "hf_classification.npz",
        score=score,
        tokens=tokens,
        lengths=lengths,
        labels=labels,
        logits=out.logits.detach().numpy(),
        loss=out.loss.item(),
    )


if __name__ == "__main__":
    main()
