"""The first samples of a plugin's data set are checked before a run begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppfleetx.config import registries
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.data.build import build_dataset

NANO = Path(__file__).resolve().parents[2] / "ppfleetx/configs/debug/gpt_nano.yaml"
LENGTH = 32


class Mine:
    """Zeros, which ``change`` may spoil."""

    fingerprint, samples_per_epoch = "mine", 8.0

    def __init__(self, change: Callable[[dict[str, Any], int], Any], size: int = 8) -> None:
        self.change, self.size = change, size

    def __len__(self) -> int:
        return self.size

    def describe(self) -> str:
        return "mine"

    def __getitem__(self, index: int) -> Any:
        ids, mask = np.zeros(LENGTH, np.int64), np.full(LENGTH, index != -1, np.float32)
        sample = {"tokens": ids, "labels": ids, "position_ids": ids, "loss_mask": mask, "sample_ids": index}
        return self.change(sample, index)


def built(monkeypatch: pytest.MonkeyPatch, dataset: Mine, mode: Any) -> Any:
    monkeypatch.setattr(registries.DATASETS, "_entries", {**registries.DATASETS._entries})
    registries.DATASETS.register("Mine", lambda cfg, mode: dataset)
    names = [f"Data.{part}.dataset.name=Mine" for part in ("Train", "Eval")]
    return build_dataset(load_config(NANO, names), mode)


@pytest.mark.parametrize("mode", ["Train", "Eval"])
def test_a_sound_one_is_taken(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    mine = Mine(lambda sample, index: sample | {"more": np.zeros(3)})
    assert built(monkeypatch, mine, mode) is mine


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda sample, index: tuple(sample.values()), "sample 0 .*must be a mapping .*, not tuple"),
        (lambda sample, index: {"tokens": sample["tokens"]}, "it lacks labels, position_ids, loss_mask"),
        (lambda sample, index: sample | {"labels": np.zeros(9)}, r"labels .*the shape \[32\] .*, not \[9\]"),
        (lambda sample, index: sample | {"tokens": sample["tokens"] + 512}, "ids from 512 to 512.* 0 to 511"),
        (lambda sample, index: sample | {"tokens": sample["tokens"] - 1}, "ids from -1 to -1"),
        (lambda sample, index: sample | {"loss_mask": np.ones(LENGTH)}, "sample -1 .*must be zeros"),
    ],
)
def test_what_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch, change: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"Data\.Eval\.dataset\.name = 'Mine': .*{said}"):
        built(monkeypatch, Mine(change), "Eval")


def test_training_does_not_ask_for_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_its_samples(sample: dict[str, Any], index: int) -> dict[str, Any]:
        if index < 0:
            raise IndexError(index)
        return sample

    mine = Mine(only_its_samples)
    assert built(monkeypatch, mine, "Train") is mine


def test_an_empty_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has no samples"):
        built(monkeypatch, Mine(lambda sample, index: sample, size=0), "Train")


def test_a_task_of_ones_own_may_read_other_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registries.MODULES, "target", lambda name: Mine)
    mine = Mine(lambda sample, index: {"tokens": sample["tokens"], "labels": np.array(1)})
    assert built(monkeypatch, mine, "Train") is mine
