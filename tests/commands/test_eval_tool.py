"""``tools/eval.py`` with ``Offline_Eval`` as users run it."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.commands import evaluate
from ppfleetx.commands.model_verbs import Evaluate
from ppfleetx.commands.train_verbs import Train
from ppfleetx.config.errors import UserError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.data.tokenizer.tokenizer import train_tokenizer
from ppfleetx.models.staged_model import StagedModel
from tests.helpers import programs
from tests.models.gpt_builders import build, save_network

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "ppfleetx/configs/nlp/gpt/eval_gpt_345M_single_card.yaml"
TEXT = " = The cat = \n \n The cat and the hat , and the other @-@ cat 's hat . \n The hat ( a cat ) ran . \n"
PLAIN = " = The cat =\n\nThe cat and the hat, and the other-cat's hat.\nThe hat (a cat) ran.\n"
MODEL = {"vocab_size": 300, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4}
LENGTH, STRIDE = 12, 5
SEP_2 = {"Distributed__sep_degree": 2, "Distributed__dp_degree": "null"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint and its tokenizer, and a text."""
    place = tmp_path_factory.mktemp("eval")
    tokenizer = train_tokenizer([PLAIN] * 3, 300)
    cfg = ModelConfig(**MODEL, ffn_hidden_size=128, max_position_embeddings=64, initializer_range=0.3)
    model, fingerprints = build(cfg, 5), {"tokenizer": tokenizer.fingerprint}
    save_network(place / "run", model, vocab_size=300, fingerprints=fingerprints)
    tokenizer.save(place / "run" / "tokenizer")
    (place / "wiki.test.tokens").write_text(TEXT)
    ids = tokenizer.encode(PLAIN)
    (place / "expected.json").write_text(json.dumps([len(ids), by_hand(model, ids)]))
    return place


def by_hand(model: StagedModel, ids: list[int]) -> float:
    """Mean of minus the log probability of each token but the first, one forward pass for each."""
    model.eval()
    total = 0.0
    for position in range(1, len(ids)):
        moves = max(0, math.ceil((position - LENGTH) / STRIDE))
        with paddle.no_grad():
            logits = model(paddle.to_tensor([ids[moves * STRIDE : position]])).numpy()[-1, 0, :300]
        logits = logits.astype(np.float64)
        total -= logits[ids[position]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    return total / (len(ids) - 1)


def overrides(place: Path, **changes: object) -> list[str]:
    """The shipped YAML made small. ``changes`` by key with ``__`` for the dot; None leaves a key out."""
    keys = {f"Model.{name}": value for name, value in MODEL.items()} | {
        "Model.ffn_hidden_size": 128,
        "Model.max_position_embeddings": 64,
        "Global.device": "cpu",
        "Data.tokenizer": "null",
        "Engine.save_load.ckpt_dir": place / "run",
        "Engine.save_load.output_dir": place / "out",
        "Offline_Eval.eval_path": place / "wiki.test.tokens",
        "Offline_Eval.max_seq_len": LENGTH,
        "Offline_Eval.overlapping_eval": STRIDE,
        "Offline_Eval.batch_size": 3,
        "Offline_Eval.logging_freq": 2,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{key}={value}" for key, value in keys.items() if value is not None]


def test_perplexity_of_a_text(place: Path) -> None:
    words = [word for option in overrides(place) for word in ("-o", option)]
    command = [sys.executable, str(ROOT / "tools/eval.py"), "-c", str(SHIPPED), *words]
    done = programs.run(command, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    result = json.loads((place / "out" / evaluate.RESULT_FILE).read_text())
    num_tokens, loss = json.loads((place / "expected.json").read_text())
    words = len(TEXT.strip().split(" "))
    assert result["loss"] == pytest.approx(loss, rel=1e-6)
    assert result["ppl"] == pytest.approx(math.exp(loss), rel=1e-5)
    adjusted = math.exp(loss * (num_tokens - 1) / (words - 1))
    assert result["adjusted_ppl"] == pytest.approx(adjusted, rel=1e-4)
    assert (result["num_tokens"], result["num_words"]) == (num_tokens, words)
    assert (result["kind"], result["step"], result["detokenizer"]) == ("perplexity", 4, "wikitext")
    assert result["checkpoint"] == str(place / "run" / "epoch_0_step_4")
    assert f"with the weights of {place / 'run' / 'epoch_0_step_4'} (global step 4)" in done.stdout
    assert "resuming" not in done.stdout
    steps = math.ceil((1 + math.ceil((num_tokens - 1 - LENGTH) / STRIDE)) / 3)
    lines = [line for line in done.stdout.splitlines() if "[eval] batch" in line]
    assert len(lines) == math.ceil(steps / 2) and f"batch: {steps}/{steps}" in lines[-1]
    assert f"\nloss          {result['loss']:.9g}\n" in done.stdout
    assert "[ WARNING]" not in done.stdout


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"Offline_Eval__eval_path": None}, ["wiki.valid.tokens", f"{SHIPPED.name}:", "No such file"]),
        ({"Offline_Eval__eval_path": "null"}, ["Offline_Eval.eval_path", "names no file"]),
        ({"Offline_Eval__cloze_eval": True}, ["wiki.test.tokens:1: this is not"]),
        ({"Engine__save_load__ckpt_dir": None}, ["Engine.save_load.ckpt_dir", "names no checkpoint"]),
        ({"Engine__save_load__ckpt_dir": "/nowhere"}, ["/nowhere"]),
        ({"Model__vocab_size": 256}, ["token ids, added tokens included", "the model 256 (Model.vocab"]),
        ({"Data__tokenizer": None}, ["tokenizer"]),
        ({"Engine__save_load__output_dir": SHIPPED}, ["Engine.save_load.output_dir", "is a file"]),
        ({"Offline_Eval__cloze_eval": True, **SEP_2}, ["Distributed.sep_degree = 2"]),
        (
            {"Offline_Eval__max_seq_len": 13, "Distributed__mp_degree": 2, "Model__sequence_parallel": True},
            ["Offline_Eval.max_seq_len = 13", "divides by mp_degree 2"],
        ),
    ],
)
def test_mistakes_are_found_before_paddle_is_loaded(
    place: Path, changes: dict, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(evaluate, "start_with", start)
    size = 2 if any("Distributed" in key for key in changes) else 1
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(size))
    with pytest.raises(UserError) as caught:
        Evaluate(config=str(SHIPPED), override=tuple(overrides(place, **changes))).run()
    for word in words:
        assert word in str(caught.value)


def test_the_evaluation_module_is_not_trained(place: Path) -> None:
    with pytest.raises(UserError, match=r"Model.module = 'GPTEvalModule'.*: only evaluates"):
        Train(config=str(SHIPPED), override=tuple(overrides(place))).run()
