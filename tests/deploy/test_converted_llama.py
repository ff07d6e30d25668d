"""A converted Llama gets the same tokens as in transformers everywhere, and stops at the same ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ppfleetx.checkpoint.lazy_tensors import LazyTensor
from ppfleetx.commands.evaluate import read_windows
from ppfleetx.commands.generate import load_generator
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import GenerationConfig, InferenceConfig, RunConfig
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.conversion.huggingface.directory import write_hf
from ppfleetx.deploy.export import export
from ppfleetx.deploy.inference_engine import InferenceEngine
from ppfleetx.deploy.server.app import Service
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.generation.generator import Generator
from ppfleetx.models.gpt.spec import parameter_shapes
from tests.deploy.server.in_process import serve
from tests.models.gpt_builders import LLAMA_STYLE, tiny_config

GOLDENS = Path(__file__).parents[1] / "goldens"
GOLDEN = json.loads((GOLDENS / "hf_tokenizers.json").read_text(encoding="utf-8"))
CTX = ParallelContext.single()


def convert_llama(root: Path, name: str, **config: Any) -> Path:
    """A Llama of random weights with a golden tokenizer, converted."""
    model = tiny_config(
        **LLAMA_STYLE, vocab_size=600, vocab_size_divisible_unit=8, max_position_embeddings=256
    )
    rng = np.random.default_rng(0)
    arrays = {key: rng.standard_normal(shape, np.float32) for key, shape in parameter_shapes(model).items()}
    write_hf(
        {key: LazyTensor("F32", a.shape, lambda a=a: a) for key, a in arrays.items()}, model, root / "hf"
    )
    for file in (GOLDENS / "tokenizers" / name).iterdir():
        shutil.copy(file, root / "hf")
    path = root / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    convert(Conversion("hf", "ppfleetx", root / "hf", root / "ours"))
    return root / "ours"


def configuration(converted: Path, *overrides: str) -> RunConfig:
    place = [f"ckpt_dir={converted}", f"output_dir={converted / 'out'}"]
    options = ["Global.device=cpu", *(f"Engine.save_load.{one}" for one in place), *overrides]
    return load_config(converted / "config.yaml", options)


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_llama(tmp_path_factory.mktemp("llama3"), "llama3")


@pytest.fixture(scope="module")
def generator(third: Path) -> Generator:
    return load_generator(configuration(third), CTX)


def test_end_tokens_of_config_json_are_kept_where_nothing_else_says(tmp_path: Path) -> None:
    converted = convert_llama(tmp_path, "gpt2", eos_token_id=[7, 420], bos_token_id=3)
    (tmp_path / "hf" / "generation_config.json").unlink()
    shutil.rmtree(converted)
    convert(Conversion("hf", "ppfleetx", tmp_path / "hf", converted))
    assert load_generator(configuration(converted), CTX).tokenizer.end_ids == (420, 7)


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_generation_begins_and_ends_as_transformers_does(
    name: str, third: Path, generator: Generator, tmp_path: Path
) -> None:
    if name == "llama2":
        generator = load_generator(configuration(convert_llama(tmp_path, name)), CTX)
    cfg = GenerationConfig(decode_strategy="greedy_search", max_dec_len=6)
    for row in GOLDEN[name]["texts"]:
        assert generator._encode(row["text"]) == row["ids"]
    rows = GOLDEN[name]["texts"][::9]
    by_text = generator.generate([row["text"] for row in rows], cfg)
    assert by_text == generator.generate([row["ids"] for row in rows], cfg)
    ends = {"llama2": ["</s>"], "llama3": ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]}
    assert [generator.tokenizer.decode([one]) for one in generator.end_ids(cfg)] == ends[name]


def test_evaluation_sets_begin_with_bos(third: Path, tmp_path: Path) -> None:
    text = "Hello <|eot_id|> world, don't mind."
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "the quick brown fox"}))
    keys = ["Offline_Eval.max_seq_len=32", "Offline_Eval.overlapping_eval=32"]
    windows = read_windows(configuration(third, *keys, f"Offline_Eval.eval_path={tmp_path / 'text.txt'}"))
    tokenizer = load_generator(configuration(third), CTX).tokenizer
    bos, [end] = tokenizer.start_id, tokenizer.encode_prompt("<|eot_id|>", add_special_tokens=False)
    assert windows.ids.tolist() == tokenizer.encode_prompt(text)
    assert windows.ids.tolist().count(bos) == 1 and windows.ids[0] == bos and end in windows.ids
    for strict in (True, False):
        path = f"Offline_Eval.eval_path={tmp_path / 'text.jsonl'}"
        cloze = ["Offline_Eval.cloze_eval=True", f"Offline_Eval.cloze_strict={strict}"]
        [window] = read_windows(configuration(third, *keys, path, *cloze))
        assert window.ids.tolist() == tokenizer.encode_prompt("the quick brown fox")
        assert tokenizer.decode(window.ids[-window.num_scored :]) in (" fox", "x", "ox")


@pytest.mark.slow
def test_an_export_keeps_it_all(third: Path, generator: Generator) -> None:
    directory = export(configuration(third), CTX, load_generator(configuration(third), CTX))
    engine = InferenceEngine(InferenceConfig(model_dir=str(directory), cpu_threads=1))
    texts = [row["text"] for row in GOLDEN["llama3"]["texts"] if len(row["ids"]) < 40]
    assert [engine._encode(text) for text in texts] == [generator._encode(text) for text in texts]
    cfg = GenerationConfig(decode_strategy="greedy_search", max_dec_len=20)
    assert engine.end_ids(cfg) == generator.end_ids(cfg)
    found = engine.generate(texts, cfg)
    assert found == generator.generate(texts, cfg)


def prompt_tokens(third: Path, body: dict[str, Any], *overrides: str) -> int:
    """How many tokens a server reads in the request's prompt."""
    cfg, found = configuration(third, *overrides), []

    async def use(client: httpx.AsyncClient, _: Service) -> None:
        answer = await client.post("/v1/completions", json={"max_tokens": 1, **body})
        found.append(answer.json()["usage"]["prompt_tokens"])

    serve(load_generator(cfg, CTX), cfg.Serve, use)
    return found[0]


def test_the_server_parses_special_tokens_unless_told_otherwise(third: Path) -> None:
    row = next(row for row in GOLDEN["llama3"]["texts"] if row["text"].startswith("<|start_header_id|>user"))
    body = {"prompt": row["text"], "user": "somebody"}
    assert prompt_tokens(third, body) == len(row["ids"])
    bare = {**body, "add_special_tokens": False}
    assert prompt_tokens(third, bare) == len(row["bare"])
    distrust = "Serve.parse_special_tokens=False"
    assert prompt_tokens(third, bare, distrust) == len(row["plain"])
    assert prompt_tokens(third, body, distrust) == len(row["plain"]) + 1
