"""A small run on disk, as the API's users have one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppfleetx.checkpoint.config_and_tokenizer import documents_of
from ppfleetx.config.loader import load_config
from tests.helpers.texts import CORPUS, small_tokenizer
from tests.models.gpt_builders import build, save_network

MODEL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "scale_qk_by_layer_num": False,
}


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``output`` (a run of a model of random weights), ``tokenizer`` and ``text.txt``."""
    root = tmp_path_factory.mktemp("api")
    dataset = {"input_dir": "nowhere", "split": [8, 2, 0], "max_seq_len": 32}
    tree = {
        "Global": {"device": "cpu", "local_batch_size": 2},
        "Engine": {"max_steps": 8, "eval_freq": 0},
        "Model": MODEL,
        "Data": {"tokenizer": {"dir": str(root / "tokenizer")}, "Train": {"dataset": dataset}},
        "Generation": {"max_dec_len": 6},
    }
    tokenizer = small_tokenizer()
    tokenizer.save(root / "tokenizer")
    (root / "output").mkdir()
    (root / "output/config.yaml").write_text(json.dumps(tree))
    (root / "text.txt").write_text("".join(CORPUS) * 8)
    cfg = load_config(root / "output")
    config, documents = cfg.model_dump(mode="json"), documents_of(cfg, tokenizer)
    save_network(root / "output", build(cfg.Model, 5), config=config, vocab_size=512, documents=documents)
    return root


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as the current directory."""
    monkeypatch.chdir(place)
    return place
