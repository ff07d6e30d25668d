"""Small pickles that mean something huge, and archives that lie: refused in words, with little effort."""

import io
import pickle
import struct
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.checkpoint.foreign.paddle_file import read_paddle_file
from ppfleetx.checkpoint.foreign.pickled import PLAIN_NAMES, check_claims, flatten
from ppfleetx.checkpoint.foreign.torch_file import read_torch_file
from ppfleetx.checkpoint.foreign.unpickle import Unpickler
from ppfleetx.config.errors import CheckpointError, shown

GOLDENS = Path(__file__).parents[2] / "goldens" / "torch"
PROTOCOL_4 = b"\x80\x04"


def load(content, **options):
    return Unpickler(io.BytesIO(content), PLAIN_NAMES, **options).load()


def doubled(first, again, levels):
    """`first`, and then as often something made of two references to what was made before."""
    steps = [b"h" + bytes([i]) + b"h" + bytes([i]) + again + b"q" + bytes([i + 1]) for i in range(levels)]
    return first + b"q\x00" + b"".join(steps)


def entries(levels):
    """A dictionary nested so deep by reference: two keys for the one before, in each."""
    inner = [
        b"}q" + bytes([i + 1]) + b"(X\x01\0\0\0ah" + bytes([i]) + b"X\x01\0\0\0bh" + bytes([i]) + b"u"
        for i in range(levels)
    ]
    return PROTOCOL_4 + b"}q\x00" + b"".join(inner) + b"."


TOO_MANY = "more than 1000000 instructions, or is made of copies of copies"
BOMBS = {
    "brackets": (b"]" * 2_000_000, TOO_MANY),
    "copies": (
        PROTOCOL_4
        + b"cbuiltins\nlist\nq\x01]("
        + b"N" * 300_000
        + b"e\x85q\x03"
        + b"h\x01h\x03R" * 10_000
        + b".",
        TOO_MANY,
    ),
    "encoded texts": (
        b"c_codecs\nencode\nq\x01X"
        + struct.pack("<I", 1 << 20)
        + b"x" * (1 << 20)
        + b"X\x06\0\0\0latin1\x86q\x02"
        + b"h\x01h\x02R" * 100_000
        + b".",
        TOO_MANY,
    ),
    "a tuple as a key": (
        doubled(PROTOCOL_4 + b")", b"\x86", 60) + b"}h\x3cNs.",
        "neither a text nor a number",
    ),
    "a tuple in a set": (doubled(PROTOCOL_4 + b")", b"\x86", 60) + b"\x8f(h\x3c\x90.", "neither a text nor"),
    "a tuple in a dict()": (
        doubled(PROTOCOL_4 + b")", b"\x86", 60) + b"cbuiltins\ndict\n](h\x3cN\x86e\x85R.",
        "neither a text nor a number",
    ),
    "equal hashes": (
        PROTOCOL_4 + b"}\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"Ns.",
        "neither a text nor",
    ),
    "a number of a megabyte": (
        b"\x8b" + struct.pack("<i", 1 << 20) + b"\x01" * (1 << 20) + b".",
        "without sense",
    ),
    "a memo with no bounds": (b"Np" + b"9" * 4000 + b"\n.", "without sense"),
    "a line without an end": (b"S'" + b"x" * (40 << 20), "of its pickle are something else than arrays"),
    "a shape of many dimensions": (
        b"cnumpy.core.numeric\n_frombuffer\n(C\x00cnumpy\ndtype\n(S'f4'\ntR(" + b"K\x01" * 1000 + b"ttR.",
        "an array without shape and type",
    ),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_are_refused(kind):
    content, words = BOMBS[kind]
    with pytest.raises(CheckpointError, match=words) as caught:
        load(content)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "content", [entries(40), PROTOCOL_4 + b"}q\x00X\x01\0\0\0ah\x00s."], ids=["40", "itself"]
)
def test_dictionaries_without_an_end_are_not_walked(content):
    with pytest.raises(CheckpointError, match="nested more than 16 levels deep"):
        flatten(load(content))


def test_deep_and_wide_structures_that_mean_nothing_are_harmless():
    assert load(b"]" * 100_000 + b"a" * 99_999 + b".") != []
    assert load(b")" + b"\x85" * 200_000 + b".") != ()
    assert load(b"N" * 100_000 + b"(1" * 100_000 + b".") is None  # each mark is found at once


def test_objects_in_messages_do_not_show_what_they_hold():
    """A record whose state is two of the record before, sixty times: its text would have no end."""
    record = b"cmegatron\nThing\n)R"
    steps = [record + b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86bq" + bytes([i + 1]) for i in range(60)]
    found = load(PROTOCOL_4 + record + b"q\x00" + b"".join(steps) + b".", record_prefixes=["megatron."])
    assert shown(found) == "<megatron.Thing>" and len(shown({"a": [found, found.state]})) < 200


def test_names_of_tensors_are_told_apart_and_short():
    array = np.arange(3.0)
    assert list(flatten(load(pickle.dumps({"a": {"b": array, "c": 5}, "d": array}, 4)))) == ["a.b", "d"]
    with pytest.raises(CheckpointError, match=r"two tensors in it have the name 'a\.b'"):
        flatten(load(pickle.dumps({"a": {"b": array}, "a.b": array}, 4)))
    with pytest.raises(CheckpointError, match="a name in it is too long: 'xxx"):
        flatten(load(pickle.dumps({"x" * 2000: array}, 4)))


def test_tensors_that_claim_more_than_the_file_holds():
    array = load(pickle.dumps(np.zeros(1 << 18), 4)).lazy()
    check_claims([array, array], file_bytes=1 << 21)  # a tied head
    with pytest.raises(CheckpointError, match="more than 4 times those of the file"):
        check_claims([array] * 5, file_bytes=1 << 21)


def test_many_names_for_one_array_are_refused(tmp_path):
    path, array = tmp_path / "model.pdparams", np.zeros(1 << 18)
    path.write_bytes(pickle.dumps({f"{i}": array for i in range(20)}, 4))
    with pytest.raises(CheckpointError, match=r"model\.pdparams: its tensors would have 41943040 bytes"):
        read_paddle_file(path)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_of_all_protocols_stay_in_the_file(tmp_path, protocol):
    path, array = tmp_path / "model.pdparams", np.arange(-(1 << 20), 1 << 20, dtype=np.int32)
    path.write_bytes(pickle.dumps({"w": array}, protocol))
    tensor = read_paddle_file(path)["w"]
    np.testing.assert_array_equal(tensor.read(), array)
    if protocol == 2:  # bytes as text: how many there are is known when they are read
        content = path.read_bytes()
        path.write_bytes(content.replace(b"\x00\x00\x00\x01", b"\x00\xc3\xa9\x01", 1))
        with pytest.raises(CheckpointError, match="it is damaged"):
            tensor.read()


@pytest.mark.parametrize(
    "tree, words",
    [
        ([1], "not a state dict"),
        ({5: np.zeros(3)}, "the name 5, which is no text"),
        ({"UnpackBigParamInfor@@": 5}, "its UnpackBigParamInfor@@ is 5"),
        ({"UnpackBigParamInfor@@": {"w": 5}}, "'w' was saved in pieces"),
        ({"UnpackBigParamInfor@@": {"w": {"OriginShape": ["x"], "slices": []}}}, "'w' was saved in pieces"),
        ({"UnpackBigParamInfor@@": {"w": {"OriginShape": [3], "slices": ["a"]}}}, "'w' was saved in pieces"),
        ({"UnpackBigParamInfor@@": {"w": {"OriginShape": [-3], "slices": []}}}, "do not make up its shape"),
    ],
)
def test_state_dicts_that_are_none(tmp_path, tree, words):
    path = tmp_path / "model.pdparams"
    path.write_bytes(pickle.dumps(tree, 4))
    with pytest.raises(CheckpointError, match=words):
        read_paddle_file(path)


# ---- archives


def archive_of(path, members, compression=zipfile.ZIP_STORED):
    with warnings.catch_warnings():  # a name twice is what some of these are about
        warnings.simplefilter("ignore", UserWarning)
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, content in members:
                archive.writestr(name, content)
    return path


def storage(count, key=b"0", kind=b"FloatStorage"):
    return b"(S'storage'\nctorch\n" + kind + b"\nS'" + key + b"'\nS'cpu'\nI%d\ntQ" % count


def test_archives_that_lie(tmp_path):
    path, pickle_name, none = tmp_path / "x.bin", "archive/data.pkl", b"N."
    zeros = bytes(40_000_000)
    for members, compression, words in (
        ([(pickle_name, b"]" * 40_000_000)], zipfile.ZIP_DEFLATED, "longer than 33554432 bytes"),
        ([(pickle_name, none), ("archive/byteorder", b"x" * 10**6)], zipfile.ZIP_DEFLATED, "longer than 16"),
        ([(pickle_name, none), ("archive/byteorder", b"big")], zipfile.ZIP_STORED, "big-endian"),
        ([(pickle_name, none), ("b/data.pkl", none)], zipfile.ZIP_STORED, "it has 2 data.pkl, not one"),
        ([("archive/data", none)], zipfile.ZIP_STORED, "it has 0 data.pkl, not one"),
        ([(pickle_name, none), (pickle_name, none)], zipfile.ZIP_STORED, "have the same name"),
        ([(pickle_name, none)], zipfile.ZIP_LZMA, "compressed in an unknown way"),
        ([(pickle_name, storage(4) + b".")], zipfile.ZIP_STORED, "the storage '0' is missing"),
        (
            [(pickle_name, storage(4) + b"."), ("archive/data/0", bytes(12))],
            zipfile.ZIP_STORED,
            "the storage '0' is too short",
        ),
        (
            [
                (pickle_name, storage(4) + storage(2, kind=b"LongStorage") + b"."),
                ("archive/data/0", bytes(16)),
            ],
            zipfile.ZIP_STORED,
            "the storage '0' has two types or lengths",
        ),
        (
            [(pickle_name, storage(10_000_000) + b"."), ("archive/data/0", zeros)],
            zipfile.ZIP_DEFLATED,
            r"'archive/data/0' would unpack from \d+ to 40000000 bytes",
        ),
    ):
        archive_of(path, members, compression)
        with pytest.raises(CheckpointError, match=words) as caught:
            read_torch_file(path)
        assert str(caught.value).startswith(str(path))


def test_a_member_that_is_longer_than_it_says(tmp_path):
    path = archive_of(tmp_path / "x.bin", [("archive/data.pkl", b"]" * 50_000_000)], zipfile.ZIP_DEFLATED)
    size, lie = struct.pack("<I", 50_000_000), struct.pack("<I", 10)
    path.write_bytes(path.read_bytes().replace(size, lie))
    with pytest.raises(CheckpointError, match="damaged zip archive"):
        read_torch_file(path)


def test_an_archive_with_a_huge_directory(tmp_path):
    path = archive_of(tmp_path / "x.bin", [("archive/data.pkl", b"N.")])
    content = path.read_bytes()
    # The directory's length in the last record, and as many bytes for it.
    end = bytearray(content[-22:])
    end[12:16] = struct.pack("<I", 20_000_000)
    path.write_bytes(content[:-22] + bytes(20_000_000) + end)
    with pytest.raises(CheckpointError, match="its directory of members has more than 16777216 bytes"):
        read_torch_file(path)


def test_damaged_archives_are_told_in_words(tmp_path):
    """Flipped bits and cuts anywhere: never another error, and never the name of one of Python's."""
    sound = {name: (GOLDENS / f"{name}.bin").read_bytes() for name in ("zip", "legacy")}
    path, rng = tmp_path / "x.bin", np.random.default_rng(3)
    for name in [*["zip"] * 300, *["legacy"] * 300]:
        damaged = bytearray(sound[name])
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged[: rng.integers(len(damaged))] if rng.random() < 0.3 else damaged)
        try:
            tree = read_torch_file(path, record_prefixes=["argparse.Namespace"])
            for tensor in flatten(tree).values() if isinstance(tree, dict) else ():
                tensor.read()
        except CheckpointError as error:
            assert "Error" not in str(error).replace(str(path), "") and len(str(error)) < 600
    path.write_bytes(sound["zip"][:-30])
    with pytest.raises(CheckpointError, match="begins like an archive of PyTorch, and its end is missing"):
        read_torch_file(path)
