"""Weights of Hugging Face's models under our names and back, whole; programs go through a file at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ppfleetx.conversion.huggingface.tensor_mapping import rules

GetTensor = Callable[[str], np.ndarray]


def hf_to_canonical(hf_config: Mapping[str, Any], get_tensor: GetTensor) -> Iterator[tuple[str, np.ndarray]]:
    """All parameters under our names; ``hf_config`` is the contents of ``config.json``."""
    for rule in rules(hf_config):
        yield rule.ours, rule.join(*map(get_tensor, rule.theirs))


def canonical_to_hf(hf_config: Mapping[str, Any], get_tensor: GetTensor) -> Iterator[tuple[str, np.ndarray]]:
    """All parameters under Hugging Face's names."""
    for rule in rules(hf_config):
        for index, name in enumerate(rule.theirs):
            yield name, rule.split(get_tensor(rule.ours), index)
