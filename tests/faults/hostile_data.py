"""Data files that are damaged, lie about themselves, or are no files; each made from a seed.

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
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard

from ppfleetx.data.indexed import HEADER, MAGIC, IndexedDatasetWriter
from tests.faults.harness import flipped

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


_PACK = {".gz": gzip.compress, ".zst": _zstd}


def _text_case(directory: Path, rng: random.Random, name: str) -> Case:
    """The file given to what reads text."""
    source = ["--input", str(directory / name)]
    if rng.random() < 0.3:
        return "train_tokenizer", [*source, "--vocab-size", "300", "--output", str(directory / "t")]
    options = ["--split-on", rng.choice(["file", "line", "blank-line"]), "--workers", rng.choice("12")]
    options += ["--strict"] if rng.random() < 0.3 else []
    tokenizer = ["--tokenizer", str(directory.parent / "tokenizer")]
    return "preprocess_data", [*source, "--output-prefix", str(directory / "out"), *tokenizer, *options]


def _packed_lines(rng: random.Random, damage: Callable[[bytes], bytes], directory: Path) -> Case:
    suffix = rng.choice(list(_PACK))
    name = rng.choice(["a.jsonl", "a.txt"]) + suffix
    lines = b"".join(json.dumps({"text": f"line {rng.random()}"}).encode() + b"\n" for _ in range(5000))
    (directory / name).write_bytes(damage(_PACK[suffix](lines)))
    return _text_case(directory, rng, name)


@hostile
def cut_off_compression(directory: Path, rng: random.Random) -> Case:
    return _packed_lines(rng, lambda packed: packed[: rng.randrange(len(packed))], directory)


@hostile
def flipped_compression(directory: Path, rng: random.Random) -> Case:
    return _packed_lines(rng, lambda packed: flipped(packed, rng, rng.randint(1, 9)), directory)


@hostile
def bomb(directory: Path, rng: random.Random) -> Case:
    """10 GB in one line, in short lines, or in empty ones."""
    unit = rng.choice([b"a", b"\n", b'{"text": "word"}\n'])
    block = unit * ((4 << 20) // len(unit))
    # gzip at its best: packed quickly, it would shrink no more than a real text may.
    packed, suffix = rng.choice([(_zstd(block), ".zst"), (gzip.compress(block, 9), ".gz")])
    name = rng.choice(["a.jsonl", "a.txt"]) + suffix
    (directory / name).write_bytes(packed * 2500)
    return _text_case(directory, rng, name)


@hostile
def odd_lines(directory: Path, rng: random.Random) -> Case:
    lines = [
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
    """A pipe nobody writes to, a directory, a loop of links, a name that cannot be."""
    readers: dict[str, Callable[[str], Case]] = {
        "a.jsonl": lambda name: _text_case(directory, rng, name),
        "a.jsonl.zst": lambda name: _text_case(directory, rng, name),
        "wiki.txt": lambda name: _evaluation_case(directory, name),
        "a.bin": lambda name: _tokens_case(directory, rng, "a"),
        "a_ids.npy": lambda name: _tokens_case(directory, rng, "a"),
        "train.jsonl": lambda name: _records_case(directory),
        "train.tsv": lambda name: ("glue", [str(directory)]),
    }
    name = rng.choice(list(readers))
    put = rng.choice([os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path)])
    put(directory / name)
    return readers[name](name)


# Corpora of tokens.


def _tokens_case(directory: Path, rng: random.Random, prefix: str = "a") -> Case:
    path = str(directory / prefix)
    tool = rng.choice(["merge_datasets", "inspect_corpus", "inspect_corpus --verify", "build_index"])
    if tool == "merge_datasets":
        return tool, ["--input", path, "--output-prefix", str(directory / "merged")]
    if tool == "build_index":
        return tool, _config(directory, {"input_dir": path, "max_seq_len": 16, "split": [1, 0, 0]})
    name, *option = tool.split()
    return name, [path, *option]


def _config(directory: Path, dataset: dict) -> list[str]:
    tokenizer = {"dir": str(directory.parent / "tokenizer")}
    tree = {
        "Global": {"global_batch_size": 4, "micro_batch_size": 4},
        "Engine": {"max_steps": 5},
        "Model": {"vocab_size": 50304, "hidden_size": 64, "num_layers": 1, "num_attention_heads": 4},
        "Data": {"Train": {"dataset": dataset}, "Eval": None, "Test": None, "tokenizer": tokenizer},
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
    two = HEADER.pack(MAGIC, 1, 8, 2, 3)
    odd = [
        HEADER.pack(MAGIC, version, code, sequences, boundaries)
        + struct.pack("<2i2q3q", 2, 3, 0, 4, 0, 1, 2),
        two + struct.pack("<2i2q3q", -1, 6, 0, -2, 0, 1, 2),
        two + struct.pack("<2i2q3q", 2**31 - 1, 3, 0, 2**32 - 2, 0, 1, 2),
        two + struct.pack("<2i2q3q", 2, 3, 0, 4, 0, 2**62, 2),
        rng.randbytes(rng.randrange(200)),
    ]
    (directory / "a.idx").write_bytes(rng.choice(odd))
    (directory / "a.bin").write_bytes(b"\xff" * rng.choice([10, 40, 0]))
    if rng.random() < 0.7:
        (directory / "a.checksums.json").unlink()
    return _tokens_case(directory, rng)


@hostile
def damaged_checksums(directory: Path, rng: random.Random) -> Case:
    write_pair(directory, rng)
    path = directory / "a.checksums.json"
    sound = path.read_bytes()
    path.write_bytes(rng.choice([b"{}", b'{"format": {"a": 1}}', sound[: len(sound) // 2], b"\0" * 1000]))
    return _tokens_case(directory, rng)


# FleetX's corpora.


def _fleetx_case(directory: Path, rng: random.Random) -> Case:
    if rng.random() < 0.5:
        return _tokens_case(directory, rng)
    words = ["--input", str(directory / "a"), "--output-prefix", str(directory / "o")]
    return "convert_fleetx_data", words


def _odd_array(rng: random.Random) -> bytes:
    """An array of objects, of a wrong shape or type, or with a header that is none."""
    header = rng.choice(
        [
            f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}\n"
            for kind in ("'|O'", "[('a', '<i4')]", "None", "'<i4'")
            for shape in ("(2,)", "(-1,)", "()", "(1.5,)", "(99999,)")
        ]
        + ["__import__('os').abort()", ""]
    ).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + rng.randbytes(8)


@hostile
def lying_arrays(directory: Path, rng: random.Random) -> Case:
    np.save(directory / "a_ids.npy", np.arange(12, dtype=np.uint16))
    docs = rng.choice([np.arange(5), np.array([0, 3, 1, 4]), np.array([], np.int64)])
    contents = {}
    for name, array in {"lens.npy": np.full(4, 3, np.int32), "docs.npy": docs}.items():
        file = io.BytesIO()
        np.save(file, array)
        contents[name] = file.getvalue()
    if rng.random() < 0.5:
        (directory / "a_ids.npy").write_bytes(_odd_array(rng))
    else:
        contents[rng.choice(list(contents))] = _odd_array(rng)
    with zipfile.ZipFile(directory / "a_idx.npz", "w", rng.choice([0, 8])) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return _fleetx_case(directory, rng)


@hostile
def damaged_arrays(directory: Path, rng: random.Random) -> Case:
    np.save(directory / "a_ids.npy", np.arange(1000, dtype=np.uint16))
    save = rng.choice([np.savez, np.savez_compressed])
    save(directory / "a_idx.npz", lens=np.full(100, 10, np.int32), docs=np.arange(101))
    path = directory / rng.choice(["a_ids.npy", "a_idx.npz"])
    data = path.read_bytes()
    cut = data[: rng.randrange(len(data))]
    path.write_bytes(rng.choice([cut, flipped(data[:200], rng, 5) + data[200:], flipped(data, rng, 9)]))
    return _fleetx_case(directory, rng)


# Records, GLUE and evaluation sets.


def _records_case(directory: Path) -> Case:
    dataset = {"name": "PromptResponseDataset", "input_dir": str(directory), "split": "train"}
    return "build_index", _config(directory, {**dataset, "max_seq_len": 64})


def _evaluation_case(directory: Path, name: str) -> Case:
    return "evaluation", [str(directory / name), str(directory.parent / "tokenizer")]


@hostile
def odd_records(directory: Path, rng: random.Random) -> Case:
    lines = [
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
    bodies = [b"a\t" * 3_000_000, b"text\t" + b"9" * 1_000_000, b"\xff\t1", b"text\t1\textra", b""]
    (directory / "train.tsv").write_bytes(rng.choice([header, b""]) + rng.choice(bodies))
    return "glue", [str(directory)]


@hostile
def odd_evaluation_sets(directory: Path, rng: random.Random) -> Case:
    content = rng.choice([b"( " * 2_000_000, b"\xff", b"\n" * 3_000_000, b"[" * 1_000_000, b"\0" * 10])
    name = rng.choice(["wiki.txt", "lambada.jsonl"])
    if rng.random() < 0.3:
        name, content = f"{name}.zst", _zstd(content)[:-3]
    (directory / name).write_bytes(content)
    return _evaluation_case(directory, name)
