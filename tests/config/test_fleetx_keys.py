"""What stands in PaddleFleetX's own files: read, read with a warning, or refused by the feature's name."""

import pytest

from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config

FINETUNING_BASE = """\
Global: {device: gpu, seed: 42, global_batch_size: , local_batch_size: 1, micro_batch_size: 1}
Engine: {run_mode: epoch, max_steps: -1, eval_freq: 1, eval_iters: -1, test_iters: -1}
"""
FINETUNING = """\
_base_: ./base.yaml
Global: {local_batch_size: 32, micro_batch_size: 32}
Engine: {num_train_epochs: 3, accumulate_steps: , mix_precision: {enable: True, scale_loss: 32768.0}}
Model:
  module: GPTFinetuneModule
  num_classes: 2
  pretrained: ./ckpt/model
  vocab_size: 100
  hidden_size: 8
  num_layers: 2
  num_attention_heads: 2
  type_vocab_size: 16
  loss: {train: {name: CrossEntropyLoss}}
  metric: {eval: {name: Accuracy}}
Distributed: {sharding: {sharding_degree: 1, comm_overlap: False}}
Optimizer: {name: FusedAdamW, lr: {name: LinearDecayWithWarmup, warmup: 0.1, learning_rate: 2e-5}}
Data:
  Train:
    dataset: {name: SST2, root: ./data/SST-2/, split: train, max_length: 128}
    sampler: {name: DistributedBatchSampler, batch_size: 32, shuffle: True, drop_last: True}
    loader: {num_workers: 4, return_list: False}
  Eval:
    dataset: {name: SST2, root: ./data/SST-2/, split: dev, max_length: 128}
    sampler: {name: DistributedBatchSampler, batch_size: 32, shuffle: False, drop_last: False}
"""


def test_a_finetuning_file_is_read_with_warnings(write):
    write("base.yaml", FINETUNING_BASE)
    cfg = load_config(write("glue.yaml", FINETUNING))
    assert (cfg.Engine.run_mode, cfg.Engine.num_train_epochs) == ("epoch", 3)
    assert (cfg.Engine.max_steps, cfg.Engine.eval_iters, cfg.Engine.test_iters) == (2**31 - 1, 10, 100)
    assert (cfg.Data.Train.dataset.max_seq_len, cfg.batch.local_batch_size) == (128, 32)
    assert cfg.Engine.save_load.init_from == "./ckpt/model"
    report = check_report(cfg)
    assert "Data.tokenizer" in report  # which FleetX downloads, and this program does not
    for key, place in (
        ("Engine.max_steps = -1", "base.yaml:2"),
        ("Engine.eval_iters = -1", "base.yaml:2"),
        ("Engine.test_iters = -1", "base.yaml:2"),
        ("Data.Train.sampler.batch_size", "glue.yaml:20"),
        ("Data.Eval.sampler.batch_size", "glue.yaml:24"),
        ("Distributed.sharding.comm_overlap", "glue.yaml:15"),
    ):
        (warning,) = [text for text in cfg.warnings if text.startswith(f"{key} (")]
        assert place in warning
        assert warning in report


def test_a_file_of_the_later_layout_has_the_task_of_its_data(write, small):
    write("base.yaml", FINETUNING_BASE)
    cfg = load_config(write("glue.yaml", FINETUNING.replace("  module: GPTFinetuneModule\n", "")))
    assert cfg.Model.module == "GPTFinetuneModule"
    assert any("Data.Train.dataset.name = SST2" in text for text in cfg.warnings)
    measured = "Data: {Eval: {dataset: {name: LM_Eval_Dataset, input_dir: ./data/, max_seq_len: 8}}}"
    cfg = load_config(write("eval.yaml", f"_base_: {small}\n{measured}\n"), ["Model.module=null"])
    assert (cfg.Model.module, cfg.Data.Eval) == ("GPTEvalModule", None)


def test_minus_one_is_no_limit_where_epochs_are_counted_alone(write):
    write("base.yaml", FINETUNING_BASE)
    path = write("glue.yaml", FINETUNING)
    with pytest.raises(
        ConfigError, match=r"Engine.max_steps = -1 \(.*base.yaml:2\): must be an integer of at"
    ):
        load_config(path, ["Engine.run_mode=step"])
    with pytest.raises(ConfigError, match=r"Engine.max_steps = -2"):
        load_config(path, ["Engine.max_steps=-2"])
    assert load_config(path, ["Engine.max_steps=7"]).Engine.max_steps == 7


def test_accumulation_of_a_file_gives_way_to_batch_sizes(small, write):
    path = write("steps.yaml", "_base_: small.yaml\nEngine: {accumulate_steps: 1}\n")
    cfg = load_config(path)
    assert (cfg.batch.accumulate_steps, cfg.Engine.accumulate_steps) == (2, 2)
    (warning,) = cfg.warnings
    assert warning.startswith("Engine.accumulate_steps = 1 (")
    assert "steps.yaml:2) is not used" in warning
    assert "local_batch_size 8 / micro_batch_size 4 = 2" in warning
    assert warning in check_report(cfg)
    sizes = ["Global.global_batch_size=16", "Global.local_batch_size=null", "Distributed.dp_degree=2"]
    assert load_config(path, sizes).batch.accumulate_steps == 2
    assert load_config(path, ["Global.micro_batch_size=8"]).warnings == ()  # they agree
    # Where it is one of the two that decide, it decides.
    alone = load_config(path, ["Global.local_batch_size=null"])
    assert (alone.batch.local_batch_size, alone.warnings) == (4, ())
    assert load_config(path, ["Global.micro_batch_size=null"]).batch.micro_batch_size == 8
    with pytest.raises(ConfigError, match=r"Engine.accumulate_steps = 1 \(-o override 1\): contradicts"):
        load_config(small, ["Engine.accumulate_steps=1"])


def test_quantisation(small, write):
    text = """\
_base_: small.yaml
Compress:
  Quantization:
    enable: True
    onnx_format: True
    for_tensorrt: False
    is_full_quantize: False
    freeze_embedding: True
    skip_tensor_map: {block_3: ['linear2'], block_2: [linear1, linear2]}
"""
    cfg = load_config(write("qat.yaml", text))
    assert cfg.Compress.Quantization.skip_tensor_map == {
        "block_3": ("linear2",),
        "block_2": ("linear1", "linear2"),
    }
    assert len(cfg.warnings) == 3
    for value, words in (
        ("{block_3: [1]}", "skip_tensor_map.block_3.0 = '1' .* one of linear1, linear2"),
        ("{block_4: [linear1]}", r"skip_tensor_map.block_4 = .* block_0 to block_3 \(Model.num_layers\)"),
        ("{layer_3: [linear1]}", r"skip_tensor_map.layer_3 = .*linear1.* block_0, block_1"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(small, [f"Compress.Quantization.skip_tensor_map={value}"])


def test_the_two_later_files_for_quantised_training(small, write):
    """One has the section at the top with the checkpoint in it, the other below Compress."""
    kinds = "[Conv2D, Linear, Conv2DTranspose, ColumnParallelLinear, RowParallelLinear]"
    inside = f"enable: True, quantizable_layer_type: {kinds}, onnx_format: True"
    early = f"Quantization: {{pretrained: weights, {inside}}}"
    late = f"Compress: {{pretrained: weights, Quantization: {{{inside}}}}}"
    for text in (early, late):
        cfg = load_config(write("qat.yaml", f"_base_: small.yaml\n{text}\n"))
        assert cfg.Compress.quantization is not None
        assert cfg.Engine.save_load.init_from == "weights"
        assert cfg.Compress.quantization.quantizes("decoder.layers.0.mlp.fc1", "ColumnParallelLinear")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("Model.module=GPTGenerationModuleAuto", "no automatic parallel mode"),
        ("Model.module=GPTModuleAuto", "no automatic parallel mode"),
        ("Model.name=GPT-cn", "GPTChineseTokenizer"),
        ("Model.module=ErnieModule", "GPT models only"),
        ("Model.module=ErnieSeqClsModuleAuto", "GPT models only"),
        ("Model.module=ImagenModule", "GPT models only"),
    ],
)
def test_what_is_left_out_is_refused_by_name(small, override, words):
    key, _, _ = override.partition("=")
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(small, [override, "Model.unknown=1"])
    message = str(caught.value)
    assert message.startswith(f"{key} = ")
    assert "override 1" in message
    assert "unknown" not in message


MIXTURE = """\
_base_: small.yaml
Model: {module: MoEModule, name: MoE, moe_configs: {expert_mode: True, gate: GATE, top_k: 2, num_experts: 2}}
Engine: {balance_loss_weight: 0.5}
Optimizer: {grad_clip: {name: ClipGradForMOEByGlobalNorm, clip_norm: 1.0}}
Distributed: {dp_degree: 4, hcg: HybridCommGroupForMoE}
"""
FLAT_MIXTURE = """\
_base_: small.yaml
Model:
  num_experts: 4,
  expert_interval: 2
  topk: 1
  moe_use_residual: False
  moe_train_capacity_factor: 1.5
  moe_min_capacity: 4
  balance_loss_weight: 0.01
"""


@pytest.mark.parametrize(
    ("gate", "kind", "top_k"), [("gshard", "gshard", 2), ("switch", "switch", 1), ("naive", "none", 2)]
)
def test_experts_of_a_rank(small, write, gate, kind, top_k):
    """moe_configs counts those of one rank."""
    cfg = load_config(write("t.yaml", MIXTURE.replace("GATE", gate)), world_size=4)
    moe = cfg.Model.moe
    assert (moe.num_experts, moe.top_k, moe.aux_loss.kind, cfg.Distributed.ep_degree) == (8, top_k, kind, 4)
    assert kind == "none" or moe.aux_loss.weight == 0.5
    assert [text for text in cfg.warnings if "FleetX's experts" in text and "t.yaml" in text]


def test_experts_of_the_later_layout(small, write):
    """Its example has a comma behind the number of experts."""
    moe = load_config(write("t.yaml", FLAT_MIXTURE)).Model.moe
    assert (moe.num_experts, moe.top_k, moe.router.normalize) == (4, 1, False)
    assert (moe.capacity.factor, moe.aux_loss.kind, moe.aux_loss.weight) == (1.5, "switch", 0.01)
    assert load_config(write("dense.yaml", FLAT_MIXTURE.replace("4,", "1,"))).Model.moe is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("Model.moe_configs={gate: best}", "must be one of gshard, switch, naive"),
        ("Model.moe_configs={gates: switch}", "Model.moe_configs.gates .*there is no such key"),
        ("Model.num_experts=2", "Did you mean .*Model.moe.num_experts"),
        ("Model.moe_configs={num_experts: many}", "must be an integer of at least 1"),
        ("Model={num_experts: 2, moe_use_residual: True}", "is not supported; use Model.moe.shared_experts"),
    ],
)
def test_mixtures_that_are_not_built(small, override, words):
    with pytest.raises(ConfigError, match=words):
        load_config(small, [override])
