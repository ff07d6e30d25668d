"""Megatron's command line: what it becomes, what is refused, and in which words."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path

import pytest

from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_tree
from ppfleetx.dialects.key_tables import Kind
from ppfleetx.dialects.megatron.dialect import ALL_KEYS, FLAGS, MANY, of_arguments, of_file
from ppfleetx.optims.schedules import build_schedule

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --lr 1e-3 --data-path d/text "
    "--vocab-size 100"
)
# The first column of the five tables of MindSpeed-Core-MS's guide.
_GUIDE = """
padded_vocab_size hidden_size seq_length rotary_base num_layers position_embedding_type
use_rotary_position_embeddings init_method_std normalization norm_epsilon group_query_attention
num_attention_heads num_query_groups attention_dropout ffn_hidden_size hidden_dropout
attention_softmax_in_fp32 use_flash_attn untie_embeddings_and_output_weights transformer_impl
recompute_granularity recompute_method recompute_num_layers fp16_lm_cross_entropy
fp32_residual_connection add_qkv_bias add_dense_bias add_bias_linear use_sandwich_norm pre_tockens
next_tockens shape_order attn_post_norm_scale ffn_post_norm_scale params_dtype compute_dtype
embedding_dtype use_fused_swiglu apply_rope_fusion hidden_act seed log_interval train_iters save_interval
eval_interval accumulate_allreduce_grads_in_fp32 clip_grad bf16 fp16 loss_scale initial_loss_scale
loss_scale_window hysteresis use_distributed_optimizer resume_training resume_crc_check load save
ckpt_prefix ckpt_format keep_checkpoint_max wrap_with_ddp bucket_size enable_mem_align
overlap_grad_reduce delay_grad_reduce no_load_optim no_load_rng new_dataset profile profile_save_path
profile_step_start profile_step_end profile_level profile_with_stack profile_memory profile_framework
profile_communication profile_parallel_strategy profile_aicore_metrics profile_l2_cache profile_hbm_ddr
profile_pcie profile_data_process profile_data_simplification profile_op_time profile_offline_analyse
profile_dynamic_profiler_config_path reset_attention_mask reset_position_ids eod_mask_loss pad_token_id
eos_token_id drop_remainder micro_batch_size micro_batch_num optimizer adam_beta1 adam_beta2 adam_eps
lr_decay_style lr min_lr lr_warmup_iters lr_decay_iters use_checkpoint_opt_param_scheduler
override_opt_param_scheduler weight_decay overlap_param_gather start_weight_decay end_weight_decay
weight_decay_incr_style tensor_model_parallel_size context_parallel_size context_parallel_algo
ulysses_degree_in_cp expert_model_parallel_size virtual_pipeline_model_parallel_size
num_layers_per_virtual_pipeline_stage sequence_parallel pipeline_model_parallel_size num_layer_list
recompute select_recompute select_comm_recompute
"""
GUIDE = _GUIDE.split()


# What Megatron-LM's examples and functional tests write, and what each argument is here, read side by side:
# arguments, processes, values by our key.
SOURCES = {
    "Llama 3 8B": (
        """
        --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
        --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent
        1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm --init-method-std
        0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
        --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
        --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
        --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
        --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
        --tensor-model-parallel-size 1 --context-parallel-size 2 --sequence-parallel
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --data-path d
        --tokenizer-type NullTokenizer --vocab-size 128255 --num-workers 1 --no-mmap-bin-files --split 99,1,0
        --no-create-attention-mask-in-dataloader --log-interval 1 --eval-iters 32 --eval-interval 100
        """,
        8,
        {
            "plan": "dp 1, mp 1, pp 1, sharding 4 (stage 1), sep 2",
            "batch.accumulate_steps": 32,
            "Model.vocab_size": 128256,
            "Model.kv_heads": 8,
            "Model.head_size": 128,
            "Model.rotary_base": 1e6,
            "Model.normalization": "RMSNorm1P",
            "Model.hidden_act": "swiglu",
            "Model.has_mlp_bias": False,
            "Model.tie_word_embeddings": False,
            "Model.sequence_parallel": False,
            "Model.attention_kernel": "auto",
            "Engine.max_steps": 15258789,
            "Optimizer.lr.decay_steps": 15228271,
            "Optimizer.lr.warmup_length": pytest.approx(3906252 / 128, abs=1e-9),
        },
    ),
    "15B": (
        """
        --disable-bias-linear --squared-relu --rotary-percent 0.5 --position-embedding-type rope
        --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --num-layers 32
        --hidden-size 6144 --num-attention-heads 48 --seq-length 4096 --max-position-embeddings 4096
        --tensor-model-parallel-size 8 --sequence-parallel --use-distributed-optimizer --micro-batch-size 4
        --global-batch-size 1152 --train-samples 1152000 --lr 4.5e-4 --min-lr 4.5e-5 --lr-warmup-samples 11520
        --data-path 0.3 a 0.7 b --vocab-size 256000 --save-interval 1000 --save-retain-interval 5000 --bf16
        """,
        64,
        {
            "plan": "dp 1, mp 8, pp 1, sharding 8 (stage 1), sequence parallel",
            "batch.accumulate_steps": 36,
            "Model.hidden_act": "relu2",
            "Model.rotary_size": 64,
            "Model.kv_heads": 8,
            "Engine.max_steps": 1000,
            "Engine.save_load.keep_max": None,
            "Optimizer.lr.warmup_length": 10,
            "Optimizer.lr.decay_steps": 1000,
            "Data.Train.dataset.weights": (0.3, 0.7),
        },
    ),
}


def loaded(more: str = "", *, without: str = "", world: int | None = 1):
    words = BASE.split()
    for name in without.split():
        at = words.index(name)
        del words[at : at + 2]
    result = of_arguments([*words, *more.split()], world)
    return load_tree(result.tree(), result.warnings, world_size=world)


def refusal(more: str, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(more, **options)
    return str(caught.value)


def deepspeed_file(tmp_path: Path, **keys) -> Path:
    text = json.dumps(keys, indent="\t")
    (tmp_path / "ds.json").write_text(text)
    return tmp_path / "ds.json"


def test_every_argument_of_the_guide_has_an_entry():
    assert len(GUIDE) == 125
    assert [name for name in GUIDE if ALL_KEYS.find(name) is None] == []
    assert [name for name in (*FLAGS, *MANY) if ALL_KEYS.find(name) is None] == []
    assert [key.name for key in ALL_KEYS.keys if key.kind is not Kind.MAPPED and not key.says] == []


@pytest.mark.parametrize("name", SOURCES)
def test_what_published_runs_write(name):
    arguments, world, expected = SOURCES[name]
    result = of_arguments(arguments.split(), world)
    cfg = load_tree(result.tree(), result.warnings, world_size=world)
    found = {key: attrgetter(key)(cfg) for key in expected}
    if "plan" in found:
        found["plan"] = check_report(cfg).splitlines()[0].split(maxsplit=1)[1]
    assert found == expected


@pytest.mark.parametrize(
    "arguments, world, expected",
    [  # replicas, samples per replica and step, micro batches: computed by hand
        ("--micro-batch-size 2 --global-batch-size 8", 1, (1, 8, 4)),
        ("--micro-batch-size 2 --global-batch-size 8", 4, (4, 2, 1)),
        ("--micro-batch-size 2", 4, (4, 2, 1)),  # no global batch: a micro batch of each replica
        ("--micro-batch-size 2 --micro-batch-num 3", 2, (2, 6, 3)),
        ("--micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 2", 4, (2, 4, 4)),
        ("--micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2", 8, (4, 2, 2)),
        ("--micro-batch-size 2 --global-batch-size 8 --context-parallel-size 2", 4, (2, 4, 2)),
        ("--micro-batch-size 2 --global-batch-size 8 --use-distributed-optimizer", 4, (4, 2, 1)),
        ("--micro-batch-size 2 --global-batch-size 8 --deepspeed --zero-stage 2", 2, (2, 4, 2)),
    ],
)
def test_batches_are_megatrons(arguments, world, expected):
    cfg = loaded(arguments, without="--micro-batch-size --global-batch-size", world=world)
    batch = cfg.batch
    assert (cfg.plan.data_size, batch.local_batch_size, batch.accumulate_steps) == expected
    assert cfg.plan.world_size == world


@pytest.mark.parametrize(
    "arguments, key, value",
    [
        ("--swiglu", "hidden_act", "swiglu"),
        ("--swiglu", "ffn_size", 128),
        ("--squared-relu", "hidden_act", "relu2"),
        ("--qk-layernorm", "qk_layernorm", True),
        ("--no-bias-gelu-fusion", "hidden_act", "gelu_exact"),
        ("--disable-bias-linear", "hidden_act", "gelu_exact"),
        ("--disable-bias-linear --swiglu", "hidden_act", "swiglu"),
        ("", "hidden_act", "gelu"),
        ("--use-rotary-position-embeddings --no-position-embedding", "position_embedding_type", "rope"),
        ("--no-position-embedding", "position_embedding_type", "none"),
        ("--group-query-attention --num-query-groups 2", "kv_heads", 2),
        ("--group-query-attention", "kv_heads", 1),
        ("--num-query-groups 2", "kv_heads", 4),
        ("--untie-embeddings-and-output-weights", "tie_word_embeddings", False),
        ("--disable-bias-linear --add-qkv-bias", "has_qkv_bias", True),
        ("--disable-bias-linear", "has_mlp_bias", False),
        ("--tensor-model-parallel-size 2", "padded_vocab_size", 256),
        ("--make-vocab-size-divisible-by 1", "padded_vocab_size", 100),
        ("--padded-vocab-size 120", "padded_vocab_size", 120),
        ("--tokenizer-type NullTokenizer", "vocab_size", 101),
        ("--window-size (16,0)", "attention_window", 16),
        ("--window-size (-1,0)", "attention_window", None),
        ("--pre-tockens 65536 --next-tockens 0", "attention_window", None),
        ("--pre-tockens 8", "attention_window", 8),
        ("--position-embedding-type rope --rotary-percent 0.5", "rotary_size", 8),
        ("--init-method-std 0.5", "initializer_range", 0.5),
        ("--embedding-init-method-std 0.5", "embedding_std", 0.5),
        ("--apply-layernorm-1p --expert-tensor-parallel-size 4", "normalization", "LayerNorm1P"),
        ("--normalization rmsnorm", "normalization", "RMSNorm"),
        ("--position-embedding-type alibi", "position_embedding_type", "alibi"),
        (
            "--use-alibi-position-embeddings --no-position-embedding --no-query-key-layer-scaling",
            "position_embedding_type",
            "alibi",
        ),
        ("--embed-layernorm --layernorm-epsilon 1e-5", "embedding_norm", True),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2",
            "virtual_pp_degree",
            2,
        ),
        ("--noop-layers 3", "num_layers", 3),
        ("--sequence-parallel", "sequence_parallel", False),
        ("--sequence-parallel --tensor-model-parallel-size 2", "sequence_parallel", True),
    ],
)
def test_the_network(arguments, key, value):
    world = 2 if "parallel-size" in arguments else 1
    assert getattr(loaded(arguments, world=world).Model, key) == value


def test_stretched_positions():
    linear = loaded(
        "--position-embedding-type rope --rotary-seq-len-interpolation-factor 4"
    ).Model.rope_scaling
    assert (linear.type, linear.factor) == ("linear", 4.0)
    llama = loaded("--position-embedding-type rope --use-rope-scaling").Model.rope_scaling
    assert (llama.type, llama.factor, llama.original_max_position_embeddings) == ("llama3", 8.0, 8192)


@pytest.mark.parametrize(
    "arguments, layers",
    [
        ("", []),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", [0, 1, 2, 3]),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", [0, 2]),
        ("--recompute-activations", [0, 1, 2, 3]),
        ("--recompute [1,2]", [0, 2, 3]),
        ("--num-layer-list 3,1 --recompute [[2,1]]", [0, 1, 3]),
        ("--noop-layers 0 --recompute [1,1]", [0, 1]),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", []),
    ],
)
def test_what_is_recomputed(arguments, layers):
    cfg = loaded(f"--pipeline-model-parallel-size 2 {arguments}", world=2)
    assert sorted(cfg.Model.recomputed_layers()) == layers
    if layers:
        selective = "activations" in arguments
        assert cfg.Model.recompute_granularity == ("core_attn" if selective else "full")


@pytest.mark.parametrize(
    "arguments, chunks",
    [
        ("--num-layer-list 3,1", (3, 1)),
        ("--num-layer-list [[1,1],[2,0]]", (1, 1, 2, 0)),
        ("--num-layer-list [1,1],[2,0]", (1, 1, 2, 0)),
        ("--decoder-first-pipeline-num-layers 1", (1, 3)),
        ("--decoder-last-pipeline-num-layers 1", (3, 1)),
        ("--noop-layers 3", (2, 1)),
        (
            "--num-virtual-stages-per-pipeline-rank 3 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            (0, 1, 1, 1, 1, 0),
        ),
    ],
)
def test_layers_of_stages(arguments, chunks):
    cfg = loaded(f"--pipeline-model-parallel-size 2 {arguments}", world=2)
    assert cfg.plan.pp_layers == chunks


def test_schedules():
    lr = loaded("--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2 --min-lr 1e-5").Optimizer.lr
    assert (lr.decay_style, lr.wsd_decay_steps, lr.warmup_length, lr.decay_steps) == ("wsd", 3, 2, 10)
    samples = loaded(
        "--train-samples 803 --lr-decay-samples 400 --lr-warmup-samples 16", without="--train-iters"
    )
    assert samples.Engine.max_steps == 100
    assert (samples.Optimizer.lr.decay_steps, samples.Optimizer.lr.warmup_length) == (50, 2)
    length = "--train-samples 803"
    lr = loaded(
        f"{length} --lr-decay-samples 403 --lr-warmup-samples 20", without="--train-iters"
    ).Optimizer.lr
    assert (lr.decay_steps, lr.warmup_length) == (50, 2.5)
    lr = loaded(
        f"{length} --lr-decay-style WSD --lr-wsd-decay-samples 80", without="--train-iters"
    ).Optimizer.lr
    assert lr.wsd_decay_steps == 10
    course = loaded("--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.2")
    assert course.Optimizer.weight_decay_schedule.style == "cosine"
    plain = loaded().Optimizer
    assert (plain.lr.decay_style, plain.weight_decay, plain.name) == ("linear", 0.01, "AdamW")


@pytest.mark.parametrize(
    ("lengths", "warmup", "decay"),
    [
        ("--lr-warmup-samples 13 --lr-decay-samples 333", 13, 333),
        ("--lr-warmup-fraction 0.05 --min-lr 1e-4", 0.05 * 403, 403),
    ],
)
def test_the_rates_of_a_batch_that_grows_are_those_of_megatron(lengths, warmup, decay):
    cfg = loaded(f"--rampup-batch-size 2 2 50 --train-samples 403 {lengths}", without="--train-iters")
    assert cfg.Global.rampup_batch_size == (2, 2, 50)
    lr = cfg.Optimizer.lr
    schedule = build_schedule(cfg.Optimizer, lr.in_units(cfg.Engine.max_steps, cfg.batch))
    samples = steps = 0
    while True:  # Megatron-LM's calculator of batch sizes, and its scheduler after each update
        size = 8 if samples > 50 else 2 + 2 * int(samples / (50 / 3))
        if samples + size > 403:
            break
        samples, steps = samples + size, steps + 1
        part = 1 - (samples - warmup) / (decay - warmup)
        rate = 1e-3 * samples / warmup if samples <= warmup else lr.min_lr + (1e-3 - lr.min_lr) * max(0, part)
        assert cfg.batch.consumed_after(steps) == samples
        assert schedule.lr(schedule.position(steps=steps, samples=samples)) == pytest.approx(rate, rel=1e-9)
    assert cfg.Engine.max_steps == steps


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("2 2 50 --lr-decay-iters 40", "give --lr-decay-samples"),
        ("2 2 50 --lr-warmup-iters 4", "give --lr-warmup-samples"),
        ("2 2", "must be three numbers"),
        ("2 4 50", "from 2 to the global batch of 8 by 4"),
        ("3 1 50", "which is not a multiple of micro_batch_size"),
    ],
)
def test_what_a_growing_batch_cannot_be(arguments, words):
    assert words in refusal(f"--train-samples 403 --rampup-batch-size {arguments}", without="--train-iters")


def test_data():
    one = loaded("--split 949,50,1").Data
    assert (one.Train.dataset.input_dir, one.Eval.dataset.split) == ("d/text", "949,50,1")
    blend = loaded("--data-path 0.3 a 0.7 b", without="--data-path").Data.Train.dataset
    assert (blend.input_dir, blend.weights) == (("a", "b"), (0.3, 0.7))
    every = loaded("--data-path a b c", without="--data-path").Data.Train.dataset
    assert (every.input_dir, every.weights, every.blend) == (("a", "b", "c"), None, "exhaustive")
    apart = loaded("--train-data-path a --valid-data-path b", without="--data-path").Data
    assert (apart.Train.dataset.split, apart.Eval.dataset.split) == ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
    cached = loaded("--data-cache-path c").Data
    assert [section.dataset.cache_dir for section in (cached.Train, cached.Eval)] == ["c", "c"]
    assert loaded("--eval-iters 0").Data.Eval is None
    assert loaded("--split 100,0,0").Data.Eval is None


def test_a_pair_is_named_and_a_directory_is_none(tmp_path):
    assert "name the pair" in refusal(f"--data-path {tmp_path}", without="--data-path")


def test_vocabulary_files(tmp_path):
    words = {f"w{number}": number for number in range(77)}
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(words))
    (tmp_path / "gpt2-merges.txt").write_text("#version: 0.2\n")
    names = f"--vocab-file {tmp_path}/gpt2-vocab.json --merge-file {tmp_path}/gpt2-merges.txt"
    cfg = loaded(names, without="--vocab-size")
    assert (cfg.Model.vocab_size, cfg.Data.tokenizer.vocab_file) == (77, f"{tmp_path}/gpt2-vocab.json")
    own = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    for added, size in (([{"id": 90}], 91), (None, 77)):
        (tmp_path / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": words}, "added_tokens": added})
        )
        cfg = loaded(own, without="--vocab-size")
        assert (cfg.Model.vocab_size, cfg.Data.tokenizer.dir) == (size, str(tmp_path))
    for damaged in ("[[[[", '{"model": {"vocab": 5}}', '{"model": {"vocab": {}}, "added_tokens": [{}]}'):
        (tmp_path / "gpt2-vocab.json").write_text(damaged)
        assert "not a vocabulary in JSON" in refusal(names, without="--vocab-size")


def test_arguments_of_mindspeed_llm(tmp_path):
    words = {f"w{number}": number for number in range(77)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    cfg = loaded(
        "--position-embedding-type rope --rope-scaling-type llama3 --rope-scaling-factor 32 "
        "--low-freq-factor 1 --high-freq-factor 4 --original-max-position-embeddings 16 "
        f"--tokenizer-type PretrainedFromHF --tokenizer-name-or-path {tmp_path} "
        "--ai-framework mindspore --swap-optimizer --mla-fa-without-pad "
        "--handler-name GeneralPretrainHandler --qk-layernorm "
        "--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec",
        without="--vocab-size",
    )
    assert (cfg.Model.vocab_size, cfg.Data.tokenizer.dir) == (77, str(tmp_path))
    scaling = cfg.Model.rope_scaling
    assert (scaling.type, scaling.factor, scaling.original_max_position_embeddings) == ("llama3", 32, 16)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--spec my.module my_spec", "custom layers"),
        ("--rope-scaling-type yarn", "must be one of 'llama3'"),
        ("--rope-scaling-type llama3 --rope-scaling-factor 8", "needs --low-freq-factor, --high-freq-factor"),
        ("--rope-scaling-type llama3 --use-rope-scaling", "only one kind of rope scaling"),
        ("--enable-hf2mg-convert", "ppfleetx convert --from hf"),
        ("--handler-name AlpacaStyleInstructionHandler", "ppfleetx finetune"),
        ("--no-shared-storage", "the same output directory"),
        ("--o2-optimizer", "always float32"),
        ("--foo --bar 1 --baz=2", "Also unknown: --bar, --baz"),
    ],
)
def test_what_is_refused_of_mindspeed_llm(arguments, words):
    assert words in refusal(arguments)


@pytest.mark.parametrize(
    "arguments, options",
    [
        ("--save a --load a", {"resume": "auto", "ckpt_dir": None}),
        ("--save a --load ./a/", {"resume": "auto", "ckpt_dir": None}),
        ("--save a --load b", {"resume": False, "ckpt_dir": "b"}),
        ("--save a --load b --finetune", {"init_from": "b", "ckpt_dir": None}),
        ("--save a --resume-training", {"resume": True}),
        ("--save a --no-load-optim --no-load-rng", {"load_optim": False, "load_rng": False}),
        ("--save a", {"save_steps": None, "output_dir": "a", "resume": False}),
        ("--save a --save-interval 5 --keep-checkpoint-max 2", {"save_steps": 5, "keep_max": 2}),
        ("--override-opt-param-scheduler", {"lr_schedule": "config"}),
    ],
)
def test_checkpoints(arguments, options):
    found = loaded(arguments).Engine.save_load
    assert {key: getattr(found, key) for key in options} == options


def test_precision(monkeypatch):
    on_cpu = of_arguments([*BASE.split(), "--bf16"])
    assert on_cpu.native["Engine.mix_precision.enable"].value == "auto"
    monkeypatch.setattr("ppfleetx.dialects.megatron.training_rules.expected_device", lambda wanted: "gpu")
    assert not loaded().Engine.mix_precision.enable
    half = loaded("--fp16").Engine.mix_precision
    assert (half.dtype, half.level) == ("float16", "O2")
    assert (half.scale_loss, half.use_dynamic_loss_scaling) == (2**32, True)
    constant = loaded("--fp16 --loss-scale 1024").Engine.mix_precision
    assert (constant.scale_loss, constant.use_dynamic_loss_scaling) == (1024.0, False)
    assert loaded("--params-dtype float32 --compute-dtype bfloat16").Engine.mix_precision.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "here", "device"),
    [
        ("--distributed-backend hccl", ["npu"], "npu"),
        ("--device-target Ascend", ["npu"], "npu"),
        ("--device-target CPU", ["npu"], "cpu"),
        ("--distributed-backend nccl", ["npu"], "auto"),
        ("--distributed-backend hccl", [], "auto"),
    ],
)
def test_ports_to_ascend_name_the_device(monkeypatch, arguments, here, device):
    monkeypatch.setattr("ppfleetx.utils.device_support._kinds_of_cards", lambda: here)
    assert loaded(arguments).Global.device == device


def test_sharding(tmp_path):
    zero = loaded("--use-distributed-optimizer", world=4).Distributed
    assert (zero.sharding.sharding_degree, zero.sharding.sharding_stage, zero.dp_degree) == (4, 1, 1)
    for words, stage in (
        ("--use-torch-fsdp2", 3),
        ("--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads", 2),
    ):
        assert loaded(words, world=4).Distributed.sharding.sharding_stage == stage
    ds = deepspeed_file(tmp_path, zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}})
    three = loaded(f"--deepspeed --deepspeed_config {ds}", world=2).Distributed.sharding
    assert (three.sharding_stage, three.sharding_offload) == (3, True)
    unknown = of_arguments([*BASE.split(), "--use-distributed-optimizer"])
    assert any("whose number is not known" in note for note in unknown.notes)


@pytest.mark.parametrize(
    "line, world",
    [
        ("torchrun --nproc_per_node 4 --nnodes 2 pretrain_gpt.py", 8),
        ("python -m torch.distributed.launch --nproc_per_node=4 pretrain_gpt.py", 4),
        ("deepspeed --num_gpus 2 pretrain_gpt.py", 2),
        ("pretrain_gpt.py", None),
    ],
)
def test_a_launcher_in_front_says_how_many(line, world, monkeypatch):
    monkeypatch.delenv("PADDLE_TRAINERS_NUM", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = of_arguments([*line.split(), *BASE.split(), "--use-distributed-optimizer"])
    found = result.native.get("Distributed.sharding.sharding_degree")
    assert (None if found is None else found.value) == world


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            "--num-experts 8 --moe-apply-probs-on-input",
            "can only be False: the router's weights always multiply the outputs",
        ),
        (
            "--num-experts 8 --moe-layer-freq [x]*4",
            "--moe-layer-freq = '[x]*4' (argument 25): must be an integer",
        ),
        ("--num-experts 8 --moe-layer-freq [1]*3", "must have a 0 or a 1 for each of the 4 layers"),
        (
            "--num-experts 8 --moe-router-load-balancing-type sinkhorn",
            "must be one of 'aux_loss', 'seq_aux_loss'",
        ),
        ("--num-experts 8 --moe-aux-loss-coeff 1e-2 1e-3", "must name one balancing loss"),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 6",
            "best 3 experts",
        ),
        ("--num-experts 8 --moe-router-score-function sqrtsoftplus", "must be one of 'softmax', 'sigmoid'"),
        ("--num-experts 8 4", "must be the same number for all layers"),
        ("--num-experts 4 --mlp-type residual", "can only be 'standard'"),
        ("--num-experts 4 --moe-use-upcycling", "ppfleetx upcycle"),
        ("--num-experts 8 --num-tokens-to-generate 9", "--num-tokens-to-generate = 9"),
        ("--fp8-format hybrid --num-tokens-to-generate 9", "--num-tokens-to-generate = 9"),
        ("--fim-data --fim-rate 0.5", "--fim-data"),
        (
            "--account-for-loss-in-pipeline-split --pipeline-model-parallel-size 2",
            "5 layers and ends do not divide by 2 chunks",
        ),
        ("--tensor-modell-parallel-size 2", "Did you mean tensor_model_parallel_size"),
        ("--num-layers 6", "is already given (argument 1)"),
        ("--rampup-batch-size 2 2 100", "counts samples, so the length of the run must too"),
        ("--lr-decay-tokens 1000", "lengths are given in steps: use --train-iters"),
        ("--fp16 --bf16", "a run computes in one precision"),
        ("--bf16 --fp32-residual-connection", "adds the branches of a block in 16 bits too"),
        ("--fp16-lm-cross-entropy", "the loss is always computed in float32"),
        ("--position-embedding-type yarn", "must be one of 'learned_absolute', 'rope', 'alibi', 'none'"),
        ("--use-alibi-position-embeddings", "biases of layer n are n times as steep"),
        (
            "--position-embedding-type alibi --use-rotary-position-embeddings",
            "Model.position_embedding_type: says 'rope' (",
        ),
        ("--embed-layernorm --norm-epsilon 1e-6", "--embed-layernorm = True"),
        ("--embed-layernorm --normalization RMSNorm", "is always a LayerNorm with epsilon 1e-5"),
        ("--optimizer sgd", "give --sgd-momentum 0"),
        ("--optimizer lion", "must be one of 'adam', 'sgd'"),
        ("--optimizer-cpu-offload --lr-warmup-iters 1", "Distributed.sharding.sharding_offload"),
        ("--use-custom-fsdp", "give its present name, --use-megatron-fsdp"),
        ("--data-args-path blend.txt", "--data-path $(cat FILE)"),
        ("--sft", "ppfleetx finetune"),
        ("--softmax-type learnable", "can only be 'vanilla'"),
        ("--context-parallel-size 2 --context-parallel-algo megatron_cp_algo", "must be ulysses_cp_algo"),
        ("--context-parallel-size 2 --cp-comm-type p2p", "must be a2a"),
        ("--num-layer-list 2,x", "must be a list of numbers"),
        ("--num-layer-list [2,2", "must be a list of numbers"),
        ("--num-layer-list 2,1 --pipeline-model-parallel-size 2", "must add up to num_layers 4"),
        ("--noop-layers 9", "place 9 does not exist"),
        ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", "give the warm-up once"),
        ("--swiglu --squared-relu", "Model.hidden_act: says 'relu2' ("),
        ("--global-batch-size=9", "is already given"),
        ("--zero-stage 4", "must be 0, 1, 2 or 3"),
        ("--weight-decay-incr-style linear", "needs start_weight_decay"),
        ("--recompute-granularity selective --recompute-method block", "has no method"),
        ("stray", "is not an option"),
        ("--seed", "needs a value"),
        ("--hidden-dropout x", "--hidden-dropout"),
        ("--deepspeed_config no/such.json", "there is no such file"),
    ],
)
def test_refusals_name_the_argument_and_the_rule(arguments, words):
    assert words in refusal(arguments, world=2 if "context" in arguments or "list 2,1" in arguments else 1)


def test_what_is_missing_is_named():
    assert refusal("", without="--num-layers --lr") == (
        "--num-layers (the command line): is missing, and so are --lr"
    )


def test_deepspeeds_file_is_refused_by_line_and_key(tmp_path):
    ds = deepspeed_file(tmp_path, train_batch_size=16, fp16={"enabled": True})
    assert "Global.global_batch_size: says 16" in refusal(f"--deepspeed --deepspeed_config {ds}")
    ds = deepspeed_file(tmp_path, zero_optimization={"stage": 1, "mistake": 1}, fp17={"enabled": True})
    message = refusal(f"--deepspeed --deepspeed_config {ds}")
    assert "deepspeed_config.fp17.enabled (" in message
    assert "ds.json:7)" in message
    assert "Did you mean deepspeed_config.fp16.enabled" in message
    ds = deepspeed_file(tmp_path, optimizer={"type": "Adam", "params": {"lr": 1}})
    assert "remove this block from the file" in refusal(f"--deepspeed --deepspeed_config {ds}")


def curriculum(tmp_path: Path, **other) -> str:
    """Arguments with DeepSpeed's curriculum by length, changed in ``other``."""
    keys = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 8},
    }
    kept = {name: value for name, value in (keys | other).items() if value is not None}
    return f"--deepspeed --deepspeed_config {deepspeed_file(tmp_path, curriculum_learning=kept)}"


def test_sequences_grow_a_step_later_than_deepspeeds(tmp_path):
    cfg = loaded(curriculum(tmp_path))
    assert cfg.Global.rampup_seq_len == (8, 8, 48)
    found = [cfg.batch.lengths.size_at(8 * step) for step in range(8)]
    # What DeepSpeed's CurriculumScheduler answers to steps 1 to 8 of this schedule.
    assert found[1:] == [8, 16, 16, 24, 24, 32, 32, 32][:-1]
    root = {"total_curriculum_step": 6, "difficulty_step": 8, "root_degree": 2}
    off = curriculum(tmp_path, enabled=False, schedule_type="fixed_root", schedule_config=root)
    assert loaded(off).Global.rampup_seq_len is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"schedule_type": "fixed_root"}, "must be fixed_linear: sequences grow in equal parts"),
        ({"curriculum_type": "vocab"}, "must be one of 'seqlen'"),
        (
            {"min_difficulty": 12},
            "must be a multiple of deepspeed_config.curriculum_learning.sched",
        ),
        ({"max_difficulty": 24}, "must be --seq-length"),
        ({"min_difficulty": 32}, "cannot grow from 32 to 32"),
        ({"schedule_config": {"difficulty_step": 8}}, "needs deepspeed_config.curriculum_learning.schedule"),
        ({"pacing": 1}, "curriculum_learning.pacing"),
    ],
)
def test_other_curricula_are_refused(other, words, tmp_path):
    assert words in refusal(curriculum(tmp_path, **other))


def test_a_curriculum_needs_the_global_batch(tmp_path):
    assert "give --global-batch-size" in refusal(curriculum(tmp_path), without="--global-batch-size")


def test_a_file_of_arguments(tmp_path):
    words = BASE.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    (tmp_path / "args.yaml").write_text(
        "MODEL_ARGS:\n" + "".join(f"  {name}: {value}\n" for name, value in pairs)
    )
    result = of_file(tmp_path / "args.yaml", ["--seed", "7"])
    cfg = load_tree(result.tree(), result.warnings)
    assert (cfg.Model.num_layers, cfg.Global.seed) == (4, 7)
    assert cfg.origins["Model.num_layers"] == f"{tmp_path}/args.yaml:2, --num-layers"


@pytest.mark.parametrize(
    "lines, seed",
    [
        (("--seed: 7", "--seed: 7"), 7),
        (("<<: *base",), 8),
        (("<<: [*base, {--seed: 5}]",), 8),
        (("<<: *base", "--seed: 9"), 9),
        (("--seed: 7", "--seed: 6"), "MODEL_ARGS.--seed ({file}:17): is given twice"),
        (("<<: 3",), "MODEL_ARGS.<< ({file}:16): must name a mapping"),
        (("trainer.num_nodes: 1",), "trainer.num_nodes ({file}:16): Megatron has no such key"),
    ],
)
def test_a_file_is_read_as_its_own_loader_does(lines, seed, tmp_path):
    words = BASE.split()
    pairs = [f"{name}: {value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    text = "\n  ".join(["BASE: &base", "--seed: 8", "--bf16: false\nMODEL_ARGS:", *pairs, *lines])
    file = tmp_path / "args.yaml"
    file.write_text(text)
    if isinstance(seed, int):
        result = of_file(file, [])
        assert load_tree(result.tree(), result.warnings).Global.seed == seed
    else:
        with pytest.raises(ConfigError) as caught:
            of_file(file, [])
        assert seed.format(file=file) in str(caught.value)


@pytest.mark.parametrize("program", ["pretrain_bert.py", "examples/t5/pretrain_t5.py", "pretrain_mamba.py"])
def test_programs_of_other_models_are_refused(program):
    with pytest.raises(ConfigError, match=program.rpartition("/")[2]):
        of_arguments([program, *BASE.split()], 1)


EXPERTS = {
    "defaults": ("--num-experts 4", {"top_k": 2, "aux_loss.kind": "none", "capacity": None}),
    "DeepSeek": (
        """
        --num-experts 8 --moe-layer-freq ([0]*1+[1]*3) --moe-ffn-hidden-size 24 --moe-router-topk 4
        --moe-shared-expert-intermediate-size 48 --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2
        --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss
        --moe-aux-loss-coeff 1e-4 --moe-router-dtype fp32 --moe-grouped-gemm --moe-permute-fusion
        """,
        {
            "first_dense_layers": 1, "expert_ffn_size": 24, "shared_experts.ffn_size": 48, "top_k": 4,
            "router.score": "sigmoid", "router.normalize": True, "router.bias": True, "router.scale": 2.5,
            "router.num_groups": 4, "router.top_groups": 2, "router.group_score": "top2",
            "bias_update_rate": 1e-3, "aux_loss.kind": "sequence", "aux_loss.weight": 1e-4,
        },
    ),
    "capacity": (
        """
        --num-experts 4 --moe-layer-freq 2 --moe-router-pre-softmax --moe-expert-capacity-factor 1.5
        --moe-token-drop-policy position --moe-pad-expert-input-to-capacity --moe-z-loss-coeff 1e-3
        --moe-aux-loss-coeff 1e-2 --moe-input-jitter-eps 0.01
        """,
        {
            "layers": (0, 2), "router.normalize": False, "capacity.factor": 1.5,
            "capacity.policy": "position", "z_loss_weight": 1e-3, "aux_loss.kind": "switch",
            "router.jitter": 0.01,
        },
    ),
    "Megatron-DeepSpeed": (
        "--deepspeed --num-experts 4 --topk 1",
        {
            "layers": (1, 3), "top_k": 1, "router.normalize": False, "aux_loss.kind": "switch",
            "aux_loss.weight": 0.1, "capacity.factor": 1.0, "capacity.policy": "position",
        },
    ),
    "Megatron-DeepSpeed without drops": (
        "--num-experts 4 --topk 2 --disable-moe-token-dropping --moe-loss-coeff 0.01 --expert-interval 1",
        {"layers": None, "capacity": None, "aux_loss.kind": "gshard", "router.normalize": True},
    ),
    "MindSpeed": (
        "--num-experts 4 --first-k-dense-replace 2 --n-shared-experts 2 --moe-ffn-hidden-size 8 --seq-aux "
        "--moe-aux-loss-coeff 0.1 --norm-topk-prob --moe-router-pre-softmax",
        {
            "first_dense_layers": 2, "shared_experts.ffn_size": 16, "aux_loss.kind": "sequence",
            "router.normalize": True,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_mixtures_of_experts(name):
    arguments, values = EXPERTS[name]
    moe = loaded(arguments).Model.moe
    assert {key: attrgetter(key)(moe) for key in values} == values


@pytest.mark.parametrize(
    ("arguments", "degrees"),
    [
        ("--expert-model-parallel-size 4", (4, None)),
        (
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 4",
            (4, 1),
        ),
        ("--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --moe-tp-extend-ep", (4, 1)),
        ("--tensor-model-parallel-size 2 --moe-expert-parallel-size 2", (2, 1)),
    ],
)
def test_degrees_of_experts(arguments, degrees):
    found = loaded(f"--num-experts 8 {arguments}", world=4).Distributed
    assert (found.ep_degree, found.expert_mp_degree) == degrees


def test_a_dense_network_says_what_has_no_effect():
    notes = of_arguments([*BASE.split(), "--moe-router-topk", "2"], 1).notes
    assert any("no effect: moe_router_topk" in note for note in notes)


def test_latent_attention():
    words = (
        "--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 12 "
        "--qk-pos-emb-head-dim 8 --kv-channels 16 --position-embedding-type rope"
    )
    model = loaded(words).Model
    latent = model.latent_attention
    assert (latent.q_rank, latent.kv_rank, latent.nope_head_dim, latent.rope_head_dim) == (24, 16, 12, 8)
    assert (latent.value_head_dim, model.rotary_interleaved, model.qk_layernorm) == (128, True, False)
    assert "needs qk_layernorm" in refusal(words.replace("--qk-layernorm ", ""))
