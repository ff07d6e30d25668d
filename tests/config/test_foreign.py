"""Keys and files of other toolkits: what they are called here, and which toolkit a whole file is of."""

import time

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.field_types import all_keys
from ppfleetx.config.foreign import OURS, our_key
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import RunConfig


def test_every_synonym_leads_to_a_key_and_is_none_itself():
    keys = all_keys(RunConfig)
    assert set(OURS.values()) <= set(keys)
    assert not {name for name, key in OURS.items() if name == key.rpartition(".")[2]}
    # A name of ours, elsewhere: both are suggested.
    assert our_key("--Tensor-Model-Parallel-Size") == "Distributed.mp_degree"


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("Distributed.tensor_parallel_degree=2", "Did you mean Distributed.mp_degree?"),
        ("Distributed.tensor_model_parallel_size=2", "Did you mean Distributed.mp_degree?"),
        ("Distributed.pipeline_parallel_degree=2", "Did you mean Distributed.pp_degree?"),
        ("Distributed.context_parallel_size=2", "Did you mean Distributed.sep_degree?"),
        ("Distributed.zero_stage=2", "Did you mean Distributed.sharding.sharding_stage?"),
        ("Model.n_layer=2", "Did you mean Model.num_layers?"),
        ("Model.num_key_value_heads=2", "Did you mean Model.num_query_groups?"),
        ("Model.dropout=0.1", "Did you mean"),
        ("num_hidden_layers=2", "Did you mean Model.num_layers?"),
        ("Engine.gradient_accumulation_steps=2", "Did you mean Engine.accumulate_steps?"),
        ("Engine.train_iters=2", "Did you mean Engine.max_steps?"),
        ("Optimizer.lr.warmup_ratio=0.1", "Did you mean Optimizer.lr.warmup_rate?"),
        ("Optimizer.max_grad_norm=1", "Did you mean Optimizer.grad_clip.clip_norm?"),
        ("Generation.max_new_tokens=5", "Did you mean Generation.max_dec_len?"),
        ("Distributed.sequence_parallel=True", "Did you mean Model.sequence_parallel?"),
        ("Data.batch_size=3", "Did you mean Global.local_batch_size or Offline_Eval.batch_size?"),
    ],
)
def test_names_of_other_toolkits_suggest_ours(small, override, suggestion):
    with pytest.raises(ConfigError, match="there is no such key") as caught:
        load_config(small, [override])
    assert suggestion in str(caught.value)


MEGATRON_SCRIPT = """\
#!/bin/bash
GPT_ARGS="
    --tensor-model-parallel-size 8 \\
    --num-layers 24 --hidden-size 1024 --micro-batch-size 4
"
torchrun pretrain_gpt.py $GPT_ARGS
"""

# what the file is, the text, and pieces of the message
FOREIGN = [
    (
        "Hugging Face",
        '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12}',
        ["config.json of a Hugging Face", "convert --from hf", "n_layer is Model.num_layers"],
    ),
    (
        "Hugging Face",
        '{"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 1e4, "num_key_value_heads": 1}',
        ["config.json of a Hugging Face", "rope_theta is Model.rotary_base"],
    ),
    (
        "MindFormers",
        "seed: 0\nrunner_config: {epochs: 2, batch_size: 4}\nparallel_config: {data_parallel: 2, "
        "model_parallel: 4, pipeline_stage: 2}\nmodel: {model_config: {num_layers: 12}}\n",
        ["MindFormers", "(parallel_config, runner_config, model)", "ppfleetx translate FILE"],
    ),
    (
        "MindSpeed",
        "train_config: {seed: 1}\naccelerate_config: {tensor_model_parallel_size: 2}\nmodel_config: {}\n",
        ["MindSpeed", "docs/dialects/mindspeed.md", "tensor_model_parallel_size is Distributed.mp_degree"],
    ),
    (
        "DeepSpeed",
        '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',
        ["DeepSpeed", "zero_optimization is Distributed.sharding.sharding_stage"],
    ),
    (
        "Megatron",
        "tensor_model_parallel_size: 2\npipeline_model_parallel_size: 1\ntrain_iters: 10\nseq_length: 64\n",
        ["Megatron-LM's arguments", "ppfleetx translate FILE", "train_iters is Engine.max_steps"],
    ),
    (
        "Megatron",
        '{"tensor-model-parallel-size": 2, "lr-decay-style": "cosine", "train-iters": 5}',
        ["Megatron-LM's arguments", "tensor-model-parallel-size is Distributed.mp_degree"],
    ),
    (
        "GPT-NeoX",
        '{"pipe-parallel-size": 1, "model-parallel-size": 1, "num-layers": 12, "pos-emb": "rotary"}',
        ["GPT-NeoX"],
    ),
    (
        "PaddleNLP",
        '{"model_name_or_path": "x", "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, '
        '"per_device_train_batch_size": 1, "sharding": "stage1"}',
        [
            "PaddleNLP or PaddleFormers",
            "run_pretrain.py FILE",
            "tensor_parallel_degree is Distributed.mp_degree",
        ],
    ),
    (
        "Trainer",
        "model_name_or_path: x\nfinetuning_type: lora\nper_device_train_batch_size: 1\nlogging_steps: 5\n",
        ["Hugging Face's Trainer", "logging_steps is Engine.logging_freq"],
    ),
    (
        "NeMo",
        "trainer: {max_steps: 5}\nexp_manager: {}\nmodel: {tensor_model_parallel_size: 2}\n",
        ["NeMo", "tensor_model_parallel_size is Distributed.mp_degree"],
    ),
    (
        "arguments",
        MEGATRON_SCRIPT,
        [
            "arguments of Megatron-LM",
            "translate --to OURS.yaml -- ",
            "tensor_model_parallel_size is Distributed.mp_degree",
        ],
    ),
    ("arguments", "--num-layers 2 --hidden-size 8 --seq-length 16", ["arguments of Megatron-LM"]),
    (
        "PaddleFormers",
        "model_name_or_path: x\nstage: SFT\nper_device_train_batch_size: 1\nnum_train_epochs: 1\n"
        "evaluation_strategy: steps\nlogging_steps: 1\ntensor_parallel_degree: 8\nlearning_rate: 1e-5\n",
        ["PaddleNLP or PaddleFormers", "learning_rate is Optimizer.lr.max_lr"],
    ),
    (
        "GPT-NeoX",
        '{"pipe_parallel_size": 1, "zero_optimization": {"stage": 0}, "train_micro_batch_size_per_gpu": 4, '
        '"steps_per_print": 10, "wall_clock_breakdown": true, "train_iters": 10}',
        ["GPT-NeoX", "train_iters is Engine.max_steps"],
    ),
    (
        "arguments",
        "source ascend-toolkit/set_env.sh\n" + MEGATRON_SCRIPT,
        ["arguments of MindSpeed"],
    ),
    (
        "arguments",
        MEGATRON_SCRIPT + "# MindSpeed\n",
        ["arguments of MindSpeed"],
    ),
]


@pytest.mark.parametrize(
    ("toolkit", "text", "pieces"), FOREIGN, ids=[f"{row[0]}-{i}" for i, row in enumerate(FOREIGN)]
)
def test_a_file_of_another_toolkit_is_named(write, toolkit, text, pieces):
    with pytest.raises(ConfigError) as caught:
        load_config(write("theirs.yaml", text), ["Engine.max_steps=5"])
    message = str(caught.value)
    assert "theirs.yaml" in message
    assert "there is no such key" not in message
    assert all(piece in message for piece in pieces), message
    assert len(message) < 1500


@pytest.mark.parametrize(
    "text",
    [
        "seed: 5\n",
        "num_layers: 5\nname: x\n",
        "Model: {num_layers: 2, tensor_model_parallel_size: 2}\ntrain_iters: 5\nseq_length: 4\n",
    ],
)
def test_a_file_of_ours_with_wrong_keys_is_not(write, text):
    with pytest.raises(ConfigError, match="there is no such key"):
        load_config(write("ours.yaml", text))


def test_large_texts_are_looked_at_soon(write):
    start = time.process_time()
    with pytest.raises(ConfigError, match="single value"):
        load_config(write("large.yaml", "--a-b " * 100_000))
    with pytest.raises(ConfigError, match="single value"):
        load_config(write("large.yaml", "-" * 500_000))
    assert time.process_time() - start < 5
