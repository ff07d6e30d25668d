"""A seed gives the same tokens whatever the batch, and after the export; end tokens are any of several."""

import json
import tarfile
from pathlib import Path

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.root import GenerationConfig, InferenceConfig
from ppfleetx.deploy.inference_engine import InferenceEngine
from tests.deploy.exports import GPT2_STYLE, Exported, make_export

GOLDEN = Path(__file__).parents[1] / "goldens" / "export_format_2.tar.gz"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A vocabulary of as many ids as GPT-2's has, padded; the tokenizer knows all of them."""
    model = {**GPT2_STYLE, "num_layers": 1, "vocab_size": 50_304}
    return make_export(tmp_path_factory.mktemp("large"), model, tokenizer_size=50_304)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 50}], ids=["all", "top_p", "top_k"])
def test_rows_do_not_depend_on_their_batch_nor_on_the_export(large: Exported, options: dict) -> None:
    prompts = [[seed % 300, 7, 8 * seed, *range(seed % 11)] for seed in range(32)]
    cfg = GenerationConfig(max_dec_len=8, seed=11, eos_token_id=[], **options)
    alone = large.generator.generate(prompts, cfg, batch_rows=1)
    assert len({one.ids for [one] in alone}) == len(prompts)
    for rows in (8, 32):
        assert large.generator.generate(prompts, cfg, batch_rows=rows) == alone
    for rows in (1, 32):
        assert large.engine.generate(prompts, cfg, batch_rows=rows) == alone


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    "options",
    [
        {"decode_strategy": "greedy_search"},
        {"decode_strategy": "greedy_search", "min_dec_len": 9},
        {"decode_strategy": "greedy_search", "repetition_penalty": 1.2},
        {"temperature": 2.0, "min_dec_len": 3},
    ],
)
def test_any_end_token_ends_a_row_of_the_program(exported: Exported, options: dict, rows: int) -> None:
    prompts = ["the cat", "and", "the other hat and the ca", "é"]
    free = GenerationConfig(max_dec_len=24, seed=7, eos_token_id=(), **options)
    whole = [one.ids for [one] in exported.generator.generate(prompts, free)]
    ends = [exported.generator.tokenizer.eod_id, whole[0][-1], whole[1][-1]]
    cfg = GenerationConfig(max_dec_len=24, seed=7, eos_token_id=ends, **options)
    expected = exported.generator.generate(prompts, cfg)
    assert exported.engine.generate(prompts, cfg, batch_rows=rows) == expected
    assert exported.engine.generate(prompts, free, batch_rows=rows)[0][0].ids == whole[0]
    stopped = [one.ids for [one] in expected if one.finish_reason == "stop"]
    assert {ids[-1] for ids in stopped} & set(ends[1:])
    for [one] in expected:
        assert len(one.ids) > options.get("min_dec_len", 0) and not set(one.ids[:-1]) & set(ends)


def test_an_export_of_format_2_runs_as_it_did(tmp_path: Path) -> None:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    golden = json.loads((tmp_path / "expected.json").read_text())
    engine = InferenceEngine(InferenceConfig(model_dir=str(tmp_path), cpu_threads=1))
    for name, keys in golden["settings"].items():
        cfg = GenerationConfig(max_dec_len=12, seed=7, **keys)
        found = [list(one.ids) for [one] in engine.generate(golden["prompts"], cfg)]
        assert found == golden["ids"][name]
    one_end = GenerationConfig(max_dec_len=12, decode_strategy="greedy_search", eos_token_id=97)
    assert engine.generate(["the cat"], one_end)[0][0].ids == (4, 30, 212, 97)
    with pytest.raises(ConfigError, match=r"eos_token_id = \[97, 3\].*one end token; export the model again"):
        engine.generate(["a"], one_end.model_copy(update={"eos_token_id": (97, 3)}))
