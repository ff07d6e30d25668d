"""Keys and files of other toolkits: what they are called here, and which toolkit a whole file is of."""

import pytest

from ppfleetx.config.field_annotations import all_keys, keys_by_foreign_name, ppfleetx_key
from ppfleetx.config.sections.root import RunConfig
from tests.config.conftest import refusal


def test_every_synonym_leads_to_a_key_and_is_none_itself():
    keys = all_keys(RunConfig)
    ours = keys_by_foreign_name()
    assert set(ours.values()) <= set(keys)
    assert not {name for name, key in ours.items() if name == key.rpartition(".")[2]}
    # A name of ours, elsewhere: both are suggested.
    assert ppfleetx_key("--Tensor-Model-Parallel-Size") == "Distributed.mp_degree"


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("Distributed.tensor_model_parallel_size=2", "Did you mean Distributed.mp_degree?"),
        ("Distributed.zero_stage=2", "Did you mean Distributed.sharding.sharding_stage?"),
        ("Model.n_layer=2", "Did you mean Model.num_layers?"),
        ("num_hidden_layers=2", "Did you mean Model.num_layers?"),
        ("Optimizer.max_grad_norm=1", "Did you mean Optimizer.grad_clip.clip_norm?"),
        ("Distributed.sequence_parallel=True", "Did you mean Model.sequence_parallel?"),
        ("Data.batch_size=3", "Did you mean Global.local_batch_size or Offline_Eval.batch_size?"),
    ],
)
def test_names_of_other_toolkits_suggest_ours(small, override, suggestion):
    message = refusal(small, [override])
    assert "there is no such key" in message and suggestion in message


# of each toolkit: a file, and what the message says of one of its keys
FOREIGN = {
    "Hugging Face": (
        '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12}',
        "n_layer is Model.num_layers",
    ),
    "MindFormers": (
        "seed: 0\nrunner_config: {epochs: 2, batch_size: 4}\nparallel_config: {data_parallel: 2, "
        "model_parallel: 4, pipeline_stage: 2}\nmodel: {model_config: {num_layers: 12}}\n",
        "pipeline_stage is Distributed.pp_degree",
    ),
    "DeepSpeed": (
        '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',
        "zero_optimization is Distributed.sharding.sharding_stage",
    ),
    "Megatron-LM": (
        '{"tensor-model-parallel-size": 2, "lr-decay-style": "cosine", "train-iters": 5}',
        "tensor-model-parallel-size is Distributed.mp_degree",
    ),
    "PaddleFormers": (
        "model_name_or_path: x\nstage: SFT\nper_device_train_batch_size: 1\nlearning_rate: 1e-5\n",
        "learning_rate is Optimizer.lr.max_lr",
    ),
}


@pytest.mark.parametrize(("text", "key"), FOREIGN.values(), ids=FOREIGN)
def test_a_file_of_another_toolkit_is_refused_as_a_whole(write, text, key):
    message = refusal(write("theirs.yaml", text), ["Engine.max_steps=5"])
    assert all(piece in message for piece in ("theirs.yaml", "ppfleetx translate", key)), message
    assert "there is no such key" not in message and len(message) < 1500


@pytest.mark.parametrize(
    "text",
    [
        "seed: 5\n",
        "num_layers: 5\nname: x\n",
        "Model: {num_layers: 2, tensor_model_parallel_size: 2}\ntrain_iters: 5\nseq_length: 4\n",
    ],
)
def test_a_file_of_ours_with_wrong_keys_is_not(write, text):
    assert "there is no such key" in refusal(write("ours.yaml", text))
