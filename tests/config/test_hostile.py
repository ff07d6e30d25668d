"""Files and overrides that nobody writes in good faith: refused at once, in words, with key and place."""

import os
import time

import pytest

from ppfleetx.commands.check import check_report
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.plan import ParallelPlan, Workload, nearest_plan
from tests.config.conftest import SMALL

SECONDS = 5  # of the processor


def refusal(path, overrides=()) -> str:
    """The message of the refusal, which has come soon and is of a length to be read."""
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        check_report(load_config(path, overrides))
    assert time.process_time() - start < SECONDS
    message = str(caught.value)
    assert len(message) < 3000
    assert "object at 0x" not in message
    assert "Node(" not in message
    assert "\x1b" not in message
    return message


TENS = "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
FILES = {
    "aliases that multiply": (f"a0: &a0 [x, x]\n{TENS}", ["wrong.yaml:5", "20,000 values"]),
    "texts that multiply": (
        f"a: &a {'x' * 1000}\nb: [{'*a,' * 5000}]\n",
        ["wrong.yaml:2", "1,048,576 characters"],
    ),
    "an alias of what is around it": ("Model: {a: &x [*x]}\n", ["Model.a.0 (", "wrong.yaml:1", "*x is part"]),
    "an alias of nothing": ("Model: *x\n", ["Model (", "wrong.yaml:1", "*x refers to nothing"]),
    "aliases that nest": (
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 60)),
        ["a39.0 (", "wrong.yaml:40", "nested too deeply"],
    ),
    "nested brackets": ("a: " + "[" * 100_000, ["a.0.0", "wrong.yaml:1", "nested too deeply"]),
    "nested braces": ("{a: " * 100_000, ["a.a.a", "wrong.yaml:1", "nested too deeply"]),
    "nested dashes": ("- " * 100_000, ["wrong.yaml:1", "nested too deeply"]),
    "unknown sections": (
        SMALL + "".join(f"k{i}: 1\n" for i in range(10_000)),
        ["k0 (", "wrong.yaml:18", "no such key", "k7 (", "and 9,992 more"],
    ),
    "unknown keys": (
        SMALL.replace(
            "  num_layers: 4\n", "  num_layers: 4\n" + "".join(f"  k{i}: 1\n" for i in range(10_000))
        ),
        ["Model.k0 (", "wrong.yaml:10", "and 9,992 more"],
    ),
    "wrong items": (
        SMALL + f"Distributed: {{pp_layers: [{'x,' * 10_000}]}}\n",
        ["Distributed.pp_layers.0 = 'x' (", "wrong.yaml:18", "more"],
    ),
    "wrong values of a mapping": (
        SMALL.replace("Global:\n", f"Global:\n  flags: {{{''.join(f'k{i}: [], ' for i in range(9000))}}}\n"),
        ["Global.flags.k0 = [] (", "wrong.yaml:2", "and 8,992 more"],
    ),
    "too many values": (f"a: [{'1,' * 30_000}]\n", ["wrong.yaml:1", "20,000 values"]),
    "a large file": ("#" * (2 << 20), ["wrong.yaml", "larger than 1,048,576 bytes"]),
    "directives": (
        "".join(f"%TAG !a{i}! b\n" for i in range(60_000)) + "--- a",
        ["wrong.yaml", "lines that begin with %"],
    ),
    "a long integer": (
        f"Engine: {{max_steps: {'9' * 4301}}}\n",
        ["Engine.max_steps = '99", "4,301 characters"],
    ),
    "an empty key": ("Model:\n  '': 1\n", ["Model. (", "wrong.yaml:2", "is empty"]),
    "a key of blanks": ("' ': 1\n", ["wrong.yaml:1", "is empty"]),
    "control characters in a key": ('Model: {"\\e[2J": 1}\n', ["Model.\\x1b[2J (", "control characters"]),
    "a long key": (f'? "{"k" * 5000}"\n: 1\n', ["wrong.yaml:1", "5,000 characters"]),
    "a key with dots": ("Engine.max_steps: 5\n", ["Engine.max_steps (", "below each other"]),
    "a list for a key": ("Model: {[a, b]: 1}\n", ["Model (", "wrong.yaml:1", "not a list"]),
    "a merge key": ("a: &x {b: 1}\nc: {<<: *x}\n", ["c.<< (", "wrong.yaml:2", "_base_"]),
    "a key twice": ("Model: {a: 1,\n a: 2}\n", ["Model.a (", "wrong.yaml:2", "given twice", "wrong.yaml:1"]),
    "NUL": ('Model: {a: "\\0"}\n', ["Model.a (", "NUL"]),
    "a control character": ("Model:\n  a: \x01\n", ["wrong.yaml:2", "not valid YAML: control characters"]),
    "half a character": ('a: "\\ud800"\n', ["wrong.yaml:1", "not valid YAML"]),
    "a tag": ("Model: {a: !!python/object:os.system {}}\n", ["Model.a (", "the tag", "python/object"]),
    "a second document": ("a: 1\n---\nb: 1\n", ["wrong.yaml:2", "second document"]),
    "bytes": (b"Model:\n  a: \xff\n", ["wrong.yaml:2", "UTF-8"]),
    "UTF-16": ("Model: 1\n".encode("utf-16"), ["is UTF-16"]),
    "a mapping as base": ("_base_: {a: b}\n", ["_base_ = {'a': 'b'} (", "wrong.yaml:1", "file name"]),
    "a mapping as mark": (
        "_base_: small.yaml\nModel: {_inherited_: [1]}\n",
        ["Model._inherited_ = [1] (", "wrong.yaml:2", "true or false"],
    ),
    "a device as base": ("_base_: /dev/urandom\n", ["_base_ = '/dev/urandom' (", "wrong.yaml:1", "device"]),
    "a pipe as base": ("_base_: pipe\n", ["_base_ = 'pipe' (", "wrong.yaml:1", "pipe"]),
    "a directory as base": ("_base_: ''\n", ["_base_ = '' (", "wrong.yaml:1", "is a directory"]),
    "links in a circle": ("_base_: loop\n", ["_base_ = 'loop' (", "cannot be read", "symbolic links"]),
    "a long name": (f"_base_: {'x' * 300}\n", ["(300 characters)", "wrong.yaml:1", "name too long"]),
    "one base too often": (f"_base_: [{'small.yaml,' * 5000}]\n", ["wrong.yaml:1", "more than 256 files"]),
    "an old spelling in no section": ("Quantization: {enable: true}\nCompress: [5]\n", ["Compress = [5] ("]),
    "old and new spelling": (
        "Quantization: {weight_quantize_type: {a: [1]}}\nCompress: {Quantization: [2]}\n",
        ["Compress.Quantization = [2] (", "wrong.yaml:2", "{'weight_quantize_type': {'a': [1]}}"],
    ),
    "a list where a name is": (SMALL.replace("{max_lr: 2e-5}", "{name: [1]}"), ["Optimizer.lr.name = [1] ("]),
}


@pytest.mark.parametrize("name", FILES)
def test_file(write, small, tmp_path, name):
    text, pieces = FILES[name]
    path = write("wrong.yaml", "")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    message = refusal(path)
    assert all(piece in message for piece in pieces), message


@pytest.mark.parametrize("name", ["pipe", "loop", "\0", "x" * 300, "\udcff", "/dev/null", "\x1b"])
def test_name_of_the_file(tmp_path, name):
    if name == "pipe":
        os.mkfifo(tmp_path / "pipe")
    if name == "loop":
        (tmp_path / "loop").symlink_to("loop")
    refusal(str(tmp_path / name) if not name.startswith("/") else name)


def test_a_file_that_many_name_is_read_once(write):
    for depth in range(20):
        for side in "ab":
            write(f"{depth}{side}.yaml", f"_base_: [{depth + 1}a.yaml, {depth + 1}b.yaml]\n")
    write("20a.yaml", SMALL)
    write("20b.yaml", SMALL)
    assert "20,000 values" in refusal(write("top.yaml", "_base_: 0a.yaml\n"))
    assert load_config(write("top.yaml", "_base_: 14a.yaml\n")).Model.num_layers == 4


def test_long_chains(write):
    for link in range(1500):
        write(f"{link}.yaml", f"_base_: {link + 1}.yaml\n")
    write("1500.yaml", SMALL)
    path = write("top.yaml", "_base_: 0.yaml\n")
    assert "_base_ = '31.yaml' (" in refusal(path)
    assert load_config(path.with_name("1480.yaml")).Model.num_layers == 4


LAYERS = "Model.num_layers=10000"
OVERRIDES = {
    "digits": ([f"Engine.max_steps={'9' * 4301}"], ["Engine.max_steps = '999", "4,301 characters"]),
    "64 bits": (["Engine.max_steps=9223372036854775808"], ["at most 2^63 - 1"]),
    "infinity": (["Optimizer.lr.max_lr=.INF"], ["Optimizer.lr.max_lr = inf", "a number"]),
    "1e999": (["Optimizer.lr.max_lr=1e999"], ["Optimizer.lr.max_lr = inf"]),
    "nan": (["Optimizer.lr.max_lr=.NaN"], ["Optimizer.lr.max_lr = nan"]),
    "dots": (["a" + ".a" * 1500 + "=1"], ["override 1", "1,501 parts"]),
    "a long part": ([f"{'a' * 1000}=1"], ["override 1", "1,000 characters"]),
    "superscript index": (["Data.Train.dataset.split.²=1"], ["'²' is not an index"]),
    "foreign index": (["Data.Train.dataset.split.١=1"], ["is not an index"]),
    "long index": ([f"Data.Train.dataset.split.{'1' * 50}=1"], ["is not an index"]),
    "superscript key": (["Global.flags.²={}"], ["Global.flags.² = {}"]),
    "control characters": (["Global.\x1b[2J=1"], ["Global.\\x1b[2J (", "control characters"]),
    "NUL": (["Generation.prompt=a\0b"], ["Generation.prompt = 'a\\x00b'", "NUL"]),
    "no Unicode": (["Engine.save_load.output_dir=\udcff"], ["output_dir = '\\udcff'", "not Unicode text"]),
    "a long path": (["Data.Train.dataset.input_dir=" + "a/" * 3000], ["6,000 characters", "at most 3500"]),
    "a long name": (["Engine.save_load.init_from=" + "a" * 300], ["300 characters", "200 between slashes"]),
    "a long name in a list": (
        [f"Data.Train.dataset.input_dir=[a, {'b' * 300}]"],
        ["Data.Train.dataset.input_dir.1 = 'bb", "a path of at most 3500 bytes"],
    ),
    "brackets": (["Engine.max_steps=" + "[" * 100_000], ["Engine.max_steps = '[[", "nested too deeply"]),
    "a long value": (["Global.seed='" + "z" * 100_000 + "'"], ["100,000 characters"]),
    "many": (["Engine.max_steps=1"] * 2000, ["2,000 overrides"]),
    "aliases": (
        [f"Global.flags.x{i}=[&a [1,2,3,4,5,6,7,8,9], {'*a,' * 300}]" for i in range(20)],
        ["20,000 values", "override"],
    ),
    "layers": (["Model.num_layers=3000000"], ["Model.num_layers = 3000000", "from 1 to 10000"]),
    "degrees": (
        ["Distributed.dp_degree=1048576", "Distributed.mp_degree=1048576"],
        ["Distributed.dp_degree = 1048576 (-o override 1)", "1,099,511,627,776 processes", "override 2"],
    ),
    "a plan of a million": (["Distributed.pp_degree=720720"], ["nearest legal plan for 720720: dp 720720"]),
    "shares": (["Data.Train.dataset.split=" + "1" * 100_000 + "x"], ["100,001 characters", "shares"]),
    "infinite shares": ([f"Data.Train.dataset.split={'9' * 400},1"], ["shares"]),
    "infinite weights": (
        ["Data.Train.dataset.input_dir=[a, b]", "Data.Train.dataset.weights=[1e308, 1e308]"],
        ["weights = [1e+308, 1e+308]", "finite"],
    ),
    "patterns": (
        [f"Model.lora={{targets: [{','.join(['a'] * 9000)}]}}", LAYERS],
        ["Model.lora.targets", "9000 patterns"],
    ),
    "a long pattern": ([f"Model.lora={{targets: ['{'*a' * 5000}']}}", LAYERS], ["10000 characters"]),
    "slow patterns": ([f"Model.lora={{targets: ['{'*a' * 99}']}}", LAYERS], ["fits no linear"]),
    "layer lists": (
        [f"Model.recompute_layers=[{','.join(['1'] * 9000)}]", "Model.use_recompute=True", LAYERS],
        ["names a layer twice"],
    ),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_override(small, name):
    overrides, pieces = OVERRIDES[name]
    message = refusal(small, overrides)
    assert all(piece in message for piece in pieces), message


LARGE = [
    [LAYERS, "Distributed.pp_degree=10000"],
    [LAYERS, "Model.use_recompute=True", f"Model.recompute_layers={list(range(5000))}"],
    [LAYERS, "Model.lora={targets: ['decoder.layers.9999.*']}"],
    ["Distributed.dp_degree=1048576"],
    ["Engine.max_steps=1000000000000"],
    ["Engine.max_steps=9223372036854775807", "Global.local_batch_size=9223372036854775804"],
    ["Model.vocab_size=2147483000", "Data.Train.dataset.max_seq_len=1024"],
    [LAYERS, "Distributed.pp_degree=2", "Distributed.noop_layers=[0, 1]"],
    [LAYERS, f"Distributed.pp_layers={[1] * 10_000}", "Distributed.pp_degree=10000"],
]


@pytest.mark.parametrize("overrides", LARGE, ids=range(len(LARGE)))
def test_what_is_legal_and_absurd_is_reported_soon(small, overrides):
    start = time.process_time()
    report = check_report(load_config(small, overrides))
    assert time.process_time() - start < SECONDS
    assert len(report) < 5000


def test_the_nearest_plan_is_found_soon():
    start = time.process_time()
    plan = ParallelPlan(mp=7, pp=3, sep=2, sequence_parallel=True, virtual_pp_degree=2)
    assert nearest_plan(plan, 720720, Workload(7, 7, 7, 7, 7, 7, 3)) == ParallelPlan(dp=720720)
    assert time.process_time() - start < SECONDS


def test_a_file_with_a_byte_order_mark_is_read(write):
    assert load_config(write("bom.yaml", "\ufeff" + SMALL)).Model.num_layers == 4


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("*a", "in the value, the alias *a refers to nothing before it"),
        ("{a: [*b]}", "in the value (at a.0), the alias *b refers to nothing before it"),
        ("!!set {a}", "in the value, the tag 'tag:yaml.org,2002:set' is not allowed"),
        ("[1", "the value is not valid YAML"),
    ],
)
def test_what_is_wrong_with_a_value_is_a_sentence(small, value, words):
    with pytest.raises(ConfigError) as caught:
        load_config(small, [f"Model.num_layers={value}"])
    assert f"(-o override 1): {words}" in str(caught.value)


def test_aliases_are_read(write):
    text = SMALL + "  Eval: &split {dataset: {max_seq_len: &length 64}}\n  Test: *split\n"
    text = text.replace("Optimizer:\n  lr: {max_lr: 2e-5}\n", "") + "Offline_Eval: {max_seq_len: *length}\n"
    cfg = load_config(write("aliases.yaml", text), ["Data.Test.dataset.max_seq_len=32"])
    assert (cfg.Data.Eval.dataset.max_seq_len, cfg.Data.Test.dataset.max_seq_len) == (64, 32)
    assert cfg.Offline_Eval.max_seq_len == 64
