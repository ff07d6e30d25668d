"""YAML files and overrides that cannot be read: refused with key, place and rule."""

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from tests.config.conftest import SMALL


def refusal(path, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


FILES = {
    "an alias of what is around it": ("Model: {a: &x [*x]}\n", ["wrong.yaml", "nested too deeply"]),
    "an alias of nothing": ("Model: *x\n", ["wrong.yaml:1", "undefined alias"]),
    "nested brackets": ("a: " + "[" * 10_000, ["wrong.yaml", "nested too deeply"]),
    "unknown sections": (
        SMALL + "".join(f"k{i}: 1\n" for i in range(10_000)),
        ["k0 (", "wrong.yaml:18", "no such key", "k7 (", "and 9,992 more"],
    ),
    "a large file": ("#" * (2 << 20), ["wrong.yaml", "larger than 1,048,576 bytes"]),
    "an empty key": ("Model:\n  '': 1\n", ["Model. (", "wrong.yaml:2", "is empty"]),
    "a key with dots": ("Engine.max_steps: 5\n", ["Engine.max_steps (", "nest the keys"]),
    "a list for a key": ("Model: {[a, b]: 1}\n", ["Model (", "wrong.yaml:1", "not a list"]),
    "a merge key": ("a: &x {b: 1}\nc: {<<: *x}\n", ["c.<< (", "wrong.yaml:2", "_base_"]),
    "a key twice": ("Model: {a: 1,\n a: 2}\n", ["Model.a (", "wrong.yaml:2", "given twice", "wrong.yaml:1"]),
    "a control character": ("Model:\n  a: \x01\n", ["wrong.yaml:2", "not valid YAML"]),
    "a tag": ("Model: {a: !!python/object:os.system {}}\n", ["Model.a (", "the tag", "python/object"]),
    "a second document": ("a: 1\n---\nb: 1\n", ["wrong.yaml:2", "another document"]),
    "bytes": (b"Model:\n  a: \xff\n", ["wrong.yaml:2", "UTF-8"]),
    "UTF-16": ("Model: 1\n".encode("utf-16"), ["is UTF-16"]),
    "a mapping as base": ("_base_: {a: b}\n", ["_base_ = {'a': 'b'} (", "wrong.yaml:1", "file name"]),
    "a mapping as mark": (
        "_base_: small.yaml\nModel: {_inherited_: [1]}\n",
        ["Model._inherited_ = [1] (", "wrong.yaml:2", "true or false"],
    ),
    "a directory as base": ("_base_: ''\n", ["_base_ = '' (", "wrong.yaml:1", "directory"]),
    "a base that names itself": ("_base_: wrong.yaml\n", ["_base_ = 'wrong.yaml' (", "circle"]),
    "an old spelling in no section": ("Quantization: {enable: true}\nCompress: [5]\n", ["Compress = [5] ("]),
    "old and new spelling": (
        "Quantization: {weight_quantize_type: {a: [1]}}\nCompress: {Quantization: [2]}\n",
        ["Compress.Quantization = [2] (", "wrong.yaml:2", "{'weight_quantize_type': {'a': [1]}}"],
    ),
    "a list where a name is": (SMALL.replace("{max_lr: 2e-5}", "{name: [1]}"), ["Optimizer.lr.name = [1] ("]),
}


@pytest.mark.parametrize("name", FILES)
def test_file(write, small, name):
    text, pieces = FILES[name]
    path = write("wrong.yaml", "")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refusal(path)
    assert all(piece in message for piece in pieces), message
    assert len(message) < 3000


@pytest.mark.parametrize("name", ["nothing.yaml", "."])
def test_name_of_the_file(tmp_path, name):
    refusal(str(tmp_path / name))


OVERRIDES = {
    "64 bits": (["Engine.max_steps=9223372036854775808"], ["Engine.max_steps", "at most 2^63 - 1"]),
    "infinity": (["Optimizer.lr.max_lr=.INF"], ["Optimizer.lr.max_lr = inf", "a number"]),
    "nan": (["Optimizer.lr.max_lr=.NaN"], ["Optimizer.lr.max_lr = nan"]),
    "an index": (["Data.Train.dataset.split.x=1"], ["'x' is not an index"]),
    "layers": (["Model.num_layers=3000000"], ["Model.num_layers = 3000000", "from 1 to 10000"]),
    "degrees": (
        ["Distributed.dp_degree=1048576", "Distributed.mp_degree=1048576"],
        ["Distributed.dp_degree = 1048576 (-o override 1)", "1,099,511,627,776 processes", "override 2"],
    ),
    "a plan of a million": (["Distributed.pp_degree=720720"], ["nearest legal plan for 720720: dp 720720"]),
    "infinite weights": (
        ["Data.Train.dataset.input_dir=[a, b]", "Data.Train.dataset.weights=[1e308, 1e308]"],
        ["weights = [1e+308, 1e+308]", "finite"],
    ),
    "an alias": (["Model.num_layers=*a"], ["Model.num_layers = '*a' (-o override 1)", "undefined alias"]),
    "a tag": (["Model.num_layers=!!set {a}"], ["(-o override 1): in the value, the tag"]),
    "an open bracket": (["Model.num_layers=[1"], ["(-o override 1): the value is not valid YAML"]),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_override(small, name):
    overrides, pieces = OVERRIDES[name]
    message = refusal(small, overrides)
    assert all(piece in message for piece in pieces), message


def test_a_file_with_a_byte_order_mark_is_read(write):
    assert load_config(write("bom.yaml", "\ufeff" + SMALL)).Model.num_layers == 4


def test_aliases_are_read(write):
    text = SMALL + "  Eval: &split {dataset: {max_seq_len: &length 64}}\n  Test: *split\n"
    text = text.replace("Optimizer:\n  lr: {max_lr: 2e-5}\n", "") + "Offline_Eval: {max_seq_len: *length}\n"
    cfg = load_config(write("aliases.yaml", text), ["Data.Test.dataset.max_seq_len=32"])
    assert (cfg.Data.Eval.dataset.max_seq_len, cfg.Data.Test.dataset.max_seq_len) == (64, 32)
    assert cfg.Offline_Eval.max_seq_len == 64
