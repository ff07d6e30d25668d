"""A real model, SmolLM2-135M-Instruct from a GGUF file, beside transformers (``make real-test``).

Needs the file that PPFLEETX_REAL_MODEL names. tests/goldens/make_real_model.py made the expected values.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

import ppfleetx
from ppfleetx.config.sections.root import GenerationConfig, InferenceConfig, ServeConfig
from ppfleetx.data.chat.templates import find_template
from ppfleetx.deploy.inference_engine import InferenceEngine
from tests.deploy.server.in_process import serve

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = json.loads((ROOT / "tests/goldens/real_model.json").read_text())
FILE = os.environ.get("PPFLEETX_REAL_MODEL", "")
pytestmark = [
    pytest.mark.skipif(not FILE, reason="make real-test names a real model in PPFLEETX_REAL_MODEL"),
    pytest.mark.timeout(600),
]
WINDOW = 256
# How much the perplexity may change, in percent. The weights of the file lie on our grids (docs/numerics.md).
MOST = {"--to int8": 0.1, "--to int4": 0.1}


@pytest.fixture(scope="module")
def model() -> ppfleetx.GPT:
    return ppfleetx.load(FILE)


def run(*arguments: object, timeout: int = 500) -> str:
    """What ``ppfleetx`` prints."""
    command = [sys.executable, "-m", "ppfleetx", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def windows(model: ppfleetx.GPT) -> np.ndarray:
    """Token ids ``[4, 256]`` of prose that the model has not learned by heart."""
    ids = model.tokenizer.encode((ROOT / "docs/planner.md").read_text())
    return np.array(ids[: 4 * WINDOW]).reshape(4, WINDOW)


def perplexity(model: ppfleetx.GPT, ids: np.ndarray) -> float:
    with paddle.no_grad():
        return math.exp(float(np.mean([float(model.loss(row)) for row in ids])))


def test_logits_are_those_of_transformers(model):
    with paddle.no_grad():
        logits = model(EXPECTED["chats"][0]["prompt"])[0, -1].numpy()
    found = np.sort(logits)[::-1][:20]
    np.testing.assert_allclose(found, EXPECTED["logits"]["values"], rtol=0, atol=2e-3)
    np.testing.assert_allclose(logits[EXPECTED["logits"]["ids"]], EXPECTED["logits"]["values"], atol=2e-3)


def test_chats_are_those_of_transformers(model):
    template = find_template(model.tokenizer)
    chats = EXPECTED["chats"]
    for chat in chats:
        messages = [{"role": "user", "content": chat["question"]}]
        found = template.encode(model.tokenizer, messages, add_generation_prompt=True)
        assert found == chat["prompt"], chat["question"]
    options = {"decode_strategy": "greedy_search", "max_dec_len": 16}
    found = model.generate([chat["prompt"] for chat in chats], **options)
    differ = [c["question"] for c, one in zip(chats, found, strict=True) if list(one.ids) != c["answer"]]
    assert not differ


def test_perplexity_is_that_of_transformers(model):
    rows = [chat["prompt"] + chat["answer"] for chat in EXPECTED["chats"]]
    with paddle.no_grad():
        losses = [float(model.loss(np.array([row]))) for row in rows]
    found = math.exp(np.average(losses, weights=[len(row) - 1 for row in rows]))
    assert found == pytest.approx(EXPECTED["perplexity"], rel=1e-4)


@pytest.mark.timeout(1800)
def test_a_program_gives_the_same_tokens(tmp_path):
    """Exported, which takes two minutes of a processor, the model answers as transformers does, too."""
    run("export", FILE, "--output", tmp_path, timeout=1500)
    engine = InferenceEngine(InferenceConfig(model_dir=str(tmp_path)))
    options = GenerationConfig(decode_strategy="greedy_search", max_dec_len=16)
    chats = EXPECTED["chats"][:5]
    found = engine.generate([chat["prompt"] for chat in chats], options)
    differ = [c["question"] for c, one in zip(chats, found, strict=True) if list(one[0].ids) != c["answer"]]
    assert not differ


def test_a_request_is_answered_alike(model):
    async def use(client, service) -> None:
        body = {
            "model": (await client.get("/v1/models")).json()["data"][0]["id"],
            "messages": [{"role": "user", "content": EXPECTED["chats"][0]["question"]}],
            "temperature": 0,
            "max_tokens": 16,
        }
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert "choices" in answer, answer
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."

    serve(model.generator, ServeConfig(), use)


@pytest.mark.parametrize("to", list(MOST))
def test_what_small_weights_cost(model, tmp_path, to):
    run("quantize", FILE, *to.split(), "--output", tmp_path / "small")
    small, ids = ppfleetx.load(tmp_path / "small"), windows(model)
    cost = 100 * (perplexity(small, ids) / perplexity(model, ids) - 1)
    print(f"{to}: {cost:+.2f} %")
    assert abs(cost) < MOST[to]


def test_there_and_back(model, tmp_path):
    """To Hugging Face's files, and to GGUF in 16 bits, which hold what Q4_1 gave up to their rounding."""
    prompt = EXPECTED["chats"][1]["prompt"]
    with paddle.no_grad():
        expected = model(prompt).numpy()
        model.to_huggingface(tmp_path / "hf")
        np.testing.assert_array_equal(ppfleetx.load(tmp_path / "hf")(prompt).numpy(), expected)
    places = ("--input", tmp_path / "hf", "--output", tmp_path / "m.gguf", "--dtype", "float16")
    run("convert", "--from", "hf", "--to", "gguf", *places)
    with paddle.no_grad():
        found = ppfleetx.load(tmp_path / "m.gguf")(prompt).numpy()
    assert np.abs(found - expected).max() < 0.1
    assert (found[0, -1].argmax(), found.shape) == (expected[0, -1].argmax(), expected.shape)


def test_adapters_learn_a_handful_of_conversations(tmp_path):
    answers = {"Who are you?": "I am an owl.", "What do you eat?": "Mice, and nothing but mice."}
    lines = [
        json.dumps({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]})
        for q, a in answers.items()
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines * 4) + "\n")
    keys = {
        "Model.lora.rank": 8,
        "Data.Train.dataset.name": "ChatDataset",
        "Data.Train.dataset.input_dir": tmp_path,
        "Data.Train.dataset.split": "chats",
        "Data.Train.dataset.max_seq_len": 64,
        "Engine.max_steps": 12,
        "Engine.logging_freq": 1,
        "Global.local_batch_size": 2,
        "Global.micro_batch_size": 2,
        "Optimizer.lr.max_lr": 2e-3,
    }
    overrides = [part for key, value in keys.items() for part in ("-o", f"{key}={value}")]
    run("finetune", "--from", FILE, "--output", tmp_path / "owl", *overrides)
    file = tmp_path / "owl" / "metrics.jsonl"
    records = map(json.loads, file.read_text().splitlines())
    losses = [record["loss"] for record in records if record.get("kind") == "train"]
    assert losses[-1] < 0.5 * losses[0], losses
