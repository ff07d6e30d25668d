"""A small valid configuration as a file, a way to write others, and the message of one that is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config

SMALL = """\
Global:
  local_batch_size: 8
  micro_batch_size: 4
Engine:
  max_steps: 100
Model:
  vocab_size: 1000
  hidden_size: 64
  num_layers: 4
  num_attention_heads: 4
Data:
  Train:
    dataset:
      max_seq_len: 128
      split: [8, 1, 1]
Optimizer:
  lr: {max_lr: 2e-5}
"""


def refusal(path: Path | str, overrides: Sequence[str] = (), **options: Any) -> str:
    """What is said of a configuration that cannot be loaded."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, **options)
    return str(caught.value)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file of the given name below the test's directory."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def small(write: Callable[[str, str], Path]) -> Path:
    """The file ``small.yaml``."""
    return write("small.yaml", SMALL)
