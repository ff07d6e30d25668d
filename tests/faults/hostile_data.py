"""Data files that lie, are damaged, have no end, or hold far more than they weigh; each made from a seed.

A maker gets a directory and a generator, writes what is wrong there, and returns the tool to try it with and
its arguments.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard

from ppfleetx.data.indexed import HEADER, MAGIC, IndexedDatasetWriter

Case = tuple[str, list[str]]
Maker = Callable[[Path, random.Random], Case]
MAKERS: dict[str, Maker] = {}


def hostile(maker: Maker) -> Maker:
    """Add to `MAKERS`."""
    MAKERS[maker.__name__] = maker
    return maker


# Corpora of text.


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def _text_case(directory: Path, rng: random.Random, name: str) -> Case:
    """The file given to what reads text."""
    tool = rng.choice(["preprocess_data", "preprocess_data", "train_tokenizer"])
    if tool == "train_tokenizer":
        return tool, [
            "--input",
            str(directory / name),
            "--vocab-size",
            "300",
            "--output",
            str(directory / "t"),
        ]
    split = ["--split-on", rng.choice(["file", "line", "blank-line"])]
    strict = ["--strict"] if rng.random() < 0.3 else []
    workers = ["--workers", rng.choice(["1", "2"])]
    paths = ["--input", str(directory / name), "--output-prefix", str(directory / "out")]
    return tool, [*paths, "--tokenizer", str(directory.parent / "tokenizer"), *split, *strict, *workers]


def _good_lines(rng: random.Random, count: int = 3000) -> bytes:
    return b"".join(json.dumps({"text": f"line {rng.random()}"}).encode() + b"\n" for _ in range(count))


@hostile
def cut_off_compression(directory: Path, rng: random.Random) -> Case:
    suffix, pack = rng.choice([(".gz", gzip.compress), (".zst", _zstd)])
    name = rng.choice(["a.jsonl", "a.txt"]) + suffix
    packed = pack(_good_lines(rng, 20_000))
    (directory / name).write_bytes(packed[: rng.randrange(len(packed))])
    return _text_case(directory, rng, name)


@hostile
def flipped_compression(directory: Path, rng: random.Random) -> Case:
    suffix, pack = rng.choice([(".gz", gzip.compress), (".zst", _zstd)])
    packed = bytearray(pack(_good_lines(rng)))
    for _ in range(rng.randint(1, 9)):
        packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
    (directory / f"a.jsonl{suffix}").write_bytes(packed)
    return _text_case(directory, rng, f"a.jsonl{suffix}")


@hostile
def bomb(directory: Path, rng: random.Random) -> Case:
    """10 GB in one line, in short lines, or in empty ones."""
    unit = rng.choice([b"a", b"\n", b"\n\n ", b'{"text": "word"}\n', b"[", b'{"a":'])
    block = unit * ((4 << 20) // len(unit))
    start = rng.choice([b"", b'{"text": "'])
    if rng.random() < 0.7:
        packed, suffix = _zstd(start) + _zstd(block) * 2500, ".zst"
    else:
        # Packed as well as gzip can: quickly packed, it would shrink no more than a real text may.
        packed, suffix = gzip.compress(start) + gzip.compress(block, 9) * 2500, ".gz"
    name = rng.choice(["a.jsonl", "a.txt"]) + suffix
    (directory / name).write_bytes(packed)
    return _text_case(directory, rng, name)


@hostile
def odd_lines(directory: Path, rng: random.Random) -> Case:
    lines = [
        b"[" * 5_000_000,
        b'{"text":' * 1_000_000,
        b"[" + b"{}," * 15_000_000 + b"{}]",
        b'{"text": ' + b"9" * 1_000_000 + b"}",
        b"\0" * 70_000_000,
        b'{"text": "' + b"\\ud800" * 1000 + b'"}',
        b'{"' + b"k" * 3_000_000 + b'": 1}',
        b"\xff" * 1_000_000,
    ]
    (directory / "a.jsonl").write_bytes(rng.choice([b"", b'{"text": "x"}\n']) + rng.choice(lines) + b"\n")
    return _text_case(directory, rng, "a.jsonl")


@hostile
def no_file_at_all(directory: Path, rng: random.Random) -> Case:
    """A pipe nobody writes to, a device without an end, a directory, a name that cannot be."""
    name = rng.choice(
        ["a.jsonl", "a.jsonl.zst", "a.bin", "a_ids.npy", "a_ids.npz", "train.jsonl", "train.tsv"]
    )
    path = directory / name
    kind = rng.choice(["pipe", "device", "directory", "loop", "long"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        name = "n" * 300 + name
    if name.endswith("train.jsonl"):
        return _records_case(directory)
    if name.endswith("train.tsv"):
        return _glue_case(directory)
    if name.endswith(("bin", "npy", "npz")):
        return _tokens_case(directory, rng, str(directory / name.removesuffix(".bin").split("_ids")[0]))
    if rng.random() < 0.3:
        return "evaluation", [str(directory / name), str(directory.parent / "tokenizer")]
    return _text_case(directory, rng, name)


# Corpora of tokens.


def _tokens_case(directory: Path, rng: random.Random, prefix: str) -> Case:
    tool = rng.choice(["merge_datasets", "inspect_corpus", "inspect_corpus --verify", "build_index"])
    if tool == "merge_datasets":
        return tool, ["--input", prefix, "--output-prefix", str(directory / "merged")]
    if tool == "build_index":
        return tool, [*_config(directory, {"input_dir": prefix, "max_seq_len": 16, "split": [1, 0, 0]})]
    name, *option = tool.split()
    return name, [prefix, *option]


def _config(directory: Path, dataset: dict) -> list[str]:
    tree = {
        "Global": {"global_batch_size": 4, "micro_batch_size": 4},
        "Engine": {"max_steps": 5},
        "Model": {"vocab_size": 50304, "hidden_size": 64, "num_layers": 1, "num_attention_heads": 4},
        "Data": {
            "Train": {"dataset": dataset},
            "Eval": None,
            "Test": None,
            "tokenizer": {"dir": str(directory.parent / "tokenizer")},
        },
    }
    (directory / "c.yaml").write_text(json.dumps(tree))
    return ["-c", str(directory / "c.yaml")]


def write_pair(directory: Path, rng: random.Random) -> None:
    """A small corpus ``a`` in several documents of several sequences."""
    with IndexedDatasetWriter(directory / "a", "u2") as writer:
        for _ in range(rng.randint(2, 400)):
            lengths = [rng.randint(0, 60) for _ in range(rng.randint(0, 3))]
            writer.add_document([rng.randrange(50_000) for _ in range(sum(lengths))], lengths)


@hostile
def lying_index(directory: Path, rng: random.Random) -> Case:
    write_pair(directory, rng)
    huge = rng.choice([2**63, 2**64 - 1, 10**12, 2**31])
    version, code, sequences, boundaries = rng.choice(
        [(1, 8, huge, 2), (1, 8, 2, huge), (2**60, 8, 2, 3), (1, rng.choice([0, 6, 7, 9, 255]), 2, 3)]
    )
    body = struct.pack("<2i2q3q", 2, 3, 0, 4, 0, 1, 2)
    odd = [
        HEADER.pack(MAGIC, version, code, sequences, boundaries) + body,
        HEADER.pack(MAGIC, 1, 8, 2, 3) + struct.pack("<2i2q3q", -1, 6, 0, -2, 0, 1, 2),
        HEADER.pack(MAGIC, 1, 8, 2, 3) + struct.pack("<2i2q3q", 2**31 - 1, 3, 0, 2**32 - 2, 0, 1, 2),
        HEADER.pack(MAGIC, 1, 8, 2, 3) + struct.pack("<2i2q3q", 2, 3, 0, 4, 0, 2**62, 2),
        HEADER.pack(MAGIC, 1, 8, 2, 4) + struct.pack("<2i2q4q", 2, 3, 0, 4, 0, 2, 1, 2),
        HEADER.pack(MAGIC, 1, 6, 2, 3) + struct.pack("<2i2q3q", 2, 3, 0, 16, 0, 1, 2),
        rng.randbytes(rng.randrange(200)),
    ]
    chosen = rng.choice(odd)
    (directory / "a.idx").write_bytes(chosen)
    (directory / "a.bin").write_bytes(b"\xff" * rng.choice([10, 40, 0]))
    if rng.random() < 0.7:
        (directory / "a.checksums.json").unlink()
    return _tokens_case(directory, rng, str(directory / "a"))


@hostile
def many_documents_of_nothing(directory: Path, rng: random.Random) -> Case:
    """A quarter of a gigabyte of boundaries, none of it on disk."""
    (directory / "a.bin").write_bytes(b"")
    count = rng.randint(20, 40) * 10**6
    with (directory / "a.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, 0, count))
        file.truncate(HEADER.size + 8 * count)
    return _tokens_case(directory, rng, str(directory / "a"))


@hostile
def damaged_checksums(directory: Path, rng: random.Random) -> Case:
    write_pair(directory, rng)
    path = directory / "a.checksums.json"
    sound = path.read_bytes()
    contents = [
        b"[" * 3_000_000,
        b"{}",
        b'{"format": {"a": 1}}',
        sound[: len(sound) // 2],
        b"\0" * 50_000_000,
    ]
    if rng.random() < 0.2:
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_bytes(rng.choice(contents))
    return _tokens_case(directory, rng, str(directory / "a"))


# FleetX's corpora.


def _fleetx_case(directory: Path, rng: random.Random) -> Case:
    if rng.random() < 0.5:
        return "convert_fleetx_data", [
            "--input",
            str(directory / "a"),
            "--output-prefix",
            str(directory / "o"),
        ]
    return _tokens_case(directory, rng, str(directory / "a"))


def _npy(header: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode("latin1")
    return b"\x93NUMPY" + version + struct.pack("<H" if version[0] == 1 else "<I", len(text)) + text + body


def _headers(rng: random.Random) -> bytes:
    template = "{{'descr': {}, 'fortran_order': False, 'shape': {}, }}\n"
    kinds = ["'<i4'", "'<i8'", "'|O'", "'<V1000000000000'", "[('a', '<i4')]", "'<U9999999'", "None"]
    shapes = [
        "(1000000000000,)",
        "(-1,)",
        "(2, 10000000000)",
        "(" + "9" * 5000 + ",)",
        "()",
        "(True,)",
        "(1.5,)",
    ]
    whole = [
        template.format(rng.choice(kinds), rng.choice(shapes)),
        "(" * 9000,
        "{'descr': '<i4', 'shape': " + "[" * 500 + "]" * 500 + "}",
        "__import__('os').abort()",
        "\\d" * 3000,
        "",
    ]
    version = rng.choice([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"])
    data = _npy(rng.choice(whole), rng.randbytes(64), version)
    return data if rng.random() < 0.8 else b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(1000)


@hostile
def lying_arrays(directory: Path, rng: random.Random) -> Case:
    lens, ids = np.full(4, 3, np.int32), np.arange(12, dtype=np.uint16)
    np.save(directory / "a_ids.npy", ids)
    members = {"lens.npy": io.BytesIO(), "docs.npy": io.BytesIO()}
    np.save(members["lens.npy"], lens)
    np.save(members["docs.npy"], rng.choice([np.arange(5), np.array([0, 3, 1, 4]), np.array([], np.int64)]))
    contents = {name: file.getvalue() for name, file in members.items()}
    if rng.random() < 0.5:
        (directory / "a_ids.npy").write_bytes(_headers(rng))
    else:
        contents[rng.choice(list(contents))] = _headers(rng)
    with zipfile.ZipFile(directory / "a_idx.npz", "w", rng.choice([0, 8, 12, 14])) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return _fleetx_case(directory, rng)


@hostile
def archive_bomb(directory: Path, rng: random.Random) -> Case:
    """8 GB of deflated zeros as lengths of sequences."""
    block = zlib.compressobj(9, zlib.DEFLATED, -15)
    deflated = block.compress(bytes(8 << 20)) + block.flush(zlib.Z_FULL_FLUSH)
    count = 2 * 10**9
    header = _npy(f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({count},), }}\n")
    size = len(header) + 4 * count
    first = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = first.compress(header) + first.flush(zlib.Z_FULL_FLUSH) + deflated * 960 + b"\x03\x00"
    name = b"lens.npy"
    sizes = struct.pack("<III", 0, len(data), 0xFFFFFFFF)
    extra = struct.pack("<HHQ", 1, 8, size)
    fixed = struct.pack("<HHHHH", 45, 0, 8, 0, 0)
    names = struct.pack("<HH", len(name), len(extra))
    local = b"PK\3\4" + fixed + sizes + names + name + extra
    central = b"PK\1\2" + struct.pack("<H", 45) + fixed + sizes + names + bytes(14) + name + extra
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local) + len(data), 0)
    (directory / "a_idx.npz").write_bytes(local + data + central + end)
    np.save(directory / "a_ids.npy", np.arange(12, dtype=np.uint16))
    return _fleetx_case(directory, rng)


@hostile
def archive_of_many(directory: Path, rng: random.Random) -> Case:
    np.save(directory / "a_ids.npy", np.arange(12, dtype=np.uint16))
    with zipfile.ZipFile(directory / "a_idx.npz", "w") as archive:
        for number in range(rng.randint(2000, 30_000)):
            archive.writestr(f"{number}.npy", b"")
    return _fleetx_case(directory, rng)


@hostile
def damaged_arrays(directory: Path, rng: random.Random) -> Case:
    np.save(directory / "a_ids.npy", np.arange(1000, dtype=np.uint16))
    save = rng.choice([np.savez, np.savez_compressed])
    save(directory / "a_idx.npz", lens=np.full(100, 10, np.int32), docs=np.arange(101))
    path = directory / rng.choice(["a_ids.npy", "a_idx.npz"])
    data = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        data = data[: rng.randrange(len(data))]
    else:
        for _ in range(rng.randint(1, 20)):
            data[rng.randrange(min(len(data), rng.choice([200, 10**6])))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return _fleetx_case(directory, rng)


# Records, GLUE and evaluation sets.


def _records_case(directory: Path) -> Case:
    dataset = {"name": "PromptResponseDataset", "input_dir": str(directory), "split": "train"}
    return "build_index", _config(directory, {**dataset, "max_seq_len": 64})


def _glue_case(directory: Path) -> Case:
    return "glue", [str(directory)]


@hostile
def odd_records(directory: Path, rng: random.Random) -> Case:
    fields = b",".join(b'"field %d": 1' % number for number in range(300_000))
    lines = [
        b"[" * 1_000_000,
        b"{" + fields + b"}",
        b'{"prompt": "\\ud800", "response": ""}',
        b'{"prompt": {"prompt": []}, "response": null}',
        b"\0" * 70_000_000,
        b'{"prompt": "a"' + b" " * 1_000_000,
        b"\xff\xfe",
        b"\n" * 5_000_000,
    ]
    (directory / "train.jsonl").write_bytes(b'{"prompt": "a", "response": "b"}\n' + rng.choice(lines))
    return _records_case(directory)


@hostile
def odd_tables(directory: Path, rng: random.Random) -> Case:
    header = b"sentence\tlabel\n"
    bodies = [
        b"a\t" * 3_000_000,
        b"text\t" + b"9" * 1_000_000,
        b"\xff\t1",
        b"\0" * 70_000_000,
        b"\n" * 5_000_000,
        b"text\t1\textra",
        b"",
    ]
    (directory / "train.tsv").write_bytes(rng.choice([header, b"", b"\t" * 1_000_000]) + rng.choice(bodies))
    return _glue_case(directory)


@hostile
def odd_evaluation_sets(directory: Path, rng: random.Random) -> Case:
    contents = [
        b"( " * 2_000_000,
        b'" ' * 2_000_001,
        b"\xff",
        b"\n" * 3_000_000,
        b"[" * 1_000_000,
        b"\0" * 10,
    ]
    name = rng.choice(["wiki.txt", "lambada.jsonl"])
    content = rng.choice(contents)
    packed = rng.random() < 0.3
    data = _zstd(content)[:-3] if packed else content
    (directory / (name + ".zst" if packed else name)).write_bytes(data)
    return "evaluation", [
        str(directory / (name + ".zst" if packed else name)),
        str(directory.parent / "tokenizer"),
    ]
