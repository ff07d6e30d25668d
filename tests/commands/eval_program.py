"""Offline evaluation as a rank runs it, but for starting Paddle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppfleetx.commands.evaluate import evaluate
from ppfleetx.data.tasks.evaluation import LastWords, SlidingWindows, Window
from tests.models.gpt_builders import GOLDENS

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig
    from ppfleetx.distributed.context import ParallelContext

HF = json.loads((GOLDENS / "hf_scores.json").read_text())
MODELS = list(HF["models"])
CLOZE = {"Offline_Eval.cloze_eval": True, "Offline_Eval.max_seq_len": HF["cloze_length"]}


def sliding(num_tokens: int, length: int, stride: int) -> SlidingWindows:
    """Windows over the golden text; 7 words."""
    return SlidingWindows(np.array(HF["ids"][:num_tokens]), length, stride, num_words=7, detokenizer="none")


def last_words(model: str) -> LastWords:
    """The golden examples, cut to the windows' length as the reader of jsonl files cuts them."""
    return LastWords(
        [
            Window(
                np.array([*each["context"], *each["target"]])[-HF["cloze_length"] - 1 :], len(each["target"])
            )
            for each in HF["models"][model]["cloze"]
        ]
    )


def started(config: str, overrides: Mapping[str, Any], world: int) -> tuple[RunConfig, ParallelContext]:
    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.init import init_distributed

    options = [f"{key}={value}" for key, value in overrides.items()]
    cfg = load_config(Path(config), options, world_size=world)
    return cfg, init_distributed(cfg)


def score(config: str, overrides: Mapping[str, Any], case: list[int] | str, world: int = 1) -> dict[str, Any]:
    """The result for ``case``: [tokens, length, stride] of the golden text, or the model of the examples.

    Texts stand for numbers that are not finite, which JSON has not.
    """
    windows = last_words(case) if isinstance(case, str) else sliding(*case)
    result, _ = evaluate(*started(config, overrides, world), windows)
    return {
        name: repr(value) if isinstance(value, float) else value for name, value in asdict(result).items()
    }


def loss_on_corpus(config: str, overrides: Mapping[str, Any], world: int = 1) -> str:
    """What tools/eval.py finds on Data.Eval."""
    from ppfleetx.commands.train import evaluate

    [record] = evaluate(*started(config, overrides, world))
    return f"{record.loss!r} {record.ppl!r}"
