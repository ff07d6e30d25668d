"""Every option that the user wrote and that another key switches off is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppfleetx.config.ineffective_options import SWITCHED_OFF, SwitchedOff, without_effect
from ppfleetx.config.loader import load_config
from ppfleetx.config.shipped import CONFIGS
from ppfleetx.config.yaml_dump import dump_config, run_record

GPT = CONFIGS / "nlp/gpt"
FP16, BF16 = (f"Engine.mix_precision={{enable: True, dtype: {kind}}}" for kind in ("float16", "bfloat16"))
QAT = "Compress.Quantization.enable=True"
DATASET = "dataset: {name: ChatDataset, split: dev, input_dir: x}"
RECORDS = f"{{{DATASET}, sampler: {{shuffle: True, drop_last: False}}}}"
CASES = [
    (["Optimizer.name=SGD", "Optimizer.beta1=0.5", "Optimizer.weight_decay=0.01"], "beta1 weight_decay"),
    (["Optimizer.name=SGD"], ""),
    (["Generation.decode_strategy=greedy_search", "Generation.temperature=1.0"], "temperature"),
    (["Generation.decode_strategy=greedy_search", "Generation.temperature=0"], ""),
    (["Optimizer.muon.momentum=0.9"], "muon.momentum"),
    (["Optimizer.name=Muon", "Optimizer.muon.momentum=0.9"], ""),
    (
        ["Optimizer.weight_decay=0.2", "Optimizer.weight_decay_schedule={start: 0, end: 0.1}"],
        "Optimizer.weight_decay",
    ),
    (["Generation.decode_strategy=greedy_search", "Generation.top_k=3"], "Generation.top_k"),
    (["Generation.decode_strategy=greedy_search", "Generation.temperature=0.5"], "temperature"),
    (["Generation.decode_strategy=beam_search", "Generation.temperature=0"], "temperature"),
    (["Generation.top_k=3", "Generation.top_p=0.5"], ""),
    (["Generation.num_beams=3"], "Generation.num_beams"),
    (["Generation.decode_strategy=beam_search", "Generation.num_beams=3"], ""),
    (["Model.attn_post_norm_scale=0.5"], "Model.attn_post_norm_scale"),
    (["Model.attn_post_norm_scale=0.5", "Model.sandwich_norm=True"], ""),
    (["Model.recompute_granularity=full", "Model.recompute_interval=2"], "granularity interval"),
    (["Model.recompute_granularity=full", "Model.use_recompute=True"], ""),
    (["Model.num_classes=2"], "Model.num_classes"),
    (["Inference.mp_degree=1"], ""),
    (["Offline_Eval.batch_size=4"], "Offline_Eval"),
    (
        ["Model.module=GPTEvalModule", "Offline_Eval.max_seq_len=64", "Offline_Eval.cloze_strict=False"],
        "cloze_strict",
    ),
    (
        [
            "Model.module=GPTEvalModule",
            "Offline_Eval.max_seq_len=64",
            "Offline_Eval.cloze_eval=True",
            "Offline_Eval.detokenizer=ptb",
        ],
        "detokenizer",
    ),
    (["Data.Test.dataset.max_seq_len=128"], "Data.Test"),
    (["Data.Test=null"], ""),
    (["Optimizer.lr.decay_style=constant", "Optimizer.lr.min_lr=1e-6"], "Optimizer.lr.min_lr"),
    (["Engine.num_train_epochs=2"], "Engine.num_train_epochs"),
    (["Engine.run_mode=epoch", "Engine.save_load.save_steps=10"], "save_load.save_steps"),
    (["Optimizer.lr={decay_style: constant, decay_steps: 9}"], "Optimizer.lr.decay_steps"),
    (["Optimizer.lr={decay_style: constant, decay_steps: 9, warmup_rate: 0.5}"], ""),
    (["Optimizer.lr.wsd_decay_style=linear"], "Optimizer.lr.wsd_decay_style"),
    (["Optimizer.beta1=0.5"], ""),
    (["Distributed.sharding.sharding_stage=3"], "Distributed.sharding.sharding_stage"),
    (["Distributed.sharding={sharding_stage: 3, sharding_degree: 2}"], ""),
    (
        ["Distributed.bucket_size=1", "Distributed.sharding.reduce_overlap=False"],
        "bucket_size reduce_overlap",
    ),
    (["Distributed.bucket_size=1", "Distributed.sep_degree=2"], ""),
    (
        ["Distributed={bucket_size: 1, sep_degree: 2, sharding: {reduce_overlap: False}}"],
        "Distributed.bucket_size",
    ),
    (["Distributed={bucket_size: 1, sharding: {sharding_degree: 2, reduce_overlap: False}}"], ""),
    (["Distributed.noop_layers=[0]"], "Distributed.noop_layers"),
    (["Engine.mix_precision.level=O1", "Engine.mix_precision.hysteresis=3"], "level hysteresis"),
    ([FP16, "Engine.mix_precision.scale_loss=2"], ""),
    ([BF16, "Engine.mix_precision.scale_loss=2"], "Engine.mix_precision.scale_loss"),
    (
        [FP16, "Engine.mix_precision.use_dynamic_loss_scaling=False", "Engine.mix_precision.hysteresis=3"],
        "Engine.mix_precision.hysteresis",
    ),
    ([FP16, "Engine.mix_precision.level=O1", "Engine.mix_precision.main_grad_fp32=False"], "main_grad_fp32"),
    (["Model.softmax_in_fp32=False"], "Model.softmax_in_fp32"),
    (["Engine.save_load.load_rng=False"], "Engine.save_load.load_rng"),
    (["Engine.save_load.load_rng=False", "Engine.save_load.resume=auto"], ""),
    (["Engine.save_load.load_optim=False", "Engine.save_load.init_from=x"], "Engine.save_load.load_optim"),
    (["Engine.save_load.verify=False"], "Engine.save_load.verify"),
    (["Engine.save_load.verify=False", "Engine.save_load.init_from=x"], ""),
    (["Engine.on_hang=wait", "Engine.hang_timeout=0", "Engine.hang_start_timeout=0"], "Engine.on_hang"),
    (["Engine.straggler_freq=3"], "Engine.straggler_freq"),
    (["Engine.spike.window=9"], "Engine.spike.window"),
    (["Engine.spike={action: skip, window: 9}"], ""),
    (["Engine.spike={action: stop, max_in_a_row: 9}"], "Engine.spike.max_in_a_row"),
    (["Data.Eval=null", "Engine.eval_freq=3", "Engine.eval_iters=2"], "eval_freq eval_iters"),
    (["Data.Eval=null", "Engine.eval_freq=0"], ""),
    (["Data.Eval.dataset.max_seq_len=64", "Engine.eval_freq=3"], ""),
    (["Engine.test_iters=3"], "Engine.test_iters"),
    (["Profiler.scheduler=[2, 3]", "Profiler.summary.mem=True"], "scheduler Profiler.summary"),
    (["Model.rotary_base=1e6"], "Model.rotary_base"),
    (["Model.moe={num_experts: 2, aux_loss: {kind: none, weight: 1}}"], "Model.moe.aux_loss.weight"),
    (["Model.moe={num_experts: 2, router: {group_score: max}}"], "Model.moe.router.group_score"),
    (["Model.rotary_base=1e6", "Model.position_embedding_type=rope"], ""),
    (
        [
            "Model.add_bias_linear=False",
            *(f"Model.add_{one}_bias=on" for one in ("qkv", "out_proj", "mlp")),
        ],
        "Model.add_bias_linear",
    ),
    (["Model.fused_linear=True"], "Model.fused_linear"),
    (["Model.fuse_attn_qkv=False"], "Model.fuse_attn_qkv"),
    (["Data.Train.sampler.drop_last=False"], "Data.Train.sampler.drop_last"),
    (["Data.Train.dataset.eod_id=3"], "Data.Train.dataset.eod_id"),
    (["Data.Train.dataset.eod_id=3", "Data.Train.dataset.eod_mask_loss=True"], ""),
    ([f"Data.Eval={RECORDS}", "Data.tokenizer.dir=x"], "shuffle drop_last"),
    ([f"Data.Train={RECORDS}".replace(", drop_last: False", ""), "Data.tokenizer.dir=x"], "shuffle"),
    (
        [f"Data.Eval={{{DATASET}}}", "Data.tokenizer.dir=x", "Engine.eval_iters=3"],
        "Engine.eval_iters",
    ),
    (["Data.Eval.dataset={eod_id: 3, max_seq_len: 64}"], "Data.Eval.dataset.eod_id"),
    ([f"{QAT[:-4]}False", "Compress.Quantization.weight_bits=4"], "Compress.Quantization.weight_bits"),
    ([QAT, "Compress.Quantization.weight_bits=4"], ""),
    (
        [QAT, "Compress.Quantization={activation_quantize_type: abs_max, moving_rate: 0.5, enable: True}"],
        "Compress.Quantization.moving_rate",
    ),
    (["Compress.Prune.ratio=0.5"], "Compress.Prune.ratio"),
    (["Compress.Prune={ratio: 0.5, enable: True}"], ""),
    (["Global.allow_tf32=True", "Global.device=cpu"], "Global.allow_tf32"),
    (["Generation.decode_strategy=sampling", "Generation.prompt_lookup_num_tokens=3"], "prompt_lookup"),
    (["Generation.num_assistant_tokens=3"], "Generation.num_assistant_tokens"),
    (
        ["Generation.decode_strategy=beam_search", "Generation.num_beams=2", "Generation.diversity_rate=0.5"],
        "Generation.diversity_rate",
    ),
]


@pytest.mark.parametrize(("overrides", "named"), CASES)
def test_keys_that_another_key_switches_off_are_said(small, overrides, named):
    """One sentence with the words of ``named``, or none at all."""
    notes = without_effect(load_config(small, overrides))
    assert len(notes) == bool(named)
    assert all(word in notes[0] for word in named.split())


def test_keys_without_effect_are_the_users_own(small, write):
    written = "_base_: small.yaml\nGeneration: {top_k: 5, top_p: 1.0, decode_strategy: greedy_search}\n"
    [note] = without_effect(load_config(write("child.yaml", written)))
    assert note.startswith("Generation.top_k has no effect: ")
    for name in ("generation_gpt_345M_single_card", "inference_gpt_345M_single_card", "pretrain_gpt_tiny"):
        shipped = load_config(GPT / f"{name}.yaml", ["Generation.decode_strategy=greedy_search"])
        assert without_effect(shipped) == []
    again = load_config(write("config.yaml", dump_config(load_config(small))))
    assert without_effect(again) == []


def test_keys_without_effect_of_a_run_are_not_told_again(small, write, tmp_path):
    cfg = load_config(small, ["Generation.top_k=5", "Generation.decode_strategy=greedy_search"])
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/manifest.json").touch()
    assert len(without_effect(load_config(write("config.yaml", dump_config(cfg))))) == 1  # the user's own
    config = write("config.yaml", run_record(cfg))
    assert without_effect(load_config(config)) == []
    assert len(without_effect(load_config(config, ["Generation.top_k=6"]))) == 1
    assert len(without_effect(load_config(write("copy.yaml", run_record(cfg))))) == 1


def test_every_row_has_a_case(small: Path) -> None:
    """But those of optimizers of plugins."""
    written = [overrides for overrides, named in CASES if named]
    said = [note for overrides in written for note in without_effect(load_config(small, overrides))]
    ours = [rule for rule in SWITCHED_OFF if "is an optimizer that does not read it" not in rule.why]
    unused = [rule.keys for rule in ours if not any(_is_of(note, rule) for note in said)]
    assert not unused


def _is_of(note: str, rule: SwitchedOff) -> bool:
    return note.endswith(rule.why) and any(key in note for key in rule.keys)
