"""Text files: a truncated compressed file is rejected wherever it is read."""

import gzip
import json
import random
import struct
from pathlib import Path

import pytest
import zstandard

from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.sections.data import DatasetConfig
from ppfleetx.config.sections.generation import OfflineEvalConfig
from ppfleetx.data import text_files
from ppfleetx.data.indexed_dataset import IndexedDataset
from ppfleetx.data.prepare.corpus_reader import cut_documents, find_sources, iterate_texts
from ppfleetx.data.prepare.preprocess import preprocess
from ppfleetx.data.tasks.evaluation import read_text
from ppfleetx.data.tasks.finetuning import PromptResponseDataset
from ppfleetx.data.text_files import TextFile, read_lines, read_records
from tests.data.conftest import sequences


def zstd(data: bytes, **parameters: object) -> bytes:
    options = zstandard.ZstdCompressionParameters.from_level(3, **parameters)
    return zstandard.ZstdCompressor(compression_params=options).compress(data)


def as_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": t, "prompt": t, "response": t}).encode() + b"\n" for t in texts)


def read(path: Path) -> bytes:
    with TextFile(path) as file:
        return file.read_all()


def skippable(num_bytes: int) -> bytes:
    return struct.pack("<II", 0x184D2A53, num_bytes) + b"s" * num_bytes


LONG = b"".join(b"%d words of a text\n" % i for i in range(30_000))
FRAMES = {
    "one": [zstd(LONG)],
    "checksum, no content size": [zstd(LONG, write_checksum=True, write_content_size=False)],
    "several": [zstd(LONG[:99]), zstd(b""), zstd(LONG[99:], write_checksum=True)],
    "skippable": [skippable(5), zstd(LONG), skippable(300_000), zstd(b"a" * 500_000), skippable(0)],
}


@pytest.mark.parametrize("frames", FRAMES.values(), ids=FRAMES.keys())
def test_a_zstandard_file_ends_where_a_frame_ends(frames: list[bytes], tmp_path: Path) -> None:
    path, whole = tmp_path / "a.zst", b"".join(frames)
    path.write_bytes(whole)
    text = read(path)
    assert text == b"".join(zstandard.ZstdDecompressor().decompressobj().decompress(f) for f in frames)
    ends = {sum(map(len, frames[:n])) for n in range(1, len(frames) + 1)}
    for end in sorted(ends):
        path.write_bytes(whole[:end])
        assert text.startswith(read(path))
        for cut in {end - 1, end - 4, end + 1, end // 2} - ends:
            path.write_bytes(whole[:cut])
            if cut < len(whole):
                with pytest.raises(DataError, match=r"a\.zst cannot be read: it is cut off"):
                    read(path)
    path.write_bytes(whole + b"garbage")
    with pytest.raises(DataError, match=r"a\.zst cannot be read"):
        read(path)


@pytest.mark.parametrize("name", ["a.zst", "a.gz"])
def test_nothing_is_no_compressed_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match="it is empty"):
        read(tmp_path / name)
    (tmp_path / name).write_bytes(b"plain text")
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "split_on"),
    [("a.jsonl.zst", "file"), ("a.txt.zst", "file"), ("a.txt.zst", "line"), ("a.txt.zst", "blank-line"),
     ("a.jsonl.gz", "file"), ("a.txt.gz", "line")],
)  # fmt: skip
def test_a_corpus_that_is_cut_off_is_not_taken(tmp_path, tokenizer, texts, name, split_on) -> None:
    data = (
        as_lines(texts)
        if "json" in name
        else ("\n\n" if split_on == "blank-line" else "\n").join(texts).encode()
    )
    packed = zstd(data) if name.endswith("zst") else gzip.compress(data)
    (tmp_path / name).write_bytes(packed[: 3 * len(packed) // 4])
    sources = find_sources([tmp_path / name], split_on=split_on)
    with pytest.raises(DataError, match=rf"{name} cannot be read"):
        preprocess(sources, tmp_path / "out", tokenizer, show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [name], "nothing is left of the output"
    with pytest.raises(DataError, match=rf"{name} cannot be read"):
        list(iterate_texts(sources))  # what train_tokenizer.py reads
    (tmp_path / name).write_bytes(packed)
    assert "".join(iterate_texts(sources)).replace("\n", "") == "".join(texts).replace("\n", "")


def test_so_are_evaluation_sets_and_records(tmp_path, tokenizer, texts) -> None:
    packed = zstd(as_lines(texts))
    path = tmp_path / "train.jsonl.zst"
    cfg = DatasetConfig(name="PromptResponseDataset", input_dir=str(tmp_path), split="train")
    path.write_bytes(packed)
    assert len(PromptResponseDataset(cfg, tokenizer)) == len(texts)
    assert read_text(OfflineEvalConfig(eval_path=str(path))) == as_lines(texts).decode()
    path.write_bytes(packed[:-5])
    with pytest.raises(DataError, match="cut off"):
        PromptResponseDataset(cfg, tokenizer)
    with pytest.raises(ConfigError, match=r"Offline_Eval\.eval_path.*cut off"):
        read_text(OfflineEvalConfig(eval_path=str(path)))


@pytest.mark.parametrize("name", ["b.jsonl.bz2", "b.jsonl.ZST", "b.txt.xz", "b.json.zstd"])
def test_text_compressed_in_another_way_is_not_passed_over(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "plain"}\n')
    (tmp_path / "picture.xz").write_bytes(b"\xfd")  # no text: it is left out, and counted
    assert len(find_sources([tmp_path])) == 2
    (tmp_path / name).write_bytes(b"\xfd")
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=f"{name} is in an unsupported compression"):
            find_sources([place])


def test_patterns_name_files_in_their_order(tmp_path: Path) -> None:
    for name in ("b.ndjson", "a.jsonl", "c.txt", "[d].jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    sources = find_sources([f"{tmp_path}/[ab].*json*", tmp_path / "c.txt", tmp_path / "[d].jsonl"])
    assert [(one.path.name, one.kind) for one in sources] == [
        ("a.jsonl", "json"), ("b.ndjson", "json"), ("c.txt", "file"), ("[d].jsonl", "json")
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"no such file or folder: .*x\*\.jsonl"):
        find_sources([f"{tmp_path}/x*.jsonl"])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"PAR1\xff\xff", "is a Parquet file; write its texts as JSON Lines"),
        ("a.jsonl", gzip.compress(b"{}"), "is compressed with gzip; its name must end in .gz"),
        ("a.json", b'\n[{"text": "x"},\n{"text": "y"}]', "is a JSON array; a document must be a line"),
        ("a.jsonl.gz", gzip.compress(b'[{"text": "x"}]'), "is a JSON array"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "is in UTF-16"),
    ],
    ids=["parquet", "gzip", "array", "compressed array", "utf-16"],
)
def test_formats_without_texts_are_named(tmp_path, tokenizer, name, content, words) -> None:
    (tmp_path / name).write_bytes(content)
    sources = find_sources([tmp_path / name])
    for read_it in (
        lambda: preprocess(sources, tmp_path / "out", tokenizer, show_progress=False),
        lambda: list(iterate_texts(sources)),
    ):
        with pytest.raises(DataError) as caught:
            read_it()
        assert f"{tmp_path / name} {words}" in str(caught.value)


@pytest.mark.parametrize("split_on", ["line", "blank-line"])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 50])
def test_what_is_too_long_is_left_out_and_nothing_else(split_on: str, block: int) -> None:
    rng = random.Random(block)
    end = b"\n" if split_on == "line" else b"\n\n"
    for _ in range(40):
        documents = [bytes([97 + i]) * rng.choice([1, 20, 48, 60, 200]) for i in range(rng.randint(1, 12))]
        text = end.join(documents) + end * rng.randint(0, 1)
        blocks = [text[i : i + block] for i in range(0, len(text), block)]
        kind = "line" if split_on == "line" else "paragraph"
        found = list(cut_documents(blocks, kind, 50))
        kept = [d for piece in found if piece is not None for d in piece.split(b"\n") if d]
        assert kept == [d for d in documents if len(d) < 50]
        assert found.count(None) == sum(len(d) > 50 for d in documents)


def test_a_long_line_is_counted_with_its_number(tmp_path, tokenizer, texts) -> None:
    lines = as_lines(["first", "x" * 3_000_000, "third"])
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(" ".join(texts * 20).encode()))
    sources = find_sources([tmp_path / "a.jsonl", tmp_path / "b.txt.gz"])
    report = preprocess(sources, tmp_path / "out", tokenizer, max_document_bytes=2_000_000)
    assert report.problems.places == {
        "longer than 2 MB (--max-document-mb)": [f"{tmp_path}/a.jsonl, line 2", f"{tmp_path}/b.txt.gz"]
    }
    found = sequences(IndexedDataset(tmp_path / "out_text_document"))
    assert [tokenizer.decode(ids) for ids in found] == ["first", "third"]
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: longer than 2 MB"):
        preprocess(sources, tmp_path / "s", tokenizer, max_document_bytes=2_000_000, strict=True)


def test_lines_are_numbered_across_blocks(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 8)
    path, seen = tmp_path / "a", []
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n" + b"t" * 18 + b"\n\nlast")
    assert list(read_lines(path, seen.append)) == [
        (1, b"one\r"), (2, b""), (3, b"t" * 18), (4, b""), (5, b"last")
    ]  # fmt: skip
    assert b"".join(seen) == path.read_bytes()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}\n\n {"b": "]"}', [(1, '{"a": 1}'), (3, ' {"b": "]"}')]),  # a line each, whatever its name
        ('\n[ {"a": [1, "],["]},\n\n 3\n]\n', [(2, '{"a": [1, "],["]}'), (4, "3")]),
        ("[]", []),
        (" \n", []),
        ("[3,]", r"x\.json:1: this is not JSON"),
        ("\n[3\n4]", r"x\.json:3: this is not JSON"),
        ("[3]\n]", r"x\.json:2: this is not JSON"),
        ("[3", r"x\.json:1: this is not JSON"),
        (b"[\xff]", r"x\.json: this is not JSON"),
        ("[" * 100_000, r"x\.json: this is not JSON"),
    ],
)
def test_records_of_an_array(tmp_path, text, found):
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if isinstance(found, str):
        with pytest.raises(DataError, match=found):
            list(read_records(path))
        return
    assert [(number, record.decode()) for number, record in read_records(path)] == found
