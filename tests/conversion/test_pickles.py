"""Pickles are read and never run: weights come out, everything else is refused by name."""

import collections
import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE
from ppfleetx.config.errors import CheckpointError
from ppfleetx.conversion.paddle_file import read_paddle_file
from ppfleetx.conversion.safe_unpickler import (
    ARRAY_NAMES,
    PickledArray,
    Record,
    RefusedPickleError,
    WeightsUnpickler,
    flatten,
    reading,
)
from ppfleetx.conversion.torch_file import read_torch_file

GOLDENS = Path(__file__).parents[1] / "goldens" / "torch"


def load(content, **options):
    with reading(Path("file")):
        return WeightsUnpickler(io.BytesIO(content), ARRAY_NAMES, **options).load()


class Calls:
    """Pickles as a call of anything."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_plain_objects_come_out_as_pickle_itself_reads_them(protocol):
    tree = {
        "numbers": [1, -1, 255, 65536, 2**31, -(2**70), 1.5, True, None],
        "text": ["", "a\nb'\"\\", "\u00e9\U0001f600", b"", b"\x00\xff" * 200, bytearray(b"xyz")],
        "containers": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {1: {2: {}}}, {3, 4}, frozenset({5})],
        "ordered": collections.OrderedDict(a=1),
    }
    tree["again"] = tree["numbers"]
    if protocol < 3:  # pickle writes these as calls we do not need
        tree["text"] = [text for text in tree["text"] if not isinstance(text, bytearray)]
    found = load(pickle.dumps(tree, protocol))
    assert found == tree
    assert found["again"] is found["numbers"]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3, dtype=">f4"),
        np.float16(1.5) * np.ones((0, 2), np.float16),
        np.array(7),
        np.array([True, False]),
    ],
)
def test_arrays(protocol, array):
    found = load(pickle.dumps({"a": array}, protocol))["a"]
    np.testing.assert_array_equal(found.array, array)
    if array.dtype != bool:
        tensor = flatten({"a": found})["a"]
        np.testing.assert_array_equal(tensor.read(), array)
        assert tensor.read().dtype == array.dtype.newbyteorder("=")


def test_numpy_scalars_and_python_2_strings():
    assert load(pickle.dumps(np.float32(2.5))) == np.float32(2.5)
    assert load(b"(dp0\nS'key'\np1\nI3\ns.") == {"key": 3}


# ---- malicious


def attacks(target):
    """name of what is refused -> pickle that would create `target` if it were run."""
    system = f"touch {target}"
    return {
        "posix.system": pickle.dumps({"w": Calls(os.system, system)}, 4),
        "builtins.getattr": pickle.dumps(Calls(getattr, Calls(__import__, "os"), "system"), 4),
        "builtins.eval": pickle.dumps(Calls(eval, f"open({str(target)!r}, 'w')"), 4),
        # An instruction that names and calls in one, and one that calls what was named before.
        "nt.system": b"(S'" + system.encode() + b"'\nint\nsystem\n.",
        "posix.popen": b"(cposix\npopen\nS'" + system.encode() + b"'\no.",
        # Walking from an allowed module to another one by a dotted name.
        "numpy.core.multiarray.os.system": b"\x80\x04cnumpy.core.multiarray\nos.system\n(S'x'\ntR.",
        "collections.OrderedDict.__init__.__globals__": b"\x80\x04\x8c\x0bcollections"
        b"\x8c\x20OrderedDict.__init__.__globals__\x93.",
        # Something that only has to be named to be suspicious: nothing calls it here.
        "sys.modules": b"csys\nmodules\n.",
    }


@pytest.mark.parametrize("wanted", attacks(Path("/nowhere")))
def test_malicious_pickles_are_refused_by_name_and_run_nothing(wanted, tmp_path):
    path = tmp_path / "model.pdparams"
    path.write_bytes(attacks(tmp_path / "executed")[wanted])
    with pytest.raises(RefusedPickleError) as caught:
        read_paddle_file(path)
    assert f"it asks for '{wanted}'" in str(caught.value)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "executed").exists()


def test_the_same_attacks_would_work_with_pickle(tmp_path):
    """Otherwise the test above would prove nothing."""
    pickle.loads(attacks(tmp_path / "executed")["posix.system"])
    assert (tmp_path / "executed").exists()


def test_paddles_own_eval_is_known_in_one_form_only(tmp_path):
    path = tmp_path / "model.pdparams"
    array = np.arange(3.0)
    path.write_bytes(pickle.dumps({"w": Calls(eval, "data", {"data": array})}, 4))
    np.testing.assert_array_equal(read_paddle_file(path)["w"].read(), array)
    for arguments in (
        ("data", {"data": array, "more": 1}),
        ("data ", {"data": array}),
        ("data", {"data": 1}),
    ):
        path.write_bytes(pickle.dumps({"w": Calls(eval, *arguments)}, 4))
        with pytest.raises(RefusedPickleError, match=r"builtins\.eval"):
            read_paddle_file(path)


def test_objects_of_absent_classes_become_records_where_asked_for():
    content = b"cmegatron.model\nThing\n(I1\ntR}S'x'\nI5\nsb."
    found = load(content, record_prefixes=["megatron."])
    assert isinstance(found, Record)
    assert (found.class_name, found.state) == ("megatron.model.Thing", {"x": 5})
    with pytest.raises(RefusedPickleError, match=r"megatron\.model\.Thing"):
        load(content)


def test_names_of_tensors():
    array = PickledArray()
    array.array = np.arange(3.0)
    assert list(flatten({"a": {"b": array, "c": 5}, "d": array})) == ["a.b", "d"]


@pytest.mark.parametrize(
    "tree, words",
    [
        ([1], "not a state dict"),
        ({"UnpackBigParamInfor@@": {"w": {"OriginShape": [3], "slices": ["a"]}}}, "damaged"),
        ({"UnpackBigParamInfor@@": {"w": {"OriginShape": [3], "slices": []}}}, "'w' do not add up"),
        (
            {"a": np.zeros(2), "UnpackBigParamInfor@@": {"w": {"OriginShape": [3], "slices": ["a"]}}},
            "'w' do not",
        ),
    ],
)
def test_state_dicts_that_are_none(tmp_path, tree, words):
    path = tmp_path / "model.pdparams"
    path.write_bytes(pickle.dumps(tree, 4))
    with pytest.raises(CheckpointError, match=words):
        read_paddle_file(path)


# ---- PyTorch's files


@pytest.mark.parametrize("layout", ["zip", "legacy"])
def test_torch_files(layout):
    tree = read_torch_file(GOLDENS / f"{layout}.bin", record_prefixes=["argparse.Namespace"])
    with np.load(GOLDENS / "expected.npz") as expected:
        assert tree["tensors"].keys() == set(expected.files)
        for name in expected.files:
            tensor = tree["tensors"][name]
            values = tensor.read()
            assert values.dtype == NUMPY_OF_DTYPE[tensor.dtype]
            np.testing.assert_array_equal(
                values.view(np.int16) if name == "bfloat16" else values, expected[name]
            )
    assert tree["namespace"].state["layers"] == 3
    np.testing.assert_array_equal(tree["numbers"].array, [0, 1, 2])


def test_a_saved_module_is_refused():
    with pytest.raises(RefusedPickleError, match=r"torch\.nn\.modules\.linear\.Linear"):
        read_torch_file(GOLDENS / "module.bin")


def zip_of(tmp_path, content, storages=()):
    path = tmp_path / "model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        for key, data in storages:
            archive.writestr(f"archive/data/{key}", data)
    return path


def torch_tensor(size, stride, count=6, offset=0, kind=b"FloatStorage"):
    """Protocol 2 text of a tensor over storage "0"."""

    def numbers(values):
        return b"(" + b"".join(b"I%d\n" % value for value in values) + b"t"

    identity = b"(S'storage'\nctorch\n" + kind + b"\nS'0'\nS'cpu'\nI%d\nt" % count
    arguments = identity + b"QI%d\n" % offset + numbers(size) + numbers(stride) + b"I00\nNt"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"R."


def test_tensors_that_reach_outside_of_their_storage_are_refused(tmp_path):
    data = np.arange(6, dtype=np.float32)
    path = zip_of(tmp_path, torch_tensor((2, 3), (3, 1)), [("0", data.tobytes())])
    np.testing.assert_array_equal(read_torch_file(path).read(), data.reshape(2, 3))
    for size, stride, more in (
        ((2, 4), (4, 1), {}),
        ((6,), (2,), {}),
        ((6,), (1,), {"offset": 1}),
        ((1 << 40,), (0,), {}),  # one element repeated: a bomb
        ((2, 3), (3, 1), {"count": 7}),  # longer than the member
    ):
        path = zip_of(tmp_path, torch_tensor(size, stride, **more), [("0", data.tobytes())])
        with pytest.raises(CheckpointError):
            read_torch_file(path)


def test_persistent_objects_other_than_storages_are_refused(tmp_path):
    nested = b"(S'storage'\n(cos\nsystem\nS'touch x'\noS'0'\nS'cpu'\nI1\ntQ."
    for content, wanted in (
        (b"(S'module'\nS'x'\nS'y'\nS'z'\nI1\ntQ.", "persistent object"),
        (nested, r"os\.system"),
        (b"(S'storage'\nccollections\nOrderedDict\nS'0'\nS'cpu'\nI1\ntQ.", "another class"),
        (
            b"(S'storage'\n(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI1\ntQS'0'\nS'cpu'\nI1\ntQ.",
            "another class",
        ),
    ):
        with pytest.raises(RefusedPickleError, match=wanted):
            read_torch_file(zip_of(tmp_path, content, [("0", b"1234")]))


def test_damaged_torch_files(tmp_path):
    path = tmp_path / "cut.bin"
    for layout in ("zip", "legacy"):
        content = (GOLDENS / f"{layout}.bin").read_bytes()
        for length in range(0, len(content), 97):
            path.write_bytes(content[:length])
            with pytest.raises(CheckpointError):
                read_torch_file(path, record_prefixes=["argparse."])
    flipped = bytearray((GOLDENS / "zip.bin").read_bytes())
    with zipfile.ZipFile(GOLDENS / "zip.bin") as archive:
        [name] = [name for name in archive.namelist() if name.endswith("data/0")]
        flipped[flipped.index(archive.read(name))] ^= 1
    path.write_bytes(flipped)
    tree = read_torch_file(path, record_prefixes=["argparse."])
    with pytest.raises(CheckpointError, match="checksum"):
        tree["tensors"]["float32"].read()
