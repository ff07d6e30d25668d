"""Greedy continuations of transformers' mixtures of experts, for tests that run without it.

    python tests/goldens/make_hf_moe_generate.py

writes hf_moe_generate.json beside this file: for each model of hf_moe.npz, prompts and the tokens that follow
them in float64, without an end token. Prompts where another token was nearly as likely are left out. Made
with transformers 5.23.0 and torch 2.13.0.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PROMPTS, NEW, VOCAB = 20, 24, 61
CLOSEST = 1e-3  # of the two highest logits


def model_of(name: str, stored: Any) -> torch.nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        weights = {key.split("/w/")[1]: stored[key] for key in stored.files if key.startswith(f"{name}/w/")}
        save_file({key: w.astype(np.float32) for key, w in weights.items()}, f"{folder}/model.safetensors")
        (Path(folder) / "config.json").write_text(str(stored[f"{name}/config"]))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@torch.no_grad()
def continued(model: torch.nn.Module, prompt: list[int]) -> list[int] | None:
    ids = torch.tensor([prompt])
    for _ in range(NEW):
        logits, tokens = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2)
        if logits[0] - logits[1] < CLOSEST:
            return None
        ids = torch.cat([ids, tokens[:1].unsqueeze(0)], dim=1)
    return ids[0, len(prompt) :].tolist()


def main() -> None:
    stored = np.load(HERE / "hf_moe.npz")
    rng, result = np.random.RandomState(7), {}
    for name in sorted({key.split("/")[0] for key in stored.files}):
        model, rows = model_of(name, stored), []
        while len(rows) < PROMPTS:
            prompt = rng.randint(3, VOCAB, rng.randint(1, 13)).tolist()
            following = continued(model, prompt)
            if following is not None:
                rows.append([prompt, following])
        result[name] = rows
        print(name, len({token for _, row in rows for token in row}), "different tokens")
    (HERE / "hf_moe_generate.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
