"""PaddleNLP's and PaddleFormers' pretraining arguments: what they become, and what is refused."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from ppfleetx.commands.paddleformers_programs import run as run_paddleformers
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config, load_tree
from ppfleetx.dialects.key_tables import Kind
from ppfleetx.dialects.paddleformers.dialect import TABLE, of_arguments, of_file
from tests.dialects.every_configuration import LLAMA

PROJECT = Path(__file__).resolve().parents[2] / "projects" / "paddleformers"
EXAMPLE = PROJECT / "pretrain_gpt2_medium.yaml"
NETWORK = {**LLAMA, "max_position_embeddings": 64, "rope_theta": 500000.0}
BASE = {
    "model_name_or_path": "model",
    "input_dir": "./data",
    "output_dir": "out",
    "max_steps": 10,
    "per_device_train_batch_size": 2,
    "max_seq_length": 32,
}


@pytest.fixture(autouse=True)
def network(tmp_path, monkeypatch) -> Path:
    """A directory with a Llama's config.json, from which the tests run."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(NETWORK, indent="\t"))
    return tmp_path


def loaded(world: int = 1, **keys):
    Path("theirs.yaml").write_text(yaml.safe_dump({**BASE, **keys}))
    result = of_file(Path("theirs.yaml"), (), world)
    return load_tree(result.tree(), result.warnings, world_size=world)


def refusal(world: int = 1, **keys) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(world, **keys)
    return str(caught.value)


def test_the_table_says_something_of_every_key():
    assert len(TABLE.keys) > 300
    assert sum(key.kind is Kind.MAPPED for key in TABLE.keys) > 90
    assert [key.name for key in TABLE.keys if key.kind is not Kind.MAPPED and not key.says] == []


def test_the_example(monkeypatch, tmp_path):
    monkeypatch.chdir(PROJECT)
    result = of_file(EXAMPLE, (), 8)
    cfg = load_tree(result.tree(), result.warnings, world_size=8)
    assert str(cfg.plan) == "dp 1, mp 2, pp 2, sharding 2 (stage 1), sequence parallel"
    assert (cfg.batch.global_batch_size, cfg.batch.accumulate_steps) == (8, 4)
    assert (cfg.Model.hidden_size, cfg.Model.hidden_act, cfg.Model.vocab_size) == (1024, "gelu", 50257)
    assert (cfg.Optimizer.lr.decay_style, cfg.Optimizer.lr.warmup_length) == ("cosine", 100)
    assert (cfg.Engine.eval_freq, cfg.Engine.save_load.keep_max, cfg.Engine.progress_bar) == (1000, 2, False)
    (tmp_path / "ours.yaml").write_text(result.yaml())
    assert load_config(tmp_path / "ours.yaml", world_size=8) == cfg


def test_a_llama_and_the_defaults():
    cfg = loaded()
    model = cfg.Model
    assert (model.normalization, model.hidden_act, model.kv_heads) == ("RMSNorm", "swiglu", 2)
    assert (model.rotary_base, model.tie_word_embeddings, model.add_bias_linear) == (500000.0, False, False)
    assert (cfg.Global.seed, cfg.Engine.logging_freq, cfg.batch.global_batch_size) == (42, 5, 2)
    assert (cfg.Optimizer.weight_decay, cfg.Optimizer.beta2, cfg.Optimizer.lr.max_lr) == (0.1, 0.95, 1e-5)
    assert cfg.origins["Model.num_query_groups"].endswith("config.json:10, config.json.num_key_value_heads")
    assert cfg.Data.Eval is None


def test_the_network_of_a_converted_checkpoint():
    Path("model/config.yaml").write_text(
        yaml.safe_dump({"Model": {**loaded().Model.model_dump(mode="json")}})
    )
    Path("model/config.json").unlink()
    assert loaded(continue_training=True).Model.rotary_base == 500000.0


@pytest.mark.parametrize(
    "keys, world, expected",
    [  # replicas, samples of a step, micro batches: computed by hand
        ({"gradient_accumulation_steps": 4}, 1, (1, 8, 4)),
        ({"gradient_accumulation_steps": 4}, 4, (4, 32, 4)),
        ({"tensor_parallel_degree": 2, "gradient_accumulation_steps": 3}, 4, (2, 12, 3)),
        ({"pipeline_model_parallel_size": 2, "gradient_accumulation_steps": 2}, 8, (4, 16, 2)),
        ({"sep_parallel_degree": 2}, 2, (1, 2, 1)),
        ({"sharding": "stage2", "sharding_parallel_size": 2}, 4, (4, 8, 1)),
        ({"tensor_model_parallel_size": -1, "sharding": "stage3 offload"}, 2, (2, 4, 1)),
    ],
)
def test_batches(keys, world, expected):
    cfg = loaded(world, **keys)
    batch = cfg.batch
    assert (cfg.plan.data_size, batch.global_batch_size, batch.accumulate_steps) == expected


@pytest.mark.parametrize(
    "sharding, world, expected",
    [
        ("stage1", 4, (1, 4, 1, False)),
        ("stage2 offload", 4, (2, 4, 1, True)),
        ("", 4, (1, 1, 4, False)),
    ],
)
def test_sharding(sharding, world, expected):
    found = loaded(world, sharding=sharding).Distributed
    stage, degree, dp, offload = expected
    assert (found.sharding.sharding_degree, found.dp_degree) == (degree, dp)
    assert (found.sharding.sharding_stage, found.sharding.sharding_offload) == (stage, offload)


@pytest.mark.parametrize(
    "keys, key, value",
    [
        ({"save_strategy": "no"}, "Engine.save_load.save_steps", None),
        ({"resume_from_checkpoint": "c"}, "Engine.save_load.ckpt_dir", "c"),
        ({"resume_from_checkpoint": True}, "Engine.save_load.resume", "auto"),
        ({"overwrite_output_dir": True}, "Engine.save_load.overwrite", True),
        ({"load_best_model_at_end": True, "do_eval": True}, "Engine.save_load.keep_best", "loss"),
        ({"continue_training": 1}, "Engine.save_load.init_from", "model"),
        ({"recompute_granularity": "core_attn"}, "Model.recompute_granularity", "core_attn"),
        ({"bf16": True}, "Engine.mix_precision.dtype", "bfloat16"),
        ({"bf16": True, "fp16_opt_level": "O2"}, "Engine.mix_precision.level", "O2"),
        ({"input_dir": "0.3 a 0.7 b"}, "Data.Train.dataset.input_dir", ("a", "b")),
        ({"input_dir": "0.3 a 0.7 b"}, "Data.Train.dataset.weights", (0.3, 0.7)),
        ({"warmup_steps": 3, "warmup_ratio": 0.5}, "Optimizer.lr.warmup_steps", 3),
        ({"warmup_ratio": 0.15}, "Optimizer.lr.warmup_steps", 2),
        ({"profile": True, "profile_step_start": 3}, "Profiler.scheduler", (3, 12)),
        ({"device": "cpu"}, "Global.device", "cpu"),
        ({"device": "npu"}, "Global.device", "auto"),  # the Paddle installed here has none
    ],
)
def test_single_arguments(keys, key, value):
    assert attrgetter(key)(loaded(**keys)) == value


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"tensor_paralel_degree": 2}, "Did you mean tensor_parallel_degree"),
        ({"max_steps": -1}, "must be given: a run here is as long as its steps"),
        ({"optim": "muon"}, "optim = 'muon' (theirs.yaml:"),
        ({"context_parallel_size": 2}, "ring attention is not supported"),
        ({"sharding": "stage4"}, "'stage4' is not one of"),
        ({"tensor_parallel_degree": 2, "tensor_model_parallel_size": 4}, "mp_degree: says 2 ("),
        ({"fp16": True, "bf16": True}, "a run computes in one precision"),
        ({"model_name_or_path": "gpt2-medium-en"}, "Models are not downloaded"),
        ({"learning_rate": "fast"}, "learning_rate = 'fast' (theirs.yaml:2): must be a number"),
        ({"metric_for_best_model": "accuracy"}, "is always chosen by the evaluation loss"),
        ({"tensor_parallel_degree": 3}, "heads must divide by mp_degree 3"),
    ],
)
def test_refusals_name_line_and_key(keys, words):
    assert words in refusal(3 if keys.get("tensor_parallel_degree") == 3 else 4, **keys)


def test_a_network_that_is_not_built():
    Path("model/config.json").write_text(json.dumps({**NETWORK, "model_type": "qwen3_moe"}))
    message = refusal()
    assert "config.json.model_type = 'qwen3_moe' (model/config.json:1): must be one of" in message
    assert "ppfleetx convert" in message


def test_a_mixture_of_experts_is_that_of_a_converted_checkpoint():
    moe = {"num_experts": 4, "router": {"bias": True}}
    model = {"vocab_size": 100, "hidden_size": 64, "num_layers": 4, "num_attention_heads": 4, "moe": moe}
    Path("model/config.yaml").write_text(yaml.safe_dump({"Model": model}))
    keys = {"expert_model_parallel_size": 2, "use_expert_parallel": True, "moe_router_bias_update_rate": 0.01}
    cfg = loaded(2, **keys)
    assert cfg.Distributed.ep_degree == 2
    assert (cfg.Model.moe.num_experts, cfg.Model.moe.bias_update_rate) == (4, 0.01)


def test_command_lines():
    words = [word for name, value in BASE.items() for word in (f"--{name}", str(value))]
    words += ["--do_train", "--bf16", "--sharding", "stage2 offload"]
    cfg = load_tree(of_arguments(words, 2).tree(), world_size=2)
    assert (cfg.Distributed.sharding.sharding_offload, cfg.Engine.max_steps) == (True, 10)
    Path("theirs.json").write_text(json.dumps(BASE))
    line = "python -u -m paddle.distributed.launch --nproc_per_node 2 run_pretrain.py theirs.json --seed 7"
    again = load_tree(of_arguments(line.split()).tree(), world_size=2)
    assert (again.Global.seed, again.plan.dp) == (7, 2)


def test_the_program(monkeypatch, capsys):
    monkeypatch.chdir(PROJECT)
    run_paddleformers(["--check", "--world-size", "8", EXAMPLE.name])
    assert (
        "plan           dp 1, mp 2, pp 2, sharding 2 (stage 1), sequence parallel" in capsys.readouterr().out
    )
    run_paddleformers([])
    assert "usage: run_pretrain.py" in capsys.readouterr().out


def test_keys_of_the_examples_of_today():
    cfg = loaded(stage="PT", fine_tuning="full", dataset_type="pretrain", packing=True, optim="adamw_custom")
    assert cfg.Optimizer.name == "AdamW"
    for key, value, words in (
        ("stage", "SFT", "ppfleetx finetune"),
        ("fine_tuning", "lora", "ppfleetx finetune"),
        ("train_dataset_path", "train.jsonl", "ppfleetx prepare"),
        ("offload_optim", True, "stage2 offload"),
    ):
        assert words in refusal(**{key: value})
