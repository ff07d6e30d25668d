#!/usr/bin/env python3
"""A GPT-2 of transformers: with random weights, or trained by PyTorch on a corpus (.bin of 16-bit ids).

    PYTHON benchmarks/make_hf_gpt2.py --output DIR --tokenizer DIR --layers 4 --hidden 256 \\
        --corpus FILE.bin --steps 400

PYTHON has torch and transformers; nothing of this project is used. What is written, in Hugging Face's format
with the tokenizer's files, is what benchmarks/compress_quality.py converts and makes smaller. Without
``--steps`` the weights stay random. The last twentieth of the corpus is not trained on.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, SEQ, BATCH = 8192, 256, 8
HELD_OUT = 20  # one token of so many
MAX_LR, WARMUP = 1.5e-3, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True, help="of which each head has 64")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--steps", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=SEQ,
            n_embd=args.hidden,
            n_layer=args.layers,
            n_head=args.hidden // 64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    if args.steps:
        train(model, np.memmap(args.corpus, np.uint16, "r"), args.steps)
    model.save_pretrained(args.output)
    for file in args.tokenizer.glob("*.json"):
        shutil.copy(file, args.output)


def train(model: GPT2LMHeadModel, corpus: np.ndarray, steps: int) -> None:
    """AdamW with a cosine; prints what is learned."""
    tokens = torch.from_numpy(corpus[: len(corpus) - len(corpus) // HELD_OUT].astype(np.int64))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    start = time.monotonic()
    for step in range(steps):
        share = (step + 1) / WARMUP if step < WARMUP else 0.55 + 0.45 * math.cos(math.pi * step / steps)
        for group in optimizer.param_groups:
            group["lr"] = MAX_LR * share
        at = torch.randint(len(tokens) - SEQ, (BATCH,)).tolist()
        batch = torch.stack([tokens[i : i + SEQ] for i in at])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
