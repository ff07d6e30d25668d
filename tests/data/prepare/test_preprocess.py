"""Preprocessing of every input format to .bin/.idx, what it skips, and how failed runs end."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from ppfleetx.config.errors import DataError
from ppfleetx.data.indexed_dataset import IndexedDataset
from ppfleetx.data.prepare import corpus_reader as corpus
from ppfleetx.data.prepare.corpus_reader import find_sources
from ppfleetx.data.prepare.preprocess import map_in_order, preprocess
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from tests.data.conftest import sequences
from tests.helpers.leftovers import children, leftovers
from tests.helpers.texts import random_text
from tests.helpers.waiting import wait_for

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "preprocess_data.py"


def as_lines(texts: list[str], **extra: str) -> bytes:
    return b"".join(json.dumps({"text": text, **extra}).encode() + b"\n" for text in texts)


def documents(prefix: Path | str) -> list[list[int]]:
    return sequences(IndexedDataset(prefix))


def run(tmp_path: Path, tokenizer: Tokenizer, *inputs: Path, split_on="file", suffixes=(), **options):
    sources = find_sources(inputs, suffixes=suffixes, split_on=split_on)
    return preprocess(sources, tmp_path / "out" / "c", tokenizer, show_progress=False, **options)


def test_the_files_are_megatrons_byte_for_byte(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_bytes(as_lines(["abc", "It's", "the end"]))
    run(tmp_path, tokenizer, tmp_path / "a.jsonl", append_eod=True)
    ids = [[*tokenizer.encode(text), tokenizer.eod_id] for text in ["abc", "It's", "the end"]]
    lengths = [len(document) for document in ids]
    offsets = [0, 2 * lengths[0], 2 * (lengths[0] + lengths[1])]
    expected = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 4)
    expected += struct.pack("<3i3q4q", *lengths, *offsets, 0, 1, 2, 3)
    prefix = tmp_path / "out" / "c_text_document"
    assert Path(f"{prefix}.idx").read_bytes() == expected
    assert Path(f"{prefix}.bin").read_bytes() == np.concatenate(ids).astype("<u2").tobytes()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".json"])
def test_json_lines_compressed_or_not_in_order(tmp_path, tokenizer, workers, ending, monkeypatch):
    rng = random.Random(4)
    texts = [random_text(rng) for _ in range(300)]
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 700)  # less than some lines
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(
        ending[-4:].lstrip("l"), bytes
    )
    path = tmp_path / f"a{ending}"
    # Two compressed members, as `cat a.gz b.gz` makes them; and no line end at the end.
    path.write_bytes(pack(as_lines(texts[:100])) + pack(as_lines(texts[100:])[:-1]))
    report = run(tmp_path, tokenizer, path, workers=workers)
    assert documents(tmp_path / "out" / "c_text_document") == [tokenizer.encode(text) for text in texts]
    assert (report.num_documents, report.problems.counts.total()) == (300, 0)
    assert report.num_text_bytes == sum(len(text.encode()) for text in texts)
    assert report.num_tokens == sum(len(tokenizer.encode(text)) for text in texts)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_left_out_is_counted_with_its_line(tmp_path, tokenizer, workers, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 64)
    lines = [b'{"text": "good line %d"}' % i for i in range(1, 31)]
    for number, bad in {3: b'{"text": "x"', 5: b"", 9: b'{"other": "x"}', 12: b'{"text": 5}', 13: b"[1]",
                        17: b'{"text": "\xff"}', 21: b'{"text": ""}', 22: b"  ", 26: b'{"text": "a\\ud83d"}',
                        28: b"[" * 100_000}.items():  # fmt: skip
        lines[number - 1] = bad
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    report = run(tmp_path, tokenizer, path, workers=workers)
    assert report.num_documents == 20
    found = {
        problem: [int(place.split()[-1]) for place in places]
        for problem, places in report.problems.places.items()
    }
    assert found == {
        "not JSON": [3, 28], "empty": [5, 21, 22], "no key 'text'": [9], "not a JSON object": [13],
        "the value of 'text' is not a string": [12], "not UTF-8": [17], "holds half a surrogate pair": [26],
    }  # fmt: skip
    assert f"left out: 3 empty ({path}, line 5; {path}, line 21; {path}, line 22)" in str(report)
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: not JSON"):
        run(tmp_path, tokenizer, path, workers=workers, strict=True, overwrite=True)
    assert len(documents(tmp_path / "out" / "c_text_document")) == 20  # the old pair is untouched


def test_folders(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 10)
    folder = tmp_path / "in"
    files = {"b.py": b"b = 1\r\n", "a/z.py": b"z = 2\n", "a/c.txt": b"c", "a.py": b"\xef\xbb\xbfa = 3",
             "e.py": b"", "l.py": b"\xe4", ".h.py": b"hidden", ".git/x.py": b"x", "__pycache__/x.py": b"x",
             "g.txt.gz": gzip.compress(b"packed"), "j.jsonl": as_lines(["one", "two"])}  # fmt: skip
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    report = run(tmp_path, tokenizer, folder, suffixes=[".py"])
    prefix = tmp_path / "out" / "c_text_document"
    assert [tokenizer.decode(ids) for ids in documents(prefix)] == ["z = 2\n", "a = 3", "b = 1\r\n"]
    assert report.problems.places == {"empty": [f"{folder}/e.py"], "not UTF-8": [f"{folder}/l.py"]}
    run(tmp_path, tokenizer, folder, overwrite=True, workers=2)
    assert [tokenizer.decode(ids) for ids in documents(prefix)] == [
        "c", "z = 2\n", "a = 3", "b = 1\r\n", "packed", "one", "two"
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"holds no file ending in \.rs"):
        run(tmp_path, tokenizer, folder, suffixes=[".rs"])


@pytest.mark.parametrize("chunk_bytes", [7, 64, 1 << 20])
def test_documents_within_a_text_file(tmp_path, tokenizer, chunk_bytes, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\n  first\nparagraph\n\n\nsecond\r\n\r\n \t\n  third \n  \nfourth\n\n")
    prefix = tmp_path / "out" / "c_text_document"
    run(tmp_path, tokenizer, path, split_on="blank-line")
    assert [tokenizer.decode(ids) for ids in documents(prefix)] == [
        "  first\nparagraph", "second", "  third ", "fourth"
    ]  # fmt: skip
    path.write_bytes(b"one\n\ntwo\r\n three ")
    report = run(tmp_path, tokenizer, path, split_on="line", overwrite=True)
    assert [tokenizer.decode(ids) for ids in documents(prefix)] == ["one", "two", " three "]
    assert report.problems.places == {"empty": [f"{path}, line 2"]}


def test_several_keys_stay_in_step(tmp_path, tokenizer):
    records = [
        {"q": "one", "a": "1"},
        {"q": "two", "a": ""},
        {"q": "", "a": ""},
        {"q": "x"},
        {"q": "f", "a": "4"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    report = run(tmp_path, tokenizer, tmp_path / "a.jsonl", keys=["q", "a"], append_eod=True)
    questions, answers = (IndexedDataset(tmp_path / "out" / f"c_{key}_document") for key in "qa")
    assert report.num_documents == 3 and report.problems.counts == {"empty": 1, "no key 'a'": 1}
    assert questions.document_indices.tolist() == [0, 1, 2, 3]
    assert answers.document_indices.tolist() == [0, 1, 1, 2]  # the empty answer holds its place
    (tmp_path / "b.txt").write_text("plain")
    with pytest.raises(DataError, match=r"b\.txt is plain text and has no keys q, a"):
        run(tmp_path, tokenizer, tmp_path / "b.txt", keys=["q", "a"], overwrite=True)


def test_a_finished_pair_is_kept_and_leftovers_are_removed(tmp_path, tokenizer):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_bytes(as_lines(["a"]))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    out.mkdir()
    (out / f"c_text_document.bin.{gone.pid}.tmp").write_bytes(b"half")
    (out / "c_text_document.bin").write_bytes(b"tokens whose index was never written")
    run(tmp_path, tokenizer, path)
    assert sorted(os.listdir(out)) == [
        "c_text_document.bin",
        "c_text_document.checksums.json",
        "c_text_document.idx",
    ]
    with pytest.raises(DataError, match="exists already; --overwrite"):
        run(tmp_path, tokenizer, path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_run_leaves_nothing(tmp_path, tokenizer, workers, texts):
    broken = tmp_path / "a.jsonl.gz"
    broken.write_bytes(gzip.compress(as_lines(texts))[:-200])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read"):
        run(tmp_path, tokenizer, broken, workers=workers)
    (tmp_path / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(DataError, match=r"no document to write\n2 empty"):
        run(tmp_path, tokenizer, tmp_path / "empty.jsonl", workers=workers)
    assert os.listdir(tmp_path / "out") == []
    with pytest.raises(DataError, match="no such file or folder"):
        run(tmp_path, tokenizer, tmp_path / "none")


def _kill_self_at_seven(item: int) -> int:
    if item == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def test_a_killed_worker_is_an_error():
    with (
        pytest.raises(DataError, match="a worker process died"),
        map_in_order(_kill_self_at_seven, range(1000), 2) as results,
    ):
        list(results)


def test_few_items_are_in_flight():
    taken = 0

    def items():
        nonlocal taken
        for number in range(200):
            taken = number
            yield number

    with map_in_order(abs, items(), 2) as results:
        for position, (item, result) in enumerate(results):
            assert item == result == position
            assert taken - position <= 6
    assert taken == 199


@pytest.fixture
def long_run(tmp_path, tokenizer):
    """Starts the tool, in its own process group, on an input that takes it many seconds."""
    tokenizer.save(tmp_path / "tokenizer")
    block = as_lines(["The quick brown fox. " * 400]) * 120
    with (tmp_path / "a.jsonl").open("wb") as file:
        for _ in range(200):
            file.write(block)
    command = [sys.executable, TOOL, "--input", tmp_path / "a.jsonl", "--output-prefix",
               tmp_path / "out" / "c", "--tokenizer", tmp_path / "tokenizer", "--workers", "2"]  # fmt: skip
    yield lambda: subprocess.Popen(
        command,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore SIGINT, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    (tmp_path / "a.jsonl").unlink()


def wait_for_output(out: Path) -> None:
    wait_for(lambda: any(path.stat().st_size for path in out.glob("*.tmp")), what="the tool wrote nothing")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(tmp_path, long_run, number):
    process = long_run()
    wait_for_output(tmp_path / "out")
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    ends = {
        signal.SIGINT: (130, "interrupted\n"),
        signal.SIGTERM: (-signal.SIGTERM, "ended by SIGTERM; there was nothing to save\n"),
    }
    assert (process.returncode, errors) == ends[number]
    assert os.listdir(tmp_path / "out") == []


def test_workers_end_when_the_run_is_killed(tmp_path, long_run):
    others = children()
    process = long_run()
    wait_for_output(tmp_path / "out")
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(workers) == 2
    process.kill()
    process.wait()
    assert leftovers(others, 20) == {}, "a worker outlives its parent"


def test_the_tool_takes_the_spellings_of_its_ancestors(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "t")
    (tmp_path / "a.jsonl").write_bytes(as_lines(["abc"], body="xyz"))

    def tool(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(TOOL), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    fleetx = tool("--input_path", "a.jsonl", "--output_prefix", "f", "--json_key", "body",
                  "--append_eos", "--model_name", "t", "--workers", "1")  # fmt: skip
    megatron = tool("--input", "a.jsonl", "--output-prefix", "m", "--json-keys", "text", "body",
                    "--append-eod", "--vocab-file", "t/vocab.json", "--merge-file", "t/merges.txt",
                    "--workers", "2")  # fmt: skip
    assert fleetx.returncode == megatron.returncode == 0, fleetx.stderr + megatron.stderr
    assert "1 document, " in fleetx.stdout and "bytes per token" in fleetx.stdout
    eod = tokenizer.eod_id
    assert documents(tmp_path / "f_body_document") == [[*tokenizer.encode("xyz"), eod]]
    assert documents(tmp_path / "m_body_document") == documents(tmp_path / "f_body_document")
    assert documents(tmp_path / "m_text_document") == [[*tokenizer.encode("abc"), eod]]
    again = tool("--input", "a.jsonl", "--output-prefix", "m", "--tokenizer", "t")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1) and "exists already" in again.stderr
    neither = tool("--input", "a.jsonl", "--output-prefix", "n")
    assert neither.returncode == 2 and "--tokenizer, or --vocab-file and --merge-file" in neither.stderr
