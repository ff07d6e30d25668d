"""Command lines around corpora: merge, convert, build the index ahead."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from ppfleetx.data.indexed import IndexedDataset

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_merge(toy_prefix: str, write_corpus, toy_documents, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    write_corpus(toy_documents[:50], "parts/a")
    write_corpus(toy_documents[50:], "parts/b")
    done = run("merge_datasets.py", "--input", tmp_path / "parts", "--output-prefix", tmp_path / "all")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 corpora, 137 documents, 6,903 tokens" in done.stdout
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"all.{suffix}").read_bytes() == Path(f"{toy_prefix}.{suffix}").read_bytes()


def test_convert(tmp_path: Path) -> None:
    np.save(tmp_path / "x_ids.npy", np.arange(5, dtype=np.int32))
    np.savez(tmp_path / "x_idx.npz", lens=np.array([2, 3], np.int32), docs=np.array([0, 1, 2]))
    done = run("convert_fleetx_data.py", "--input", tmp_path / "x", "--output-prefix", tmp_path / "y")
    assert (done.returncode, done.stderr) == (0, "")
    assert IndexedDataset(tmp_path / "y").get(1).tolist() == [2, 3, 4]


def test_the_index_is_built_ahead(toy_prefix: str, tmp_path: Path) -> None:
    dataset = {
        "input_dir": toy_prefix,
        "split": [80, 20, 0],
        "max_seq_len": 32,
        "cache_dir": str(tmp_path / "maps"),
    }
    tree = {
        "Global": {"global_batch_size": 4, "micro_batch_size": 4},
        "Engine": {"max_steps": 5, "eval_iters": 2},
        "Model": {"vocab_size": 50304, "hidden_size": 64, "num_layers": 1, "num_attention_heads": 4},
        "Data": {"Train": {"dataset": dataset}, "Eval": {"dataset": dataset}, "Test": None},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    outputs = [run("build_index.py", "-c", tmp_path / "c.yaml") for _ in range(2)]
    assert [o.returncode for o in outputs] == [0, 0], outputs[0].stderr
    hashes = [
        re.findall(r"(Train|Eval): \d+ samples prepared, order ([0-9a-f]{32})", o.stdout) for o in outputs
    ]
    assert hashes[0] == hashes[1] and len(dict(hashes[0])) == 2
    assert "Test: not configured" in outputs[0].stdout
    assert len(list((tmp_path / "maps").glob("*.npy"))) == 6


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("merge_datasets.py", ("--input", "nowhere", "--output-prefix", "out")),
        ("convert_fleetx_data.py", ("--input", "nowhere", "--output-prefix", "out")),
        ("build_index.py", ("-c", "nowhere.yaml")),
    ],
)
def test_a_mistake_is_one_message(tool: str, arguments: tuple[str, ...]) -> None:
    done = run(tool, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
