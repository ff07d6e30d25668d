"""Every plan generates what one process generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppfleetx.commands.generate import check_plan, read_prompts
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from tests.generation.conftest import DEEPSEEK_STYLE, LLAMA_STYLE, write_run
from tests.generation.program import generate_each
from tests.helpers.ranks import Pools

ENDS = f"Generation.eos_token_id={[270, *range(60, 110)]}"
RUNS = {
    "greedy": ["Generation.decode_strategy=greedy_search"],
    "ends": [ENDS, "Generation.min_dec_len=2"],
    "beam_ends": [ENDS, "Generation.decode_strategy=beam_search", "Generation.num_beams=3"],
    "sampling": ["Generation.num_return_sequences=2", "Generation.temperature=1.5", "Generation.top_p=0.9"],
    "beam": ["Generation.decode_strategy=beam_search", "Generation.num_beams=3", "Generation.seed=null"],
    "one_prompt": ["Generation.prompt=the hat"],
    "drafts": [
        "Generation.prompt=the hat the cat the hat the",
        "Generation.decode_strategy=greedy_search",
        "Generation.max_dec_len=40",
    ],
}
STYLES = {"gpt2": {}, "llama": LLAMA_STYLE, "deepseek": DEEPSEEK_STYLE}
PLANS = {
    "dp2": ["Distributed.dp_degree=2"],
    "mp2": ["Distributed.mp_degree=2"],
    "sharding2": ["Distributed.sharding.sharding_degree=2", "Distributed.sharding.sharding_stage=2"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer) -> dict[str, Path]:
    """A checkpoint of each style and a generation YAML with five prompts of unequal length."""
    directories = {}
    for name, keys in STYLES.items():
        directory = directories[name] = tmp_path_factory.mktemp(name)
        write_run(directory, tokenizer, **keys)
        file = directory / "generation.yaml"
        sections = json.loads(file.read_text())
        prompts = ["the cat", "and", "the other hat and the ca", "é😀", "hat the cat and the other"]
        sections["Generation"] = {"prompt": prompts, "max_dec_len": 10, "seed": 7}
        sections["Engine"] = {"save_load": {"ckpt_dir": str(directory / "run")}}
        file.write_text(json.dumps(sections, ensure_ascii=False))
    return directories


def _results(file: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """The records of an output file, and apart from them the scores of beams, which plans sum differently."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    generations = [one for record in records for one in record["generations"]]
    return records, [one.pop("score") for one in generations if "score" in one]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("style", "plan"),
    [("gpt2", "dp2"), ("gpt2", "sharding2"), ("gpt2", "mp2"), ("llama", "mp2"), ("deepseek", "mp2")],
)
def test_two_ranks_generate_what_one_process_does(
    pools: Pools, runs: dict[str, Path], style: str, plan: str, tmp_path: Path
) -> None:
    config = str(runs[style] / "generation.yaml")
    expected = generate_each(config, [], RUNS, str(tmp_path / "one_"), 1)
    assert len(set(expected.values())) == len(RUNS)
    printed = pools(2).run(
        "tests.generation.program:generate_each",
        timeout=120.0,
        config=config,
        plan=PLANS[plan],
        runs=RUNS,
        output=str(tmp_path / "two_"),
        world=2,
    )
    assert printed[0] == expected
    assert '"stop"' in (tmp_path / "one_ends.jsonl").read_text()
    assert set(printed[1].values()) == {""}
    for name in RUNS:
        (one, scores), (two, found) = (
            _results(tmp_path / f"{ranks}_{name}.jsonl") for ranks in ("one", "two")
        )
        assert two == one
        assert found == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["Distributed.pp_degree=2", "Distributed.mp_degree=2"],
            "Distributed.pp_degree = 2 .* the same 8 processes with -o Distributed.pp_degree=1 "
            "-o Distributed.dp_degree=4",
        ),
        (["Distributed.sep_degree=2"], "-o Distributed.sep_degree=1 -o Distributed.dp_degree=8"),
        (
            ["Distributed.pp_degree=2", "Distributed.sep_degree=2"],
            "-o Distributed.pp_degree=1 -o Distributed.sep_degree=1 -o Distributed.dp_degree=8",
        ),
        (
            ["Distributed.mp_degree=2", "Model.sequence_parallel=True"],
            r"-o Model.sequence_parallel=False",
        ),
        (
            ["Distributed.sharding.sharding_degree=8", "Distributed.sharding.sharding_stage=3"],
            "-o Distributed.sharding.sharding_stage=1",
        ),
        (["Distributed.ep_degree=8", "Model.moe={num_experts: 8}"], "-o Distributed.ep_degree=1"),
    ],
)
def test_other_plans_are_refused_with_the_nearest_one(
    runs: dict[str, Path], overrides: list[str], words: str
) -> None:
    cfg = load_config(runs["gpt2"] / "generation.yaml", overrides, world_size=8)
    with pytest.raises(ConfigError, match=words):
        check_plan(cfg)


def test_ranks_have_no_standard_input(runs: dict[str, Path]) -> None:
    options = ["Generation.prompt=null", "Generation.prompt_file=-"]
    with pytest.raises(ConfigError, match="2 processes of a job have no standard input"):
        read_prompts(load_config(runs["gpt2"] / "generation.yaml", options, world_size=2))
