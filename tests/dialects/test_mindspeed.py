"""MindSpeed-Core-MS's YAML: the 38B example whole, both columns of its guide, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppfleetx.commands import mindspeed_programs as mindspeed
from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config, load_tree
from ppfleetx.dialects.megatron.dialect import of_arguments
from ppfleetx.dialects.mindspeed.dialect import TABLE, documented, of_file
from ppfleetx.dialects.mindspeed.dialect import of_arguments as of_command
from tests.dialects.test_megatron import GUIDE

PROJECT = Path(__file__).resolve().parents[2] / "projects" / "mindspeed"
EXAMPLE = PROJECT / "pretrain_gpt_38BV3.yaml"
# Second columns of the guide's five tables that differ from the first but in the section.
_RENAMED = """
model_config.vocab_size model_config.use_rotary_embedding model_config.attention_dropout_rate
model_config.hidden_dropout_rate model_config.use_flash_attention model_config.qkv_has_bias
model_config.out_proj_has_bias model_config.fa_config.pre_tokens model_config.fa_config.next_tokens
model_config.fa_config.input_layout model_config.embedding_init_dtype model_config.apply_swiglu_fusion
training_config.training_iters training_config.loss_scale_value training_config.loss_scale_factor
training_config.crc_check training_config.load_checkpoint training_config.output_dir training_config.prefix
dataset_config.batch_size optimizer_config.optimizer_type optimizer_config.betas optimizer_config.eps
optimizer_config.learning_rate
"""
RENAMED = _RENAMED.split()
FLAT = """
model_config:
  vocab_size: 416
  hidden_size: 64
  seq_length: 32
  num_layers: 4
  position_embedding_type: rope
  normalization: FusedRMSNorm
  num_attention_heads: 4
  group_query_attention: True
  num_query_groups: 2
  attention_dropout_rate: 0.0
  hidden_dropout_rate: 0.0
  ffn_hidden_size: 96
  hidden_act: swiglu
  qkv_has_bias: False
  out_proj_has_bias: False
  mlp_has_bias: False
  untie_embeddings_and_output_weights: True
  compute_dtype: float32
training_config:
  training_iters: 5
  output_dir: out
  load_checkpoint: ""
dataset_config:
  dataset_dir: d/text
  batch_size: 2
  micro_batch_num: 2
optimizer_config:
  optimizer_type: adam
  betas: [0.9, 0.95]
  learning_rate: 1.0e-3
parallel_config:
  tensor_model_parallel_size: 2
"""
SAME_AS_ARGUMENTS = (
    "--padded-vocab-size 416 --hidden-size 64 --seq-length 32 --num-layers 4 --position-embedding-type rope "
    "--normalization RMSNorm --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--attention-dropout 0 --hidden-dropout 0 --ffn-hidden-size 96 --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --train-iters 5 --save out --data-path d/text "
    "--micro-batch-size 2 --micro-batch-num 2 "
    "--adam-beta2 0.95 --lr 1e-3 --tensor-model-parallel-size 2 --eval-iters 0"
)


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "theirs.yaml").write_text(text)
    return tmp_path / "theirs.yaml"


def loaded(path: Path, *argv: str, world: int = 2):
    result = of_file(path, argv, world)
    return load_tree(result.tree(), result.warnings, world_size=world)


def refusal(path: Path, world: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(path, world=world)
    return str(caught.value)


def changed(tmp_path: Path, text: str, old: str, new: str) -> Path:
    assert old in text
    return written(tmp_path, text.replace(old, new))


def test_both_columns_of_the_guide_are_known():
    assert len(RENAMED) == 24
    assert [name for name in (*GUIDE, *RENAMED) if TABLE.find(name) is None] == []
    names = [key.name for table in documented().values() for key in table.keys]
    assert [name for name in RENAMED if name not in names] == []
    assert len(names) == len(set(names))


def test_the_38b_example(tmp_path):
    cfg = loaded(EXAMPLE, world=128)
    report = check_report(cfg)
    assert "39.1 B parameters (39,093,884,928)" in report
    assert "stages of 4+4+4+4, 4+4+4+4, 4+4+4+4, 4+4+4+2 layers" in report
    assert "dp 1, mp 8, pp 4, sharding 4 (stage 1), virtual pp 4, sequence parallel" in report
    model = cfg.Model
    assert (model.num_layers, model.sandwich_norm, model.scale_output_init) == (62, True, False)
    assert (model.embedding_std, model.initializer_range) == (0.5, 0.00884)
    assert (model.attn_post_norm_scale, model.ffn_post_norm_scale) == (0.0447, 0.0825)
    assert cfg.plan.pp_layers == (4,) * 15 + (2,)
    result = of_file(EXAMPLE, (), 128)
    assert load_config(written(tmp_path, result.yaml()), world_size=128) == cfg


def test_62_layers_in_64_places(tmp_path):
    """The other way to say it: 64 places, the last two empty."""
    text = EXAMPLE.read_text()
    listed = (
        '      layer_list: "[[4,4,4,4],[4,4,4,4],[4,4,4,4],[4,4,4,2]]"   # a row for each virtual stage\n'
    )
    assert listed in text
    text = text.replace(listed, "").replace("num_layers: 62", "num_layers: 64")
    cfg = loaded(changed(tmp_path, text, "noop_layers:\n", 'noop_layers: "62,63"\n'), world=32)
    assert (cfg.Model.num_layers, cfg.plan.pp_layers) == (62, (4,) * 15 + (2,))
    assert "(39,093,884,928)" in check_report(cfg)


def test_flat_names_arguments_and_blocks_say_the_same(tmp_path):
    flat = loaded(written(tmp_path, FLAT))
    arguments = of_arguments(SAME_AS_ARGUMENTS.split(), 2)
    args = load_tree(arguments.tree(), world_size=2).model_dump()
    expected = {
        "Global": {"seed": 1234},
        "Engine": {"logging_freq": 1, "callbacks": flat.model_dump()["Engine"]["callbacks"]},
        "Model": {"scale_output_init": False, "add_bias_linear": True, "add_qkv_bias": False,
                  "add_out_proj_bias": False, "add_mlp_bias": False},
        "Optimizer": {},
    }  # fmt: skip
    for section, values in expected.items():
        assert flat.model_dump()[section] == args[section] | values
    assert flat.model_dump()["Data"] == args["Data"]


def test_arguments_after_the_file_replace_what_it_says(tmp_path):
    cfg = loaded(written(tmp_path, FLAT), "--num-layers", "2", "--swiglu")
    assert cfg.Model.num_layers == 2
    assert cfg.origins["Model.num_layers"] == "argument 1, --num-layers"
    path = written(tmp_path, FLAT)
    words = ["msrun", "--worker_num", "4", "pretrain_gpt.py", "--yaml-cfg", str(path)]
    assert load_tree(of_command(words).tree(), world_size=4).plan.dp == 2


def test_a_section_may_stand_in_train_config(tmp_path):
    block = "train_config:\n  ms_training_config: {resume_training: True}\n  optimizer_config: {eps: 1e-6}\n"
    cfg = loaded(written(tmp_path, FLAT + block))
    assert (cfg.Engine.save_load.resume, cfg.Optimizer.epsilon) == (True, 1e-6)


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("hidden_size: 64", "hiden_size: 64", "model_config.hiden_size (theirs.yaml:4): "),
        ("num_layers: 4", "num_layers: four", "num_layers = 'four' (theirs.yaml:6): must be an integer"),
        ("compute_dtype: float32", "fp16_lm_cross_entropy: True", "the loss is always computed in float32"),
        ("batch_size: 2", "micro_batch_size: 3\n  batch_size: 2", "contradicts dataset_config.micro_batch"),
        ("betas: [0.9, 0.95]", "betas: 0.9", "must be a list of two numbers"),
        ("optimizer_type: adam", "optimizer_type: lamb", "must be one of 'adam', 'sgd'"),
        ("  learning_rate: 1.0e-3\n", "", "lr (theirs.yaml): is missing"),
        ("FusedRMSNorm", "BatchNorm", "must be one of 'RMSNorm'"),
        ("load_checkpoint: \"\"", "profile_l2_cache: True", "a hardware counter of Ascend devices"),
        ("tensor_model_parallel_size: 2", "context_parallel_size: 2\n  context_parallel_algo: hybrid_cp_algo",
         "rings and hybrids are not supported"),
        ("tensor_model_parallel_size: 2", "select_recompute: '[[1]]'\n  recompute: '[[1]]'",
         "recomputed either all in full or all in part"),
        ("load_checkpoint: \"\"", "loss_scale_factor: 4", "the loss scale is always doubled and halved"),
        ("qkv_has_bias: False", "moe_config:\n    expert_num: 8", "Did you mean model_config.moe_config."),
    ],
)  # fmt: skip
def test_refusals_name_line_and_key(tmp_path, monkeypatch, old, new, words):
    path = changed(tmp_path, FLAT, old, new)
    monkeypatch.chdir(tmp_path)
    assert words in refusal(path.relative_to(tmp_path))


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("residual-connection: bfloat16", "residual-connection: float32", "must be bfloat16"),
        ("rope, rmsnorm", "rope, layernrom", "'layernrom' is not one of"),
        ("logits_compute_dtype: float32", "logits_compute_dtype: bfloat16", "can only be 'float32'"),
        ("divided_by: 16", "divided_by: 128", "must divide by 128"),
        ("attention_type: 'GQA'", "attention_type: 'MQA'", "multi-query attention has one"),
        ("num_layers_per_vpp: 4", "num_layers_per_vpp: 3", "no chunk of the list has 3 layers as its most"),
        ("num_layers: 62", "num_layers: 61", "must add up to num_layers 61"),
    ],
)
def test_refusals_in_the_example(tmp_path, old, new, words):
    assert words in refusal(changed(tmp_path, EXAMPLE.read_text(), old, new), world=32)


@pytest.mark.parametrize(
    "lines, options",
    [
        ("load_checkpoint: c", {"init_from": "c", "ckpt_dir": None, "resume": False}),
        ("load_checkpoint: c\n  resume_training: True", {"init_from": None, "ckpt_dir": "c"}),
        ("load_checkpoint: out\n  resume_training: True", {"ckpt_dir": None, "resume": True}),
        ("crc_check: False\n  keep_checkpoint_max: 3", {"verify": False, "keep_max": 3}),
    ],
)
def test_checkpoints(tmp_path, lines, options):
    cfg = loaded(changed(tmp_path, FLAT, 'load_checkpoint: ""', lines))
    assert {key: getattr(cfg.Engine.save_load, key) for key in options} == options


def test_pretrain_gpt_looks_at_the_example(capsys, tmp_path):
    mindspeed.run(["--check", "--world-size", "64"], EXAMPLE)
    assert "39,093,884,928" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"tensor_parallel = 8 .*32 processes do not divide the 24 of the job"
    ):
        mindspeed.run(["--check", "--world-size", "24"], EXAMPLE)


def test_msrun_becomes_the_launcher(tmp_path, monkeypatch):
    started = []

    def run(command, *, env, check):
        started.append((" ".join(command[1:]), env.get("PPFLEETX_START_TIMEOUT")))
        return type("Done", (), {"returncode": 7})()

    monkeypatch.setattr(mindspeed.subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    line = (
        "--worker_num 8 --local_worker_num=8 --master_port=8848 --log_dir=msrun_log --join=True "
        "--cluster_time_out=300 pretrain_gpt.py --train-iters 3"
    )
    assert mindspeed.msrun(line.split()) == 7
    line = "--worker_num 16 --master_addr 10.0.0.1 --node_rank 1 --join True a.py"
    mindspeed.msrun(line.split())
    launcher = "-m paddle.distributed.launch --nproc_per_node 8 --log_dir msrun_log"
    assert started[0] == (f"{launcher} pretrain_gpt.py --train-iters 3", "300")
    assert "--nnodes 2 --master 10.0.0.1:8118 --rank 1" in started[1][0]
    (tmp_path / "msrun_log" / "workerlog.3").write_text("Epoch")
    assert (tmp_path / "msrun_log" / "worker_3.log").read_text() == "Epoch"
    with pytest.raises(ConfigError, match="--worker_num = 9: must be a multiple"):
        mindspeed.msrun(["--worker_num", "9", "a.py"])
