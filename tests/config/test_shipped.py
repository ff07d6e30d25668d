"""The configuration files that ship, their sizes, and what is generated from the sections."""

import json
import re
from pathlib import Path

import pytest

from ppfleetx.commands.check import bubble_share, check_report
from ppfleetx.config.field_annotations import all_keys, field_types, section_in
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.models.gpt.spec import parameter_count
from ppfleetx.utils import device_support
from ppfleetx.utils.device_support import not_supported_reasons
from ppfleetx.utils.gpu_operators import host_operator_notes
from tools.gen_config_docs import field_docs, json_schema

ROOT = Path(__file__).parents[2]
GPT = ROOT / "ppfleetx" / "configs" / "nlp" / "gpt"

# file, layers, hidden, heads, ffn, padded vocabulary, positions, sequence, batch sizes, world, parameters
PRETRAIN = [
    ("345M_single_card", 24, 1024, 16, 4096, 50304, 1024, 1024, (8, 8, 8), 1, "354.9 M"),
    ("345M_mp8_qat", 24, 1024, 16, 4096, 50304, 1024, 1024, (8, 8, 1), 8, "354.9 M"),
    ("1.3B_single_card", 24, 2048, 16, 8192, 50304, 1024, 1024, (8, 8, 8), 1, "1.3 B"),
    ("1.3B_dp8", 24, 2048, 16, 8192, 50304, 1024, 1024, (64, 8, 8), 8, "1.3 B"),
    ("6.7B_sharding16", 32, 4096, 32, 16384, 50304, 1024, 1024, (128, 8, 8), 16, "6.7 B"),
    ("13B_dp8", 40, 5120, 40, 20480, 50432, 4096, 4096, (480, 60, 4), 128, "12.9 B"),
    ("175B_mp8_pp16", 96, 12288, 96, 49152, 51200, 1024, 1024, (1536, 1536, 1), 128, "174.6 B"),
]


@pytest.mark.parametrize("row", PRETRAIN, ids=[row[0] for row in PRETRAIN])
def test_pretraining_sizes(row):
    name, layers, hidden, heads, ffn, vocab, positions, seq, sizes, world, params = row
    cfg = load_config(GPT / f"pretrain_gpt_{name}.yaml")
    model, batch = cfg.Model, cfg.batch
    found = (model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_size)
    assert found == (layers, hidden, heads, ffn)
    assert (model.padded_vocab_size, model.max_position_embeddings) == (vocab, positions)
    assert cfg.Data.Train.dataset.max_seq_len == cfg.Data.Eval.dataset.max_seq_len == seq
    assert (batch.global_batch_size, batch.local_batch_size, batch.micro_batch_size) == sizes
    assert cfg.plan.world_size == world
    assert f"{params} parameters ({parameter_count(model):,})" in check_report(cfg)


@pytest.mark.parametrize(
    ("name", "parameters", "world"),
    [
        ("mixtral_8x7B_ep8_pp4", 46_702_792_704, 64),
        ("qwen3_30B_A3B_ep8", 30_532_122_624, 128),
        ("deepseek_v3_ep64_pp16", 671_026_419_200, 2048),
    ],
)
def test_mixtures_of_experts_have_their_size_and_fit(name, parameters, world):
    cfg = load_config(GPT.parent / "moe" / f"pretrain_{name}.yaml")
    assert (parameter_count(cfg.Model), cfg.plan.world_size) == (parameters, world)
    assert f"it fits {cfg.Global.card}" in check_report(cfg)


def test_finetuning_and_evaluation_do_not_write_where_pretraining_does():
    pretraining = {load_config(path).Engine.save_load.output_dir for path in GPT.glob("pretrain_*.yaml")}
    others = [path for kind in ("finetune", "eval") for path in sorted(GPT.glob(f"{kind}_*.yaml"))]
    places = [load_config(path).Engine.save_load.output_dir for path in others]
    assert len(others) == len(set(places)) == 3
    assert not pretraining & set(places)


@pytest.mark.parametrize(
    "name",
    [
        "generation_gpt_345M_single_card",
        "generation_gpt_345M_dp8",
        "inference_gpt_345M_single_card",
        "inference_gpt_345M_dp8",
        "eval_gpt_345M_single_card",
        "finetune_gpt_345M_single_card_glue",
    ],
)
def test_other_345m_files(name):
    cfg = load_config(GPT / f"{name}.yaml")
    head = 2 * 1024 if "finetune" in name else 0  # two classes
    assert parameter_count(cfg.Model) == 354_871_296 + head
    if name.endswith("dp8"):
        assert load_config(GPT / f"{name}.yaml", world_size=8).plan.dp == 8
        assert load_config(GPT / f"{name}.yaml", world_size=1).plan.dp == 1


def test_check_report_of_175b():
    cfg = load_config(GPT / "pretrain_gpt_175B_mp8_pp16.yaml", ["Model.max_position_embeddings=2048"])
    report = check_report(cfg)
    for piece in (
        "174.6 B parameters (174,615,846,912)",
        "128 = dp 1 x pp 16 x sharding 1 x sep 1 x mp 8",
        "16 stages of 6 layers",
        "1.0% of the time is idle",
        "global 1536 = local 1536 x 1 data ranks",
        "local 1536 = micro 1 x accumulate 1536",
        "1,572,864 per step",
        "core_attn, 96 of 96 layers",
        "3600 warm-up steps to 5e-05",
        "float16 O2",
    ):
        assert piece in report


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # 6,654,402,560 parameters on 16 ranks; two float32 moments and a master weight for each.
        ([], "12 bytes a parameter: about 4.6 GiB a rank, 37.2 GiB on a node with 8 ranks"),
        (["Engine.mix_precision.enable=False"], "8 bytes a parameter: about 3.1 GiB a rank"),
        # Muon keeps one state for the 6,442,450,944 parameters in matrices of blocks, and two for the rest.
        (["Optimizer.name=Muon"], "8.13 bytes a parameter: about 3.1 GiB a rank, 25.2 GiB on a node"),
        (["Optimizer.name=SGD", "Engine.mix_precision.enable=False"], "the host holds nothing"),
    ],
)
def test_offload_names_what_the_host_has_to_hold(overrides, words):
    path = GPT / "pretrain_gpt_6.7B_sharding16.yaml"
    offload = ["Distributed.sharding.sharding_offload=True"]
    assert words in check_report(load_config(path, [*offload, *overrides]))
    assert words not in check_report(load_config(path, overrides))


def test_bubble():
    plan = load_config(GPT / "pretrain_gpt_13B_dp8.yaml").plan
    assert bubble_share(plan, 64) == pytest.approx(7 / 71)


def test_without_a_card_the_precision_of_the_cpu_is_named_too(monkeypatch):
    """`Global.device: auto` and `Engine.mix_precision.enable: auto`, and an installed Paddle for CPUs."""
    monkeypatch.setattr(device_support, "_kinds_of_cards", list)
    automatic = ["Global.device=auto", "Engine.mix_precision.enable=auto"]
    cfg = load_config(GPT / "pretrain_gpt_345M_single_card.yaml", automatic)
    assert re.search(r"on GPUs float16 O2.*; on this machine's CPU float32 \(", check_report(cfg))
    assert "CPU" not in check_report(cfg, "gpu")
    assert "on GPUs" not in check_report(cfg, "cpu")
    monkeypatch.setattr(device_support, "_kinds_of_cards", lambda: ["gpu"])
    assert "CPU" not in check_report(cfg)


def test_what_cannot_run_yet_is_named(small):
    (reason,) = not_supported_reasons(load_config(small, ["Engine.mix_precision.enable=True"]), "cpu")
    assert "Engine.mix_precision.enable" in reason


def test_what_can_run(small):
    assert not_supported_reasons(load_config(small), "cpu") == []
    assert not_supported_reasons(load_config(small), "gpu") == []
    mixed = load_config(small, ["Engine.mix_precision.enable=True"])
    assert [not_supported_reasons(mixed, device) for device in ("gpu", "xpu", "npu")] == [[], [], []]
    assert not_supported_reasons(load_config(GPT / "pretrain_gpt_tiny.yaml"), "cpu") == []


@pytest.mark.parametrize("path", sorted(GPT.parent.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_every_file_runs_on_a_laptop(path):
    """As far as the device is concerned; float32 takes the place of 16 bits that a CPU has not."""
    report = check_report(load_config(path), "cpu")
    assert "not yet" not in report and "The configuration is valid." in report


def test_evaluation_is_announced_only_with_data_for_it(small):
    keys = ["Engine.eval_freq=4", "Data.Eval.dataset.max_seq_len=128"]
    assert "evaluate every 4 steps" in check_report(load_config(small, keys))
    assert "no evaluation" in check_report(load_config(small, keys[:1]))
    assert "no evaluation" in check_report(load_config(small, [keys[1], "Engine.eval_freq=0"]))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([], ""),
        (["Model.module=GPTEvalModule"], "Model.module"),
        (["Model.module=GPTGenerationModule"], "Model.module"),
        (
            [
                "Engine.mix_precision.enable=True",
                "Engine.mix_precision.dtype=bfloat16",
                "Compress.Quantization.enable=True",
                "Compress.Quantization.weight_preprocess_type=PACT",
            ],
            "Compress.Quantization",
        ),
    ],
)
def test_what_ascend_leaves_to_the_host_is_named(small, overrides, key):
    cfg = load_config(small, overrides)
    assert host_operator_notes(cfg, "gpu") == []
    assert [note.startswith(key) for note in host_operator_notes(cfg, "npu")] == [True] * bool(key)
    assert all(note in check_report(cfg, "npu") for note in host_operator_notes(cfg, "npu"))


def test_every_field_is_documented():
    def missing(section):
        docs = field_docs(section)
        for name, annotation in field_types(section).items():
            inner = section_in(annotation)
            if inner is None and name not in docs:
                yield f"{section.__name__}.{name}"
            elif inner is not None:
                yield from missing(inner)

    assert list(missing(RunConfig)) == []


def test_schema_knows_every_key_and_choice():
    schema = json_schema()
    text = json.dumps(schema)
    for key in all_keys(RunConfig):
        assert f'"{key.rpartition(".")[2]}"' in text
    lr = schema["$defs"]["LRConfig"]["properties"]
    assert "wsd" in lr["decay_style"]["anyOf"][0]["enum"]
    assert schema["additionalProperties"] is False
    assert "Length of the warm-up in optimizer steps" in lr["warmup_steps"]["description"]
