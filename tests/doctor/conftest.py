"""A corpus, a configuration that reads it, and the rows of a check by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from ppfleetx.config.loader import load_config
from ppfleetx.data.indexed_dataset import IndexedDatasetWriter
from ppfleetx.doctor.results import Row, Target

NANO = Path(__file__).resolve().parents[2] / "ppfleetx/configs/debug/gpt_nano.yaml"


def by_name(rows: Iterable[Row]) -> dict[str, Row]:
    """The last row of each name."""
    return {row.name: row for row in rows}


def write_corpus(prefix: Path, seed: int = 0) -> Path:
    tokens = np.random.default_rng(seed).integers(0, 500, (60, 40))
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for row in tokens:
            writer.add_document(row, [row.size])
    return prefix


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "toy")


@pytest.fixture
def target(prefix: Path, tmp_path: Path) -> Callable[..., Target]:
    """``target("Section.key=value", ...)``: the nano run on the corpus."""

    def make(*overrides: str, **fields: object) -> Target:
        given = {f"Data.{mode}.dataset.input_dir": str(prefix) for mode in ("Train", "Eval")}
        given["Engine.save_load.output_dir"] = str(tmp_path / "output")
        given |= dict(override.split("=", 1) for override in overrides)
        return Target(load_config(str(NANO), [f"{key}={value}" for key, value in given.items()]), **fields)

    return make
