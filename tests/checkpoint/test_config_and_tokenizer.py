"""What a checkpoint says of itself: configuration and tokenizer, beside the manifest and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppfleetx.checkpoint.config_and_tokenizer import documents_in, documents_of
from ppfleetx.checkpoint.inspect import summary
from ppfleetx.checkpoint.manifest import MANIFEST_FILE
from ppfleetx.checkpoint.model_only import generation_section
from ppfleetx.checkpoint.reader import open_checkpoint
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.resume_policy import network
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.conversion.huggingface.generation_config import generation_defaults
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from tests.checkpoint.checkpoints import save
from tests.conversion import hf_dirs
from tests.helpers.texts import small_tokenizer

CONFIG = {
    "Global": {"device": "cpu", "local_batch_size": 4, "micro_batch_size": 2, "seed": 7},
    "Model": {
        "vocab_size": 500,
        "hidden_size": 32,
        "num_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "lora": {"rank": 4},
    },
    "Data": {"Eval": {"dataset": {"input_dir": "corpus", "max_seq_len": 32, "split": [9, 1, 0]}}},
    "Optimizer": {"lr": {"max_lr": 0.001}},
    "Generation": {"top_k": 3, "max_dec_len": 5, "prompt": "not a default", "seed": 3},
}
PLANS = [
    [],
    ["Distributed.mp_degree=2", "Distributed.pp_degree=2", "Model.virtual_pp_degree=2"],
    ["Distributed.mp_degree=2", "Model.sequence_parallel=True", "Model.use_recompute=True"],
    ["Distributed.dp_degree=2", "Engine.save_load.output_dir=elsewhere", "Global.local_batch_size=8"],
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(json.dumps(CONFIG))
    return tmp_path / "run.yaml"


def test_they_are_the_same_under_every_plan(config: Path, tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    found = [documents_of(load_config(config, plan), tokenizer) for plan in PLANS]
    assert all(documents == found[0] for documents in found)
    (tmp_path / "model").mkdir()
    for name, content in found[0].items():
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes(content)
    cfg, said = load_config(config), load_config(tmp_path / "model")
    assert network(said.Model) == network(cfg.Model) and said.Model.lora == cfg.Model.lora
    assert said.Optimizer == cfg.Optimizer and said.Data.Eval == cfg.Data.Eval and not said.warnings
    assert (said.Generation.top_k, said.Generation.max_dec_len) == (3, 5)
    assert (said.Generation.prompt, said.Generation.seed) == (None, None)
    assert Tokenizer.load(tmp_path / "model/tokenizer").fingerprint == tokenizer.fingerprint


def test_they_are_saved_with_their_checksums(config: Path, tmp_path: Path) -> None:
    documents = documents_of(load_config(config), small_tokenizer())
    path = save(tmp_path / "run", documents=documents)
    checkpoint = open_checkpoint(path)
    assert documents_in(checkpoint) == documents and "tokenizer/tokenizer.json" in documents
    assert summary(checkpoint)["documents"] == sorted(documents)
    for name, content in documents.items():
        for damaged in (content[:-1], content[:9] + bytes([content[9] ^ 1]) + content[10:], None):
            if damaged is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name):
                open_checkpoint(path)
        (path / name).write_bytes(content)
    open_checkpoint(path).verify()


def test_without_documents_the_manifest_is_what_it_was(tmp_path: Path) -> None:
    path = save(tmp_path / "run")
    assert "documents" not in json.loads((path / MANIFEST_FILE).read_bytes())
    assert open_checkpoint(path).document("config.yaml") is None


def test_a_conversion_makes_them_and_keeps_them(tmp_path: Path) -> None:
    hf_dirs.write(tmp_path / "hf", "hf_gpt2")
    hf_dirs.write_tokenizer(tmp_path / "hf")
    said = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 12, "eos_token_id": 5}
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(said))
    (tmp_path / "hf/chat_template.jinja").write_text("{{ messages }}")
    first = convert(Conversion("hf", "ppfleetx", tmp_path / "hf", tmp_path / "ours"))
    documents = documents_in(open_checkpoint(first))
    assert documents["tokenizer/chat_template.jinja"] == b"{{ messages }}"
    generation = load_config(first).Generation
    assert (generation.decode_strategy, generation.temperature, generation.top_k) == ("sampling", 0.5, 50)
    assert (generation.top_p, generation.max_dec_len) == (0.9, 12)
    for number, how in enumerate(({"merge": True}, {"plan": ParallelPlan(mp=2)}, {"dtype": "float16"})):
        again = convert(Conversion("ppfleetx", "ppfleetx", first, tmp_path / str(number), **how))
        assert documents_in(open_checkpoint(again)) == documents, how


GREEDY = {"decode_strategy": "greedy_search", "top_k": 50, "length_penalty": 1.0}
SAMPLING, BEAMS = GREEDY | {"decode_strategy": "sampling"}, GREEDY | {"decode_strategy": "beam_search"}


@pytest.mark.parametrize(
    ("said", "ours", "named"),
    [
        (None, GREEDY, ""),
        ({}, GREEDY, ""),
        ({"_from_model_config": True, "eos_token_id": 5, "use_cache": True}, GREEDY, ""),
        ({"do_sample": False}, GREEDY, ""),
        ({"temperature": 0.7, "min_p": 0.1, "top_h": 0.9}, GREEDY | {"temperature": 0.7, "min_p": 0.1}, ""),
        ({"num_beams": 4}, BEAMS | {"num_beams": 4}, ""),
        ({"num_beams": 4, "length_penalty": 2.0}, BEAMS | {"num_beams": 4, "length_penalty": 2.0}, ""),
        ({"do_sample": True, "top_k": 7}, SAMPLING | {"top_k": 7}, ""),
        ({"do_sample": True, "top_k": None, "eta_cutoff": 0.0}, SAMPLING, ""),
        ({"do_sample": True, "min_p": 0.9, "eta_cutoff": 0.1}, SAMPLING | {"min_p": 0.9}, "eta_cutoff"),
        ({"do_sample": True, "num_beams": 3}, SAMPLING | {"num_beams": 3}, "num_beams"),
        ({"max_length": 77, "suppress_tokens": [3]}, GREEDY | {"suppress_tokens": [3]}, "max_length"),
        ({"max_length": 77, "max_new_tokens": 9}, GREEDY | {"max_dec_len": 9}, ""),
        ({"bad_words_ids": [[3, 4]], "max_length": 20}, GREEDY | {"bad_words": [[3, 4]]}, ""),
        ({"stop_strings": ["</s>"]}, GREEDY | {"stop": ["</s>"]}, ""),
        ({"stop_strings": "x", "num_beams": 2}, BEAMS | {"num_beams": 2}, "stop"),
        ({"chat_format": "chatml"}, GREEDY, "chat_format"),
        ({"temperature": "hot", "top_p": 0.9}, GREEDY | {"top_p": 0.9}, "temperature"),
        ({"do_sample": True, "temperature": 0.0}, SAMPLING | {"temperature": 0.0}, ""),
        ({"num_beams": 4, "num_beam_groups": 3}, BEAMS | {"num_beams": 4}, "num_beam_groups"),
    ],
)  # fmt: skip
def test_generation_defaults_of_transformers(said: dict | None, ours: dict, named: str) -> None:
    """What a file of transformers asks for is what it does here, or the key is named."""
    found, notes = generation_defaults(said, {"do_sample": True} if said is not None else {})
    assert found == ours
    assert all(f"{key} = " in " ".join(notes) for key in named.split())
    assert len(notes) == (1 if named else 0), notes


def test_config_json_holds_where_there_is_no_file_of_generation() -> None:
    config = {"vocab_size": 7, "do_sample": True, "temperature": 0.5, "top_h": 0.1, "max_length": 50}
    found, [note] = generation_defaults(None, config)
    assert found == SAMPLING | {"temperature": 0.5}
    assert "top_h = 0.1" in note and "max_length = 50" in note and "vocab_size" not in note


def test_generation_defaults_of_a_run() -> None:
    config = {"Generation": {"top_k": 3, "prompt": "x", "seed": 1}}
    assert generation_section(config) == {"top_k": 3}
    assert generation_section({"Generation": {"top_k": -3}}) == generation_section(None) == {}
