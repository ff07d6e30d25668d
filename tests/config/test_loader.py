"""Bases, overrides, values, dumps and old spellings."""

import re
from pathlib import Path

import pytest
import yaml

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.field_annotations import field_types, section_in
from ppfleetx.config.loader import load_config
from ppfleetx.config.sections.optimizer import LRConfig
from ppfleetx.config.sections.root import ModelConfig, RunConfig
from ppfleetx.config.yaml_dump import dump_config, run_record
from tests.config.conftest import SMALL, refusal

CONFIGS = Path(__file__).parents[2] / "ppfleetx" / "configs"


def test_bases_merge_in_order_and_chain(small, write):
    write("one.yaml", "_base_: small.yaml\nModel: {num_layers: 6, norm_epsilon: 1e-6}\n")
    write("sub/two.yaml", "Model:\n  num_layers: 7\nOptimizer:\n  weight_decay: 0.5\n")
    path = write("top.yaml", "_base_: [one.yaml, sub/two.yaml]\nOptimizer:\n  beta1: 0.8\n")
    cfg = load_config(path)
    assert (cfg.Model.num_layers, cfg.Model.norm_epsilon, cfg.Model.hidden_size) == (7, 1e-6, 64)
    assert (cfg.Optimizer.weight_decay, cfg.Optimizer.beta1, cfg.Optimizer.lr.max_lr) == (0.5, 0.8, 2e-5)
    assert cfg.origins["Model.num_layers"].endswith("sub/two.yaml:2")
    assert cfg.origins["Optimizer.lr.max_lr"].endswith("small.yaml:17")


def test_places_are_paths_as_one_would_write_them(small, write):
    write("one.yaml", "_base_: small.yaml\nModel: {num_layers: 6}\n")
    path = write("sub/deep/top.yaml", "_base_: ../../one.yaml\n")
    assert load_config(path).origins["Model.num_layers"] == f"{path.parents[2] / 'one.yaml'}:2"
    path.parent.rename(path.parents[2] / "elsewhere")  # where `..` does not lead back through a link
    (path.parents[1] / "deep").symlink_to(path.parents[2] / "elsewhere")
    write("sub/one.yaml", "Model: {num_layers: 7}\n")
    write("elsewhere/top.yaml", "_base_: ../one.yaml\n")
    assert load_config(path).Model.num_layers == 6


def test_a_base_may_be_shared(small, write):
    write("a.yaml", "_base_: small.yaml\nEngine: {max_steps: 1}\n")
    write("b.yaml", "_base_: small.yaml\nEngine: {logging_freq: 3}\n")
    cfg = load_config(write("top.yaml", "_base_: [a.yaml, b.yaml]\n"))
    assert (cfg.Engine.max_steps, cfg.Engine.logging_freq) == (100, 3)  # b restates what small says


def test_inherited_false_drops_the_base_mapping(small, write):
    cfg = load_config(
        write("top.yaml", "_base_: small.yaml\nOptimizer:\n  _inherited_: False\n  beta1: 0.5\n")
    )
    assert (cfg.Optimizer.lr.max_lr, cfg.Optimizer.beta1) == (LRConfig().max_lr, 0.5)
    cfg = load_config(
        write("top.yaml", "_base_: small.yaml\nOptimizer:\n  _inherited_: True\n  beta1: 0.5\n")
    )
    assert cfg.Optimizer.lr.max_lr == 2e-5


def test_mapping_over_null_and_null_over_mapping(small, write):
    write("null.yaml", "_base_: small.yaml\nData:\n  Eval: null\n")
    cfg = load_config(
        write("top.yaml", "_base_: null.yaml\nData:\n  Eval:\n    dataset: {max_seq_len: 64}\n")
    )
    assert cfg.Data.Eval.dataset.max_seq_len == 64
    cfg = load_config(write("top2.yaml", "_base_: top.yaml\nData:\n  Eval:\n"))
    assert cfg.Data.Eval is None
    assert load_config(write("top3.yaml", "_base_: small.yaml\nProfiler:\n")).Profiler.enable is False


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("Optimizer.lr.max_lr=2e-5", 2e-5),
        ("Optimizer.lr.max_lr='2e-5'", 2e-5),
        ("Optimizer.lr.max_lr=1", 1.0),
        ("Optimizer.lr.max_lr=.5", 0.5),
        ("Engine.max_steps=1_000", 1000),
        ("Engine.checks=off", "off"),
        ("Engine.eval_freq=-1", 0),
        ("Engine.eval_freq=null", 0),
        ("Engine.save_load.save_steps=-1", None),
        ("Engine.save_load.save_steps=0", None),
        ("Engine.save_load.ckpt_dir=None", None),
        ("Engine.save_load.ckpt_dir=~", None),
        ("Engine.save_load.ckpt_dir=007", "007"),
        ("Engine.save_load.ckpt_dir=a=b=c", "a=b=c"),
        ("Engine.save_load.ckpt_dir='x y'", "x y"),
        ("Engine.save_load.resume=true", True),
        ("Engine.save_load.resume=auto", "auto"),
        ("Engine.mix_precision.custom_black_list=[a, 3]", ("a", "3")),
        ("Engine.mix_precision.level=o1", "O1"),
        ("Generation.prompt=def f(x: int): {", "def f(x: int): {"),
        ("Generation.prompt=key: value", "key: value"),
        ("Generation.prompt=# not a comment", "# not a comment"),
        ("Generation.prompt=1.50", "1.50"),
        ('Generation.prompt="a\\nb"', "a\nb"),
        ("Generation.prompt=[a, 'b: c']", ("a", "b: c")),
        ("Data.Train.dataset.split.0=90", (90, 1, 1)),
        ("Data.Train.dataset.split=98,1,1", "98,1,1"),
        ("Data.Train.dataset={max_seq_len: 32}", 32),
        ("Global.flags={FLAGS_a: 1, FLAGS_b: true}", {"FLAGS_a": 1, "FLAGS_b": True}),
        ("Global.flags.FLAGS_c=text", {"FLAGS_c": "text"}),
    ],
)
def test_override_values(small, override, value):
    cfg = load_config(small, [override])
    found = cfg
    for part in override.partition("=")[0].split("."):
        found = found if isinstance(found, (tuple, dict)) else getattr(found, part)
    assert (found.max_seq_len if value == 32 else found) == value
    assert type(value) is type(found) or value == 32


def test_numbers_in_text_files_are_read_as_written(write, small):
    cfg = load_config(
        write("t.yaml", "_base_: small.yaml\nEngine:\n  checks: off\n  save_load:\n    ckpt_dir: 010\n")
    )
    assert (cfg.Engine.checks, cfg.Engine.save_load.ckpt_dir) == ("off", "010")


def test_a_file_with_a_byte_order_mark_is_read(write):
    assert load_config(write("bom.yaml", "\ufeff" + SMALL)).Model.num_layers == 4


def test_aliases_are_read(write):
    text = SMALL + "  Eval: &split {dataset: {max_seq_len: &length 64}}\n  Test: *split\n"
    text = text.replace("Optimizer:\n  lr: {max_lr: 2e-5}\n", "") + "Offline_Eval: {max_seq_len: *length}\n"
    cfg = load_config(write("aliases.yaml", text), ["Data.Test.dataset.max_seq_len=32"])
    assert (cfg.Data.Eval.dataset.max_seq_len, cfg.Data.Test.dataset.max_seq_len) == (64, 32)
    assert cfg.Offline_Eval.max_seq_len == 64


def test_derived_values(small):
    cfg = load_config(small, ["Optimizer.lr.warmup_rate=0.25"])
    assert cfg.batch.accumulate_steps == cfg.Engine.accumulate_steps == 2
    assert cfg.batch.global_batch_size == cfg.Global.global_batch_size == 8
    assert (cfg.Optimizer.lr.decay_steps, cfg.Optimizer.lr.warmup_length) == (100, 25)
    assert cfg.Engine.test_iters == 100
    assert load_config(small, ["Engine.run_mode=epoch"]).Optimizer.lr.decay_steps is None


def test_world_size_fills_data_parallel(small):
    cfg = load_config(small, ["Distributed.mp_degree=2"], world_size=8)
    assert (cfg.plan.dp, cfg.Distributed.dp_degree, cfg.batch.global_batch_size) == (4, 4, 32)
    assert load_config(small, ["Distributed.mp_degree=2"]).plan.world_size == 2


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: p.stem)
def test_dump_reloads_equal(path, tmp_path):
    if path.parent.name == "_base_":
        return
    cfg = load_config(path)
    again = tmp_path / "dump.yaml"
    again.write_text(dump_config(cfg), encoding="utf-8")
    assert load_config(again) == cfg
    assert load_config(again, ["Global.seed=5"]) != cfg
    assert cfg.warnings == ()


def test_what_followed_from_other_keys_follows_anew_from_a_dump(small, write):
    cfg = load_config(small, ["Optimizer.lr.name=LinearDecayWithWarmup"], world_size=4)
    again = write("dump.yaml", dump_config(cfg))
    assert load_config(again, world_size=4) == cfg
    text = again.read_text(encoding="utf-8")
    noted = ("dp_degree: 4", "global_batch_size: 32", "accumulate_steps: 2", "test_iters: 100")
    for line in (*noted, "decay_steps: 100", "decay_style: linear"):
        assert f" # {line}  # derived\n" in text, line
    given = ["Distributed.mp_degree=2", "Global.micro_batch_size=2", "Engine.max_steps=50"]
    other = load_config(again, given, world_size=4)
    assert (other.plan.dp, other.plan.mp) == (2, 2)
    assert (other.batch.global_batch_size, other.batch.accumulate_steps) == (16, 4)
    assert other.Optimizer.lr.decay_steps == 50
    assert load_config(again, ["Optimizer.lr.name=null"]).Optimizer.lr.decay_style == "cosine"


def test_every_key_is_in_a_dump(small):
    text = dump_config(load_config(small, ["Model.lora.rank=2", "Data.Eval.dataset.max_seq_len=64"]))
    tree = yaml.safe_load(text)
    written = {f"{section}.{key}" for section, keys in tree.items() for key in keys}
    noted = set(re.findall(r"^ +# (\w+): ", text, re.MULTILINE))
    for section, kind in field_types(RunConfig).items():
        for key in field_types(section_in(kind)):
            assert f"{section}.{key}" in written or key in noted


def test_a_runs_record_goes_on_with_the_run(small, write):
    cfg = load_config(small, ["Engine.save_load.overwrite=True"], world_size=2)
    record = load_config(write("config.yaml", run_record(cfg)), ["Distributed.mp_degree=2"])
    assert (record.Engine.save_load.resume, record.Engine.save_load.overwrite) == ("auto", False)
    assert record.Model == cfg.Model
    assert record.plan.world_size == 2


OLD = """\
_base_: small.yaml
Engine:
  mix_precision: {use_pure_fp16: True, use_main_grad: False, use_fp16_guard: False}
Quantization: {enable: True, onnx_format: True}
Model: {type_vocab_size: 16}
Data: {Train: {loader: {return_list: False}, sampler: {name: DistributedBatchSampler}}}
Distributed: {pp_recompute_interval: 2}
Optimizer:
  name: FusedAdamW
  tensor_fusion: False
  lr: {use_increments: True, warmup: 0.1}
"""
OLD_KEYS = """
Compress.Quantization.onnx_format Data.Train.loader.return_list Data.Train.sampler.name
Distributed.pp_recompute_interval Engine.mix_precision.use_fp16_guard Engine.mix_precision.use_main_grad
Engine.mix_precision.use_pure_fp16 Model.type_vocab_size Optimizer.lr.use_increments
Optimizer.lr.warmup Optimizer.name Optimizer.tensor_fusion Quantization
"""


def test_old_spellings_load_with_one_warning_each(small, write):
    cfg = load_config(write("old.yaml", OLD))
    precision = cfg.Engine.mix_precision
    assert (precision.enable, precision.dtype, precision.level) == (True, "float16", "O2")
    assert (precision.main_grad_fp32, cfg.Compress.Quantization.enable) == (False, True)
    assert (cfg.Model.recompute_interval, cfg.Optimizer.name) == (2, "AdamW")
    assert (cfg.Optimizer.lr.warmup_rate, cfg.Data.Train.sampler.name) == (0.1, "GPTBatchSampler")
    assert sorted(warning.split()[0] for warning in cfg.warnings) == OLD_KEYS.split()
    assert all("old.yaml:" in warning for warning in cfg.warnings)


def test_old_spelling_on_the_command_line_replaces_the_file(small):
    cfg = load_config(
        CONFIGS / "nlp/gpt/pretrain_gpt_345M_single_card.yaml", ["Engine.mix_precision.use_pure_fp16=False"]
    )
    assert cfg.Engine.mix_precision.enable is False
    assert len(cfg.warnings) == 1


def test_old_and_new_spelling_that_contradict(small, write):
    path = write(
        "t.yaml", "_base_: small.yaml\nEngine: {mix_precision: {use_pure_fp16: True, enable: False}}\n"
    )
    with pytest.raises(ConfigError, match=r"enable = False \(.*t.yaml:2\): contradicts its old spelling"):
        load_config(path)


def test_recomputed_layers():
    def chosen(**keys):
        model = ModelConfig(hidden_size=8, num_layers=6, num_attention_heads=1, vocab_size=9, **keys)
        return [layer for layer in range(6) if model.is_recomputed(layer)]

    assert chosen() == []
    assert chosen(use_recompute=True) == [0, 1, 2, 3, 4, 5]
    assert chosen(use_recompute=True, recompute_interval=2, no_recompute_layers=(2,)) == [0, 4]
    assert chosen(use_recompute=True, recompute_layers=(1, 5)) == [1, 5]


def test_a_path_may_begin_with_the_home_directory(small, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    key = "Engine.save_load.output_dir"
    assert load_config(small, [f"{key}=~/o"]).Engine.save_load.output_dir == f"{tmp_path}/o"
    for path in ("~no_such_user/o", "a/~"):  # as in a shell
        assert load_config(small, [f"{key}={path}"]).Engine.save_load.output_dir == path


def test_a_dollar_sign_is_part_of_the_name_of_a_directory_that_exists(small, tmp_path):
    place = tmp_path / "a$b"
    key = "Engine.save_load.init_from"
    assert "which only a shell replaces" in refusal(small, [f"{key}={place}"])
    place.mkdir()
    assert load_config(small, [f"{key}={place}"]).Engine.save_load.init_from == str(place)


def test_a_kind_of_device_has_any_name_that_its_plugin_gives(small):
    for name in ("custom_cpu", "FakeCPU", "my-card"):
        assert load_config(small, [f"Global.device={name}"]).Global.device == name
