"""Losses told apart: by source of a blend, and by evaluation set."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.data.indexed import IndexedDatasetWriter
from tests.e2e.conftest import Tool, losses, records


@pytest.fixture(scope="module")
def both(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of two corpora: one that can be learnt, and noise."""
    directory = tmp_path_factory.mktemp("both")
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", directory)
    rng = np.random.default_rng(1)
    with IndexedDatasetWriter(directory / "noise", np.uint16) as writer:
        for _ in range(100):
            writer.add_document(rng.integers(0, 509, 80).astype(np.uint16), [80])
    return directory


def test_a_blend_tells_the_loss_of_each_corpus(both: Path, tmp_path: Path) -> None:
    tool, keys = Tool(both), ["Engine.max_steps=4", "Engine.eval_freq=0"]
    silent = tool.run(tmp_path / "silent", *keys)
    assert silent.returncode == 0, silent.stderr
    done = tool.run(tmp_path / "told", *keys, "Engine.log_source_loss=True")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "told") == losses(tmp_path / "silent")
    assert "sources" not in records(tmp_path / "silent", "train")[0]
    for record in records(tmp_path / "told", "train"):
        sources = record["sources"]
        assert sources.keys() <= {"toy", "noise"}
        assert sum(s["tokens"] for s in sources.values()) == record["tokens"]
        total = sum(s["loss"] * s["tokens"] for s in sources.values())
        assert total / record["tokens"] == pytest.approx(record["loss"], rel=1e-6)
    told = records(tmp_path / "told", "train")[0]["sources"]
    shown = ", ".join(f"{name}: {source['loss']:.9f}" for name, source in told.items())
    assert f"loss per source at global step 1, {shown}\n" in done.stdout
