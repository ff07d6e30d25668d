"""Offline evaluation under any plan, against Hugging Face (goldens by tests/goldens/make_hf_scores.py)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from ppfleetx.checkpoint.weights import Weights
from ppfleetx.commands.evaluate import result_of, table, write
from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.conversion.convert import Conversion, convert
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from tests.commands.eval_program import CLOZE, HF, MODELS, last_words, score, sliding
from tests.conversion import hf_dirs
from tests.e2e.program import plan_overrides
from tests.helpers.ranks import Pools

TOLERANCE = 1e-6
PLANS = [
    Plan(dp=2),
    Plan(mp=2),
    Plan(pp=2),
    Plan(sep=2),
    Plan(sharding=2, sharding_stage=3),
    Plan(mp=2, sequence_parallel=True),
]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An evaluation YAML of each golden model, with its converted checkpoint."""
    place, paths = tmp_path_factory.mktemp("golden"), {}
    for name in MODELS:
        source = hf_dirs.write(place / name, name)
        convert(Conversion("hf", "ppfleetx", source, place / f"{name}_ours"))
        tree = yaml.safe_load((place / f"{name}_ours" / "config.yaml").read_text())
        tree["Global"] = {"device": "cpu", "local_batch_size": 1}
        # 97 tokens padded to 112: with mp 2 the second rank's columns are true ones and padding.
        tree["Model"] |= {"module": "GPTEvalModule", "vocab_size_divisible_unit": 16}
        tree["Engine"] = {"save_load": {"ckpt_dir": str(place / f"{name}_ours")}}
        tree["Offline_Eval"] = {"eval_path": "golden", "max_seq_len": 16, "overlapping_eval": 5}
        paths[name] = str(place / f"{name}.yaml")
        Path(paths[name]).write_text(yaml.safe_dump(tree))
    return paths


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("name", MODELS)
def test_perplexity_is_hugging_faces(configs: dict[str, str], name: str, batch_size: int) -> None:
    for num_tokens, length, stride, loss in HF["models"][name]["losses"]:
        options = {"Offline_Eval.batch_size": batch_size, "Offline_Eval.max_seq_len": length}
        options["Offline_Eval.overlapping_eval"] = stride
        found = score(configs[name], options, [num_tokens, length, stride])
        assert float(found["loss"]) == pytest.approx(loss, rel=TOLERANCE)
        assert float(found["ppl"]) == pytest.approx(math.exp(loss), rel=loss * TOLERANCE)
        ratio = (num_tokens - 1) / 6  # 7 words
        assert float(found["token_ratio"]) == ratio
        assert float(found["adjusted_ppl"]) == pytest.approx(math.exp(loss * ratio), rel=1e-3)
        assert (found["num_tokens"], found["num_words"]) == (num_tokens, 7)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("name", MODELS)
def test_last_words_are_hugging_faces(configs: dict[str, str], name: str, batch_size: int) -> None:
    examples = HF["models"][name]["cloze"]
    num_right = sum(each["right"] for each in examples)
    assert 0 < num_right < len(examples)
    found = score(configs[name], {**CLOZE, "Offline_Eval.batch_size": batch_size}, name)
    assert float(found["num_correct"]) == num_right
    assert float(found["accuracy"]) == num_right / len(examples)
    assert found["num_examples"] == len(examples)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_plans_agree_with_hugging_face(configs: dict[str, str], pools: Pools, plan: Plan) -> None:
    """28 windows and 37 examples: with most batch sizes the last batch is not full, or not on all ranks."""
    name, called = "hf_llama", "tests.commands.eval_program:score"
    num_tokens, length, stride, loss = HF["models"][name]["losses"][0]
    assert len(sliding(num_tokens, length, stride)) == 28
    right = sum(each["right"] for each in HF["models"][name]["cloze"])
    for batch_size in (1, 3, 16) if plan.dp > 1 else (3,):
        options = {**plan_overrides(plan, 1), "Offline_Eval.batch_size": batch_size}
        same = {"config": configs[name], "world": 2}
        for found in pools(2).run(called, overrides=options, case=[num_tokens, length, stride], **same):
            assert float(found["loss"]) == pytest.approx(loss, rel=TOLERANCE)
        if plan.sep == 1:
            for found in pools(2).run(called, overrides=options | CLOZE, case=name, **same):
                assert float(found["num_correct"]) == right


def spoil(config: str, target: Path, key: str, row: int) -> dict[str, Any]:
    """Overrides for a copy of the checkpoint with a NaN in ``key``, which a conversion would refuse."""
    source = Path(load_config(config).Engine.save_load.ckpt_dir)
    hf = source.parent / source.name.removesuffix("_ours")
    target.mkdir()
    weights = load_file(hf / "model.safetensors")
    weights[key] = weights[key].copy()
    weights[key][row] = np.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((hf / "config.json").read_text())
    with mock.patch.object(Weights, "finite", lambda self: self):
        convert(Conversion("hf", "ppfleetx", target, target / "ours"))
    return {"Engine.save_load.ckpt_dir": target / "ours"}


@pytest.mark.parametrize(
    ("key", "row"), [("model.norm.weight", 3), ("lm_head.weight", 1), ("lm_head.weight", 96)]
)
def test_weights_that_are_not_finite_show(
    configs: dict[str, str], pools: Pools, tmp_path: Path, key: str, row: int
) -> None:
    """A row of the head is a column of the logits: under mp the other rank has it."""
    config = configs["hf_llama"]
    spoilt = {name: str(value) for name, value in spoil(config, tmp_path / "nan", key, row).items()}
    corpus = tmp_path / "corpus"
    with IndexedDatasetWriter(corpus, np.uint16) as writer:
        writer.add_document(np.array(HF["ids"]), [len(HF["ids"])])
    on_corpus = {
        **spoilt,
        "Model.module": "GPTModule",
        "Engine.eval_iters": 1,
        "Data.Eval": f"{{dataset: {{input_dir: {corpus}, split: [0, 1, 0], max_seq_len: 16}}}}",
    }
    mp, same = {"Distributed.mp_degree": 2}, {"config": config, "world": 2}
    program = "tests.commands.eval_program:"
    for found in pools(2).run(f"{program}score", overrides=spoilt | mp, case=[150, 16, 5], **same):
        assert (found["loss"], found["ppl"]) == ("nan", "nan")
    for found in pools(2).run(f"{program}loss_on_corpus", overrides=on_corpus | mp, **same):
        assert found == "nan nan"
    found = score(config, spoilt | CLOZE, "hf_llama")
    assert (found["num_correct"], found["accuracy"]) == ("nan", "nan")


def test_results_as_table_and_json(configs: dict[str, str], tmp_path: Path) -> None:
    cfg = load_config(configs["hf_gpt2"])
    result = result_of(cfg, sliding(150, 16, 5), 149 * 2.5)
    assert [line.split() for line in table(result).splitlines()[1:-1]] == [
        ["file", "golden"],
        ["detokenizer", "none"],
        ["num", "tokens", "150"],
        ["num", "words", "7"],
        ["loss", "2.5"],
        ["ppl", "12.182494"],
        ["token", "ratio", "24.8333333"],
        ["adjusted", "ppl", f"{math.exp(2.5 * 149 / 6):.9g}"],
    ]
    write(tmp_path / "result.json", result_of(cfg, sliding(150, 16, 5), math.nan), {"step": 3})
    written = json.loads((tmp_path / "result.json").read_text())
    assert (written["kind"], written["step"], written["loss"]) == ("perplexity", 3, None)
    assert result_of(cfg, last_words("hf_gpt2"), 37 / 4).accuracy == 0.25


def test_perplexity_has_no_cap(configs: dict[str, str]) -> None:
    result = result_of(load_config(configs["hf_gpt2"]), sliding(150, 16, 5), 149 * 30.0)
    assert result.ppl == math.exp(30.0)
    assert result.adjusted_ppl == math.inf
