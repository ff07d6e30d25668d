"""Each wrong configuration ends with one ConfigError that names key, value, place and rule."""

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from tests.config.conftest import SMALL, refusal


def assert_said(message, pieces):
    assert [piece for piece in pieces if piece not in message] == [], message


# override, and pieces its message must hold
WRONG_OVERRIDES = [
    (
        "Engine.max_stepz=5",
        ["Engine.max_stepz (-o override 1)", "no such key", "Did you mean Engine.max_steps?"],
    ),
    ("max_steps=5", ["no such key", "Engine.max_steps"]),
    ("Modle.hidden_size=5", ["Modle", "no such key", "Model"]),
    ("Engine.foo=5", ["Engine.foo", "no such key in Engine. Keys here: max_steps"]),
    ("Engine.hidden_size=5", ["Engine.hidden_size", "Did you mean Model.hidden_size"]),
    ("Engine.max_steps=12x", ["Engine.max_steps = '12x'", "an integer of at least 1"]),
    ("Engine.max_steps=1.5", ["Engine.max_steps = 1.5", "an integer of at least 1"]),
    ("Engine.max_steps=true", ["Engine.max_steps = True", "an integer of at least 1"]),
    ("Engine.max_steps=0", ["Engine.max_steps = 0", "at least 1"]),
    ("Engine.max_steps=", ["Engine.max_steps = None", "an integer"]),
    ("Engine.max_steps=[1]", ["Engine.max_steps = [1]", "an integer"]),
    ("Engine.mix_precision.enable=1", ["Engine.mix_precision.enable = 1", "true or false"]),
    ("Engine.mix_precision.dtype=fp16", ["'fp16'", "one of float16, bfloat16"]),
    ("Engine.save_load.resume=maybe", ["'maybe'", "auto, or true or false"]),
    ("Engine.accumulate_steps=3", ["Engine.accumulate_steps = 3", "8 / micro_batch_size 4 = 2"]),
    ("Engine=5", ["Engine = 5", "a section"]),
    ("Model.num_layers=null", ["Model.num_layers = None", "an integer"]),
    ("Model.num_attention_heads=5", ["Model.num_attention_heads = 5", "64", "small.yaml:8"]),
    ("Model.num_query_groups=3", ["Model.num_query_groups = 3", "must divide the number of heads 4"]),
    ("Model.hidden_dropout_prob=1.0", ["Model.hidden_dropout_prob = 1.0", "[0, 1)"]),
    ("Model.no_recompute_layers=[4]", ["layer 4 does not exist", "0 to 3"]),
    ("Model.add_head_bias=True", ["Model.add_head_bias = True", "tied"]),
    ("Data.Train.dataset.max_seq_len=4096", ["max_seq_len = 4096", "max_position_embeddings 1024"]),
    ("Data.Train.dataset.split.0=abc", ["Data.Train.dataset.split.0 = 'abc'", "a number of at least 0"]),
    ("Data.Train.dataset.split.3=1", ["has 3 items"]),
    ("Data.Train.dataset.split=[0, 0, 0]", ["shares"]),
    ("Data.Train.dataset.split=nine", ["shares"]),
    ("Data.Train.dataset.input_dir=[a, b, {c: 1}]", ["input_dir.2 = {'c': 1}", "a path"]),
    ("Data.Train.dataset.weights=[1, 2]", ["2 weights for 1 corpus"]),
    ("Data.Train.dataset.eod_id=1000", ["eod_id = 1000", "0 to 999", "small.yaml:7"]),
    ("Data.Train.dataset.eod_mask_loss=True", ["give Data.Train.dataset.eod_id or Data.tokenizer"]),
    ("Data.tokenizer.vocab_file=v.json", ["vocab_file and merges_file are given together"]),
    ("Engine.save_load.output_dir=", ["output_dir = None", "a path"]),
    ("Engine.save_load.ckpt_dir=''", ["ckpt_dir = ''", "a path"]),
    ("Data.Train.dataset.input_dir=[]", ["input_dir = []", "at least one entry"]),
    ("Data.Train.dataset.input_dir=[a, '']", ["input_dir.1 = ''", "a path of at least one character"]),
    ("Data.Train.dataset.input_dir=' '", ["input_dir = ' '", "of at least one character"]),
    ("Global.seed=4294967296", ["Global.seed = 4294967296", "below 2^32"]),
    ("Engine.save_load.output_dir=$HOME/o", ["output_dir = '$HOME/o'", "which only a shell replaces"]),
    ("Data.Train.dataset.input_dir=[a, '${DATA}/b']", ["input_dir.1", "which only a shell replaces"]),
    ("Global.device=GPU", ["Global.device = 'GPU'", "such as gpu"]),
    ("Global.device=gpu:1", ["such as gpu; the launcher's --devices chooses cards"]),
    ("Global.device=cuda", ["such as gpu"]),
    ("Global.device=Ascend", ["such as npu"]),
    ("Global.device=FakeCPU:0", ["such as FakeCPU; the launcher's --devices chooses cards"]),
    ("Distributed.virtual_pp_degree=2", ["Did you mean Model.virtual_pp_degree?"]),
    ("Distributed.cp_degree=2", ["Did you mean Distributed.sep_degree?"]),
    ("Optimizer.groups=[{kinds: [norm], wd: 0}]", ["Did you mean Optimizer.groups.0.weight_decay?"]),
    ("Global.seed=-1", ["Global.seed = -1", "at least 0"]),
    ("Model.vocab_size=2147483648", ["Model.vocab_size = 2147483648", "below 2^31"]),
    ("Model.vocab_size=2147483647", ["Model.vocab_size = 2147483647", "padded vocabulary", "2147483648"]),
    ("Model.hidden_size=2147483644", ["Model.hidden_size = 2147483644", "the MLP would be 8589934576 wide"]),
    ("Model.head_dim=1000000000", ["Model.head_dim = 1000000000", "query/key/value projection"]),
    ("Global.global_batch_size=7", ["Global.global_batch_size = 7", "local_batch_size 8 x", "small.yaml:2"]),
    ("Global.micro_batch_size=3", ["Global.micro_batch_size = 3", "8 does not divide", "small.yaml:2"]),
    (
        "Optimizer.lr.warmup_steps=101",
        ["warmup_steps = 101", "longer than the schedule of 100 steps", "small.yaml:5"],
    ),
    ("Optimizer.lr.min_lr=1", ["Optimizer.lr.min_lr = 1", "above the highest 2e-05", "small.yaml:17"]),
    ("Optimizer.lr.max_lr=abc", ["Optimizer.lr.max_lr = 'abc'", "a number"]),
    ("Optimizer.lr.wsd_decay_steps=5", ["wsd_decay_steps = 5", "no meaning with decay_style 'cosine'"]),
    ("Optimizer.name=Adan", ["Optimizer.name = 'Adan'", "one of AdamW, Muon, SGD"]),
    ("Distributed.mp_degree=8", ["Distributed.mp_degree = 8", "4 attention heads", "small.yaml:10"]),
    ("Distributed.pp_schedule=zb_h1", ["Distributed.pp_schedule = 'zb_h1'", "needs pp_degree > 1"]),
    ("Distributed.sharding.sharding_stage=True", ["sharding_stage = True", "one of 1, 2, 3"]),
    ("Generation.top_p=0", ["Generation.top_p = 0", "(0, 1]"]),
    ("Generation.min_dec_len=50", ["min_dec_len = 50", "at most 20"]),
    ("Offline_Eval.overlapping_eval=2000", ["overlapping_eval = 2000", "gaps"]),
    ("Profiler.scheduler=[5, 1]", ["Profiler.scheduler = [5, 1]", "smaller"]),
    (
        "Compress.Quantization.quantizable_layer_type=[Linaer]",
        ["no layer type 'Linaer'", "did you mean Linear?"],
    ),
    (
        "Compress.Quantization={enable: true, skip_layers: ['*.mlp.fc3']}",
        ["skip_layers", "'*.mlp.fc3' fits no linear", "*.mlp.fc1"],
    ),
    (
        "Compress.Quantization={enable: true, quantizable_layer_type: [Conv2D]}",
        ["quantizable_layer_type", "names none of Linear, ColumnParallelLinear, RowParallelLinear"],
    ),
    ("Compress.Quantization.weight_bits=64", ["weight_bits = 64", "between 2 and 16"]),
    ("Engine.max_steps", ["not of the form Section.key=value. Example: Engine.max_steps=10.", "override 1"]),
    ("=5", ["not of the form"]),
    ("Engine..max_steps=5", ["not of the form"]),
    ("Engine.max_steps=9223372036854775808", ["Engine.max_steps", "at most 2^63 - 1"]),
    ("Optimizer.lr.max_lr=.INF", ["Optimizer.lr.max_lr = inf", "a number"]),
    ("Optimizer.lr.max_lr=.NaN", ["Optimizer.lr.max_lr = nan"]),
    ("Data.Train.dataset.split.x=1", ["'x' is not an index"]),
    ("Model.num_layers=3000000", ["Model.num_layers = 3000000", "from 1 to 10000"]),
    ("Distributed.pp_degree=720720", ["nearest legal plan for 720720: dp 720720"]),
    ("Model.num_layers=*a", ["Model.num_layers = '*a' (-o override 1)", "undefined alias"]),
    ("Model.num_layers=!!set {a}", ["(-o override 1): in the value, the tag"]),
    ("Model.num_layers=[1", ["(-o override 1): the value is not valid YAML"]),
]


WRONG_COMBINATIONS = [
    (
        ["Model.qk_layernorm=each_head", "Model.normalization=LayerNorm1P"],
        ["Model.qk_layernorm = 'each_head' (-o override 1)", "has a weight and no bias"],
    ),
    (
        ["Compress.Prune.enable=True", "Model.qk_layernorm=each_head"],
        ["Compress.Prune.enable = True (-o override 1)", "its gains belong to this number of heads"],
    ),
    (
        ["Engine.max_steps=1", "Engine.max_steps=2"],
        ["Engine.max_steps = 2 (-o override 2)", "already set by override 1 to 1;"],
    ),
    (
        ["Engine.max_steps=1", "Engine.max_steps=1", "Engine.max_steps=1.5"],
        ["Engine.max_steps = 1.5 (-o override 3)", "already set by override 2 to 1;"],
    ),
    (
        ["Engine.mix_precision.enable=1", "Engine.mix_precision.enable=True"],
        ["already set by override 1 to 1;"],
    ),
    (
        ["Optimizer.lr.max_lr=1e-3", "Optimizer.lr={max_lr: 1e-4}"],
        ["Optimizer.lr = {'max_lr': 0.0001}", "already set by override 1 (Optimizer.lr.max_lr) to 0.001;"],
    ),
    (["Optimizer.lr.max_lr=1e-3", "Optimizer=null"], ["already set by override 1 (Optimizer.lr.max_lr)"]),
    (["Global.local_batch_size=null", "Global.micro_batch_size=null"], ["no batch size is given"]),
    (
        ["Global.micro_batch_size=null", "Engine.accumulate_steps=3"],
        ["local_batch_size 8 does not divide by accumulate_steps 3"],
    ),
    (
        ["Optimizer.lr.warmup_rate=0.1", "Optimizer.lr.warmup_steps=5"],
        ["in steps or as a rate", "override 2"],
    ),
    (["Engine.save_load.resume=auto", "Engine.save_load.overwrite=True"], ["not both", "override 2"]),
    (["Generation.prompt=a", "Generation.prompt_file=b"], ["not both"]),
    (
        ["Optimizer.lr.name=LinearDecayWithWarmup", "Optimizer.lr.decay_style=wsd"],
        ["contradicts", "'linear'"],
    ),
    (["Model.attention_kernel=reference", "Model.use_flash_attn=True"], ["contradict each other"]),
    (["Model.position_embedding_type=rope", "Model.head_dim=15"], ["must be even, not 15"]),
    (
        ["Global.local_batch_size=null", "Distributed.dp_degree=3", "Global.global_batch_size=8"],
        ["3 data ranks", "9"],
    ),
    (
        ["Distributed.dp_degree=1048576", "Distributed.mp_degree=1048576"],
        ["Distributed.dp_degree = 1048576 (-o override 1)", "1,099,511,627,776 processes", "override 2"],
    ),
    (
        ["Data.Train.dataset.input_dir=[a, b]", "Data.Train.dataset.weights=[1e308, 1e308]"],
        ["weights = [1e+308, 1e+308]", "finite"],
    ),
]


CASES = [*(([one], pieces) for one, pieces in WRONG_OVERRIDES), *WRONG_COMBINATIONS]


@pytest.mark.parametrize(("overrides", "pieces"), CASES, ids=[" ".join(overrides) for overrides, _ in CASES])
def test_wrong_overrides(small, overrides, pieces):
    assert_said(refusal(small, overrides), pieces)


def test_overrides_that_say_the_same_twice(small):
    equal = [
        ["Engine.max_steps=7", "Engine.max_steps=7"],
        ["Engine.max_steps=7", " Engine.max_steps = 7"],
        ["Optimizer.lr.max_lr=1e-3", "Optimizer.lr.max_lr=0.001"],
        ["Engine.save_load.output_dir=a", "Engine.save_load.output_dir='a'"],
        ["Data.Train.dataset.split=[9, 1]", "Data.Train.dataset.split=[9, 1]"],
        ["Optimizer.lr.max_lr=1e-3", "Optimizer.lr={max_lr: 1e-3, min_lr: 1e-4}"],
        ["Data.Train.dataset.split.1=3", "Data.Train.dataset.split=[9, 3]"],
        ["Optimizer.lr={max_lr: 1e-3, min_lr: 1e-4}", "Optimizer.lr.min_lr=1e-5"],
    ]
    for overrides in equal:
        cfg = load_config(small, overrides)
        assert cfg.origins[overrides[-1].partition("=")[0].strip()] == "-o override 2"
    assert load_config(small, equal[-1]).Optimizer.lr.min_lr == 1e-5  # the later says more


WRONG_FILES = [
    ("", ["wrong.yaml", "the file is empty"]),
    ("- 1\n", ["holds a list"]),
    ("text\n", ["holds a single value"]),
    ("Model:\n  hidden_size: [\n", ["not valid YAML", "wrong.yaml:"]),
    ("Model:\n\thidden_size: 1\n", ["not valid YAML", "wrong.yaml:2"]),
    ("Model: {hidden_size: 64}\n", ["Model.vocab_size", "is required", "Model.num_layers"]),
    ("Global: {}\n", ["Model", "is required"]),
    ("_base_: nowhere.yaml\n", ["_base_ = 'nowhere.yaml'", "wrong.yaml:1", "no such file"]),
    ("Model: {a: &x [*x]}\n", ["wrong.yaml", "nested too deeply"]),
    ("Model: *x\n", ["wrong.yaml:1", "undefined alias"]),
    ("a: " + "[" * 10_000, ["wrong.yaml", "nested too deeply"]),
    (
        SMALL + "".join(f"k{i}: 1\n" for i in range(10_000)),
        ["k0 (", "wrong.yaml:18", "no such key", "k7 (", "and 9,992 more"],
    ),
    ("#" * (2 << 20), ["wrong.yaml", "larger than 1,048,576 bytes"]),
    ("Model:\n  '': 1\n", ["Model. (", "wrong.yaml:2", "is empty"]),
    ("Engine.max_steps: 5\n", ["Engine.max_steps (", "nest the keys"]),
    ("Model: {[a, b]: 1}\n", ["Model (", "wrong.yaml:1", "not a list"]),
    ("a: &x {b: 1}\nc: {<<: *x}\n", ["c.<< (", "wrong.yaml:2", "_base_"]),
    ("Model: {a: 1,\n a: 2}\n", ["Model.a (", "wrong.yaml:2", "given twice", "wrong.yaml:1"]),
    ("Model:\n  a: \x01\n", ["wrong.yaml:2", "not valid YAML"]),
    ("Model: {a: !!python/object:os.system {}}\n", ["Model.a (", "the tag", "python/object"]),
    ("a: 1\n---\nb: 1\n", ["wrong.yaml:2", "another document"]),
    (b"Model:\n  a: \xff\n", ["wrong.yaml:2", "UTF-8"]),
    ("Model: 1\n".encode("utf-16"), ["is UTF-16"]),
    ("_base_: {a: b}\n", ["_base_ = {'a': 'b'} (", "wrong.yaml:1", "file name"]),
    (
        "_base_: small.yaml\nModel: {_inherited_: [1]}\n",
        ["Model._inherited_ = [1] (", "wrong.yaml:2", "true or false"],
    ),
    ("_base_: ''\n", ["_base_ = '' (", "wrong.yaml:1", "file name"]),
    ("_base_: wrong.yaml\n", ["_base_ = 'wrong.yaml' (", "circle"]),
    ("Quantization: {enable: true}\nCompress: [5]\n", ["Compress = [5] ("]),
    (
        "Quantization: {weight_quantize_type: {a: [1]}}\nCompress: {Quantization: [2]}\n",
        ["Compress.Quantization = [2] (", "wrong.yaml:2", "{'weight_quantize_type': {'a': [1]}}"],
    ),
    (SMALL.replace("{max_lr: 2e-5}", "{name: [1]}"), ["Optimizer.lr.name = [1] ("]),
]


@pytest.mark.parametrize(("content", "pieces"), WRONG_FILES, ids=[pieces[0] for _, pieces in WRONG_FILES])
def test_wrong_file(small, write, content, pieces):
    path = write("wrong.yaml", "")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal(path)
    assert_said(message, pieces)
    assert len(message) < 3000


def test_a_directory_is_no_configuration(tmp_path):
    assert "is a directory without a config.yaml" in refusal(str(tmp_path))


def test_only_a_file_without_a_whole_model_may_be_one_that_others_name(small, write):
    assert "_base_ may lack it" in refusal(write("wrong.yaml", "Model: {hidden_size: 64}\n"))
    assert "_base_ may lack it" not in refusal(small, ["Model.moe={}"])


def test_several_errors_come_together(small):
    message = refusal(small, ["Engine.max_steps=x", "Engine.evalfreq=1", "Model.num_layers=-1"])
    assert_said(message, ["Engine.max_steps", "Engine.eval_freq?", "Model.num_layers = -1"])


def test_place_is_the_file_that_wrote_the_value(small, write):
    path = write("child.yaml", "_base_: small.yaml\nModel:\n  norm_epsilon: no\n")
    with pytest.raises(ConfigError, match=r"Model.norm_epsilon = False \(.*child.yaml:3\)"):
        load_config(path)
    path = write("child.yaml", "_base_: small.yaml\nModel:\n  norm_epsilon: 1.0\n  num_attention_heads: 3\n")
    with pytest.raises(ConfigError, match=r"child.yaml:4.*hidden_size = 64 \(.*small.yaml:8\)"):
        load_config(path)


WORLDS = [
    (
        1,
        ["Distributed.dp_degree=8"],
        [
            "1 process was started",
            "needs 8",
            "nearest plan for 1: dp 1",
            "(-o Distributed.dp_degree=1). Start 8 with ppfleetx train --nproc 8",
        ],
    ),
    (3072, ["Distributed.dp_degree=8"], ["3072 processes", "needs 8", "nearest plan for 3072: dp 3072"]),
]


@pytest.mark.parametrize(("world", "overrides", "pieces"), WORLDS)
def test_world_size_names_both_numbers_and_a_plan(small, world, overrides, pieces):
    assert_said(refusal(small, overrides, world_size=world), pieces)


def test_a_leading_tilde_is_the_home_directory(small, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["Engine.save_load.output_dir=~/out", "Data.Train.dataset.input_dir=[~/a, b~]"]
    cfg = load_config(small, paths)
    assert cfg.Engine.save_load.output_dir == "/home/me/out"
    assert cfg.Data.Train.dataset.input_dir == ("/home/me/a", "b~")
