"""Damaged MindFormers configurations, command lines and rank tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config, load_tree
from ppfleetx.dialects.mindformers import launch
from ppfleetx.dialects.mindformers.dialect import run_of
from ppfleetx.dialects.mindformers.rank_table import merged, table_of_host
from ppfleetx.dialects.translation import Translation
from tests.dialects.mutations import mutated_text, mutated_words, outcome

GPT2 = Path(__file__).resolve().parents[2] / "projects/mindformers/configs/gpt2"
CASES = 150


def translated(argv: Sequence[str]) -> Translation:
    """The translation, which printed and read again is the same configuration."""
    result = run_of(argv).translation
    cfg = load_tree(result.tree(), result.warnings)
    path = Path(argv[1]).parent / "ours.yaml" if argv[:1] == ["--config"] else None
    if path is not None and path.parent != GPT2:
        path.write_text(result.yaml(), "utf-8")
        assert load_config(path) == cfg
    return result


def whole_file() -> str:
    """The blocks of a configuration in one file."""
    parts = ["task_config/context", "task_config/runner", "task_config/gpt2_dataset", "model_config/gpt2"]
    text = "\n".join((GPT2 / f"{part}.yaml").read_text() for part in parts)
    return f"{text}\nseed: 1\nrun_mode: train\nuse_parallel: True\noutput_dir: out\n"


def test_files(tmp_path: Path) -> None:
    path, text = tmp_path / "run.yaml", whole_file()
    said = []
    for number in range(CASES):
        path.write_bytes(mutated_text(text, number).encode("utf-8", "surrogatepass"))
        said.append(outcome(lambda: translated(["--config", str(path)])))
    messages = [one for one in said if one != "accepted"]
    assert CASES // 5 < len(messages) < CASES
    assert all("run.yaml:" in one for one in messages), [one for one in messages if "run.yaml:" not in one]


def test_command_lines(tmp_path: Path) -> None:
    words = [
        *("--config", str(GPT2 / "run_gpt2_13b.yaml"), "--run_mode", "train", "--device_target", "Ascend"),
        *("--dataset_dir", "/data/wiki", "--seed", "3", "--use_parallel=True", "--epochs", "2"),
        *("--batch_size", "4", "--load_checkpoint", "C", "--mode", "0", "--profile", "False"),
        *("--options", "parallel_config.model_parallel=4", "optimizer.betas=[0.9,0.95]", "seed=3"),
    ]
    said = [outcome(lambda n=number: run_of(mutated_words(words, n)).translation) for number in range(CASES)]
    messages = [one for one in said if one != "accepted"]
    assert CASES // 5 < len(messages) < CASES


def test_rank_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "expected_device", lambda wanted: "cpu")
    table = merged([table_of_host(range(4), f"10.0.0.{number}") for number in (1, 2)])
    text, path = json.dumps(table.as_json(), indent=1), tmp_path / "table.json"
    words = [str(path), str(GPT2 / "run_gpt2.yaml"), "[0,4]", "train", "8"]
    refused = 0
    for number in range(CASES):
        path.write_bytes(mutated_text(text, number).encode("utf-8", "surrogatepass"))
        arguments = words if number % 2 else mutated_words(words, number)
        try:
            launch.launch_of(arguments, {})
        except ConfigError as error:
            assert error.key or error.place, error
            refused += 1
    assert CASES // 2 < refused < CASES
