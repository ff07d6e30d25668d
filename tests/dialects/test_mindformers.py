"""MindFormers' configurations and command lines: what they become, and what is said of mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppfleetx.commands.translate import translation_of
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config, load_tree
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.dialects.mindformers import dialect
from ppfleetx.dialects.mindformers.dialect import MindFormersRun, run_of
from ppfleetx.models.gpt.spec import parameter_count
from ppfleetx.utils import device_support

CONFIGS = Path(__file__).resolve().parents[2] / "projects/mindformers/configs/gpt2"


def of(name: str, *argv: str, options: str = "") -> MindFormersRun:
    more = ["--options", *options.split()] if options else []
    return run_of(["--config", str(CONFIGS / name), *argv, *more])


def loaded(name: str, *argv: str, options: str = "", world: int | None = None) -> RunConfig:
    translation = of(name, *argv, options=options).translation
    return load_tree(translation.tree(), translation.warnings, world_size=world)


@pytest.mark.parametrize(
    ("name", "parameters", "layers", "hidden", "heads", "act"),
    [
        ("gpt2", 124_439_808, 12, 768, 12, "gelu"),
        ("gpt2_medium", 354_823_168, 24, 1024, 16, "gelu"),
        ("gpt2_large", 774_030_080, 36, 1280, 20, "gelu"),
        ("gpt2_xl", 1_557_611_200, 48, 1600, 25, "gelu"),
        ("gpt2_13b", 12_848_143_360, 40, 5120, 40, "quick_gelu"),
        ("gpt2_52b", 51_966_533_632, 64, 8192, 32, "quick_gelu"),
    ],
)
def test_sizes(name: str, parameters: int, layers: int, hidden: int, heads: int, act: str) -> None:
    model = loaded(f"run_{name}.yaml").Model
    unpadded = model.model_copy(update={"vocab_size_divisible_unit": 1})
    assert parameter_count(unpadded) == parameters
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (layers, hidden, heads)
    assert (model.hidden_act, model.ffn_size, model.head_size) == (act, 4 * hidden, hidden // heads)
    assert (model.embedding_dropout, model.hidden_dropout_prob) == (0.0, 0.1)
    assert (model.embedding_initializer_range, model.initializer_range) == (0.02, 0.01)


PARALLEL = "model.model_config.num_heads=16 use_parallel=True parallel.parallel_mode=1 "
PARALLEL += "parallel_config.data_parallel={} "
PARALLEL += "parallel_config.model_parallel={} parallel_config.pipeline_stage={} "
BATCH = "runner_config.batch_size={} parallel_config.micro_batch_num={} parallel.full_batch={} "
SHARD = "parallel_config.optimizer_shard={0} parallel.enable_parallel_optimizer={0}"


@pytest.mark.parametrize(
    # dp, mp, pp, batch_size, micro_batch_num, full_batch, optimizer_shard
    # -> processes, dp, sharding, sequences a step, of a rank, of a pass
    ("given", "expected"),
    [
        ((1, 1, 1, 8, 1, True, False), (1, 1, 1, 8, 8, 8)),
        ((1, 1, 1, 8, 4, True, False), (1, 1, 1, 8, 8, 8)),  # pp 1 ignores micro_batch_num
        ((2, 1, 1, 2, 1, True, False), (2, 2, 1, 4, 2, 2)),
        ((2, 1, 1, 2, 1, False, False), (2, 2, 1, 4, 2, 2)),
        ((2, 1, 1, 2, 1, True, True), (2, 1, 2, 4, 2, 2)),
        ((2, 1, 1, 2, 5, True, True), (2, 1, 2, 4, 2, 2)),
        ((4, 2, 4, 2, 24, True, True), (32, 1, 4, 192, 48, 2)),  # 13B on four hosts
        ((4, 2, 4, 2, 24, True, False), (32, 4, 1, 192, 48, 2)),
        ((4, 2, 4, 2, 24, False, True), (32, 1, 4, 192, 48, 2)),
        ((4, 8, 1, 2, 1, True, True), (32, 1, 4, 8, 2, 2)),
        ((2, 8, 1, 2, 1, True, True), (16, 1, 2, 4, 2, 2)),  # 13B on two hosts
        ((8, 1, 16, 2, 64, True, True), (128, 1, 8, 1024, 128, 2)),  # 52B
        ((1, 1, 2, 3, 4, True, False), (2, 1, 1, 12, 12, 3)),
        ((1, 1, 2, 3, 4, True, True), (2, 1, 1, 12, 12, 3)),
        ((1, 2, 1, 4, 8, True, True), (2, 1, 1, 4, 4, 4)),
        ((1, 2, 2, 1, 2, False, False), (4, 1, 1, 2, 2, 1)),
        ((2, 1, 4, 1, 6, True, False), (8, 2, 1, 12, 6, 1)),
    ],
)
def test_batch_arithmetic_against_hand_computation(given: tuple, expected: tuple) -> None:
    dp, mp, pp, size, parts, full, shard = given
    cfg = loaded(
        "run_gpt2.yaml",
        options=PARALLEL.format(dp, mp, pp) + BATCH.format(size, parts, full) + SHARD.format(shard),
    )
    batch, plan = cfg.batch, cfg.plan
    assert (
        plan.world_size,
        plan.dp,
        plan.sharding,
        batch.global_batch_size,
        batch.local_batch_size,
        batch.micro_batch_size,
    ) == expected
    assert batch.accumulate_steps == (parts if pp > 1 else 1)
    noted = any("micro_batch_num" in note for note in cfg.warnings)
    assert noted == (pp == 1 and parts > 1)


def test_data_parallel_mode_takes_all_processes() -> None:
    options = "parallel_config.model_parallel=4 runner_config.batch_size=3"
    cfg = loaded("run_gpt2.yaml", "--use_parallel", "True", options=options, world=8)
    assert (cfg.plan.dp, cfg.plan.mp, cfg.batch.global_batch_size) == (8, 1, 24)
    assert any("parallel_config is not used" in note for note in cfg.warnings)


def test_without_use_parallel_there_is_one_process() -> None:
    cfg = loaded("run_gpt2_13b.yaml", "--use_parallel=False")
    assert cfg.plan.world_size == 1 and cfg.batch.global_batch_size == 2


@pytest.mark.parametrize(
    ("layers", "stages", "expected"), [(40, 4, None), (41, 4, (10, 10, 10, 11)), (43, 4, (11, 11, 11, 10))]
)
def test_layers_that_do_not_divide(layers: int, stages: int, expected: tuple | None) -> None:
    options = PARALLEL.format(1, 1, stages) + f"model.model_config.num_layers={layers}"
    assert loaded("run_gpt2.yaml", options=options).Distributed.pp_layers == expected


def test_flags_of_later_versions() -> None:
    later = ("--auto_trans_ckpt", "True", "--train_dataset_dir", "D", "--output_dir", "O")
    cfg = loaded("run_gpt2.yaml", *later, "--load_checkpoint", "C", "--resume_training", "False")
    save_load = cfg.Engine.save_load
    assert (save_load.init_from, save_load.output_dir, cfg.Data.Train.dataset.input_dir) == ("C", "O", "D")
    cfg = loaded("run_gpt2.yaml", "--run_mode", "eval", "--load_checkpoint", "C", "--eval_dataset_dir", "E")
    assert cfg.Data.Eval.dataset.input_dir == "E"
    with pytest.raises(ConfigError, match=r"argument 3, --gradient_accumulation_steps.*can only be 1"):
        loaded("run_gpt2.yaml", "--gradient_accumulation_steps", "4")


def test_run_modes(tmp_path: Path) -> None:
    text = tmp_path / "wiki.valid.tokens"
    text.write_text("a\n")
    weights = ("--load_checkpoint", "C")
    save_load = loaded("run_gpt2.yaml", "--run_mode", "finetune", *weights).Engine.save_load
    assert (save_load.init_from, save_load.ckpt_dir) == ("C", None)
    save_load = loaded("run_gpt2.yaml", *weights).Engine.save_load
    assert (save_load.init_from, save_load.ckpt_dir) == (None, "C")
    save_load = loaded("run_gpt2.yaml", *weights, options="resume_training=False").Engine.save_load
    assert (save_load.init_from, save_load.ckpt_dir) == ("C", None)
    cfg = loaded("run_gpt2.yaml", "--run_mode", "eval", *weights, "--dataset_dir", "D")
    assert (cfg.Data.Eval.dataset.input_dir, cfg.Data.Train) == ("D", None)
    cfg = loaded("run_gpt2.yaml", "--run_mode", "eval", *weights, "--dataset_dir", str(text))
    assert (cfg.Model.module, cfg.Offline_Eval.eval_path) == ("GPTEvalModule", str(text))
    assert cfg.Offline_Eval.overlapping_eval == cfg.Offline_Eval.max_seq_len == 1024
    cfg = loaded("run_gpt2.yaml", "--run_mode=predict", *weights, "--predict_data", "I love")
    assert (cfg.Generation.prompt, cfg.Generation.top_k) == ("I love", 5)
    cfg = loaded("run_gpt2.yaml", "--run_mode=predict", *weights, "--predict_data", str(text))
    assert cfg.Generation.prompt_file == str(text)
    cfg = loaded("run_gpt2_13b.yaml", "--run_mode=predict", *weights)
    assert (cfg.plan.dp, cfg.plan.mp, cfg.plan.pp, cfg.plan.sharding) == (16, 2, 1, 1)


def test_sixteen_bits_and_memory_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "expected_device", lambda wanted: "gpu")
    cfg = loaded("run_gpt2_13b.yaml")
    assert cfg.Global.device == "auto", "the Paddle installed here has no npu"
    precision = cfg.Engine.mix_precision
    assert (precision.enable, precision.dtype, precision.level) == (True, "float16", "O2")
    assert (precision.scale_loss, precision.incr_every_n_steps, precision.hysteresis) == (2.0**32, 1000, 1)
    assert (cfg.Model.softmax_in_fp32, cfg.Global.flags) == (False, {"FLAGS_gpu_memory_limit_mb": 31744})
    cfg = loaded("run_gpt2_13b.yaml", "--device_target", "CPU")
    assert (cfg.Engine.mix_precision.enable, cfg.Global.flags, cfg.Global.device) == ("auto", {}, "cpu")
    with pytest.raises(ConfigError, match="weights in 16 bits need a compute_dtype of 16 bits"):
        loaded("run_gpt2_13b.yaml", options="model.model_config.compute_dtype=float32")


def test_ascend_is_npu_where_paddle_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_support, "_kinds_of_cards", lambda: ["npu"])
    cfg = loaded("run_gpt2_13b.yaml")
    assert (cfg.Global.device, cfg.Global.flags, cfg.Engine.mix_precision.enable) == ("npu", {}, True)
    assert loaded("run_gpt2_13b.yaml", "--device_target", "CPU").Global.device == "cpu"


def test_a_warm_up_as_a_share_counts_before_one_in_steps() -> None:
    lr = loaded("run_gpt2_13b.yaml", options="lr_schedule.warmup_ratio=0.1").Optimizer.lr
    assert (lr.warmup_rate, lr.warmup_steps) == (0.1, None)
    lr = loaded("run_gpt2_13b.yaml", options="lr_schedule.total_steps=5000").Optimizer.lr
    assert (lr.warmup_steps, lr.decay_steps, lr.decay_style) == (2000, 5000, "linear")


def test_names_of_later_versions() -> None:
    options = (
        "model.model_config.hidden_dropout_rate=0.1 model.model_config.attention_dropout_rate=0.1 "
        "model.model_config.max_position_embeddings=2048 model.model_config.softmax_compute_type=float16 "
        "model.model_config.use_flash_attention=True train_dataset.input_columns=[input_ids,attention_mask] "
        "eval_dataset.drop_remainder=False parallel_config.use_seq_parallel=True resume_training=True"
    )
    cfg = loaded("run_gpt2_13b.yaml", options=options)
    assert (cfg.Model.max_position_embeddings, cfg.Data.Train.dataset.max_seq_len) == (2048, 1024)
    assert (cfg.Model.use_flash_attn, cfg.Model.softmax_in_fp32, cfg.Model.sequence_parallel) == (
        True,
        False,
        True,
    )
    cfg = loaded(
        "run_gpt2.yaml", "--run_mode=eval", "--load_checkpoint=C", "--dataset_dir=D", options=options
    )
    assert any("drop_remainder" in note for note in cfg.warnings)


def test_mixtures_of_experts() -> None:
    options = "moe_config.expert_num=8 moe_config.num_experts_chosen=2 parallel_config.expert_parallel=4 "
    cfg = loaded("run_gpt2.yaml", options=options + PARALLEL.format(4, 1, 1), world=4)
    moe = cfg.Model.moe
    assert moe is not None and moe.capacity is not None
    assert (moe.num_experts, moe.top_k, moe.capacity.factor, moe.aux_loss.weight) == (8, 2, 1.1, 0.05)
    assert cfg.Distributed.ep_degree == 4
    with pytest.raises(ConfigError, match=r"moe_config\.hot_expert_num = 1"):
        loaded("run_gpt2.yaml", options="moe_config.expert_num=8 moe_config.hot_expert_num=1")
    dense = of("run_gpt2.yaml", options="moe_config.hot_expert_num=1").translation
    assert "moe_config.hot_expert_num" in [one.key for one in dense.unused]


def test_options_are_read_as_yaml_reads_them() -> None:
    options = "recompute_config.recompute=True optimizer.betas=(0.8,0.9) callbacks.1.save_checkpoint_steps=7"
    cfg = loaded(
        "run_gpt2.yaml", "--epochs", "5", options=f"{options} optimizer.beta1=0.8 optimizer.beta2=0.9"
    )
    assert cfg.Model.use_recompute
    assert (cfg.Optimizer.beta1, cfg.Optimizer.beta2) == (0.8, 0.9)
    assert (cfg.Engine.save_load.save_steps, cfg.Engine.save_load.save_epoch) == (7, None)
    assert (cfg.Engine.run_mode, cfg.Engine.num_train_epochs) == ("epoch", 5)
    assert cfg.origins["Engine.num_train_epochs"] == "argument 3, --epochs, runner_config.epochs"


def test_a_later_base_replaces_a_block_and_the_file_is_merged_over_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("context: {mode: 0, device_target: GPU}\nseed: 1\n")
    (tmp_path / "b.yaml").write_text("context: {mode: 1}\n")
    (tmp_path / "run.yaml").write_text(
        f"base_config: [a.yaml, b.yaml, {CONFIGS / 'model_config/gpt2.yaml'}]\n"
        "model: {model_config: {num_layers: 3}}\n"
    )
    cfg = load_tree(run_of(["--config", str(tmp_path / "run.yaml")]).translation.tree())
    assert (cfg.Global.seed, cfg.Global.device, cfg.Model.num_layers) == (1, "auto", 3)
    assert cfg.Model.hidden_size == 768


GPT2 = "run_gpt2.yaml"
MISTAKES = [
    (GPT2, "--options model.model_config.num_head=3", "argument 3): MindFormers has no such key"),
    (GPT2, "--options model.model_config.num_head=3", "Did you mean model.model_config.num_heads"),
    (GPT2, "--options model.model_config.num_layers=x", "= 'x' (argument 3, model.model_config.num_layers)"),
    (GPT2, "--use_parallel=True --options parallel.parallel_mode=2", "= 2 (argument 4): is not supported"),
    (
        GPT2,
        "--options parallel_config.expert_parallel=2",
        "moe_config.expert_num is 1, and there are no experts",
    ),
    (GPT2, "--options model.model_config.compute_dtype=int8", "must be one of 'float32'"),
    (GPT2, "--options context.device_target=TPU", "must be one of 'Ascend', 'GPU', 'CPU'"),
    (GPT2, "--options context.max_device_memory=31", 'must be a size like "31GB"'),
    (GPT2, "--options run_mode=test", "run_mode = 'test' (argument 3): must be one of 'train'"),
    (GPT2, "--options lr_schedule.warmup_epochs=1", "give the warm-up in steps"),
    (GPT2, "--options callbacks.7.type=x", "'7' is not an index"),
    (GPT2, "--options seed.x=1", "seed is a single value"),
    (GPT2, "--options seed", "'seed' is not of the form block.key=value"),
    (GPT2, "--options train_dataset.data_loader.num_samples=3", "make a smaller corpus"),
    (GPT2, "--use_parallel=True --options parallel_config.optimizer_shard=True", "give parallel_mode 1"),
    (GPT2, "--run_mode finetune", "finetuning needs weights"),
    (
        GPT2,
        "--batchsize 3",
        "--batchsize (argument 3): run_mindformer.py has no such flag. Did you mean --batch_size",
    ),
    (GPT2, "--epochs 0", "Engine.num_train_epochs = 0 (argument 3, --epochs"),
    ("run_nothing.yaml", "", "there is no such file"),
]


@pytest.mark.parametrize(("name", "arguments", "words"), MISTAKES)
def test_mistakes(name: str, arguments: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(name, *arguments.split())
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base_config: run.yaml", "run.yaml:1): the base files include each other"),
        ("base_config: no.yaml", "base_config = 'no.yaml'"),
        ("base_config: [[1]]", "must be a file name"),
        ("seed: 1\nseed: 2", "given twice"),
        ("model: {model_config: 3}", "model.model_config = 3"),
        ("callbacks: [1]", "callbacks = [1]"),
        ("callbacks: {type: x}", "callbacks.type"),
    ],
)
def test_mistakes_in_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        run_of(["--config", str(tmp_path / "run.yaml")])
    assert words in str(error.value)


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("run_*.yaml")))
def test_translations_are_native_configurations(name: str, tmp_path: Path) -> None:
    argv = ["run_mindformer.py", "--config", str(CONFIGS / name), "--dataset_dir", "D"]
    translation = translation_of(argv)
    (tmp_path / "ours.yaml").write_text(translation.yaml())
    assert load_config(tmp_path / "ours.yaml") == load_tree(translation.tree())
    assert (
        translation_of([str(CONFIGS / name), "--dataset_dir", "D"]).native.keys() == translation.native.keys()
    )


def test_another_network_is_named_before_its_details(tmp_path) -> None:
    path = tmp_path / "run_llama.yaml"
    path.write_text(
        "metric: {type: EmF1Metric}\n"
        "parallel: {parallel_optimizer_config: {parallel_optimizer_threshold: 64}}\n"
        "model: {arch: {type: LlamaForCausalLM}}\n"
    )
    with pytest.raises(ConfigError, match=r"model\.arch\.type = 'LlamaForCausalLM' .*only GPT-2 is"):
        run_of(["--config", str(path)])
