"""What transformers makes of SmolLM2-135M-Instruct (Q4_1), for ``make real-test``, which runs without it.

    python tests/goldens/make_real_model.py SmolLM2-135M-Instruct.Q4_1.gguf

writes real_model.json beside this file: the ids of chats, their greedy answers, logits after the first one,
and the perplexity of all these chats with their answers. Made with transformers 5.24.0, torch 2.14.1 (CPU;
the perplexity with 2.13.0), gguf 0.19.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = [
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "How many days are in a week?",
    "Name three colours.",
    "What is 2 + 2?",
    "Translate 'good morning' into Spanish.",
    "What does a bee make?",
    "Write a haiku about rain.",
    "Why is the sky blue?",
    "List the first five prime numbers.",
    "What is the opposite of hot?",
    "Explain photosynthesis in one sentence.",
    "Which planet is the largest?",
    "How do I boil an egg?",
    "Give me a synonym of happy.",
    "What is H2O?",
    "Who painted the Mona Lisa?",
    "Write a Python function that adds two numbers.",
    "¿Cuál es la capital de España?",
    "Tell me a joke.",
]
NEW = 16


def perplexity(model: torch.nn.Module, rows: list[list[int]]) -> float:
    """Of all tokens but the first of each row, together."""
    total, count = 0.0, 0
    for row in rows:
        tokens = torch.tensor([row])
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits.double(), tokens[0, 1:], reduction="sum"))
        count += len(row) - 1
    return math.exp(total / count)


def main(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    chats = []
    for question in QUESTIONS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        with torch.no_grad():
            out = model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=NEW, pad_token_id=tokenizer.pad_token_id
            )
        answer = out[0, len(ids) :].tolist()
        print(question, "->", repr(tokenizer.decode(answer)))
        chats.append({"question": question, "prompt": ids, "answer": answer})
    with torch.no_grad():
        logits = model(torch.tensor([chats[0]["prompt"]])).logits[0, -1]
    values, ids = logits.topk(20)
    made = {
        "chats": chats,
        "logits": {"ids": ids.tolist(), "values": [round(v, 5) for v in values.tolist()]},
        "perplexity": perplexity(model, [chat["prompt"] + chat["answer"] for chat in chats]),
    }
    (Path(__file__).parent / "real_model.json").write_text(json.dumps(made, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
